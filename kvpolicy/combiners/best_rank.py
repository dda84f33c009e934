"""Best rank: a slot is worth its best place among several scores, so that each score has its own best slots kept."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import MinLen
from torch import Tensor

from kvpolicy.errors import SettingError, check_weights
from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import lower
from kvpolicy.plugin import Numbers, Scores, settings
from kvpolicy.types import LayerView, Needs


@settings
class BestRank:
    """A weight over the place of a slot among the candidates of its head, from 1, in the input that has it highest.

    A sum asks whether a slot is good enough in all inputs together; here it is enough to be among the best of one. Of
    the slots kept, each input names about as many as its weight says, and what two of them name leaves room for more.
    Scores need no common scale, as only their order counts: heads that compete by it are nearly alike. Equal scores
    share the last of their places, so that a constant input names none.

    Args:
        inputs: one score or more.
        weights: one number from 1e-9 to 1e9 for each input; without them, 1 each.

    Raises:
        SettingError: when there are not as many weights as inputs, or one is out of range.

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
    formula = "max_m w_m / how many candidates score as high in s_m, or higher"
    cost = "time O(n log n), memory O(n), for each input"
    needs = Needs()
    inputs: Annotated[Scores, MinLen(1)]
    weights: Annotated[Numbers, MinLen(1)] | None = None

    def __post_init__(self) -> None:
        check_weights(self.name, self.weights, self.inputs)
        for at, weight in enumerate(self.weights or ()):
            if not 1e-9 <= weight <= 1e9:
                message = "expected a number from 1e-9 to 1e9"
                raise SettingError(self.name, [(("weights", at), "value_error", message, weight)])

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
    """Return float32 ``[B, Hkv, T]``: how many slots of `mask` score as high as each, itself counted, or higher."""
    # What is no candidate may come out at 0, which nothing is divided by.
    return (mask.sum(-1, keepdim=True) - lower(scores, mask)).clamp(min=1).float()


@hookimpl
def kvpolicy_combiners() -> list[type]:
    """Return the combiners of this module."""
    return [BestRank]
