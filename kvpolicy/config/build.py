"""A resolved policy file made into a `Policy`: each name becomes a plugin, children before parents."""

from __future__ import annotations

import os
import typing
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path as FilePath
from typing import Any, TypeVar

from kvpolicy.config.source import Item, Place, fault, show
from kvpolicy.contract import WHAT
from kvpolicy.errors import NOTHING, PolicyError, PolicyFileError, SettingError, nearest
from kvpolicy.fields import mentions
from kvpolicy.plugin import child_fields
from kvpolicy.policy import Budget, Decode, Policy
from kvpolicy.registry import registry

T = TypeVar("T")
Path = tuple[str, ...]
Builder = Callable[[Item, Path], object]


def build(whole: Item) -> Policy:
    """Return the policy that a resolved mapping declares.

    Raises:
        PolicyFileError: when a name is unknown or a setting is wrong; with the place and the nearest valid name.
    """
    builders: dict[str, Builder] = {
        "score": partial(_plugin, "score"),
        "budget": _budget,
        "select": partial(_plugin, "selector"),
        "evicted": partial(_plugin, "evicted"),
        "decode": _decode,
        "store": partial(_plugin, "store"),
    }
    return make(Policy, whole, (), builders)


def _budget(item: Item, path: Path) -> Budget:
    return make(Budget, item, path, {name: partial(_plugin, name) for name in ("layers", "heads")})


def _decode(item: Item, path: Path) -> Decode | None:
    if item.value is None:
        return None
    if not isinstance(item.value, dict):
        raise fault((item.place, f"decode: expected a mapping (every: 64) or null, got {show(item.plain)}"))
    return make(Decode, item, path, {})


def _plugin(kind: str, item: Item, path: Path) -> object:
    """Return the plugin that a bare name or a mapping with `type` stands for."""
    where = ".".join(path)
    named = item.value.get("type") if isinstance(item.value, dict) else item
    if named is None or not isinstance(named.value, str):
        found = item if named is None else named
        expected = f"expected a {WHAT[kind]}: its name, or a mapping with its name as 'type'"
        known = nearest("", registry().names(kind))
        raise fault((found.place, f"{where}: {expected}, got {show(found.plain)}.{known}"))
    try:
        cls = registry().get(kind, named.value).value
    except PolicyError as error:
        raise fault((named.place, f"{where}: {error}")) from None
    below = {name: part for name, part in item.value.items() if name != "type"} if named is not item else {}
    builders = {name: _child(cls, name) for name in child_fields(cls)}
    return make(cls, Item(below, item.place, item.key), path, builders)


def _child(cls: type, name: str) -> Builder:
    """Return what builds the field `name` of `cls`: one part of the score, or a list of them."""
    hint = typing.get_type_hints(cls)[name]
    return _plugins if typing.get_origin(hint) is tuple else partial(_plugin, "score")


def _plugins(item: Item, path: Path) -> list[object]:
    if not isinstance(item.value, list):
        where = ".".join(path)
        raise fault((item.place, f"{where}: expected a list of scorers or combiners, got {show(item.plain)}"))
    return [_plugin("score", part, (*path[:-1], f"{path[-1]}[{at}]")) for at, part in enumerate(item.value)]


def make(cls: type[T], item: Item, path: Path, builders: Mapping[str, Builder]) -> T:
    """Return an instance of `cls` with the settings in `item`, those with a builder built by it.

    Raises:
        PolicyFileError: when a setting is wrong; with the place of each.
    """
    settings: dict[str, Any] = {}
    for name, part in item.value.items():
        settings[name] = builders[name](part, (*path, name)) if name in builders else _given(cls, name, part)
    try:
        return cls(**settings)
    except SettingError as error:
        raise _located(error, item, path) from None


def _given(cls: type, name: str, item: Item) -> object:
    """Return the value of a setting; a path that a file gives is relative to that file."""
    field = cls.__pydantic_fields__.get(name)  # type: ignore[attr-defined]
    names_a_file = field is not None and mentions(field.annotation, (FilePath,))
    if names_a_file and item.place.file and isinstance(item.value, str):
        return os.path.abspath(FilePath(item.place.source).parent / item.value)
    return item.plain


def _located(error: SettingError, item: Item, path: Path) -> PolicyFileError:
    """Return the error with the place of each problem, as near as `item` knows it."""
    problems: list[tuple[Place, str]] = []
    for location, kind, message, found in error.problems:
        at, where = item, ".".join(path)
        for part in location:
            if isinstance(at.value, dict):
                where = f"{where}.{part}".lstrip(".")
                if part not in at.value:
                    break
                at = at.value[part]
            elif isinstance(at.value, list) and isinstance(part, int):
                where += f"[{part}]"
                at = at.value[part]
            else:
                # Below a scalar, pydantic goes on with the types it tried.
                break
        place = at.key if kind == "unexpected_keyword_argument" and at.key else at.place
        text = message if found is NOTHING else f"{message}, got {show(found)}"
        if kind == "unexpected_keyword_argument" and path[:1] == ("score",):
            text += _of_a_combiner(str(location[-1]))
        problems.append((place, f"{where}: {text}" if where else text))
    return fault(*problems)


def _of_a_combiner(setting: str) -> str:
    """Return a hint where an unknown setting is a child of some combiners."""
    having = [entry.name for entry in registry().entries("combiner") if setting in child_fields(entry.value)]
    if not having:
        return ""
    return f" It is a part of a combiner: add type: {' or '.join(having)}."
