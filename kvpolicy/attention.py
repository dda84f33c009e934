"""The attention of the last queries, for scorers that go by it: causal, padding left out, in float32."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvpolicy.types import LayerView

# Components beyond this would overflow the float32 product of a query and a key; no model's come near it.
LIMIT = 1e15
"""What components of queries and keys are bounded by."""
BLOCK = 2**22
"""How many logits are found at once, where one head or query has no more: 16 MiB.

What takes over 32 MiB, glibc gives back to the system each time, and gets it page by page.
"""


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
    count = _heads_at_once(view)
    starts = range(0, view.kv_heads, count)
    return torch.cat([_mean_of_heads(view, slice(start, start + count)) for start in starts], dim=1)


def _mean_of_heads(view: LayerView, heads: slice) -> Tensor:
    attention, weights = _of_heads(view, heads)
    return (weights[:, :, None, None] @ attention).squeeze(-2)


def _heads_at_once(view: LayerView) -> int:
    batch, query_heads, window, _ = view.queries.shape  # type: ignore[union-attr]
    return max(1, BLOCK * view.kv_heads // max(1, batch * query_heads * window * view.slots))


def each_query(view: LayerView) -> tuple[Tensor, Tensor]:
    """Return the attention of each query to each slot, and what each query weighs in a mean over them.

    Float32 ``[B, Hkv, G, W, T]``, in [0, 1], and ``[B, Hkv, W]``: 1 over how many queries see something, 0 for those
    that see nothing.

    Args:
        view: with queries and keys, both declared in the scorer's `needs`.

    >>> keys = torch.zeros(1, 1, 3, 2)
    >>> attention, weights = each_query(LayerView(keys=keys, values=keys, queries=torch.ones(1, 1, 2, 2)))
    >>> (attention * 6).round().tolist(), weights.tolist()
    ([[[[[3.0, 3.0, 0.0], [2.0, 2.0, 2.0]]]]], [[[0.5, 0.5]]])
    """
    return _of_heads(view, slice(None))


def _of_heads(view: LayerView, heads: slice) -> tuple[Tensor, Tensor]:
    """Return the same of some KV heads."""
    # In float32 whatever the dtype: logits rounded to bfloat16 move the attention itself by per cents.
    queries: Tensor = view.queries  # type: ignore[assignment]
    queries = rearrange(queries, "b (h g) w d -> b h (g w) d", h=view.kv_heads)[:, heads]
    queries, keys = (part.float().clamp(-LIMIT, LIMIT) for part in (queries, view.keys[:, heads]))
    logits = queries * view.scaling @ keys.mT
    logits = rearrange(logits, "b h (g w) t -> b h g w t", g=view.group)

    past = view.positions[:, heads, None] <= view.query_positions[:, None, :, None]
    seen = view.valid[:, heads, None] & past  # [B, Hkv, W, T]
    exists = seen.any(-1)
    # Not -inf: a query that sees nothing would be nan; it is uniform instead, and weighs nothing below.
    attention = logits.masked_fill_(~seen[:, :, None], torch.finfo(torch.float32).min).softmax(-1)
    return attention, exists.float() / exists.sum(-1, keepdim=True).clamp(min=1)


def variance(attention: Tensor, weights: Tensor) -> Tensor:
    """Return the variance over the queries of what `each_query` returned, float32 ``[B, Hkv, G, T]``, unbiased.

    0 where one query alone sees something.

    >>> variance(torch.tensor([[[[[0.5], [1.0]]]]]), torch.tensor([[[0.5, 0.5]]])).tolist()
    [[[[0.125]]]]
    """
    rows = weights[:, :, None, None]
    from_mean = attention - rows @ attention
    count = (weights > 0).sum(-1)[:, :, None, None].float()
    return (rows @ from_mean.square_()).squeeze(-2) * count / (count - 1).clamp(min=1)


def pooled(attention: Tensor, view: LayerView, kernel: int, pooling: str = "avg") -> Tensor:
    """Return the attention of candidates, 1-D pooled along the valid slots of each head, mean over its query heads.

    Float32 ``[B, Hkv, T]``. What is no candidate counts 0, as does what lies beyond the ends.

    Args:
        attention: float32 ``[B, Hkv, G, T]``.
        view: whose slots they are.
        kernel: valid slots a pool spans, odd.
        pooling: "avg" or "max".
    """
    attention = attention.where(view.candidates[:, :, None], 0)
    # Slots that are no slots are no neighbours either: padding between two turns goes to the end first.
    order = (~view.valid).int().argsort(dim=-1, stable=True)[:, :, None].expand_as(attention)
    pool = avg_pool1d if pooling == "avg" else max_pool1d
    found: Tensor = pool(attention.gather(-1, order).flatten(0, 1), kernel, stride=1, padding=kernel // 2)
    return torch.empty_like(attention).scatter_(-1, order, found.view(attention.shape)).mean(2)


__all__ = ["BLOCK", "LIMIT", "each_query", "pooled", "variance", "window_attention"]
