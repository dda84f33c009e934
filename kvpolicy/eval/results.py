"""Reads result files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """Return the results in a folder, by file name.

    Raises:
        ResultError: when there are none, or a file is none that `kvpolicy eval` wrote; says in which line.
    """
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise ResultError(f"expected a folder with results of `kvpolicy eval`, found none in {str(folder)!r}")
    return [read_result(path) for path in paths]


def read_result(path: Path) -> Result:
    """Return the result in a file.

    Raises:
        ResultError: when it is none; says in which line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path}: cannot be read: {error}") from None
    # What a model says may hold any other kind of line break.
    lines = [_parsed(line, f"{path}:{at}") for at, line in enumerate(text.rstrip("\n").split("\n"), 1)]
    header = lines[0]
    if not isinstance(header.get("kvpolicy-eval"), int):
        raise ResultError(f"{path}:1: expected the header of a result of `kvpolicy eval`, got another file")
    if header["kvpolicy-eval"] > FORMAT:
        raise ResultError(
            f"{path}:1: expected format {FORMAT} or older, got {header['kvpolicy-eval']}: upgrade kvpolicy"
        )
    try:
        cell = Cell(**header["cell"])
        for line in lines[1:]:
            line["scores"], line["bytes"], line["bytes_full"], line["example"]
    except (KeyError, TypeError) as error:
        raise ResultError(f"{path}: it is damaged: {error}. Remove it and run `kvpolicy eval` again") from None
    if cell.name != path.stem or len(lines) < 2:
        raise ResultError(f"{path}: it is damaged: not what was written. Remove it and run `kvpolicy eval` again")
    asked = None if cell.task["task"] == OwnExamples.name else cell.task.get("samples")
    if asked is not None and len(lines) - 1 < asked:
        found = f"expected {asked} examples, got {len(lines) - 1}"
        raise ResultError(f"{path}: it is damaged: {found}. Remove it and run `kvpolicy eval` again")
    return Result(header, cell, lines[1:])


def _parsed(line: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ResultError(f"{place}: expected JSON, {error.msg}: the file is damaged, or not a result") from None
    if not isinstance(found, dict):
        raise ResultError(f"{place}: expected a JSON object, got {line[:40]!r}")
    return found
