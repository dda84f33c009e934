"""Values and where they were written: YAML with the scalars of YAML 1.2, and Python mappings.

PyYAML follows YAML 1.1, where ``on`` and ``no`` are booleans, ``12:30`` is a number and ``2026-01-31`` a date. In a
policy file ``on: keys`` is a setting, so scalars follow the core schema of YAML 1.2 instead.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml

from kvpolicy.errors import PolicyFileError

MOST_VALUES = 10_000
"""How many values a file may hold once its aliases are followed; nine lines of aliases can stand for a billion."""

_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    "int": re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"),
    "float": re.compile(
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
    "str": re.compile(r"(?s:.*)\Z"),
}


@dataclass(frozen=True)
class Place:
    """Where something was written: a file, with line and column from 1, or the argument it came in by.

    >>> str(Place("my.yaml", 3, 7)), str(Place("argument budget="))
    ('my.yaml:3:7', 'argument budget=')
    """

    source: str
    line: int | None = None
    column: int | None = None
    file: bool = False

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Item:
    """A value, where it was written, and where its key was."""

    value: Any  # a scalar, a list of items or a dict of items by name
    place: Place
    key: Place | None = None

    @property
    def plain(self) -> Any:
        """The value with the items inside it replaced by theirs."""
        if isinstance(self.value, dict):
            return {name: item.plain for name, item in self.value.items()}
        return [item.plain for item in self.value] if isinstance(self.value, list) else self.value


def fault(*problems: tuple[Place, str]) -> PolicyFileError:
    """Return the error that says what is wrong at each place.

    >>> fault((Place("my.yaml", 3, 7), "budget: expected a number"))
    PolicyFileError('my.yaml:3:7: budget: expected a number')
    """
    first = problems[0][0]
    message = "\n".join(f"{place}: {text}" for place, text in problems)
    return PolicyFileError(message, file=first.source if first.file else None, line=first.line, column=first.column)


def show(found: object) -> str:
    """Return a value as a policy file would write it, cut short.

    >>> show("512"), show(True), show(None), show([1, 2])
    ('"512"', 'true', 'null', '[1, 2]')
    """
    text = json.dumps(found, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


def from_python(value: object, place: Place) -> Item:
    """Return `value` (a mapping, list or scalar) as an item, all of it written at `place`.

    Raises:
        PolicyFileError: when it holds what a policy file could not.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise fault((place, f"expected text as a key, got {show(key)}"))
        return Item({key: from_python(below, place) for key, below in value.items()}, place)
    if isinstance(value, (list, tuple)):
        return Item([from_python(below, place) for below in value], place)
    if value is None or isinstance(value, (str, bool, int, float)):
        return Item(value, place)
    raise fault((place, f"expected text, a number, true, false, a list or a mapping, got {show(value)}"))


def read(path: Path, asked: Place | None = None) -> Item:
    """Return the mapping in the YAML file at `path`.

    Args:
        path: the file.
        asked: where another file names it.

    Raises:
        PolicyFileError: when it cannot be read or does not hold one mapping.
    """
    return parse(read_text(path, asked), str(path))


def read_text(path: Path, asked: Place | None = None, *, what: str = "policy") -> str:
    """Return the text of the file at `path`, UTF-8.

    Args:
        path: the file.
        asked: where another file names it.
        what: kind of file, in errors.

    Raises:
        PolicyFileError: when it cannot be read.
    """
    place = Place(str(path), file=True)
    expected = f"expected a {what} file"
    # A pipe or a device may never end.
    if os.path.exists(path) and not os.path.isfile(path):
        raise fault((asked or place, f"{expected}, got {str(path)!r}, which is a folder, pipe or device"))
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        lines = error.object[: error.start].decode("utf-8").split("\n")
        bad = error.object[error.start]
        place = Place(str(path), len(lines), len(lines[-1]) + 1, file=True)
        raise fault((place, f"expected UTF-8 text, got the byte 0x{bad:02x}")) from None
    except FileNotFoundError:
        close = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.*")])
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise fault((asked or place, f"{expected}, found no {str(path)!r}.{hint}")) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise fault((asked or place, f"{expected}, cannot read {str(path)!r}: {reason}")) from None


