"""Offloaded store: the kept slots in the CPU's memory, on the model's device only while a layer attends."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.store.dense import DenseStore
from kvpolicy.store.ragged import RaggedStore
from kvpolicy.store.state import State


class OffloadedStore:
    """What a dense or ragged store holds, moved to the CPU; new tokens follow it there.

    Args:
        kept: the kept slots; copied, not held.
    """

    def __init__(self, kept: DenseStore | RaggedStore) -> None:
        self.ragged = kept.ragged
        self._device = kept.keys.device
        state = kept.state()
        there = {name: tensor.to("cpu", copy=True) for name, tensor in state.tensors.items()}
        self._slots = type(kept).from_state(State(there, state.plain))

    def state(self) -> State:
        """Return the slots, without the buffers' slack."""
        return State({}, {"kind": "offloaded"}) | self._slots.state().inside("slots")

    @classmethod
    def from_state(cls, state: State) -> OffloadedStore:
        """Return the store that `state` was taken from, for the device of its tensors."""
        slots = state.part("slots")
        return cls((RaggedStore if slots.plain["kind"] == "ragged" else DenseStore).from_state(slots))

    @property
    def keys(self) -> Tensor:
        """On the model's device. Dense: ``[B, Hkv, n, Dk]``. Ragged: packed ``[N, Dk]``, slack included."""
        return self._slots.keys.to(self._device)

    @property
    def values(self) -> Tensor:
        """On the model's device. Dense: ``[B, Hkv, n, Dv]``. Ragged: packed ``[N, Dv]``, slack included."""
        return self._slots.values.to(self._device)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes held, in the CPU's memory, by the storages of keys and values, and by the positions."""
        return self._slots.nbytes

    def padded(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys ``[B, Hkv, T, Dk]``, values and positions, on the model's device, heads aligned at their last."""
        keys, values, positions = self._slots.padded()
        places = None if positions is None else positions.to(self._device)
        return keys.to(self._device), values.to(self._device), places

    def heads(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and the values of each (row, head), ``[n, D]``, on the model's device."""
        keys, values = self._slots.heads()
        return [part.to(self._device) for part in keys], [part.to(self._device) for part in values]

    def append(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Add the slots of new tokens, ``[B, Hkv, q, D]``, whose first position is `start`."""
        self._slots.append(keys.to("cpu"), values.to("cpu"), start)

    def drop_last(self, count: int) -> None:
        """Remove the last `count` slots of every head."""
        self._slots.drop_last(count)

    def take_rows(self, rows: Tensor) -> None:
        """Replace the batch by its `rows` (int64), which may repeat."""
        self._slots.take_rows(rows.to("cpu"))
