"""How plugins come in: the built-in modules, and what is installed with an entry point in the group ``kvpolicy``.

A plugin whose code raises, while it is imported or in one of its hooks, is a `Failure`: it is left out and the others
work. What a plugin says wrongly is a `PluginError`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points, version
from importlib.resources.abc import Traversable
from types import ModuleType
from typing import Any

import pluggy
from packaging.utils import canonicalize_name

from kvpolicy import hookspecs
from kvpolicy.contract import HOOKS, Entry, offered, stated
from kvpolicy.errors import PluginError, nearest

GROUP = "kvpolicy"
"""The group of entry points."""

ALLOW = "KVPOLICY_PLUGINS"
"""The environment variable that names the distributions to load, comma-separated; unset: all; empty: none."""

BUILTIN_ROOMS = ("scorers", "combiners", "budgets", "selectors", "store.settings", "policies")


@dataclass(frozen=True, eq=False)
class Plugin:
    """What one module, or another object with hooks, offers.

    Args:
        origin: the distribution and its version, or the module that registered it.
        entries: what it offers.
        contract: the version of the contract it is written for.
        in_code: whether it was registered in code, not installed.
    """

    origin: str
    entries: tuple[Entry, ...]
    contract: int = 1
    in_code: bool = False


@dataclass(frozen=True)
class Failure:
    """A plugin that was left out because its code raised.

    Args:
        origin: the distribution and its version.
        point: its entry point, ``name = module``.
        error: what was raised.
        place: the last line of the plugin's own that ran, ``file:line``; "" where none did.
    """

    origin: str
    point: str
    error: BaseException
    place: str

    def __str__(self) -> str:
        said = " ".join(str(self.error).split())
        return f"{type(self.error).__name__}{said and ': '}{said}{self.place and f' ({self.place})'}"


def built_in_modules() -> list[ModuleType]:
    """Return every module of the built-in rooms, so that a new scorer is one new file."""
    rooms = [importlib.import_module(f"kvpolicy.{room}") for room in BUILTIN_ROOMS]
    packages = [room for room in rooms if hasattr(room, "__path__")]
    files = [f"{room.__name__}.{found.name}" for room in packages for found in pkgutil.iter_modules(room.__path__)]
    return rooms + [importlib.import_module(name) for name in files]


def built_in() -> list[Plugin]:
    """Return the plugins that kvpolicy itself brings."""
    origin = f"kvpolicy {version('kvpolicy')}"
    return [read(module, origin) for module in built_in_modules()]


def points() -> list[EntryPoint]:
    """Return the entry points of the installed plugins, whether or not `ALLOW` names them."""
    found = entry_points(group=GROUP)
    return sorted(found, key=lambda point: (origin_of(point), point.name))


def allowed(found: Sequence[EntryPoint]) -> list[EntryPoint]:
    """Return the entry points whose distribution `ALLOW` names; all of them where it is not set.

    Raises:
        PluginError: when it names a distribution that has none.
    """
    if ALLOW not in os.environ:
        return list(found)
    named = [name.strip() for name in os.environ[ALLOW].split(",") if name.strip()]
    known = {_normal(distribution_of(point)) for point in found}
    for name in named:
        if _normal(name) not in known:
            raise PluginError(
                f"{ALLOW}: expected installed distributions with plugins, got {name!r}.{nearest(name, known)}"
            )
    wanted = set(map(_normal, named))
    return [point for point in found if _normal(distribution_of(point)) in wanted]


def _normal(distribution: str) -> str:
    """Return a distribution's name as package indexes compare them."""
    return str(canonicalize_name(distribution))


def distribution_of(point: EntryPoint) -> str:
    """Return the name of the distribution that an entry point belongs to."""
    return point.dist.name if point.dist else point.module


def origin_of(point: EntryPoint) -> str:
    """Return the distribution that an entry point belongs to, and its version."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else f"module {point.module}"


class Raised(Exception):
    """A plugin's own code raised; the cause is what."""


