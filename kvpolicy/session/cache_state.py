"""A whole cache as a `State`, and back into the layers of an empty one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvpolicy.errors import ContextError
from kvpolicy.session.layers import prepare, take_over
from kvpolicy.session.run import CacheRun
from kvpolicy.store.layer import EvictingLayer
from kvpolicy.store.state import State, attributes, give


def cache_state(cache: DynamicCache, run: CacheRun) -> State:
    """Return what a cache and its run hold: every layer, evicting or not.

    Raises:
        ContextError: when a file cannot hold it.
    """
    state = State({}, {"layers": len(cache.layers)}) | run.state().inside("run")
    for index, layer in enumerate(cache.layers):
        state |= _of_layer(layer).inside(f"layer.{index}")
    return state


def restored(state: State, decoder: PreTrainedModel, run: CacheRun) -> DynamicCache:
    """Return a cache of `run` that holds what another one of the same decoder held, where the decoder computes.

    Raises:
        ContextError: when this release of transformers makes other layers.
    """
    cache = DynamicCache(config=decoder.config)
    take_over(cache, prepare(cache, decoder.config), run)
    if len(cache.layers) != state.plain["layers"]:
        raise ContextError(f"expected a cache of {len(cache.layers)} layers, got {state.plain['layers']}")
    devices = _devices(decoder)
    for index, layer in enumerate(cache.layers):
        device = devices.get(index, decoder.device)
        part = state.part(f"layer.{index}")
        part = State({name: tensor.to(device) for name, tensor in part.tensors.items()}, part.plain)
        if part.plain["kind"] != type(layer).__name__:
            raise ContextError(
                f"layer {index}: expected a {type(layer).__name__}, as this release of transformers makes it, got a "
                f"{part.plain['kind']}"
            )
        if isinstance(layer, EvictingLayer):
            layer.restore(part)
        else:
            give(layer, part.part("held"))
    run.restore(state.part("run"), cache)
    return cache


def disown(cache: DynamicCache) -> None:
    """Copy what the layers that do not evict hold out of the larger tensors of which it is a part."""
    for layer in cache.layers:
        if not isinstance(layer, EvictingLayer):
            parts = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
            vars(layer).update({name: part.clone() for name, part in parts.items()})


def _of_layer(layer: Any) -> State:
    if isinstance(layer, EvictingLayer):
        return layer.state()
    return State({}, {"kind": type(layer).__name__}) | attributes(layer, sorted(vars(layer))).inside("held")


def _devices(decoder: PreTrainedModel) -> dict[int, torch.device]:
    """Return where each layer computes, by index; those that nobody says are missing."""
    found = {}
    for module in decoder.modules():
        index, weight = getattr(module, "layer_idx", None), next(module.parameters(), None)
        if isinstance(index, int) and weight is not None:
            found[index] = weight.device
    return found
