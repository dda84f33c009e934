"""Policy files: YAML to `Policy` and back, and their JSON schema."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvpolicy.config.build import build
from kvpolicy.config.dump import dump, to_yaml
from kvpolicy.config.extend import KEYS, Document, find, lay_keywords, resolve
from kvpolicy.config.order import explained
from kvpolicy.config.schema import schema
from kvpolicy.config.source import Item, Place, from_python
from kvpolicy.errors import PolicyFileError, nearest
from kvpolicy.policy import Policy

__all__ = ["describe", "dump", "load", "load_at", "schema", "to_yaml"]


def load(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    budget: int | float | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Policy:
    """Return the policy that `source` declares, with the keywords laid over it.

    Args:
        source: the name of a registered policy, the path of a policy file (it has a '/' or ends in .yaml), or a
            mapping as such a file would hold.
        budget: whole tokens (512), a share of the tokens seen (0.25), or a mapping.
        overrides: `name`, `description`, `score`, `select`, `evicted`, `prefill`, `decode` or `store`, as a policy
            file would hold them.

    Raises:
        PolicyFileError: when anything in it is unknown, of a wrong type or out of range; the message says where.

    >>> policy = load({"name": "noise", "score": "random", "budget": 64}, budget=0.5, select={"recent": 2})
    >>> policy.budget.keep, policy.select
    (0.5, TopK(sinks=4, recent=2))
    """
    known = [name for name in KEYS if name != "extends"]
    for name in overrides:
        if name not in known:
            raise PolicyFileError(f"unknown argument {name!r} of load().{nearest(name, known)}")
    if budget is not None:
        overrides = {"budget": budget, **overrides}
    return _load(source, {name: from_python(value, Place(f"argument {name}=")) for name, value in overrides.items()})


def load_at(source: str, budget: int | float | None, place: str) -> Policy:
    """Return the policy that `source` declares, at a budget that did not come as an argument.

    Args:
        source: as `load` takes it.
        budget: None for the policy's own.
        place: where the budget was written, for its errors.

    Raises:
        PolicyFileError: as of `load`.

    >>> load_at("snapkv", 0, "--budget")
    Traceback (most recent call last):
    ...
    kvpolicy.errors.PolicyFileError: --budget: budget.tokens: expected a number greater than or equal to 1, got 0
    """
    return _load(source, {} if budget is None else {"budget": from_python(budget, Place(place))})


def _load(source: str | os.PathLike[str] | Mapping[str, Any], given: dict[str, Item]) -> Policy:
    def made(document: Document) -> Policy:
        whole = resolve(document)
        return build(lay_keywords(whole, replace(whole, value=given)))

    document = find(source)
    try:
        return made(document)
    except PolicyFileError as error:
        raise explained(error, document, made) from None


def describe(name: str) -> str:
    """Return the one-line description of a registered policy, as its file or what that extends gives it.

    >>> describe("random")
    'Keeps tokens by chance; the baseline that every method must beat'
    """
    description = resolve(find(name)).value.get("description")
    return "" if description is None else str(description.value)
