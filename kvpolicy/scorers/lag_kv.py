"""LagKV: how widely a slot's key and value scatter, seen from the slots that come next."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge
from einops import rearrange
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import ranks
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs

# Beyond this the square of a scaled number would overflow; only a channel that is all but constant comes near it.
_LIMIT = 1e15


@settings
class LagKV:
    """The rank of a slot, within its partition, by how widely its key and value scatter against the partition after.

    Behind the sinks, the valid slots of a head are cut into partitions of `lag`. Each channel of a slot is scaled by
    the smallest and largest of that channel in the next partition; the standard deviation over the channels, softmax
    over the partition, is what keys and values are ranked by, half each. Sinks, the last whole partition and what
    follows it score 1 and so come first. A head of fewer than two partitions is scored by place: the latest first.
    Scaled by a channel that is constant in the next partition, all numbers are 0.

    Args:
        lag: slots of a partition, `lag_size` in kvpress.
        sinks: the first slots of a head that are in no partition, `n_sink` in kvpress.
        cross: the softmax itself, comparable over partitions, in place of the rank within one.

    Two slots, scaled by the two after them (0 to 1, and 0 to 2): (3, 2) becomes (3, 1), (1, 2) becomes (1, 1).

    >>> keys = torch.tensor([[[[3.0, 2.0], [1.0, 2.0], [0.0, 0.0], [1.0, 2.0]]]])
    >>> LagKV(lag=2, sinks=0)(LayerView(keys=keys, values=keys)).tolist()
    [[[0.5, 0.0, 1.0, 1.0]]]
    """

    name = "lag-kv"
    role = "importance"
    source = "LagKV, arXiv 2504.04704, and its press in kvpress"
    formula = "rank_i(softmax_i(std_d((k_i - min)/(max - min))) + the same of v_i) / L, min and max of the next L"
    cost = "time O(n D + n log n), memory O(n D)"
    needs = Needs(keys=True, values=True)
    lag: Annotated[int, Ge(2)] = 128
    sinks: Annotated[int, Ge(0)] = 4
    cross: bool = False

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, in [0, 1], higher means more scattered, or later."""
        # Partitions count valid slots: what is none goes to the end first.
        order = (~view.valid).int().argsort(dim=-1, stable=True)
        count = view.valid.sum(-1, keepdim=True)
        place = torch.arange(view.slots, device=order.device).expand_as(order)
        scores = torch.ones(view.valid.shape, dtype=torch.float32, device=order.device)

        whole = max((view.slots - self.sinks) // self.lag, 0)
        if whole > 1:
            end = self.sinks + (whole - 1) * self.lag
            scattered = (self._scatter(view.keys, order, whole) + self._scatter(view.values, order, whole)) / 2
            if not self.cross:
                scattered = (self.lag - 1 - ranks(scattered)).float() / self.lag
            # A head of fewer slots has fewer partitions: the next one has to be whole.
            lagged = place[..., self.sinks : end] < self._end(count)
            scores[..., self.sinks : end] = rearrange(scattered, "b h p l -> b h (p l)").where(lagged, 1)

        late = (place - self.sinks).float() / (count - self.sinks).clamp(min=1)
        late = late.where(place >= self.sinks, 1)
        scores = late.where(count < self.sinks + 2 * self.lag, scores)
        return torch.empty_like(scores).scatter_(-1, order, scores)

    def _end(self, count: Tensor) -> Tensor:
        return self.sinks + ((count - self.sinks) // self.lag - 1) * self.lag

    def _scatter(self, vectors: Tensor, order: Tensor, whole: int) -> Tensor:
        """Return float32 ``[B, Hkv, P - 1, L]``: of all but the last whole partition, each sums to 1."""
        order = order[..., self.sinks : self.sinks + whole * self.lag, None]
        # Halved, as the difference of two large numbers could overflow.
        parts = vectors.gather(2, order.expand(*order.shape[:3], vectors.shape[-1])).float() / 2
        parts = rearrange(parts, "b h (p l) d -> b h p l d", l=self.lag)
        low, high = parts[:, :, 1:].aminmax(dim=-2, keepdim=True)
        span = high - low
        scaled = (parts[:, :, :-1] - low) / span.where(span > 0, torch.inf)
        correction = min(vectors.shape[-1] - 1, 1)
        return scaled.clamp(-_LIMIT, _LIMIT).std(-1, correction=correction).softmax(-1)


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [LagKV]
