"""`Bench`: a loaded model on which cells are measured one after the other, and what they share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpolicy import models
from kvpolicy.eval.answer import answer, match
from kvpolicy.eval.drift import compare, evicted, full_logits, perplexity
from kvpolicy.eval.readings import Readings
from kvpolicy.eval.tasks.example import Example, Pictured, Stretch, Task
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
        name: of the model, which `kvpolicy.models` finds its processor by, where there are pictures.
        model: a causal language model, or one of images and text.
        tokenizer: its tokenizer.
        texts: what tasks are made from.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, texts: Sequence[str]) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self._haystack = Haystack(tokenizer, tuple(texts))
        self._task: Task | None = None
        self._full: dict[Stretch, Tensor] = {}
        self._readings = Readings(model)

    @functools.lru_cache(maxsize=64)  # noqa: B019  (a bench lives as long as the command)
    def examples(self, task: Task, seed: int) -> Sequence[Example]:
        """Return the examples of a task.

        Raises:
            UnsupportedModelError: when they are of pictures, which the model cannot see.
        """
        found = task.examples(self._haystack, seed)
        for each in found:
            self._reader(each)
        return found

    def _reader(self, example: Example) -> Any:
        """Return what makes the model's inputs of an example."""
        return self._processor if isinstance(example, Pictured) else self.tokenizer

    @functools.cached_property
    def _processor(self) -> Any:
        return models.load_processor(self.name)

    def measure(self, policy: Policy, task: Task, example: Example, *, query_aware: bool) -> Measured:
        """Return what comes of one example under a policy."""
        if task != self._task:
            # What is kept of a task of many texts is gigabytes.
            self._full.clear()
            self._readings.clear()
            self._task = task
        if isinstance(example, Stretch):
            return self._drift(policy, example)
        return self._answer(policy, task, example, query_aware)

    def _drift(self, policy: Policy, example: Stretch) -> Measured:
        ids, continuation = (
            torch.tensor([part], device=self.model.device) for part in (example.context, example.continuation)
        )
        if example not in self._full:
            self._full[example] = full_logits(self.model, ids, continuation)
        found = evicted(self._readings.compress(policy, example, ids), continuation)
        strayed = compare(self._full[example], found.logits)
        scores = {
            "kl": strayed.mean,
            "agreement": strayed.agreement,
            "perplexity": perplexity(found.logits, continuation),
        }
        return Measured(scores, found.bytes, found.bytes_full)

    def _answer(self, policy: Policy, task: Any, asked: Any, query_aware: bool) -> Measured:
        reader = self._reader(asked)
        found = answer(self._readings, reader, policy, asked, query_aware=query_aware, new_tokens=task.new_tokens)
        matched = match(found.text, asked.answers)
        return Measured({name: matched[name] for name in task.scores}, found.bytes, found.bytes_full, found.text)
