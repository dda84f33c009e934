"""The zoo's importances by attention against the presses of the same methods: the same slots kept."""

from __future__ import annotations

from typing import Any

import pytest
from kvpolicy_kvpress.agree import CASES, Case, same_slots
from kvpolicy_kvpress.make import kvpress, make

from kvpolicy import Budget, Policy
from kvpolicy.scorers.expected_attention import ExpectedAttention
from kvpolicy.scorers.finch import Finch
from kvpolicy.scorers.h2o import H2O
from kvpolicy.scorers.non_causal_attention import NonCausalAttention
from kvpolicy.scorers.snapkv import SnapKV
from kvpolicy.scorers.tova import TOVA
from kvpolicy.selectors.top_k import TopK

# Policy -> the press, its settings, ours of the same method, and what else the press keeps whatever its score.
SAME: dict[str, tuple[str, dict[str, Any], Any, TopK]] = {
    "expected-attention": (
        "ExpectedAttentionPress",
        {"n_future_positions": 32},
        ExpectedAttention(n_future_positions=32),
        TopK(sinks=4, recent=0),
    ),
    "h2o": ("ObservedAttentionPress", {}, H2O(accumulate="mean"), TopK(sinks=0, recent=0)),
    "non-causal-attention": (
        "NonCausalAttnPress",
        {"chunk_size": 32},
        NonCausalAttention(chunk_size=32),
        TopK(sinks=0, recent=0),
    ),
    "snapkv": ("SnapKVPress", {"window_size": 8}, SnapKV(window=8), TopK(sinks=0, recent=8)),
    "tova": ("TOVAPress", {}, TOVA(), TopK(sinks=0, recent=1)),
}


def agrees(name: str, scorer: Any, case: Case) -> bool:
    """Return whether a press and a scorer keep the same slots in every layer and head; equal scores may swap."""
    press_name, settings, _, select = SAME[name]
    model = case.model("eager" if press_name == "ObservedAttentionPress" else "sdpa")
    press = make(press_name, settings, None)
    press.compression_ratio = case.ratio
    policy = Policy(name="zoo", score=scorer, budget=Budget(tokens=case.kept), select=select)
    return same_slots(press, policy, model, case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.length}")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.agreement(name, press)) for name, (press, *_) in SAME.items()]
)
def test_it_keeps_what_the_press_keeps(name: str, case: Case) -> None:
    assert agrees(name, SAME[name][2], case)


def finch_agrees(case: Case, score: Any) -> bool:
    """Return whether Finch's press, whose question is the last 8 tokens, keeps the same slots; no key turned."""
    press = kvpress().FinchPress(case.ratio, rerotate_keys=False)
    # What it finds by a token that stands before the question, and takes out.
    press.window_size, press.delimiter_token_id = 8, -1
    policy = Policy(name="zoo", score=score, budget=Budget(tokens=case.kept), select=TopK(sinks=0, recent=8))
    return same_slots(press, policy, case.model(), case)


@pytest.mark.agreement("finch", "FinchPress")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.length}")
def test_finch_keeps_what_the_press_keeps(case: Case) -> None:
    assert finch_agrees(case, Finch(window=8))


def test_the_comparison_sees_another_score() -> None:
    assert not all(finch_agrees(case, SnapKV(window=8, kernel=1)) for case in CASES)
    assert not finch_agrees(CASES[0], Finch(window=7))
    assert not agrees("h2o", H2O(accumulate="sum"), CASES[0])
    assert not agrees("tova", H2O(accumulate="mean"), CASES[0])
    assert not agrees("snapkv", SnapKV(window=8, kernel=7), CASES[0])
