"""`Bench`: a loaded model on which cells are measured one after the other, and what they share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpolicy.eval.answer import answer, match
from kvpolicy.eval.drift import compare, evicted, full_logits, perplexity
from kvpolicy.eval.tasks.example import Example, Question, Stretch, Task
from kvpolicy.eval.tasks.haystack import Haystack
from kvpolicy.policy import Policy


@dataclass(frozen=True)
class Measured:
    """What came of one example.

    Args:
        scores: by name.
        bytes: of keys and values kept of the prompt.
        bytes_full: that a full cache would hold of it.
        text: what the model said, where it was asked.
    """

    scores: dict[str, float]
    bytes: int
    bytes_full: int
    text: str | None = None


class Bench:
    """A model and its tokenizer, and what is computed with them once.

    Args:
        name: of the model.
        model: a causal language model.
        tokenizer: its tokenizer.
        texts: what tasks are made from.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, texts: Sequence[str]) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self._haystack = Haystack(tokenizer, tuple(texts))
        self._full: dict[Stretch, Tensor] = {}

    @functools.lru_cache(maxsize=64)  # noqa: B019  (a bench lives as long as the command)
    def examples(self, task: Task, seed: int) -> Sequence[Example]:
        """Return the examples of a task."""
        return task.examples(self._haystack, seed)

    def forget(self) -> None:
        """Let go of the full cache's logits, of which a task of many texts has a gigabyte."""
        self._full.clear()

    def measure(self, policy: Policy, task: Task, example: Example, *, query_aware: bool) -> Measured:
        """Return what comes of one example under a policy."""
        if isinstance(example, Stretch):
            return self._drift(policy, example)
        return self._answer(policy, task, example, query_aware)

    def _drift(self, policy: Policy, example: Stretch) -> Measured:
        ids, continuation = (
            torch.tensor([part], device=self.model.device) for part in (example.context, example.continuation)
        )
        if example not in self._full:
            self._full[example] = full_logits(self.model, ids, continuation)
        found = evicted(self.model, policy, ids, continuation)
        strayed = compare(self._full[example], found.logits)
        scores = {
            "kl": strayed.mean,
            "agreement": strayed.agreement,
            "perplexity": perplexity(found.logits, continuation),
        }
        return Measured(scores, found.bytes, found.bytes_full)

    def _answer(self, policy: Policy, task: Any, asked: Question, query_aware: bool) -> Measured:
        found = answer(self.model, self.tokenizer, policy, asked, query_aware=query_aware, new_tokens=task.new_tokens)
        matched = match(found.text, asked.answers)
        return Measured({name: matched[name] for name in task.scores}, found.bytes, found.bytes_full, found.text)
