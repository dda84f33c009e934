"""The attention of all queries, block by block, for scorers that accumulate it: memory linear in slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from kvpolicy.attention import BLOCK, LIMIT
from kvpolicy.types import LayerView


@dataclass(frozen=True)
class Block:
    """Some queries and what they see.

    Args:
        logits: float32 ``[B, Hkv, G, W, T]``, ``q_w . k_t * scaling``; anything finite where `sees` is False.
        sees: bool ``[B, Hkv, W, T]``: the valid slots at a query's own position and before.
    """

    logits: Tensor
    sees: Tensor

    def attention(self) -> Tensor:
        """Return the softmax of the logits, ``[B, Hkv, G, W, T]``; 0 at what a query does not see."""
        sees = self.sees[:, :, None]
        lowest = torch.finfo(torch.float32).min
        # A query that sees nothing would be uniform.
        return self.logits.masked_fill(~sees, lowest).softmax(-1).masked_fill_(~sees, 0)


def attention_blocks(view: LayerView) -> Iterator[Block]:
    """Return the queries of a view in blocks, oldest first, each with its logits.

    A block holds 16 MiB of logits at most, unless those of one query are more.

    Args:
        view: with queries and keys, both declared in the scorer's `needs`.

    Three slots, and a query at each: together they see 1 + 2 + 3 of them.

    >>> keys = torch.zeros(1, 1, 3, 2)
    >>> view = LayerView(keys=keys, values=keys, queries=torch.ones(1, 1, 3, 2))
    >>> sum(int(block.sees.sum()) for block in attention_blocks(view))
    6
    """
    keys = view.keys.where(view.valid[..., None], 0).float().clamp(-LIMIT, LIMIT).mT
    batch, heads, window, _ = view.queries.shape  # type: ignore[union-attr]
    size = max(1, BLOCK // (batch * heads * view.slots))
    for start in range(0, window, size):
        positions = view.query_positions[:, start : start + size]
        exists = (positions >= 0)[:, None, :, None]
        queries = view.queries[:, :, start : start + size].where(exists, 0)  # type: ignore[index]
        queries = queries.float().clamp(-LIMIT, LIMIT) * view.scaling
        logits = rearrange(queries, "b (h g) w d -> b h (g w) d", h=view.kv_heads) @ keys
        past = view.positions[:, :, None] <= positions[:, None, :, None]
        yield Block(rearrange(logits, "b h (g w) t -> b h g w t", g=view.group), view.valid[:, :, None] & past)


__all__ = ["Block", "attention_blocks"]
