"""Needles in a haystack, the four kinds of RULER: one, one among several keys, several values, several keys asked."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Annotated, ClassVar, Protocol

from annotated_types import Ge, Le

from kvpolicy.eval.tasks.example import Question
from kvpolicy.eval.tasks.haystack import Haystack, randoms
from kvpolicy.plugin import settings

_SCORES = {"string_match_all": True}
_SOURCE = "RULER, arXiv 2404.06654, section 3.1"

Length = Annotated[int, Ge(32)]
Count = Annotated[int, Ge(1)]
Digits = Annotated[int, Ge(2), Le(18)]


@settings
class SingleNeedle:
    """A sentence that gives a number to a word, hidden in the text; the number is asked for.

    Args:
        length: tokens of the context, about.
        samples: how many examples.
        digits: of the number.
        new_tokens: that an answer may have.
    """

    name = "niah-single"
    source: ClassVar[str] = _SOURCE
    scores: ClassVar[dict[str, bool]] = _SCORES
    length: Length = 1024
    samples: Count = 16
    digits: Digits = 7
    new_tokens: Count = 24

    def examples(self, haystack: Haystack, seed: int) -> list[Question]:
        """Return the examples."""
        return _make(self, haystack, seed, keys=1, values=1, asked=1)


@settings
class MultiKeyNeedle:
    """The same, among other sentences that give numbers to other words.

    Args:
        length: tokens of the context, about.
        samples: how many examples.
        keys: how many words have numbers; one is asked for.
        digits: of a number.
        new_tokens: that an answer may have.
    """

    name = "niah-multikey"
    source: ClassVar[str] = _SOURCE
    scores: ClassVar[dict[str, bool]] = _SCORES
    length: Length = 1024
    samples: Count = 16
    keys: Annotated[int, Ge(2)] = 4
    digits: Digits = 7
    new_tokens: Count = 24

    def examples(self, haystack: Haystack, seed: int) -> list[Question]:
        """Return the examples."""
        return _make(self, haystack, seed, keys=self.keys, values=1, asked=1)


@settings
class MultiValueNeedle:
    """One word that several sentences give a number each; all are asked for.

    Args:
        length: tokens of the context, about.
        samples: how many examples.
        values: how many numbers the word has.
        digits: of a number.
        new_tokens: that an answer may have.
    """

    name = "niah-multivalue"
    source: ClassVar[str] = _SOURCE
    scores: ClassVar[dict[str, bool]] = _SCORES
    length: Length = 1024
    samples: Count = 16
    values: Annotated[int, Ge(2)] = 4
    digits: Digits = 7
    new_tokens: Count = 64

    def examples(self, haystack: Haystack, seed: int) -> list[Question]:
        """Return the examples."""
        return _make(self, haystack, seed, keys=1, values=self.values, asked=1)


@settings
class MultiQueryNeedle:
    """Several words with a number each; the numbers of all are asked for.

    Args:
        length: tokens of the context, about.
        samples: how many examples.
        queries: how many words have numbers.
        digits: of a number.
        new_tokens: that an answer may have.
    """

    name = "niah-multiquery"
    source: ClassVar[str] = _SOURCE
    scores: ClassVar[dict[str, bool]] = _SCORES
    length: Length = 1024
    samples: Count = 16
    queries: Annotated[int, Ge(2)] = 4
    digits: Digits = 7
    new_tokens: Count = 64

    def examples(self, haystack: Haystack, seed: int) -> list[Question]:
        """Return the examples."""
        many = self.queries
        return _make(self, haystack, seed, keys=many, values=1, asked=many)


class _Needles(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def digits(self) -> int: ...


def _make(task: _Needles, haystack: Haystack, seed: int, *, keys: int, values: int, asked: int) -> list[Question]:
    """Return the examples: `keys` words with `values` numbers each, the first `asked` of the words asked for."""
    chances = randoms(task.name, seed, task.samples)
    codes = [_codes(haystack, random, keys, values, task.digits) for random in chances]
    needles = [_needles(each, random) for each, random in zip(codes, chances, strict=True)]
    contexts = haystack.hide(needles, task.length, chances)
    return [_question(context, each, asked) for context, each in zip(contexts, codes, strict=True)]


def _codes(haystack: Haystack, random: Random, keys: int, values: int, digits: int) -> dict[str, list[str]]:
    """Return the numbers of each word, all different."""
    numbers = [str(number) for number in random.sample(range(10 ** (digits - 1), 10**digits), keys * values)]
    words = haystack.words(keys, random)
    return {word: numbers[at * values : (at + 1) * values] for at, word in enumerate(words)}


def _needles(codes: dict[str, list[str]], random: Random) -> list[str]:
    needles = [f"The secret code of the {word} is {number}." for word, numbers in codes.items() for number in numbers]
    random.shuffle(needles)
    return needles


def _question(context: str, codes: dict[str, list[str]], asked: int) -> Question:
    words = list(codes)[:asked]
    answers = tuple(number for word in words for number in codes[word])
    named = _listed([f"the {word}" for word in words])
    if len(answers) == 1:
        return Question(context, f"What is the secret code of {named}?", answers, f"The secret code of {named} is")
    question = f"What are all the secret codes of {named}? The text above gives {len(answers)}."
    return Question(context, question, answers, f"The secret codes of {named} are")


def _listed(words: Sequence[str]) -> str:
    """Return words as a list in a sentence.

    >>> _listed(["a"]), _listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
