"""Uniform: every layer, or every head of a layer, keeps the same number of slots."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView


@settings
class UniformLayers:
    """Every layer keeps the budget: ``K_l = min(K, T)``.

    >>> UniformLayers()(torch.tensor([3]), torch.tensor([10]), layers=2).tolist()
    [[3, 3]]
    """

    name = "uniform"
    stage = "layers"
    source = "kvpolicy"
    formula = "K_l = min(K, T)"
    cost = "time O(L), memory O(L)"

    def __call__(self, tokens: Tensor, available: Tensor, layers: int) -> Tensor:
        """Return int64 ``[B, layers]``."""
        return torch.minimum(tokens, available)[:, None].expand(-1, layers)


@settings
class UniformHeads:
    """Every head of a layer keeps the layer's budget: ``K_h = min(K, slots of the head)``.

    >>> view = LayerView(keys=torch.zeros(1, 2, 4, 2), values=torch.zeros(1, 2, 4, 2))
    >>> UniformHeads()(view, torch.zeros(1, 2, 4), torch.tensor([3])).tolist()
    [[3, 3]]
    """

    name = "uniform"
    stage = "heads"
    source = "kvpolicy"
    formula = "K_h = min(K, T_h)"
    cost = "time O(n), memory O(1)"
    across_heads = False

    def __call__(self, view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
        """Return int64 ``[B, Hkv]``."""
        return torch.minimum(tokens[:, None], view.valid.sum(-1))


@hookimpl
def kvpolicy_budgets() -> list[type]:
    """Return the budgets of this module."""
    return [UniformLayers, UniformHeads]
