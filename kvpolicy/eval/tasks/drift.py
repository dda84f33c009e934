"""Drift: how far the model strays from itself with the full cache on the text's own continuation."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge

from kvpolicy.eval.tasks.example import Stretch
from kvpolicy.eval.tasks.haystack import Haystack
from kvpolicy.plugin import settings


@settings
class DriftTask:
    """The text's next tokens, predicted with the full cache and with what was kept.

    Args:
        length: tokens of the prompt.
        next: tokens of the continuation.
        samples: how many texts.
    """

    name = "drift"
    source: ClassVar[str] = "kvpolicy"
    scores: ClassVar[dict[str, bool]] = {"kl": False, "agreement": True, "perplexity": False}
    length: Annotated[int, Ge(2)] = 1024
    next: Annotated[int, Ge(2)] = 64
    samples: Annotated[int, Ge(1)] = 16

    def examples(self, haystack: Haystack, seed: int) -> list[Stretch]:
        """Return the texts' first stretches; chance decides nothing here."""
        found = haystack.stretches(self.length + self.next, self.samples)
        return [Stretch(tuple(ids[: self.length]), tuple(ids[self.length :])) for ids in found]
