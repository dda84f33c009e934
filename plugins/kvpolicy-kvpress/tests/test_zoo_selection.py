"""The zoo's budgets and selectors against the presses of the same methods: the same slots kept."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from kvpolicy_kvpress.agree import CASES, Case, found, read
from kvpolicy_kvpress.make import kvpress
from transformers import DynamicCache

import kvpolicy
from kvpolicy import Budget, Policy
from kvpolicy.budgets.adaptive import AdaptiveHeads
from kvpolicy.budgets.head_table import HeadTable
from kvpolicy.budgets.threshold import ThresholdHeads
from kvpolicy.scorers.key_diff import KeyDiff
from kvpolicy.scorers.snapkv import SnapKV
from kvpolicy.selectors.chunks import Chunks
from kvpolicy.selectors.top_k import TopK


def held(policy: Policy, model: Any, case: Case) -> list[list[list[list[int]]]]:
    cache = DynamicCache()
    with policy.on(model):
        read(model, case, cache)
    return [layer.held for layer in cache.layers]


def kept_by(press: Any, model: Any, case: Case) -> list[list[list[list[int]]]]:
    full, theirs = DynamicCache(), DynamicCache()
    read(model, case, full)
    with press(model):
        read(model, case, theirs)
    return [found(one.keys, two.keys).tolist() for one, two in zip(full.layers, theirs.layers, strict=True)]


def chunks_agree(case: Case, length: int, heads: str = "together") -> bool:
    model = case.model()
    press = kvpress().ChunkKVPress(kvpress().KeyDiffPress(case.ratio), chunk_length=length)
    theirs = kept_by(press, model, case)
    # The press keeps whole chunks alone: fewer slots in a layer that keeps the last chunk, which is shorter.
    for layer, wanted in enumerate(theirs):
        select = Chunks(sinks=0, recent=0, length=length, heads=heads)
        policy = Policy(name="zoo", score=KeyDiff(), budget=Budget(tokens=len(wanted[0][0])), select=select)
        if held(policy, model, case)[layer] != wanted:
            return False
    return True


@pytest.mark.agreement("chunkkv", "ChunkKVPress")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.length}")
@pytest.mark.parametrize("length", [7, 20])
def test_chunks_keeps_what_the_press_keeps(length: int, case: Case) -> None:
    assert chunks_agree(case, length)


def test_the_comparison_sees_chunks_of_another_kind() -> None:
    assert not chunks_agree(CASES[0], 7, heads="apart")


@pytest.mark.agreement("streaming-llm", "StreamingLLMPress")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.length}")
def test_streaming_llm_keeps_what_the_press_keeps(case: Case) -> None:
    model = case.model()
    press = kvpress().StreamingLLMPress(case.ratio)
    assert held(kvpolicy.load("streaming-llm", budget=case.kept), model, case) == kept_by(press, model, case)


def masked_by(press: Any, model: Any, case: Case) -> list[list[list[list[int]]]]:
    """Return what a press that masks keys, and evicts none, leaves."""
    full = DynamicCache()
    with press(model):
        read(model, case, full)
    left = []
    for layer, block in zip(full.layers, model.model.layers, strict=True):
        keep = torch.ones(layer.keys.shape[:3], dtype=torch.bool)
        if block.self_attn.masked_key_indices is not None:
            keep[tuple(block.self_attn.masked_key_indices)] = False
        left.append([[head.nonzero().flatten().tolist() for head in row] for row in keep])
    return left


def ada_kv_agrees(case: Case, floor: Fraction) -> bool:
    model = case.model()
    press = kvpress().AdaKVPress(kvpress().SnapKVPress(case.ratio, window_size=8), alpha_safeguard=1 / 3)
    budget = Budget(tokens=case.kept, heads=AdaptiveHeads(floor=float(floor)))
    policy = Policy(name="zoo", score=SnapKV(window=8), budget=budget, select=TopK(sinks=0, recent=8))
    return held(policy, model, case) == masked_by(press, model, case)


@pytest.mark.agreement("ada-kv", "AdaKVPress")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.length}")
def test_ada_kv_keeps_what_the_press_keeps(case: Case) -> None:
    """The floor is a third of 48 and of 57 slots, both whole: the press rounds down, and ours up."""
    assert ada_kv_agrees(case, Fraction(1, 3))


def test_the_comparison_sees_another_floor() -> None:
    assert not ada_kv_agrees(CASES[0], Fraction(1))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.length}")
@pytest.mark.parametrize("share", [0.4, 0.8])
def test_streaming_heads_keep_what_duo_attention_does(
    share: float, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = case.model()
    config = model.config
    scores = numpy.random.default_rng(0).random((config.num_hidden_layers, config.num_key_value_heads))
    monkeypatch.setattr(
        kvpress().DuoAttentionPress, "load_attention_pattern", staticmethod(lambda model: (4, 16, scores))
    )
    theirs = masked_by(kvpress().DuoAttentionPress(head_compression_ratio=share), model, case)
    heads = HeadTable(scores=scores.tolist(), streaming=share)
    budget = Budget(tokens=case.length, heads=heads)
    policy = Policy(name="zoo", score=KeyDiff(), budget=budget, select=TopK(sinks=4, recent=16))
    assert held(policy, model, case) == theirs
    lengths = {len(head) for layer in theirs for row in layer for head in row}
    assert lengths == {20, case.length}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.length}")
def test_threshold_keeps_what_the_press_keeps(case: Case) -> None:
    model = case.model()
    press = kvpress().DMSPress(kvpress().KeyDiffPress(), threshold=-0.2, sliding_window_size=16)
    budget = Budget(tokens=case.length, heads=ThresholdHeads(threshold=-0.2))
    policy = Policy(name="zoo", score=KeyDiff(), budget=budget, select=TopK(sinks=0, recent=16))
    ours = held(policy, model, case)
    assert ours == masked_by(press, model, case)
    assert {len(head) for layer in ours for row in layer for head in row} != {case.length}
