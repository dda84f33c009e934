"""What the reference page has to know about the code that reading its syntax does not tell (an extension of griffe)."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class KVPolicyExtension(griffe.Extension):
    """Gives classes made with ``@settings`` their signature, and makes code blocks of the docstrings' examples."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change every object of the package."""
        self._change(pkg)

    def _change(self, found: griffe.Object) -> None:
        if found.docstring:
            found.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", found.docstring.value)
        # Before __init__ is set, which has no docstring of its own.
        for member in list(found.members.values()):
            if isinstance(member, griffe.Object):
                self._change(member)
        if isinstance(found, griffe.Class) and any(str(one.value) == "settings" for one in found.decorators):
            found.labels.add("dataclass")
            found.set_member("__init__", _init(found))


def _init(cls: griffe.Class) -> griffe.Function:
    """Return the keyword-only ``__init__`` that the annotated fields of a class make."""
    keyword = griffe.ParameterKind.keyword_only
    fields = [
        griffe.Parameter(name, annotation=one.annotation, kind=keyword, default=_default(one.value))
        for name, one in cls.members.items()
        if isinstance(one, griffe.Attribute) and one.annotation is not None and "property" not in one.labels
    ]
    itself = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    return griffe.Function("__init__", parent=cls, parameters=griffe.Parameters(itself, *fields), returns="None")


def _default(value: Any) -> Any:
    """Return ``X()`` for ``Field(default_factory=X)``, and any other value as it is."""
    made = re.fullmatch(r"Field\(default_factory=(\w+)\)", str(value))
    return f"{made[1]}()" if made else value
