"""Adaptive: the heads of a layer compete for its slots."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from einops import rearrange
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import exact, ranks
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView


@settings
class AdaptiveHeads:
    """The layer's ``Hkv * K`` slots go to the best scores over all its heads, once each head has its floor.

    A head's floor is its own best ``max(ceil(floor * K), 1)`` slots, protected ones first and all of those,
    but never more than it has. Of equal scores the one that stands higher in its own head wins, then the
    earlier head's. What a head with few valid slots leaves goes to the others.

    The floor lies under the competition, as in kvpress. Ada-KV's own code mixes instead: a head keeps
    ``floor * K + (1 - floor) * won``, rounded.

    Args:
        floor: the share of K that every head keeps.
        by: which scores compete: "score", the policy's, or "importance", its importance alone (as the authors
            of MixKV do); either way the policy's score decides which slots a head keeps.

    Four slots for two heads: the first has the three best scores, the second keeps its floor of one.

    >>> view = LayerView(keys=torch.zeros(1, 2, 4, 2), values=torch.zeros(1, 2, 4, 2))
    >>> scores = torch.tensor([[[9.0, 8.0, 7.0, 0.0], [1.0, 1.0, 1.0, 1.0]]])
    >>> AdaptiveHeads()(view, scores, torch.tensor([2])).tolist()
    [[3, 1]]
    """

    name = "adaptive"
    stage = "heads"
    source = "Ada-KV, arXiv 2407.11550, algorithm 1 and its safeguard"
    formula = "the Hkv*K best scores of the layer, each head at least max(ceil(floor*K), 1)"
    cost = "time O(n log n), memory O(n)"
    floor: Annotated[float, Ge(0), Le(1)] = 0.2
    by: Literal["score", "importance"] = "score"

    def __call__(self, view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
        """Return int64 ``[B, Hkv]``; a row's add up to ``Hkv * K``, or to its valid slots if fewer.

        Args:
            view: the slots; protected ones are valid and no candidates.
            scores: float32 ``[B, Hkv, T]``, finite on candidates, higher means keep.
            tokens: int64 ``[B]``, K, the layer's budget in slots a KV head, mean over heads.
        """
        best = best_first(view, scores)
        place = torch.arange(view.slots, device=tokens.device)
        # Protected slots and those within the floor come before all others; invalid ones (-inf) come last even there.
        granted = (place < floor_of(tokens, self.floor)[:, None, None]) & (best > -torch.inf)
        entries = rearrange(best.where(~granted, torch.inf), "b h t -> b (t h)")
        total = torch.minimum(view.kv_heads * tokens, view.valid.sum((-2, -1)))
        won = ranks(entries) < total[:, None]
        return rearrange(won, "b (t h) -> b h t", h=view.kv_heads).sum(-1)


def best_first(view: LayerView, scores: Tensor) -> Tensor:
    """Return the scores of each head, best first, ``[B, Hkv, T]``: inf of protected slots, -inf of invalid ones."""
    protected = view.valid & ~view.candidates
    order = scores.where(view.candidates, -torch.inf).where(~protected, torch.inf)
    return order.sort(-1, descending=True).values


def floor_of(tokens: Tensor, share: float) -> Tensor:
    """Return ``max(ceil(share * K), 1)`` of each row's K, int64 ``[B]``.

    >>> floor_of(torch.tensor([100, 0]), 0.07).tolist()
    [7, 1]
    """
    part = exact(share)
    return ((part.numerator * tokens + part.denominator - 1) // part.denominator).clamp(min=1)


@hookimpl
def kvpolicy_budgets() -> list[type]:
    """Return the budgets of this module."""
    return [AdaptiveHeads]
