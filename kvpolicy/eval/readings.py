"""`Readings`: the prompts that a bench has read, so that the policies of a table share one forward pass over each."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from kvpolicy.policy import Policy
from kvpolicy.session.context import Context
from kvpolicy.session.reading import Reading, read

LIMIT = 2 << 30
"""Bytes of full caches that are kept; prompts beyond are read again for each policy."""


class Readings:
    """What a model has read of the prompts of one task.

    Args:
        model: what reads.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._held: dict[Hashable, Reading] = {}
        # Those whose needs widened what is recorded.
        self._policies: list[Policy] = []

    def clear(self) -> None:
        """Let go of all of it."""
        self._held.clear()

    def compress(self, policy: Policy, key: Hashable, inputs: Any, question: Any = None) -> Context:
        """Return ``policy.compress(model, inputs, question)``, from what was read for another policy where that serves.

        Args:
            policy: what to keep.
            key: what tells these inputs and this question from others.
            inputs: as of `Policy.compress`.
            question: likewise.
        """
        reading = self._held.get(key)
        if reading is not None and reading.serves(policy):
            return reading.compress(policy)
        if policy.needs != policy.needs.lasting or (reading is not None and reading.derived):
            return policy.compress(self._model, inputs, question)
        self._policies.append(policy)
        reading = read(self._model, inputs, question, policies=self._policies)
        self._held.pop(key, None)
        if sum(one.bytes for one in self._held.values()) + reading.bytes <= LIMIT:
            self._held[key] = reading
        return reading.compress(policy) if reading.serves(policy) else policy.compress(self._model, inputs, question)
