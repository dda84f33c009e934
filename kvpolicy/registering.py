"""`register`: plugins that no package holds, for notebooks and scripts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvpolicy.contract import HOOKS, KINDS
from kvpolicy.errors import PluginError
from kvpolicy.hookspecs import hookimpl
from kvpolicy.loading import Plugin, Raised, hooks, read, said
from kvpolicy.plugin import kind_of
from kvpolicy.policy import Policy
from kvpolicy.registry import registry

WHAT_EACH_HAS = (
    "a scorer has `needs`, a combiner has Score or Scores fields, a budget has stage = 'layers' or 'heads', "
    "a selector has `protect`, what becomes of the evicted has stage = 'evicted'; anything else comes as an object or "
    "a module with hooks (@kvpolicy.hookimpl)"
)


class Registration:
    """What `register` registered, until `undo` or, in a ``with`` statement, until its end."""

    def __init__(self, plugins: tuple[Plugin, ...]) -> None:
        self._plugins = plugins

    def undo(self) -> None:
        """Forget what was registered; a second time does nothing."""
        registry().remove(*self._plugins)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        offered = [f"{entry.kind} '{entry.name}'" for plugin in self._plugins for entry in plugin.entries]
        return f"<Registration of {', '.join(offered) or 'nothing'}>"


def register(*plugins: Any) -> Registration:
    """Return a handle on `plugins`, which every policy file, name and command in this process now knows.

    Made again by the same code (the same module and name, as when a cell of a notebook runs again), a class takes the
    place of the one before. Any other class of a name that is taken is refused.

    Args:
        plugins: classes of every kind but stores; or modules and other objects with hooks.

    Raises:
        PluginError: when one of them is none, breaks its contract, raises, or has a name that is taken; then nothing
            is registered.

    >>> import kvpolicy
    >>> @kvpolicy.settings
    ... class Oldest:
    ...     name = "oldest"
    ...     needs = kvpolicy.Needs()
    ...     def __call__(self, view):
    ...         return -view.positions.float()
    >>> with kvpolicy.register(Oldest) as registration:
    ...     policy = kvpolicy.load({"name": "mine", "score": "oldest", "budget": 64})
    >>> registration
    <Registration of scorer 'oldest'>
    >>> policy.score
    Oldest()
    """
    once = {id(value): value for value in plugins}
    registration = Registration(tuple(map(_plugin, once.values())))
    registry().add(*registration._plugins)
    return registration


def _plugin(value: Any) -> Plugin:
    module = getattr(value, "__module__", None) or getattr(value, "__name__", None) or type(value).__module__
    origin = f"module {module} (registered in code)"
    try:
        return read(value if hooks(value, origin) else _with_hook(value, origin), origin, in_code=True)
    except Raised as raised:
        error = raised.__cause__ or raised
        raise PluginError(f"{origin}: its hooks raised {said(error)}") from error


def _with_hook(cls: Any, origin: str) -> SimpleNamespace:
    """Return what offers a class by the hook that a package would offer it by."""
    kind = kind_of(cls) if isinstance(cls, type) else ""
    if cls is Policy or isinstance(cls, Policy):
        raise PluginError(f"{origin}: expected plugin classes, got a policy: a hook offers those, as files")
    if not kind:
        raise PluginError(f"{origin}: expected plugin classes, got {cls!r}: {WHAT_EACH_HAS}")
    if kind not in KINDS:
        stages = "'layers' or 'heads', of a budget, or 'evicted'"
        raise PluginError(f"{origin}: class {cls.__name__}: expected stage = {stages}, got {kind!r}")
    hook = next((hook for hook, offers in HOOKS.items() if offers == kind), "kvpolicy_budgets")
    return SimpleNamespace(**{hook: hookimpl(lambda: [cls])})
