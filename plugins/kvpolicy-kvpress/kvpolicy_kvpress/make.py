"""From the name and the settings in a policy file to a press of kvpress, checked."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from kvpolicy.errors import NOTHING, Problem, SettingError, nearest
from kvpolicy_kvpress.presses import LEAST, NOT_WRAPPED, WRAPPED, Press, Read

OWNER = "kvpress"
_INNER = "press"
_RATIO = "compression_ratio"

Where = tuple[str | int, ...]


def kvpress() -> Any:
    """Return the package, imported when it is first asked for.

    Importing it wraps every attention function that transformers knows. In a session those of kvpolicy are among them,
    which go when it ends: their wrapped twins would stay.
    """
    first = "kvpress" not in sys.modules
    import kvpress

    if first:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        from kvpolicy.attend.switch import PREFIX

        for name in [name for name in ALL_ATTENTION_FUNCTIONS if name.startswith(PREFIX)]:
            del ALL_ATTENTION_FUNCTIONS[name]
    return kvpress


def press_names() -> set[str]:
    """Return the names of the press classes that kvpress exports."""
    package = kvpress()
    found = {name: getattr(package, name) for name in package.__all__}
    return {name for name, cls in found.items() if isinstance(cls, type) and issubclass(cls, package.BasePress)}


def chain(name: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, Press]]:
    """Yield a press that was checked and the presses inside it, outermost first."""
    press = WRAPPED[name]
    yield name, press
    if "another press" in press.reads:
        inner = settings[_INNER]
        yield from chain(inner["press"], inner.get("settings", {}))


def reads(name: str, settings: Mapping[str, Any]) -> frozenset[Read]:
    """Return what a press that was checked, and those inside it, read; without the ratio that a setting replaces."""
    found: set[Read] = set()
    for _, press in chain(name, settings):
        replaced = settings.get(press.instead_of_ratio) is not None
        found |= {read for read in press.reads if not (replaced and read == _RATIO)}
    return frozenset(found)


def make(name: str, settings: Mapping[str, Any], ratio: float | None) -> Any:
    """Return a new press.

    Args:
        name: its class, as kvpress exports it.
        settings: its arguments; a press inside it is a mapping with `press` and `settings`.
        ratio: its `compression_ratio`, where its score depends on it.

    Raises:
        SettingError: when there is no such press, it is no scorer, or a setting is unknown or wrong.
    """
    press = _press(name, settings, ("press",), ("settings",))
    needed = _RATIO in reads(name, settings)
    if needed and ratio is None:
        other = WRAPPED[name].instead_of_ratio
        either = f", or the setting '{other}'" if other else ""
        _refuse((_RATIO,), f"expected a share in [0, 1), as the score of {name} depends on how much is evicted{either}")
    if ratio is not None:
        if not needed:
            _refuse((_RATIO,), f"expected none, as the score of {name} does not depend on it: `budget` says", ratio)
        press.compression_ratio = ratio
    return press


def _press(name: str, settings: Mapping[str, Any], named: Where, given: Where) -> Any:
    package = kvpress()
    if name in NOT_WRAPPED:
        _refuse(named, f"expected a press that scores; {name}: {NOT_WRAPPED[name]}")
    if name not in press_names():
        _refuse(named, f"unknown press {name!r}.{nearest(name, WRAPPED)}")
    if name not in WRAPPED:
        _refuse(named, f"expected a press that this plugin knows, got {name!r}.{nearest(name, WRAPPED)}")
    cls = getattr(package, name)
    hints = setting_types(cls)
    unknown = [key for key in settings if key not in hints]
    if unknown:
        hint = ": `budget` says how much is kept" if unknown[0] == _RATIO else f".{nearest(unknown[0], hints)}"
        _refuse((*given, unknown[0]), f"unknown setting of {name}{hint}", kind="unexpected_keyword_argument")
    made = {}
    for key, value in settings.items():
        where = (*given, key)
        made[key] = _inner(value, where) if key == _INNER else _checked(hints[key], value, where)
    if _INNER in hints and _INNER not in settings:
        _refuse(given, f"expected the setting '{_INNER}', the press inside {name}: a mapping with 'press', 'settings'")
    try:
        return cls(**made)
    except (AssertionError, ValueError) as error:
        _refuse(given, f"{name}: {error}", dict(settings))


def _inner(value: Any, where: Where) -> Any:
    if (
        not isinstance(value, Mapping)
        or not isinstance(value.get("press"), str)
        or value.keys() - {"press", "settings"}
    ):
        _refuse(where, "expected a mapping with 'press', a name, and 'settings'", value)
    settings = value.get("settings", {})
    if not isinstance(settings, Mapping):
        _refuse((*where, "settings"), "expected a mapping", settings)
    return _press(value["press"], settings, (*where, "press"), (*where, "settings"))


def setting_types(cls: type) -> dict[str, Any]:
    """Return the type of each setting of a press."""
    names = inspect.signature(cls).parameters
    made_with: Any = inspect.getattr_static(cls, "__init__")
    hints = {**typing.get_type_hints(cls), **typing.get_type_hints(made_with)}
    return {name: hints.get(name, Any) for name in names if not name.startswith("_") and name != _RATIO}


def _checked(hint: Any, value: Any, where: Where) -> Any:
    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    adapter: TypeAdapter[Any] = TypeAdapter(hint, config=config)
    try:
        checked = adapter.validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"].replace("Input should be", "expected")
        _refuse(where, message, value)
    least = LEAST.get(str(where[-1]))
    if least is not None and checked < least:
        _refuse(where, f"expected a number of at least {least}", value)
    if where[-1] == "kernel_size" and checked % 2 == 0:
        _refuse(where, "expected an odd number, so that a slot is the middle of its own pool", value)
    return checked


def _refuse(where: Where, message: str, found: object = NOTHING, kind: str = "value_error") -> typing.NoReturn:
    problem: Problem = (where, kind, message, found)
    raise SettingError(OWNER, [problem])
