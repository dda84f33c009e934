"""The slots that a whole policy keeps, worked out once more: every part of it by its slow twin, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import test_zoo_attention as attention
import test_zoo_budgets as budgets
import test_zoo_keys_values as keys_values
import test_zoo_layers as across_layers
import test_zoo_selection as selection
import torch
import twins
from torch import Tensor
from twins import blank, heads, slots

from kvpolicy.budgets.adaptive import AdaptiveHeads
from kvpolicy.budgets.cake import CakeLayers
from kvpolicy.budgets.dynamic_kv import DynamicKVLayers
from kvpolicy.budgets.pyramid import PyramidLayers
from kvpolicy.budgets.schedule import ScheduleLayers
from kvpolicy.budgets.squeeze import SqueezeLayers
from kvpolicy.budgets.uniform import UniformHeads, UniformLayers
from kvpolicy.combiners.best_rank import BestRank
from kvpolicy.combiners.caote import CAOTE
from kvpolicy.combiners.critical_kv import CriticalKV
from kvpolicy.combiners.fixed import Fixed
from kvpolicy.combiners.r_kv import RKV
from kvpolicy.combiners.redundancy_adaptive import RedundancyAdaptive
from kvpolicy.combiners.text_prior import TextPrior
from kvpolicy.plugin import children, importance_of
from kvpolicy.policy import Policy
from kvpolicy.scorers.cake import Cake
from kvpolicy.scorers.cosine_diversity import CosineDiversity
from kvpolicy.scorers.cur_dkv import CurDKV
from kvpolicy.scorers.euclidean_diversity import EuclideanDiversity
from kvpolicy.scorers.finch import Finch
from kvpolicy.scorers.h2o import H2O
from kvpolicy.scorers.key_diff import KeyDiff
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.scorers.keyformer import Keyformer
from kvpolicy.scorers.kvzip import KVzip
from kvpolicy.scorers.lag_kv import LagKV
from kvpolicy.scorers.leverage import Leverage
from kvpolicy.scorers.manifold_kv import ManifoldKV
from kvpolicy.scorers.non_causal_attention import NonCausalAttention
from kvpolicy.scorers.recency import Recency
from kvpolicy.scorers.scissorhands import Scissorhands
from kvpolicy.scorers.snapkv import SnapKV
from kvpolicy.scorers.tova import TOVA
from kvpolicy.scorers.value_norm import ValueNorm
from kvpolicy.selectors.chunks import Chunks
from kvpolicy.selectors.determinantal import Determinantal
from kvpolicy.selectors.k_centre import KCentre
from kvpolicy.selectors.mmr import MMR
from kvpolicy.selectors.random_part import RandomPart
from kvpolicy.selectors.top_k import TopK
from kvpolicy.types import LayerView

Kept = list[list[list[int]]]
"""By row and head."""


def kept(policy: Policy, views: list[LayerView]) -> tuple[list[Kept], list[Tensor]]:
    """Return what each layer keeps, and its scores, float64 ``[B, Hkv, T]``, nan where the score decides nothing.

    Raises:
        KeyError: when a part of the policy has no twin.
    """
    tokens_of = [
        [layer_slots(policy, int(seen), len(views))[depth] for seen in view.seen] for depth, view in enumerate(views)
    ]
    views = [
        view.decide(view.valid & ~protected(policy.select, view, tokens))
        for view, tokens in zip(views, tokens_of, strict=True)
    ]
    both = [score(policy.score, view) for view in views]
    if share := SHARES.get(type(policy.budget.layers)):
        rows = [
            share(policy.budget.layers, views, [scores for scores, _ in both], row, tokens_of[0][row])
            for row in range(len(views[0].valid))
        ]
        tokens_of = [list(layer) for layer in zip(*rows, strict=True)]
    chosen, scored = [], []
    for view, tokens, (scores, importance) in zip(views, tokens_of, both, strict=True):
        decisive = importance if getattr(policy.budget.heads, "by", "score") == "importance" else scores
        lengths = torch.tensor(HEADS[type(policy.budget.heads)](policy.budget.heads, view, decisive, tokens))
        chosen.append(SELECTORS[type(policy.select)](policy.select, view, scores, lengths))
        scored.append(scores.masked_fill(~view.candidates, math.nan))
    return chosen, scored


def layer_slots(policy: Policy, seen: int, layers: int) -> list[int]:
    budget = policy.budget
    tokens = budget.tokens or max(math.floor(Fraction(str(budget.keep)) * seen + Fraction(1, 2)), 1)
    return LAYERS[type(budget.layers)](budget.layers, tokens, seen, layers)


def protected(select: Any, view: LayerView, tokens: list[int]) -> Tensor:
    """The last token, sinks, then recent tokens, newest first, as many as the budget has room for."""
    found = torch.zeros_like(view.valid)
    for b, h in heads(view):
        own = slots(view.valid[b, h])
        recent = select.recent
        if isinstance(recent, float):
            recent = math.floor(Fraction(str(recent)) * (tokens[b] - select.sinks))
        newest = own[::-1][:recent]
        order = dict.fromkeys([*newest[:1], *own[: select.sinks], *newest])
        found[b, h, list(order)[: tokens[b]]] = True
    return found


def score(node: Any, view: LayerView) -> tuple[Tensor, Tensor]:
    """Return what a node scores, and what its importance part does: itself where it has none."""
    below: dict[str, Any] = {}
    important: dict[str, Any] = {}
    for name, child in children(node).items():
        found = [score(one, view) for one in child] if isinstance(child, tuple) else score(child, view)
        several = isinstance(found, list)
        below[name], important[name] = ([pair[i] for pair in found] if several else found[i] for i in (0, 1))
    scores = SCORES[type(node)](node, view, **below)
    if importance_of(node) in (None, node):
        return scores, scores
    return scores, important["importance"] if "importance" in below else SCORES[type(node)](node, view, **important)


def vectors(node: Any, view: LayerView) -> Tensor:
    if node.on == "values":
        return view.values
    return view.keys if node.space == "post-rope" else view.pre_rope_keys


def snapkv(node: SnapKV, view: LayerView) -> Tensor:
    """As that of twins.py, which goes dot by dot and takes a hundred times as long."""
    scores = blank(view)
    for b, h in heads(view):
        own = view.valid[b, h]
        pooled = []
        for g in range(view.group):
            window = attention.logits(view, b, h, g)[-node.window :].softmax(-1).mean(0)
            counted = window.where(view.candidates[b, h, own], 0.0).tolist()
            around = [counted[max(t - node.kernel // 2, 0) : t + node.kernel // 2 + 1] for t in range(len(counted))]
            pooled.append([max(one) if node.pooling == "max" else math.fsum(one) / node.kernel for one in around])
        scores[b, h, own] = torch.tensor(pooled, dtype=torch.float64).mean(0)
    return scores


def best_rank(node: BestRank, view: LayerView, inputs: list[Tensor]) -> Tensor:
    return twins.best_rank(view, inputs, node.weights or [1.0] * len(inputs))


def caote(node: CAOTE, view: LayerView, importance: Tensor) -> Tensor:
    return keys_values.caote(view, importance, node.fast)


def critical_kv(node: CriticalKV, view: LayerView, importance: Tensor) -> Tensor:
    weight = view.call.module.o_proj.weight
    return keys_values.critical_kv(view, importance, weight, node.first, node.epsilon)


def fixed(node: Fixed, view: LayerView, inputs: list[Tensor]) -> Tensor:
    return twins.fixed(view, inputs, node.weights or [1 / len(inputs)] * len(inputs), node.normalize, node.over)


def redundancy_adaptive(node: RedundancyAdaptive, view: LayerView, importance: Tensor, diversity: Tensor) -> Tensor:
    """Of all pairs, as in twins.py, but from their matrix."""
    redundancy = [[0.0] * view.kv_heads for _ in view.valid]
    for b, h in heads(view):
        chosen = vectors(node, view)[b, h, view.candidates[b, h]].double()
        if len(chosen) > 1:
            found = {"cosine": cosine_redundancy(chosen), "euclidean": euclidean_redundancy(chosen)}
            both = (found["cosine"] + found["euclidean"]) / 2
            redundancy[b][h] = both if node.redundancy == "both" else found[node.redundancy]
    return twins.redundancy_adaptive(view, importance, diversity, redundancy)


def cosine_redundancy(chosen: Tensor) -> float:
    directions = chosen / chosen.norm(dim=-1, keepdim=True)
    pairs = (directions @ directions.T).fill_diagonal_(0)
    return min(max(float(pairs.sum()) / (len(chosen) * (len(chosen) - 1)), 0.0), 1.0)


def euclidean_redundancy(chosen: Tensor) -> float:
    apart = float(torch.cdist(chosen, chosen).square().sum()) / (len(chosen) * (len(chosen) - 1))
    return min(max(1 - apart / (2 * float(chosen.square().sum(-1).mean())), 0.0), 1.0)


def r_kv(node: RKV, view: LayerView, importance: Tensor) -> Tensor:
    return keys_values.r_kv(view, importance, node.mix_lambda, node.threshold)


def text_prior(node: TextPrior, view: LayerView, importance: Tensor) -> Tensor:
    assert node.of == ("text",) and not (importance < 0).any()
    largest = importance.where(view.candidates, 0).amax(-1, keepdim=True)
    return importance + largest * (view.modality == 0)


def leverage(node: Leverage, view: LayerView) -> Tensor:
    keys = view.pre_rope_keys if node.space == "pre-rope" else view.keys
    return keys_values.leverage(view, keys, keys_values.sketch_of(node, view), node.ridge, compared(node, view))


def compared(node: Any, view: LayerView) -> Tensor:
    return view.valid if node.among == "valid" else view.candidates


SCORES: dict[type, Callable[..., Tensor]] = {
    BestRank: best_rank,
    CAOTE: caote,
    Cake: lambda node, view: across_layers.cake(view, node.window, node.kernel, node.gamma),
    CosineDiversity: lambda node, view: twins.cosine_diversity(view, vectors(node, view), view.candidates),
    CriticalKV: critical_kv,
    CurDKV: lambda node, view: keys_values.cur_dkv(view, node.leverage, node.window),
    EuclideanDiversity: lambda node, view: twins.euclidean_diversity(view, vectors(node, view)),
    Fixed: fixed,
    Finch: lambda node, view: attention.finch(attention.last(view, node.window)),
    H2O: lambda node, view: attention.h2o(view, node.accumulate),
    KeyDiff: lambda node, view: twins.cosine_diversity(view, view.keys, view.valid),
    KVzip: lambda node, view: view.repetition.double(),
    KeyNorm: lambda node, view: twins.norm(view, view.keys, -1),
    Keyformer: lambda node, view: attention.keyformer(view, node.tau_init, node.seed),
    LagKV: lambda node, view: keys_values.lag_kv(view, node.lag, node.sinks, node.cross),
    Leverage: leverage,
    ManifoldKV: lambda node, view: keys_values.manifold_kv(view, node.window or view.slots),
    NonCausalAttention: lambda node, view: attention.non_causal_attention(view, node.chunk_size, compared(node, view)),
    RKV: r_kv,
    Recency: lambda node, view: twins.recency(view),
    RedundancyAdaptive: redundancy_adaptive,
    Scissorhands: lambda node, view: attention.scissorhands(attention.last(view, node.w)),
    SnapKV: snapkv,
    TOVA: lambda node, view: attention.tova(view),
    TextPrior: text_prior,
    ValueNorm: lambda node, view: twins.norm(view, view.values, 1),
}

LAYERS: dict[type, Callable[..., list[int]]] = {
    PyramidLayers: lambda own, tokens, seen, layers: twins.pyramid(tokens, seen, layers, Fraction(str(own.beta))),
    ScheduleLayers: lambda own, tokens, seen, layers: budgets.schedule(
        own.shape, Fraction(str(own.first)), min(tokens, seen), seen, layers
    ),
    **dict.fromkeys(
        (CakeLayers, DynamicKVLayers, SqueezeLayers, UniformLayers),
        lambda own, tokens, seen, layers: [min(tokens, seen)] * layers,
    ),
}

SHARES: dict[type, Callable[..., list[int]]] = {
    CakeLayers: across_layers.cake_layers,
    DynamicKVLayers: across_layers.dynamic_kv_layers,
    SqueezeLayers: across_layers.squeeze_layers,
}
"""Of one row, once all layers have been scored."""

HEADS: dict[type, Callable[..., list[list[int]]]] = {
    AdaptiveHeads: lambda own, view, scores, tokens: twins.adaptive(view, scores, tokens, Fraction(str(own.floor))),
    UniformHeads: lambda own, view, scores, tokens: [
        [min(size, int(head.sum())) for head in row] for row, size in zip(view.valid, tokens, strict=True)
    ],
}

SELECTORS: dict[type, Callable[..., Kept]] = {
    Chunks: lambda own, view, scores, lengths: selection.chunks(
        view, scores, lengths, own.length, own.heads == "together"
    ),
    Determinantal: selection.greedily,
    KCentre: selection.greedily,
    MMR: selection.greedily,
    RandomPart: selection.random_part,
    TopK: lambda own, view, scores, lengths: twins.top_k(view, scores, lengths),
}
