"""The plugin manager: what is registered, under which name, and where it came from."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points, version
from types import ModuleType
from typing import Any

import pluggy
from pydantic.dataclasses import is_pydantic_dataclass

from kvpolicy import hookspecs
from kvpolicy.errors import PluginError, PolicyError, nearest

KINDS = ("scorer", "combiner", "layers", "heads", "selector", "store")
"""Scorers and combiners; layer and head budgets; selectors; stores."""

HOOKS = {
    "kvpolicy_scorers": "scorer",
    "kvpolicy_combiners": "combiner",
    "kvpolicy_budgets": "",  # each class says which with `stage`
    "kvpolicy_selectors": "selector",
    "kvpolicy_stores": "store",
    "kvpolicy_policies": "policy",
}

WHAT = {
    "score": "scorer or combiner",
    "layers": "layer budget",
    "heads": "head budget",
    "selector": "selector",
    "store": "store",
    "policy": "policy",
}
"""What stands in each place of a policy file, in words."""

INHERITED = "inherited"
"""What a policy file calls the importance of the policy it extends; no plugin may take the name."""

BUILTIN_ROOMS = ("scorers", "combiners", "budgets", "selectors", "store.settings", "policies")


@dataclass(frozen=True)
class Entry:
    """One registered plugin class, or one policy file.

    Args:
        kind: one of `KINDS`, or "policy".
        name: what a policy file calls it.
        value: the class, or the path of the policy file.
        origin: the distribution (and version) or module that registered it.
    """

    kind: str
    name: str
    value: Any
    origin: str


class Registry:
    """Everything the plugins of one manager offer, by kind and name.

    Args:
        manager: holds the plugins.
        origins: the distribution (and version) of a plugin, by the plugin's name in `manager`.

    Raises:
        PluginError: when a plugin offers what it must not, or two offer the same name.
    """

    def __init__(self, manager: pluggy.PluginManager, origins: Mapping[str, str] | None = None) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}
        origins = origins or {}
        for hook, kind in HOOKS.items():
            for impl in getattr(manager.hook, hook).get_hookimpls():
                origin = origins.get(impl.plugin_name) or _origin(impl.plugin_name)
                for entry in _offered(impl, kind, origin):
                    self._add(entry)

    def _add(self, entry: Entry) -> None:
        # Scorers and combiners stand in the same place of a policy file, so they share their names.
        clash = "score" if entry.kind in ("scorer", "combiner") else entry.kind
        known = self._entries.setdefault((clash, entry.name), entry)
        if known is not entry:
            first, second = sorted([known.origin, entry.origin])
            raise PluginError(
                f"two plugins offer the {entry.kind} '{entry.name}': {first} and {second}. "
                "Uninstall one of them, or ask its author to rename it."
            )

    def get(self, kind: str, name: str) -> Entry:
        """Return the entry called `name`; `kind` is "score", "layers", "heads", "selector", "store" or "policy".

        Raises:
            PolicyError: when there is none, with the nearest names.
        """
        try:
            return self._entries[kind, name]
        except KeyError:
            raise PolicyError(f"unknown {WHAT[kind]} {name!r}.{nearest(name, self.names(kind))}") from None

    def names(self, kind: str) -> list[str]:
        """Return the names that `get` knows for `kind`, sorted."""
        return sorted(name for place, name in self._entries if place == kind)

    def entries(self, kind: str | None = None) -> list[Entry]:
        """Return all entries, or those of one kind (`KINDS` or "policy"), sorted by kind and name."""
        found = [entry for entry in self._entries.values() if kind in (None, entry.kind)]
        return sorted(found, key=lambda entry: ((*KINDS, "policy").index(entry.kind), entry.name))


def _offered(impl: pluggy.HookImpl, kind: str, origin: str) -> list[Entry]:
    """Return what one hook of one plugin offers."""
    hook = impl.function.__name__
    try:
        offer: Any = impl.function()
        if kind != "policy":
            return [_entry(kind, value, origin) for value in offer]
        paths = sorted(path for path in offer.iterdir() if path.suffix == ".yaml")
    except PluginError:
        raise
    except Exception as error:
        expected = "the folder (a pathlib.Path) of its policies" if kind == "policy" else "a list of classes"
        raise PluginError(
            f"{origin}: expected {expected} from {hook}(), got {type(error).__name__}: {error}"
        ) from error
    return [Entry("policy", path.stem, path, origin) for path in paths]


def _entry(kind: str, value: Any, origin: str) -> Entry:
    name = getattr(value, "name", None)
    if not isinstance(value, type) or not isinstance(name, str):
        raise PluginError(f"{origin}: expected a class with a string `name`, got {value!r}")
    if not is_pydantic_dataclass(value):
        raise PluginError(f"{origin}: '{name}': expected a class made with @kvpolicy.settings, got {value!r}")
    kind = kind or getattr(value, "stage", "")
    if kind not in KINDS:
        raise PluginError(f"{origin}: budget '{name}': expected stage = 'layers' or 'heads', got {kind!r}")
    if name == INHERITED and kind in ("scorer", "combiner"):
        raise PluginError(f"{origin}: {kind} '{name}': expected another name; this one stands for a base's importance")
    return Entry(kind, name, value, origin)


def _origin(name: str) -> str:
    return f"kvpolicy {version('kvpolicy')}" if name.startswith("kvpolicy.") else f"module {name}"


def _builtin_modules() -> list[ModuleType]:
    """Return every module of the built-in rooms, so that a new scorer is one new file."""
    rooms = [importlib.import_module(f"kvpolicy.{room}") for room in BUILTIN_ROOMS]
    packages = [room for room in rooms if hasattr(room, "__path__")]
    files = [f"{room.__name__}.{found.name}" for room in packages for found in pkgutil.iter_modules(room.__path__)]
    return rooms + [importlib.import_module(name) for name in files]


def new_manager() -> pluggy.PluginManager:
    """Return a plugin manager with the hooks and the built-ins, without third-party plugins."""
    manager = pluggy.PluginManager("kvpolicy")
    manager.add_hookspecs(hookspecs)
    for module in _builtin_modules():
        manager.register(module, name=module.__name__)
    return manager


@functools.cache
def registry() -> Registry:
    """Return the registry of this process: built-ins and installed plugins, loaded once.

    Raises:
        PluginError: when an installed plugin cannot be used; the message names its distribution.
    """
    manager = new_manager()
    origins = {}
    for point in entry_points(group="kvpolicy"):
        origin = f"{point.dist.name} {point.dist.version}" if point.dist else f"module {point.module}"
        # Entry points of two distributions may share a name.
        plugin = f"{origin}: {point.name}"
        origins[plugin] = origin
        try:
            manager.register(point.load(), name=plugin)
            manager.check_pending()
        except Exception as error:
            raise PluginError(
                f"{origin}: cannot use its entry point '{point.name} = {point.value}': {error}. "
                "Its hooks must be those of kvpolicy.hookspecs; without this distribution, kvpolicy works."
            ) from error
    return Registry(manager, origins)
