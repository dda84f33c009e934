"""The decoder inside a model, and how its forward takes a cache."""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeGuard

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from kvpolicy.compat import CACHE_NAMES
from kvpolicy.errors import UnsupportedModelError


def find_decoders(model: nn.Module) -> list[PreTrainedModel]:
    """Return the innermost transformers models inside `model` that take a cache.

    Raises:
        UnsupportedModelError: when there is none.
    """
    if not isinstance(model, nn.Module):
        inner = "; its .model is one" if isinstance(getattr(model, "model", None), nn.Module) else ""
        raise UnsupportedModelError(f"model: expected a transformers model, got {type(model).__name__}{inner}")
    if any(isinstance(module, PreTrainedModel) and module.config.is_encoder_decoder for module in model.modules()):
        raise UnsupportedModelError(f"model: expected a decoder, got the encoder-decoder {type(model).__name__}")
    if any(getattr(module.config, "add_cross_attention", False) for module in model.modules() if _is_model(module)):
        raise UnsupportedModelError(f"model: expected a decoder alone, got {type(model).__name__} with cross-attention")
    takers = [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and set(CACHE_NAMES) & set(forward_names(module))
    ]
    found = [taker for taker in takers if not any(inner in takers for inner in taker.modules() if inner is not taker)]
    own = sorted({type(module).__name__ for module in model.modules() if _has_own_cache(module)})
    if own:
        raise UnsupportedModelError(
            f"model: expected one that caches in a DynamicCache, got {', '.join(own)}, with a cache of its own or none"
        )
    if not found:
        raise UnsupportedModelError(
            f"model: expected a transformers decoder (a forward that takes a cache), got {type(model).__name__}"
        )
    return found


def _is_model(module: nn.Module) -> TypeGuard[PreTrainedModel]:
    return isinstance(module, PreTrainedModel)


def _has_own_cache(module: nn.Module) -> bool:
    # Reads nothing but the class. Such a model fails with a DynamicCache, however deep inside.
    mixin: Any = GenerationMixin
    supports = mixin._supports_default_dynamic_cache.__func__
    return isinstance(module, PreTrainedModel) and not supports(type(module))


def forward_names(model: nn.Module) -> tuple[str, ...]:
    """Return the parameter names of a module's forward, in order, without self."""
    kind: Any = type(model)
    return _names(kind)


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def cache_name(model: PreTrainedModel) -> str:
    """Return what the forward of a model that takes a cache calls it."""
    return next(name for name in CACHE_NAMES if name in forward_names(model))


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a module's forward by name."""
    return dict(zip(forward_names(module), args, strict=False)) | kwargs


def cache_in(given: dict[str, Any]) -> Any:
    """Return the cache among a call's arguments, or None."""
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)


def uses_cache(decoder: PreTrainedModel, given: dict[str, Any]) -> bool:
    """Return whether a call without a cache would make one."""
    asked = given.get("use_cache")
    return bool(getattr(decoder.config, "use_cache", True) if asked is None else asked)
