"""TOVA: the attention of the last query alone, one score for all heads of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.attention import window_attention
from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs


@settings
class TOVA:
    """The attention of the last query to a token, mean over all query heads of the layer, so that heads keep alike.

    Where heads hold different tokens, as under head budgets, a head that has let a token go gives it 0.

    Two heads, each with a key that draws all attention: the tokens get half of it each.

    >>> keys = torch.zeros(1, 2, 2, 1)
    >>> keys[0, 0, 0] = keys[0, 1, 1] = 1000
    >>> TOVA()(LayerView(keys=keys, values=keys, queries=torch.ones(1, 2, 1, 1))).tolist()
    [[[0.5, 0.5], [0.5, 0.5]]]
    """

    name = "tova"
    role = "importance"
    source = "TOVA, arXiv 2401.06104, and its code"
    formula = "mean_h softmax(q_last . k * scaling), h over all query heads"
    cost = "time O(n G D), memory O(n D + n G + G D)"
    needs = Needs(queries=1, keys=True)
    across_heads = True

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, in [0, 1], higher means more attended to."""
        attention = window_attention(view).mean(2)
        tokens = view.positions.clamp(min=0).long().flatten(1)
        received = torch.zeros(len(tokens), int(tokens.max()) + 1, dtype=torch.float32, device=tokens.device)
        received.scatter_add_(1, tokens, attention.flatten(1))
        return received.gather(1, tokens).view_as(attention) / view.kv_heads


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [TOVA]
