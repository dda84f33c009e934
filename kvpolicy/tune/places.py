"""Places: where a setting stands in a policy, as errors write it, such as ``score.diversity.weights[0]``."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from kvpolicy.config.extend import mapping
from kvpolicy.config.source import Item, fault, show

Steps = tuple[str | int, ...]
"""The names and list indices on the way from the top of a policy to a setting."""

_PLACE = re.compile(r"[\w-]+(?:\.[\w-]+|\[\d+\])*")


def steps(place: str) -> Steps | None:
    """Return the steps to a place; None where the text is none.

    >>> steps("score.inputs[1].window"), steps("score..window")
    (('score', 'inputs', 1, 'window'), None)
    """
    if not _PLACE.fullmatch(place):
        return None
    return tuple(int(step) if step.isdigit() else step for step in re.findall(r"[\w-]+", place))


def put(whole: Item, way: Steps, value: Item) -> Item:
    """Return `whole` with `value` at the end of the way, instead of what is there.

    A bare name on the way counts as the mapping that it stands for. Names that are not there are put in: building the
    policy says whether they may stand there.

    Raises:
        PolicyFileError: when the way leads through something that is no mapping or list, or past the end of a list.

    >>> from kvpolicy.config.source import Place, from_python
    >>> whole = from_python({"score": {"inputs": ["snapkv", "value-norm"]}}, Place("example"))
    >>> put(whole, ("score", "inputs", 0, "window"), from_python(8, Place("example"))).plain
    {'score': {'inputs': [{'type': 'snapkv', 'window': 8}, 'value-norm']}}
    """
    return _put(whole, way, value, "")


def _put(item: Item, way: Steps, value: Item, walked: str) -> Item:
    if not way:
        return value
    first, rest = way[0], way[1:]
    written = value.key or value.place
    if isinstance(first, int):
        if not isinstance(item.value, list) or first >= len(item.value):
            expected = f"{walked}: expected a list of more than {first} in the policy"
            raise fault((written, f"{expected}, got {show(item.plain)}"))
        below = list(item.value)
        below[first] = _put(below[first], rest, value, f"{walked}[{first}]")
        return replace(item, value=below)
    named = mapping(item)
    if named is None:
        raise fault((written, f"{walked}: expected a mapping in the policy, got {show(item.plain)}"))
    there = named.get(first, Item({}, written, written))
    return replace(item, value={**named, first: _put(there, rest, value, f"{walked}.{first}".lstrip("."))})


def value_at(plain: Any, way: Steps) -> Any:
    """Return what is at the end of the way in a policy as `kvpolicy.config.dump` gives it; None where nothing is.

    >>> value_at({"score": {"inputs": [{"type": "snapkv", "window": 8}]}}, ("score", "inputs", 0, "window"))
    8
    """
    for step in way:
        if isinstance(plain, dict):
            plain = plain.get(step)
        elif isinstance(plain, list) and isinstance(step, int) and step < len(plain):
            plain = plain[step]
        else:
            return None
    return plain
