"""Capture: from what the model computed to the `LayerView` that scorers read, and no more than they declared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.types import LayerView
from kvpolicy.window import Window


def layer_view(
    stored: tuple[Tensor, Tensor, Tensor | None],
    window: Window | None,
    visible: Tensor | None,
    *,
    seen: int,
    layer: int,
    scaling: float | None,
    shared: bool = False,
) -> LayerView:
    """Return the view of one layer.

    Args:
        stored: keys ``[B, Hkv, T, Dk]``, values and positions (int32 ``[B, Hkv, T]``, -1 where empty, or None where
            slot t is position t).
        window: the last queries, or None where a policy reads none.
        visible: bool ``[B, seen]`` or wider, False for padding, or None.
        seen: tokens seen, padding included.
        layer: the model's layer index.
        scaling: what the model multiplies ``q @ k`` by.
        shared: whether all heads keep the same slots.
    """
    keys, values, positions = stored
    batch, heads, slots, _ = keys.shape
    if positions is None:
        positions = torch.arange(slots, dtype=torch.int32, device=keys.device).expand(batch, heads, -1)
    valid = positions >= 0
    if visible is not None:
        visible = visible[:, :seen].to(keys.device).expand(batch, -1)
        valid = valid & at_slots(visible, positions)
    return LayerView(
        keys=keys,
        values=values,
        queries=None if window is None else window.queries,
        query_positions=None if window is None else window.positions,  # type: ignore[arg-type]
        valid=valid,
        positions=positions,
        seen=torch.full((batch,), seen, device=keys.device) if visible is None else visible.sum(-1),
        layer=layer,
        scaling=scaling,  # type: ignore[arg-type]
        shared=shared,
    )


def at_slots(columns: Tensor, positions: Tensor) -> Tensor:
    """Return, for what is known of each token (``[B, seen]``), what it is at each slot, ``[B, Hkv, T]``."""
    index = positions.clamp(min=0).long()
    return columns.gather(1, index.flatten(1)).view(positions.shape)


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
    if not isinstance(mask, Tensor):
        raise UnsupportedModelError(f"attention mask: expected a tensor, got {type(mask).__name__}")
    if mask.ndim == 4:
        last = mask[:, 0, -1]
        # An additive mask may carry a bias; what it hides is near the lowest number there is.
        mask = last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2
    if mask.ndim != 2 or mask.shape[1] != seen:
        raise UnsupportedModelError(
            f"attention mask: expected [B, {seen}] (one column for each token seen), got {list(mask.shape)}"
        )
    return mask.bool()
