"""Two halves of a text: one to search on, one held out to show what was found."""

from __future__ import annotations

from collections.abc import Sequence

Texts = tuple[str, ...]


def halves(texts: Sequence[str]) -> tuple[Texts, Texts]:
    """Return the texts to search on and those held out; no part of a text is in both.

    Of several texts, every other one is held out, the first among them; a single one is cut in the middle, where a line
    ends if it has any.

    >>> halves(["a", "b", "c"]), halves(["one\\ntwo\\nsix"])
    ((('b',), ('a', 'c')), (('one\\n',), ('two\\nsix',)))
    """
    if len(texts) > 1:
        return tuple(texts[1::2]), tuple(texts[::2])
    text = texts[0]
    middle = len(text) // 2
    cut = text.rfind("\n", 0, middle) + 1 or middle
    return (text[:cut],), (text[cut:],)
