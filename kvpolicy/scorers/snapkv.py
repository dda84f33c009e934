"""SnapKV: the attention that the last queries pay to each slot."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import AfterValidator
from torch import Tensor

from kvpolicy.attention import pooled, window_attention
from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs


def odd(kernel: int) -> int:
    """Return `kernel`, if it is odd."""
    if kernel % 2 == 0:
        raise ValueError("expected an odd number, so that a slot is the middle of its own pool")
    return kernel


@settings
class SnapKV:
    """The attention of the observation window to each slot, smoothed along the slots.

    Softmax attention of the last `window` queries (each sees the valid slots up to its own), mean over the
    queries that the row has, 1-D pooling, mean over the query heads of the group. Attention to slots that are
    no candidates is set to 0 before pooling, so that sinks lend nothing to their neighbours; without sinks
    and with as many recent tokens as the window holds, this is the authors' code, which leaves the window out
    before it pools.

    Args:
        window: how many of the last queries are observed.
        kernel: valid slots a pool spans, odd; 1 for none. At the ends it counts zeros, as the authors' code does.
        pooling: "avg" (SnapKV), or "max" (Ada-KV's code, with kernel 7).

    One query, alike for all four keys: attention 1/4 each, and a pool of 3 counts one zero at either end.

    >>> import torch
    >>> keys = torch.zeros(1, 1, 4, 2)
    >>> view = LayerView(keys=keys, values=keys, queries=torch.ones(1, 1, 1, 2))
    >>> SnapKV(window=1, kernel=1)(view).tolist()
    [[[0.25, 0.25, 0.25, 0.25]]]
    >>> (SnapKV(window=1, kernel=3)(view) * 12).round().tolist()
    [[[2.0, 3.0, 3.0, 2.0]]]
    """

    name = "snapkv"
    role = "importance"
    source = "SnapKV, arXiv 2404.14469, section 4 and its code"
    formula = "mean_g pool(mean_w softmax(q_w . k * scaling))"
    cost = "time O(n W G D + n log n), memory O(n D + n W G + W G D)"
    window: Annotated[int, Ge(1)] = 32
    kernel: Annotated[int, Ge(1), AfterValidator(odd)] = 5
    pooling: Literal["avg", "max"] = "avg"

    @property
    def needs(self) -> Needs:
        """The keys and the last `window` queries."""
        return Needs(queries=self.window, keys=True)

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, in [0, 1], higher means more attended to."""
        return pooled(window_attention(view), view, self.kernel, self.pooling)


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [SnapKV]
