"""The oracle for any architecture: a stock cache, transformers' own attention, and a mask that hides what is evicted.

It stands where the model looks for its attention function: the entry "sdpa", and the name `eager_attention_forward` of
the modules that define the model. So the model keeps its own implementation and its own masks, and nothing of capture,
store, attend or session takes part. Which cache layer a call belongs to is read from the keys: those that the layer's
`update` returned, or else those of the layer updated last (as where a latent is expanded into keys).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_EAGER = "eager_attention_forward"


@dataclass(frozen=True)
class Seen:
    """What one layer attended with in the prompt."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float | None
    as_cached: bool
    """Whether these keys and values are the cached ones, and not derived from them."""


class HidingCache(DynamicCache):
    """A stock cache that tells which of its layers an attention call belongs to, and what that call may see.

    Args:
        config: of the model.
        keep: by layer, bool ``[B, H, prompt]``: what of the prompt later queries see; H is 1 or the key heads.

    Set `in_prompt` to False once the prompt is read.
    """

    def __init__(self, config: Any, keep: dict[int, Tensor]) -> None:
        super().__init__(config=config)
        self.keep = keep
        self.in_prompt = True
        self.prompt: dict[int, Seen] = {}
        self._handed: dict[int, tuple[Tensor, Tensor]] = {}
        self._last = -1

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Update a layer, and remember what it handed out."""
        handed = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._handed[layer_idx] = handed
        self._last = layer_idx
        return handed

    def layer_of(self, keys: Tensor) -> int | None:
        """Return the layer that `keys` come from; None where they come from none, as in a vision tower."""
        for layer, (handed, _) in self._handed.items():
            if keys.data_ptr() == handed.data_ptr():
                return layer
        last = self._handed.get(self._last)
        return self._last if last is not None and last[0].shape[2] == keys.shape[2] else None

    def attend(
        self,
        own: Callable[..., Any],
        additive: bool,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return what the model's `own` attention function gives, which wants an `additive` mask or a bool one."""
        layer = self.layer_of(key)
        if layer is not None and self.in_prompt:
            cached = [tensor.data_ptr() for tensor in self._handed[layer]]
            as_cached = cached == [key.data_ptr(), value.data_ptr()]
            self.prompt.setdefault(layer, Seen(query, key, value, kwargs.get("scaling"), as_cached))
        elif layer is not None and layer in self.keep:
            attention_mask = hide(attention_mask, self.keep[layer], query, key, additive=additive)
        return own(module, query, key, value, attention_mask, *args, **kwargs)


def hide(mask: Tensor | None, keep: Tensor, query: Tensor, key: Tensor, *, additive: bool) -> Tensor:
    """Return a model's attention mask with the columns hidden that are not kept.

    Args:
        mask: the model's own; None means causal.
        keep: bool ``[B, H, slots]``, of the first slots; H is 1 or the key heads. Later slots are kept.
        query: ``[B, Hq, q, D]``.
        key: ``[B, Hkv, T, D]``.
        additive: whether the attention function wants numbers to add, where there is no mask to follow.
    """
    heads, length = query.shape[1:3]
    total = key.shape[2]
    shown = torch.cat([keep, keep.new_ones(*keep.shape[:2], total - keep.shape[2])], dim=-1)
    shown = shown.repeat_interleave(heads // shown.shape[1], dim=1)[:, :, None]
    if mask is None:
        mask = torch.ones(length, total, dtype=torch.bool).tril(total - length)
    if mask.dtype == torch.bool:
        shown = shown & mask
        return torch.zeros((), dtype=query.dtype).where(shown, torch.finfo(query.dtype).min) if additive else shown
    return mask.where(shown, torch.finfo(mask.dtype).min)


@contextmanager
def hiding(model: PreTrainedModel, cache: HidingCache) -> Iterator[None]:
    """Let every attention call of `model` pass through `cache`; undone at the end."""

    names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    homes = [sys.modules[name] for name in names if hasattr(sys.modules[name], _EAGER)]
    eager = [(home, getattr(home, _EAGER)) for home in homes]
    for home, own in eager:
        setattr(home, _EAGER, partial(cache.attend, own, True))
    ALL_ATTENTION_FUNCTIONS["sdpa"] = partial(cache.attend, ALL_ATTENTION_FUNCTIONS["sdpa"], False)
    try:
        yield
    finally:
        for home, own in eager:
            setattr(home, _EAGER, own)
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
