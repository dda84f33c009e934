"""What a plugin is, as data: for ``kvpolicy show`` and for the pages."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from kvpolicy.config.docstrings import summary
from kvpolicy.config.schema import plugin_schema
from kvpolicy.config.source import show
from kvpolicy.contract import Entry
from kvpolicy.plugin import role_of
from kvpolicy.types import Needs


@dataclass(frozen=True)
class Setting:
    """One setting of a plugin.

    Args:
        name: what a policy file calls it.
        values: what it may be, in words; what is written as it stands is in backticks.
        required: whether it must be given.
        default: what it is where it is left out.
        description: what it does.
    """

    name: str
    values: str
    required: bool
    default: Any
    description: str


@dataclass(frozen=True)
class About:
    """What one registered plugin says of itself.

    Args:
        kind: one of `kvpolicy.contract.KINDS`.
        what: the same in words.
        name: what a policy file calls it.
        origin: the distribution (and version) or module it is from.
        description: the first line of its docstring.
        formula: one line of maths.
        source: where that is from.
        cost: time and memory; "" where it does not say.
        role: what a scorer measures; "" for others.
        needs: what it reads of a view, with its defaults where settings decide; None where they have none.
        settings: in the order of the class.
    """

    kind: str
    what: str
    name: str
    origin: str
    description: str
    formula: str
    source: str
    cost: str
    role: str
    needs: Needs | None
    settings: tuple[Setting, ...]


def about(entry: Entry) -> About:
    """Return what a plugin class says of itself.

    >>> from kvpolicy.registry import registry
    >>> found = about(registry().get("score", "snapkv"))
    >>> found.role, found.needs.queries, found.settings[0].name, found.settings[0].values
    ('importance', 32, 'window', 'a whole number from 1')
    """
    cls = entry.value
    properties = {name: one for name, one in plugin_schema(entry)["properties"].items() if name != "type"}
    return About(
        kind=entry.kind,
        what=entry.what,
        name=entry.name,
        origin=entry.origin,
        description=summary(cls),
        formula=getattr(cls, "formula", ""),
        source=getattr(cls, "source", ""),
        # A setting may be called so.
        cost="" if "cost" in properties else getattr(cls, "cost", ""),
        role=role_of(cls) if entry.kind == "scorer" else "",
        needs=_needs(cls),
        settings=tuple(_setting(cls, name, one) for name, one in properties.items()),
    )


def written(value: object) -> str:
    """Return a default as a policy file would hold it, text without quotes; "none" where nothing is.

    >>> written(("image", "video")), written(True), written(None)
    ('[image, video]', 'true', 'none')
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(written, value))}]"
    if value is None:
        return "none"
    return value if isinstance(value, str) else show(value)


def _needs(cls: Any) -> Needs | None:
    needs = getattr(cls, "needs", Needs())
    if isinstance(needs, Needs):
        return needs
    if any(field.is_required() for field in cls.__pydantic_fields__.values()):
        return None
    found: Needs = cls().needs
    return found


def _setting(cls: Any, name: str, schema: dict[str, Any]) -> Setting:
    required = cls.__pydantic_fields__[name].is_required()
    return Setting(name, _values(schema), required, schema.get("default"), schema.get("description", ""))


_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "`true`, `false`",
    "string": "text",
    "object": "a mapping",
    "array": "a list",
}
_BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}


def _values(schema: dict[str, Any]) -> str:
    """Return in words what JSON schema allows; "anything" where there are no words for it.

    >>> _values({"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}})
    'a list, each a number above 0'
    """
    if schema.get("$ref") == "#/$defs/score":
        return "a score"
    if "anyOf" in schema:
        return " or ".join(_values(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    named, items = schema.get("propertyNames", {}).get("enum"), schema.get("items")
    if named:
        keys = ", ".join(f"`{name}`" for name in named)
        return f"a mapping of {keys} to {_values(schema['additionalProperties'])}"
    if items:
        inner = _values(items)
        return "a list of scores" if inner == "a score" else f"a list, each {inner}"
    limits = [f"{word} {schema[name]:,}" for name, word in _BOUNDS.items() if name in schema]
    return " ".join([_TYPES.get(schema.get("type", ""), "anything"), *limits])


def as_json(found: About) -> dict[str, Any]:
    """Return the same as plain data, ready for JSON."""
    plain = dataclasses.asdict(found)
    return {**plain, "settings": [{**one, "values": one["values"].replace("`", "")} for one in plain["settings"]]}
