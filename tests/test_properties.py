"""What must hold whatever the numbers are, for every scorer, budget and shipped policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from views import change, make_view

import kvpolicy
from kvpolicy import functional
from kvpolicy.budgets.adaptive import AdaptiveHeads
from kvpolicy.budgets.pyramid import PyramidLayers
from kvpolicy.budgets.uniform import UniformHeads, UniformLayers
from kvpolicy.combiners.by_modality import ByModality
from kvpolicy.combiners.fixed import Fixed
from kvpolicy.combiners.redundancy_adaptive import RedundancyAdaptive
from kvpolicy.errors import ViewError
from kvpolicy.policy import Budget, Policy
from kvpolicy.registry import registry
from kvpolicy.scorers.cosine_diversity import CosineDiversity
from kvpolicy.scorers.euclidean_diversity import EuclideanDiversity
from kvpolicy.scorers.key_diff import KeyDiff
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.scorers.random import Random
from kvpolicy.scorers.recency import Recency
from kvpolicy.scorers.snapkv import SnapKV
from kvpolicy.scorers.value_norm import ValueNorm
from kvpolicy.selectors.by_modality import ByModality as Shared
from kvpolicy.selectors.top_k import TopK
from kvpolicy.types import LayerView

DIVERSITY = Fixed(inputs=[CosineDiversity(), EuclideanDiversity(on="values")])
SCORES = [
    SnapKV(window=4),
    SnapKV(window=8, kernel=7, pooling="max"),
    DIVERSITY,
    KeyDiff(),
    KeyNorm(),
    ValueNorm(),
    Recency(),
    Random(),
    Fixed(inputs=[SnapKV(window=4), ValueNorm()], weights=[1, 1], normalize="match-importance"),
    Fixed(inputs=[KeyNorm(), ValueNorm()], normalize="rank"),
    RedundancyAdaptive(importance=SnapKV(window=4), diversity=DIVERSITY),
]
MODAL = [
    ByModality(inside=KeyNorm(), outside=Recency()),
    ByModality(
        of=["image"],
        inside=RedundancyAdaptive(importance=SnapKV(window=4, kernel=1), diversity=DIVERSITY),
        outside=SnapKV(window=4),
    ),
]
"""Those that read what slots hold, which `functional` is not told."""
PLACELESS = [
    DIVERSITY,
    KeyDiff(),
    KeyNorm(),
    ValueNorm(),
    Fixed(inputs=[KeyNorm(), ValueNorm()], normalize="rank"),
    RedundancyAdaptive(importance=ValueNorm(), diversity=DIVERSITY),
    ByModality(inside=DIVERSITY, outside=KeyDiff()),
]
"""To these, it makes no difference where a slot stands."""
SHIPPED = [entry.name for entry in registry().entries("policy") if entry.origin.startswith("kvpolicy ")]
PURE = [name for name in SHIPPED if not kvpolicy.load(name).needs.call]
"""Those that decide from tensors alone: a view has no model's weights."""


def shipped(name: str, budget: int) -> Policy:
    """The policy, with a budget if it has any."""
    return kvpolicy.load(name) if name == "full" else kvpolicy.load(name, budget=budget)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    sinks, recent = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    amount: dict[str, Any] = {"tokens": draw(st.integers(max(sinks + recent, 1), 40))}
    if draw(st.booleans()):
        amount = {"keep": draw(st.floats(0.01, 1.0))}
    budget = Budget(
        **amount,
        layers=draw(st.sampled_from([UniformLayers(), PyramidLayers(), PyramidLayers(beta=3)])),
        heads=draw(st.sampled_from([UniformHeads(), AdaptiveHeads(), AdaptiveHeads(floor=0.5)])),
    )
    select = draw(
        st.sampled_from(
            [
                TopK(sinks=sinks, recent=recent),
                Shared(sinks=sinks, recent=recent, shares={"image": 0.3, "text": 0.7}),
                Shared(sinks=sinks, recent=recent, shares={"video": 0.5, "audio": 0.5}, protected=["text"]),
            ]
        )
    )
    score = draw(st.sampled_from([*SCORES, *MODAL]))
    return Policy(name="drawn", score=score, budget=budget, select=select)


