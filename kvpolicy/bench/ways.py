"""Ways to hold a prompt: nothing but the model itself, and a policy. Others may be compared with them."""

from __future__ import annotations

import kvpolicy.compat  # noqa: F401  (first: it says so where transformers is too old for the rest)

# isort: split
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvpolicy.policy import Policy
from kvpolicy.report import STAGES
from kvpolicy.store.layer import EvictingLayer


class Way(Protocol):
    """What a model runs within, while it reads a prompt into an empty cache and while it decodes from there."""

    @property
    def name(self) -> str:
        """What tables call it."""

    def reading(self) -> AbstractContextManager[Any]:
        """Return what a prompt is read within."""

    def decoding(self) -> AbstractContextManager[Any]:
        """Return what a token is read within, by the cache of the latest prompt."""

    def stages(self) -> dict[str, float]:
        """Return the seconds that each stage has taken, for the latest prompt and the tokens since."""


class Bare:
    """The model as it is, with a cache that keeps everything.

    Args:
        name: what tables call it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def reading(self) -> AbstractContextManager[Any]:
        """Return nothing to read within."""
        return nullcontext()

    def decoding(self) -> AbstractContextManager[Any]:
        """Likewise."""
        return nullcontext()

    def stages(self) -> dict[str, float]:
        """Return no seconds."""
        return dict.fromkeys(STAGES, 0.0)


class Under:
    """A model under a policy.

    Args:
        policy: what is kept.
        model: that runs under it.
    """

    def __init__(self, policy: Policy, model: PreTrainedModel) -> None:
        self.name = policy.name
        self.policy = policy
        self._session = policy.on(model)

    def reading(self) -> AbstractContextManager[Any]:
        """Return the session, which may be entered again."""
        return self._session

    def decoding(self) -> AbstractContextManager[Any]:
        """Likewise."""
        return self._session

    def stages(self) -> dict[str, float]:
        """Return what the report says."""
        return self._session.report.stopwatch.seconds()


def stored(cache: DynamicCache) -> int:
    """Return the bytes of keys and values that a cache holds, read from storage, slack included.

    >>> import torch
    >>> from kvpolicy.testing.models import tiny
    >>> cache = tiny()(torch.arange(8)[None]).past_key_values
    >>> stored(cache)  # 3 layers, 2 heads, 8 slots of 2 * 8 numbers
    3072
    """
    return sum(_stored(layer) for layer in cache.layers)


def _stored(layer: Any) -> int:
    if isinstance(layer, EvictingLayer):
        return 0 if layer.store is None else layer.store.nbytes[0]
    return sum(part.untyped_storage().nbytes() for part in (layer.keys, layer.values) if part is not None)
