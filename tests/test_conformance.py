"""Conformance: every built-in comes through the same door as a stranger's plugin; broken plugins do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filters import some_filters
from torch import Tensor

from kvpolicy import LayerView, Needs, settings
from kvpolicy.errors import ConformanceError
from kvpolicy.registry import registry
from kvpolicy.scorers.cosine_diversity import CosineDiversity
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.scorers.value_norm import ValueNorm
from kvpolicy.selectors.top_k import TopK
from kvpolicy.testing import (
    Check,
    check_budget,
    check_combiner,
    check_scorer,
    check_selector,
    parametrize_with_checks,
)

PLACE = "where a slot stands is what it scores by"
POOLS = "pools over neighbours"
TABLE = "a table is of one model, the check of others"
FILTERS = "filters are of one model's heads, the check of several sizes"
CALL = "reads the weights of a model, which a view has not"
SETTINGS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("scorer", "snapkv"): [{}, {"window": 4, "kernel": 7, "pooling": "max"}],
    ("scorer", "cosine-diversity"): [{}, {"space": "pre-rope"}, {"on": "values"}],
    ("scorer", "euclidean-diversity"): [{}, {"space": "pre-rope"}, {"on": "values"}],
    ("combiner", "fixed"): [
        {"inputs": [KeyNorm(), ValueNorm()], "normalize": how}
        for how in ("min-max", "rank", "z-score", "match-importance", "none")
    ]
    + [
        {"inputs": [KeyNorm(), ValueNorm()], "normalize": how, "over": "layer"}
        for how in ("min-max", "rank", "z-score", "match-importance")
    ],
    ("combiner", "best-rank"): [
        {"inputs": [KeyNorm(), ValueNorm()]},
        {"inputs": [KeyNorm(), ValueNorm()], "weights": [4, 1]},
    ],
    ("combiner", "redundancy-adaptive"): [
        {"importance": ValueNorm(), "diversity": CosineDiversity()},
        {"importance": ValueNorm(), "diversity": CosineDiversity(space="pre-rope"), "space": "pre-rope"},
    ],
    ("scorer", "lag-kv"): [{}, {"lag": 4, "sinks": 2}, {"lag": 4, "sinks": 2, "cross": True}],
    ("scorer", "leverage"): [{}, {"sketch": None, "space": "post-rope", "among": "candidates"}],
    ("scorer", "non-causal-attention"): [{}, {"chunk_size": 20, "among": "candidates"}],
    ("scorer", "cur-dkv"): [{}, {"leverage": "kv-avg", "window": 5, "sketch": 20}],
    ("scorer", "manifold-kv"): [{"window": 5}],
    ("scorer", "q-filters"): [{"file": str(some_filters(layers=4, heads=2, size=64))}],
    ("combiner", "caote"): [{"importance": ValueNorm()}, {"importance": ValueNorm(), "fast": True}],
    ("combiner", "r-kv"): [{"importance": ValueNorm()}],
    ("combiner", "critical-kv"): [{"importance": ValueNorm()}, {"importance": ValueNorm(), "first": 4}],
    ("combiner", "text-prior"): [{"importance": ValueNorm()}],
    ("combiner", "by-modality"): [{"inside": CosineDiversity(), "outside": KeyNorm()}],
    ("heads", "adaptive"): [{}, {"floor": 0.5, "by": "importance"}],
    ("layers", "schedule"): [{}, {"shape": "cosine", "first": 0.25}],
    ("layers", "head-totals"): [{"scores": [[3, 0], [1, 1], [0, 1]]}],
    ("heads", "head-table"): [{"scores": [[3, 1, 0]]}],
    ("heads", "threshold"): [{"threshold": 0.5, "floor": 0.2}],
    ("selector", "chunks"): [{}, {"length": 4, "heads": "apart"}],
    ("selector", "top-k"): [{}, {"sinks": 0, "recent": 0}],
    ("selector", "by-modality"): [{"shares": {"text": 0.4, "image": 0.3, "video": 0.3}}],
}
"""The settings that each built-in is checked under; of others, the defaults."""
EXPECTED: dict[tuple[str, str], dict[str, str]] = {
    ("scorer", "snapkv"): {"permutation": POOLS},
    ("scorer", "cake"): {"permutation": POOLS},
    ("scorer", "random"): {"permutation": PLACE, "heads": "each head has numbers of its own"},
    ("scorer", "recency"): {"permutation": PLACE},
    ("scorer", "non-causal-attention"): {"permutation": POOLS, "causal": "queries see what comes after them"},
    ("scorer", "keyformer"): {"permutation": PLACE, "heads": "each head has noise of its own"},
    ("scorer", "lag-kv"): {"permutation": PLACE},
    ("scorer", "cur-dkv"): {"permutation": PLACE},
    ("scorer", "manifold-kv"): {"permutation": PLACE},
    ("combiner", "r-kv"): {"permutation": PLACE},
    ("scorer", "q-filters"): dict.fromkeys(["shapes", "heads", "memory", "generate", "generate_alone"], FILTERS),
    ("layers", "head-totals"): dict.fromkeys(["lengths", "batch_mates"], TABLE),
    ("heads", "head-table"): {
        "heads": "a head's place says what it is due",
        "generate": TABLE,
        "generate_alone": TABLE,
    },
    ("heads", "threshold"): dict.fromkeys(["lengths", "generate"], "the budget is an upper bound"),
    ("combiner", "critical-kv"): dict.fromkeys(
        ["children_untouched", "children_outside", "children_finite", "children_orientation"], CALL
    ),
}
"""By kind and name, the checks that a built-in does not pass, and why."""


def built_in() -> list[tuple[Any, dict[str, str] | None]]:
    """Return an instance of every plugin of the registry under each of its settings, and what it need not pass."""
    found = []
    for entry in registry().entries():
        if entry.kind in ("scorer", "combiner", "layers", "heads", "selector", "evicted") and entry.origin.startswith(
            "kvpolicy "
        ):
            each = SETTINGS.get((entry.kind, entry.name), [{}])
            found += [(entry.value(**given), EXPECTED.get((entry.kind, entry.name))) for given in each]
    return found


def params(plugin: Any, expected: dict[str, str] | None = None) -> list[Any]:
    """Return what the decorator makes tests of."""
    return list(parametrize_with_checks([plugin], expected_failures=expected).args[1])


@pytest.mark.parametrize("check", [param for plugin, expected in built_in() for param in params(plugin, expected)])
def test_every_built_in_keeps_its_contract(check: Check) -> None:
    check()


@settings
class Absent:
    """How far a slot stands from the first; nothing of a view that `needs` would have to declare."""

    name, source, formula, role, needs = "absent", "a test", "t", "other", Needs()
    power: float = 1.0

    def __call__(self, view: LayerView) -> Tensor:
        return view.positions.float().clamp(min=0).pow(self.power)


def test_a_failure_that_is_expected_is_none() -> None:
    with pytest.raises(ConformanceError, match="permutation: expected that slots in another order"):
        check_scorer(Absent())
    check_scorer(Absent(), expected_failures={"permutation": PLACE, "padding": PLACE})


def test_an_expected_failure_that_passes_is_one() -> None:
    with pytest.raises(ConformanceError, match=rf"shapes: passes, and is expected to fail \({PLACE}\)"):
        check_scorer(KeyNorm(), expected_failures={"shapes": PLACE})


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        ({"shape": PLACE}, "no check of 'key-norm' is called 'shape'. Did you mean 'shapes'"),
        ({"shapes": ""}, "expected a reason for 'shapes', got ''"),
        ({"shapes": None}, "expected a reason for 'shapes', got None"),
        (["shapes"], "expected a mapping from checks to reasons, got ['shapes']"),
    ],
)
def test_expected_failures_are_names_and_reasons(expected: Any, says: str) -> None:
    for check in (check_scorer, lambda plugin, **given: parametrize_with_checks([plugin], **given)):
        with pytest.raises(ConformanceError) as caught:
            check(KeyNorm(), expected_failures=expected)
        assert says in str(caught.value)


@pytest.mark.parametrize(
    ("check", "plugin", "says"),
    [
        (check_combiner, KeyNorm(), "expected a combiner, got KeyNorm(), which is a scorer"),
        (check_budget, KeyNorm(), "expected a layer budget or head budget, got KeyNorm(), which is a scorer"),
        (check_selector, KeyNorm(), "expected a selector, got"),
        (check_scorer, TopK(), "expected a scorer, got"),
        (check_scorer, KeyNorm, "expected an instance, KeyNorm(), got the class"),
        (check_scorer, 3, "expected a scorer (it has `needs`), a combiner"),
        (
            check_scorer,
            type("Bare", (), {"needs": Needs(), "name": "bare"})(),
            "expected a class made with @kvpolicy.settings",
        ),
    ],
)
def test_what_is_checked_is_an_instance_of_that_kind(check: Any, plugin: Any, says: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check(plugin)
    assert says in str(caught.value)


SUITE = """
from test_conformance import Absent
from kvpolicy.testing import parametrize_with_checks

@parametrize_with_checks([Absent(), Absent(power=2)], expected_failures={"permutation": "place", "shapes": "none"})
def test_mine(check):
    check()
"""


def test_the_decorator_makes_a_test_of_each_check(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(SUITE)
    options = ["-rA", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    said = ended.stdout.splitlines()
    assert "PASSED test_mine.py::test_mine[absent-heads]" in said
    assert "PASSED test_mine.py::test_mine[absent(power=2.0)-generate]" in said
    assert "XFAIL test_mine.py::test_mine[absent-permutation] - place" in said
    assert any(line.startswith("FAILED test_mine.py::test_mine[absent-shapes]") for line in said)
    assert "[XPASS(strict)] none" in ended.stdout


def test_the_decorator_takes_a_list_of_plugins() -> None:
    with pytest.raises(ConformanceError, match=r"expected a list of plugins, got KeyNorm\(\)"):
        parametrize_with_checks(KeyNorm())


def test_a_selector_that_protects_more_than_the_usual_budget_can_be_checked() -> None:
    check_selector(TopK(recent=32))
