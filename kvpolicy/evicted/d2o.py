"""D2O: the evicted that are like a kept slot are merged into it, the others dropped."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from kvpolicy.evicted.nearest import Matches, blend, nearest, summed
from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Merged, Needs, Selection


@settings
class D2O:
    """An evicted slot goes into the kept slot most like it where it is as like as a threshold that follows decoding.

    Like is the cosine u_i of keys as they are stored, after RoPE, with the nearest kept key of the head. The threshold
    of a head is the mean u of the first slots that it evicts; at each later eviction it moves to
    ``(1 - beta) * threshold + beta * mean u``. What is less like is dropped. The merged slot stands at the kept slot's
    position. With L evicted slots i merged into a kept slot j:

    - similarity: ``(k_j + sum_i u_i k_i) / (L + 1)``, which is what the code does;
    - exponential: ``(e k_j + sum_i exp(u_i) k_i) / (e + sum_i exp(u_i))``, which others report as the paper's.

    Values get the same weights. The code has one threshold for all heads, and compares with it the mean over heads of
    what stands in the same place, which need not be one token; here each head has its own. Its other half, budgets of
    layers by the variance of attention, is no part of this.

    Time grows with evicted slots times kept ones; cosines are made block by block.

    Args:
        weights: "similarity" or "exponential".
        beta: how far the threshold moves at each eviction.
        e: what a kept slot weighs with exponential weights.

    >>> keys = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [0.0, 3.0], [-1.0, -1.0]]]])
    >>> kept = Selection(slots=torch.tensor([0, 1]), lengths=torch.tensor([[2]]))
    >>> merged = D2O()(LayerView(keys=keys, values=keys), kept, None)
    >>> merged.keys.tolist()  # the last is like neither
    [[1.0, 0.0], [0.0, 2.0]]
    >>> round(float(merged.memory), 3)
    0.146
    """

    name = "d2o"
    stage = "evicted"
    source = "D2O, arXiv 2406.13035, its code; exponential: its equation 11, as others report it"
    formula = "(k_j + sum_i u_i k_i) / (L + 1), over the L evicted i nearest to j with u_i >= threshold; v likewise"
    needs = Needs(keys=True, values=True)
    weights: Literal["similarity", "exponential"] = "similarity"
    beta: Annotated[float, Ge(0), Le(1)] = 0.5
    e: Annotated[float, Gt(0)] = 0.1

    def __call__(self, view: LayerView, selection: Selection, memory: Tensor | None) -> Merged | None:
        """Return what the kept slots hold with the evicted in them; None where none is evicted.

        Args:
            view: the layer's slots.
            selection: the slots that are kept.
            memory: float32 ``[B, Hkv]``, the threshold of each head, nan where it has evicted nothing yet.
        """
        matches = nearest(view, selection)
        if not len(matches):
            return None
        threshold = self._threshold(matches, selection, memory)
        matches = matches.only(matches.cosines >= threshold.flatten()[matches.owners])
        cosines = matches.cosines
        if self.weights == "similarity":
            weights, counted, own = cosines, torch.ones_like(cosines), 1.0
        else:
            weights = counted = cosines.exp()
            own = self.e
        owns = cosines.new_full(selection.slots.shape, own)
        total = owns + summed(matches.into, counted, len(owns))
        keys, values = (blend(part, selection, matches, weights, owns, total) for part in (view.keys, view.values))
        return Merged(keys, values, threshold)

    def _threshold(self, matches: Matches, selection: Selection, memory: Tensor | None) -> Tensor:
        means = matches.head_means(selection.lengths.numel()).view(selection.lengths.shape)
        if memory is None:
            return means
        moved = torch.where(memory.isnan(), means, (1 - self.beta) * memory + self.beta * means)
        return moved.where(~means.isnan(), memory)


@hookimpl
def kvpolicy_evicted() -> list[type]:
    """Return what this module makes of the evicted."""
    return [D2O]