def load(point: EntryPoint) -> Plugin | Failure:
    """Return what an installed plugin offers, or why it had to be left out.

    Raises:
        PluginError: when it says something wrongly; names its distribution and the way out.
    """
    origin = origin_of(point)
    try:
        return read(_run(point.load), origin)
    except Raised as raised:
        error = raised.__cause__ or raised
        return Failure(origin, f"{point.name} = {point.value}", error, _place(error, point.module))
    except PluginError as error:
        name = distribution_of(point)
        raise PluginError(f"{error} Uninstall {name}, or leave it out: {ALLOW} names those to load.") from error


def read(value: object, origin: str, *, in_code: bool = False) -> Plugin:
    """Return what an object with hooks offers.

    Args:
        value: a module, or another object.
        origin: who offers it.
        in_code: whether it is registered in code.

    Raises:
        PluginError: when it says something wrongly.
        Raised: when one of its hooks raises.
    """
    contract = stated(value, origin)
    entries: list[Entry] = []
    for hook, function in hooks(value, origin):
        entries += _policies(function, origin) if HOOKS[hook] == "policy" else _classes(hook, function, origin)
    return Plugin(origin, tuple(entries), contract, in_code)


def hooks(value: object, origin: str) -> list[tuple[str, Callable[[], Any]]]:
    """Return the names and functions of the hooks that an object has.

    Raises:
        PluginError: when a name is not that of a hook, or the function takes arguments.
    """
    manager = pluggy.PluginManager("kvpolicy")
    manager.add_hookspecs(hookspecs)
    specified = [name for name in vars(manager.hook) if not name.startswith("_")]
    found: list[tuple[str, Callable[[], Any]]] = []
    for attribute in dir(value):
        options = manager.parse_hookimpl_opts(value, attribute)
        if options is None:
            continue
        name = options["specname"] or attribute
        # Not left to `manager.register`: what pluggy says of a wrong one names no distribution.
        if name in specified:
            function = getattr(value, attribute)
            signature = inspect.signature(function)
            if options["wrapper"] or options["hookwrapper"] or _required(signature):
                raise PluginError(
                    f"{origin}: expected the hook {name}(), without arguments, got {attribute}{signature}"
                )
            found.append((name, function))
        elif not options["optionalhook"]:
            raise PluginError(f"{origin}: unknown hook '{name}'.{nearest(name, specified)}")
    return found


def _required(signature: inspect.Signature) -> list[str]:
    """Return the parameters that a call has to give."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    given = signature.parameters.values()
    return [each.name for each in given if each.default is each.empty and each.kind not in variable]


def _classes(hook: str, function: Callable[[], Any], origin: str) -> list[Entry]:
    offer = _run(function)
    if not isinstance(offer, Iterable):
        raise PluginError(f"{origin}: expected a list of classes from {hook}(), got {offer!r}")
    return [offered(HOOKS[hook], value, origin) for value in _run(lambda: list(offer))]


def _policies(function: Callable[[], Any], origin: str) -> list[Entry]:
    folder = _run(function)
    if not isinstance(folder, Traversable) or not folder.is_dir():
        raise PluginError(
            f"{origin}: expected the folder (a pathlib.Path) of its policies from kvpolicy_policies(), got {folder!r}"
        )
    found = sorted((path for path in folder.iterdir() if path.name.endswith(".yaml")), key=lambda path: path.name)
    return [Entry("policy", path.name.removesuffix(".yaml"), path, origin) for path in found]


def _run(function: Callable[[], Any]) -> Any:
    """Return what a plugin's own code returns.

    Raises:
        Raised: when it raises, or would end the process.
    """
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise Raised from error


def _place(error: BaseException, module: str) -> str:
    """Return the last line of a plugin's package that ran before `error`, as ``file:line``."""
    package = module.partition(".")[0]
    ran = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] == package
    ]
    return ran[-1] if ran else ""
