"""Masked arithmetic that scorers, combiners and budgets share: float32, O(n), never NaN."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny
HUGE = torch.finfo(torch.float32).max


def masked_mean(scores: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `scores` ``[B, Hkv, T]`` over the True slots of `mask`, ``[B, Hkv, 1]``; 0 of none.

    >>> masked_mean(torch.tensor([[[1.0, 3.0, 9.0]]]), torch.tensor([[[True, True, False]]])).tolist()
    [[[2.0]]]
    """
    total = scores.where(mask, 0).sum(-1, keepdim=True)
    return total / mask.sum(-1, keepdim=True).clamp(min=1)


def min_max(scores: Tensor, mask: Tensor) -> Tensor:
    """Return `scores` ``[B, Hkv, T]`` scaled to [0, 1] over the True slots of `mask`; 0 elsewhere and where constant.

    >>> min_max(torch.tensor([[[1.0, 3.0, 2.0]]]), torch.tensor([[[True, True, True]]])).tolist()
    [[[0.0, 1.0, 0.5]]]
    """
    low = scores.where(mask, torch.inf).amin(-1, keepdim=True)
    high = scores.where(mask, -torch.inf).amax(-1, keepdim=True)
    span = high - low
    # Where no slot is a candidate the span is -inf, where all are equal it is 0: both score 0.
    scaled = (scores - low) / span.where(span > 0, 1)
    return scaled.where(mask & (span > 0), 0)


def match_mean(scores: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Return `scores` scaled so that its mean over `mask` equals `reference`'s, per head; all zeros stay zeros.

    >>> every = torch.ones(1, 1, 2, dtype=torch.bool)
    >>> match_mean(torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[4.0, 4.0]]]), every).tolist()
    [[[2.0, 6.0]]]
    """
    mean = masked_mean(scores, mask)
    return scores * (masked_mean(reference, mask) / mean.where(mean.abs() > TINY, 1))


def ranks(scores: Tensor) -> Tensor:
    """Return int64 ``[..., T]``: the place of each slot when sorted best first; equal scores keep slot order.

    >>> ranks(torch.tensor([0.5, 2.0, 0.5])).tolist()
    [1, 0, 2]
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )


def lower(scores: Tensor, mask: Tensor) -> Tensor:
    """Return int64 ``[B, Hkv, T]``: how many True slots of `mask` score lower than each slot.

    >>> lower(torch.tensor([[[2.0, 1.0, 2.0, 9.0]]]), torch.tensor([[[True, True, True, False]]]))[..., :3].tolist()
    [[[1, 0, 1]]]
    """
    ascending = scores.where(mask, torch.inf).sort(-1).values
    return torch.searchsorted(ascending, scores.contiguous())


def newest(mask: Tensor, count: Tensor | int) -> Tensor:
    """Return the last `count` True slots of each head of `mask`, bool ``[B, Hkv, T]``; all of them where it has fewer.

    >>> newest(torch.tensor([[[True, False, True, True]]]), 2).tolist()
    [[[False, False, True, True]]]
    """
    return mask & (mask.flip(-1).cumsum(-1).flip(-1) <= count)


def exact(share: float) -> Fraction:
    """Return a share as it was written.

    0.29 of 50 is 14.5 and rounds to 15, where 0.29 * 50 in floating point is less. Of nine digits, as int64 has to hold
    twice a product with tokens.

    >>> exact(0.29) * 50
    Fraction(29, 2)
    """
    return Fraction(str(share)).limit_denominator(10**9)


