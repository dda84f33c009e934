"""What a plugin's docstring says, for people and for editors: its first line and its arguments."""

from __future__ import annotations

import inspect
import re


def summary(cls: type) -> str:
    """Return the first line of a class's docstring, or nothing where it has none.

    >>> from kvpolicy.scorers.random import Random
    >>> summary(Random)
    "A number in [0, 1) for each slot, from the seed, the layer, the head and the slot's place alone."
    """
    doc = inspect.getdoc(cls) or ""
    # A dataclass without a docstring gets its signature as one.
    return "" if doc.startswith(f"{cls.__name__}(") else doc.split("\n")[0].replace("`", "")


def arguments(cls: type) -> dict[str, str]:
    """Return what the ``Args:`` of a class's docstring say of each, on one line.

    >>> from kvpolicy.scorers.random import Random
    >>> arguments(Random)
    {'seed': 'another seed, other numbers.'}
    """
    block = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", inspect.getdoc(cls) or "", re.MULTILINE)
    found = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", block[1] if block else "", re.MULTILINE)
    return {name: " ".join(text.replace("`", "").split()) for name, text in found}
