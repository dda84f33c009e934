"""`Processes`: an executor of this machine's own processes, each on a GPU of its own where there are several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any


class Processes:
    """Makes calls in processes that live as long as it does; a new one takes the place of one that is killed.

    Each is a pool of one: a larger pool is broken as a whole when one of its processes is killed.

    Args:
        workers: how many processes.
    """

    def __init__(self, workers: int) -> None:
        self._pools = [_Pool(index, workers) for index in range(workers)]

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Return the future of a call, made by a process that has nothing to do, else by the first one."""
        pool = min(self._pools, key=lambda pool: not pool.idle)
        return pool.submit(function, *args)

    def close(self) -> None:
        """End all processes, also those in the middle of a call."""
        for pool in self._pools:
            pool.close()


class _Pool:
    """A process, begun anew when it is lost."""

    def __init__(self, index: int, workers: int) -> None:
        self._settings = (index, max(1, (os.cpu_count() or 1) // workers))
        self._begin()

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process that has used CUDA cannot use it
        self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=self._settings)
        self._pid = self._pool.submit(os.getpid)
        self._last: Future[Any] = self._pid

    @property
    def idle(self) -> bool:
        return self._last.done() or self._last is self._pid

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        try:
            self._last = self._pool.submit(function, *args)
        except BrokenProcessPool:
            self._begin()
            self._last = self._pool.submit(function, *args)
        return self._last

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if not self._pid.cancelled() and self._pid.exception() is None and not self._last.done():
            with suppress(ProcessLookupError):
                os.kill(self._pid.result(), signal.SIGKILL)


def _begin(index: int, threads: int) -> None:
    """Make a process one of several: its GPU, its share of the cores, and what ends it."""
    os.environ["LOCAL_RANK"] = str(index)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # torch, not imported yet, reads it
    os.environ["TQDM_DISABLE"] = "1"  # the one who gave the work shows how it goes on, and ends it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _lock_bars()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _lock_bars() -> None:
    """Give the bars of transformers a lock of this process alone; theirs would outlive one that is killed."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    tqdm.set_lock(threading.RLock())


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
