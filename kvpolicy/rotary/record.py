"""`RotaryRecord`: at which positions, and with which frequencies, every column of a cache was rotated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.rotary.calls import Call, Source, frozen, listen, state, tables


@dataclass(frozen=True)
class Epoch:
    """Columns that were rotated with the same frequencies.

    Args:
        start: the first of them.
        module: a copy of the rotary embedding as it was.
        live: its tensors then, each with how often it had been written to.
        reach: the largest position of their first pass, a scalar: some embeddings choose their frequencies by it.
        x: an empty tensor of the dtype and device that the cosines and sines had.
    """

    start: int
    module: nn.Module
    live: Mapping[str, tuple[Tensor, int | None]]
    reach: Tensor
    x: Tensor

    @classmethod
    def of(cls, call: Call, start: int) -> Epoch:
        """Return the epoch that begins with `call` at column `start`."""
        tensors = {name: value for name, value in state(call.module).items() if isinstance(value, Tensor)}
        live = {name: (tensor, _writes(tensor)) for name, tensor in tensors.items()}
        return cls(start, frozen(call.module), live, call.positions.max(), call.x.new_empty(1, 1, 1))

    def covers(self, call: Call) -> bool:
        """Return whether `call` used the same frequencies."""
        then, now = state(self.module), state(call.module)
        same = (call.x.dtype, call.x.device, now.keys()) == (self.x.dtype, self.x.device, then.keys())
        return same and all(self._same(name, then[name], now[name]) for name in then)

    def _same(self, name: str, then: Any, now: Any) -> bool:
        if not isinstance(then, Tensor) or not isinstance(now, Tensor):
            return bool(type(then) is type(now) and then == now)
        live, writes = self.live[name]
        if live is now and writes is not None and writes == _writes(now):
            return True
        # Comparing waits for an accelerator: only where an embedding replaces or rewrites its frequencies.
        return then.device == now.device and torch.equal(then, now)

    def tables(self, source: Source, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two tables of `positions`, ``[N]`` or ``[A, N]``: each ``[N, width]``."""
        positions = positions.to(self.x.device)
        # Without the largest position an embedding would take the sequence for shorter, and other frequencies.
        reach = self.reach.to(positions).expand(*positions.shape[:-1], 1)
        given = torch.cat([positions, reach], dim=-1).unsqueeze(-2)
        first, second = tables(self.module, self.x, given if given.is_floating_point() else given.long(), source)
        return first[:-1], second[:-1]


