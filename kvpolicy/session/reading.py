"""`Reading`: a text that a model has read once, for any number of policies to compress."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from kvpolicy.errors import ContextError, PolicyError
from kvpolicy.plugin import settings
from kvpolicy.policy import Budget, Policy
from kvpolicy.session import Session
from kvpolicy.session.context import Context
from kvpolicy.session.fork import Held
from kvpolicy.session.layers import evicting_layers
from kvpolicy.session.prefill import decoder_of, prefill, told
from kvpolicy.types import LayerView, Needs
from kvpolicy.window import Window


@settings
class _Reads:
    """A scorer that nothing is ever scored by; it says what is to be recorded."""

    name = "reading"
    role = "other"
    recorded: Needs

    @property
    def needs(self) -> Needs:
        return self.recorded

    def __call__(self, view: LayerView) -> Tensor:
        raise NotImplementedError("a reading evicts nothing")


def read(model: nn.Module, inputs: Any, question: Any = None, *, policies: Sequence[Policy]) -> Reading:
    """Return a text read once, which each of `policies` can compress as if it had been read under it.

    What a policy keeps of a prompt does not change how the prompt is read. So many policies cost one forward pass, and
    the memory of a full cache for as long as the reading lives.

    Args:
        model: any transformers decoder.
        inputs: as of `Policy.compress`.
        question: likewise.
        policies: what scores, budgets and selectors of these read is kept; at least one.

    Raises:
        ContextError: when inputs or question are wrong.
        UnsupportedModelError: when one of the policies cannot act on the model.

    >>> import torch, kvpolicy
    >>> from kvpolicy.testing.models import tiny
    >>> policies = [kvpolicy.load(name, budget=40) for name in ("snapkv", "ecokv-snapkv")]
    >>> reading = kvpolicy.read(tiny(), torch.arange(96), policies=policies)
    >>> [reading.compress(policy).report.bytes for policy in policies]
    [15360, 15360]
    """
    if not policies:
        raise PolicyError("policies: expected at least one, got none")
    # What an attention module is called with does not outlive the pass, nor what it changes, and a repetition is not
    # done for all.
    needs = functools.reduce(operator.or_, (policy.needs.lasting for policy in policies))
    given = told(decoder_of(model), inputs, question)
    reader = Policy(name="reading", score=_Reads(recorded=needs), budget=Budget(tokens=2**31))
    with reader.on(model) as session, session.unfinished():
        held = prefill(session, model, given)
    for layer in evicting_layers(held.cache):
        layer.own()
    return Reading(model, held, needs, aware=question is not None)


class Reading:
    """A text that a model has read once. Made by `kvpolicy.read`.

    Args:
        model: whose cache it is.
        held: the full cache, and the tokens it is of.
        needs: what was recorded besides.
        aware: whether a question was in view.
    """

    def __init__(self, model: nn.Module, held: Held, needs: Needs, *, aware: bool) -> None:
        self._model = model
        self._held = held
        self._needs = needs
        self._aware = aware

    @property
    def bytes(self) -> int:
        """Bytes of keys and values that it holds."""
        return self._held.run.report.bytes

    @property
    def derived(self) -> bool:
        """Whether the model derives what it attends to from what is cached, which is there during the pass alone."""
        return any(bool(layer.shared) for layer in evicting_layers(self._held.cache))

    def serves(self, policy: Policy) -> bool:
        """Return whether `policy` can compress it: what it needs was recorded, and outlives the pass."""
        return self._refusal(policy) is None

    def _refusal(self, policy: Policy) -> str | None:
        """Return why it does not serve `policy`, and what to do."""
        if policy.needs.call:
            return f"the policy reads {Needs(call=True).words}, which does not outlive the pass. Use policy.compress"
        if policy.needs.late:
            return (
                f"the policy reads {policy.needs.of_prompts.words}, which a reading does not hold. Use policy.compress"
            )
        if self.derived and not policy.trivial:
            return "the model derives its keys from what it caches, during the pass alone. Use policy.compress"
        if self._needs | policy.needs != self._needs:
            return (
                f"the policy reads {policy.needs.words}; recorded was: {self._needs.words}. Give it to kvpolicy.read "
                "among `policies`, or use policy.compress"
            )
        return None

    def compress(self, policy: Policy, question: None = None) -> Context:
        """Return what `policy` keeps of it: the same as `policy.compress` of the same inputs.

        Args:
            policy: what decides.
            question: refused: what is in view has been read with the text, so `kvpolicy.read` takes it.

        Raises:
            ContextError: when it does not serve the policy, or is given a question.
        """
        if question is not None:
            raise ContextError(
                "question: expected none, as what is in view is read with the text: give it to kvpolicy.read(model, "
                "inputs, question, policies=...), or, to ask a context that was compressed without it, to its fork"
            )
        if why := self._refusal(policy):
            raise ContextError(f"policy '{policy.name}': expected one that this reading serves: {why}")
        run = self._held.run.of_policy(policy, Session(policy, self._model))
        cache = copy.copy(self._held.cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for layer in evicting_layers(cache):
            layer.owner, layer.window = run, _recorded(layer.window, policy.needs.queries)
        run.settle(cache)
        return Context(policy, self._model, replace(self._held, cache=cache), aware=self._aware)


def _recorded(window: Window | None, count: int) -> Window | None:
    """Return the last `count` queries of a window, as a policy that needs no more would have recorded them."""
    return None if window is None or not count else window.last(count)
