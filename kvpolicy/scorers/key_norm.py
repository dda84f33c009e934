"""Key norm: keys of small L2 norm draw attention."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import norms
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs


@settings
class KeyNorm:
    """Minus the length of a slot's key: the shortest keys are kept, which is what the paper found.

    >>> import torch
    >>> keys = torch.tensor([[[[3.0, 4.0], [0.0, 1.0]]]])
    >>> KeyNorm()(LayerView(keys=keys, values=keys)).tolist()
    [[[-5.0, -1.0]]]
    """

    name = "key-norm"
    role = "importance"
    source = "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430"
    formula = "-|k_i|"
    cost = "time O(n D), memory O(n D)"
    needs = Needs(keys=True)

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, 0 or less, in the unit of the keys, higher means shorter."""
        return -norms(view.keys)


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [KeyNorm]
