"""How plugins come in: the built-in modules, and what is installed with an entry point in the group ``kvpolicy``.

A plugin whose code raises, while it is imported or in one of its hooks, is a `Failure`: it is left out and the others
work. What a plugin says wrongly is a `PluginError`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points, version
from importlib.resources.abc import Traversable
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy
from packaging.utils import canonicalize_name

from kvpolicy.contract import HOOKS, NAMES, Entry, offered, stated, will_do
from kvpolicy.errors import PluginError, nearest

GROUP = "kvpolicy"
"""The group of entry points."""

_NEARLY = re.compile(r"kv[-_. ]?polic", re.IGNORECASE)

MARKER = "@kvpolicy.hookimpl"
"""What marks a hook."""

ALLOW = "KVPOLICY_PLUGINS"
"""The environment variable that names the distributions to load, comma-separated; unset: all; empty: none."""

BUILTIN_ROOMS = ("scorers", "combiners", "budgets", "selectors", "evicted", "store.settings", "policies")


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
        return f"{said(self.error)}{self.place and f' ({self.place})'}"


def said(error: BaseException) -> str:
    """Return what an exception is and says, on one line; of a stranger's, that it says nothing.

    >>> said(OSError("two\\n lines")), said(KeyError())
    ('OSError: two lines', 'KeyError')
    """
    try:
        text = " ".join(str(error).split())
    except Exception as raised:
        text = f"(its text cannot be shown: {type(raised).__name__})"
    return f"{type(error).__name__}{text and ': '}{text}"


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


def misnamed() -> list[EntryPoint]:
    """Return the entry points of groups that are called nearly like `GROUP`: nothing would ever load them."""
    every = entry_points()
    close = [group for group in every.groups if group != GROUP and _NEARLY.match(group)]
    return [point for group in sorted(close) for point in every.select(group=group)]


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
    return (point.dist and point.dist.name) or _module(point)


def origin_of(point: EntryPoint) -> str:
    """Return the distribution that an entry point belongs to, and its version."""
    name = point.dist and point.dist.name
    return f"{name} {version_of(point)}".rstrip() if name else f"module {_module(point)}"


def version_of(point: EntryPoint) -> str:
    """Return the version of the distribution that an entry point belongs to; "" where it says none."""
    return (point.dist and point.dist.version) or ""


def _module(point: EntryPoint) -> str:
    """Return the module that an entry point names, or all that it says where that is none."""
    parsed = point.pattern.match(point.value)
    return parsed["module"] if parsed else point.value


def _odd(point: EntryPoint) -> str:
    """Return what is wrong with an entry point before it is loaded, in words; "" where nothing."""
    if not point.pattern.match(point.value):
        return f"expected an entry point such as {point.name} = package.module, got {point.name} = {point.value}"
    if point.dist and not (point.dist.name and point.dist.version):
        got = f"{point.dist.name} and {point.dist.version}"
        return f"expected a Name and a Version in the METADATA of its distribution, got {got}"
    return ""


being_loaded: ContextVar[str] = ContextVar("being_loaded", default="")
"""Whose plugin is being loaded, here and now; "" where none is."""


class Raised(Exception):
    """A plugin's own code raised; the cause is what."""


def load(point: EntryPoint) -> Plugin | Failure:
    """Return what an installed plugin offers, or why it had to be left out.

    Raises:
        PluginError: when it says something wrongly; names its distribution and the way out.
    """
    origin, written = origin_of(point), f"{point.name} = {point.value}"
    if odd := _odd(point):
        return Failure(origin, written, PluginError(odd), "")
    before = being_loaded.set(origin)
    try:
        # What a plugin prints must not end up in the JSON of a command.
        with contextlib.redirect_stdout(sys.stderr):
            value = _run(point.load)
            plugin = read(value, origin)
        if not _marked(value):
            raise PluginError(f"{origin}: {_no_hooks(value, point)}")
        return plugin
    except Raised as raised:
        error = raised.__cause__ or raised
        return Failure(origin, written, error, _place(error, point.module))
    except PluginError as error:
        name, text = distribution_of(point), str(error).removesuffix(".")
        raise PluginError(f"{text}. Uninstall {name}, or leave it out: {ALLOW} names those to load.") from error
    finally:
        being_loaded.reset(before)


