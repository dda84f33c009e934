"""Best rank: a slot is worth its best place among several scores, so that each score has its own best slots kept."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import MinLen
from torch import Tensor

from kvpolicy.errors import SettingError
from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import Numbers, Scores, settings
from kvpolicy.types import LayerView, Needs


@settings
class BestRank:
    """A weight over the place of a slot among the candidates of its head, from 1, in the input that has it highest.

    A sum asks whether a slot is good enough in all inputs together; here it is enough to be among the best of one. Of
    the slots kept, each input names about as many as its weight says, and what two of them name leaves room for more.
    Scores need no common scale, as only their order counts. Equal scores share the better place.

    Args:
        inputs: one score or more.
        weights: one number above 0 for each input; without them, 1 each.

    Raises:
        SettingError: when there are not as many weights as inputs.

    The second slot is the best of the first input, the third of the other one, which weighs half as much:

    >>> from kvpolicy.scorers.key_norm import KeyNorm
    >>> from kvpolicy.scorers.value_norm import ValueNorm
    >>> view = LayerView(
    ...     keys=torch.tensor([[[[5.0], [1.0], [7.0]]]]), values=torch.tensor([[[[1.0], [2.0], [3.0]]]])
    ... )
    >>> best = BestRank(inputs=[KeyNorm(), ValueNorm()], weights=[2, 1])
    >>> best(view, inputs=[KeyNorm()(view), ValueNorm()(view)]).tolist()
    [[[1.0, 2.0, 1.0]]]
    """

    name = "best-rank"
    source = "kvpolicy"
    formula = "max_m w_m / (1 + how many candidates score higher in s_m)"
    cost = "time O(n log n), memory O(n), for each input"
    needs = Needs()
    inputs: Annotated[Scores, MinLen(1)]
    weights: Annotated[Numbers, MinLen(1)] | None = None

    def __post_init__(self) -> None:
        weights = self.weights
        if weights is not None and (len(weights) != len(self.inputs) or min(weights) <= 0):
            message = f"expected one weight above 0 for each of {len(self.inputs)} inputs"
            raise SettingError(self.name, [(("weights",), "value_error", message, list(weights))])

    def __call__(self, view: LayerView, *, inputs: list[Tensor]) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, above 0, higher means keep.

        Args:
            view: its candidates are those that are compared.
            inputs: float32 ``[B, Hkv, T]`` each.
        """
        weights = self.weights or (1.0,) * len(inputs)
        best = torch.zeros_like(inputs[0])
        for weight, scores in zip(weights, inputs, strict=True):
            best = torch.maximum(best, weight / _place(scores, view.candidates))
        return best


def _place(scores: Tensor, mask: Tensor) -> Tensor:
    """Return float32 ``[B, Hkv, T]``: 1 of the best slots of `mask`, and one more for each that scores higher."""
    # A float32 counts to 2^24; ascending, with what is no candidate in front.
    ascending = scores.where(mask, -torch.inf).sort(-1).values
    not_higher = torch.searchsorted(ascending, scores.where(mask, torch.inf).contiguous(), right=True)
    return (scores.shape[-1] - not_higher + 1).float()


@hookimpl
def kvpolicy_combiners() -> list[type]:
    """Return the combiners of this module."""
    return [BestRank]
