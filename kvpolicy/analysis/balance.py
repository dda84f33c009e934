"""Importance against diversity: do the slots that matter most differ most from the others?"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.maths import masked_mean


def rank_correlation(scores: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """Return Spearman's rank correlation of two scores, by head: float32 ``[B, Hkv]`` in [-1, 1].

    Pearson's correlation of their ranks, where equal scores share the mean of theirs. 1 means the same order, -1 the
    opposite one. Where one of them is constant, or there are fewer than two slots: 0.

    Args:
        scores: float32 ``[B, Hkv, T]``.
        others: float32 ``[B, Hkv, T]``.
        mask: bool ``[B, Hkv, T]``, the slots that count.

    >>> every = torch.ones(1, 1, 4, dtype=torch.bool)
    >>> one, other = torch.tensor([[[1.0, 2.0, 3.0, 9.0]]]), torch.tensor([[[5.0, 6.0, 7.0, 8.0]]])
    >>> rank_correlation(one, other, every).tolist(), rank_correlation(one, -other, every).tolist()
    ([[1.0]], [[-1.0]])
    """
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    # In [-1/2, 1/2], so that the sums of long prompts stay small; the mean of either is 0.
    first, second = (doubled_ranks(each, mask) / (2 * count) - 0.5 for each in (scores, others))
    product, left, right = (
        masked_mean(part, mask).squeeze(-1) for part in (first * second, first.square(), second.square())
    )
    scale = (left * right).sqrt()
    return (product / scale.where(scale > 0, 1)).where(scale > 0, 0).clamp(-1, 1)


def joint_density(scores: Tensor, others: Tensor, mask: Tensor, bins: int) -> Tensor:
    """Return how the slots of all heads spread over the ranks of two scores: float32 ``[bins, bins]``, mean 1.

    A 2-D histogram: ``[i, j]`` counts the slots in the i-th part of their head by `scores`, the lowest first, and in
    the j-th by `others`, over the count in each if the two scores had nothing to do with each other. Ranks, as heads
    score on scales of their own and attention is so uneven that nearly all of it would fall into one bin.

    Args:
        scores: float32 ``[B, Hkv, T]``.
        others: float32 ``[B, Hkv, T]``.
        mask: bool ``[B, Hkv, T]``, the slots that count.
        bins: how many parts.

    >>> every = torch.ones(1, 1, 4, dtype=torch.bool)
    >>> score = torch.tensor([[[1.0, 2.0, 3.0, 9.0]]])
    >>> joint_density(score, -score, every, bins=2).tolist()
    [[0.0, 2.0], [2.0, 0.0]]
    """
    # In whole numbers: a rank on the edge of two parts falls into the same one on every machine.
    count = 2 * mask.sum(-1, keepdim=True).clamp(min=1)
    row, column = (doubled_ranks(each, mask) * bins // count for each in (scores, others))
    counts = torch.bincount((row * bins + column)[mask], minlength=bins**2).view(bins, bins)
    return counts * (bins**2 / counts.sum().clamp(min=1)).float()


def doubled_ranks(scores: Tensor, mask: Tensor) -> Tensor:
    """Return int64 ``[B, Hkv, T]``: how many slots of the head score lower, and how many no higher, added up.

    Twice the mean rank of equal scores, counted from 1/2 for the lowest; only at the True slots of `mask`.

    >>> doubled_ranks(torch.tensor([[[5.0, 5.0, 7.0]]]), torch.ones(1, 1, 3, dtype=torch.bool)).tolist()
    [[[2, 2, 5]]]
    """
    scores = scores.where(mask, torch.inf).contiguous()
    ordered = scores.sort(-1).values
    return torch.searchsorted(ordered, scores) + torch.searchsorted(ordered, scores, right=True)
