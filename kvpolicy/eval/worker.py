"""What runs where cells are measured: in this process, in another one or on another machine."""

from __future__ import annotations

import functools
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from kvpolicy import models
from kvpolicy.errors import KVPolicyError
from kvpolicy.eval.bench import Bench
from kvpolicy.eval.cells import Cell, measure
from kvpolicy.eval.grid import Grid

_LOCK = threading.Lock()
"""Held while a model is used: an engine may give one process several calls at once."""


@dataclass(frozen=True)
class BenchSpec:
    """What a bench is made from, as plain data that can be sent anywhere.

    Args:
        model: a Hugging Face id or a folder, as `kvpolicy.models.load` takes it.
        texts: what tasks are made from.
        dtype: of its weights, as torch calls it.
        attention: its own attention function, as transformers calls it.
    """

    model: str
    texts: tuple[str, ...]
    dtype: str = "float32"
    attention: str = "sdpa"

    def bench(self) -> Bench:
        """Return the bench, with its model loaded onto `device`.

        Raises:
            MissingModelError: the model, or a package needed to read it, is not there.
        """
        where = device()
        if where.type == "cuda":
            torch.cuda.set_device(where)
        model, tokenizer = models.load(
            self.model, dtype=getattr(torch, self.dtype), attn_implementation=self.attention, device=where
        )
        return Bench(self.model, model, tokenizer, self.texts)


def device() -> torch.device:
    """Return what this process computes on: the GPU of its `LOCAL_RANK`, or its first, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A launcher may show each process one GPU alone, and count its processes on.
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def launched() -> tuple[int, int]:
    """Return which process this is, from 1, of how many that `accelerate launch` or `torchrun` started, else (1, 1)."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 1, 1
    return int(os.environ["RANK"]) + 1, int(os.environ["WORLD_SIZE"])


@contextmanager
def together() -> Iterator[None]:
    """Let no process of a launcher leave the block before the others are through: it ends them once one has failed.

    An interrupt is waited for by nobody.
    """
    try:
        yield
    except KVPolicyError:
        _meet()
        raise
    _meet()


def _meet() -> None:
    if launched() == (1, 1) or "MASTER_ADDR" not in os.environ:
        return
    torch.distributed.init_process_group("gloo", timeout=timedelta(days=365))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class Failure:
    """What a call ended with instead of a value.

    Args:
        error: in words; not every error survives the way between processes.
    """

    error: str


def guarded(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, or its error as a `Failure`: what else comes of the call is the engine's."""
    try:
        return function(*args)
    except KVPolicyError as error:
        return Failure(str(error))
    except Exception:
        return Failure(traceback.format_exc())


def grid_cells(spec: BenchSpec, grid: Grid) -> list[Cell]:
    """Return the cells of a grid, which takes the model: its tokenizer makes examples, its weights name the cells."""
    with _LOCK:
        return grid.cells(_bench(spec))


def cell_lines(spec: BenchSpec, cell: Cell) -> list[dict[str, Any]]:
    """Return the lines of a cell's result file."""
    with _LOCK:
        return measure(cell, _bench(spec))


@functools.lru_cache(maxsize=1)
def _bench(spec: BenchSpec) -> Bench:
    """Return the bench of this process, which lives as long: a model is loaded once."""
    return spec.bench()
