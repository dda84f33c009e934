"""`Footprint`: the bytes that a context takes in a model's cache, in full or under a policy, and what follows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from kvpolicy.analysis.devices import Device, PlanError
from kvpolicy.analysis.shape import LayerShape, ModelShape
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.plugin import Store
from kvpolicy.policy import Policy
from kvpolicy.store.dense import DenseStore
from kvpolicy.store.settings import Offloaded, Plain, Quantized

STORES: tuple[Store, ...] = (Plain(), Quantized(bits=8), Quantized(bits=4), Offloaded())
"""Ways to store what is kept that are compared."""


@dataclass(frozen=True)
class LayerBytes:
    """What one layer holds of one sequence.

    Args:
        slots: stored in each KV head, mean over heads.
        bytes: of keys and values, ends of quantized groups included; what a report calls so.
        index_bytes: of the positions of the slots.
        state_bytes: of recurrent and convolution states.
        offloaded: whether all but the states is in the CPU's memory.
        working: bytes that the layer's keys and values take while it attends to them, where they are made anew.
    """

    slots: int
    bytes: int
    index_bytes: int = 0
    state_bytes: int = 0
    offloaded: bool = False
    working: int = 0

    @property
    def host(self) -> int:
        """Bytes in the CPU's memory."""
        return self.bytes + self.index_bytes if self.offloaded else 0

    @property
    def device(self) -> int:
        """Bytes in the memory of the model's device."""
        return self.bytes + self.index_bytes + self.state_bytes - self.host


@dataclass(frozen=True)
class Footprint:
    """What one sequence's cache holds right after a prompt.

    Args:
        store: how what is kept is stored; None where everything is kept, as by transformers itself.
        layers: of the cache.
    """

    store: Store | None
    layers: tuple[LayerBytes, ...]

    @cached_property
    def device(self) -> int:
        """Bytes in the memory of the model's device."""
        return sum(layer.device for layer in self.layers)

    @cached_property
    def host(self) -> int:
        """Bytes in the CPU's memory."""
        return sum(layer.host for layer in self.layers)

    @cached_property
    def total(self) -> int:
        """Bytes in both."""
        return self.device + self.host

    @cached_property
    def working(self) -> int:
        """Bytes on the model's device while a layer attends: the largest one's, as one attends at a time."""
        return max((layer.working for layer in self.layers), default=0)

    def sequences(self, model: ModelShape, device: Device) -> int:
        """Return how many sequences fit beside the weights: ``(memory - weights) // (bytes + working)``."""
        return max(device.memory - model.bytes, 0) // (self.device + self.working)

    @cached_property
    def bytes(self) -> int:
        """Bytes of keys and values, wherever they are."""
        return sum(layer.bytes for layer in self.layers)

    @cached_property
    def index_bytes(self) -> int:
        """Bytes of positions, wherever they are."""
        return sum(layer.index_bytes for layer in self.layers)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of recurrent and convolution states."""
        return sum(layer.state_bytes for layer in self.layers)

    def seconds(self, model: ModelShape, device: Device, batch: int) -> float | None:
        """Return the least time of decoding one token of each of `batch` sequences, None where it is not known.

        ``(weights read + batch * bytes read) / bandwidth``; what lies in the CPU's memory comes over the link first.
        """
        if device.bandwidth is None or (self.host and device.link is None):
            return None
        over_link = batch * self.host / device.link if self.host and device.link else 0.0
        return (model.read + batch * self.total) / device.bandwidth + over_link


def full_footprint(model: ModelShape, context: int) -> Footprint:
    """Return what a cache that keeps everything holds.

    Args:
        model: whose cache.
        context: tokens seen.
    """
    _require_context(context)
    return Footprint(None, tuple(_whole(layer, context) for layer in model.layers))


def kept_footprint(model: ModelShape, policy: Policy, context: int, store: Store | None = None) -> Footprint:
    """Return what a cache holds under a policy, right after the prompt.

    Bytes are those of the store itself, made of tensors without numbers. Of heads that keep different numbers of slots,
    only their mean is known beforehand, and the store of a layer whose heads all keep that many.

    Args:
        model: whose cache.
        policy: what keeps.
        context: tokens seen.
        store: how, instead of the policy's own way.

    Raises:
        UnsupportedModelError: when the model has no layer to evict from.

    >>> import kvpolicy
    >>> from kvpolicy.analysis.shape import model_shape
    >>> from kvpolicy.testing.models import tiny
    >>> model = model_shape(tiny().config)
    >>> kept = kept_footprint(model, kvpolicy.load("snapkv", budget=64), context=256)
    >>> [(layer.slots, layer.bytes, layer.index_bytes) for layer in kept.layers][0]
    (64, 4096, 512)
    """
    _require_context(context)
    evictable = [index for index, layer in enumerate(model.layers) if layer.evictable]
    if not evictable and not policy.trivial:
        raise UnsupportedModelError(
            f"policy '{policy.name}' could not act on {model.name}: it has no full-attention layer to evict from"
        )
    hold = policy.store if store is None else store
    slots = policy.layer_slots(torch.tensor([context]), len(evictable))[0].tolist() if evictable else []
    budgets = dict(zip(evictable, slots, strict=True))
    return Footprint(
        hold,
        tuple(
            _kept(layer, budgets[index], context, hold) if index in budgets else _whole(layer, context)
            for index, layer in enumerate(model.layers)
        ),
    )


def footprints(model: ModelShape, policy: Policy, context: int, stores: Iterable[Store] = STORES) -> list[Footprint]:
    """Return the footprint of everything, then those of what the policy keeps, in its own store and in others."""
    every = [policy.store, *(store for store in stores if store != policy.store)]
    return [full_footprint(model, context), *(kept_footprint(model, policy, context, store) for store in every)]


def _require_context(context: int) -> None:
    if context < 1:
        raise PlanError(f"context: expected at least 1 token, got {context}")


def _whole(layer: LayerShape, context: int) -> LayerBytes:
    slots = context if layer.window is None else min(context, layer.window)
    slots = slots if layer.heads else 0
    of_slot = layer.heads * (layer.key_size + layer.value_size) * layer.dtype.itemsize + layer.token_bytes
    return LayerBytes(slots, slots * of_slot, state_bytes=layer.state_bytes)


def _kept(layer: LayerShape, slots: int, context: int, hold: Store) -> LayerBytes:
    if not layer.heads:
        return _whole(layer, context)
    plain = _dense(layer, slots, whole=slots == context)
    # Nothing can be copied to the CPU that has no numbers: what is offloaded is as it is.
    offloaded = isinstance(hold, Offloaded)
    numbers, index = (plain if offloaded else hold(plain)).nbytes
    working = 0 if isinstance(hold, Plain) else sum(plain.nbytes)
    return LayerBytes(slots, numbers, index, layer.state_bytes, offloaded, working)


def _dense(layer: LayerShape, slots: int, *, whole: bool) -> DenseStore:
    """Return a store of so many slots a head, without numbers; of the `whole` context it needs no positions."""
    shape = 1, layer.heads, slots
    keys, values = (
        torch.empty(*shape, size, dtype=layer.dtype, device="meta") for size in (layer.key_size, layer.value_size)
    )
    return DenseStore(keys, values, None if whole else torch.empty(shape, dtype=torch.int32, device="meta"))
