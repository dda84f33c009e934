"""Recency: the later, the better; with sinks, StreamingLLM."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs


@settings
class Recency:
    """How late a slot is among the valid slots of its head, from 0 (the first) to 1 (the last).

    >>> import torch
    >>> keys = torch.zeros(1, 1, 4, 2)
    >>> view = LayerView(keys=keys, values=keys, valid=torch.tensor([[False, True, True, True]]))
    >>> Recency()(view)[view.valid].tolist()
    [0.0, 0.5, 1.0]
    """

    name = "recency"
    role = "other"
    source = "StreamingLLM, arXiv 2309.17453"
    formula = "place_i / (n - 1)"
    cost = "time O(n), memory O(n)"
    needs = Needs()

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, in [0, 1], higher means later; 0 for a lone slot."""
        place = (view.valid.cumsum(-1) - 1).clamp(min=0).float()
        return place / (view.valid.sum(-1, keepdim=True) - 1).clamp(min=1)


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [Recency]
