"""Drift: how far a model with an evicted cache strays from the same model with the full one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvpolicy.policy import Policy
from kvpolicy.session.inputs import Tokens, forward_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvpolicy.session.context import Context


@dataclass(frozen=True)
class Drift:
    """What each token of a continuation shows, by batch row.

    Args:
        kl: float64 ``[B, n]``, the KL divergence of the evicted cache's next-token distribution from the full
            cache's, in nats; 0 where they are the same.
        agrees: bool ``[B, n]``, whether both find the same token the most likely.
    """

    kl: Tensor
    agrees: Tensor

    @property
    def mean(self) -> float:
        """Mean divergence, in nats a token."""
        return float(self.kl.mean())

    @property
    def agreement(self) -> float:
        """Share of the tokens at which both find the same one the most likely."""
        return float(self.agrees.double().mean())


def drift(
    model: PreTrainedModel, policy: Policy, ids: Tensor, continuation: Tensor, *, full: Tensor | None = None
) -> Drift:
    """Return the drift over a continuation of what `policy` keeps of a prompt.

    The continuation is the text's own, not what the model would say, so that both caches are asked the same.

    Args:
        model: a causal language model.
        policy: what to keep; it decides from the prompt alone.
        ids: the prompt, int64 ``[B, T]``, without padding.
        continuation: the tokens after it, int64 ``[B, n]``.
        full: what `full_logits` returns for these, where several policies share it; computed when it is not given.
    """
    if full is None:
        full = full_logits(model, ids, continuation)
    return compare(full, evicted_logits(model, policy, ids, continuation))


def full_logits(model: PreTrainedModel, ids: Tensor, continuation: Tensor) -> Tensor:
    """Return what the model predicts after each token of the continuation with the full cache, ``[B, n, V]``."""
    count, ids = continuation.shape[1], torch.cat([ids, continuation], dim=1)
    given = forward_arguments(model, Tokens(ids, torch.ones_like(ids)), {}, last=count)
    with torch.no_grad():
        return model(**given).logits[:, -count:]


def evicted_logits(model: PreTrainedModel, policy: Policy, ids: Tensor, continuation: Tensor) -> Tensor:
    """Return the same with what `policy` keeps of the prompt, ``[B, n, V]``: see `evicted`."""
    return evicted(policy.compress(model, ids), continuation).logits


@dataclass(frozen=True)
class Evicted:
    """What a model predicts with an evicted cache.

    Args:
        logits: ``[B, n, V]``, after each token of the continuation.
        bytes: of keys and values that were kept of the prompt.
        bytes_full: that a full cache would hold of it.
    """

    logits: Tensor
    bytes: int
    bytes_full: int


def evicted(context: Context, continuation: Tensor) -> Evicted:
    """Return what a model predicts after each token of the continuation with what a policy keeps of the prompt.

    The token after the prompt is predicted before anything is evicted, so the first prediction here is that of the
    continuation's second token. The continuation is one forward pass: the policy acts again only once all of it has
    attended, so its every token sees the slots kept of the prompt and the tokens before it, as it would one by one.

    Args:
        context: of the prompt.
        continuation: the tokens after it, int64 ``[B, n]``.
    """
    with context.fork() as fork:
        return Evicted(fork.logits(continuation), context.report.bytes, context.report.bytes_full)


def perplexity(logits: Tensor, continuation: Tensor) -> float:
    """Return the perplexity of the continuation's tokens after its first, ``exp(mean of -log p(token))``.

    Args:
        logits: ``[B, n, V]``, after each token of the continuation.
        continuation: int64 ``[B, n]``, n at least 2.

    >>> round(perplexity(torch.zeros(1, 3, 8), torch.tensor([[1, 2, 3]])), 9)
    8.0
    """
    chances = logits[:, :-1].double().log_softmax(-1)
    return float((-chances.gather(-1, continuation[:, 1:, None])).mean().exp())


def compare(full: Tensor, evicted: Tensor) -> Drift:
    """Return the drift between two sets of logits, ``[B, n, V]`` each."""
    # In float64: where the two are alike, the divergence is the difference of nearly equal numbers.
    expected, found = (logits.double().log_softmax(-1) for logits in (full, evicted))
    return Drift(kl=(expected.exp() * (expected - found)).sum(-1), agrees=full.argmax(-1) == evicted.argmax(-1))
