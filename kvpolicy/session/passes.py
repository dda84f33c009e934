"""`Pass`: one forward pass of one cache, from its first layer to its last; and what a layer holds after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvpolicy.capture import visible_columns
from kvpolicy.report import LayerRecord
from kvpolicy.session.waiting import Waiting
from kvpolicy.session.when import Prompt
from kvpolicy.step import Left
from kvpolicy.store.layer import EvictingLayer


@dataclass
class Pass:
    """One forward pass.

    Args:
        mask: the model's attention mask.
        prompt: what is known of the prompt it belongs to.
        modality: int8 ``[B, q]``, what each of its tokens is, where the policy needs it.
        given: what the decoder is called with, by name, where the policy needs it.
        new: its tokens; None before its first layer.
        decoding: whether it comes after the prompt.
        point: tokens seen when it evicts, None where it does not.
        ends: whether it reads the end of a prompt that is evicted from once all layers have read it.
        budgets: int64 ``[B, layers]``, once known.
        left: by layer, what is left of the slots, where the pass goes on after it evicts.
        pending: layers that have cached its tokens and not yet attended to them.
        reached: layers that have attended.
        waiting: layers that may have to evict again, once later ones have been read.
    """

    mask: Any
    prompt: Prompt
    modality: Tensor | None = None
    given: dict[str, Any] | None = None
    new: int | None = None
    decoding: bool = False
    point: int | None = None
    ends: bool = False
    budgets: Tensor | None = None
    left: dict[int, Left] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    waiting: list[Waiting] = field(default_factory=list)
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


def record(layer: EvictingLayer) -> LayerRecord:
    """Return what a layer holds, read from its store."""
    if layer.store is None:
        return LayerRecord(layer.index)
    stored, index = layer.store.nbytes
    heads = sum(len(row) for row in layer.kept)
    full = heads * layer.seen * layer.slot_bytes
    queries = 0 if layer.window is None else layer.window.nbytes
    return LayerRecord(layer.index, layer.seen, layer.kept, stored, index, full, queries, derived=bool(layer.shared))
