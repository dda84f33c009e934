"""The zoo's budgets: each shares slots out as a slow twin in exact numbers, written from its formula, does."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from test_zoo_selection import CASES
from torch import Tensor
from twins import slots
from views import make_view

from kvpolicy.budgets.adaptive import AdaptiveHeads
from kvpolicy.budgets.head_table import HeadTable, HeadTotals
from kvpolicy.budgets.schedule import ScheduleLayers
from kvpolicy.budgets.threshold import ThresholdHeads
from kvpolicy.errors import SettingError
from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.selectors.top_k import TopK
from kvpolicy.types import LayerView


def schedule(shape: str, first: Fraction, mean: int, available: int, layers: int) -> list[int]:
    """Exact but for the cosine, which is taken to a millionth."""
    swing = (1 if first >= 1 else -1) * min(abs(first - 1) * mean, available - mean, mean - 1)
    exact = []
    for layer in range(layers):
        x = Fraction(layer, layers - 1) if layers > 1 else Fraction(1, 2)
        if shape == "linear":
            curve = Fraction(round((1 - 2 * x) * 1_000_000), 1_000_000)
        else:
            curve = Fraction(round(math.cos(math.pi * x) * 1_000_000), 1_000_000)
        exact.append(mean + swing * curve)
    whole = [math.floor(part) for part in exact]
    up = sorted(range(layers), key=lambda layer: (whole[layer] - exact[layer], layer))
    for layer in up[: layers * mean - sum(whole)]:
        whole[layer] += 1
    return whole


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize("first", ["0", "0.7", "1", "1.5", "1.999", "2"])
def test_schedule_equals_its_twin(shape: str, first: str) -> None:
    allocate = ScheduleLayers(shape=shape, first=float(first))
    for layers in (1, 2, 3, 12, 31):
        for tokens in (1, 2, 17, 100, 300):
            available = torch.arange(1, 301, 13)
            got = allocate(torch.full_like(available, tokens), available, layers).tolist()
            for row, there in zip(got, available.tolist(), strict=True):
                assert row == schedule(shape, Fraction(first), min(tokens, there), there, layers)


def test_schedule_is_exact_for_long_prompts() -> None:
    tokens, available = torch.tensor([999_983]), torch.tensor([10_000_019])
    got = ScheduleLayers(shape="cosine", first=1.75)(tokens, available, 127)[0].tolist()
    assert got == schedule("cosine", Fraction("1.75"), 999_983, 10_000_019, 127)


def webster(parts: list[float], least: list[int], most: list[int], total: int) -> list[int]:
    """One slot at a time."""
    got = list(least)
    while sum(got) < total:
        open_ = [i for i in range(len(parts)) if got[i] < most[i]]
        got[max(open_, key=lambda i: (parts[i] / (got[i] + 0.5), -got[i], -i))] += 1
    return got


TABLE = [[0.2, 0.0, 3.0], [1.0, 1.0, 0.5], [0.1, 0.05, 0.0]]


def parts_of(table: list[list[float]], beta: float) -> list[list[float]]:
    """HeadKV: what is not shared, and each head's share of the pool, over the mean budget."""
    total, count = math.fsum(map(math.fsum, table)), sum(map(len, table))
    return [[1 - 1 / beta + score / total * count / beta for score in row] for row in table]


