"""ManifoldKV: how far a key is from the mean key of its head, or of its window of slots."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import centroid_distance
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs


@settings
class ManifoldKV:
    """How far a slot's key is from the mean of the keys in its window, protected ones too: outliers are kept.

    As `euclidean-diversity`, but the mean is taken over all valid slots, as the authors do; and, for long prompts, over
    those of one window at a time, as the mean of all says little there.

    Args:
        window: valid slots of a head that share a mean; none for all of them.

    Means 2 and 6, one for each window of two; and 4, that of all:

    >>> keys = torch.tensor([[[[0.0], [4.0], [5.0], [7.0]]]])
    >>> ManifoldKV(window=2)(LayerView(keys=keys, values=keys)).tolist()
    [[[2.0, 2.0, 1.0, 1.0]]]
    >>> ManifoldKV()(LayerView(keys=keys, values=keys)).tolist()
    [[[4.0, 0.0, 1.0, 3.0]]]
    """

    name = "manifold-kv"
    role = "diversity"
    source = "ManifoldKV, arXiv 2602.08343, and its windowed centroid"
    formula = "|k_i - mean_j k_j|, j over the valid slots of the window of i"
    cost = "time O(n D), memory O(n D); with a window, time O(n D + n log n)"
    needs = Needs(keys=True)
    window: Annotated[int, Ge(1)] | None = None

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, 0 or more, in the unit of the keys, higher means farther."""
        if self.window is None:
            return centroid_distance(view.keys, view.valid)
        # Windows count valid slots: what is none goes to the end first.
        order = (~view.valid).int().argsort(dim=-1, stable=True)
        scores = torch.zeros(view.valid.shape, dtype=torch.float32, device=order.device)
        for part in order.split(self.window, dim=-1):
            keys = view.keys.gather(2, part[..., None].expand(*part.shape, view.keys.shape[-1]))
            scores.scatter_(-1, part, centroid_distance(keys, view.valid.gather(-1, part)))
        return scores


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [ManifoldKV]
