"""Scorers by keys and values against slow twins, written from their papers in float64: the same slots are kept."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import blank, heads, slots
from views import change, make_view

from kvpolicy.combiners.caote import CAOTE
from kvpolicy.combiners.critical_kv import CriticalKV
from kvpolicy.combiners.r_kv import RKV
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.cur_dkv import CurDKV
from kvpolicy.scorers.lag_kv import LagKV
from kvpolicy.scorers.leverage import Leverage
from kvpolicy.scorers.manifold_kv import ManifoldKV
from kvpolicy.scorers.snapkv import SnapKV
from kvpolicy.selectors.top_k import TopK
from kvpolicy.types import Call, LayerView

CASES: dict[str, dict[str, Any]] = {
    f"{name}, {size}, {length}, {padding}": {
        "heads": count,
        "sizes": (size, size),
        "slots": length,
        "padding": padding,
    }
    for name, count in {"gqa": (6, 2), "mha": (3, 3)}.items()
    for size, length, padding in [(64, 23, "left"), (80, 41, "ragged"), (128, 64, "right"), (64, 70, "none")]
}


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    exps = [math.exp(value - top) for value in values]
    return [each / math.fsum(exps) for each in exps]


def lag_kv(view: LayerView, lag: int, sinks: int, cross: bool) -> Tensor:
    scores = blank(view)
    for b, h in heads(view):
        own = slots(view.valid[b, h])
        behind = own[sinks:]
        for place, t in enumerate(own):
            short = place >= sinks and len(own) < sinks + 2 * lag
            scores[b, h, t] = (place - sinks) / len(behind) if short else 1.0
        parts = [behind[i : i + lag] for i in range(0, len(behind) // lag * lag, lag)]
        for part, after in pairwise(parts):
            shares = []
            for vectors in (view.keys[b, h].double(), view.values[b, h].double()):
                low, high = vectors[after].min(0).values, vectors[after].max(0).values
                shares.append(softmax([statistics.stdev(((vectors[t] - low) / (high - low)).tolist()) for t in part]))
            both = [(key + value) / 2 for key, value in zip(*shares, strict=True)]
            for t, score in zip(part, both, strict=True):
                scores[b, h, t] = score if cross else sum(other < score for other in both) / lag
    return scores


def critical_kv(view: LayerView, importance: Tensor, weight: Tensor, first: int, epsilon: float) -> Tensor:
    scores = blank(view)
    size = view.values.shape[-1]
    group = weight.shape[1] // size // view.kv_heads
    for b, h in heads(view):
        own = slots(view.candidates[b, h])
        best = sorted(own, key=lambda t: -float(importance[b, h, t]))[:first]
        for t in own:
            lengths = []
            for g in range(h * group, (h + 1) * group):
                projected = weight.double()[:, g * size : (g + 1) * size] @ view.values[b, h, t].double()
                lengths.append(math.fsum(projected.abs().tolist()))
            scores[b, h, t] = (float(importance[b, h, t]) + epsilon) * math.fsum(lengths) / group
        for t in best:
            scores[b, h, t] = 1e30 * (1 + float(importance[b, h, t]))
    return scores


def caote(view: LayerView, importance: Tensor, fast: bool) -> Tensor:
    """The output with and without each slot, not the closed form, where the output is attention's."""
    scores = blank(view)
    for b, h in heads(view):
        own = slots(view.candidates[b, h])
        values = {t: view.values[b, h, t].double() for t in own}
        total = math.fsum(float(importance[b, h, t]) for t in own)
        alpha = {t: float(importance[b, h, t]) / total for t in own}
        for t in own:
            if fast:
                moved = (sum(values.values()) / len(own) - values[t]) * alpha[t] / (1 - alpha[t])
            else:
                left = sum((alpha[u] * values[u] for u in own if u != t), start=torch.zeros_like(values[t]))
                moved = left / (1 - alpha[t]) - (left + alpha[t] * values[t])
            scores[b, h, t] = math.sqrt(float(moved @ moved))
    return scores


