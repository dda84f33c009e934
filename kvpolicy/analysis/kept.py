"""What a plan keeps, counted: by token, by position, and against what another one keeps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def votes(keeps: Iterable[Tensor]) -> Tensor:
    """Return how many heads of all layers keep each slot: int64 ``[B, T]``.

    Args:
        keeps: of each layer, bool ``[B, Hkv, T]``, True where a slot is kept.

    >>> votes([torch.tensor([[[True, False], [True, True]]]), torch.tensor([[[True, False]]])]).tolist()
    [[3, 1]]
    """
    return torch.stack([keep.sum(1) for keep in keeps]).sum(0)


def jaccard(keep: Tensor, other: Tensor) -> float:
    """Return how much two ways to keep have in common: ``|A and B| / |A or B|``, in [0, 1]; of nothing, 1.

    A and B are the kept slots of all rows and heads, so that a slot counts only where the same head keeps it. Two
    random choices of a share p of many slots come to ``p / (2 - p)``.

    Args:
        keep: bool ``[B, Hkv, T]``.
        other: bool ``[B, Hkv, T]``.

    >>> jaccard(torch.tensor([[[True, True, False]]]), torch.tensor([[[True, False, True]]]))
    0.3333333333333333
    """
    either = int((keep | other).sum())
    return int((keep & other).sum()) / either if either else 1.0


def by_position(keep: Tensor, valid: Tensor, bins: int) -> Tensor:
    """Return which share of each stretch of the prompt is kept: float32 ``[bins]``, first stretch first.

    The valid slots of a head are cut into `bins` stretches as equal as can be; rows and heads are taken together. Of a
    stretch without slots: 0.

    Args:
        keep: bool ``[B, Hkv, T]``, True where a slot is kept; only valid ones are.
        valid: bool ``[B, Hkv, T]``.
        bins: how many stretches.

    >>> keep = torch.tensor([[[True, True, False, False]]])
    >>> by_position(keep, torch.ones_like(keep), bins=2).tolist()
    [1.0, 0.0]
    """
    place = valid.cumsum(-1) - 1
    stretch = place * bins // valid.sum(-1, keepdim=True).clamp(min=1)
    there, kept = (torch.bincount(stretch[mask], minlength=bins) for mask in (valid, keep))
    return kept / there.clamp(min=1)
