"""Variable tracking: names that take their value from one another, all over the text."""

from __future__ import annotations

import string
from random import Random
from typing import Annotated, ClassVar

from annotated_types import Ge

from kvpolicy.eval.tasks.example import Question
from kvpolicy.eval.tasks.haystack import Haystack, randoms
from kvpolicy.plugin import settings


@settings
class VariableTracking:
    """Chains of variables, each set to the one before; all that hold a number are asked for.

    Args:
        length: tokens of the context, about.
        samples: how many examples.
        hops: how often the number is handed on; one variable more than hops holds it.
        chains: how many numbers are handed on; the first is asked for.
        new_tokens: that an answer may have.
    """

    name = "variable-tracking"
    source: ClassVar[str] = "RULER, arXiv 2404.06654, section 3.2"
    scores: ClassVar[dict[str, bool]] = {"string_match_all": True}
    length: Annotated[int, Ge(32)] = 1024
    samples: Annotated[int, Ge(1)] = 16
    hops: Annotated[int, Ge(1)] = 4
    chains: Annotated[int, Ge(1)] = 1
    new_tokens: Annotated[int, Ge(1)] = 48

    def examples(self, haystack: Haystack, seed: int) -> list[Question]:
        """Return the examples."""
        chances = randoms(self.name, seed, self.samples)
        chains = [self._chains(random) for random in chances]
        needles = [_interleaved(list(each.values()), random) for each, random in zip(chains, chances, strict=True)]
        contexts = haystack.hide(needles, self.length, chances)
        return [_question(context, each) for context, each in zip(contexts, chains, strict=True)]

    def _chains(self, random: Random) -> dict[tuple[str, tuple[str, ...]], list[str]]:
        """Return the assignments of each chain, in order, by its number and names."""
        many = self.hops + 1
        names: list[str] = []
        while len(names) < many * self.chains:
            name = "".join(random.choices(string.ascii_uppercase, k=5))
            if name not in names:
                names.append(name)
        found = {}
        for at, number in enumerate(random.sample(range(10000, 100000), self.chains)):
            chain = names[at * many : (at + 1) * many]
            values = [str(number), *(f"VAR {name}" for name in chain[:-1])]
            lines = [f"VAR {name} = {value}." for name, value in zip(chain, values, strict=True)]
            found[str(number), tuple(chain)] = lines
        return found


def _interleaved(chains: list[list[str]], random: Random) -> list[str]:
    """Return the lines of all chains mixed by chance, those of one in their order."""
    turns = [at for at, chain in enumerate(chains) for _ in chain]
    random.shuffle(turns)
    following = [iter(chain) for chain in chains]
    return [next(following[at]) for at in turns]


def _question(context: str, chains: dict[tuple[str, tuple[str, ...]], list[str]]) -> Question:
    number, names = next(iter(chains))
    question = f"Which variables hold the value {number}, set to it or to another one that holds it? Name all of them."
    return Question(context, question, names, f"The {len(names)} variables that hold the value {number} are VAR")
