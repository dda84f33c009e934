"""What a folder of results was asked for: a file for each grid, which says its cells before any is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from kvpolicy.eval.cells import FORMAT, Cell, ResultError, as_line, digest, of_other_examples, write_whole
from kvpolicy.eval.lines import damaged, read_lines

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
        ResultError: when it cannot be written, or the folder is for other examples of the same tasks.
    """
    path = asked_path(cells, folder)
    before = [cell for other in _files(folder) if other != path for cell in _asked(other)]
    if unlike := of_other_examples([*before, *cells]):
        raise ResultError(
            f"{folder}: it is for other examples of {unlike[1].task['task']} than these: another text, tokenizer or "
            "release of Python made them, or their file was another. Name another folder with --out"
        )
    lines = [{"cell": dataclasses.asdict(cell)} for cell in cells]
    # One that is damaged is written again: its name says what it has to hold, in whatever order.
    if sorted(_read(path)) != sorted(map(as_line, lines)):
        write_whole(path, [{"kvpolicy-eval": FORMAT, "asked": len(lines)}, *lines])


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*.jsonl"))


def _read(path: Path) -> list[str]:
    """Return the lines of a file below its header, none where it cannot be read."""
    try:
        # Not splitlines: a policy's text may hold other kinds of line break.
        return [line + "\n" for line in path.read_text(encoding="utf-8").split("\n")[1:-1]]
    except (OSError, UnicodeDecodeError):
        return []


def read_asked(folder: Path) -> list[Cell]:
    """Return the cells that a folder was asked for; none where nothing says so.

    Raises:
        ResultError: when a file that should say so does not; says in which line.
    """
    found = [cell for path in _files(folder) for cell in _asked(path)]
    return list({cell.name: cell for cell in found}.values())


def _asked(path: Path) -> list[Cell]:
    try:
        cells = [Cell(**line["cell"]) for line in read_lines(path)[1:]]
    except (KeyError, TypeError) as error:
        raise damaged(path, error) from None
    if asked_path(cells, path.parent) != path:
        raise damaged(path, "not what was written")
    return cells
