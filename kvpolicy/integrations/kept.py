"""`Kept`: how much of the contexts of an evaluation was kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy.report import Report


@dataclass
class Kept:
    """Counts over contexts, padding excluded.

    Args:
        contexts: how many were read.
        whole: of how many of them nothing was evicted.
        tokens: their tokens, summed.
        slots: slots kept of them a KV head, mean over heads and layers, summed.
        bytes: of the keys and values kept, padding included, summed.
        bytes_full: of the keys and values that full caches would hold in the same layers, padding included, summed.
    """

    contexts: int = 0
    whole: int = 0
    tokens: int = 0
    slots: float = 0.0
    bytes: int = 0
    bytes_full: int = 0

    def add(self, report: Report, lengths: Sequence[int]) -> None:
        """Count a batch of contexts.

        Args:
            report: of the batch.
            lengths: tokens of each of its rows.
        """
        layers = [layer["kept"] for layer in report.to_dict()["layers"]]
        for row, length in enumerate(lengths):
            # A policy that evicts nothing leaves padding where it is.
            counts = [min(count, length) for layer in layers for count in layer[row]]
            self.contexts += 1
            self.tokens += length
            self.whole += min(counts) == length
            self.slots += sum(counts) / len(counts)
        self.bytes += report.bytes
        self.bytes_full += report.bytes_full

    def __str__(self) -> str:
        """Return the counts as a sentence.

        >>> print(Kept(contexts=4, whole=1, tokens=2000, slots=500.0))
        kept 25.0% of 4 contexts (mean 125.0 of 500.0 tokens); nothing evicted from 1 of them
        """
        tokens, slots = self.tokens / self.contexts, self.slots / self.contexts
        return (
            f"kept {slots / tokens:.1%} of {self.contexts} contexts (mean {slots:.1f} of {tokens:.1f} tokens); "
            f"nothing evicted from {self.whole} of them"
        )
