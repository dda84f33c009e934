"""`Report`: what a session did, as a table and as a mapping; every count and byte is that of the tensors held."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

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
    """

    layer: int
    seen: int = 0
    kept: list[list[int]] = field(default_factory=list)
    bytes: int = 0
    index_bytes: int = 0
    bytes_full: int = 0


@dataclass
class Report:
    """What one cache went through under a policy: the latest one a session saw.

    Args:
        policy: the policy's name.
        layers: one record an evictable layer, by the model's layer index.
        left_alone: indices of the layers that are not evicted (sliding window, linear, ...).
    """

    policy: str
    layers: dict[int, LayerRecord] = field(default_factory=dict)
    left_alone: list[int] = field(default_factory=list)
    stopwatch: Stopwatch = field(default_factory=Stopwatch, repr=False)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values stored, read from storage."""
        return sum(layer.bytes for layer in self.layers.values())

    @property
    def bytes_full(self) -> int:
        """Bytes of keys and values that a full cache would hold in the same layers."""
        return sum(layer.bytes_full for layer in self.layers.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        return {
            "policy": self.policy,
            "layers": [
                {"layer": one.layer, "seen": one.seen, "kept": one.kept, "bytes": one.bytes}
                for one in self.layers.values()
            ],
            "left_alone": self.left_alone,
            "bytes": self.bytes,
            "bytes_full": self.bytes_full,
            "index_bytes": sum(layer.index_bytes for layer in self.layers.values()),
            "seconds": self.stopwatch.seconds(),
        }

    def __str__(self) -> str:
        from kvpolicy.table import report_table

        return report_table(self)