def leverage(view: LayerView, keys: Tensor, phi: Tensor, ridge: float, among: Tensor) -> Tensor:
    scores = blank(view)
    for b, h in heads(view):
        own = slots(among[b, h])
        mean = sum(keys[b, h, t].double() for t in own) / len(own)
        rows = torch.stack([(keys[b, h, t].double() - mean) @ phi for t in own])
        inverse = torch.linalg.inv(rows.T @ rows + ridge * torch.eye(len(phi.T), dtype=torch.float64))
        for t, row in zip(own, rows, strict=True):
            scores[b, h, t] = float(row @ inverse @ row)
    return scores


def cur_dkv(view: LayerView, kind: str, window: int) -> Tensor:
    scores = blank(view)
    for b, h in heads(view):
        own = slots(view.valid[b, h])
        for start in range(0, len(own), window):
            part = own[start : start + window]
            squares = [
                [float(vectors[b, h, t].double() @ vectors[b, h, t].double()) for t in part]
                for vectors in (view.keys, view.values)
            ]
            for place, t in enumerate(part):
                key, value = (each[place] / math.fsum(each) for each in squares)
                scores[b, h, t] = {"key": key, "value": value, "kv-avg": (key + value) / 2, "kv-product": key * value}[
                    kind
                ]
    return scores


def manifold_kv(view: LayerView, window: int) -> Tensor:
    scores = blank(view)
    for b, h in heads(view):
        own = slots(view.valid[b, h])
        for start in range(0, len(own), window):
            part = own[start : start + window]
            mean = sum(view.keys[b, h, t].double() for t in part) / len(part)
            for t in part:
                away = view.keys[b, h, t].double() - mean
                scores[b, h, t] = math.sqrt(float(away @ away))
    return scores


def r_kv(view: LayerView, importance: Tensor, weight: float, threshold: float) -> Tensor:
    scores = blank(view)
    for b, h in heads(view):
        own = slots(view.valid[b, h])
        directions = torch.nn.functional.normalize(view.keys[b, h, own].double(), dim=-1)
        alike = (directions @ directions.T).fill_diagonal_(0).tolist()
        for row in alike:
            similar = [place for place, each in enumerate(row) if each > threshold]
            row[similar[-1] if similar else 0] = 0.0
        shares = softmax([math.fsum(column) / len(own) for column in zip(*alike, strict=True)])
        for t, share in zip(own, shares, strict=True):
            scores[b, h, t] = weight * float(importance[b, h, t]) - (1 - weight) * share
    return scores


def sketch_of(scorer: Any, view: LayerView) -> Tensor:
    """Return the Gaussian matrix of a scorer, the one thing that it and its twin share."""
    return scorer._phi(view.keys.shape[-1], view.layer)


METHODS: dict[str, tuple[Any, Callable[[LayerView], Tensor]]] = {
    "lag-kv": (LagKV(lag=8, sinks=3), lambda view: lag_kv(view, 8, 3, False)),
    "lag-kv, cross": (LagKV(lag=8, sinks=3, cross=True), lambda view: lag_kv(view, 8, 3, True)),
    "lag-kv, long": (LagKV(lag=64), lambda view: lag_kv(view, 64, 4, False)),
    "leverage": (
        Leverage(),
        lambda view: leverage(view, view.pre_rope_keys, sketch_of(Leverage(), view), 1e-2, view.valid),
    ),
    "leverage, exact": (
        Leverage(sketch=None, space="post-rope"),
        lambda view: leverage(view, view.keys, torch.eye(view.keys.shape[-1], dtype=torch.float64), 1e-2, view.valid),
    ),
    **{
        f"cur-dkv, {kind}": (CurDKV(leverage=kind, window=window), partial(cur_dkv, kind=kind, window=window))
        for kind, window in [("key", 16), ("value", 16), ("kv-avg", 5), ("kv-product", 16)]
    },
    "manifold-kv": (ManifoldKV(), lambda view: manifold_kv(view, view.slots)),
    "manifold-kv, windowed": (ManifoldKV(window=9), lambda view: manifold_kv(view, 9)),
}