@st.composite
def stacks(draw: st.DrawFn, padding: tuple[str, ...] = ("none", "left", "right")) -> list[LayerView]:
    """One to three layers of one model: the same rows, padding and sizes, other numbers."""
    options = {
        "batch": draw(st.integers(1, 3)),
        "heads": draw(st.sampled_from([(6, 2), (3, 3), (4, 1)])),
        "slots": draw(st.integers(1, 40)),
        "sizes": draw(st.sampled_from([(8, 8), (12, 5)])),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "padding": draw(st.sampled_from(padding)),
    }
    seed = draw(st.integers(0, 10_000))
    return [make_view(seed + layer, **options) for layer in range(draw(st.integers(1, 3)))]


hypothesis_settings = settings(
    max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@hypothesis_settings
@given(policies(), stacks())
def test_a_plan_is_sorted_unique_in_range_and_exact(policy: Policy, views: list[LayerView]) -> None:
    plan = policy.plan(views)
    for row in range(len(views[0].valid)):
        available = int(views[0].valid[row, 0].sum())
        kept = 0
        for view, layer in zip(views, plan, strict=True):
            for head, slots in enumerate(layer[row]):
                assert slots.tolist() == sorted(set(slots.tolist()))
                assert 1 <= len(slots) <= available
                assert bool(view.valid[row, head, slots].all())
                kept += len(slots)
        budget = int(policy.budget.slots(torch.tensor([available])))
        assert kept == min(budget, available) * len(views) * views[0].kv_heads


def alone(view: LayerView, row: int) -> LayerView:
    """The row as it would be without batch mates and padding."""
    there = view.valid[row, 0]
    first, end = int(there.nonzero()[0]), int(there.nonzero()[-1]) + 1
    exist = view.query_positions[row] >= 0
    return LayerView(
        keys=view.keys[row : row + 1, :, first:end],
        values=view.values[row : row + 1, :, first:end],
        queries=view.queries[row : row + 1, :, exist],
        query_positions=view.query_positions[row : row + 1, exist] - first,
        pre_rope_keys=view.pre_rope_keys[row : row + 1, :, first:end],
        modality=view.modality[row : row + 1, :, first:end],
        repetition=view.repetition[row : row + 1, :, first:end],
        similarity=view.similarity[row : row + 1],
    )


@hypothesis_settings
@given(policies(), stacks(padding=("left", "right")))
def test_batch_mates_and_padding_do_not_matter(policy: Policy, views: list[LayerView]) -> None:
    together = policy.plan(views)
    for row in range(len(views[0].valid)):
        first = int(views[0].valid[row, 0].nonzero()[0])
        single = policy.plan([alone(view, row) for view in views])
        for one, many in zip(single, together, strict=True):
            assert [head.tolist() for head in one[0]] == [(head - first).tolist() for head in many[row]]


@pytest.mark.parametrize("score", PLACELESS, ids=repr)
@pytest.mark.parametrize("seed", range(4))
def test_permuting_tokens_permutes_scores(score: Any, seed: int) -> None:
    view = make_view(seed, slots=30, sinks=2, recent=3, padding="ragged")
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed))
    moved = change(
        view,
        keys=view.keys[:, :, order],
        values=view.values[:, :, order],
        valid=view.valid[..., order],
        candidates=view.candidates[..., order],
        modality=view.modality[..., order],
    )
    policy = Policy(name="test", score=score, budget=Budget(keep=1.0))
    got, want = policy.scores(moved)[0], policy.scores(view)[0][..., order]
    torch.testing.assert_close(got[moved.candidates], want[moved.candidates])


@pytest.mark.parametrize("heads", [UniformHeads(), AdaptiveHeads()], ids=lambda one: one.name)
@pytest.mark.parametrize("score", [*SCORES, *MODAL], ids=repr)
@pytest.mark.parametrize("fill", [0.0, 1.0, -6e4])
def test_constant_tensors_keep_the_budget(score: Any, heads: Any, fill: float) -> None:
    policy = Policy(name="test", score=score, budget=Budget(tokens=9, heads=heads), select=TopK(sinks=1, recent=2))
    for slots in (1, 5, 40):
        view = make_view(slots=slots, padding="left", dtype=torch.float16)
        same = torch.full_like(view.keys, fill)
        kept = policy.plan([change(view, keys=same, values=same)])[0]
        assert torch.equal(kept.lengths.sum(-1), 2 * view.valid[:, 0].sum(-1).clamp(max=9))


