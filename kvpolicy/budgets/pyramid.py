"""Pyramid: early layers keep more, late layers less."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import rounded
from kvpolicy.plugin import settings


@settings
class PyramidLayers:
    """Budgets that fall linearly with depth: the last layer keeps ``max(K/beta, 1)``, first and last 2K in all.

    Where the first layer has fewer slots than that, it keeps them all and the last layer keeps ``2K - T``, as
    in the authors' code. Fractions are rounded by largest remainder (of equal ones, the earlier layer's goes
    up), so that the layers always add up to ``layers * min(K, T)``.

    Args:
        beta: how steep the pyramid is, counted to a thousandth; 1 is uniform.

    K = 10 and beta 20: the last layer keeps 1, the first 19, and three layers 30.

    >>> PyramidLayers()(torch.tensor([10, 10]), torch.tensor([100, 12]), layers=3).tolist()
    [[19, 10, 1], [12, 10, 8]]
    """

    name = "pyramid"
    stage = "layers"
    source = "PyramidKV, arXiv 2406.02069, section 4 and its code"
    formula = "K_l linear in l, (K_first + K_last)/2 = K, K_last = max(K/beta, 1)"
    cost = "time O(L log L), memory O(L)"
    beta: Annotated[float, Ge(1), Le(1_000_000)] = 20

    def __call__(self, tokens: Tensor, available: Tensor, layers: int) -> Tensor:
        """Return int64 ``[B, layers]``, first layer first; never rising, each from 1 to `available`.

        Args:
            tokens: int64 ``[B]``, the budget in slots a KV head, mean over layers.
            available: int64 ``[B]``, how many slots there are to keep.
            layers: how many layers share the budget.
        """
        # In whole numbers throughout, so that no rounding decides a remainder: everything times `unit`.
        thousandths = round(self.beta * 1000)
        mean = torch.minimum(tokens, available)[:, None]
        steps = max(layers - 1, 1)
        unit = thousandths * steps
        last = torch.maximum(mean * 1000, mean.new_tensor(thousandths))
        room = (available[:, None] - mean) * thousandths
        rise = torch.minimum(mean * thousandths - last, room).clamp(min=0)
        depth = torch.arange(layers, device=tokens.device)
        exact = mean * unit + rise * (layers - 1 - 2 * depth)
        return rounded(exact, unit)


@hookimpl
def kvpolicy_budgets() -> list[type]:
    """Return the budgets of this module."""
    return [PyramidLayers]
