"""`Haystack`: the text that tasks are made from, cut to lengths in tokens, and its words."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kvpolicy.errors import KVPolicyError
from kvpolicy.models import TINY_LLAVA
from kvpolicy.texts import contexts, too_many_unknown

_GAP = re.compile(r"\n+|(?<=[.!?]) +")
"""Where a sentence can be put in: behind another one, or between lines."""
_WORD = re.compile(r"\b[^\W\d_]{4,10}\b")


class TaskError(KVPolicyError, ValueError):
    """A task, its file or the text it is to be made from is wrong."""


@dataclass(frozen=True)
class Haystack:
    """A text, as a tokenizer sees it.

    Args:
        tokenizer: of the model.
        texts: what it is made of.
    """

    tokenizer: Any
    texts: tuple[str, ...]

    def stretches(self, tokens: int, count: int) -> list[list[int]]:
        """Return `count` stretches of exactly `tokens` ids, all of different text: see `kvpolicy.texts.contexts`.

        Raises:
            TaskError: when the tokenizer knows too few of the text's words.
            TextError: when there is too little text.
        """
        self._check_known()
        return contexts(self.tokenizer, tokens=tokens, count=count, of=self.texts)

    def size(self, text: str) -> int:
        """Return how many tokens `text` has."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @functools.cached_property
    def _words(self) -> list[str]:
        # Sorted, so that a set's order decides nothing.
        return sorted({word for text in self.texts for word in _WORD.findall(text) if word.islower()})

    def words(self, count: int, random: Random) -> list[str]:
        """Return `count` different lower-case words of the text.

        Raises:
            TaskError: when it has fewer, or the tokenizer knows too few of the text's words.
        """
        self._check_known()
        if len(self._words) < count:
            raise TaskError(
                f"expected a text with {count} different lower-case words of 4 to 10 letters, got {len(self._words)}: "
                "give a longer text"
            )
        return random.sample(self._words, count)

    def _check_known(self) -> None:
        ids = self.tokenizer(self.texts[0][:1000], add_special_tokens=False)["input_ids"]
        if unknown := too_many_unknown(self.tokenizer, ids):
            raise TaskError(
                f"expected a tokenizer that knows the words of the text, got one to which {unknown} of the first "
                f"{len(ids)} are unknown: choose another model, or for {TINY_LLAVA!r} the task 'pictures'"
            )

    def hide(self, needles: Sequence[Sequence[str]], length: int, randoms: Sequence[Random]) -> list[str]:
        """Return one stretch of the text for each list of needles, these put in between its sentences, in order.

        Args:
            needles: the sentences to hide, by example.
            length: tokens of text and needles, about.
            randoms: what decides where, by example.

        Raises:
            TaskError: when the needles alone are as long, or the text has too few sentences.
        """
        room = length - max(self.size(" ".join(each)) + len(each) for each in needles)
        if room < 1:
            raise TaskError(f"length: expected more tokens than the {length - room} of what is hidden, got {length}")
        stretches = self.stretches(room, len(needles))
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in stretches]
        return [_put_in(*each) for each in zip(texts, needles, randoms, strict=True)]

    def longest(self, make: Callable[[int], str], tokens: int) -> str:
        """Return ``make(n)`` for the largest n with which it has at most `tokens` tokens; it grows with n.

        Raises:
            TaskError: when even ``make(1)`` has more.
        """
        if self.size(make(1)) > tokens:
            raise TaskError(f"length: expected at least {self.size(make(1))} tokens for this task, got {tokens}")
        low, high = 1, 2
        while self.size(make(high)) <= tokens:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.size(make(middle)) <= tokens else (low, middle)
        return make(low)


def _put_in(text: str, needles: Sequence[str], random: Random) -> str:
    gaps = [found.end() for found in _GAP.finditer(text)]
    if len(gaps) < len(needles):
        raise TaskError(
            f"expected a text with {len(needles)} ends of sentences or lines, got {len(gaps)}: {text!r:.80}"
        )
    parts, start = [], 0
    for gap, needle in zip(sorted(random.sample(gaps, len(needles))), needles, strict=True):
        parts += [text[start:gap], needle, " "]
        start = gap
    return "".join([*parts, text[start:]])


def randoms(name: str, seed: int, count: int) -> list[Random]:
    """Return what decides by chance in each of `count` examples of a task."""
    return [Random(f"{name} {seed} {index}") for index in range(count)]
