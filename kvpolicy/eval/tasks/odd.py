"""Odd one out: the same record over and over, and one that differs. All but one are redundant."""

from __future__ import annotations

from random import Random
from typing import Annotated, ClassVar

from annotated_types import Ge

from kvpolicy.eval.tasks.example import Question
from kvpolicy.eval.tasks.haystack import Haystack, randoms
from kvpolicy.plugin import settings


@settings
class OddOneOut:
    """A record repeated, one of which names another thing and another number; that number is asked for.

    Args:
        length: tokens of the records, at most.
        samples: how many examples.
        new_tokens: that an answer may have.
    """

    name = "odd-one-out"
    source: ClassVar[str] = "kvpolicy"
    scores: ClassVar[dict[str, bool]] = {"string_match_all": True}
    length: Annotated[int, Ge(64)] = 1024
    samples: Annotated[int, Ge(1)] = 16
    new_tokens: Annotated[int, Ge(1)] = 16

    def examples(self, haystack: Haystack, seed: int) -> list[Question]:
        """Return the examples."""
        return [self._example(haystack, random) for random in randoms(self.name, seed, self.samples)]

    def _example(self, haystack: Haystack, random: Random) -> Question:
        usual, odd = haystack.words(2, random)
        number, other = (str(each) for each in random.sample(range(1000, 10000), 2))
        depth = random.random()

        def make(many: int) -> str:
            records = [_record(usual, number)] * many
            records.insert(1 + int(depth * (many - 1)), _record(odd, other))
            return "\n".join(records)

        question = f"One record is of the {odd}. What is its number?"
        context = haystack.longest(make, self.length)
        return Question(context, question, (other,), f"The record of the {odd} has number")


def _record(thing: str, number: str) -> str:
    return f"Record of the {thing}: number {number}, seen and signed."
