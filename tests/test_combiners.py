"""Combiners and redundancies against their slow twins, and where normalising breaks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import twins
from torch import Tensor
from views import CASES, assert_close, change, make_view

from kvpolicy.combiners.best_rank import BestRank
from kvpolicy.combiners.fixed import Fixed
from kvpolicy.combiners.redundancy_adaptive import RedundancyAdaptive
from kvpolicy.errors import PluginError, SettingError
from kvpolicy.maths import cosine_redundancy, euclidean_redundancy, from_zero, match_mean, min_max
from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.cosine_diversity import CosineDiversity
from kvpolicy.scorers.euclidean_diversity import EuclideanDiversity
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.scorers.recency import Recency
from kvpolicy.scorers.snapkv import SnapKV
from kvpolicy.scorers.value_norm import ValueNorm
from kvpolicy.types import LayerView, Needs

WAYS = ["min-max", "rank", "z-score", "match-importance", "none"]
DIVERSITY = Fixed(inputs=[CosineDiversity(), EuclideanDiversity()])
REDUNDANCIES = [(cosine_redundancy, twins.cosine_redundancy), (euclidean_redundancy, twins.euclidean_redundancy)]


def some_scores(view: LayerView, seed: int, shift: float = 0.0) -> Tensor:
    """Random scores, some of them equal, nan where nobody should look."""
    scores = torch.randn(view.valid.shape, generator=torch.Generator().manual_seed(seed)) + shift
    return scores.mul(4).round().div(4).masked_fill(~view.candidates, torch.nan)


@pytest.mark.parametrize("over", ["head", "layer"])
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_fixed_equals_its_twin(case: str, how: str, over: str) -> None:
    view = make_view(**CASES[case])
    inputs = [some_scores(view, seed) for seed in range(3)]
    weights = [0.5, 2.0, -0.25]
    fixed = Fixed(inputs=[Recency()] * 3, weights=weights, normalize=how, over=over)  # type: ignore[arg-type]
    want = twins.fixed(view, inputs, weights, how, over)
    size = max(float(want[view.candidates].abs().max()), 4.0)
    summed = view.slots * (view.kv_heads if over == "layer" else 1)
    assert_close(fixed(view, inputs=inputs), want, view.candidates, roundings=4 * summed + 16, size=size)


@pytest.mark.parametrize("weights", [None, (1.0, 1.0, 1.0), (4.0, 1.0, 0.25)])
@pytest.mark.parametrize("case", CASES)
def test_best_rank_equals_its_twin(case: str, weights: tuple[float, ...] | None) -> None:
    view = make_view(**CASES[case])
    inputs = [some_scores(view, seed) for seed in range(3)]
    got = BestRank(inputs=[Recency()] * 3, weights=weights)(view, inputs=inputs)
    assert_close(got, twins.best_rank(view, inputs, weights or (1.0,) * 3), view.candidates, roundings=2)


def test_best_rank_keeps_each_inputs_own_best() -> None:
    view = LayerView(keys=torch.zeros(1, 1, 40, 2), values=torch.zeros(1, 1, 40, 2))
    rising = torch.arange(40.0).view(1, 1, -1)
    best = BestRank(inputs=[Recency(), KeyNorm()], weights=[3, 1])
    # As different in scale as they may be: only their order counts.
    kept = best(view, inputs=[rising * 1e-30, -rising * 1e30])[0, 0].topk(8).indices
    assert sorted(kept.tolist()) == [0, 1, *range(34, 40)]


def test_a_constant_input_has_no_best() -> None:
    view = make_view(sinks=1, padding="ragged")
    first = some_scores(view, 1)
    best = BestRank(inputs=[Recency(), KeyNorm()])
    both = best(view, inputs=[first, torch.full_like(first, 3.0)])[view.candidates]
    assert torch.equal(both, BestRank(inputs=[Recency()])(view, inputs=[first])[view.candidates])


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [], [1.0, math.nan], [1.0, "2"], [1.0, 1e39]])
def test_best_ranks_wrong_weights_are_refused(weights: list[Any]) -> None:
    with pytest.raises(SettingError) as caught:
        BestRank(inputs=[Recency(), KeyNorm()], weights=weights)
    assert caught.value.problems[0][0][0] == "weights"


def test_without_weights_all_count_alike() -> None:
    view = make_view()
    inputs = [some_scores(view, seed) for seed in range(4)]
    alike = Fixed(inputs=[Recency()] * 4)(view, inputs=inputs)
    assert torch.equal(alike, Fixed(inputs=[Recency()] * 4, weights=[0.25] * 4)(view, inputs=inputs))


@pytest.mark.parametrize("how", [way for way in WAYS if way != "none"])
@pytest.mark.parametrize("level", [0.0, 7.5, -3.25, 1e30, 0.1])
def test_a_constant_input_adds_nothing(how: str, level: float) -> None:
    view = make_view(sinks=1, padding="ragged")
    first = some_scores(view, 1, shift=9.0)
    constant = torch.full_like(first, level)
    fixed = Fixed(inputs=[Recency()] * 2, weights=[1.0, 1.0], normalize=how)  # type: ignore[arg-type]
    alone = Fixed(inputs=[Recency()], weights=[1.0], normalize=how)  # type: ignore[arg-type]
    got = fixed(view, inputs=[first, constant])[view.candidates]
    assert torch.equal(got, alone(view, inputs=[first])[view.candidates])


@pytest.mark.parametrize("how", WAYS)
def test_scores_of_any_size_stay_finite(how: str) -> None:
    view = make_view(padding="left")
    for size in (1e36, 1e-38, 1e-44):
        fixed = Fixed(inputs=[Recency()] * 2, normalize=how)  # type: ignore[arg-type]
        inputs = [torch.rand(view.valid.shape) * size for _ in range(2)]
        assert fixed(view, inputs=inputs)[view.candidates].isfinite().all()


@pytest.mark.parametrize(
    ("weights", "where"), [([1.0], "weights"), ([1.0, 1.0, 1.0], "weights"), ([], "weights"), ([1.0, "2"], "weights")]
)
def test_wrong_weights_are_refused_where_they_stand(weights: list[Any], where: str) -> None:
    with pytest.raises(SettingError) as caught:
        Fixed(inputs=[Recency(), KeyNorm()], weights=weights)
    assert caught.value.problems[0][0][0] == where


@pytest.mark.parametrize("inputs", [[], ["snapkv"], None])
def test_wrong_inputs_are_refused(inputs: Any) -> None:
    with pytest.raises(SettingError) as caught:
        Fixed(inputs=inputs)
    assert caught.value.problems[0][0][0] == "inputs"


@pytest.mark.parametrize(("measure", "twin"), REDUNDANCIES)
@pytest.mark.parametrize("case", CASES)
def test_closed_form_equals_pair_by_pair(case: str, measure: Callable[..., Tensor], twin: Callable[..., float]) -> None:
    view = make_view(**CASES[case])
    for vectors in (view.keys, view.values):
        want = torch.tensor(
            [[twin(vectors[b, h], view.candidates[b, h]) for h in range(vectors.shape[1])] for b in range(len(vectors))]
        )
        everywhere = torch.ones_like(want, dtype=torch.bool)
        roundings = 2 * (vectors.shape[-1] + view.slots + 16)
        assert_close(measure(vectors, view.candidates), want.double(), everywhere, roundings=roundings)


@pytest.mark.parametrize("measure", [cosine_redundancy, euclidean_redundancy])
def test_redundancy_at_its_ends(measure: Callable[..., Tensor]) -> None:
    every = torch.ones(1, 1, 16, dtype=torch.bool)
    direction = torch.randn(8)
    assert float(measure(direction.expand(1, 1, 16, 8), every)) == pytest.approx(1)  # all the same
    assert float(measure(torch.eye(16)[None, None], every)) == pytest.approx(0, abs=1e-6)  # orthogonal
    signs = torch.tensor([1.0, -1.0]).repeat(8)[None, None, :, None]
    assert float(measure(direction * signs, every)) == 0  # opposite: under 0, clamped
    assert float(measure(torch.zeros(1, 1, 16, 8), every)) == 0
    lone = (every & (torch.arange(16) == 3)).expand(200, 1, 16)
    assert not measure(torch.randn(200, 1, 16, 8), lone).any()  # no pair
    assert float(measure(torch.randn(1, 1, 16, 8), ~every)) == 0  # none


@pytest.mark.parametrize("measure", [cosine_redundancy, euclidean_redundancy])
@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_redundancy_does_not_depend_on_the_unit(measure: Callable[..., Tensor], scale: float) -> None:
    view = make_view(padding="left")
    torch.testing.assert_close(measure(view.keys * scale, view.valid), measure(view.keys, view.valid))


JOINS: dict[str, Callable[[float, float], float]] = {
    "mean": lambda c, e: (c + e) / 2,
    "max": max,
    "min": min,
    "product": lambda c, e: c * e,
}


@pytest.mark.parametrize("weight", [0, 0.25, 1.0])
@pytest.mark.parametrize("case", ["gqa", "left padding", "ragged heads"])
def test_a_number_is_the_redundancy_of_every_head(case: str, weight: float) -> None:
    view = make_view(**CASES[case])
    importance, diversity = some_scores(view, 1).abs(), some_scores(view, 3)
    mix = RedundancyAdaptive(importance=KeyNorm(), diversity=Recency(), redundancy=weight)
    assert torch.equal(mix.measure(view), torch.full(view.valid.shape[:2], float(weight)))
    fixed = Fixed(inputs=[KeyNorm(), Recency()], weights=[1 - weight, weight], normalize="match-importance")
    found, want = mix(view, importance=importance, diversity=diversity), fixed(view, inputs=[importance, diversity])
    assert_close(found, want, view.candidates, roundings=4, size=float(importance[view.candidates].max()))


@pytest.mark.parametrize("weight", [-0.1, 1.5, True, "half"])
def test_a_redundancy_that_is_none_is_refused(weight: Any) -> None:
    with pytest.raises(SettingError, match="redundancy"):
        RedundancyAdaptive(importance=KeyNorm(), diversity=Recency(), redundancy=weight)


@pytest.mark.parametrize(
    ("redundancy", "join"), [("cosine", "mean"), ("euclidean", "mean"), *(("both", join) for join in JOINS)]
)
@pytest.mark.parametrize("on", ["keys", "values"])
@pytest.mark.parametrize("case", ["gqa", "mqa", "one slot", "sizes differ", "left padding", "ragged heads", "bfloat16"])
def test_redundancy_adaptive_equals_its_twin(case: str, on: str, redundancy: str, join: str) -> None:
    view = make_view(**CASES[case])
    # Scores as attention gives them, not below 0; and as key norm does, all below 0.
    for importance in (some_scores(view, 1).abs(), some_scores(view, 2).abs().neg() - 3):
        diversity = some_scores(view, 3)
        mix = RedundancyAdaptive(importance=KeyNorm(), diversity=Recency(), redundancy=redundancy, join=join, on=on)  # type: ignore[arg-type]
        vectors = getattr(view, on)
        weights = [
            [
                {
                    "cosine": lambda c, e: c,
                    "euclidean": lambda c, e: e,
                    "both": JOINS[join],
                }[redundancy](
                    twins.cosine_redundancy(vectors[b, h], view.candidates[b, h]),
                    twins.euclidean_redundancy(vectors[b, h], view.candidates[b, h]),
                )
                for h in range(vectors.shape[1])
            ]
            for b in range(len(vectors))
        ]
        want = twins.redundancy_adaptive(view, importance, diversity, weights)
        got = mix(view.limit(mix.needs, "test"), importance=importance, diversity=diversity)
        size = max(float(want[view.candidates].abs().max()), 4.0)
        assert_close(got, want, view.candidates, roundings=4 * (vectors.shape[-1] + view.slots + 16), size=size)


def test_diversity_keeps_its_order_when_importance_is_below_zero() -> None:
    """Scaling to a negative mean would turn it round."""
    same = torch.ones(1, 1, 3, 2)  # redundancy 1: diversity alone decides
    view = LayerView(keys=same, values=same)
    mix = RedundancyAdaptive(importance=KeyNorm(), diversity=Recency())
    scores = mix(view, importance=torch.tensor([[[-5.0, -2.0, -4.0]]]), diversity=torch.tensor([[[1.0, 2.0, 3.0]]]))
    assert scores[0, 0].argsort().tolist() == [0, 1, 2]


def test_redundancy_adaptive_declares_what_it_measures() -> None:
    assert RedundancyAdaptive(importance=KeyNorm(), diversity=Recency()).needs == Needs(keys=True)
    on_values = RedundancyAdaptive(importance=KeyNorm(), diversity=Recency(), on="values")
    assert on_values.needs == Needs(values=True)
    whole = Policy(
        name="test",
        score=RedundancyAdaptive(importance=SnapKV(window=8), diversity=DIVERSITY),
        budget=Budget(tokens=12),
    )
    assert whole.needs == Needs(queries=8, keys=True)


def test_mixkv_is_the_paper_by_hand() -> None:
    """One head written out: attention plus value norm, cosine redundancy, cosine diversity."""
    view = make_view(batch=1, heads=(2, 1), slots=20, window=4, recent=4)
    score = RedundancyAdaptive(
        importance=Fixed(inputs=[SnapKV(window=4), ValueNorm()], weights=[1.0, 1.0], normalize="match-importance"),
        diversity=CosineDiversity(),
        redundancy="cosine",
    )
    got = Policy(name="mixkv", score=score, budget=Budget(tokens=12)).scores(view)[0][0, 0, :16].double()

    attention = twins.snapkv(view, 4, 5, "avg")[0, 0, :16]
    keys, values = view.keys[0, 0, :16].double(), view.values[0, 0, :16].double()

    def scaled(x: Tensor, mean: Tensor) -> Tensor:
        x = (x - x.min()) / (x.max() - x.min())
        return x * mean / x.mean()

    importance = attention + scaled(values.norm(dim=-1), attention.mean())
    units = keys / keys.norm(dim=-1, keepdim=True)
    diversity = scaled(-units @ (units.mean(0) / units.mean(0).norm()), importance.mean())
    cosines = units @ units.T
    redundancy = (cosines.sum() - 16) / (16 * 15)
    want = redundancy * diversity + (1 - redundancy) * importance
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("fill", [0.0, 2.0, -1e30])
@pytest.mark.parametrize("slots", [1, 2, 30])
def test_the_whole_tree_stays_finite_on_constants(fill: float, slots: int) -> None:
    view = make_view(slots=slots, padding="left")
    full = torch.full_like(view.keys, fill)
    importance = Fixed(inputs=[SnapKV(window=8), ValueNorm()], normalize="match-importance")
    for redundancy in ("cosine", "euclidean", "both"):
        score = RedundancyAdaptive(importance=importance, diversity=DIVERSITY, redundancy=redundancy)  # type: ignore[arg-type]
        policy = Policy(name="test", score=score, budget=Budget(tokens=12))
        policy.scores(change(view, keys=full, values=full))  # raises where one is not finite
        policy.scores(change(view, keys=full, values=full).decide(torch.zeros_like(view.valid)))


def test_a_child_that_is_not_finite_is_named() -> None:
    view = make_view()
    broken = change(view, values=torch.full_like(view.values, math.nan))
    score = Fixed(inputs=[KeyNorm(), ValueNorm()])
    with pytest.raises(PluginError, match="value-norm"):
        Policy(name="test", score=score, budget=Budget(tokens=12)).scores(broken)


def test_maths_helpers_look_at_the_mask_alone() -> None:
    mask = torch.tensor([[[True, True, False, True]]])
    scores = torch.tensor([[[-1.0, 3.0, math.nan, 1.0]]])
    assert min_max(scores, mask).tolist() == [[[0.0, 1.0, 0.0, 0.5]]]
    assert from_zero(scores, mask)[mask].tolist() == [0.0, 4.0, 2.0]
    assert match_mean(min_max(scores, mask), torch.full_like(scores, 3.0), mask)[mask].tolist() == [0.0, 6.0, 3.0]
    already = scores.abs()
    assert torch.equal(from_zero(already, mask)[mask], already[mask])
