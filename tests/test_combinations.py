"""Every two plugins, whatever their kinds, go together in a policy that runs and holds its budget.

The pairs are those of the registry: a plugin that is added is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch
from filters import some_filters

import kvpolicy
from kvpolicy.errors import PolicyError
from kvpolicy.registry import registry
from kvpolicy.testing.models import tiny

LENGTH, BUDGET = 80, 32
PLACES = {
    "score": ("scorer", "combiner"),
    "layers": ("layers",),
    "heads": ("heads",),
    "select": ("selector",),
    "evicted": ("evicted",),
    "store": ("store",),
}
"""Places of a policy, and the kinds of plugins that go there."""
TABLE = {"scores": [[3.0, 1.0], [1.0, 1.0], [2.0, 0.0]]}
CHILD = {"importance": {"type": "snapkv", "window": 8}}
SETTINGS: dict[str, dict[str, Any]] = {
    "best-rank": {"inputs": ["key-norm", "value-norm"]},
    "fixed": {"inputs": ["key-norm", "value-norm"]},
    "redundancy-adaptive": {**CHILD, "diversity": "cosine-diversity"},
    "caote": CHILD,
    "critical-kv": CHILD,
    "r-kv": CHILD,
    "text-prior": CHILD,
    "head-totals": TABLE,
    "head-table": TABLE,
    "threshold": {"threshold": 0.1},
    "q-filters": {"file": str(some_filters(layers=3, heads=2, size=8))},
}
"""Of those that have to be told something."""
OF_SCORES = {"by-modality": {"inside": "key-norm", "outside": "value-norm"}}
OF_SELECTORS = {"by-modality": {"shares": {"text": 1.0}}}
APART = [("score", "critical-kv"), ("score", "expected-attention")], ("layers", "squeeze")
"""Scores that need what the attention module is called with, and a budget that waits until all layers have read."""
REFUSED = {frozenset([score, APART[1]]) for score in APART[0]}
UPPER = ("threshold",)
"""To these, the budget is an upper bound."""


def candidates() -> dict[str, list[str]]:
    """Return the built-in plugins of each place, by name."""
    entries = [entry for entry in registry().entries() if entry.origin.startswith("kvpolicy ")]
    return {place: [entry.name for entry in entries if entry.kind in kinds] for place, kinds in PLACES.items()}


def pairs_of(row: dict[str, str]) -> set[Any]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def rows() -> Iterator[dict[str, str]]:
    """Return policies, plugins by place, in which each two plugins of different places meet."""
    found = candidates()
    every = set().union(
        *(
            {frozenset([(one, a), (two, b)]) for a, b in product(found[one], found[two])}
            for one, two in combinations(found, 2)
        )
    )
    left = every - REFUSED
    while left:
        row = dict(sorted(min(left, key=lambda pair: sorted(pair))))
        for place in found:
            # Of what goes there, that which meets the most it has not met.
            fit = [name for name in found[place] if not pairs_of({**row, place: name}) & REFUSED]
            row[place] = row.get(place) or max(
                fit, key=lambda name, place=place: len(pairs_of({**row, place: name}) & left)
            )
        yield row
        left -= pairs_of(row)


def declared(row: dict[str, str]) -> dict[str, Any]:
    """Return the policy as a file would have it."""
    own = {"score": OF_SCORES, "select": OF_SELECTORS}
    parts = {
        place: {"type": name, **own.get(place, {}).get(name, SETTINGS.get(name, {}))} for place, name in row.items()
    }
    budget = {"tokens": BUDGET, "layers": parts.pop("layers"), "heads": parts.pop("heads")}
    return {"name": "pair", "budget": budget, **parts}


ROWS = list(rows())


def test_each_two_plugins_meet() -> None:
    met = set().union(*map(pairs_of, ROWS))
    for (one, names), (two, others) in combinations(candidates().items(), 2):
        assert names and others
        assert {frozenset([(one, a), (two, b)]) for a, b in product(names, others)} <= met | REFUSED
    assert not met & REFUSED


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: "-".join(sorted(name for _, name in pair)))
def test_two_that_cannot_go_together_are_refused_with_the_reason(pair: frozenset[tuple[str, str]]) -> None:
    with pytest.raises(PolicyError, match=r"budget.layers: expected no part that .*, gone with the layer, beside"):
        kvpolicy.load(declared({**ROWS[0], **dict(pair)}))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[place] for place in PLACES))
def test_a_policy_of_any_two_runs_and_holds_its_budget(row: dict[str, str]) -> None:
    model = tiny("llama-gqa")
    ids = torch.randint(0, 128, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    context = kvpolicy.load(declared(row)).compress(model, ids)
    total = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * BUDGET
    kept = sum(count for layer in context.report.layers.values() for row in layer.kept for count in row)
    assert 0 < kept <= total and (kept == total or row["heads"] in UPPER)
    with context.fork() as fork:
        assert bool(fork.logits(ids[:, :3]).isfinite().all())