def parse(text: str, file: str) -> Item:
    """Return the mapping that a YAML text holds.

    Args:
        text: the YAML.
        file: what to call it in errors.

    Raises:
        PolicyFileError: when it is not one mapping of plain YAML.

    >>> parse("on: keys", "my.yaml").plain
    {'on': 'keys'}
    """
    item = compose(text, file, "policy, a mapping")
    if not isinstance(item.value, dict):
        raise fault((item.place, f"expected a policy, a mapping, got {show(item.plain)}"))
    return item


def compose(text: str, file: str, what: str) -> Item:
    """Return the value that a YAML text holds.

    Args:
        text: the YAML.
        file: what to call it in errors.
        what: it should hold, in errors.

    Raises:
        PolicyFileError: when it is not one document of plain YAML, or an empty one.
    """
    start = Place(file, 1, 1, file=True)
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            raise fault((start, f"expected a {what}; the file is empty"))
        return _Reader(file).item(node)
    except RecursionError:
        raise fault((start, f"expected a {what}; the file nests lists or mappings too deeply")) from None
    except yaml.reader.ReaderError as error:
        lines = text[: error.position].split("\n")
        place = Place(file, len(lines), len(lines[-1]) + 1, file=True)
        raise fault((place, f"expected plain text, got the character U+{ord(text[error.position]):04X}")) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = start if mark is None else Place(file, mark.line + 1, mark.column + 1, file=True)
        doing = f"{error.context}, " if error.context else ""
        raise fault((place, f"not one YAML document: {doing}{error.problem}")) from None


def to_text(value: object) -> str:
    """Return `value` as YAML that `parse` reads back, in block style, in its own order.

    >>> print(to_text({"type": "x", "on": "keys", "seed": "512"}), end="")
    type: x
    on: keys
    seed: '512'
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=False)


class _Core:
    """The implicit scalar types of YAML 1.2's core schema; None: for any first character."""

    yaml_implicit_resolvers: ClassVar[dict[None, list[tuple[str, re.Pattern[str]]]]] = {
        None: [(_TAG + kind, pattern) for kind, pattern in _SCALARS.items() if kind != "str"]
    }


class _Loader(_Core, yaml.SafeLoader):
    pass


class _Dumper(_Core, yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Unless they are escaped, PyYAML folds what YAML 1.1 took for line breaks.
        escaped = '"' if re.search("[\x85\u2028\u2029]", data) else None
        return self.represent_scalar(f"{_TAG}str", data, style=escaped)


_Dumper.add_representer(str, _Dumper.represent_str)


class _Reader:
    """Turns the nodes of one file into items."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.values = 0

    def item(self, node: yaml.Node, above: tuple[yaml.Node, ...] = ()) -> Item:
        place = self._place(node)
        self.values += 1
        if self.values > MOST_VALUES:
            raise fault((place, f"expected at most {MOST_VALUES} values, aliases followed; the file has more"))
        if node in above:
            raise fault((place, "expected a value, got one that holds an alias to itself"))
        above = (*above, node)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return Item(dict(self._pairs(node, above)), place)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return Item([self.item(below, above) for below in node.value], place)
        kind = node.tag.removeprefix(_TAG)
        if not isinstance(node, yaml.ScalarNode) or kind not in _SCALARS:
            raise fault((place, f"expected plain YAML, got the tag {node.tag!r}; a policy file builds no objects"))
        try:
            return Item(_scalar(kind, node.value), place)
        except ValueError:
            raise fault((place, f"expected a value of type {kind}, got {show(node.value)}")) from None

    def _pairs(self, node: yaml.MappingNode, above: tuple[yaml.Node, ...]) -> Iterator[tuple[str, Item]]:
        seen: dict[str, Place] = {}
        for key_node, value_node in node.value:
            key = self.item(key_node, above)
            if not isinstance(key.value, str):
                raise fault((key.place, f"expected text as a key, got {show(key.plain)}"))
            if key.value in seen:
                first = seen[key.value]
                raise fault((key.place, f"expected each key once, got {key.value!r} again (first: line {first.line})"))
            seen[key.value] = key.place
            yield key.value, replace(self.item(value_node, above), key=key.place)

    def _place(self, node: yaml.Node) -> Place:
        return Place(self.file, node.start_mark.line + 1, node.start_mark.column + 1, file=True)


def _scalar(kind: str, text: str) -> str | int | float | bool | None:
    """Return the value that `text` stands for.

    Raises:
        ValueError: when an explicit tag claims a kind that the text is not.
    """
    if not _SCALARS[kind].match(text):
        raise ValueError(text)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        # Without a prefix it is decimal, leading zeros or not.
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan")) if kind == "float" else text
