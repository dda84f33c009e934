"""CAKE: a layer keeps the more, the more widely its attention spreads and the more it shifts."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from kvpolicy.attention import each_query, variance
from kvpolicy.budgets.proportion import at_most, proportions, whole_slots
from kvpolicy.budgets.uniform import UniformLayers
from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs

# What the authors' code adds before the logarithm.
_TINY = 1e-10


@settings
class CakeLayers:
    """Beside the protected slots, layers keep in proportion to ``P = dispersion^(1/tau1) * shift^(1/tau2)``.

    The dispersion is the entropy of the window's attention, ``-sum A ln(A + 1e-10)``, and the shift the sum of its
    variance over the queries, both over all query heads and all slots before the window that are not protected. The
    authors protect the window; its own slots count nothing here where a policy protects fewer, unless a head holds
    fewer than `window` others: then all that are not protected count. The layers read so far share the budget of all;
    each gives up slots as others are read, so that together they never hold much more than it.
    Fractions go to the first layers. Where a layer would get more than there is, the others share the rest in
    proportion; the authors' code shares it evenly.

    Args:
        window: how many of the last queries are observed.
        tau1: how little the dispersion matters.
        tau2: how little the shift matters. The authors chose both for each model and budget, from 0.4 to 2.3.

    Two layers of which one prefers four times as many of 100 slots besides 10:

    >>> notes = torch.tensor([[[[4.0, 1.0]], [[1.0, 1.0]]]])
    >>> CakeLayers().share(notes, torch.tensor([60]), torch.tensor([999]), torch.tensor([10]), layers=2).tolist()
    [[90, 30]]
    """

    name = "cake"
    stage = "layers"
    source = "CAKE, arXiv 2503.12491, and its code"
    formula = "K_l = protected + (sum of what is not) * P_l / sum P, P = dispersion^(1/tau1) shift^(1/tau2)"
    cost = "time O(n W G D + L^2), memory O(n D + n W G + W G D + L)"
    window: Annotated[int, Ge(1)] = 32
    tau1: Annotated[float, Gt(0), Le(1000)] = 1
    tau2: Annotated[float, Gt(0), Le(1000)] = 1

    @property
    def needs(self) -> Needs:
        """The keys and the last `window` queries."""
        return Needs(queries=self.window, keys=True)

    def __call__(self, tokens: Tensor, available: Tensor, layers: int) -> Tensor:
        """Return int64 ``[B, layers]``, all alike: nothing is known of the layers yet."""
        return UniformLayers()(tokens, available, layers)

    def note(self, view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
        """Return each head's dispersion and shift, float32 ``[B, Hkv, 2]``.

        Args:
            view: the slots; those protected are valid and no candidates.
            scores: not used: a layer's preference is that of its attention, whatever the score.
            tokens: not used.
        """
        attention, weights = each_query(view)
        before = view.candidates & (view.positions < _first(view.query_positions)[:, None, None])
        # A few slots say little, and a layer that holds none would never be given any again.
        counted = torch.where(before.sum(-1, keepdim=True) < self.window, view.candidates, before)
        asked = (weights > 0)[:, :, None, :, None] & counted[:, :, None, None]
        shift = variance(attention, weights).where(counted[:, :, None], 0).sum((-1, -2))
        attention = attention.where(asked, 0)
        dispersion = -(attention * (attention + _TINY).log()).sum((-1, -2, -3))
        return torch.stack([dispersion.clamp(min=0), shift], dim=-1)

    def share(self, notes: Tensor, tokens: Tensor, available: Tensor, protected: Tensor, layers: int) -> Tensor:
        """Return int64 ``[B, l]``, the slots a KV head of the layers read so far, at most, or of all layers.

        Args:
            notes: float32 ``[B, l, Hkv, 2]``.
            tokens: int64 ``[B]``, the budget in slots a KV head, mean over layers.
            available: int64 ``[B]``, how many slots there are to keep.
            protected: int64 ``[B]``, how many slots a head every layer keeps.
            layers: how many layers share the budget.
        """
        dispersion, shift = notes.double().sum(2).unbind(-1)
        most = available - protected
        total = layers * (torch.minimum(tokens, available) - protected)
        preference = _largest_is_one(dispersion) ** (1 / self.tau1) * _largest_is_one(shift) ** (1 / self.tau2)
        parts = proportions(total, preference, most)
        shares = at_most(parts, most) if notes.shape[1] < layers else whole_slots(parts, total, most)
        return protected[:, None] + shares


def _first(query_positions: Tensor) -> Tensor:
    """Return where the window of each row begins, int64 ``[B]``; a row has fewer queries where some are -1."""
    return query_positions.where(query_positions >= 0, torch.iinfo(torch.int64).max).amin(-1)


def _largest_is_one(numbers: Tensor) -> Tensor:
    """Return numbers ``[B, l]``, at least 0, over the largest of each row: no power of them is beyond what there is."""
    return numbers / numbers.amax(-1, keepdim=True).clamp(min=torch.finfo(numbers.dtype).tiny)


@hookimpl
def kvpolicy_budgets() -> list[type]:
    """Return the budgets of this module."""
    return [CakeLayers]
