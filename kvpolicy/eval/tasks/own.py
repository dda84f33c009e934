"""A user's own examples: a file with one a line, as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, MinLen

from kvpolicy.config.source import read_text, show
from kvpolicy.errors import PolicyFileError, SettingError
from kvpolicy.eval.tasks.example import Question
from kvpolicy.eval.tasks.haystack import Haystack, TaskError
from kvpolicy.plugin import settings


@settings
class OwnExamples:
    """The examples of a JSON lines file: `context`, `question`, `answers` and, if need be, `prefix`.

    Args:
        file: its path.
        match: "all": the share of the answers that are found; "part": whether any of them is.
        samples: how many of its first examples; without it, all.
        new_tokens: that an answer may have.
    """

    name = "examples"
    source: ClassVar[str] = "the user's own"
    file: str
    match: Literal["all", "part"] = "all"
    samples: Annotated[int, Ge(1)] | None = None
    new_tokens: Annotated[int, Ge(1)] = 32

    @property
    def scores(self) -> dict[str, bool]:
        """RULER's string match, all or part."""
        return {f"string_match_{self.match}": True}

    def examples(self, haystack: Haystack, seed: int) -> list[Question]:
        """Return the examples of the file, the first ones; neither text nor seed matters.

        Raises:
            TaskError: when the file is not what it should be; says in which line.
        """
        return read(self.file)[: self.samples]


@settings
class _Line:
    name = "example"
    context: Annotated[str, MinLen(1)]
    question: Annotated[str, MinLen(1)]
    answers: Annotated[list[Annotated[str, MinLen(1)]], MinLen(1)]
    prefix: str = ""


def read(file: str) -> list[Question]:
    """Return the examples in a JSON lines file.

    Raises:
        TaskError: when it cannot be read, or a line is no example; says which.
    """
    try:
        text = read_text(Path(file), what="examples")
    except PolicyFileError as error:
        raise TaskError(str(error)) from None
    found = [_example(line, f"{file}:{at}") for at, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not found:
        raise TaskError(f"{file}:1: expected an example a line, the file is empty")
    return found


def _example(text: str, place: str) -> Question:
    wanted = 'expected {"context": "...", "question": "...", "answers": ["..."]}'
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise TaskError(f"{place}:{error.colno}: {wanted}, got no JSON: {error.msg}") from None
    if not isinstance(found, dict):
        raise TaskError(f"{place}: {wanted}, got {show(found)}")
    try:
        line = _Line(**found)
    except SettingError as error:
        raise TaskError(f"{place}: {error}") from None
    return Question(line.context, line.question, tuple(line.answers), line.prefix)