def rounded(parts: Tensor, unit: int) -> Tensor:
    """Return ``parts / unit`` ``[B, n]`` in whole numbers with the same whole sum: the largest remainders go up.

    Of equal remainders the earlier one's part goes up.

    >>> rounded(torch.tensor([[15, 15, 10]]), 10).tolist()
    [[2, 1, 1]]
    """
    whole, remainder = parts // unit, parts % unit
    return whole + (ranks(remainder) < remainder.sum(-1, keepdim=True) // unit)


def noise(valid: Tensor, seed: int) -> Tensor:
    """Return a number in [0, 1) for each slot of `valid`, bool ``[B, Hkv, T]``: float32 ``[B, Hkv, T]``.

    From the seed, the head and the slot's place among the valid slots alone: padding and batch mates change nothing.

    >>> mask = torch.tensor([[[True, True, True]], [[False, True, True]]])
    >>> first, second = noise(mask, 0)[:, 0].tolist()
    >>> first[:2] == second[1:]
    True
    """
    _, heads, slots = valid.shape
    generator = torch.Generator("cpu").manual_seed(seed)
    # Slot by slot, so that the numbers of the first slots do not depend on how many follow.
    drawn = torch.rand(slots, heads, generator=generator, dtype=torch.float32, device="cpu").T.to(valid.device)
    place = (valid.cumsum(-1) - 1).clamp(min=0)
    return drawn.expand(len(place), -1, -1).gather(-1, place)


def from_zero(scores: Tensor, mask: Tensor) -> Tensor:
    """Return `scores` ``[B, Hkv, T]``, shifted up per head where one at a True slot of `mask` is below 0.

    Makes a mean usable as a size: scaling to the mean of a negative score would turn the order round.

    >>> from_zero(torch.tensor([[[-3.0, -1.0]]]), torch.ones(1, 1, 2, dtype=torch.bool)).tolist()
    [[[0.0, 2.0]]]
    """
    return scores - scores.where(mask, torch.inf).amin(-1, keepdim=True).clamp(max=0)


def norms(vectors: Tensor) -> Tensor:
    """Return the Euclidean length of each of `vectors` ``[..., D]``, any float dtype: float32 ``[...]``.

    No square overflows or vanishes; a length that float32 cannot hold becomes the largest that it can.

    >>> norms(torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 1e30]])).tolist()
    [5.0, 0.0, 1.0000000150474662e+30]
    """
    vectors = vectors.float()
    scale = _size(vectors)
    lengths: Tensor = torch.linalg.vector_norm(vectors / scale, dim=-1)
    return (lengths * scale.squeeze(-1)).clamp(max=HUGE)


def units(vectors: Tensor) -> Tensor:
    """Return `vectors` ``[..., D]`` scaled to length 1, float32; a zero vector stays zero.

    >>> units(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    vectors = vectors.float()
    vectors = vectors / _size(vectors)
    # The largest component is 1 or more now, so only a zero vector is shorter than 1.
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / lengths.clamp(min=1)


def centroid(vectors: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `vectors` ``[B, Hkv, T, D]`` over the True slots of `mask`, ``[B, Hkv, 1, D]``; 0 of none.

    >>> keys = torch.tensor([[[[1.0], [3.0], [9.0]]]])
    >>> centroid(keys, torch.tensor([[[True, True, False]]])).tolist()
    [[[[2.0]]]]
    """
    # Slots outside the mask may hold anything, nan too, whose product with 0 is nan. `where` takes twice the time.
    total = vectors.float().nan_to_num(0, 0, 0).mul_(mask[..., None]).sum(-2, keepdim=True)
    return total / mask.sum(-1)[..., None, None].clamp(min=1)


def centroid_cosine(vectors: Tensor, mask: Tensor) -> Tensor:
    """Return ``cos(x_i, mean_j x_j/|x_j|)``, j over `mask`, of `vectors` ``[B, Hkv, T, D]``: ``[B, Hkv, T]``.

    The cosine with a zero vector is 0.

    >>> every = torch.ones(1, 1, 3, dtype=torch.bool)
    >>> centroid_cosine(torch.tensor([[[[2.0, 0.0], [9.0, 0.0], [0.0, 0.0]]]]), every).tolist()
    [[[1.0, 1.0, 0.0]]]
    """
    directions = units(vectors)
    return (directions @ units(centroid(directions, mask)).mT).squeeze(-1)


def centroid_distance(vectors: Tensor, mask: Tensor) -> Tensor:
    """Return ``|x_i - mean_j x_j|``, j over `mask`, of `vectors` ``[B, Hkv, T, D]``: float32 ``[B, Hkv, T]``.

    >>> keys = torch.tensor([[[[1.0], [3.0], [9.0]]]])
    >>> centroid_distance(keys, torch.tensor([[[True, True, False]]])).tolist()
    [[[1.0, 1.0, 7.0]]]
    """
    vectors, scale = _rescaled(vectors, mask)
    return (norms(vectors - centroid(vectors, mask)) * scale).clamp(max=HUGE)


def cosine_redundancy(vectors: Tensor, mask: Tensor) -> Tensor:
    """Return how alike the directions of each head's vectors are, ``[B, Hkv]`` in [0, 1]; 1 means all the same.

    The mean cosine over all pairs of different slots; in closed form ``(n*|mean u|^2 - mean|u|^2) / (n - 1)`` with
    ``u = x/|x|``, where ``mean|u|^2`` is 1 unless some vectors are zero. Fewer than two slots: 0.

    Args:
        vectors: ``[B, Hkv, T, D]``, any float dtype.
        mask: bool ``[B, Hkv, T]``, the slots that count.

    >>> keys = torch.tensor([[[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]]])  # cosines of the pairs: 1, 0, 0
    >>> round(float(cosine_redundancy(keys, torch.ones(1, 1, 3, dtype=torch.bool))), 4)
    0.3333
    """
    return _mean_pair_product(units(vectors), mask).clamp(0, 1)


def euclidean_redundancy(vectors: Tensor, mask: Tensor) -> Tensor:
    """Return how near each head's vectors are, for their length, ``[B, Hkv]`` in [0, 1]; 1 means all the same.

    One minus the mean squared distance over all pairs of different slots, over ``2 * mean|x|^2``; in closed form
    ``(n*|mean x|^2 - mean|x|^2) / ((n - 1) * mean|x|^2)``. Fewer than two slots, or all zero: 0.

    Args:
        vectors: ``[B, Hkv, T, D]``, any float dtype.
        mask: bool ``[B, Hkv, T]``, the slots that count.

    >>> keys = torch.tensor([[[[1.0], [3.0]]]])  # squared distance 4, mean squared length 5: 1 - 4/10
    >>> round(float(euclidean_redundancy(keys, torch.ones(1, 1, 2, dtype=torch.bool))), 4)
    0.6
    """
    vectors, _ = _rescaled(vectors, mask)
    square = _mean_square(vectors, mask)
    return (_mean_pair_product(vectors, mask) / square.where(square > 0, 1)).clamp(0, 1)


def _mean_pair_product(vectors: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of ``x_i . x_j`` over all pairs ``i != j`` of True slots, ``[B, Hkv]``; 0 without a pair."""
    count = mask.sum(-1)
    squared_mean = centroid(vectors, mask).square().sum((-2, -1))
    product = (count * squared_mean - _mean_square(vectors, mask)) / (count - 1).clamp(min=1)
    return product.where(count > 1, 0)


def _mean_square(vectors: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(torch.linalg.vector_norm(vectors, dim=-1).square(), mask).squeeze(-1)


def _rescaled(vectors: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return `vectors`, float32, over the size of the head's largest at a True slot, and that, ``[B, Hkv, 1]``."""
    vectors = vectors.float()
    scale = _size(vectors).squeeze(-1).where(mask, TINY).amax(-1, keepdim=True)
    return vectors / scale[..., None], scale


def _size(vectors: Tensor) -> Tensor:
    """Return the power of two at or under each vector's largest component; dividing by it is exact, ``[..., 1]``."""
    # Not vector_norm(ord=inf), which is alike and takes seventy times as long on a CPU.
    largest = vectors.abs().amax(-1, keepdim=True)
    return torch.exp2(torch.frexp(largest).exponent.float() - 1).clamp(min=TINY)
