"""What a folder of results was asked for: a file for each grid, which says its cells before any is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from kvpolicy.eval.cells import FORMAT, Cell, digest, write_whole

PREFIX = "asked-"
"""What the names of these files begin with."""


def asked_path(cells: Sequence[Cell], folder: Path) -> Path:
    """Return where the file of a grid with these cells is: one place for them in whatever order."""
    return folder / f"{PREFIX}{digest(sorted(cell.name for cell in cells))}.jsonl"


def write_asked(cells: Sequence[Cell], folder: Path) -> None:
    """Write down what a folder is asked for, unless it is there: a header, then a cell a line.

    A name of its own for each grid lets any number of commands write into one folder, and folders be copied together.

    Args:
        cells: of the whole grid, those of all shards among them, as `Grid.cells` makes them.
        folder: where results will be.

    Raises:
        ResultError: when it cannot be written.
    """
    path = asked_path(cells, folder)
    if not path.exists():
        lines = [{"cell": dataclasses.asdict(cell)} for cell in cells]
        write_whole(path, [{"kvpolicy-eval": FORMAT, "asked": len(lines)}, *lines])