def test_concentrated_and_flat_heads_keep_different_numbers() -> None:
    """By way of SnapKV, from keys: one head's queries look at three slots, the other's at all alike."""
    keys = torch.zeros(1, 2, 100, 8)
    keys[0, 0, [20, 50, 80], 0] = 60.0
    view = LayerView(keys=keys, values=torch.ones_like(keys), queries=torch.ones(1, 2, 8, 8))
    policy = Policy(
        name="test",
        score=SnapKV(window=8),
        budget=Budget(tokens=32, heads=AdaptiveHeads()),
        select=TopK(sinks=0, recent=8),
    )
    kept = policy.plan([view])[0]
    concentrated, flat = kept.lengths[0].tolist()
    assert concentrated < flat and concentrated + flat == 64
    assert {20, 50, 80} <= set(kept[0][0].tolist())


@pytest.mark.parametrize("name", PURE)
def test_shipped_policies_keep_their_budget_and_protect_the_sinks(name: str) -> None:
    policy = shipped(name, 40)
    for padding in ("none", "left"):
        views = [make_view(layer, slots=64, window=32, padding=padding, dtype=torch.bfloat16) for layer in range(4)]
        plan = policy.plan(views)
        for row, available in enumerate(views[0].valid[:, 0].sum(-1).tolist()):
            kept = sum(len(head) for layer in plan for head in layer[row])
            assert kept == (available if policy.trivial else min(40, available)) * 4 * 2
            first = available if policy.trivial else policy.select.sinks
            sinks = views[0].valid[row, 0].nonzero().flatten()[: min(first, available)].tolist()
            if not name.endswith("pyramidkv"):  # its thin layers are thinner than the protected slots
                assert all(set(sinks) <= set(head.tolist()) for layer in plan for head in layer[row])


@pytest.mark.parametrize("name", PURE)
def test_shipped_policies_do_not_care_for_padding_and_batch_mates(name: str) -> None:
    policy = shipped(name, 36)
    views = [make_view(layer, slots=56, window=32, padding="left") for layer in range(3)]
    together = policy.plan(views)
    for row in range(3):
        first = int(views[0].valid[row, 0].nonzero()[0])
        single = policy.plan([alone(view, row) for view in views])
        for one, many in zip(single, together, strict=True):
            assert [head.tolist() for head in one[0]] == [(head - first).tolist() for head in many[row]]


def test_the_shipped_policies_are_these() -> None:
    laid = [f"{ours}-{base}" for ours in ("ecokv", "ecokv-values") for base in ("snapkv", "ada-kv", "pyramidkv")]
    ours = ["ecokv", "ecokv-values", "ecokv-pre-rope", "near-and-far"]
    plain = ["full", "random", "streaming-llm", "key-norm", "key-diff", "snapkv", "snapkv-w8", "ada-kv", "pyramidkv"]
    attention = ["h2o", "tova", "scissorhands", "keyformer", "non-causal-attention", "expected-attention"]
    vectors = ["lag-kv", "leverage", "cur-dkv", "manifold-kv", "manifold-kv-windowed"]
    over = ["critical-kv", "caote-snapkv", "r-kv", "look-m", "d2o", "cam"]
    choices = ["chunkkv", "nacl", *(f"snapkv-{one}" for one in ("mmr", "k-centre", "determinantal", "pages"))]
    schedules = ["snapkv-linear", "snapkv-cosine"]
    across = ["cake", "dynamic-kv", "kvzip", "squeeze"]
    zoo = ["compactor", "finch", *across, *attention, *vectors, *over, *choices, *schedules]
    assert sorted(SHIPPED) == sorted([*plain, "mixkv-snapkv", "mixkv-ada-kv", *ours, *laid, *zoo])
    for name in SHIPPED:
        policy = kvpolicy.load(name)
        assert policy.name == name and policy.description and "\n" not in policy.description


def test_published_settings() -> None:
    """Those of the papers and of their authors' code."""
    load = kvpolicy.load
    assert load("snapkv").score == SnapKV(window=32, kernel=5, pooling="avg")
    assert load("snapkv").select == TopK(sinks=4, recent=32)
    assert load("ada-kv").score == SnapKV(window=32, kernel=7, pooling="max")
    assert load("ada-kv").budget == Budget(tokens=512, heads=AdaptiveHeads(floor=0.2, by="importance"))
    assert load("pyramidkv").budget == Budget(tokens=512, layers=PyramidLayers(beta=20))
    assert load("pyramidkv").score == load("snapkv").score
    assert (load("key-norm").score, load("key-diff").score) == (KeyNorm(), KeyDiff())
    for name, below in (("mixkv-snapkv", "snapkv"), ("mixkv-ada-kv", "ada-kv")):
        inputs = [load(below).score, ValueNorm()]
        assert load(name).score == RedundancyAdaptive(
            importance=Fixed(inputs=inputs, weights=[1, 1], normalize="match-importance"),
            diversity=CosineDiversity(),
            redundancy="cosine",
        )
        assert load(name).select == load(below).select
    assert load("mixkv-ada-kv").budget == load("ada-kv").budget
    assert load("ecokv").score.redundancy == "both"
    assert load("ecokv").score.diversity == Fixed(inputs=[CosineDiversity(), EuclideanDiversity()], weights=[0.5, 0.5])


