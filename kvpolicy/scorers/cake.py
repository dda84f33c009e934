"""CAKE's indicator: the attention of the last queries to each slot, and how much it changes from one to the next."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le
from pydantic import AfterValidator
from torch import Tensor

from kvpolicy.attention import each_query, pooled, variance
from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.scorers.snapkv import odd
from kvpolicy.types import LayerView, Needs


@settings
class Cake:
    """Mean of the window's attention to each slot, plus `gamma` times its variance, smoothed along the slots.

    Softmax attention of the last `window` queries, their mean and unbiased variance, 1-D average pooling, mean over the
    query heads of the group. As in `snapkv`, slots that are no candidates count 0 before pooling; without sinks and
    with as many recent tokens as the window holds, this is the authors' code.

    Args:
        window: how many of the last queries are observed.
        kernel: valid slots a pool spans, odd; 1 for none.
        gamma: what the variance weighs.

    One query alone does not vary: what is left is its attention.

    >>> import torch
    >>> keys = torch.zeros(1, 1, 4, 2)
    >>> Cake(window=1, kernel=1)(LayerView(keys=keys, values=keys, queries=torch.ones(1, 1, 1, 2))).tolist()
    [[[0.25, 0.25, 0.25, 0.25]]]
    """

    name = "cake"
    role = "importance"
    source = "CAKE, arXiv 2503.12491, and its code"
    formula = "mean_g pool(mean_w A + gamma var_w A), A = softmax(q_w . k * scaling)"
    cost = "time O(n W G D + n log n), memory O(n D + n W G + W G D)"
    window: Annotated[int, Ge(1)] = 32
    kernel: Annotated[int, Ge(1), AfterValidator(odd)] = 5
    gamma: Annotated[float, Ge(0), Le(1_000_000)] = 200

    @property
    def needs(self) -> Needs:
        """The keys and the last `window` queries."""
        return Needs(queries=self.window, keys=True)

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, at least 0, higher means attended to more, or more unevenly."""
        attention, weights = each_query(view)
        mean = (weights[:, :, None, None] @ attention).squeeze(-2)
        return pooled(mean + self.gamma * variance(attention, weights), view, self.kernel)


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [Cake]
