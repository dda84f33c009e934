"""Merge: each evicted slot goes into the kept slot that it is most like (LOOK-M)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvpolicy.evicted.nearest import blend, nearest, summed
from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Merged, Needs, Selection


@settings
class Merge:
    """Keys and values of an evicted slot go into the kept slot of its head whose key is most like its own.

    Like is the cosine of keys as they are stored, after RoPE. The merged slot stands at the kept slot's position, whose
    rotation is only one of those that went into its key. With L evicted slots i most like a kept slot j:

    - pivotal: ``(k_j + sum_i (k_i + k_j) / 2) / (L + 1)``, which gives the kept slot half of each;
    - averaged: ``(k_j + sum_i k_i) / (L + 1)``;
    - weighted: ``(k_j + sum_i cos(k_i, k_j) k_i) / (L + 1)``.

    Values get the same weights. All three are the paper's; "alike" is what its code does where it weighs, in each head
    by itself: there, a slot counts where the mean over all heads of what stands in its place does, and those need not
    be one token. The code's averaged merging pairs slots with others' survivors; here it is the paper's. Values alone
    are ours: keys then stay what the model made of one token at one position.

    Time grows with evicted slots times kept ones; cosines are made block by block.

    Args:
        how: "pivotal", "averaged" or "weighted".
        only: "all" of the evicted are merged, or those at least as "alike" as the head's mean; others are dropped.
        on: what is merged, "both" keys and values, or "values".

    >>> keys = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [0.0, 3.0]]]])
    >>> kept = Selection(slots=torch.tensor([0, 1]), lengths=torch.tensor([[2]]))
    >>> Merge(how="averaged")(LayerView(keys=keys, values=keys), kept, None).keys.tolist()
    [[1.0, 0.0], [0.0, 2.0]]
    """

    name = "merge"
    stage = "evicted"
    source = "LOOK-M, arXiv 2406.18139, equations 9 to 12; alike: its code; values alone: kvpolicy"
    formula = "(k_j + sum_i (k_i + k_j)/2) / (L + 1), over the L evicted i that are most like j; v likewise"
    needs = Needs(keys=True, values=True)
    how: Literal["pivotal", "averaged", "weighted"] = "pivotal"
    only: Literal["all", "alike"] = "all"
    on: Literal["both", "values"] = "both"

    def __call__(self, view: LayerView, selection: Selection, memory: Tensor | None) -> Merged | None:
        """Return what the kept slots hold with the evicted in them; None where none is evicted.

        Args:
            view: the layer's slots.
            selection: the slots that are kept.
            memory: not read.
        """
        matches = nearest(view, selection)
        if self.only == "alike":
            means = matches.head_means(selection.lengths.numel())
            matches = matches.only(matches.cosines >= means[matches.owners])
        if not len(matches):
            return None
        ones = torch.ones_like(matches.cosines)
        count = summed(matches.into, ones, len(selection.slots))
        weights = {"pivotal": ones / 2, "averaged": ones, "weighted": matches.cosines}[self.how]
        own = 1 + count / 2 if self.how == "pivotal" else torch.ones_like(count)

        def mixed(vectors: Tensor) -> Tensor:
            return blend(vectors, selection, matches, weights, own, count + 1)

        keys = mixed(view.keys) if self.on == "both" else selection.take(view.keys)
        return Merged(keys, mixed(view.values))


@hookimpl
def kvpolicy_evicted() -> list[type]:
    """Return what this module makes of the evicted."""
    return [Merge]
