"""The zoo's budgets and selectors: each keeps what a slow twin in float64, written from its formula, keeps."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from twins import heads, slots
from views import make_view

from kvpolicy.budgets.adaptive import AdaptiveHeads
from kvpolicy.budgets.head_table import HeadTable, HeadTotals
from kvpolicy.budgets.schedule import ScheduleLayers
from kvpolicy.budgets.threshold import ThresholdHeads
from kvpolicy.errors import SettingError
from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.selectors.chunks import Chunks
from kvpolicy.selectors.determinantal import Determinantal
from kvpolicy.selectors.k_centre import KCentre
from kvpolicy.selectors.mmr import MMR
from kvpolicy.selectors.top_k import TopK
from kvpolicy.testing.checks.memory import peak
from kvpolicy.types import LayerView

CASES: dict[str, dict[str, Any]] = {
    "gqa 64": {"slots": 61},
    "mha 80": {"slots": 96, "heads": (3, 3), "sizes": (80, 80)},
    "gqa 128": {"slots": 130, "heads": (4, 2), "sizes": (128, 128), "batch": 1},
    "small": {"slots": 40, "sizes": (5, 7)},
    "one slot": {"slots": 1},
    "left padding": {"slots": 70, "padding": "left"},
    "right padding": {"slots": 70, "padding": "right"},
    "ragged heads": {"slots": 70, "padding": "ragged"},
}


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


def chunks(view: LayerView, scores: Tensor, lengths: Tensor, size: int, together: bool) -> list[list[list[int]]]:
    chosen: list[list[list[int]]] = [[] for _ in range(view.valid.shape[0])]
    for b, h in heads(view):
        among = range(view.valid.shape[1]) if together else [h]
        found: dict[int, list[float]] = {}
        for other in among:
            for place, t in enumerate(slots(view.valid[b, other])):
                if view.candidates[b, other, t]:
                    found.setdefault(place // size, []).append(float(scores[b, other, t]))
        best = sorted(found, key=lambda chunk: (-math.fsum(found[chunk]) / len(found[chunk]), chunk))
        own = slots(view.valid[b, h])
        order = [t for t in own if not view.candidates[b, h, t]]
        for chunk in best:
            inside = [t for t in own[chunk * size : (chunk + 1) * size] if view.candidates[b, h, t]]
            order += sorted(inside, key=lambda t: (-float(scores[b, h, t]), t))
        chosen[b].append(sorted(order[: int(lengths[b, h])]))
    return chosen


def greedily(select: Any, view: LayerView, scores: Tensor, lengths: Tensor) -> list[list[list[int]]]:
    """One by one: the protected, then whichever is worth most beside those chosen."""
    chosen: list[list[list[int]]] = [[] for _ in range(view.valid.shape[0])]
    vectors = (view.values if select.on == "values" else view.keys).double()
    for b, h in heads(view):
        own, free = slots(view.valid[b, h]), slots(view.candidates[b, h])
        low, high = (pick((float(scores[b, h, t]) for t in free), default=0.0) for pick in (min, max))
        score = {t: (float(scores[b, h, t]) - low) / ((high - low) or 1) for t in free}
        pair = PAIRS[type(select)](vectors[b, h], own)
        kept = [t for t in own if t not in score]
        while len(kept) < int(lengths[b, h]):
            worth = {t: WORTH[type(select)](select, pair, score, kept, t) for t in free if t not in kept}
            kept.append(max(worth, key=lambda t: (worth[t], -t)))
        chosen[b].append(sorted(kept))
    return chosen


def cosines(x: Tensor, own: list[int]) -> list[list[float]]:
    directions = x / x.norm(dim=-1, keepdim=True)
    return (directions @ directions.T).tolist()


def distances(x: Tensor, own: list[int]) -> list[list[float]]:
    """Of each pair, over twice the longest."""
    size = 2 * max(float(x[j].norm()) for j in own)
    return ((x[:, None] - x).norm(dim=-1) / size).tolist()


def mmr(select: MMR, pair: list[list[float]], score: dict[int, float], kept: list[int], t: int) -> float:
    alike = max((pair[t][j] for j in kept), default=0.0)
    return select.relevance * score[t] - (1 - select.relevance) * alike


def k_centre(select: KCentre, pair: list[list[float]], score: dict[int, float], kept: list[int], t: int) -> float:
    if not kept:
        return score[t]
    return select.relevance * score[t] + (1 - select.relevance) * min(pair[t][j] for j in kept)


def determinant(
    select: Determinantal, pair: list[list[float]], score: dict[int, float], kept: list[int], t: int
) -> float:
    members = [*kept, t]
    # That of protected slots: their score is 0.
    q = [math.exp(select.quality * score.get(j, 0.0) / 2) for j in members]
    kernel = [[q[i] * q[j] * pair[a][b] for j, b in enumerate(members)] for i, a in enumerate(members)]
    ridge = select.ridge * torch.eye(len(q), dtype=torch.float64)
    return float(torch.linalg.slogdet(torch.tensor(kernel, dtype=torch.float64) + ridge).logabsdet)


PAIRS: dict[type, Any] = {MMR: cosines, KCentre: distances, Determinantal: cosines}
WORTH: dict[type, Any] = {MMR: mmr, KCentre: k_centre, Determinantal: determinant}


def decided(select: Any, case: str, budget: int) -> tuple[LayerView, Tensor, Tensor]:
    view = make_view(**CASES[case])
    tokens = torch.full((len(view.valid),), budget)
    view = view.decide(view.valid & ~select.protect(view, tokens))
    scores = torch.randn(view.valid.shape, generator=torch.Generator().manual_seed(budget))
    return view, scores.masked_fill(~view.candidates, torch.nan), view.valid.sum(-1).clamp(max=budget)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("apart", ["together", "apart"])
@pytest.mark.parametrize("size", [1, 7, 20, 200])
def test_chunks_equals_its_twin(case: str, apart: str, size: int) -> None:
    for sinks, recent in ((0, 0), (2, 5)):
        select = Chunks(sinks=sinks, recent=recent, length=size, heads=apart)
        for budget in (7, 20, 33, 200):
            view, scores, lengths = decided(select, case, budget)
            scores = scores * 2.0**124  # their sum overflows float32
            assert select(view, scores, lengths).tolist() == chunks(view, scores, lengths, size, apart == "together")


def test_chunks_of_one_slot_are_top_k() -> None:
    for case in CASES:
        select = Chunks(length=1, heads="apart")
        view, scores, lengths = decided(select, case, 25)
        assert select(view, scores, lengths).tolist() == TopK()(view, scores, lengths).tolist()


GREEDY = [
    MMR(sinks=1, recent=2),
    MMR(sinks=0, recent=0, relevance=0.8, on="values"),
    KCentre(sinks=1, recent=2),
    KCentre(sinks=0, recent=0, relevance=0.0),
    Determinantal(sinks=1, recent=2),
    Determinantal(sinks=0, recent=0, quality=1.0, ridge=0.1, on="values"),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("select", GREEDY, ids=repr)
def test_greedy_selectors_equal_their_twins(select: Any, case: str) -> None:
    for budget in (3, 16):
        view, scores, lengths = decided(select, case, budget)
        assert select(view, scores, lengths).tolist() == greedily(select, view, scores, lengths)


@pytest.mark.parametrize("cls", [MMR, KCentre])
def test_relevance_alone_is_top_k(cls: Any) -> None:
    for case in CASES:
        view, scores, lengths = decided(select := cls(relevance=1.0), case, 25)
        assert select(view, scores, lengths).tolist() == TopK()(view, scores, lengths).tolist()


@pytest.mark.parametrize("select", [MMR(), KCentre(), Determinantal(), Chunks()], ids=lambda one: one.name)
def test_memory_grows_with_the_slots_and_no_faster(select: Any) -> None:
    def took(count: int) -> int:
        view = make_view(slots=count, batch=1, heads=(1, 1), sizes=(16, 16), sinks=4, recent=8)
        scores, lengths = torch.randn(view.valid.shape), torch.tensor([[32]])
        return peak(lambda: select(view, scores, lengths))

    assert took(4096) < 2.2 * took(2048)


@pytest.mark.parametrize("select", GREEDY[:1] + GREEDY[2:3] + GREEDY[4:5], ids=lambda one: one.name)
@pytest.mark.parametrize("size", [0.0, 6e4, 1e30])
def test_keys_of_any_size_are_chosen_among(select: Any, size: float) -> None:
    keys = torch.randn(1, 2, 30, 8, generator=torch.Generator().manual_seed(0)) * size
    view = LayerView(keys=keys, values=keys)
    policy = Policy(name="x", score=KeyNorm(), budget=Budget(tokens=12), select=select)
    plan = policy.plan([view])[0]
    assert plan.lengths.tolist() == [[12, 12]]


@pytest.mark.parametrize("cls", [MMR, KCentre, Determinantal])
def test_they_declare_what_they_read(cls: Any) -> None:
    assert cls(on="values").needs.values and not cls(on="values").needs.keys
    assert cls(space="pre-rope").needs.pre_rope
    with pytest.raises(SettingError, match="post-rope"):
        cls(on="values", space="pre-rope")
