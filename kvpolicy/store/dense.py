"""Dense store: every head of a layer keeps the same number of slots."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.store.state import State


class DenseStore:
    """Keys, values and positions of one layer, ``[B, Hkv, n, D]``, appended in place.

    The buffers grow by a fiftieth of what they hold, so that they stay within 2% of the slots stored and appending a
    token copies at most 50 slots a head, amortised, however long the context.

    Args:
        keys: ``[B, Hkv, n, Dk]``.
        values: ``[B, Hkv, n, Dv]``.
        positions: int32 ``[B, Hkv, n]``, or None where slot t is position t in every head.
    """

    ragged = False

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor | None) -> None:
        self._keys, self._values, self._positions = keys, values, positions
        self._count = keys.shape[2]

    @property
    def keys(self) -> Tensor:
        """``[B, Hkv, n, Dk]``, a view of the buffer."""
        return self._keys[:, :, : self._count]

    @property
    def values(self) -> Tensor:
        """``[B, Hkv, n, Dv]``, a view of the buffer."""
        return self._values[:, :, : self._count]

    @property
    def positions(self) -> Tensor | None:
        """int32 ``[B, Hkv, n]``, or None where slot t is position t in every head."""
        return None if self._positions is None else self._positions[:, :, : self._count]

    def padded(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and positions; nothing is padded in a dense store."""
        return self.keys, self.values, self.positions

    def heads(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and the values of each (row, head), ``[n, D]``, without copying."""
        return list(self.keys.flatten(0, 1)), list(self.values.flatten(0, 1))

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes held by the storages of keys and values, and by the positions."""
        index = 0 if self._positions is None else self._positions.untyped_storage().nbytes()
        return self._keys.untyped_storage().nbytes() + self._values.untyped_storage().nbytes(), index

    def state(self) -> State:
        """Return the slots, without the buffers' slack."""
        index = {} if self.positions is None else {"positions": self.positions}
        return State({"keys": self.keys, "values": self.values, **index}, {"kind": "dense"})

    @classmethod
    def from_state(cls, state: State) -> DenseStore:
        """Return the store that `state` was taken from, on its tensors."""
        return cls(state.tensors["keys"], state.tensors["values"], state.tensors.get("positions"))

    def append(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Add the slots of new tokens, ``[B, Hkv, q, D]``, whose first position is `start`."""
        end = self._count + keys.shape[2]
        if end > self._keys.shape[2]:
            self._grow(end + end // 50)
        self._keys[:, :, self._count : end] = keys
        self._values[:, :, self._count : end] = values
        if self._positions is not None:
            new = torch.arange(start, start + keys.shape[2], dtype=torch.int32, device=keys.device)
            self._positions[:, :, self._count : end] = new
        self._count = end

    def own(self) -> None:
        """Copy keys and values into storage of their own, if they are not alone in theirs."""
        self._keys, self._values = _alone(self._keys), _alone(self._values)

    def _grow(self, capacity: int) -> None:
        held = [self._keys, self._values] + ([] if self._positions is None else [self._positions])
        grown = [t.new_empty(t.shape[0], t.shape[1], capacity, *t.shape[3:]) for t in held]
        for old, new in zip(held, grown, strict=True):
            new[:, :, : self._count] = old[:, :, : self._count]
        self._keys, self._values, *rest = grown
        self._positions = rest[0] if rest else None

    def drop_last(self, count: int) -> None:
        """Remove the last `count` slots of every head."""
        self._count -= count

    def take_rows(self, rows: Tensor) -> None:
        """Replace the batch by its `rows` (int64), which may repeat."""
        rows = rows.to(self._keys.device)
        self._keys, self._values = self._keys[rows], self._values[rows]
        if self._positions is not None:
            self._positions = self._positions[rows]


def _alone(tensor: Tensor) -> Tensor:
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
