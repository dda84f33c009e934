"""Slots shared out in proportion to what each layer weighs."""

from __future__ import annotations

import torch
from torch import Tensor


def proportions(total: Tensor, weights: Tensor, most: Tensor) -> Tensor:
    """Return parts of `total` in proportion to `weights`, float64 ``[B, l]``, none above `most`.

    What a layer at its most leaves goes to the others in the same proportion; weights of 0 get a part once all others
    are at their most, alike. A layer's part never rises when a layer is added.

    Args:
        total: int64 ``[B]``.
        weights: float64 ``[B, l]``, at least 0.
        most: int64 ``[B]``, of each layer.

    >>> proportions(torch.tensor([12]), torch.tensor([[6.0, 2.0, 1.0]]).double(), torch.tensor([6])).tolist()
    [[6.0, 4.0, 2.0]]
    """
    full = torch.zeros_like(weights, dtype=torch.bool)
    parts = torch.zeros_like(weights)
    for _ in range(weights.shape[1] + 1):
        open_ = weights.where(~full, 0)
        # Summed one after another, so that a layer more only adds to what the others are divided by.
        whole = open_.cumsum(-1)[:, -1:]
        alike = (~full).double()
        left = (total - most * full.sum(-1))[:, None].double()
        # Divided last: of whole weights that add up to what is left, each is its own part to the last bit.
        share = torch.where(whole > 0, left * open_ / whole, left * alike / alike.sum(-1, keepdim=True).clamp(min=1))
        parts = share.where(~full, most[:, None].double())
        over = ~full & (parts >= most[:, None])
        if not over.any():
            break
        full |= over
    return torch.minimum(parts, most[:, None].double())


def at_most(parts: Tensor, most: Tensor) -> Tensor:
    """Return what `whole_slots` can still make of `parts` that only fall, int64 ``[B, l]``: one more than rounded down.

    Args:
        parts: float64 ``[B, l]``.
        most: int64 ``[B]``, of each layer.

    >>> at_most(torch.tensor([[2.75, 5.0]]).double(), torch.tensor([5])).tolist()
    [[3, 5]]
    """
    return torch.minimum(parts.floor().long() + 1, most[:, None])


def whole_slots(parts: Tensor, total: Tensor, most: Tensor) -> Tensor:
    """Return `parts` rounded down, and what is missing to `total` to the first layers that have room, int64 ``[B, l]``.

    Args:
        parts: float64 ``[B, l]``, which add up to `total`.
        total: int64 ``[B]``.
        most: int64 ``[B]``, of each layer.

    >>> whole_slots(torch.tensor([[2.75, 4.5, 2.75]]).double(), torch.tensor([10]), torch.tensor([5])).tolist()
    [[3, 5, 2]]
    """
    down = parts.floor().long()
    room = down < most[:, None]
    missing = (total - down.sum(-1))[:, None]
    return down + (room & (room.cumsum(-1) <= missing))


__all__ = ["at_most", "proportions", "whole_slots"]
