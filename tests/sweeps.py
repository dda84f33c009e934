"""A tiny model in a folder, for workers to load, and calls that kill the worker that makes them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import bench, letters

from kvpolicy import load
from kvpolicy.eval.cells import Cell
from kvpolicy.eval.grid import Grid
from kvpolicy.eval.sweep import Executor, Future
from kvpolicy.eval.tasks.files import load_tasks
from kvpolicy.eval.worker import BenchSpec
from kvpolicy.texts import unrepeated

GRID = Grid(
    policies=[load("full"), *(load(name, budget=80) for name in ("random", "snapkv", "ecokv"))],
    tasks=load_tasks("odd-one-out", {"samples": 2, "length": 200}),
    modes=["query-agnostic"],
)


def saved(folder: Path) -> BenchSpec:
    """Return what the tiny model of `benches` is loaded from, in a folder."""
    bench().model.save_pretrained(folder)
    letters().save_pretrained(folder)
    return BenchSpec(str(folder), tuple(unrepeated()))


@contextmanager
def as_workers() -> Iterator[None]:
    """Let this process and all workers compute alike, with one thread, and let workers import the tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.setenv("RAY_AUTH_MODE", "disabled")  # or it writes a token into the home
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Deadly:
    """An executor that loses workers.

    Args:
        executor: does the work.
        folder: where each try leaves a file.
        deaths: policy -> how many of the first tries of its cells are the end of their worker.
    """

    executor: Executor
    folder: Path
    deaths: dict[str, int]

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future:
        return self.executor.submit(perish, str(self.folder), self.deaths, function, *args)

    def tries(self, cell: Cell) -> int:
        """Return how often the cell was begun."""
        return len(list(self.folder.glob(f"{cell.name}-*")))


def perish(folder: str, deaths: dict[str, int], function: Callable[..., Any], *args: Any) -> Any:
    """Make a call, unless it is to be the end of this process: then let nothing be heard of it."""
    if isinstance(cell := args[-1], Cell):
        before = len(list(Path(folder).glob(f"{cell.name}-*")))
        (Path(folder) / f"{cell.name}-{before}").touch()
        if before < deaths.get(cell.policy["name"], 0):
            os.kill(os.getpid(), signal.SIGKILL)
    return function(*args)
