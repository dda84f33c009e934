"""Checks that a plugin keeps its contract, for its author's tests as for ours.

>>> from kvpolicy.scorers.key_norm import KeyNorm
>>> check_scorer(KeyNorm())
>>> [check.name for check in checks(KeyNorm())][:3]
['declaration', 'yaml', 'pickle']
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpolicy.contract import WHAT
from kvpolicy.errors import ConformanceError, KVPolicyError, nearest
from kvpolicy.plugin import children
from kvpolicy.testing.checks import checks_of
from kvpolicy.testing.checks.of_all import kind

if TYPE_CHECKING:
    from pytest import MarkDecorator


BASIC = ("declaration", "undeclared_reads", "shapes", "lengths", "protects", "selection")
"""Checks without which no other tells anything."""


@dataclass(frozen=True)
class Check:
    """One check of one plugin; called, it raises where the plugin does not keep to its contract.

    Args:
        name: what it is called in `expected_failures` and in the names of tests.
        plugin: an instance, with the settings to check it under.
        run: what checks.

    Raises:
        ConformanceError: names the plugin, the check and the fault.
    """

    name: str
    plugin: Any
    run: Callable[[Any], None]

    def __call__(self) -> None:
        fault = self._fault()
        if fault is None:
            return
        who = f"{kind(self.plugin)} '{label(self.plugin)}', check '{self.name}'"
        basic = "" if self.name in BASIC else _first_basic(self.plugin)
        if basic:
            raise ConformanceError(f"{who}: tells nothing before '{basic}' passes") from None
        # A traceback is worth its length only where the plugin itself raised.
        raise ConformanceError(f"{who}: {_said(fault)}") from (None if isinstance(fault, KVPolicyError) else fault)

    def _fault(self) -> Exception | None:
        try:
            self.run(self.plugin)
        except Exception as error:
            return error
        return None

    def __str__(self) -> str:
        return f"{label(self.plugin)}-{self.name}"


def checks(plugin: Any) -> list[Check]:
    """Return the checks that apply to a plugin: of every kind but stores."""
    return [Check(name, plugin, run) for name, run in checks_of(plugin).items()]


def check_scorer(scorer: Any, *, expected_failures: Mapping[str, str] | None = None) -> None:
    """Check that a scorer keeps its contract.

    Args:
        scorer: an instance, with the settings to check it under.
        expected_failures: names of checks that are known to fail, each with the reason.

    Raises:
        ConformanceError: with every fault found; also when a check that is expected to fail passes.
    """
    _check(scorer, ("scorer",), expected_failures)


def check_combiner(combiner: Any, *, expected_failures: Mapping[str, str] | None = None) -> None:
    """Check that a combiner keeps its contract.

    Args:
        combiner: an instance, with children that keep theirs.
        expected_failures: as of `check_scorer`.

    Raises:
        ConformanceError: as of `check_scorer`.
    """
    _check(combiner, ("combiner",), expected_failures)


def check_budget(budget: Any, *, expected_failures: Mapping[str, str] | None = None) -> None:
    """Check that a layer or head budget keeps its contract.

    Args:
        budget: an instance.
        expected_failures: as of `check_scorer`.

    Raises:
        ConformanceError: as of `check_scorer`.
    """
    _check(budget, ("layers", "heads"), expected_failures)


def check_selector(selector: Any, *, expected_failures: Mapping[str, str] | None = None) -> None:
    """Check that a selector keeps its contract.

    Args:
        selector: an instance.
        expected_failures: as of `check_scorer`.

    Raises:
        ConformanceError: as of `check_scorer`.
    """
    _check(selector, ("selector",), expected_failures)


def check_evicted(evicted: Any, *, expected_failures: Mapping[str, str] | None = None) -> None:
    """Check that what says what becomes of the evicted keeps its contract.

    Args:
        evicted: an instance.
        expected_failures: as of `check_scorer`.

    Raises:
        ConformanceError: as of `check_scorer`.
    """
    _check(evicted, ("evicted",), expected_failures)


def _check(plugin: Any, kinds: tuple[str, ...], expected: Mapping[str, str] | None) -> None:
    found_kind = kind(plugin)
    if found_kind not in kinds:
        wanted = " or ".join(WHAT.get(each, each) for each in kinds)
        raise ConformanceError(f"expected a {wanted}, got {plugin!r}, which is a {WHAT.get(found_kind, found_kind)}")
    expected = _expected(plugin, expected)
    found: dict[str, list[str]] = {}
    for check in checks(plugin):
        try:
            check()
        except ConformanceError as error:
            if check.name not in expected:
                # What several checks say alike is one fault.
                found.setdefault(str(error).partition(f"check '{check.name}': ")[2], []).append(check.name)
        else:
            if check.name in expected:
                fault = f"passes, and is expected to fail ({expected[check.name]}): take it off expected_failures"
                found.setdefault(fault, []).append(check.name)
    if found:
        faults = "\n".join(f"- {', '.join(names)}: {fault}" for fault, names in found.items())
        raise ConformanceError(f"{found_kind} '{label(plugin)}' does not keep its contract:\n{faults}")


def parametrize_with_checks(
    plugins: Iterable[Any], *, expected_failures: Mapping[str, str] | None = None
) -> MarkDecorator:
    """Return a pytest decorator that makes one test of each check of each plugin, as the argument ``check``.

    Args:
        plugins: instances, of every kind but stores.
        expected_failures: names of checks that are known to fail, each with the reason; they show as xfail, and fail
            where they pass.

    A test file of a plugin is three lines::

        @parametrize_with_checks([MyScorer(), MyScorer(on="values")])
        def test_conformance(check):
            check()
    """
    import pytest

    if not isinstance(plugins, Iterable):
        raise ConformanceError(f"expected a list of plugins, got {plugins!r}")
    params = []
    for plugin in plugins:
        expected = _expected(plugin, expected_failures)
        for check in checks(plugin):
            reason = expected.get(check.name)
            xfail = [pytest.mark.xfail(reason=reason, raises=ConformanceError, strict=True)] if reason else []
            params.append(pytest.param(check, id=str(check), marks=xfail))
    return pytest.mark.parametrize("check", params)


def _expected(plugin: Any, expected: Mapping[str, str] | None) -> Mapping[str, str]:
    known = checks_of(plugin)
    if not isinstance(expected, Mapping | None):
        raise ConformanceError(f"expected_failures: expected a mapping from checks to reasons, got {expected!r}")
    for name, reason in (expected or {}).items():
        if name not in known:
            raise ConformanceError(
                f"expected_failures: no check of '{label(plugin)}' is called {name!r}.{nearest(name, known)}"
            )
        if not isinstance(reason, str) or not reason.strip():
            raise ConformanceError(f"expected_failures: expected a reason for {name!r}, got {reason!r}")
    return expected or {}


def _first_basic(plugin: Any) -> str:
    """Return the first basic check that a plugin fails, "" where none."""
    return next((check.name for check in checks(plugin) if check.name in BASIC and check._fault()), "")


def _said(fault: Exception) -> str:
    return str(fault) if isinstance(fault, KVPolicyError) else f"raised {type(fault).__name__}: {fault}"


def label(plugin: Any) -> str:
    """Return a plugin's name with the settings that differ from their defaults.

    >>> from kvpolicy.scorers.snapkv import SnapKV
    >>> label(SnapKV(window=8, pooling="max"))
    'snapkv(window=8,pooling=max)'
    """
    below = children(plugin)
    parts = []
    for field in dataclasses.fields(plugin):
        value = getattr(plugin, field.name)
        if field.name in below:
            inside = ",".join(label(child) for child in (value if isinstance(value, tuple) else (value,)))
            parts.append(f"{field.name}={inside}")
        elif repr(value) != repr(_default(field)):
            parts.append(f"{field.name}={value}")
    return f"{plugin.name}({','.join(parts)})" if parts else plugin.name


def _default(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
