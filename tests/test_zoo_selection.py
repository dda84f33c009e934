"""The zoo's selectors: each keeps what a slow twin in float64, written from its formula, keeps."""

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

import kvpolicy
from kvpolicy.errors import SettingError
from kvpolicy.maths import noise
from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.selectors.chunks import Chunks
from kvpolicy.selectors.determinantal import Determinantal
from kvpolicy.selectors.k_centre import KCentre
from kvpolicy.selectors.mmr import MMR
from kvpolicy.selectors.random_part import RandomPart
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


def random_part(select: RandomPart, view: LayerView, scores: Tensor, lengths: Tensor) -> list[list[list[int]]]:
    """The numbers that are drawn are no paper's, and shared."""
    uniform = noise(view.valid, select.seed * 100_003 + view.layer).double()
    chosen: list[list[list[int]]] = [[] for _ in range(view.valid.shape[0])]
    for b, h in heads(view):
        score = {t: float(scores[b, h, t]) for t in slots(view.candidates[b, h])}
        kept = [t for t in slots(view.valid[b, h]) if t not in score]
        room = int(lengths[b, h]) - len(kept)
        drawn = math.floor(Fraction(str(select.random)) * room)
        kept += sorted(score, key=lambda t: (-score[t], t))[: room - drawn]
        tickets = {
            t: score[t] / select.temperature - math.log(-math.log(uniform[b, h, t])) for t in score if t not in kept
        }
        kept += sorted(tickets, key=lambda t: -tickets[t])[:drawn]
        chosen[b].append(sorted(kept))
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
            left = [t for t in free if t not in kept]
            worth = dict(zip(left, WORTH[type(select)](select, pair, score, kept, left), strict=True))
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


# Each with the slots kept and those left, of which it returns what each is worth.


def mmr(select: MMR, pair: list[list[float]], score: dict[int, float], kept: list[int], left: list[int]) -> list[float]:
    alike = [max((pair[t][j] for j in kept), default=0.0) for t in left]
    return [select.relevance * score[t] - (1 - select.relevance) * most for t, most in zip(left, alike, strict=True)]


def k_centre(
    select: KCentre, pair: list[list[float]], score: dict[int, float], kept: list[int], left: list[int]
) -> list[float]:
    if not kept:
        return [score[t] for t in left]
    return [select.relevance * score[t] + (1 - select.relevance) * min(pair[t][j] for j in kept) for t in left]


def determinant(
    select: Determinantal, pair: list[list[float]], score: dict[int, float], kept: list[int], left: list[int]
) -> list[float]:
    members = torch.tensor([[*kept, t] for t in left])
    # That of protected slots: their score is 0.
    q = torch.tensor([math.exp(select.quality * score.get(j, 0.0) / 2) for j in range(len(pair))], dtype=torch.float64)
    kernel = torch.outer(q, q) * torch.tensor(pair, dtype=torch.float64) + select.ridge * torch.eye(len(pair))
    return torch.linalg.slogdet(kernel[members[:, :, None], members[:, None]]).logabsdet.tolist()


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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "select",
    [RandomPart(sinks=1, recent=2), RandomPart(sinks=0, recent=0, random=1.0, temperature=0.5, seed=2**40 + 7)],
    ids=repr,
)
def test_random_part_equals_its_twin(select: RandomPart, case: str) -> None:
    for budget in (3, 16, 33):
        view, scores, lengths = decided(select, case, budget)
        assert select(view, scores, lengths).tolist() == random_part(select, view, scores, lengths)


def test_slots_are_drawn_without_replacement_by_the_softmax_of_their_scores() -> None:
    """Two of four, once in each of many heads: how often each of the six pairs comes up."""
    scores, count = torch.tensor([0.0, 0.5, 1.0, 2.0]), 20_000
    nothing = torch.zeros(1, count, 4, 1)
    view, lengths = LayerView(keys=nothing, values=nothing), torch.full((1, count), 2)
    select = RandomPart(sinks=0, recent=0, random=1.0, temperature=0.5)
    kept = select(view, scores.expand(1, count, 4), lengths).to_mask(4)[0]
    p = (scores.double() / 0.5).softmax(-1).tolist()
    for i, j in itertools.combinations(range(4), 2):
        due = p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
        found = float((kept[:, i] & kept[:, j]).double().mean())
        assert abs(found - due) < 5 * math.sqrt(due * (1 - due) / count)


def test_nacl_draws_seven_of_nineteen_as_the_authors_code() -> None:
    select = kvpolicy.load("nacl").select
    assert isinstance(select, RandomPart) and select.temperature == 1 / 32
    assert [math.floor(Fraction(str(select.random)) * room) for room in (19, 190, 500)] == [7, 70, 7 * 500 // 19]


def test_without_a_random_part_it_is_top_k() -> None:
    for case in CASES:
        view, scores, lengths = decided(select := RandomPart(random=0.0), case, 25)
        assert select(view, scores, lengths).tolist() == TopK()(view, scores, lengths).tolist()


def test_heads_that_keep_the_same_slots_draw_the_same() -> None:
    view = dataclasses.replace(make_view(slots=60), shared=True)
    scores = torch.randn(3, 1, 60).expand(-1, 2, -1)
    for row in RandomPart()(view, scores, torch.full((3, 2), 30)).tolist():
        assert row[0] == row[1]


@pytest.mark.parametrize("cls", [MMR, KCentre])
def test_relevance_alone_is_top_k(cls: Any) -> None:
    for case in CASES:
        view, scores, lengths = decided(select := cls(relevance=1.0), case, 25)
        assert select(view, scores, lengths).tolist() == TopK()(view, scores, lengths).tolist()


@pytest.mark.parametrize(
    "select", [MMR(), KCentre(), Determinantal(), Chunks(), RandomPart()], ids=lambda one: one.name
)
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


def test_settings_that_rounding_would_decide_are_refused() -> None:
    for wrong in ({"quality": 51.0}, {"ridge": 1e-5}):
        with pytest.raises(SettingError):
            Determinantal(**wrong)


def test_chunks_longer_than_a_head_are_as_long_as_it() -> None:
    view = make_view(slots=40)
    lengths, scores = torch.full(view.valid.shape[:2], 12), torch.rand(view.valid.shape)
    assert Chunks(length=2**40)(view, scores, lengths).tolist() == Chunks(length=40)(view, scores, lengths).tolist()
