"""kvpolicy: composable KV-cache eviction policies for Hugging Face decoders.

Importing it loads neither torch nor transformers; every public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpolicy import functional, models
    from kvpolicy.config import load
    from kvpolicy.contract import CONTRACT
    from kvpolicy.errors import KVPolicyError
    from kvpolicy.hookspecs import hookimpl
    from kvpolicy.plugin import Numbers, Score, Scores, settings
    from kvpolicy.policy import Budget, Decode, Policy
    from kvpolicy.registering import register
    from kvpolicy.session.context import Context, load_context
    from kvpolicy.session.reading import Reading, read
    from kvpolicy.types import Call, LayerView, Merged, Needs, Plan, Repetition, Selection
    from kvpolicy.wrap import wrap_score

_HOME = {
    "load": "config",
    "CONTRACT": "contract",
    "KVPolicyError": "errors",
    "hookimpl": "hookspecs",
    "Numbers": "plugin",
    "Score": "plugin",
    "Scores": "plugin",
    "settings": "plugin",
    "Budget": "policy",
    "Decode": "policy",
    "Policy": "policy",
    "register": "registering",
    "Context": "session.context",
    "load_context": "session.context",
    "Reading": "session.reading",
    "read": "session.reading",
    "Call": "types",
    "LayerView": "types",
    "Merged": "types",
    "Needs": "types",
    "Plan": "types",
    "Repetition": "types",
    "Selection": "types",
    "wrap_score": "wrap",
}

_MODULES = ("functional", "models")

__all__ = [
    "CONTRACT",
    "Budget",
    "Call",
    "Context",
    "Decode",
    "KVPolicyError",
    "LayerView",
    "Merged",
    "Needs",
    "Numbers",
    "Plan",
    "Policy",
    "Reading",
    "Repetition",
    "Score",
    "Scores",
    "Selection",
    "functional",
    "hookimpl",
    "load",
    "load_context",
    "models",
    "read",
    "register",
    "settings",
    "wrap_score",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"kvpolicy.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'kvpolicy' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvpolicy.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
