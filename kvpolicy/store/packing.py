"""The quantizer: numbers as small integers between the smallest and the largest number of their group, and packed.

A group is `group` neighbours along one axis. Groups are counted from the end, so the first one may be short.
Both ends of a group are kept as they are, in the numbers' own dtype: they come back exactly, as does a constant
group, and any other number errs by at most half a step, ``(high - low) / (2 * (2**bits - 1))``, and its rounding to
that dtype. The arithmetic is float32, or float64 for float64.

A nan, an infinity, or a span beyond float32 in a group makes all of the group's numbers come back as nan or inf.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def grouped(numbers: Tensor, group: int, dim: int) -> Tensor:
    """Return `numbers` with axis `dim` split in two, groups and members; the first number repeats in a short group.

    Args:
        numbers: any shape.
        group: members of a group.
        dim: a negative axis.

    >>> grouped(torch.tensor([1, 2, 3]), group=2, dim=-1).tolist()
    [[1, 1], [2, 3]]
    """
    short = -numbers.shape[dim] % group
    if short:
        numbers = torch.cat([numbers.narrow(dim, 0, 1).repeat_interleave(short, dim), numbers], dim)
    return numbers.unflatten(dim, (numbers.shape[dim] // group, group))


def quantize(numbers: Tensor, group: int, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return uint8 codes, shaped as `numbers`, and the ends of each group along `dim`, in the numbers' dtype.

    Args:
        numbers: floating point, any shape.
        group: members of a group.
        dim: a negative axis.
        bits: of a code, at most 8.

    >>> codes, low, high = quantize(torch.tensor([5.0, 1.0, 2.0, 4.0]), group=3, dim=-1, bits=2)
    >>> codes.tolist(), low.tolist(), high.tolist()
    ([0, 0, 1, 3], [5.0, 1.0], [5.0, 4.0])
    """
    members = grouped(numbers, group, dim)
    low, high = members.amin(dim), members.amax(dim)
    start, end = _wide(low).unsqueeze(dim), _wide(high).unsqueeze(dim)
    place = (_wide(members) - start).div_(end - start)
    # nan is 0 / 0 of a constant group, of which any code will do, or of a group whose ends say that it is not finite.
    codes = place.mul_(2**bits - 1).round_().nan_to_num_(0).to(torch.uint8)
    return _ungrouped(codes, dim, numbers.shape[dim]), low, high


def dequantize(codes: Tensor, low: Tensor, high: Tensor, group: int, dim: int, bits: int) -> Tensor:
    """Return the numbers that `quantize` made `codes`, `low` and `high` of, as nearly as they say.

    >>> parts = quantize(torch.tensor([5.0, 1.0, 2.0, 4.0]), group=3, dim=-1, bits=2)
    >>> dequantize(*parts, group=3, dim=-1, bits=2).tolist()
    [5.0, 1.0, 2.0, 4.0]
    """
    start, end = _wide(low).unsqueeze(dim), _wide(high).unsqueeze(dim)
    place = grouped(codes, group, dim).to(start.dtype).div_(2**bits - 1)
    return _ungrouped(torch.lerp(start, end, place).to(low.dtype), dim, codes.shape[dim])


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes, uint8 ``[..., D]``, in storage of their own: of 4 bits two to a byte, of 8 bits one.

    The last byte of an odd number of 4-bit codes is half empty.

    >>> pack(torch.tensor([1, 2, 3], dtype=torch.uint8), bits=4).tolist()
    [49, 2]
    """
    if bits == 8:
        return codes.clone(memory_format=torch.contiguous_format)
    half = (codes.shape[-1] + 1) // 2
    return codes[..., :half] | pad(codes[..., half:] << 4, [0, codes.shape[-1] % 2])


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """Return the uint8 codes ``[..., size]`` that `pack` packed.

    >>> unpack(torch.tensor([49, 2], dtype=torch.uint8), bits=4, size=3).tolist()
    [1, 2, 3]
    """
    if bits == 8:
        return packed
    return torch.cat([packed & 15, packed >> 4], dim=-1)[..., :size]


def _ungrouped(members: Tensor, dim: int, size: int) -> Tensor:
    """Return groups and members as one axis `dim` again, of its last `size` numbers."""
    flat = members.flatten(dim - 1, dim)
    return flat.narrow(dim, flat.shape[dim] - size, size)


def _wide(numbers: Tensor) -> Tensor:
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))
