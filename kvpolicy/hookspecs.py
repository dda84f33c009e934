"""The hooks a plugin implements, and the marker it implements them with.

Each hook returns a list of classes (see `kvpolicy.plugin` for what a class must have), except
`kvpolicy_policies`, which returns a folder of YAML files. A package makes its hooks known through an
entry point in the group ``kvpolicy``; the built-ins use the same hooks. A hook takes no arguments and is called once,
when a process first needs a plugin's name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pluggy

from kvpolicy.plugin import Combiner, Evicted, HeadBudget, LayerBudget, Scorer, Selector, Store

hookspec = pluggy.HookspecMarker("kvpolicy")
hookimpl = pluggy.HookimplMarker("kvpolicy")


@hookspec
def kvpolicy_scorers() -> Iterable[type[Scorer]]:  # type: ignore[empty-body]
    """Return the scorer classes this plugin offers."""


@hookspec
def kvpolicy_combiners() -> Iterable[type[Combiner]]:  # type: ignore[empty-body]
    """Return the combiner classes this plugin offers."""


@hookspec
def kvpolicy_budgets() -> Iterable[type[LayerBudget] | type[HeadBudget]]:  # type: ignore[empty-body]
    """Return the layer and head allocator classes this plugin offers."""


@hookspec
def kvpolicy_selectors() -> Iterable[type[Selector]]:  # type: ignore[empty-body]
    """Return the selector classes this plugin offers."""


@hookspec
def kvpolicy_evicted() -> Iterable[type[Evicted]]:  # type: ignore[empty-body]
    """Return the classes this plugin offers that say what becomes of the evicted."""


@hookspec
def kvpolicy_stores() -> Iterable[type[Store]]:  # type: ignore[empty-body]
    """Return the store classes this plugin offers."""


@hookspec
def kvpolicy_policies() -> Path:  # type: ignore[empty-body]
    """Return a folder whose ``*.yaml`` files are policies this plugin offers, by file name."""
