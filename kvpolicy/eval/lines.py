"""Files of JSON lines that `kvpolicy eval` wrote, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvpolicy.eval.cells import FORMAT, ResultError


def damaged(path: Path, why: object) -> ResultError:
    """Return the error that a file is not what was written."""
    return ResultError(f"{path}: it is damaged: {why}. Remove it and run `kvpolicy eval` again")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, its header first.

    Raises:
        ResultError: when it is none that `kvpolicy eval` wrote; says in which line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path}: cannot be read: {error}") from None
    # What a model says may hold any other kind of line break.
    lines = [_parsed(line, path, at) for at, line in enumerate(text.rstrip("\n").split("\n"), 1)]
    number = lines[0].get("kvpolicy-eval")
    if not isinstance(number, int):
        raise ResultError(f"{path}:1: expected the header of a result of `kvpolicy eval`, got another file")
    if number > FORMAT:
        raise ResultError(f"{path}:1: expected format {FORMAT} or older, got {number}: upgrade kvpolicy")
    return lines


def _parsed(line: str, path: Path, at: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise damaged(path, f"line {at}: expected JSON, {error.msg}") from None
    if not isinstance(found, dict):
        raise damaged(path, f"line {at}: expected a JSON object, got {line[:40]!r}")
    return found