@pytest.mark.parametrize("beta", [1.0, 1.2, 3.0])
@pytest.mark.parametrize("padding", ["none", "left", "ragged"])
def test_head_table_equals_its_twin(padding: str, beta: float) -> None:
    parts = parts_of(TABLE, beta)
    for layer, tokens in itertools.product(range(3), (7, 12, 13, 21, 22, 30, 41, 200)):
        view = make_view(layer, slots=50, heads=(6, 3), padding=padding)
        budget = torch.tensor([tokens, max(tokens // 2, 6), tokens])
        view = view.decide(view.valid & ~TopK(sinks=2, recent=3).protect(view, budget))
        view = dataclasses.replace(view, layer=layer)
        got = HeadTable(scores=TABLE, beta=beta)(view, torch.zeros(view.valid.shape), budget).tolist()
        for b, row in enumerate(got):
            most = view.valid[b].sum(-1).tolist()
            least = [max(int((view.valid & ~view.candidates)[b, h].sum()), 1) for h in range(3)]
            assert row == webster(parts[layer], least, most, min(3 * int(budget[b]), sum(most)))


@pytest.mark.parametrize("beta", [1.0, 1.2, 3.0])
def test_head_totals_equals_its_twin(beta: float) -> None:
    parts = [math.fsum(row) / 3 for row in parts_of(TABLE, beta)]
    tokens, available = torch.tensor([1, 5, 40, 300, 90]), torch.tensor([9, 9, 100, 200, 100])
    got = HeadTotals(scores=TABLE, beta=beta)(tokens, available, 3).tolist()
    for row, budget, there in zip(got, tokens.tolist(), available.tolist(), strict=True):
        assert row == webster(parts, [1] * 3, [there] * 3, 3 * min(budget, there))


def test_both_together_are_the_allocation_of_headkv() -> None:
    """Each head within a slot of ``K (1 - 1/beta) + S K L H / beta``, which its code rounds head by head."""
    parts = parts_of(TABLE, 1.2)
    tokens, available = torch.tensor([400]), torch.tensor([9000])
    budgets = HeadTotals(scores=TABLE)(tokens, available, 3)
    for layer in range(3):
        nothing = torch.zeros(1, 3, 9000, 1)
        view = LayerView(keys=nothing, values=nothing, layer=layer)
        got = HeadTable(scores=TABLE)(view, nothing[..., 0], budgets[:, layer])[0].tolist()
        assert all(abs(have - 400 * part) < 1 for have, part in zip(got, parts[layer], strict=True))


def test_duo_attention_keeps_all_in_retrieval_heads_and_sinks_and_recent_tokens_in_the_others() -> None:
    """With a budget of exactly that; the table is of ones and zeros."""
    views = [dataclasses.replace(make_view(layer, slots=50, heads=(4, 2), batch=1), layer=layer) for layer in range(2)]
    heads = HeadTable(scores=[[1, 0], [0, 1]], beta=1)
    budget = Budget(tokens=(50 + 12) // 2, heads=heads)
    plan = Policy(name="duo", score=KeyNorm(), budget=budget, select=TopK(sinks=4, recent=8)).plan(views)
    ends = [0, 1, 2, 3, *range(42, 50)]
    assert plan.tolist() == [[[list(range(50)), ends]], [[ends, list(range(50))]]]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"scores": [[1, 2], [3]]}, "as many scores in each layer"),
        ({"scores": [[0, 0]]}, "a score above 0"),
        ({"scores": [[1, -1]]}, "greater than or equal to 0"),
        ({"scores": []}, "at least 1"),
        ({"scores": [[]]}, "at least 1"),
        ({"scores": [[1]], "beta": 0.5}, "beta"),
    ],
)
@pytest.mark.parametrize("cls", [HeadTable, HeadTotals])
def test_a_wrong_table_is_refused(cls: Any, given: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        cls(**given)


def test_a_table_of_another_model_is_refused() -> None:
    view, scores = make_view(heads=(6, 3)), torch.zeros(3, 3, 24)
    for table, shared in (([[1, 2]], False), (TABLE[:1], True)):
        with pytest.raises(SettingError, match="expected a table for"):
            HeadTable(scores=table)(dataclasses.replace(view, shared=shared), scores, torch.tensor([9, 9, 9]))
    with pytest.raises(SettingError, match="expected a table for layer 3"):
        HeadTable(scores=TABLE)(dataclasses.replace(view, layer=3), scores, torch.tensor([9, 9, 9]))
    with pytest.raises(SettingError, match="the heads of 4 layers"):
        HeadTotals(scores=TABLE)(torch.tensor([9]), torch.tensor([9]), 4)


def threshold(view: LayerView, scores: Tensor, tokens: list[int], least: float, floor: Fraction) -> list[list[int]]:
    lengths = []
    for b, budget in enumerate(tokens):
        won, rest = [], []
        for h in range(view.valid.shape[1]):
            protected = int((view.valid & ~view.candidates)[b, h].sum())
            queue = [math.inf] * protected
            queue += sorted((float(scores[b, h, t]) for t in slots(view.candidates[b, h])), reverse=True)
            have = min(max(protected, math.ceil(floor * budget), 1), len(queue))
            won.append(have)
            rest += [(-score, have + i, h) for i, score in enumerate(queue[have:]) if score >= least]
        for _, _, h in sorted(rest)[: max(len(won) * budget - sum(won), 0)]:
            won[h] += 1
        lengths.append(won)
    return lengths


@pytest.mark.parametrize("floor", ["0", "0.07", "0.5"])
@pytest.mark.parametrize("case", CASES)
def test_threshold_equals_its_twin(case: str, floor: str) -> None:
    view = make_view(**CASES[case])
    scores = (torch.randn(view.valid.shape, generator=torch.Generator().manual_seed(3)) * 4).round() / 4
    for budget in (1, 4, 14, 33, 200):
        tokens = torch.full((len(view.valid),), budget)
        decided = view.decide(view.valid & ~TopK(sinks=1, recent=2).protect(view, tokens))
        given = scores.masked_fill(~decided.candidates, torch.nan)
        for least in (-9.0, 0.25, 1.0, 9.0):
            got = ThresholdHeads(threshold=least, floor=float(floor))(decided, given, tokens).tolist()
            assert got == threshold(decided, given, tokens.tolist(), least, Fraction(floor))


def test_a_threshold_that_all_pass_leaves_the_competition_of_ada_kv() -> None:
    view = make_view(slots=40, sinks=2, recent=3)
    scores, tokens = torch.randn(view.valid.shape), torch.full((3,), 12)
    got = ThresholdHeads(threshold=-99, floor=0.2)(view, scores, tokens)
    assert torch.equal(got, AdaptiveHeads(floor=0.2)(view, scores, tokens))