def _no_hooks(value: object, point: EntryPoint) -> str:
    """Return what is wrong where an entry point leads to something without hooks, in words."""
    if isinstance(value, ModuleType):
        return (
            f"the module {value.__name__} has no hooks: functions such as {next(iter(HOOKS))}(), marked with {MARKER}"
        )
    module = f"{point.name} = {point.module}"
    return f"expected its entry point to name the module with its hooks ({module}), got {point.name} = {point.value}"


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
    contract = stated(_run(lambda: getattr(value, "kvpolicy_contract", 1)), origin)
    entries: list[Entry] = []
    for hook, function in hooks(value, origin):
        entries += _policies(function, origin) if HOOKS[hook] == "policy" else _classes(hook, function, origin)
    return Plugin(origin, tuple(entries), contract, in_code)


def hooks(value: object, origin: str) -> list[tuple[str, Callable[[], Any]]]:
    """Return the names and functions of the hooks that an object has.

    Raises:
        PluginError: when a name is not that of a hook, the function takes arguments, or what is called like a hook is
            not marked as one.
    """
    marked = _marked(value)
    for attribute in HOOKS:
        if attribute not in marked and _has(value, attribute):
            raise PluginError(f"{origin}: `{attribute}` in {_called(value)} is not a function marked with {MARKER}")
    found: list[tuple[str, Callable[[], Any]]] = []
    for attribute, options in marked.items():
        name = options["specname"] or attribute
        # Not left to `manager.register`: what pluggy says of a wrong one names no distribution.
        if name in HOOKS:
            function = getattr(value, attribute)
            signature = inspect.signature(function)
            if options["wrapper"] or options["hookwrapper"] or _required(signature):
                raise PluginError(
                    f"{origin}: expected the hook {name}(), without arguments, got {attribute}{signature}"
                )
            found.append((name, function))
        elif not options["optionalhook"]:
            raise PluginError(f"{origin}: unknown hook '{name}'.{nearest(name, HOOKS)}")
    return found


def _marked(value: object) -> dict[str, Any]:
    """Return what an object has marked as hooks: attribute -> pluggy's options."""
    manager = pluggy.PluginManager("kvpolicy")
    options: dict[str, Any] = _run(
        lambda: {attribute: manager.parse_hookimpl_opts(value, attribute) for attribute in dir(value)}
    )
    return {attribute: given for attribute, given in options.items() if given is not None}


def _has(value: object, attribute: str) -> bool:
    return bool(_run(lambda: hasattr(value, attribute)))


def _called(value: object) -> str:
    """Return what to call a module, a class or another object."""
    return str(getattr(value, "__name__", type(value).__name__))


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
    found = [path for path in folder.iterdir() if path.name.lower().endswith(_ENDINGS)]
    if not found:
        raise PluginError(
            f"{origin}: expected *.yaml files in the folder from kvpolicy_policies(), got none in {str(folder)!r}: "
            "they have to be installed with the package, as its package data"
        )
    if not all(isinstance(path, Path) for path in found):
        raise PluginError(
            f"{origin}: expected a folder on disk from kvpolicy_policies(), got {str(folder)!r}, which is inside an "
            "archive: install the package unpacked"
        )
    return [_policy(path, origin) for path in sorted(found, key=lambda path: path.name)]


_ENDINGS = (".yaml", ".yml")


def _policy(path: Traversable, origin: str) -> Entry:
    """Return a policy file as an entry, called as the file is."""
    name = path.name.removesuffix(".yaml")
    # What still ends so is not the name of a policy but a path.
    if name == path.name or name.lower().endswith(_ENDINGS) or not will_do(name):
        raise PluginError(f"{origin}: expected policy files such as my-policy.yaml ({NAMES}), got {path.name!r}")
    return Entry("policy", name, path, origin)


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
