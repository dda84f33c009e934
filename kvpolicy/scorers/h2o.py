"""H2O: heavy hitters, the slots that all queries together attend to most."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvpolicy.blocks import attention_blocks
from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.types import ALL, LayerView, Needs


@settings
class H2O:
    """The attention that a slot has got from every query so far, mean over the query heads of the group.

    Every query of the prompt is recorded, which takes as much memory as the keys of all query heads until the prompt is
    evicted, and time grows with the square of the prompt. Attention is computed block by block. While decoding, old
    queries look again at the slots that are left, where the authors' code goes on with the sums it had.

    Args:
        accumulate: "sum" (H2O), which favours early slots, as more queries see them; or "mean" over the queries that
            see the slot.

    Keys alike: three queries give the first slot 1 + 1/2 + 1/3, the last one 1/3.

    >>> keys = torch.zeros(1, 1, 3, 2)
    >>> view = LayerView(keys=keys, values=keys, queries=torch.ones(1, 1, 3, 2))
    >>> (H2O()(view) * 6).round().tolist()
    [[[11.0, 5.0, 2.0]]]
    """

    name = "h2o"
    role = "importance"
    source = "H2O, arXiv 2306.14048, algorithm 1 and its code; mean: ObservedAttentionPress of kvpress"
    formula = "mean_g sum_w softmax(q_w . k * scaling)"
    cost = "time O(n^2 G D), memory O(n G D)"
    needs = Needs(queries=ALL, keys=True)
    accumulate: Literal["sum", "mean"] = "sum"

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, 0 or more, higher means more attended to."""
        scores = torch.zeros(view.valid.shape, dtype=torch.float32, device=view.valid.device)
        seen = torch.zeros_like(scores)
        for block in attention_blocks(view):
            scores += block.attention().sum(-2).mean(2)
            seen += block.sees.sum(-2)
        return scores / seen.clamp(min=1) if self.accumulate == "mean" else scores


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [H2O]
