"""Value norm: slots that would add much to the output, once attended to."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import norms
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs


@settings
class ValueNorm:
    """The length of a slot's value: the longest values are kept.

    >>> import torch
    >>> values = torch.tensor([[[[3.0, 4.0], [0.0, 1.0]]]])
    >>> ValueNorm()(LayerView(keys=values, values=values)).tolist()
    [[[5.0, 1.0]]]
    """

    name = "value-norm"
    role = "importance"
    source = "MixKV, arXiv 2510.20707, its second importance"
    formula = "|v_i|"
    cost = "time O(n D), memory O(n D)"
    needs = Needs(values=True)

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, 0 or more, in the unit of the values, higher means longer."""
        return norms(view.values)


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [ValueNorm]
