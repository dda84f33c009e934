"""The model's mask, cut to the slots that each head holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from kvpolicy.errors import UnsupportedModelError

Mask = Tensor | BlockMask | None
"""``[B, 1 or Hq, q, tokens seen]``, bool (True where visible) or additive; or FlexAttention's; None means causal."""


def part(mask: Mask, first: int, last: int, columns: int) -> Mask:
    """Return the rows of `mask` from `first` to `last`, and its first `columns` columns."""
    if not isinstance(mask, BlockMask):
        return mask if mask is None else mask[:, :, first:last, :columns]
    visible = mask.mask_mod

    def moved(row: Tensor, head: Tensor, query: Tensor, column: Tensor) -> Tensor:
        return visible(row, head, query + first, column)

    return create_block_mask(moved, mask.shape[0], mask.shape[1], last - first, columns, device=_device(mask))


def cut(mask: Mask, positions: Tensor, start: int, query: Tensor, implementation: str) -> Mask:
    """Return the mask for the slots that are held, in the form that `implementation` wants.

    Args:
        mask: the model's own.
        positions: int32 ``[B, Hkv, T]`` of the slots held, -1 where empty.
        start: tokens seen before these queries.
        query: ``[B, Hq, q, Dk]``.
        implementation: "flex_attention" wants a `BlockMask`, the others a tensor.
    """
    if implementation == "flex_attention" and not isinstance(mask, Tensor):
        return _cut_block_mask(mask, positions, start, query)
    if isinstance(mask, BlockMask) or implementation == "flex_attention":
        raise UnsupportedModelError(f"attention mask: {implementation} does not take a {type(mask).__name__}")
    return cut_mask(mask, positions, start, query, implementation)


def _cut_block_mask(mask: BlockMask | None, positions: Tensor, start: int, query: Tensor) -> BlockMask:
    batch, query_heads, length, _ = query.shape
    group = query_heads // positions.shape[1]

    def held(row: Tensor, head: Tensor, place: Tensor, slot: Tensor) -> Tensor:
        position = positions[row, head // group, slot]
        seen = position <= place + start if mask is None else mask.mask_mod(row, head, place, position.clamp(min=0))
        return (position >= 0) & seen

    return create_block_mask(held, batch, query_heads, length, positions.shape[2], device=_device(query))


def _device(where: Any) -> str:
    return str(where.device if isinstance(where, Tensor) else where.kv_num_blocks.device)


def cut_mask(mask: Tensor | None, positions: Tensor, start: int, query: Tensor, implementation: str) -> Tensor:
    """Return the mask for the slots that are held, ``[B, Hq, q, T]``: bool, True where visible, or additive.

    Args:
        mask: the model's own, ``[B, 1 or Hq, q, tokens seen]``, bool or additive; None means causal.
        positions: int32 ``[B, Hkv, T]`` of the slots held, -1 where empty.
        start: tokens seen before these queries.
        query: ``[B, Hq, q, Dk]``.
        implementation: "eager" wants an additive mask, the others a bool one.
    """
    query_heads, length = query.shape[1:3]
    seen = start + length
    if mask is None:
        ahead = torch.arange(start, seen, device=query.device)
        cut = (positions[:, :, None] >= 0) & (positions[:, :, None] <= ahead[:, None])
    elif mask.shape[-1] != seen:
        raise UnsupportedModelError(
            f"attention mask: expected {seen} columns (tokens seen), got {mask.shape[-1]}: the model cuts it to "
            "the slots it holds by itself, as if they were the first tokens"
        )
    else:
        cut = columns_of(mask, positions, query_heads)
    if cut.dtype == torch.bool and implementation == "eager":
        cut = torch.zeros((), dtype=query.dtype, device=query.device).where(cut, torch.finfo(query.dtype).min)
    return cut.repeat_interleave(query_heads // cut.shape[1], dim=1)


def columns_of(mask: Tensor, positions: Tensor, query_heads: int) -> Tensor:
    """Return the columns of ``[B, 1 or Hq, q, tokens seen]`` at the slots that are held; empty ones are hidden."""
    heads = positions.shape[1]
    if mask.shape[1] not in (1, heads):
        positions = positions.repeat_interleave(query_heads // heads, dim=1)
        heads = query_heads
    batch = len(positions)
    rows = mask.shape[2]
    index = positions.clamp(min=0).long()[:, :, None].expand(-1, -1, rows, -1)
    taken = mask.expand(batch, heads, rows, -1).gather(-1, index)
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return taken.where(positions[:, :, None] >= 0, hidden)
