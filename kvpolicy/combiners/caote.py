"""CAOTE: how far the output of attention moves when a slot alone is evicted."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import HUGE, centroid, from_zero, norms
from kvpolicy.plugin import Score, settings
from kvpolicy.types import LayerView, Needs

_EPSILON = torch.finfo(torch.float32).eps


@settings
class CAOTE:
    """The error of the attention's output when the slot is evicted, with the importance as the attention.

    ``alpha`` is the importance over its sum, per head over the candidates: of slots that are protected no importance is
    known, and no eviction is to be priced. An importance that goes below 0 counts from its lowest.

    Args:
        importance: the score that stands for attention, 0 or more: `snapkv`, `h2o`, `tova`, ...
        fast: the mean value in place of the output, FastCAOTE in the paper.

    Attention 1/2, 1/4, 1/4 to values 0, 4 and 8: the output is 3, and without the last it would be 4/3.

    >>> from kvpolicy.scorers.recency import Recency
    >>> values = torch.tensor([[[[0.0], [4.0], [8.0]]]])
    >>> scores = CAOTE(importance=Recency())(
    ...     LayerView(keys=values, values=values), importance=torch.tensor([[[2.0, 1.0, 1.0]]])
    ... )
    >>> [round(score, 3) for score in scores[0, 0].tolist()]
    [3.0, 0.333, 1.667]
    """

    name = "caote"
    source = "CAOTE, arXiv 2504.14051, its eviction error in closed form"
    formula = "alpha_i/(1 - alpha_i) * |sum_j alpha_j v_j - v_i|, alpha = importance/sum_j importance_j"
    cost = "time O(n D), memory O(n D)"
    needs = Needs(values=True)
    importance: Score
    fast: bool = False

    def __call__(self, view: LayerView, *, importance: Tensor) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, 0 or more, in the unit of the values, higher means a larger error.

        Args:
            view: its candidates are what attention is spread over.
            importance: float32 ``[B, Hkv, T]``.
        """
        mask = view.candidates
        weights = from_zero(importance, mask).where(mask, 0)
        # Over the largest first: the sum of large ones could overflow.
        weights = weights / weights.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        alpha = weights / weights.sum(-1, keepdim=True).clamp(min=_EPSILON)
        # Halved, as the difference of two large numbers could overflow.
        values = view.values.where(mask[..., None], 0).float() / 2
        output = centroid(values, mask) if self.fast else alpha[..., None, :] @ values
        price = alpha / (1 - alpha).clamp(min=_EPSILON)
        return (price * norms(values - output) * 2).clamp(max=HUGE)


@hookimpl
def kvpolicy_combiners() -> list[type]:
    """Return the combiners of this module."""
    return [CAOTE]
