"""Reads folders of results: what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.eval.asked import PREFIX
from kvpolicy.eval.cells import Cell, ResultError
from kvpolicy.eval.lines import damaged, read_lines
from kvpolicy.eval.tasks.own import OwnExamples


@dataclass(frozen=True)
class Result:
    """A result file.

    Args:
        header: what it takes to repeat it.
        cell: what was measured.
        examples: what came of each.
    """

    header: dict[str, Any]
    cell: Cell
    examples: list[dict[str, Any]]


def read_results(folder: Path) -> list[Result]:
    """Return the results in a folder, by file name; none where it says only what was asked for.

    Raises:
        ResultError: when there is neither, or a file is none that `kvpolicy eval` wrote; says in which line.
    """
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise ResultError(f"expected a folder with results of `kvpolicy eval`, found none in {str(folder)!r}")
    return [read_result(path) for path in paths if not path.name.startswith(PREFIX)]


def read_result(path: Path) -> Result:
    """Return the result in a file.

    Raises:
        ResultError: when it is none; says in which line.
    """
    lines = read_lines(path)
    header = lines[0]
    try:
        cell = Cell(**header["cell"])
        for line in lines[1:]:
            line["scores"], line["bytes"], line["bytes_full"], line["example"]
    except (KeyError, TypeError) as error:
        raise damaged(path, error) from None
    if cell.name != path.stem or len(lines) < 2:
        raise damaged(path, "not what was written")
    asked = None if cell.task["task"] == OwnExamples.name else cell.task.get("samples")
    if asked is not None and len(lines) - 1 < asked:
        raise damaged(path, f"expected {asked} examples, got {len(lines) - 1}")
    return Result(header, cell, lines[1:])
