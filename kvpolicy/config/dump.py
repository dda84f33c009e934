"""A `Policy` as the mapping and the YAML that a policy file holds."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import PurePath
from typing import Any

from kvpolicy.config.source import to_text
from kvpolicy.plugin import child_fields
from kvpolicy.policy import Policy


def dump(policy: Policy) -> dict[str, Any]:
    """Return the policy in full, defaults included, as plain values; `kvpolicy.load` reads it back.

    >>> from kvpolicy.config import load
    >>> dump(load({"name": "noise", "score": "random", "budget": 64}))["budget"]
    {'tokens': 64, 'layers': 'uniform', 'heads': 'uniform'}
    """
    budget = policy.budget
    size = {"keep": budget.keep} if budget.tokens is None else {"tokens": budget.tokens}
    return {
        "name": policy.name,
        "description": policy.description,
        "score": dump_plugin(policy.score),
        "budget": {**size, "layers": _short(budget.layers), "heads": _short(budget.heads)},
        "select": dump_plugin(policy.select),
        "evicted": _short(policy.evicted),
        "prefill": policy.prefill,
        "decode": None if policy.decode is None else dataclasses.asdict(policy.decode),
        "store": _short(policy.store),
    }


def dump_plugin(plugin: Any) -> dict[str, Any]:
    """Return a plugin as a mapping: its name as ``type``, then its settings and children.

    >>> from kvpolicy.selectors.top_k import TopK
    >>> dump_plugin(TopK(sinks=2))
    {'type': 'top-k', 'sinks': 2, 'recent': 8}
    """
    below = child_fields(plugin.__class__)
    values: dict[str, Any] = {"type": plugin.name}
    for field in dataclasses.fields(plugin):
        value = getattr(plugin, field.name)
        if field.name in below:
            value = [dump_plugin(part) for part in value] if isinstance(value, tuple) else dump_plugin(value)
        values[field.name] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    """Return a setting as a policy file writes it; what none can give, as it is.

    >>> _plain(((1, 2), {"b", "a"}, PurePath("x")))
    [[1, 2], ['a', 'b'], 'x']
    """
    if isinstance(value, (set, frozenset)):
        # In an order that is not by chance.
        return sorted(map(_plain, value), key=repr)
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    return str(value) if isinstance(value, PurePath) else value


def to_yaml(policy: Policy) -> str:
    """Return the policy in full as the text of a policy file.

    >>> from kvpolicy.config import load
    >>> print(to_yaml(load({"name": "noise", "score": "random", "budget": 0.5})), end="")
    name: noise
    description: ''
    score:
      type: random
      seed: 0
    budget:
      keep: 0.5
      layers: uniform
      heads: uniform
    select:
      type: top-k
      sinks: 4
      recent: 8
    evicted: drop
    prefill: whole
    decode: null
    store: plain
    """
    return to_text(dump(policy))


def _short(plugin: Any) -> dict[str, Any] | str:
    """Return a plugin without settings as its bare name."""
    values = dump_plugin(plugin)
    return values if len(values) > 1 else str(values["type"])
