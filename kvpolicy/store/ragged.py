"""Ragged store: heads keep different numbers of slots, packed one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.store.state import State


class RaggedStore:
    """Keys, values and positions of one layer, packed ``[N, D]``: slots of (row 0, head 0), then (row 0, head 1), ...

    Each head has the same slack behind its slots, since every head gains every new token. The slack is a twentieth of
    the mean head, so that the buffers stay within 5% of the slots stored and appending copies at most 20 slots a head
    and token, amortised, however long the context.

    Args:
        keys: ``[N, Dk]``, packed without slack.
        values: ``[N, Dv]``, likewise.
        positions: int32 ``[N]``, likewise.
        lengths: slots of each row and head, as numbers.
    """

    ragged = True

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor, lengths: list[list[int]]) -> None:
        self._packed = (keys, values, positions)
        self._kv_heads = len(lengths[0])
        self._place([count for row in lengths for count in row], slack=0)

    def _place(self, counts: list[int], slack: int) -> None:
        ends = torch.tensor(counts, device="cpu").add(slack).cumsum(0)
        self._starts: list[int] = [0, *ends[:-1].tolist()]
        self._counts = counts
        self._slack = slack
        # The same two on the device, for indexing without a transfer a token.
        self._start = torch.tensor(self._starts, device=self.keys.device)
        self._count = torch.tensor(counts, device=self.keys.device)

    @property
    def keys(self) -> Tensor:
        """``[N, Dk]``, packed, slack included."""
        return self._packed[0]

    @property
    def values(self) -> Tensor:
        """``[N, Dv]``, packed, slack included."""
        return self._packed[1]

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes held by the storages of keys and values, and by the positions."""
        keys, values, positions = (part.untyped_storage().nbytes() for part in self._packed)
        return keys + values, positions

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys ``[B, Hkv, T, Dk]``, values and positions, heads aligned at their last slot, -1 where empty."""
        longest = max(self._counts)
        place = torch.arange(longest, device=self.keys.device) - longest + self._count[:, None]
        # An empty head that comes last begins where the slots end.
        index = (self._start[:, None] + place.clamp(min=0)).clamp(max=max(len(self.keys) - 1, 0))
        index = index.view(len(self._counts) // self._kv_heads, self._kv_heads, longest)
        keys, values, positions = (part[index] for part in self._packed)
        return keys, values, positions.where(place.view_as(positions) >= 0, -1)

    def heads(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and the values of each (row, head), ``[n, D]``, without copying."""
        pieces = self._pieces()
        return [self.keys[piece] for piece in pieces], [self.values[piece] for piece in pieces]

    def _pieces(self) -> list[slice]:
        return [slice(start, start + count) for start, count in zip(self._starts, self._counts, strict=True)]

    def state(self) -> State:
        """Return the slots, without slack."""
        packed = [torch.cat([part[piece] for piece in self._pieces()]) for part in self._packed]
        heads = range(0, len(self._counts), self._kv_heads)
        lengths = [self._counts[first : first + self._kv_heads] for first in heads]
        tensors = dict(zip(("keys", "values", "positions"), packed, strict=True))
        return State(tensors, {"kind": "ragged", "lengths": lengths})

    @classmethod
    def from_state(cls, state: State) -> RaggedStore:
        """Return the store that `state` was taken from, on its tensors."""
        tensors = state.tensors
        return cls(tensors["keys"], tensors["values"], tensors["positions"], state.plain["lengths"])

    def append(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Add the slots of new tokens, ``[B, Hkv, q, D]``, whose first position is `start`."""
        new = keys.shape[2]
        if new > self._slack:
            mean = sum(self._counts) // len(self._counts) + new
            self._repack(torch.arange(len(self._counts), device="cpu"), slack=new + mean // 20)
        ahead = torch.arange(new, device=keys.device)
        index = (self._start + self._count)[:, None] + ahead
        positions = (start + ahead).to(torch.int32).expand(len(index), -1)
        for part, fresh in zip(self._packed, (keys.flatten(0, 1), values.flatten(0, 1), positions), strict=True):
            part[index] = fresh
        self._counts = [count + new for count in self._counts]
        self._count += new
        self._slack -= new

    def _repack(self, heads: Tensor, slack: int) -> None:
        """Move the slots of `heads` (int64, on the CPU, may repeat) to new buffers with `slack` behind each."""
        counts = torch.tensor(self._counts, device="cpu")[heads]
        owner = torch.arange(len(heads), device="cpu").repeat_interleave(counts)
        within = torch.arange(len(owner), device="cpu") - (counts.cumsum(0) - counts)[owner]
        old = torch.tensor(self._starts, device="cpu")[heads][owner] + within
        new = (counts + slack).cumsum(0)[owner] - (counts + slack)[owner] + within
        size = int((counts + slack).sum())
        old, new = old.to(self.keys.device), new.to(self.keys.device)
        moved = [part.new_zeros(size, *part.shape[1:]) for part in self._packed]
        for part, fresh in zip(self._packed, moved, strict=True):
            fresh[new] = part[old]
        self._packed = (moved[0], moved[1], moved[2])
        self._place(counts.tolist(), slack)

    def drop_last(self, count: int) -> None:
        """Remove the last `count` slots of every head."""
        self._counts = [held - count for held in self._counts]
        self._count -= count
        self._slack += count

    def take_rows(self, rows: Tensor) -> None:
        """Replace the batch by its `rows` (int64), which may repeat."""
        heads = rows.cpu()[:, None] * self._kv_heads + torch.arange(self._kv_heads, device="cpu")
        self._repack(heads.flatten(), self._slack)
