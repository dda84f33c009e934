"""Memory, counted from the tensors themselves: equal runs give equal numbers."""

from __future__ import annotations

import kvpolicy.compat  # noqa: F401  (first: it says so where transformers is too old for the rest)

# isort: split
import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvpolicy.analysis.views import views
from kvpolicy.bench.rounds import forward
from kvpolicy.bench.subject import Subject
from kvpolicy.bench.ways import Way, stored
from kvpolicy.policy import Policy
from kvpolicy.session.layers import evicting_layers
from kvpolicy.store.layer import EvictingLayer
from kvpolicy.testing.checks.memory import peak
from kvpolicy.types import LayerView, Needs


@dataclass(frozen=True)
class Holding:
    """What a cache holds at one moment.

    Args:
        bytes: of keys and values, read from storage.
        slots: that the slots held would take without slack.
        layer: of `slots`, those of the largest layer.
        ragged: whether heads of a layer hold different numbers of slots.
    """

    bytes: int
    slots: int
    layer: int
    ragged: bool


def holding(cache: DynamicCache) -> Holding:
    """Return what a cache holds now.

    >>> import torch
    >>> from kvpolicy.bench.rounds import forward
    >>> from kvpolicy.testing.models import tiny
    >>> cache = DynamicCache()
    >>> forward(tiny(), torch.arange(8)[None], cache)
    >>> holding(cache)  # 3 layers, 2 heads, 8 slots of 2 * 8 numbers
    Holding(bytes=3072, slots=3072, layer=1024, ragged=False)
    """
    slots = [_slots(layer) for layer in cache.layers]
    stores = [layer.store for layer in evicting_layers(cache)]
    return Holding(stored(cache), sum(slots), max(slots), any(store is not None and store.ragged for store in stores))


def _slots(layer: Any) -> int:
    if isinstance(layer, EvictingLayer):
        return layer.slot_bytes * sum(map(sum, layer.kept))
    return sum(part.nbytes for part in (layer.keys, layer.values) if part is not None)


def peaks(subject: Subject, way: Way, context: int) -> tuple[int, int]:
    """Return two peaks of one prompt: bytes that the cache held, and those of all tensors alive at once.

    The cache is looked at whenever a layer has added its new tokens, and so before it evicts. What the pass finds there
    already, the weights, does not count.
    """
    cache = DynamicCache(config=subject.model.config)
    update, most = cache.update, 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal most
        found = update(*args, **kwargs)
        most = max(most, stored(cache))
        return found

    cache.update = watched  # type: ignore[method-assign]
    with way.reading():
        alive = peak(lambda: forward(subject.model, subject.prompt(context), cache), there=subject.model.parameters())
    return most, alive


def scoring(subject: Subject, policies: Sequence[Policy], context: int) -> list[int]:
    """Return for each policy the bytes of all tensors alive at once while it decides on one layer of a prompt.

    The layer's keys and values are there already and do not count.
    """
    needs = functools.reduce(operator.or_, (policy.needs for policy in policies), Needs())
    every = views(subject.model, subject.prompt(context), needs)
    view = every[0]
    budgets = [policy.layer_slots(view.seen, len(every))[:, 0] for policy in policies]
    del every
    return [
        peak(partial(policy.plan_layer, view, tokens), there=_tensors(view))
        for policy, tokens in zip(policies, budgets, strict=True)
    ]


def _tensors(view: LayerView) -> list[Tensor]:
    return [value for field in fields(view) if isinstance(value := getattr(view, field.name), Tensor)]
