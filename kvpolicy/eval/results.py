"""Reads folders of results: what was measured, and what was asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.eval.asked import PREFIX, asked_path
from kvpolicy.eval.cells import FORMAT, Cell, ResultError
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


def read_asked(folder: Path) -> list[Cell]:
    """Return the cells that a folder was asked for; none where nothing says so.

    Raises:
        ResultError: when a file that should say so does not; says in which line.
    """
    found = [cell for path in sorted(folder.glob(f"{PREFIX}*.jsonl")) for cell in _asked(path)]
    return list({cell.name: cell for cell in found}.values())


def read_result(path: Path) -> Result:
    """Return the result in a file.

    Raises:
        ResultError: when it is none; says in which line.
    """
    lines = _lines(path)
    header = lines[0]
    try:
        cell = Cell(**header["cell"])
        for line in lines[1:]:
            line["scores"], line["bytes"], line["bytes_full"], line["example"]
    except (KeyError, TypeError) as error:
        raise _damaged(path, error) from None
    if cell.name != path.stem or len(lines) < 2:
        raise _damaged(path, "not what was written")
    asked = None if cell.task["task"] == OwnExamples.name else cell.task.get("samples")
    if asked is not None and len(lines) - 1 < asked:
        raise _damaged(path, f"expected {asked} examples, got {len(lines) - 1}")
    return Result(header, cell, lines[1:])


def _asked(path: Path) -> list[Cell]:
    try:
        cells = [Cell(**line["cell"]) for line in _lines(path)[1:]]
    except (KeyError, TypeError) as error:
        raise _damaged(path, error) from None
    if asked_path(cells, path.parent) != path:
        raise _damaged(path, "not what was written")
    return cells


def _damaged(path: Path, why: object) -> ResultError:
    return ResultError(f"{path}: it is damaged: {why}. Remove it and run `kvpolicy eval` again")


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that `kvpolicy eval` wrote, its header first."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path}: cannot be read: {error}") from None
    # What a model says may hold any other kind of line break.
    lines = [_parsed(line, f"{path}:{at}") for at, line in enumerate(text.rstrip("\n").split("\n"), 1)]
    number = lines[0].get("kvpolicy-eval")
    if not isinstance(number, int):
        raise ResultError(f"{path}:1: expected the header of a result of `kvpolicy eval`, got another file")
    if number > FORMAT:
        raise ResultError(f"{path}:1: expected format {FORMAT} or older, got {number}: upgrade kvpolicy")
    return lines


def _parsed(line: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ResultError(f"{place}: expected JSON, {error.msg}: the file is damaged, or not a result") from None
    if not isinstance(found, dict):
        raise ResultError(f"{place}: expected a JSON object, got {line[:40]!r}")
    return found
