"""Counting words, the two kinds of RULER: the common ones among rare ones, and the most frequent three."""

from __future__ import annotations

from random import Random
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt

from kvpolicy.eval.tasks.example import Question
from kvpolicy.eval.tasks.haystack import Haystack, randoms
from kvpolicy.plugin import settings

_SOURCE = "RULER, arXiv 2404.06654, section 3.3"
_TOP = 3
"""Words that "frequent-words" asks for."""


@settings
class CommonWords:
    """A list of words in which some stand often and all others seldom; the common ones are asked for.

    Args:
        length: tokens of the list, at most.
        samples: how many examples.
        common: how many words are common.
        often: how often each of them stands in the list.
        seldom: how often each of the others does, of which there are as many as fit.
        new_tokens: that an answer may have.
    """

    name = "common-words"
    source: ClassVar[str] = _SOURCE
    scores: ClassVar[dict[str, bool]] = {"string_match_all": True}
    length: Annotated[int, Ge(32)] = 1024
    samples: Annotated[int, Ge(1)] = 16
    common: Annotated[int, Ge(1)] = 10
    often: Annotated[int, Ge(2)] = 20
    seldom: Annotated[int, Ge(1)] = 3
    new_tokens: Annotated[int, Ge(1)] = 64

    def examples(self, haystack: Haystack, seed: int) -> list[Question]:
        """Return the examples."""
        return [self._example(haystack, random) for random in randoms(self.name, seed, self.samples)]

    def _example(self, haystack: Haystack, random: Random) -> Question:
        # No more words can fit than there are tokens.
        words = haystack.words(self.common + self.length // self.seldom, random)
        common, rare = words[: self.common], words[self.common :]
        order = random.random()

        def make(many: int) -> str:
            listed = common * self.often + rare[:many] * self.seldom
            Random(order).shuffle(listed)
            return f"A list of words: {' '.join(listed)}"

        question = f"Which {self.common} words are the most common in the list above?"
        return Question(
            haystack.longest(make, self.length), question, tuple(common), "The most common words in the list are:"
        )


@settings
class FrequentWords:
    """Words whose frequency falls with a power of their rank; the three most frequent are asked for.

    Args:
        length: tokens of the text, at most.
        samples: how many examples.
        alpha: the power, above 1.
        new_tokens: that an answer may have.
    """

    name = "frequent-words"
    source: ClassVar[str] = _SOURCE
    scores: ClassVar[dict[str, bool]] = {"string_match_all": True}
    length: Annotated[int, Ge(64)] = 1024
    samples: Annotated[int, Ge(1)] = 16
    alpha: Annotated[float, Gt(1)] = 2.0
    new_tokens: Annotated[int, Ge(1)] = 32

    def examples(self, haystack: Haystack, seed: int) -> list[Question]:
        """Return the examples."""
        return [self._example(haystack, random) for random in randoms(self.name, seed, self.samples)]

    def _example(self, haystack: Haystack, random: Random) -> Question:
        words = haystack.words(_TOP + self.length // 8, random)
        order = random.random()

        def make(many: int) -> str:
            # The fourth word stands there `many` times. What is added keeps the three before it apart.
            least = many * (_TOP + 1) ** self.alpha
            counts = [round(least / rank**self.alpha) + max(_TOP + 1 - rank, 0) for rank in range(1, len(words) + 1)]
            listed = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
            Random(order).shuffle(listed)
            return f"A coded text: {' '.join(listed)}"

        question = f"What are the {_TOP} words that appear most often in the coded text above?"
        context = haystack.longest(make, self.length)
        return Question(context, question, tuple(words[:_TOP]), "The words that appear most often are:")
