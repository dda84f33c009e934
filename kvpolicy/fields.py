"""What the fields of a plugin class have to be, so that a policy file can give them."""

from __future__ import annotations

import inspect
import typing
from typing import Any

from pydantic import GetCoreSchemaHandler, PydanticUserError, TypeAdapter
from pydantic_core import CoreSchema, to_jsonable_python

CHILD = "kvpolicy-child"
"""What marks a field that holds scorers or combiners."""

_OWN_FORM = ("tuple", "set", "frozenset", "enum", "lax-or-strict")
"""What pydantic calls the types that a file writes as another: as a list, as a member's value, as text."""


def core_schema(cls: type, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    """Return pydantic's schema of a class: strict, but for types that a policy file can only write as another."""
    schema = handler(source)
    _take_what_files_hold(schema, handler, set())
    return schema


def _take_what_files_hold(schema: Any, handler: GetCoreSchemaHandler, seen: set[str]) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "definition-ref" and schema["schema_ref"] not in seen:
            seen.add(schema["schema_ref"])
            _take_what_files_hold(handler.resolve_ref_schema(schema), handler, seen)
        if schema.get("type") in _OWN_FORM:
            schema["strict"] = False
        for part in schema.values():
            _take_what_files_hold(part, handler, seen)
    elif isinstance(schema, list):
        for part in schema:
            _take_what_files_hold(part, handler, seen)


def mentions(hint: object, types: tuple[type, ...]) -> bool:
    """Return whether an annotation names one of `types`, at whatever depth.

    >>> mentions(list[int | None], (int,))
    True
    """
    return hint in types or any(mentions(part, types) for part in typing.get_args(hint))


def not_giveable(cls: Any) -> str:
    """Return which setting of a plugin class no policy file can give, in words; "" where there is none.

    >>> from kvpolicy import settings
    >>> @settings
    ... class Loud:
    ...     norm: type = int
    >>> not_giveable(Loud)
    "no policy file can give its setting 'norm': type"
    """
    for name, field in cls.__pydantic_fields__.items():
        if CHILD in field.metadata:
            continue
        try:
            TypeAdapter(typing.get_type_hints(cls, include_extras=True)[name]).json_schema()
            if not field.is_required():
                to_jsonable_python(field.get_default(call_default_factory=True))
        except PydanticUserError:
            return f"no policy file can give its setting '{name}': {inspect.formatannotation(field.annotation)}"
        except Exception as error:
            # What the author's own annotations and defaults raise.
            return f"no policy file can give its setting '{name}': {type(error).__name__}: {error}"
    return ""
