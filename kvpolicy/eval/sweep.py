"""Measures cells: in this process, or on any executor, a pool of processes or an engine for many machines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvpolicy.errors import KVPolicyError
from kvpolicy.eval.bench import Bench
from kvpolicy.eval.cells import Cell, measure, result_path, write_whole
from kvpolicy.eval.grid import Grid
from kvpolicy.eval.worker import BenchSpec, Failure, cell_lines, grid_cells, guarded

RETRIES = 2
"""How often a call whose worker was lost is made again."""
_PAUSE = 0.05
"""Seconds between two looks at what is running."""


class SweepError(KVPolicyError, RuntimeError):
    """Cells could not be measured; the results of all others are there."""


class Future(Protocol):
    """A call that has been made; those of concurrent.futures, Dask, submitit and loky are such."""

    def done(self) -> bool: ...
    def result(self) -> Any: ...
    def cancel(self) -> Any: ...


class Executor(Protocol):
    """Makes calls elsewhere; those of concurrent.futures, Dask, submitit and loky are such."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future: ...


def sweep_here(
    cells: Sequence[Cell],
    folder: Path,
    bench: Bench,
    *,
    begun: Callable[[Cell], None] = lambda cell: None,
    advance: Callable[[], None] = lambda: None,
) -> int:
    """Return how many cells were measured in this process: those whose result is not in `folder` by their turn.

    One that fails is left, and all others are measured.

    Args:
        cells: what to measure, as `Grid.cells` makes them.
        folder: where results are.
        bench: of the cells' model and text.
        begun: called before each cell.
        advance: called after each example.

    Raises:
        SweepError: after all others, with the cells that could not be measured.
        ResultError: when a result cannot be written.
    """
    missing = _missing(cells, folder)
    failed: dict[str, list[Cell]] = {}
    measured = 0
    for cell in missing:
        # Another command may have measured it meanwhile.
        if (path := result_path(cell, folder)).exists():
            continue
        begun(cell)
        found = guarded(partial(measure, cell, bench, advance=advance))
        if isinstance(found, Failure):
            failed.setdefault(found.error, []).append(cell)
        else:
            write_whole(path, found)
            measured += 1
    _check_none(failed, len(missing), folder)
    return measured


def cells_of(grid: Grid, spec: BenchSpec, executor: Executor, *, retries: int = RETRIES) -> list[Cell]:
    """Return the cells of a grid, made by a worker, so that the caller needs no memory for the model.

    Raises:
        SweepError: when the worker cannot make them, or is lost each time.
    """
    [(_, found)] = _outcomes(executor, [(grid_cells, spec, grid)], workers=1, retries=retries)
    if isinstance(found, Failure):
        raise SweepError(found.error)
    return found


def sweep(
    cells: Sequence[Cell],
    folder: Path,
    spec: BenchSpec,
    executor: Executor,
    *,
    workers: int,
    retries: int = RETRIES,
    finished: Callable[[Cell], None] = lambda cell: None,
) -> int:
    """Return how many cells were measured: those whose result is not in `folder` already.

    Workers return results and need no disk in common; each is written here as soon as it is there. A cell whose worker
    is lost (killed, gone with its machine) is given to another one, the last time with no other cell beside it. One
    that fails by an error of its own is not: it would fail again. Either way all other cells are measured.

    Args:
        cells: what to measure, as `cells_of` makes them.
        folder: where results are.
        spec: of the cells' model and text.
        executor: has ``submit(function, *args)``, which returns a future.
        workers: how many cells are given to it at a time.
        retries: how often a cell whose worker was lost is given to another one.
        finished: called after each cell, measured or failed.

    Raises:
        SweepError: after all others, with the cells that could not be measured; at once when the executor takes no
            more work.
        ResultError: when a result cannot be written.
    """
    missing = _missing(cells, folder)
    calls = [(cell_lines, spec, cell) for cell in missing]
    failed: dict[str, list[Cell]] = {}
    with closing(_outcomes(executor, calls, workers=workers, retries=retries)) as outcomes:
        for index, found in outcomes:
            cell = missing[index]
            if isinstance(found, Failure):
                failed.setdefault(found.error, []).append(cell)
            else:
                write_whole(result_path(cell, folder), found)
            finished(cell)
    _check_none(failed, len(missing), folder)
    return len(missing)


def _missing(cells: Sequence[Cell], folder: Path) -> list[Cell]:
    return list({cell.name: cell for cell in cells if not result_path(cell, folder).exists()}.values())


def _outcomes(
    executor: Executor, calls: Sequence[tuple[Any, ...]], *, workers: int, retries: int
) -> Generator[tuple[int, Any]]:
    """Yield the index of each call with what came of it, its value or a `Failure`, as they come.

    The last time, a call whose worker is lost is made with no other beside it: some engines put calls behind each other
    on one worker, and lose all of them with it.
    """
    waiting = deque(range(len(calls)))
    last: deque[int] = deque()
    running: dict[int, Future] = {}
    lost = [0] * len(calls)
    try:
        while waiting or last or running:
            while waiting and len(running) < workers:
                index = waiting.popleft()
                running[index] = _submit(executor, calls[index])
            if last and not running:
                index = last.popleft()
                running[index] = _submit(executor, calls[index])
            for index in [index for index, future in running.items() if future.done()]:
                try:
                    found = running.pop(index).result()
                except Exception as error:  # the engine's: what the call itself raises comes back as a Failure
                    lost[index] += 1
                    if lost[index] <= retries:
                        (waiting if lost[index] < retries else last).append(index)
                        continue
                    found = Failure(f"its worker was lost {lost[index]} times, {type(error).__name__}: {error}")
                yield index, found
            time.sleep(_PAUSE)
    finally:
        for future in running.values():
            future.cancel()


def _submit(executor: Executor, call: tuple[Any, ...]) -> Future:
    try:
        return executor.submit(guarded, *call)
    except Exception as error:
        raise SweepError(f"the executor takes no more work, {type(error).__name__}: {error}") from error


def _check_none(failed: dict[str, list[Cell]], total: int, folder: Path) -> None:
    """Raise when cells have failed, by error, out of so many."""
    if not failed:
        return
    count = sum(map(len, failed.values()))
    parts = [f"{count} of {total} cells were not measured; the others are in {folder}. The same command tries again."]
    for error, cells in failed.items():
        parts += [f"  {_title(cell)}" for cell in cells]
        parts += [f"    {line}" for line in error.rstrip().splitlines()]
    raise SweepError("\n".join(parts))


def _title(cell: Cell) -> str:
    budget = ", ".join(f"{name} {size}" for name, size in cell.policy["budget"].items() if name in ("tokens", "keep"))
    return f"{cell.policy['name']} ({budget}), {cell.task['task']}, {cell.mode} [{cell.name}]"
