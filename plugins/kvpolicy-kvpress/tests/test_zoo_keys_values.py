"""The zoo's methods by keys and values against the presses of the same methods: the same slots kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kvpolicy_kvpress.agree import CASES, Case, same_slots
from kvpolicy_kvpress.make import kvpress, make, reads
from torch import Tensor

from kvpolicy import Budget, Policy, calibrate, filters
from kvpolicy.combiners.critical_kv import CriticalKV
from kvpolicy.combiners.fixed import Fixed
from kvpolicy.plugin import walk
from kvpolicy.scorers.cur_dkv import CurDKV
from kvpolicy.scorers.key_diff import KeyDiff
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.scorers.lag_kv import LagKV
from kvpolicy.scorers.leverage import Leverage
from kvpolicy.scorers.non_causal_attention import NonCausalAttention
from kvpolicy.scorers.q_filters import QFilters
from kvpolicy.scorers.snapkv import SnapKV
from kvpolicy.selectors.top_k import TopK


@dataclass(frozen=True)
class Pair:
    """A press, and ours of the same method.

    Args:
        press: its class.
        score: ours, given how many slots a head keeps.
        settings: of the press.
        sinks: the first slots that the press keeps whatever their score.
        recent: the last ones.
    """

    press: str
    score: Callable[[int], Any]
    settings: dict[str, Any] = field(default_factory=dict)
    sinks: int = 0
    recent: int = 0


def compactor(kept: int, among: str = "candidates", over: str = "layer") -> Fixed:
    inputs = [Leverage(among=among), NonCausalAttention(chunk_size=32, among=among)]
    return Fixed(inputs=inputs, weights=[0.35, 1.0], normalize="z-score", over=over)


SNAPKV = {"press": "SnapKVPress", "settings": {"window_size": 8}}
# By policy, and what differs.
PAIRS = {
    "compactor": Pair("CompactorPress", compactor, {"chunk_size": 32, "blending": 0.35}, sinks=8, recent=4),
    "key-diff": Pair("KeyDiffPress", lambda kept: KeyDiff()),
    "lag-kv": Pair("LagKVPress", lambda kept: LagKV(lag=16), {"lag_size": 16}),
    "lag-kv, cross": Pair(
        "LagKVPress", lambda kept: LagKV(lag=16, cross=True), {"lag_size": 16, "cross_scoring": True}
    ),
    "lag-kv, short": Pair("LagKVPress", lambda kept: LagKV(lag=64), {"lag_size": 64}),
    # The window that SnapKVPress keeps counts among the first half there, and is protected here.
    "critical-kv": Pair(
        "CriticalKVPress",
        lambda kept: CriticalKV(importance=SnapKV(window=8), first=int(kept * 0.5) - 8),
        {"press": SNAPKV},
        recent=8,
    ),
    "critical-kv, stage 2": Pair(
        "CriticalKVPress",
        lambda kept: CriticalKV(importance=SnapKV(window=8)),
        {"press": SNAPKV, "first_stage_ratio": 0.0},
        recent=8,
    ),
    "leverage": Pair("LeverageScorePress", lambda kept: Leverage()),
    "cur-dkv": Pair("CURPress", lambda kept: CurDKV(), sinks=4),
    "cur-dkv, values": Pair(
        "CURPress",
        lambda kept: CurDKV(leverage="value", window=7),
        {"leverage_type": "value", "local_window_size": 7},
        sinks=4,
    ),
}


def agrees(pair: Pair, case: Case, score: Any = None) -> bool:
    """Return whether a press and a score keep the same slots in every layer and head; equal scores may swap."""
    score = score or pair.score(case.kept)
    model = case.model()
    press = make(
        pair.press, pair.settings, case.ratio if "compression_ratio" in reads(pair.press, pair.settings) else None
    )
    press.compression_ratio = case.ratio
    for scorer in walk(score):
        if isinstance(scorer, Leverage):
            share_sketch(press, scorer)
    select = TopK(sinks=pair.sinks, recent=pair.recent)
    policy = Policy(name="zoo", score=score, budget=Budget(tokens=case.kept), select=select)
    return same_slots(press, policy, model, case)


def share_sketch(press: Any, scorer: Leverage) -> None:
    """Have a press sketch by the Gaussian matrix of `scorer`: it draws one for each head, from torch's own state."""
    own = press.score

    def score(module: Any, hidden_states: Tensor, keys: Tensor, *args: Any) -> Tensor:
        phi = scorer._phi(keys.shape[-1], module.layer_idx)

        def drawn(*shape: int, **_: Any) -> Tensor:
            return (phi * shape[-1] ** 0.5).expand(shape)

        with patch("torch.randn", drawn):
            found: Tensor = own(module, hidden_states, keys, *args)
        return found

    press.score = score


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.length}")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.agreement(name.split(",")[0], pair.press)) for name, pair in PAIRS.items()],
)
def test_it_keeps_what_the_press_keeps(name: str, case: Case) -> None:
    assert agrees(PAIRS[name], case)


@pytest.mark.agreement("key-norm", "KnormPress")
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.shape != "qwen3"], ids=lambda case: f"{case.name}-{case.length}"
)
def test_key_norm_keeps_what_the_press_keeps(case: Case) -> None:
    """But for Qwen3, which scales all keys to one length, so that rounding alone tells them apart."""
    assert agrees(Pair("KnormPress", lambda kept: KeyNorm()), case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.length}")
@pytest.mark.parametrize("other", [False, True], ids=["same", "other filters"])
def test_q_filters_keep_what_the_press_keeps(
    other: bool, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the same filters, calibrated on another text."""
    text = torch.arange(256).flip(0)
    found = calibrate.q_filters(case.model(), text)
    filters.write(path := tmp_path / "q.safetensors", found, filters.Made(case.name, {}, len(text)))
    given = found.roll(1, 0) if other else found
    monkeypatch.setattr(kvpress().QFilterPress, "load_q_filters", staticmethod(lambda name: given))
    assert agrees(Pair("QFilterPress", lambda kept: QFilters(file=path)), case) != other


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("compactor", compactor(0, among="valid")),
        ("compactor", compactor(0, over="head")),
        ("key-diff", KeyNorm()),
        ("lag-kv", LagKV(lag=17)),
        ("critical-kv", CriticalKV(importance=SnapKV(window=8))),
        ("leverage", Leverage(ridge=1.0)),
        ("cur-dkv", CurDKV(window=17)),
    ],
)
def test_the_comparison_sees_another_score(name: str, other: Any) -> None:
    assert not agrees(PAIRS[name], CASES[1], other)