def test_streaming_llm_keeps_the_first_and_the_last() -> None:
    kept = kvpolicy.load("streaming-llm", budget=10).plan([make_view(batch=1, slots=50)])
    assert kept.tolist() == [[[[0, 1, 2, 3, *range(44, 50)]] * 2]]


def test_ecokv_is_laid_over_the_policy_below() -> None:
    ecokv, laid = kvpolicy.load("ecokv"), kvpolicy.load("ecokv-ada-kv")
    assert ecokv.score.importance == kvpolicy.load("snapkv-w8").score
    assert laid.score.importance == dataclasses.replace(kvpolicy.load("ada-kv").score, window=8)
    assert laid.score.diversity == ecokv.score.diversity
    assert laid.budget == kvpolicy.load("ada-kv").budget and laid.select == TopK(sinks=4, recent=8)
    assert kvpolicy.load("ecokv-pyramidkv").budget.layers == PyramidLayers(beta=20)
    values = kvpolicy.load("ecokv-values-snapkv").score
    assert values.diversity.inputs == (CosineDiversity(), EuclideanDiversity(on="values"))
    assert values == dataclasses.replace(kvpolicy.load("ecokv-snapkv").score, diversity=values.diversity)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("score", SCORES, ids=repr)
def test_functional_equals_the_row_alone(score: Any, padding: str) -> None:
    """From all queries of a padded batch; only a row's own tokens and queries count."""
    full = make_view(slots=12, window=12, padding="none")
    view = make_view(slots=12, window=12, padding=padding)
    policy = Policy(name="test", score=score, budget=Budget(tokens=7), select=TopK(sinks=1, recent=2))
    tensors = (full.queries, full.keys, full.values)
    scores = functional.score(score, *tensors, valid=view.valid[:, 0])
    kept = functional.keep(policy, *tensors, valid=view.valid[:, 0])
    assert kept.dtype == torch.bool and scores.dtype == torch.float32
    for row in range(3):
        own = view.valid[row, 0]
        single = [tensor[row : row + 1, :, own] for tensor in tensors]
        torch.testing.assert_close(scores[row : row + 1, :, own], functional.score(score, *single))
        assert torch.equal(kept[row : row + 1, :, own], functional.keep(policy, *single))
        assert bool((scores[row, :, ~own] == -torch.inf).all()) and not kept[row, :, ~own].any()


def test_functional_scores_a_policy_after_protecting() -> None:
    view = make_view(slots=20, batch=1)
    policy = Policy(name="test", score=SnapKV(window=8), budget=Budget(tokens=9), select=TopK(sinks=2, recent=3))
    scores = functional.score(policy, view.queries, view.keys, view.values)
    protected = torch.tensor([0, 1, 17, 18, 19])
    assert bool((scores[..., protected] == torch.inf).all()) and int(scores.isinf().sum()) == 2 * 5
    candidates = torch.ones_like(view.valid)
    candidates[..., protected] = False
    want = SnapKV(window=8)(view.decide(candidates))
    assert torch.equal(scores[candidates], want[candidates])
    kept = functional.keep(policy, view.queries, view.keys, view.values)
    assert torch.equal(kept, torch.zeros_like(kept).scatter(-1, scores.topk(9).indices, True))


def test_functional_without_queries() -> None:
    view = make_view()
    assert torch.equal(functional.score(KeyNorm(), None, view.keys, view.values), KeyNorm()(view))
    with pytest.raises(ViewError, match="needs queries"):
        functional.score(SnapKV(), None, view.keys, view.values)


def test_functional_takes_what_only_a_model_knows() -> None:
    view = make_view(batch=1, slots=40)
    before = view.pre_rope_keys.flip(2)
    policy = kvpolicy.load("ecokv-pre-rope", budget=20)
    tensors = (view.queries, view.keys, view.values)
    kept = functional.keep(policy, *tensors, pre_rope_keys=view.pre_rope_keys)
    assert not torch.equal(kept, functional.keep(policy, *tensors, pre_rope_keys=before))
    with pytest.raises(ViewError, match="needs pre_rope_keys"):
        functional.keep(policy, *tensors)
