"""The attention function and its mask twin, registered under our own names while a session is active.

The function computes nothing by itself where it can hand over: it cuts the mask to the slots each head holds, and
calls the attention function that the model had chosen.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.step import Attended, Step, step_of

PREFIX = "kvpolicy_"
SUPPORTED = ("sdpa", "eager")

# Keywords that change the scores themselves: with one of them, only the model's own function is right.
_SPECIAL = ("softcap", "s_aux", "position_bias", "sliding_window")

_lock = threading.Lock()
_switched: dict[int, list[Any]] = {}
"""Configs switched to our names: id -> [config, its own implementation, sessions that need it]."""


def switch(config: Any) -> None:
    """Make the models that read `config` attend through kvpolicy; undone by as many calls of `restore`.

    Raises:
        UnsupportedModelError: when the config's attention implementation cannot be taken over.
    """
    with _lock:
        if id(config) in _switched:
            _switched[id(config)][2] += 1
            return
        own = config._attn_implementation
        if own not in SUPPORTED:
            raise UnsupportedModelError(
                f"attention implementation {own!r}: expected one of {', '.join(SUPPORTED)}. "
                "Load the model with attn_implementation='sdpa'."
            )
        AttentionInterface.register(PREFIX + own, partial(attention, own))
        AttentionMaskInterface.register(PREFIX + own, ALL_MASK_ATTENTION_FUNCTIONS[own])
        # The mapping form leaves sub-configs (a vision tower's) as they are.
        config._attn_implementation = {"": PREFIX + own}
        _switched[id(config)] = [config, own, 1]


def restore(config: Any) -> None:
    """Undo one `switch`; the last one gives `config` its own implementation back and leaves no name registered."""
    with _lock:
        entry = _switched[id(config)]
        entry[2] -= 1
        if entry[2]:
            return
        del _switched[id(config)]
        config._attn_implementation = {"": entry[1]}
        if all(entry[1] != other for _, other, _ in _switched.values()):
            # transformers offers `register` and no way back.
            AttentionInterface._global_mapping.pop(PREFIX + entry[1])
            AttentionMaskInterface._global_mapping.pop(PREFIX + entry[1])


def attention(
    implementation: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention output ``[B, q, Hq, Dv]``, and the weights where `implementation` gives them."""
    own = _own_function(implementation, module)
    step = step_of(key, module)
    if step is None:
        return own(module, query, key, value, attention_mask, **kwargs)
    scaling = kwargs.get("scaling")
    derived = (key, value) if step.derived(key, value) else None
    if _one_by_one(implementation, step, query, attention_mask, kwargs):
        output = _head_by_head(step, query, scaling)
        step.attended(Attended(query, scaling))
        return output, None
    positions = step.positions
    if step.store.ragged and derived is None:
        key, value, positions = step.store.padded()
    call = _Call(implementation, own, module, kwargs)
    if step.cut is None:
        stored = key, value, positions
        result = _read(call, query, stored, attention_mask, start=step.start, gaps=step.store.ragged)
        step.attended(Attended(query, scaling, derived))
        return result
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModelError("drafts in one pass with the prompt: not with a position bias of the model's own")
    # The pass goes on after it evicts: the queries from there on see what was kept and each other, no more.
    cut, held = step.cut, key.shape[2] - query.shape[2] + step.cut
    point = step.start + cut
    if positions is None:
        positions = _order(key)
    before, old = query[:, :, :cut], (key[:, :, :held], value[:, :, :held])
    rows = attention_mask if attention_mask is None else attention_mask[:, :, :cut, :point]
    places = positions[:, :, :held]
    first, _ = _read(call, before, (*old, places), rows, start=step.start, gaps=step.store.ragged)
    kept = step.attended(Attended(before, scaling, None if derived is None else old))
    rows = attention_mask if attention_mask is None else attention_mask[:, :, cut:]
    stored = key, value, positions if kept is None else positions.where(kept, -1)
    second, _ = _read(call, query[:, :, cut:], stored, rows, start=point, gaps=True)
    return torch.cat([first, second], dim=1), None


@dataclass(frozen=True)
class _Call:
    """One call of the attention function: what it was handed besides tensors, and the model's own function."""

    implementation: str
    own: Callable[..., Any]
    module: torch.nn.Module
    kwargs: dict[str, Any]


