"""The texts that every measurement reads."""

from __future__ import annotations

import re

import pytest

from kvpolicy.errors import KVPolicyError
from kvpolicy.texts import TextError, contexts, topics


class Words:
    """A tokenizer with a token for each run of letters or spaces, and `start` before each text."""

    def __init__(self, start: list[int] | None = None) -> None:
        self.start = start or []
        self.ids: dict[str, int] = {}

    def __call__(self, text: str, /, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [self.ids.setdefault(word, len(self.ids)) for word in re.findall(r"\s+|\S+", text)]
        return {"input_ids": self.start + ids if add_special_tokens else ids}

    def decode(self, ids: list[int]) -> str:
        words = list(self.ids)
        return "".join(words[i] for i in ids)


def test_topics_are_sorted_text() -> None:
    names = list(topics())
    assert names == sorted(names)
    assert all(isinstance(text, str) and text for text in topics().values())


def test_contexts_have_the_exact_length_and_repeat() -> None:
    found = contexts(Words(), tokens=1000, count=20)
    assert [len(context) for context in found] == [1000] * 20
    assert found == contexts(Words(), tokens=1000, count=20)


def test_a_smaller_count_gives_the_first_of_them() -> None:
    assert contexts(Words(), tokens=300, count=3) == contexts(Words(), tokens=300, count=40)[:3]


def test_contexts_start_with_the_longest_topics() -> None:
    tokenizer = Words()
    longest = max(topics().values(), key=len)
    assert longest.startswith(tokenizer.decode(contexts(tokenizer, tokens=50, count=1)[0]))


def test_contexts_are_of_different_text() -> None:
    tokenizer = Words()
    seen: set[str] = set()
    for context in contexts(tokenizer, tokens=1000, count=30):
        # The first and last paragraph may be cut; a short one, like "Note:", may stand in any text.
        whole = {part for part in tokenizer.decode(context).split("\n\n")[1:-1] if len(part) > 80}
        assert not whole & seen
        seen |= whole


def test_each_context_starts_with_the_special_token() -> None:
    found = contexts(Words(start=[-1]), tokens=100, count=5)
    assert [context.count(-1) for context in found] == [1] * 5
    assert {context[0] for context in found} == {-1}
    assert [len(context) for context in found] == [100] * 5


def test_too_little_text_says_how_much_there_is() -> None:
    with pytest.raises(TextError, match=r"expected text for 100000 contexts of 1000 tokens, got enough for \d+"):
        contexts(Words(), tokens=1000, count=100_000)


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (0, 1), (10, 0), (-5, 3)])
def test_sizes_below_one_are_refused(tokens: int, count: int) -> None:
    with pytest.raises(KVPolicyError, match=rf"at least 2 tokens .* got tokens={tokens} and count={count}"):
        contexts(Words(start=[-1]), tokens=tokens, count=count)


@pytest.mark.model
def test_contexts_of_the_real_model(smollm2) -> None:
    _, tokenizer = smollm2
    found = contexts(tokenizer, tokens=2048, count=16)
    assert [len(context) for context in found] == [2048] * 16
    assert tokenizer.decode(found[0]).startswith(max(topics().values(), key=len)[:500])
