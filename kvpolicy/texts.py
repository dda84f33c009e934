"""Real English text that is on every machine: the chapters that Python prints for ``help("...")``."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, Protocol

from kvpolicy.errors import KVPolicyError


class Tokenizer(Protocol):
    """What `contexts` needs of a tokenizer; those of transformers have it."""

    def __call__(self, text: str, /, *, add_special_tokens: bool = True) -> Mapping[str, list[int]]:
        """Return the token ids of `text` under ``"input_ids"``."""
        ...


class TextError(KVPolicyError, ValueError):
    """The contexts asked for cannot be cut from the text there is."""


def topics() -> dict[str, str]:
    """Return the text of each chapter by its name, in the order of the names."""
    return dict(sorted(pydoc_data.topics.topics.items()))


def contexts(tokenizer: Tokenizer, *, tokens: int, count: int, of: Iterable[str] | None = None) -> list[list[int]]:
    """Return `count` contexts of exactly `tokens` token ids, all of different text.

    First come the beginnings of the texts, one of each, then their second stretches, and so on. The texts are `of`, or
    the topics, the longest first.
    Each context starts as the tokenizer starts any text: with its special token, if it has one. Equal
    arguments give equal contexts; another release of Python may word its topics differently.

    Raises:
        TextError: `tokens` or `count` is too small, or there is too little text for them.
    """
    start = tokenizer("")["input_ids"]
    length = tokens - len(start)
    if length < 1 or count < 1:
        raise TextError(
            f"expected at least {len(start) + 1} tokens and a count of at least 1, "
            f"got tokens={tokens} and count={count}."
        )
    stretches = []
    for text in unrepeated() if of is None else of:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        stretches.append([ids[first : first + length] for first in range(0, len(ids) - length + 1, length)])
    in_turn = chain.from_iterable(zip_longest(*stretches))
    found = [start + stretch for stretch in in_turn if stretch is not None]
    if len(found) < count:
        raise TextError(
            f"expected text for {count} contexts of {tokens} tokens, got enough for {len(found)}: "
            "ask for fewer or shorter ones."
        )
    return found[:count]


def too_many_unknown(tokenizer: Any, ids: Sequence[int]) -> int:
    """Return how many tokens stand for words that the tokenizer does not know; 0 where they are a tenth at most.

    Args:
        tokenizer: one of transformers.
        ids: of a text.
    """
    unknown = tokenizer.unk_token_id
    count = 0 if unknown is None else list(ids).count(unknown)
    return count if 10 * count > len(ids) else 0


def unrepeated() -> list[str]:
    """Return the topics, the longest first, less the paragraphs that a longer one has too.

    A third of the topics are parts of the longest ones: `with`, for one, is a section of `compound`.
    """
    seen: set[str] = set()
    texts = []
    for text in sorted(topics().values(), key=len, reverse=True):
        paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph not in seen]
        seen.update(paragraphs)
        texts.append("\n\n".join(paragraphs))
    return texts
