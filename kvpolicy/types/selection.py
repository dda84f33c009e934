"""`Selection`, the slots that one layer keeps, and `Plan`, those of all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import torch
from torch import Tensor


@dataclass(frozen=True)
class Selection:
    """Which slots of one layer are kept, packed head after head.

    Args:
        slots: int64 ``[N]``: the kept slots of (row 0, head 0), then of (row 0, head 1), ...; ascending in each.
        lengths: int64 ``[B, Hkv]``: how many of them belong to each row and head; they add up to N.
        layer: the model's own layer index.

    >>> kept = Selection(slots=torch.tensor([0, 3, 1]), lengths=torch.tensor([[2, 1]]))
    >>> kept[0][0].tolist(), kept[0][1].tolist(), kept.tolist()
    ([0, 3], [1], [[[0, 3], [1]]])
    """

    slots: Tensor
    lengths: Tensor
    layer: int = 0

    @classmethod
    def from_mask(cls, keep: Tensor, layer: int = 0) -> Selection:
        """Return the selection of the True slots of `keep`, bool ``[B, Hkv, T]``."""
        return cls(slots=keep.nonzero()[:, 2], lengths=keep.sum(-1), layer=layer)

    def to_mask(self, slots: int) -> Tensor:
        """Return bool ``[B, Hkv, slots]``, True where a slot is kept."""
        batch, heads = self.lengths.shape
        mask = torch.zeros(batch * heads, slots, dtype=torch.bool, device=self.slots.device)
        mask[self.owners, self.slots] = True
        return mask.view(batch, heads, slots)

    @cached_property
    def owners(self) -> Tensor:
        """int64 ``[N]``: ``row * Hkv + head`` of each entry of `slots`."""
        lengths = self.lengths.flatten()
        return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, head and slot of each entry of `slots`."""
        heads = self.lengths.shape[1]
        return self.owners // heads, self.owners % heads, self.slots

    def take(self, slots: Tensor) -> Tensor:
        """Return what the kept ones hold of `slots`, ``[B, Hkv, T, ...]``, packed: ``[N, ...]``."""
        return slots[self._places]

    def of_heads(self, heads: int) -> Selection:
        """Return the selection of the first `heads` heads of each row alone."""
        mine = self._places[1] < heads
        return Selection(slots=self.slots[mine], lengths=self.lengths[:, :heads], layer=self.layer)

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        pieces = self.slots.split(self.lengths.flatten().tolist())
        heads = self.lengths.shape[1]
        row = range(self.lengths.shape[0])[row]
        return pieces[row * heads : (row + 1) * heads]

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def tolist(self) -> list[list[list[int]]]:
        """Return the kept slots as nested lists: row, head, slot."""
        return [[head.tolist() for head in self[row]] for row in range(len(self))]


@dataclass(frozen=True)
class Plan(Sequence[Selection]):
    """What a policy keeps: one `Selection` a layer; ``plan[layer][row][head]`` is a tensor of slots."""

    layers: tuple[Selection, ...]

    @overload
    def __getitem__(self, index: int) -> Selection: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Selection, ...]: ...
    def __getitem__(self, index: int | slice) -> Selection | tuple[Selection, ...]:
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Selection]:
        return iter(self.layers)

    def tolist(self) -> list[list[list[list[int]]]]:
        """Return the kept slots as nested lists: layer, row, head, slot."""
        return [layer.tolist() for layer in self.layers]
