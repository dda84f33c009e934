"""Measures the cells of ``kvpolicy eval``, here or on an executor, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpolicy.cli.output import progress_bar

if TYPE_CHECKING:
    from kvpolicy.eval.cells import Cell
    from kvpolicy.eval.executors import Engine
    from kvpolicy.eval.grid import Grid
    from kvpolicy.eval.worker import BenchSpec

Pick = Callable[[Sequence["Cell"]], Sequence["Cell"]]
"""Chooses the cells of this command's shard."""


def measure_here(grid: Grid, spec: BenchSpec, pick: Pick, out: Path) -> tuple[Sequence[Cell], int]:
    """Return the cells, all with a result now, and how many were measured."""
    from kvpolicy.eval.asked import write_asked
    from kvpolicy.eval.cells import result_path
    from kvpolicy.eval.sweep import sweep_here
    from kvpolicy.eval.tasks.files import from_plain
    from kvpolicy.eval.worker import together

    bench = spec.bench()
    asked = grid.cells(bench)
    write_asked(asked, out)
    cells = pick(asked)
    missing = [cell for cell in cells if not result_path(cell, out).exists()]
    counts = (len(bench.examples(from_plain(cell.task), cell.seed)) for cell in missing)
    *starts, total = accumulate(counts, initial=0)
    before = dict(zip((cell.name for cell in missing), starts, strict=True))
    with progress_bar() as progress:
        bar = progress.add_task("", total=total)

        def begun(cell: Cell) -> None:
            progress.update(bar, description=_title(cell), completed=before[cell.name])

        with together():
            return cells, sweep_here(cells, out, bench, begun=begun, advance=lambda: progress.advance(bar))


def measure_elsewhere(
    grid: Grid, spec: BenchSpec, pick: Pick, out: Path, *, engine: Engine, workers: int, options: Mapping[str, Any]
) -> tuple[Sequence[Cell], int]:
    """Return the cells, all with a result now, and how many were measured, by workers of an executor."""
    from kvpolicy.eval.asked import write_asked
    from kvpolicy.eval.cells import result_path
    from kvpolicy.eval.executors import open_executor
    from kvpolicy.eval.sweep import cells_of, sweep

    with open_executor(engine, workers, options, out) as executor, progress_bar() as progress:
        bar = progress.add_task(f"starting {engine}", total=None)
        asked = cells_of(grid, spec, executor)
        write_asked(asked, out)
        cells = pick(asked)
        progress.update(bar, description="measuring", total=sum(not result_path(cell, out).exists() for cell in cells))

        def finished(cell: Cell) -> None:
            progress.update(bar, description=_title(cell), advance=1)

        return cells, sweep(cells, out, spec, executor, workers=workers, finished=finished)


def _title(cell: Cell) -> str:
    return f"{cell.task['task']}: {cell.policy['name']}"
