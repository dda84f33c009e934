"""The text of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# UTF-8 takes at most so many bytes, and so tokens, for a character.
_LONGEST = 4
_BROKEN = "\ufffd"


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text; together they are the text.

    A token that ends within a character adds nothing: the character belongs to the token that completes it.

    Args:
        tokenizer: one of transformers.
        ids: of the tokens.
    """
    found: list[str] = []
    # Decoded behind the token before it: at the beginning of a text, some tokenizers drop a token's space.
    before, start = 0, 0
    for end in range(1, len(ids) + 1):
        text = _decode(tokenizer, ids[before:end])
        if text.endswith(_BROKEN) and end - start < _LONGEST and end < len(ids):
            found.append("")
            continue
        found.append(text[len(_decode(tokenizer, ids[before:start])) :])
        before, start = start, end
    return found


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
