"""Finch: the attention that a question pays to each slot, where it stands last in the prompt."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge
from torch import Tensor

from kvpolicy.attention import each_query
from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs


@settings
class Finch:
    """The attention of the question's queries to each slot, each query counted by how many slots are before it.

    A softmax over more slots gives each of them less: weighed so, a query's attention is measured in even shares. The
    authors' code leaves it a sum; here it is a mean, with the weights over their sum.

    Args:
        window: how many of the last queries are the question's.

    Two queries, with one and with two slots before them, alike for all: the mean of (1/2, 1/2, 0), counted once, and
    (1/3, 1/3, 1/3), counted twice.

    >>> import torch
    >>> keys = torch.zeros(1, 1, 3, 2)
    >>> scores = Finch(window=2)(LayerView(keys=keys, values=keys, queries=torch.ones(1, 1, 2, 2)))
    >>> (scores * 18).round().tolist()
    [[[7.0, 7.0, 4.0]]]
    """

    name = "finch"
    role = "importance"
    source = "Finch, arXiv 2408.00167, and FinchPress of kvpress, its official implementation"
    formula = "mean_g sum_w b_w * softmax(q_w . k * scaling) / sum_w b_w, b_w the slots before query w"
    cost = "time O(n W G D), memory O(n D + n W G + W G D)"
    window: Annotated[int, Ge(1)] = 32

    @property
    def needs(self) -> Needs:
        """The keys and the last `window` queries."""
        return Needs(queries=self.window, keys=True)

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, in [0, 1], higher means more attended to."""
        attention, _ = each_query(view)
        before = view.positions[:, :, None] < view.query_positions[:, None, :, None]
        counts = (view.valid[:, :, None] & before).sum(-1).float()
        weights = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        return (weights[:, :, None, None] @ attention).squeeze(-2).mean(2)


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [Finch]
