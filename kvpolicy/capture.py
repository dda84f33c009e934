"""Capture: from what the model computed to the `LayerView` that scorers read, and no more than they declared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.types import LayerView, Needs


def visible_columns(mask: Any, seen: int) -> Tensor | None:
    """Return bool ``[B, seen]``, False for padding, from a model's attention mask; None where nothing is padded.

    Args:
        mask: None, a 2-D mask (1 for a token, 0 for padding), a 4-D one (its last query row counts), or a mapping
            from layer kinds to 4-D masks.
        seen: tokens seen, the tokens of this call included.
    """
    if isinstance(mask, dict):
        mask = mask.get("full_attention")
    if mask is None:
        return None
    if mask.ndim == 4:
        last = mask[:, 0, -1]
        # An additive mask may carry a bias; what it hides is near the lowest number there is.
        mask = last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2
    if mask.ndim != 2 or mask.shape[1] != seen:
        raise UnsupportedModelError(
            f"attention mask: expected [B, {seen}] (one column for each token seen), got {list(mask.shape)}"
        )
    return mask.bool()


def layer_view(
    stored: tuple[Tensor, Tensor, Tensor | None],
    query: Tensor,
    columns: Tensor | None,
    needs: Needs,
    *,
    seen: int,
    layer: int,
    scaling: float | None,
) -> LayerView:
    """Return the view of one layer after the model attended with `query`.

    Args:
        stored: keys ``[B, Hkv, T, Dk]``, values and positions (int32 ``[B, Hkv, T]``, -1 where empty, or None where
            slot t is position t); the last q slots are those of the queries.
        query: ``[B, Hq, q, Dk]``.
        columns: bool ``[B, seen]``, False for padding, or None.
        needs: what the policy reads.
        seen: tokens seen, padding included.
        layer: the model's layer index.
        scaling: what the model multiplies ``q @ k`` by.
    """
    keys, values, positions = stored
    batch, heads, slots, _ = keys.shape
    valid = torch.ones(batch, heads, slots, dtype=torch.bool, device=keys.device)
    if positions is not None:
        valid = positions >= 0
    if columns is not None:
        columns = columns.to(keys.device).expand(batch, -1)
        at = torch.arange(slots, device=keys.device).expand_as(valid) if positions is None else positions.clamp(min=0)
        valid = valid & columns.gather(1, at.long().flatten(1)).view_as(valid)
    queries, query_slots = _window(query, columns, min(needs.queries, query.shape[2]), slots)
    return LayerView(
        keys=keys,
        values=values,
        queries=queries,
        query_slots=query_slots,  # type: ignore[arg-type]
        valid=valid,
        seen=torch.full((batch,), seen, device=keys.device) if columns is None else columns.sum(-1),
        layer=layer,
        scaling=scaling,  # type: ignore[arg-type]
    )


def _window(query: Tensor, columns: Tensor | None, window: int, slots: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the last `window` queries of each row that are no padding, oldest first, and their slots (-1: none)."""
    if not window:
        return None, None
    length = query.shape[2]
    if columns is None:
        return query[:, :, -window:], None
    new = columns[:, -length:]
    place = torch.where(new, torch.arange(length, device=query.device), -1)
    chosen = place.topk(window, dim=-1).values.flip(-1)
    index = chosen.clamp(min=0)[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
    return query.gather(2, index), torch.where(chosen >= 0, chosen + slots - length, -1)
