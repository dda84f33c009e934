"""DynamicKV: a layer keeps as many slots as it has among the best of all layers."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Ge, Le
from einops import rearrange
from torch import Tensor

from kvpolicy.budgets.proportion import at_most, proportions, whole_slots
from kvpolicy.budgets.uniform import UniformLayers
from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import ranks
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs


@settings
class DynamicKVLayers:
    """Beside the protected slots, layers keep in proportion to how many of the best scores of all layers are theirs.

    As many scores are best as there are slots to share out. The layers read so far hold what they have among the best
    of those; in the authors' code they are cut after every fourth layer, here after each. Scores have to mean the same
    in all layers, as those of attention do: each query shares out 1. Fractions go to the first layers, in the code to
    the last.

    Args:
        most: how many times the mean a layer may keep.

    Six slots for two layers of one head, of which the best scores are four of the first and two of the second:

    >>> notes = torch.tensor([[[[0.9, 0.8, 0.7, 0.6]], [[0.5, 0.4, 0.3, 0.2]]]])
    >>> budget = DynamicKVLayers(most=2)
    >>> budget.share(notes, torch.tensor([3]), torch.tensor([9]), torch.tensor([0]), layers=2).tolist()
    [[4, 2]]
    """

    name = "dynamic-kv"
    stage = "layers"
    source = "DynamicKV, arXiv 2412.14838, and its code"
    formula = "K_l = protected + (sum of what is not) * |best scores in l| / |best scores|"
    cost = "time O(n log n + L^2 K), memory O(n + L K)"
    needs = Needs()
    most: Annotated[float, Ge(1), Le(1000)] = 10

    def __call__(self, tokens: Tensor, available: Tensor, layers: int) -> Tensor:
        """Return int64 ``[B, layers]``, all alike: nothing is known of the layers yet."""
        return UniformLayers()(tokens, available, layers)

    def note(self, view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
        """Return each head's best scores, best first, float32 ``[B, Hkv, n]``; -inf where there are no more.

        Args:
            view: the slots; protected ones are valid and no candidates.
            scores: float32 ``[B, Hkv, T]``, finite on candidates, higher means keep.
            tokens: int64 ``[B]``, the budget in slots a KV head, mean over layers.
        """
        size = self._slots(int(tokens.max()))
        best = scores.where(view.candidates, -torch.inf).sort(-1, descending=True).values[..., :size]
        return torch.cat([best, best.new_full((*best.shape[:2], size - best.shape[-1]), -torch.inf)], dim=-1)

    def share(self, notes: Tensor, tokens: Tensor, available: Tensor, protected: Tensor, layers: int) -> Tensor:
        """Return int64 ``[B, l]``, the slots a KV head of the layers read so far, at most, or of all layers.

        Args:
            notes: float32 ``[B, l, Hkv, n]``.
            tokens: int64 ``[B]``, the budget in slots a KV head, mean over layers.
            available: int64 ``[B]``, how many slots there are to keep.
            protected: int64 ``[B]``, how many slots a head every layer keeps.
            layers: how many layers share the budget.
        """
        mean = torch.minimum(tokens, available)
        most = torch.minimum(available, mean.new_tensor([self._slots(int(each)) for each in mean])) - protected
        total = layers * (mean - protected)
        _, read, heads, size = notes.shape
        within = torch.arange(size, device=notes.device) < most[:, None, None, None]
        entries = rearrange(notes.where(within, -torch.inf), "b l h n -> b (l h n)")
        best = ranks(entries) < heads * total[:, None]
        count = rearrange(best & (entries > -torch.inf), "b (l h n) -> b l (h n)", l=read, h=heads).sum(-1)
        if read < layers:
            return protected[:, None] + at_most(count.double() / heads, most)
        return protected[:, None] + whole_slots(proportions(total, count.double(), most), total, most)

    def _slots(self, mean: int) -> int:
        return math.ceil(self.most * mean)


@hookimpl
def kvpolicy_budgets() -> list[type]:
    """Return the budgets of this module."""
    return [DynamicKVLayers]
