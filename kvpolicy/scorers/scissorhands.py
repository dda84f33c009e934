"""Scissorhands: slots that recent queries rarely left below the average."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from kvpolicy.blocks import attention_blocks
from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs


@settings
class Scissorhands:
    """Minus how many of the last queries gave a slot less than an even share of their attention.

    Counted for each query head, mean over the group. An even share is one over the slots that the query sees. Counts
    are whole numbers, so many slots tie; the selector says which of those stay.

    Args:
        w: the history window: how many of the last queries are counted.

    The second key draws all attention of the last two queries, both of which leave the first below its share.

    >>> keys = torch.tensor([[[[0.0], [1000.0], [0.0]]]])
    >>> Scissorhands(w=2)(LayerView(keys=keys, values=keys, queries=torch.ones(1, 1, 2, 1))).tolist()
    [[[-2.0, 0.0, -1.0]]]
    """

    name = "scissorhands"
    role = "importance"
    source = "Scissorhands, arXiv 2305.17118, algorithm 2"
    formula = "-mean_g sum_w [softmax(q_w . k * scaling) < 1 / t_w], t_w the slots that query w sees"
    cost = "time O(n W G D), memory O(n D + n G + W G D)"
    w: Annotated[int, Ge(1)] = 400

    @property
    def needs(self) -> Needs:
        """The keys and the last `w` queries."""
        return Needs(queries=self.w, keys=True)

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, 0 or less, in queries, higher means more often above the average."""
        scores = torch.zeros(view.valid.shape, dtype=torch.float32, device=view.valid.device)
        for block in attention_blocks(view):
            even = 1 / block.sees.sum(-1, keepdim=True).clamp(min=1).float()
            below = (block.attention() < even[:, :, None]) & block.sees[:, :, None]
            scores -= below.sum(-2).float().mean(2)
        return scores


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [Scissorhands]
