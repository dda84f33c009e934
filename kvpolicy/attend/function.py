"""The attention function: it computes nothing by itself where it can hand over.

It cuts the mask to the slots each head holds, and calls the attention function that the model had chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpolicy.attend.masks import Mask, columns_of, cut, part
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.step import Attended, Step, step_of

# Keywords that change the scores themselves: with one of them, only the model's own function is right.
_SPECIAL = ("softcap", "s_aux", "position_bias", "sliding_window")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    implementation: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
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
        step.attended(Attended(module, query, scaling))
        return output, None
    positions = step.positions
    if step.store.ragged and derived is None:
        key, value, positions = step.store.padded()
    call = _Call(implementation, own, module, kwargs)
    # A module that shares another's keys may ask with the last queries alone.
    unasked = step.new - query.shape[2]
    start = step.start + unasked
    if step.cut is None:
        stored = key, value, positions
        result = _read(call, query, stored, attention_mask, start=start, gaps=step.store.ragged)
        step.attended(Attended(module, query, scaling, derived))
        return result
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModelError("drafts in one pass with the prompt: not with a position bias of the model's own")
    # The pass goes on after it evicts: the queries from there on see what was kept and each other, no more.
    length, point, seen = query.shape[2], step.start + step.cut, step.start + step.new
    cut, held = max(step.cut - unasked, 0), key.shape[2] - step.new + step.cut
    before, after = query.split([cut, length - cut], dim=2)
    old = key[:, :, :held], value[:, :, :held], None if positions is None else positions[:, :, :held]
    outputs = []
    if cut:
        rows = part(attention_mask, 0, cut, point)
        outputs.append(_read(call, before, old, rows, start=start, gaps=step.store.ragged)[0])
    left = step.attended(Attended(module, before, scaling, None if derived is None else old[:2]))
    rows = part(attention_mask, cut, length, seen)
    places = _order(key) if positions is None else positions
    if left is not None:
        places = places.where(left.kept, -1)
        key, value = key if left.keys is None else left.keys, value if left.values is None else left.values
    now = key, value, places
    outputs.append(_read(call, after, now, rows, start=start + cut, gaps=True)[0])
    return torch.cat(outputs, dim=1), None


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
    mask: Mask,
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
        mask = cut(mask, positions, start, query, call.implementation)
        if biased:
            kwargs = {**kwargs, "position_bias": columns_of(kwargs["position_bias"], positions, query.shape[1])}
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


def _one_by_one(implementation: str, step: Step, query: Tensor, mask: Mask, kwargs: dict[str, Any]) -> bool:
    plain = all(kwargs.get(name) is None for name in _SPECIAL) and not kwargs.get("dropout")
    # A mask that is additive under sdpa is the model's own: a bias that only its own function adds.
    unbiased = mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool)
    one = query.shape[2] == 1 and query.device.type == "cpu"
    return one and step.store.ragged and implementation == "sdpa" and step.plain and plain and unbiased


def _head_by_head(step: Step, query: Tensor, scaling: float | None) -> Tensor:
    # Each KV head's own slots: on a CPU faster than padding the heads to one length. The queries of its group stand as
    # heads, among which threads share the work out.
    batch, query_heads, _, size = query.shape
    keys, values = step.store.heads()
    group = batch * query_heads // len(keys)
    queries = query.reshape(len(keys), 1, group, 1, size)
    outputs = [
        scaled_dot_product_attention(q, k.expand(1, group, -1, -1), v.expand(1, group, -1, -1), scale=scaling)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(outputs).view(batch, 1, query_heads, -1)