def expect_kept(score: Any, view: LayerView, want: Tensor) -> None:
    """Assert that a score keeps those of the highest scores `want`, at several budgets."""
    for tokens in (5, 9, 16):
        policy = Policy(name="zoo", score=score, budget=Budget(tokens=tokens), select=TopK(sinks=0, recent=0))
        kept = policy.plan([view])[0]
        for b, h in heads(view):
            scores = want[b, h].nan_to_num(-math.inf)
            best = scores.topk(len(kept[b][h])).values.tolist()
            # By score: slots that score the same may swap.
            assert sorted(scores[kept[b][h]].tolist(), reverse=True) == best


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", METHODS)
def test_the_slots_kept_are_those_of_the_twin(name: str, case: str) -> None:
    scorer, twin = METHODS[name]
    view = make_view(**CASES[case])
    expect_kept(scorer, view, twin(view))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_caote_keeps_what_its_twin_does(case: str, fast: bool) -> None:
    view = make_view(**CASES[case])
    importance = SnapKV(window=8)
    expect_kept(CAOTE(importance=importance, fast=fast), view, caote(view, importance(view), fast))


@pytest.mark.parametrize("threshold", [0.1, 0.5])
@pytest.mark.parametrize("case", CASES)
def test_r_kv_keeps_what_its_twin_does(case: str, threshold: float) -> None:
    view = make_view(**CASES[case])
    importance = SnapKV(window=8, kernel=7, pooling="max")
    want = r_kv(view, importance(view), 0.1, threshold)
    expect_kept(RKV(importance=importance, threshold=threshold), view, want)


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("case", CASES)
def test_critical_kv_keeps_what_its_twin_does(case: str, first: int) -> None:
    view = make_view(**CASES[case])
    width = view.queries.shape[1] * view.values.shape[-1]
    module = nn.Module()
    module.o_proj = nn.Linear(width, 48)
    view = change(view, call=Call(module, torch.zeros(len(view.valid), view.slots, 48)))
    importance = SnapKV(window=8)
    want = critical_kv(view, importance(view), module.o_proj.weight, first, 1e-4)
    expect_kept(CriticalKV(importance=importance, first=first), view, want)


def test_critical_kv_refuses_a_module_without_a_known_output_projection() -> None:
    view = make_view(slots=4, window=1)
    call = Call(nn.Module(), torch.zeros(3, 4, 8))
    with pytest.raises(UnsupportedModelError, match=r"expected an output projection 'o_proj'.*got none"):
        CriticalKV(importance=SnapKV(window=1))(change(view, call=call), importance=torch.zeros(view.valid.shape))


def test_a_sketch_is_gaussian_and_depends_on_seed_and_layer() -> None:
    view = make_view()
    phi = sketch_of(Leverage(sketch=4096), view)
    assert float(phi.square().sum(-1).mean()) == pytest.approx(1, abs=0.02)
    assert not torch.equal(phi, sketch_of(Leverage(sketch=4096, seed=1), view))
    assert not torch.equal(Leverage()(view), Leverage()(change(view, layer=1)))


def test_shares_of_sketched_vectors_are_near_those_of_the_vectors() -> None:
    view = make_view(slots=40)
    kinds = {"leverage": "key", "window": 40}
    near = CurDKV(sketch=20_000, **kinds)(view)
    # The squared length of a sketch varies by a share of sqrt(2 / 20000), 1%; five of these.
    torch.testing.assert_close(near, CurDKV(**kinds)(view), rtol=0.05, atol=0)


def test_a_channel_that_is_constant_in_the_next_partition_counts_as_zero() -> None:
    view = make_view(batch=1, slots=32)
    flat = view.keys.clone()
    flat[..., 0] = 3.0
    other = flat.clone()
    other[:, :, 0, 0] = 7.0
    scores = [LagKV(lag=16, sinks=0, cross=True)(change(view, keys=keys)) for keys in (flat, other)]
    assert torch.equal(*scores) and bool(scores[0].isfinite().all())
