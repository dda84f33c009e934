"""What every plugin is checked for: what it says of itself, YAML and pickle."""

from __future__ import annotations

import pickle
from typing import Any

from pydantic.dataclasses import is_pydantic_dataclass

from kvpolicy.config import load, to_yaml
from kvpolicy.config.docstrings import summary
from kvpolicy.config.source import parse
from kvpolicy.contract import fault
from kvpolicy.errors import ConformanceError
from kvpolicy.plugin import kind_of
from kvpolicy.testing.checks.places import known, policy_with


def kind(plugin: Any) -> str:
    """Return what kind of plugin an instance is.

    Raises:
        ConformanceError: when it is none that can be checked.
    """
    if isinstance(plugin, type):
        raise ConformanceError(f"expected an instance, {plugin.__name__}(), got the class")
    found = kind_of(type(plugin))
    if found not in ("scorer", "combiner", "layers", "heads", "selector", "evicted"):
        raise ConformanceError(
            f"expected a scorer (it has `needs`), a combiner (it has Score or Scores fields), a budget (`stage` is "
            f"'layers' or 'heads'), a selector (it has `protect`) or what becomes of the evicted (`stage` is "
            f"'evicted'), got {plugin!r}"
        )
    if not is_pydantic_dataclass(type(plugin)):
        raise ConformanceError(f"expected a class made with @kvpolicy.settings, got {type(plugin).__name__}")
    return found


def declaration(plugin: Any) -> None:
    """It says what it is: name, what it needs, docstring, formula and source."""
    cls = type(plugin)
    if wrong := fault(plugin, kind_of(cls)):
        raise ConformanceError(wrong)
    if not summary(cls):
        raise ConformanceError("expected a docstring whose first line says what it is, for `kvpolicy list`")
    for about in ("formula", "source"):
        text = getattr(plugin, about, None)
        if not isinstance(text, str) or not text.strip() or "\n" in text:
            raise ConformanceError(f"expected a class attribute `{about}`, one line for `kvpolicy show`, got {text!r}")


def yaml_round_trip(plugin: Any) -> None:
    """A policy with it, written as YAML and read again, is equal."""
    policy = policy_with(plugin)
    with known(plugin):
        again = load(parse(to_yaml(policy), "its YAML").plain)
    if again != policy:
        raise ConformanceError(f"expected the same policy when its YAML is read again, got {again!r} for {policy!r}")


def pickle_round_trip(plugin: Any) -> None:
    """It pickles, and what comes back is equal."""
    try:
        again = pickle.loads(pickle.dumps(plugin))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConformanceError(
            f"expected that it pickles: make its class at the top level of a module, under its own name ({error})"
        ) from error
    if again != plugin:
        raise ConformanceError(f"expected an equal plugin when it is unpickled, got {again!r} for {plugin!r}")


CHECKS = {"declaration": declaration, "yaml": yaml_round_trip, "pickle": pickle_round_trip}
