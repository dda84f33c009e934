"""Schedule: what a layer keeps changes with depth, along a line or a cosine."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import rounded
from kvpolicy.plugin import settings

_UNIT = 1_000_000


@settings
class ScheduleLayers:
    """Budgets that change with depth: the first layer keeps ``first * K``, the last one ``(2 - first) * K``.

    Along a line, each layer differs from the next by as much; along a cosine, the first and the last layers differ
    little among themselves and those in the middle most. No layer keeps less than 1 or more than there is: the whole
    curve is then flatter. Fractions are rounded by largest remainder (of equal ones, the earlier layer's goes up), so
    that the layers always add up to ``layers * min(K, T)``.

    Args:
        shape: "linear" or "cosine".
        first: what the first layer keeps, as a share of the mean, counted to a thousandth; under 1, budgets rise.

    >>> for shape in ("linear", "cosine"):
    ...     ScheduleLayers(shape=shape)(torch.tensor([100]), torch.tensor([999]), layers=5).tolist()
    [[150, 125, 100, 75, 50]]
    [[150, 135, 100, 65, 50]]
    """

    name = "schedule"
    stage = "layers"
    source = "kvpolicy; a falling line is the form of PyramidKV, arXiv 2406.02069"
    formula = "K_l = K * (1 + (first - 1) * c_l), c_l = 1 - 2x or cos(pi * x), x = l / (layers - 1)"
    cost = "time O(L log L), memory O(L)"
    shape: Literal["linear", "cosine"] = "linear"
    first: Annotated[float, Ge(0), Le(2)] = 1.5

    def __call__(self, tokens: Tensor, available: Tensor, layers: int) -> Tensor:
        """Return int64 ``[B, layers]``, first layer first, each from 1 to `available`.

        Args:
            tokens: int64 ``[B]``, the budget in slots a KV head, mean over layers.
            available: int64 ``[B]``, how many slots there are to keep.
            layers: how many layers share the budget.
        """
        # In whole numbers throughout, so that no rounding decides a remainder: everything times `unit`.
        unit = 1000 * _UNIT
        mean = torch.minimum(tokens, available)[:, None]
        room = torch.minimum(available[:, None] - mean, mean - 1).clamp(min=0) * 1000
        rise = round(self.first * 1000) - 1000
        swing = torch.minimum(mean * abs(rise), room) * (1 if rise >= 0 else -1)
        exact = mean * unit + swing * torch.tensor(self._curve(layers), device=tokens.device)
        return rounded(exact, unit)

    def _curve(self, layers: int) -> list[int]:
        """Return what each layer's part of the swing is, in millionths; they add up to 0."""
        curve = [0] * layers
        for early in range(layers // 2):
            x = early / (layers - 1)
            part = round(_UNIT * (1 - 2 * x if self.shape == "linear" else math.cos(math.pi * x)))
            curve[early], curve[layers - 1 - early] = part, -part
        return curve


@hookimpl
def kvpolicy_budgets() -> list[type]:
    """Return the budgets of this module."""
    return [ScheduleLayers]
