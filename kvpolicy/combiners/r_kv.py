"""R-KV: an importance, less the likeness of a slot's key to the other keys of its head."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import units
from kvpolicy.plugin import Score, settings
from kvpolicy.types import LayerView, Needs

_BLOCK = 64


@settings
class RKV:
    """The importance, less how alike a slot's key is to the others, of which each spares the last that it is like.

    The likeness of two keys is their cosine; of a slot, its mean with all valid slots, softmax over the head. Each slot
    leaves out the latest other slot whose likeness to it is above `threshold`, so that the last of many alike is kept;
    where there is none, the first slot of the head, as the authors' code has it. Takes n^2 time, and memory for 64 rows
    of likenesses at once.

    Args:
        importance: the score that says how much a slot matters, mostly an attention.
        mix_lambda: the weight of the importance; the rest is that of redundancy.
        threshold: the cosine above which two keys are alike.

    Three equal keys and one at a right angle. The first two spare the third, and the third the second, so that likeness
    adds up to 2, 1, 0 and 0; of 4 slots the mean is 1/2, 1/4, 0 and 0.

    >>> from kvpolicy.scorers.recency import Recency
    >>> keys = torch.tensor([[[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]])
    >>> scores = RKV(importance=Recency(), mix_lambda=0)(
    ...     LayerView(keys=keys, values=keys), importance=torch.zeros(1, 1, 4)
    ... )
    >>> [round(score, 3) for score in scores[0, 0].tolist()]
    [-0.334, -0.26, -0.203, -0.203]
    """

    name = "r-kv"
    source = "R-KV, arXiv 2505.24133, its joint score and its code"
    formula = "lambda * importance_i - (1 - lambda) * softmax_i(mean_j cos(k_i, k_j)), less the last alike of each j"
    cost = "time O(n^2 D), memory O(n D)"
    needs = Needs(keys=True)
    importance: Score
    mix_lambda: Annotated[float, Ge(0), Le(1)] = 0.1
    threshold: Annotated[float, Ge(0), Le(1)] = 0.5

    def __call__(self, view: LayerView, *, importance: Tensor) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, higher means keep.

        Args:
            view: its keys are compared, those of protected slots too.
            importance: float32 ``[B, Hkv, T]``.
        """
        likeness = self._likeness(view).where(view.valid, torch.finfo(torch.float32).min)
        return self.mix_lambda * importance - (1 - self.mix_lambda) * likeness.softmax(-1)

    def _likeness(self, view: LayerView) -> Tensor:
        """Return the mean cosine of each slot with all others, without those spared, float32 ``[B, Hkv, T]``."""
        directions = units(view.keys.where(view.valid[..., None], 0))
        place = torch.arange(view.slots, device=directions.device)
        first = view.valid.int().argmax(-1, keepdim=True)
        total = torch.zeros(view.valid.shape, dtype=torch.float32, device=directions.device)
        for own in place.split(_BLOCK):
            cosines = directions[:, :, own] @ directions.mT
            cosines = cosines.masked_fill_(own[:, None] == place, 0)
            spared = place.where(cosines > self.threshold, first[..., None]).amax(-1, keepdim=True)
            total += cosines.scatter_(-1, spared, 0).sum(-2)
        return total / view.valid.sum(-1, keepdim=True).clamp(min=1)


@hookimpl
def kvpolicy_combiners() -> list[type]:
    """Return the combiners of this module."""
    return [RKV]
