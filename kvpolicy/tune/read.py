"""Reads a space from a file, all of it checked before a model is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvpolicy.config.build import build
from kvpolicy.config.extend import Document, lay_keywords, resolve, to_document
from kvpolicy.config.order import explained
from kvpolicy.config.source import Item, Place, fault, from_python, read, show
from kvpolicy.errors import PolicyFileError, nearest
from kvpolicy.tune.places import Steps, put, steps
from kvpolicy.tune.space import Choices, Range, Setting, Space

SEARCHED = ("score", "budget.layers", "budget.heads", "select", "evicted", "store")
"""The parts of a policy whose settings drift depends on: how much is kept is given, and decoding is not measured."""

RANGE = ("from", "to", "log")
"""What a range may say."""


def read_space(path: Path, budget: int | float | None = None) -> Space:
    """Return the space in a file: a policy file with one more key, ``search``.

    Args:
        path: of the file.
        budget: laid over that of the policy.

    Raises:
        PolicyFileError: when the policy, a place or a value to try is wrong; says in which line and column.
    """
    item = read(path)
    if "search" not in item.value:
        raise fault(
            (item.place, "expected a policy with a mapping 'search': places of settings, and what to try there")
        )
    search = item.value["search"]
    body = {name: below for name, below in item.value.items() if name != "search"}
    document = to_document(replace(item, value=body), str(path), path)

    def laid(document: Document) -> Item:
        given = {} if budget is None else {"budget": from_python(budget, Place("--budget"))}
        whole = resolve(document)
        return lay_keywords(whole, replace(whole, value=given))

    try:
        whole = laid(document)
        base = build(whole)
    except PolicyFileError as error:
        raise explained(error, document, lambda other: build(laid(other))) from None
    if base.trivial:
        raise fault((item.place, "expected a policy that evicts, got one that keeps everything: it does not drift"))
    return Space(base, whole, _settings(search, _with_any_budget(whole)))


def _with_any_budget(whole: Item) -> Item:
    """Return the policy with a share as its budget, which holds whatever is protected; a trial has the real one."""
    share = {"keep": from_python(0.5, whole.place)}
    return lay_keywords(whole, replace(whole, value={"budget": Item(share, whole.place)}))


def _settings(search: Item, whole: Item) -> tuple[Setting, ...]:
    if not isinstance(search.value, dict) or not search.value:
        raise fault((search.place, f"search: expected a mapping of places to what to try, got {show(search.plain)}"))
    found: list[Setting] = []
    for place, tried in search.value.items():
        way = _way(place, tried)
        for other in found:
            shorter = min(len(way), len(other.way))
            if way[:shorter] == other.way[:shorter]:
                problem = f"search.{place}: expected places apart, got one within another: {other.place}"
                raise fault((tried.key or tried.place, problem))
        found.append(_setting(place, way, tried, whole))
    return tuple(found)


def _way(place: str, tried: Item) -> Steps:
    way = steps(place)
    if way is None or not any(way[: len(part)] == part for part in (tuple(name.split(".")) for name in SEARCHED)):
        expected = f"search: expected the place of a setting within {', '.join(SEARCHED)}"
        raise fault((tried.key or tried.place, f"{expected}, such as select.recent; got {place!r}"))
    return way


def _setting(place: str, way: Steps, tried: Item, whole: Item) -> Setting:
    """Return one setting, each of its choices or both of its bounds a policy on its own."""

    def check(item: Item) -> None:
        build(put(whole, way, item))

    if isinstance(tried.value, dict):
        return _range(place, way, tried, check)
    if not isinstance(tried.value, list) or len(tried.value) < 2:
        expected = "expected a list of two choices or more, or a range {from: 0.0, to: 1.0}"
        raise fault((tried.place, f"search.{place}: {expected}, got {show(tried.plain)}"))
    items = tuple(replace(item, key=tried.key) for item in tried.value)
    for at, item in enumerate(items):
        if item.plain in [other.plain for other in items[:at]]:
            raise fault((item.place, f"search.{place}: expected each choice once, got {show(item.plain)} again"))
        check(item)
    return Choices(place, way, items)


def _range(place: str, way: Steps, tried: Item, check: Callable[[Item], None]) -> Range:
    for name, part in tried.value.items():
        if name not in RANGE:
            unknown = f"search.{place}.{name}: unknown setting of a range.{nearest(name, RANGE)}"
            raise fault((part.key or part.place, f"{unknown} To try a mapping, put it into a list of choices."))
    low, high = (_bound(place, tried, name) for name in ("from", "to"))
    if not low.value < high.value:
        raise fault((high.place, f"search.{place}: expected a range that goes up, got {low.value} to {high.value}"))
    log = tried.value.get("log")
    if log is not None and not isinstance(log.value, bool):
        raise fault((log.place, f"search.{place}.log: expected true or false, got {show(log.plain)}"))
    if log is not None and log.value and low.value <= 0:
        raise fault((low.place, f"search.{place}: expected a range from above 0, as it is log, got {low.value}"))
    for bound in (low, high):
        check(bound)
    whole = _only_whole(low, high, check)
    kind = int if whole else float
    is_log = log is not None and log.value
    return Range(place, way, kind(low.value), kind(high.value), is_log, whole, tried)


def _bound(place: str, tried: Item, name: str) -> Item:
    bound = tried.value.get(name)
    if bound is None:
        raise fault((tried.place, f"search.{place}: expected a range {{from: 0.0, to: 1.0}}, got none with {name!r}"))
    if isinstance(bound.value, bool) or not isinstance(bound.value, (int, float)) or not math.isfinite(bound.value):
        raise fault((bound.place, f"search.{place}.{name}: expected a number, got {show(bound.plain)}"))
    return replace(bound, key=tried.key)


def _only_whole(low: Item, high: Item, check: Callable[[Item], None]) -> bool:
    """Return whether the setting takes no other numbers: of its bounds, ``{from: 0, to: 1}`` would not say so."""
    try:
        check(replace(low, value=float(low.value + high.value) / 2))
    except PolicyFileError:
        return True
    return False
