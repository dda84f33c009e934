"""The first and the last tokens of a head, protected by index: sinks and recent tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.maths import exact
from kvpolicy.types import LayerView


def ends(view: LayerView, tokens: Tensor, sinks: int, recent: int | float) -> Tensor:
    """Return the first `sinks` and the last `recent` valid slots of each head, bool ``[B, Hkv, T]``.

    A budget too small for both keeps the last token, then sinks, then recent tokens, newest first.

    Args:
        view: whose slots.
        tokens: int64 ``[B]``, bounds both together.
        sinks: the first tokens protected.
        recent: the last tokens protected; or a share of the budget without the sinks, in (0, 1), rounded down.

    >>> view = LayerView(keys=torch.zeros(1, 1, 6, 2), values=torch.zeros(1, 1, 6, 2))
    >>> ends(view, torch.tensor([4]), 2, 0.5).int().tolist()
    [[[1, 1, 0, 0, 0, 1]]]
    """
    limit = tokens[:, None, None]
    if isinstance(recent, int):
        wanted = torch.full_like(limit, recent)
    else:
        share = exact(recent)
        wanted = share.numerator * (limit - sinks).clamp(min=0) // share.denominator
    first = (limit - wanted.clamp(max=1)).clamp(min=0, max=sinks)
    last = torch.minimum(limit - first, wanted)
    place = view.valid.cumsum(-1) - 1
    return view.valid & ((place < first) | (place >= view.valid.sum(-1, keepdim=True) - last))


__all__ = ["ends"]
