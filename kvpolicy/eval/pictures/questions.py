"""The questions that numbered pictures can be asked, each with its one answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvpolicy.eval.pictures.scene import Scene

Kind = Literal["color", "shape", "place"]
"""The color of a shape, the shape of a color, or which picture has a thing."""


@dataclass(frozen=True)
class Asked:
    """A question about pictures.

    Args:
        kind: what it asks for.
        question: in words.
        answer: one word.
    """

    kind: Kind
    question: str
    answer: str


def label(number: int) -> str:
    """Return the words before a picture, its number from 1.

    >>> label(1)
    'Picture 1:'
    """
    return f"Picture {number}:"


def questions(scenes: Sequence[Scene]) -> list[Asked]:
    """Return all questions that have one answer about these pictures, numbered from 1.

    >>> from random import Random
    >>> from kvpolicy.eval.pictures.scene import random_scene
    >>> for asked in questions([random_scene(Random(0), things=1)]):
    ...     print(asked.question, asked.answer)
    What color is the triangle in picture 1? yellow
    What shape is the yellow object in picture 1? triangle
    Which picture has a yellow triangle? 1
    """
    every = Counter((thing.color, thing.shape) for scene in scenes for thing in scene.things)
    found = []
    for number, scene in enumerate(scenes, 1):
        for thing in scene.things:
            color, shape = thing.color, thing.shape
            found += [
                Asked("color", f"What color is the {shape} in picture {number}?", color),
                Asked("shape", f"What shape is the {color} object in picture {number}?", shape),
            ]
            if every[color, shape] == 1:
                found.append(Asked("place", f"Which picture has a {color} {shape}?", str(number)))
    return found
