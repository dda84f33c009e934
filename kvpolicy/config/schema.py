"""The JSON schema of policy files, made from what is registered: for editors, which check and complete with it.

It is a little wider than `kvpolicy.load`: what a file extends is not looked up, so a mapping may lack its `type` and a
plugin may lack settings that a base would give.
"""

from __future__ import annotations

import typing
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from kvpolicy.config.docstrings import arguments, summary
from kvpolicy.contract import INHERITED, WHAT, Entry
from kvpolicy.plugin import child_fields
from kvpolicy.policy import Budget, Decode, Policy
from kvpolicy.registry import registry

PLACES = {
    "score": ("scorer", "combiner"),
    "layers": ("layers",),
    "heads": ("heads",),
    "selector": ("selector",),
    "evicted": ("evicted",),
    "store": ("store",),
}
"""The kinds that may stand in each place of a policy file."""


def schema() -> dict[str, Any]:
    """Return the JSON schema, draft 2020-12, of a policy file.

    >>> sorted(schema()["properties"])
    ['budget', 'decode', 'description', 'evicted', 'extends', 'name', 'prefill', 'score', 'select', 'store']
    """
    definitions: dict[str, Any] = {"budget": _budget()}
    for place, kinds in PLACES.items():
        entries = [entry for kind in kinds for entry in registry().entries(kind)]
        definitions[place] = _place(place, entries)
        definitions |= {_key(entry): plugin_schema(entry) for entry in entries}
    about = arguments(Policy)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kvpolicy policy",
        "description": summary(Policy),
        "type": "object",
        "additionalProperties": False,
        "anyOf": [{"required": ["score"]}, {"required": ["extends"]}],
        "properties": {
            "name": {"type": "string", "description": about["name"] + " Default: the name of the file."},
            "description": {"type": "string", "description": about["description"]},
            "extends": _extends(),
            "score": {"$ref": "#/$defs/score", "description": about["score"]},
            "budget": {"$ref": "#/$defs/budget", "description": about["budget"]},
            "select": {"$ref": "#/$defs/selector", "description": about["select"]},
            "evicted": {"$ref": "#/$defs/evicted", "description": about["evicted"]},
            "store": {"$ref": "#/$defs/store", "description": about["store"]},
            "prefill": _setting(Policy, "prefill"),
            "decode": {"anyOf": [_decode(), {"type": "null"}], "description": about["decode"]},
        },
        "$defs": definitions,
    }


def _extends() -> dict[str, Any]:
    one = {"anyOf": [{"enum": registry().names("policy")}, {"type": "string", "pattern": r"/|\.ya?ml$"}]}
    return {
        "description": "A policy to start from, by name or by a path relative to this file. Of a list, the first is "
        "taken whole; of each later one what its own file says is laid over that.",
        "anyOf": [*one["anyOf"], {"type": "array", "items": one, "minItems": 1}],
    }


def _budget() -> dict[str, Any]:
    settings = {name: _setting(Budget, name) for name in ("tokens", "keep")}
    about = arguments(Budget)
    settings |= {name: {"$ref": f"#/$defs/{name}", "description": about[name]} for name in ("layers", "heads")}
    return {
        "description": summary(Budget),
        "anyOf": [
            {"type": "integer", "minimum": 1, "description": about["tokens"]},
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "description": about["keep"]},
            {
                "type": "object",
                "additionalProperties": False,
                "properties": settings,
                "not": {"required": ["tokens", "keep"]},
            },
        ],
    }


def _decode() -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _setting(Decode, name) for name in ("every", "grace")},
    }


def _place(place: str, entries: list[Entry]) -> dict[str, Any]:
    """Return the schema of a place: a bare name, one plugin's mapping, or settings for what a base has there."""
    bare = [entry.name for entry in entries if not _required(entry.value)]
    laid_over: dict[str, Any] = {"type": "object", "not": {"required": ["type"]}}
    inherited: list[dict[str, Any]] = []
    if place == "score":
        inherited = [{"type": "object", "required": ["type"], "properties": {"type": {"const": INHERITED}}}]
        bare.append(INHERITED)
    refs = [{"$ref": f"#/$defs/{_key(entry)}"} for entry in entries]
    return {"title": WHAT[place], "anyOf": [{"enum": bare}, *refs, *inherited, laid_over]}


def plugin_schema(entry: Entry) -> dict[str, Any]:
    """Return the JSON schema of the mapping by which a policy file names a plugin."""
    cls = entry.value
    lines = [summary(cls), getattr(cls, "formula", ""), getattr(cls, "source", "")]
    settings = {name: _setting(cls, name) for name in cls.__pydantic_fields__}
    return {
        "title": entry.name,
        "description": "\n".join(line for line in lines if line),
        "type": "object",
        "additionalProperties": False,
        "required": ["type"],
        "properties": {"type": {"const": entry.name}, **settings},
    }


def _setting(cls: Any, name: str) -> dict[str, Any]:
    """Return the schema of one field of a plugin class: its type, bounds, default and description."""
    field = cls.__pydantic_fields__[name]
    hint = typing.get_type_hints(cls, include_extras=True)[name]
    if name in child_fields(cls):
        score = {"$ref": "#/$defs/score"}
        several = typing.get_origin(typing.get_type_hints(cls)[name]) is tuple
        found = {"type": "array", "items": score} if several else score
    else:
        found = TypeAdapter(hint).json_schema()
        if not field.is_required():
            found["default"] = to_jsonable_python(field.get_default(call_default_factory=True))
    about = field.description or arguments(cls).get(name)
    return {**found, "description": about} if about else found


def _required(cls: Any) -> list[str]:
    return [name for name, field in cls.__pydantic_fields__.items() if field.is_required()]


def _key(entry: Entry) -> str:
    return f"{entry.kind}.{entry.name}"
