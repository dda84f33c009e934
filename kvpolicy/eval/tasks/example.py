"""What a task makes: examples to answer, about texts or pictures, and stretches of text to go on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpolicy.eval.pictures.scene import Scene
from kvpolicy.eval.tasks.haystack import Haystack


@dataclass(frozen=True)
class Question:
    """A context, a question about it, and what a right answer holds.

    Args:
        context: the text that is read, and evicted.
        question: what comes after it.
        answers: the strings looked for in what the model says.
        prefix: the beginning of the answer, put into the model's mouth.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    prefix: str = ""


@dataclass(frozen=True)
class Pictured:
    """Pictures, a question about them, and what a right answer holds.

    Args:
        scenes: what is drawn, read and evicted.
        question: what comes after it.
        answers: the strings looked for in what the model says.
    """

    scenes: tuple[Scene, ...]
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Stretch:
    """A text's token ids, and those it goes on with."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


Example = Question | Pictured | Stretch


class Task(Protocol):
    """A kind of task with its settings, frozen.

    ``name`` is what a task file calls it, ``source`` where it is from, ``scores`` what it measures: by name, whether
    more is better. The first is the one that plots show.
    """

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def scores(self) -> dict[str, bool]: ...
    def __hash__(self) -> int: ...

    def examples(self, haystack: Haystack, seed: int) -> Sequence[Example]:
        """Return the examples, the same ones for equal arguments."""
