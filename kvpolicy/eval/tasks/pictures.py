"""Pictures: which color, shape or picture, asked about drawn pictures with clutter in them."""

from __future__ import annotations

from random import Random
from typing import Annotated, ClassVar, Literal, get_args

from annotated_types import Ge, Le

from kvpolicy.eval.pictures.questions import Kind, questions
from kvpolicy.eval.pictures.scene import random_scene
from kvpolicy.eval.tasks.example import Pictured
from kvpolicy.eval.tasks.haystack import Haystack, randoms
from kvpolicy.plugin import settings


@settings
class Pictures:
    """Numbered pictures of things on a background, with clutter, and a question that one word answers.

    Args:
        pictures: how many in a prompt; the tiny model knows six.
        samples: how many examples.
        things: how many of each picture can be asked about; the tiny model has seen two.
        clutter: how many pieces in each picture that no question is about; the tiny model has seen six.
        ask: what for: the color of a shape, the shape of a color, the place (which picture has a thing), or any.
        new_tokens: that an answer may have.
    """

    name = "pictures"
    source: ClassVar[str] = "kvpolicy"
    scores: ClassVar[dict[str, bool]] = {"string_match_all": True}
    pictures: Annotated[int, Ge(1), Le(9)] = 6
    samples: Annotated[int, Ge(1)] = 100
    things: Annotated[int, Ge(1), Le(4)] = 2
    clutter: Annotated[int, Ge(0)] = 4
    ask: Kind | Literal["any"] = "any"
    new_tokens: Annotated[int, Ge(1)] = 8

    def examples(self, haystack: Haystack, seed: int) -> list[Pictured]:
        """Return the examples; the text does not matter."""
        return [self._example(random) for random in randoms(self.name, seed, self.samples)]

    def _example(self, random: Random) -> Pictured:
        kind = random.choice(get_args(Kind)) if self.ask == "any" else self.ask
        scenes = tuple(random_scene(random, things=self.things, clutter=self.clutter) for _ in range(self.pictures))
        possible = [asked for asked in questions(scenes) if asked.kind == kind]
        if not possible:
            # Each thing is in two pictures, so that none has a place of its own.
            return self._example(random)
        asked = random.choice(possible)
        return Pictured(scenes, asked.question, (asked.answer,))
