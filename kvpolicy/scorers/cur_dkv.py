"""CurDKV: a slot's share of the squared lengths of keys and values around it."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Lt
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import norms
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs


@settings
class CurDKV:
    """Approximate leverage by squared length: a slot's share among the slots of its window, of keys, values or both.

    The valid slots of a head are cut into windows; within each, a squared length is divided by the window's sum. The
    result is divided by its sum over the head, so that heads compare. Zero vectors score 0.

    Args:
        leverage: "key", "value", "kv-avg" (their mean) or "kv-product".
        window: slots of a window, `local_window_size` in kvpress; as many as there are slots, or more: one.
        sketch: columns of a Gaussian matrix that keys and values are multiplied by first; none for the vectors
            themselves. kvpress takes 20 where it is told to (`use_random_leverage`).
        seed: of the Gaussian matrix: another seed, other numbers.

    Squared lengths 1, 3 in the first window and 4, 4 in the second; keys are values, so each share is squared:

    >>> keys = torch.tensor([[[[1.0, 0.0], [1.0, 2.0**0.5], [2.0, 0.0], [0.0, 2.0]]]])
    >>> scores = CurDKV(window=2)(LayerView(keys=keys, values=keys))
    >>> [round(score * 18, 2) for score in scores[0, 0].tolist()]
    [1.0, 9.0, 4.0, 4.0]
    """

    name = "cur-dkv"
    role = "importance"
    source = "CurDKV, arXiv 2509.15038, and its press in kvpress"
    formula = "|k_i|^2/sum_j |k_j|^2 * |v_i|^2/sum_j |v_j|^2, j in the window of i, over its sum in the head"
    cost = "time O(n D + n log n), memory O(n D); with a sketch, time O(n D S + n log n)"
    needs = Needs(keys=True, values=True)
    leverage: Literal["key", "value", "kv-avg", "kv-product"] = "kv-product"
    window: Annotated[int, Ge(1)] = 16
    sketch: Annotated[int, Ge(1)] | None = None
    seed: Annotated[int, Ge(0), Lt(2**47)] = 0

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, in [0, 1], higher means a larger share."""
        # Windows count valid slots: what is none goes to the end first.
        order = (~view.valid).int().argsort(dim=-1, stable=True)
        keys, values = (
            self._shares(self._lengths(each, view).where(view.valid, 0).gather(-1, order))
            for each in (view.keys, view.values)
        )
        scores = {"key": keys, "value": values, "kv-avg": (keys + values) / 2, "kv-product": keys * values}[
            self.leverage
        ]
        total = scores.sum(-1, keepdim=True)
        scores = scores / total.where(total > 0, 1)
        return torch.empty_like(scores).scatter_(-1, order, scores)

    def _lengths(self, vectors: Tensor, view: LayerView) -> Tensor:
        if self.sketch is None:
            return norms(vectors)
        random = torch.Generator("cpu").manual_seed(self.seed << 16 ^ view.layer)
        drawn = torch.randn(vectors.shape[-1], self.sketch, dtype=torch.float32, device="cpu", generator=random)
        # Divided first, as the product of large numbers could overflow; a share is the same of all.
        return norms(vectors.float() / vectors.shape[-1] ** 2 @ drawn.to(vectors.device))

    def _shares(self, lengths: Tensor) -> Tensor:
        """Return the squares of `lengths` ``[B, Hkv, T]`` over their sum in each window; 0 where all are 0."""
        slots = lengths.shape[-1]
        window = min(self.window, slots)
        parts = rearrange(pad(lengths, (0, -slots % window)), "b h (p w) -> b h p w", w=window)
        # Over the largest first, so that no square overflows or vanishes.
        largest = parts.amax(-1, keepdim=True)
        squares = (parts / largest.where(largest > 0, 1)).square()
        shares = squares / squares.sum(-1, keepdim=True).clamp(min=1)
        return rearrange(shares, "b h p w -> b h (p w)")[..., :slots]


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [CurDKV]
