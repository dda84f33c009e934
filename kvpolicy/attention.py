"""The attention of the last queries, for scorers that go by it: causal, padding left out, in float32."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from kvpolicy.types import LayerView

# Components beyond this would overflow the float32 product of a query and a key; no model's come near it.
LIMIT = 1e15
"""What components of queries and keys are bounded by."""


def window_attention(view: LayerView) -> Tensor:
    """Return the attention of each query head to each slot, float32 ``[B, Hkv, G, T]``, in [0, 1].

    ``mean_w softmax_t(q_w . k_t * scaling)``, over the queries that the row has; each sees the valid slots at its own
    position and before.

    Args:
        view: with queries and keys, both declared in the scorer's `needs`.

    Three slots, two queries: the first sees the first two slots, the second all three.

    >>> keys = torch.zeros(1, 1, 3, 2)
    >>> view = LayerView(keys=keys, values=keys, queries=torch.ones(1, 1, 2, 2))
    >>> (window_attention(view) * 12).round().tolist()
    [[[[5.0, 5.0, 2.0]]]]
    """
    # In float32 whatever the dtype: logits rounded to bfloat16 move the attention itself by per cents.
    queries = view.queries.float().clamp(-LIMIT, LIMIT) * view.scaling  # type: ignore[union-attr]
    queries = rearrange(queries, "b (h g) w d -> b h (g w) d", h=view.kv_heads)
    logits = queries @ view.keys.float().clamp(-LIMIT, LIMIT).mT
    logits = rearrange(logits, "b h (g w) t -> b h g w t", g=view.group)

    past = view.positions[:, :, None] <= view.query_positions[:, None, :, None]
    seen = view.valid[:, :, None] & past  # [B, Hkv, W, T]
    exists = seen.any(-1)
    # Not -inf: a query that sees nothing would be nan; it is uniform instead, and weighs nothing below.
    attention = logits.masked_fill_(~seen[:, :, None], torch.finfo(torch.float32).min).softmax(-1)
    weights = exists.float() / exists.sum(-1, keepdim=True).clamp(min=1)
    return (weights[:, :, None, None] @ attention).squeeze(-2)


__all__ = ["LIMIT", "window_attention"]