def _read(
    call: _Call,
    query: Tensor,
    stored: tuple[Tensor, Tensor, Tensor | None],
    mask: Tensor | None,
    *,
    start: int,
    gaps: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the output of the model's own function over the slots that are held.

    Args:
        call: what else there is.
        query: ``[B, Hq, q, Dk]``.
        stored: keys, values and positions, int32 ``[B, Hkv, T]``, None where slot t is position t.
        mask: the model's own, over all tokens seen.
        start: tokens seen before the first of these queries.
        gaps: whether some slots may be empty or evicted (position -1).
    """
    key, value, positions = stored
    kwargs = call.kwargs
    several = query.shape[2] > 1
    if positions is None and mask is None and several and start:
        # Not every implementation aligns several queries at the last key by itself.
        positions = _order(key)
    biased = kwargs.get("position_bias") is not None
    # One new token sees every slot of heads alike in length: without a mask there is nothing to cut.
    if positions is not None and (mask is not None or several or gaps or biased):
        mask = cut_mask(mask, positions, start, query, call.implementation)
        if biased:
            kwargs = {**kwargs, "position_bias": _columns(kwargs["position_bias"], positions, query.shape[1])}
    output: tuple[Tensor, Tensor | None] = call.own(call.module, query, key, value, mask, **kwargs)
    return output


def _order(key: Tensor) -> Tensor:
    """Return the positions of keys of which none is gone, int32 ``[B, Hkv, T]``."""
    return torch.arange(key.shape[2], dtype=torch.int32, device=key.device).expand(key.shape[:3])


def _own_function(implementation: str, module: torch.nn.Module) -> Callable[..., Any]:
    if implementation == "eager":
        homes = (sys.modules[kind.__module__] for kind in type(module).__mro__)
        return next(home.eager_attention_forward for home in homes if hasattr(home, "eager_attention_forward"))
    return ALL_ATTENTION_FUNCTIONS[implementation]


def cut_mask(mask: Tensor | None, positions: Tensor, start: int, query: Tensor, implementation: str) -> Tensor:
    """Return the mask for the slots that are held, ``[B, Hq, q, T]``: bool, True where visible, or additive.

    Args:
        mask: the model's own, ``[B, 1 or Hq, q, tokens seen]``, bool or additive; None means causal.
        positions: int32 ``[B, Hkv, T]`` of the slots held, -1 where empty.
        start: tokens seen before these queries.
        query: ``[B, Hq, q, Dk]``.
        implementation: "eager" wants an additive mask, the others a bool one.
    """
    query_heads, length = query.shape[1:3]
    seen = start + length
    if mask is None:
        ahead = torch.arange(start, seen, device=query.device)
        cut = (positions[:, :, None] >= 0) & (positions[:, :, None] <= ahead[:, None])
    elif mask.shape[-1] != seen:
        raise UnsupportedModelError(
            f"attention mask: expected {seen} columns (tokens seen), got {mask.shape[-1]}: the model cuts it to "
            "the slots it holds by itself, as if they were the first tokens"
        )
    else:
        cut = _columns(mask, positions, query_heads)
    if cut.dtype == torch.bool and implementation == "eager":
        cut = torch.zeros((), dtype=query.dtype, device=query.device).where(cut, torch.finfo(query.dtype).min)
    return cut.repeat_interleave(query_heads // cut.shape[1], dim=1)


def _columns(mask: Tensor, positions: Tensor, query_heads: int) -> Tensor:
    heads = positions.shape[1]
    if mask.shape[1] not in (1, heads):
        positions = positions.repeat_interleave(query_heads // heads, dim=1)
        heads = query_heads
    batch = len(positions)
    rows = mask.shape[2]
    index = positions.clamp(min=0).long()[:, :, None].expand(-1, -1, rows, -1)
    taken = mask.expand(batch, heads, rows, -1).gather(-1, index)
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return taken.where(positions[:, :, None] >= 0, hidden)


def _one_by_one(implementation: str, step: Step, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    plain = all(kwargs.get(name) is None for name in _SPECIAL) and not kwargs.get("dropout")
    # A mask that is additive under sdpa is the model's own: a bias that only its own function adds.
    unbiased = mask is None or mask.dtype == torch.bool
    one = query.shape[2] == 1 and query.device.type == "cpu"
    return one and step.store.ragged and implementation == "sdpa" and step.plain and plain and unbiased


def _head_by_head(step: Step, query: Tensor, scaling: float | None) -> Tensor:
    # Each KV head's own slots, its group's queries side by side: on a CPU faster than padding the heads to one length.
    batch, query_heads, _, size = query.shape
    keys, values = step.store.heads()
    groups = query.reshape(len(keys), -1, size).unbind(0)
    outputs = [
        scaled_dot_product_attention(group[None], k[None], v[None], scale=scaling)
        for group, k, v in zip(groups, keys, values, strict=True)
    ]
    return torch.cat(outputs).view(batch, 1, query_heads, -1)
