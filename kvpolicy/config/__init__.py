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
from kvpolicy.config.source import Place, from_python
from kvpolicy.errors import PolicyFileError, nearest
from kvpolicy.policy import Policy

__all__ = ["describe", "dump", "load", "schema", "to_yaml"]


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
        overrides: `name`, `description`, `score`, `select`, `prefill`, `decode` or `store`, as a policy file would hold
            them.

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
    given = {name: from_python(value, Place(f"argument {name}=")) for name, value in overrides.items()}

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
