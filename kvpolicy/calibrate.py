"""Calibration: what a scorer has to know of a model, found once by having it read a text."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from kvpolicy.analysis.views import views
from kvpolicy.errors import ContextError, UnsupportedModelError
from kvpolicy.session.decoder import find_decoders
from kvpolicy.types import ALL, Needs


def q_filters(model: nn.Module, ids: Tensor, *, length: int = 2048, samples: int = 3000) -> Tensor:
    """Return the Q-Filters of a model, float32 ``[layers, Hkv, Dk]``: 0 for layers from which nothing is evicted.

    ``f_lh = -mean_g sign_g v_g``, where v_g is the first right singular vector of a query head's queries, after RoPE,
    and sign_g the sign of most of their projections on it, of their mean where half have either.

    Args:
        model: any transformers decoder.
        ids: int64 ``[T]`` or ``[1, T]``, of a text.
        length: how many tokens are read in one pass.
        samples: of how many tokens, spread evenly over the text, queries count.

    Raises:
        ContextError: when ids are of another shape, or there is nothing to read or to count.
        UnsupportedModelError: when nothing can be evicted from the model, or its layers differ in heads or their size.

    Source: Q-Filters, arXiv 2503.02812, section 3, and its code, which takes its 3,000 queries by chance.

    >>> from kvpolicy.testing.models import tiny
    >>> q_filters(tiny(), torch.arange(96)).shape
    torch.Size([3, 2, 8])
    """
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or not len(ids):
        raise ContextError(f"ids: expected those of one text, [T] or [1, T], got {list(ids.shape)}")
    if length < 1 or samples < 1:
        raise ContextError(f"length and samples: expected 1 or more, got {length} and {samples}")
    layers = find_decoders(model)[0].config.num_hidden_layers
    wanted = torch.linspace(0, len(ids) - 1, min(samples, len(ids)), dtype=torch.float64).round().long()
    queries: dict[int, list[Tensor]] = {}
    heads: set[tuple[int, int]] = set()
    for start in range(0, len(ids), length):
        part = ids[start : start + length]
        chosen = wanted[(wanted >= start) & (wanted < start + length)] - start
        for view in views(model, part, Needs(queries=ALL)):
            told: Any = view.queries
            queries.setdefault(view.layer, []).append(told[0, :, chosen.to(told.device)].float().cpu())
            heads.add((view.kv_heads, view.keys.shape[-1]))
    if len(heads) != 1:
        raise UnsupportedModelError(f"model: expected KV heads that are alike in all layers, got {sorted(heads)}")
    ((count, size),) = heads
    filters = torch.zeros(layers, count, size)
    for layer, parts in queries.items():
        filters[layer] = _filter(torch.cat(parts, dim=1).double(), count).float()
    return filters


def _filter(queries: Tensor, kv_heads: int) -> Tensor:
    """Return the filters of one layer ``[Hkv, D]``, of its queries ``[Hq, n, D]``."""
    along, _, directions = torch.linalg.svd(queries, full_matrices=False)
    majority = along[..., 0].sign().sum(-1)
    sign = torch.where(majority == 0, along[..., 0].sum(-1), majority).sign()
    return -rearrange(sign[:, None] * directions[:, 0], "(h g) d -> h g d", h=kv_heads).mean(1)
