"""Quantized store: the kept slots in a few bits a number, the newest tokens as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.store.dense import DenseStore
from kvpolicy.store.packing import dequantize, grouped, pack, quantize, unpack
from kvpolicy.store.ragged import RaggedStore
from kvpolicy.store.state import State


class QuantizedStore:
    """What a dense or ragged store holds, quantized, and the tokens appended since.

    Keys are quantized per channel, in groups of `group` slots; values per slot, in groups of `group` channels.
    A head's groups of slots are counted from its last one, so of a head's groups only the first may be short,
    and its slots need no padding.

    Appended tokens stay as they are. Where `residual + group` of them or more wait when others are appended, whole
    groups of the oldest are quantized first; those being appended are not, so a long prompt is attended to as it is.

    Args:
        plain: the kept slots; copied, not held.
        bits: 4 or 8, of a number.
        group: how many numbers share their two ends.
        residual: the newest tokens, since `plain` was made, that are never quantized.
    """

    def __init__(self, plain: DenseStore | RaggedStore, *, bits: int, group: int, residual: int) -> None:
        keys, values, positions = plain.padded()
        self.ragged = plain.ragged
        self._bits, self._group, self._residual = bits, group, residual
        self._sizes = keys.shape[-1], values.shape[-1]
        # One store of a row a slot, the key's codes and the value's row; one of the two ends of each group of keys.
        self._slots: DenseStore | RaggedStore
        self._ends: DenseStore | RaggedStore
        if self.ragged and positions is not None:
            self._slots, self._ends = self._encode_ragged(keys, values, positions)
        else:
            codes, rows, low, high = self._encode(keys, values)
            index = None if positions is None else positions.clone()
            self._slots, self._ends = DenseStore(codes, rows, index), DenseStore(low, high, None)
        # The newest tokens, and the position that follows the last of them.
        self._newest = DenseStore(keys[:, :, :0].clone(), values[:, :, :0].clone(), None)
        self._end = 0

    def state(self) -> State:
        """Return the slots as they are held, without slack."""
        plain = {
            "kind": "quantized",
            "bits": self._bits,
            "group": self._group,
            "residual": self._residual,
            "sizes": list(self._sizes),
            "end": self._end,
        }
        parts = [self._slots.state().inside("slots"), self._ends.state().inside("ends")]
        return State({}, plain) | parts[0] | parts[1] | self._newest.state().inside("newest")

    @classmethod
    def from_state(cls, state: State) -> QuantizedStore:
        """Return the store that `state` was taken from, on its tensors."""
        store = object.__new__(cls)
        kind = RaggedStore if state.plain["slots"]["kind"] == "ragged" else DenseStore
        store.ragged = kind.ragged
        store._bits, store._group, store._residual = (state.plain[name] for name in ("bits", "group", "residual"))
        store._sizes = (state.plain["sizes"][0], state.plain["sizes"][1])
        store._slots, store._ends = kind.from_state(state.part("slots")), kind.from_state(state.part("ends"))
        store._newest, store._end = DenseStore.from_state(state.part("newest")), state.plain["end"]
        return store

    @property
    def keys(self) -> Tensor:
        """Dequantized. Dense: ``[B, Hkv, n, Dk]``. Ragged: packed ``[N, Dk]``."""
        return torch.cat(self.heads()[0]) if self.ragged else self.padded()[0]

    @property
    def values(self) -> Tensor:
        """Dequantized. Dense: ``[B, Hkv, n, Dv]``. Ragged: packed ``[N, Dv]``."""
        return torch.cat(self.heads()[1]) if self.ragged else self.padded()[1]

    @property
    def positions(self) -> Tensor | None:
        """int32 ``[B, Hkv, T]``, -1 where empty, or None where slot t is position t in every head."""
        return self._with_newest(self._slots.padded()[2])

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes held by the storages of keys and values, ends of groups and newest tokens included, and of positions.

        The ends' own index, where they are ragged, counts with the positions.
        """
        held = [store.nbytes for store in (self._slots, self._ends, self._newest)]
        return sum(numbers for numbers, _ in held), sum(index for _, index in held)

    def padded(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys ``[B, Hkv, T, Dk]``, values and positions, heads aligned at their last slot, -1 where empty."""
        codes, rows, positions = self._slots.padded()
        low, high, _ = self._ends.padded()
        keys, values = self._decode(codes, rows, low, high)
        keys, values = torch.cat([keys, self._newest.keys], dim=2), torch.cat([values, self._newest.values], dim=2)
        return keys, values, self._with_newest(positions)

    def heads(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and the values of each (row, head), ``[n, D]``, dequantized."""
        keys, values = [], []
        for codes, rows, low, high, new_key, new_value in zip(
            *self._slots.heads(), *self._ends.heads(), *self._newest.heads(), strict=True
        ):
            key, value = self._decode(codes, rows, low, high)
            keys.append(torch.cat([key, new_key]))
            values.append(torch.cat([value, new_value]))
        return keys, values

    def append(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Add the slots of new tokens, ``[B, Hkv, q, D]``, whose first position is `start`."""
        surplus = self._newest.keys.shape[2] - self._residual
        if surplus >= self._group:
            self._settle(surplus - surplus % self._group)
        self._newest.append(keys, values, start)
        self._end = start + keys.shape[2]

    def drop_last(self, count: int) -> None:
        """Remove the last `count` slots of every head; of a group that is cut, the rest is held dequantized."""
        self._end -= count
        missing = count - self._newest.keys.shape[2]
        if missing <= 0:
            self._newest.drop_last(count)
            return
        groups = -(-missing // self._group)
        slots = groups * self._group
        codes, rows, _ = self._slots.padded()
        low, high, _ = self._ends.padded()
        cut = self._decode(codes[:, :, -slots:], rows[:, :, -slots:], low[:, :, -groups:], high[:, :, -groups:])
        self._slots.drop_last(slots)
        self._ends.drop_last(groups)
        keys, values = (part[:, :, : slots - missing] for part in cut)
        self._newest = DenseStore(keys, values, None)

    def take_rows(self, rows: Tensor) -> None:
        """Replace the batch by its `rows` (int64), which may repeat."""
        for store in (self._slots, self._ends, self._newest):
            store.take_rows(rows)

    def _with_newest(self, positions: Tensor | None) -> Tensor | None:
        """Return the positions of quantized slots followed by those of the newest."""
        if positions is None:
            return None
        count = self._newest.keys.shape[2]
        newest = torch.arange(self._end - count, self._end, dtype=torch.int32, device=positions.device)
        return torch.cat([positions, newest.expand(*positions.shape[:2], -1)], dim=2)

    def _settle(self, count: int) -> None:
        """Quantize the `count` oldest of the newest tokens."""
        keys, values = self._newest.keys, self._newest.values
        codes, rows, low, high = self._encode(keys[:, :, :count], values[:, :, :count])
        self._slots.append(codes, rows, self._end - keys.shape[2])
        self._ends.append(low, high, 0)
        # Views of a full buffer, for a moment: the tokens being appended move them to one of their own.
        self._newest = DenseStore(keys[:, :, count:], values[:, :, count:], None)

    def _encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return packed key codes and value rows, uint8 ``[B, Hkv, n, *]``, and both ends of each group of keys.

        A value's row is both ends of each of its groups of channels, then its packed codes.
        """
        key_codes, low, high = quantize(keys, self._group, -2, self._bits)
        value_codes, *ends = quantize(values, self._group, -1, self._bits)
        rows = torch.cat([*(end.view(torch.uint8) for end in ends), pack(value_codes, self._bits)], dim=-1)
        return pack(key_codes, self._bits), rows, low, high

    def _decode(self, codes: Tensor, rows: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that `_encode` took, ``[..., n, D]``."""
        key_size, value_size = self._sizes
        key_codes = unpack(codes, self._bits, key_size)
        keys = dequantize(key_codes, low, high, self._group, -2, self._bits)
        width = -(-value_size // self._group) * low.itemsize
        first, last, packed = rows.split([width, width, rows.shape[-1] - 2 * width], dim=-1)
        # Cloned, as bytes in the midst of a row need not lie where a wider number may begin.
        least, most = (part.clone(memory_format=torch.contiguous_format).view(low.dtype) for part in (first, last))
        value_codes = unpack(packed, self._bits, value_size)
        return keys, dequantize(value_codes, least, most, self._group, -1, self._bits)

    def _encode_ragged(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[RaggedStore, RaggedStore]:
        """Return the ragged stores of slots and of ends, from heads aligned at their last slot."""
        held = positions >= 0
        # Empty slots repeat the head's first, which widens no group.
        first = held.int().argmax(-1)[:, :, None, None].expand(-1, -1, 1, keys.shape[-1])
        codes, rows, low, high = self._encode(keys.where(held[..., None], keys.gather(2, first)), values)
        groups = grouped(held, self._group, -1).any(-1)
        slots = RaggedStore(codes[held], rows[held], positions[held], held.sum(-1).tolist())
        index = torch.zeros(int(groups.sum()), dtype=torch.int32, device=low.device)
        return slots, RaggedStore(low[groups], high[groups], index, groups.sum(-1).tolist())
