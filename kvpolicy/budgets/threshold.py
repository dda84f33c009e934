"""Threshold: a head keeps what scores high enough, and no more than the budget has room for."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from einops import rearrange
from torch import Tensor

from kvpolicy.budgets.adaptive import best_first, floor_of
from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import ranks
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView


@settings
class ThresholdHeads:
    """Each head keeps its slots that score `threshold` or more, its protected slots and its floor.

    The budget is an upper bound here: a layer keeps less where fewer slots score so high, and where more do, the
    ``Hkv * K`` best of all its heads. A head's floor is its own best ``max(ceil(floor * K), 1)`` slots, protected ones
    first and all of those, but never more than it has. Of equal scores the one that stands higher in its own head wins,
    then the earlier head's.

    Args:
        threshold: in units of the score.
        floor: the share of K that every head keeps.
        by: which scores count: "score", the policy's, or "importance", its importance alone.

    >>> view = LayerView(keys=torch.zeros(1, 2, 4, 2), values=torch.zeros(1, 2, 4, 2))
    >>> scores = torch.tensor([[[9.0, 8.0, 7.0, 0.0], [1.0, 1.0, 1.0, 1.0]]])
    >>> [ThresholdHeads(threshold=8)(view, scores, torch.tensor([size])).tolist() for size in (3, 1)]
    [[[2, 1]], [[1, 1]]]
    """

    name = "threshold"
    stage = "heads"
    source = "kvpolicy; without floor and bound, DMSPress of kvpress, after DMS, arXiv 2506.05345"
    formula = "K_h = max(|{i: s_i >= threshold}| + protected, floor), at most Hkv*K in a layer"
    cost = "time O(n log n), memory O(n)"
    threshold: float
    floor: Annotated[float, Ge(0), Le(1)] = 0.0
    by: Literal["score", "importance"] = "score"

    def __call__(self, view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
        """Return int64 ``[B, Hkv]``; a row's add up to ``Hkv * K`` at most.

        Args:
            view: the slots; protected ones are valid and no candidates.
            scores: float32 ``[B, Hkv, T]``, finite on candidates, higher means keep.
            tokens: int64 ``[B]``, K, the layer's budget in slots a KV head, mean over heads.
        """
        protected = view.valid & ~view.candidates
        best = best_first(view, scores)
        place = torch.arange(view.slots, device=tokens.device)
        least = torch.maximum(floor_of(tokens, self.floor)[:, None], protected.sum(-1)).minimum(view.valid.sum(-1))
        granted = place < least[..., None]
        wanted = rearrange(granted | (best >= self.threshold), "b h t -> b (t h)")
        entries = rearrange(best.where(~granted, torch.inf), "b h t -> b (t h)")
        won = wanted & (ranks(entries.where(wanted, -torch.inf)) < view.kv_heads * tokens[:, None])
        return rearrange(won, "b (t h) -> b h t", h=view.kv_heads).sum(-1)


@hookimpl
def kvpolicy_budgets() -> list[type]:
    """Return the budgets of this module."""
    return [ThresholdHeads]
