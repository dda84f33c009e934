"""`Pass`: one forward pass of one cache, from its first layer to its last; and what a layer holds after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvpolicy.capture import visible_columns
from kvpolicy.report import LayerRecord
from kvpolicy.session.when import Prompt
from kvpolicy.step import Left
from kvpolicy.store.layer import EvictingLayer
from kvpolicy.types import Merged, Selection


@dataclass
class Pass:
    """One forward pass.

    Args:
        mask: the model's attention mask.
        prompt: what is known of the prompt it belongs to.
        modality: int8 ``[B, q]``, what each of its tokens is, where the policy needs it.
        new: its tokens; None before its first layer.
        decoding: whether it comes after the prompt.
        point: tokens seen when it evicts, None where it does not.
        budgets: int64 ``[B, layers]``, once known.
        left: by layer, what is left of the slots, where the pass goes on after it evicts.
        pending: layers that have cached its tokens and not yet attended to them.
        reached: layers that have attended.
    """

    mask: Any
    prompt: Prompt
    modality: Tensor | None = None
    new: int | None = None
    decoding: bool = False
    point: int | None = None
    budgets: Tensor | None = None
    left: dict[int, Left] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    _visible: tuple[Tensor | None] | None = None

    def visible(self, seen: int) -> Tensor | None:
        """Return bool ``[B, seen]``, False for padding, or None where nothing is padded."""
        if self._visible is None:
            self._visible = (visible_columns(self.mask, seen),)
        return self._visible[0]

    def take_rows(self, rows: Tensor, seen: int) -> None:
        """Be a pass over the batch's rows `rows` (int64), once it has ended."""
        visible = self.visible(seen)
        self._visible = (visible if visible is None else visible[rows.to(visible.device)],)


def left_of(
    stored: tuple[Tensor, Tensor, Tensor | None], selection: Selection, tail: int, merged: Merged | None
) -> Left:
    """Return what an eviction leaves of the slots that its pass has stored.

    Args:
        stored: keys, values and positions.
        selection: the slots that are kept, the last `tail` not counted.
        tail: how many of the newest stay besides.
        merged: what the selected slots hold from now on; None for what they hold.
    """
    keys, values, _ = stored
    kept = selection.to_mask(keys.shape[2] - tail)
    every = torch.cat([kept, kept.new_ones(*kept.shape[:2], tail)], dim=-1)
    if merged is None:
        return Left(every)
    at = kept.nonzero(as_tuple=True)
    return Left(every, keys.index_put(at, merged.keys), values.index_put(at, merged.values))


def record(layer: EvictingLayer) -> LayerRecord:
    """Return what a layer holds, read from its store."""
    if layer.store is None:
        return LayerRecord(layer.index)
    stored, index = layer.store.nbytes
    heads = sum(len(row) for row in layer.kept)
    full = heads * layer.seen * layer.slot_bytes
    return LayerRecord(layer.index, layer.seen, layer.kept, stored, index, full, derived=bool(layer.shared))
