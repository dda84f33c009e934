"""`Report`: what a session did, as a table and as a mapping; every count and byte is that of the tensors held."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvpolicy.session.parallel import HeadGroup

STAGES = ("capture", "score", "select", "store")


class Stopwatch:
    """Seconds spent in each stage; on CUDA the device's own time, read when asked for."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(STAGES, 0.0)
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def time(self, stage: str, device: torch.device) -> Iterator[None]:
        """Add the time of the block to `stage`."""
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._pending.append((stage, begin, end))
            if len(self._pending) > 4096:
                self.seconds()
            return
        started = time.perf_counter()
        yield
        self._spent[stage] += time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage so far."""
        for stage, begin, end in self._pending:
            end.synchronize()
            self._spent[stage] += begin.elapsed_time(end) / 1000
        self._pending.clear()
        return dict(self._spent)


@dataclass(frozen=True)
class LayerRecord:
    """What one evictable layer holds.

    Args:
        layer: the model's layer index.
        seen: tokens seen, padding included.
        kept: slots stored, by batch row and KV head.
        bytes: held by the storages of keys and values.
        index_bytes: held by the positions of the slots.
        bytes_full: what keys and values of all tokens seen would hold.
        query_bytes: held by the queries recorded for the next eviction.
        derived: whether the model derives its heads from what is stored (MLA).
    """

    layer: int
    seen: int = 0
    kept: list[list[int]] = field(default_factory=list)
    bytes: int = 0
    index_bytes: int = 0
    bytes_full: int = 0
    query_bytes: int = 0
    derived: bool = False

    def joined(self, others: Sequence[LayerRecord], *, heads: bool) -> LayerRecord:
        """Return the record of all ranks: the bytes of all, and the slots of all `heads`, or those of one rank."""
        rows = zip(*(one.kept for one in others), strict=True)
        return replace(
            self,
            kept=[[count for part in row for count in part] for row in rows] if heads else self.kept,
            bytes=sum(one.bytes for one in others),
            index_bytes=sum(one.index_bytes for one in others),
            query_bytes=sum(one.query_bytes for one in others),
            bytes_full=sum(one.bytes_full for one in others),
        )


@dataclass
class Report:
    """What one cache went through under a policy: the latest one a session saw.

    Args:
        policy: the policy's name.
        layers: one record an evictable layer, by the model's layer index.
        left_alone: indices of the layers that are not evicted (sliding window, linear, ...).
        stopwatch: what measured the stages.
        peers: the ranks of a tensor-parallel model, of which the report is about this one's part.
        query_aware: whether what is kept was chosen with the question in view; None where nobody said.
    """

    policy: str
    layers: dict[int, LayerRecord] = field(default_factory=dict)
    left_alone: list[int] = field(default_factory=list)
    query_aware: bool | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch, repr=False)
    peers: HeadGroup | None = field(default=None, repr=False)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values stored, read from storage."""
        return sum(layer.bytes for layer in self.layers.values())

    @property
    def bytes_full(self) -> int:
        """Bytes of keys and values that a full cache would hold in the same layers."""
        return sum(layer.bytes_full for layer in self.layers.values())

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries recorded for the next eviction, beside keys and values, read from storage."""
        return sum(layer.query_bytes for layer in self.layers.values())

    def over_ranks(self) -> Report:
        """Return the report of all ranks of a tensor-parallel model: their bytes added up, their heads side by side.

        Every rank has to call it, as it waits for the others; seconds are this rank's. Without tensor parallelism it
        is the report itself, so that a script may call it either way.
        """
        peers = self.peers
        if peers is None:
            return self
        every = peers.collect(self.layers)
        layers = {}
        for index, own in self.layers.items():
            held = len(own.kept[0]) if own.kept else 0
            apart = not own.derived and peers.shares(index, held)
            layers[index] = own.joined([records[index] for records in every], heads=apart)
        return replace(self, layers=layers, peers=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        return {
            "policy": self.policy,
            "layers": [
                {"layer": one.layer, "seen": one.seen, "kept": one.kept, "bytes": one.bytes}
                for one in self.layers.values()
            ],
            "left_alone": self.left_alone,
            "query_aware": self.query_aware,
            "bytes": self.bytes,
            "bytes_full": self.bytes_full,
            "index_bytes": sum(layer.index_bytes for layer in self.layers.values()),
            "query_bytes": self.query_bytes,
            "seconds": self.stopwatch.seconds(),
        }

    def __str__(self) -> str:
        from kvpolicy.table import report_table

        return report_table(self)
