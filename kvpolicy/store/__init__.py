"""Stores: where the kept slots of a layer live, in storage of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.store.dense import DenseStore
from kvpolicy.store.offloaded import OffloadedStore
from kvpolicy.store.quantized import QuantizedStore
from kvpolicy.store.ragged import RaggedStore
from kvpolicy.store.state import State
from kvpolicy.types import Merged, Selection


def build(
    keys: Tensor, values: Tensor, positions: Tensor | None, selection: Selection, merged: Merged | None = None
) -> tuple[DenseStore | RaggedStore, list[list[int]]]:
    """Return a store of the selected slots, copied, and how many each row and head keeps.

    Dense where every row and head keeps the same number, else ragged.

    Args:
        keys: ``[B, Hkv, T, Dk]``.
        values: ``[B, Hkv, T, Dv]``.
        positions: int32 ``[B, Hkv, T]``, or None where slot t is position t.
        selection: the slots to keep.
        merged: what they hold from now on; None for what they hold.
    """
    batch, heads = selection.lengths.shape
    kept_keys, kept_values = (
        (selection.take(keys), selection.take(values)) if merged is None else (merged.keys, merged.values)
    )
    kept_positions = selection.slots.to(torch.int32) if positions is None else selection.take(positions)
    lengths: list[list[int]] = selection.lengths.tolist()
    if len({count for row_counts in lengths for count in row_counts}) > 1:
        return RaggedStore(kept_keys, kept_values, kept_positions, lengths), lengths
    shape = (batch, heads, lengths[0][0])
    whole = positions is None and shape == keys.shape[:3]
    dense = DenseStore(
        kept_keys.view(*shape, keys.shape[-1]),
        kept_values.view(*shape, values.shape[-1]),
        None if whole else kept_positions.view(shape),
    )
    return dense, lengths


def restore(state: State) -> DenseStore | RaggedStore | QuantizedStore | OffloadedStore:
    """Return the store that `state` was taken from, on its tensors."""
    kind = state.plain["kind"]
    if kind == "quantized":
        return QuantizedStore.from_state(state)
    if kind == "offloaded":
        return OffloadedStore.from_state(state)
    return (RaggedStore if kind == "ragged" else DenseStore).from_state(state)