@dataclass(frozen=True)
class Track:
    """The columns of one source.

    Args:
        positions: int32 (or as the model has them, where they are not whole) ``[A, B or 1, seen]``.
        flat: whether the embedding takes them without the axis A.
        epochs: oldest first.
    """

    positions: Tensor
    flat: bool
    epochs: tuple[Epoch, ...]

    @classmethod
    def of(cls, call: Call) -> Track:
        """Return the track that begins with `call`."""
        return cls(_stored(call.positions), call.positions.ndim == 2, (Epoch.of(call, 0),))

    def extended(self, call: Call) -> Track:
        """Return the track with the columns of `call` behind its own."""
        new = _stored(call.positions)
        epochs = self.epochs
        if not epochs[-1].covers(call):
            epochs = (*epochs, Epoch.of(call, self.positions.shape[-1]))
        axes, rows = (max(sizes) for sizes in zip(self.positions.shape[:2], new.shape[:2], strict=True))
        both = [part.expand(axes, rows, -1) for part in (self.positions, new)]
        return Track(torch.cat(both, dim=-1), self.flat and call.positions.ndim == 2, epochs)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Track:
        """Return the track with `change` made to its positions."""
        positions = change(self.positions)
        epochs = [epoch for epoch in self.epochs if epoch.start < positions.shape[-1]]
        return replace(self, positions=positions, epochs=(*epochs,) or self.epochs[:1])

    def tables(self, source: Source, columns: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the tables of `columns`, two ``[B, Hkv, T, width]``; of all of them, ``[B or 1, 1, seen, width]``."""
        axes, rows, seen = self.positions.shape
        if columns is None:
            shape: tuple[int, ...] = (rows, 1, seen)
            flat = torch.arange(seen, device=self.positions.device).expand(rows, -1)
            positions = self.positions
        else:
            shape = tuple(columns.shape)
            flat = columns.to(self.positions.device).clamp(min=0).long().flatten(1)
            positions = self.positions.expand(-1, len(flat), -1).gather(-1, flat.expand(axes, -1, -1))
        positions = positions.flatten(1)
        first, second = self._tables(source, positions[0] if self.flat else positions, flat.flatten())
        return first.unflatten(0, shape), second.unflatten(0, shape)

    def _tables(self, source: Source, positions: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.epochs) == 1:
            return self.epochs[0].tables(source, positions)
        starts = torch.tensor([epoch.start for epoch in self.epochs], device=columns.device)
        owners = torch.searchsorted(starts, columns, right=True) - 1
        order = owners.argsort()
        pieces = positions[..., order].split(owners.bincount(minlength=len(starts)).tolist(), dim=-1)
        used = [(epoch, piece) for epoch, piece in zip(self.epochs, pieces, strict=True) if piece.numel()]
        parts = [epoch.tables(source, piece) for epoch, piece in used]
        first, second = (torch.cat(each) for each in zip(*parts, strict=True))
        back = order.argsort().to(first.device)
        return first[back], second[back]


@dataclass(frozen=True)
class RotaryRecord:
    """Positions and frequencies of all the columns that a cache has seen, by source. A value: it never changes.

    Cosines and sines are not kept but made again: a column takes 4 bytes an axis and row.
    """

    tracks: Mapping[Source, Track] = field(default_factory=dict)

    @property
    def seen(self) -> int:
        """How many columns it holds."""
        return min((track.positions.shape[-1] for track in self.tracks.values()), default=0)

    def extended(self, call: Call) -> RotaryRecord:
        """Return the record with the columns of a call behind those of its source."""
        # What is stored outlives `torch.inference_mode`.
        with torch.inference_mode(False), torch.no_grad():
            track = self.tracks.get(call.source)
            return RotaryRecord({**self.tracks, call.source: track.extended(call) if track else Track.of(call)})

    def take_rows(self, rows: Tensor) -> RotaryRecord:
        """Return the record of the batch rows `rows`, int64, which may repeat."""

        def taken(positions: Tensor) -> Tensor:
            return positions if positions.shape[1] == 1 else positions[:, rows.to(positions.device)]

        return self._changed(taken)

    def crop(self, count: int) -> RotaryRecord:
        """Return the record of the first `count` columns."""
        return self._changed(lambda positions: positions[..., :count])

    def _changed(self, change: Callable[[Tensor], Tensor]) -> RotaryRecord:
        return RotaryRecord({source: track.changed(change) for source, track in self.tracks.items()})


class _Pass(threading.local):
    """What a thread's forward pass has been heard to rotate; nothing while none runs."""

    def __init__(self) -> None:
        self.record = RotaryRecord()
        self.heard: dict[Source, Tensor] | None = None


class RotaryRecorder:
    """Listens to a decoder's rotary embeddings and makes the record of the cache whose pass is running.

    Args:
        decoder: the model that calls them.
        sources: which of them.
    """

    def __init__(self, decoder: nn.Module, sources: Iterable[Source]) -> None:
        self._pass = _Pass()
        self._decoder = decoder
        self._sources = frozenset(sources)
        self._hooks: list[RemovableHandle] = []

    @property
    def record(self) -> RotaryRecord:
        """The record of the cache whose pass is running in this thread, the pass's own columns included."""
        return self._pass.record

    def attach(self) -> None:
        """Start to listen."""
        for name in sorted({source.module for source in self._sources}):
            self._hooks.append(listen(name, self._decoder.get_submodule(name), self._take))

    def detach(self) -> None:
        """Stop to listen; the decoder is as it was."""
        while self._hooks:
            self._hooks.pop().remove()

    def begin(self, record: RotaryRecord) -> None:
        """Start a forward pass on the cache that `record` belongs to; `self.record` grows with it."""
        self._pass.record, self._pass.heard = record, {}

    def end(self) -> RotaryRecord:
        """End the pass, and return its cache's record."""
        record, self._pass.record, self._pass.heard = self._pass.record, RotaryRecord(), None
        return record

    def _take(self, call: Call) -> None:
        now = self._pass
        if now.heard is None or call.source not in self._sources:
            return
        before = now.heard.get(call.source)
        if before is None:
            now.heard[call.source] = call.positions
            now.record = now.record.extended(call)
        elif not same_positions(before, call.positions):
            raise UnsupportedModelError(
                f"{type(self._decoder).__name__}: its rotary embedding {call.source} is called with different "
                "positions in one forward pass: which of them a key has is not known"
            )


def same_positions(one: Tensor, other: Tensor) -> bool:
    """Return whether two calls of a pass were given the same positions."""
    return one is other or (one.device == other.device and torch.equal(one, other))


def _stored(positions: Tensor) -> Tensor:
    kept = positions if positions.is_floating_point() else positions.to(torch.int32)
    kept = kept.clone() if kept is positions else kept
    return kept[None] if kept.ndim == 2 else kept


def _writes(tensor: Tensor) -> int | None:
    # Tensors made under `torch.inference_mode` do not count.
    return None if tensor.is_inference() else tensor._version
