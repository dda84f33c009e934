"""Fixed: a weighted sum of scores made comparable first."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import MinLen
from einops import rearrange
from torch import Tensor

from kvpolicy.errors import check_weights
from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import from_zero, lower, masked_mean, match_mean, min_max
from kvpolicy.plugin import Numbers, Scores, settings
from kvpolicy.types import LayerView, Needs


@settings
class Fixed:
    """The weighted sum of the inputs, each normalised over the candidate slots, of each head or of all of a layer.

    Ways to normalise; a constant input becomes 0 under all but "none":

    - "min-max": to [0, 1];
    - "rank": the share of the other candidates that score lower; equal scores, equal rank;
    - "z-score": mean 0, standard deviation 1;
    - "match-importance": the first input stays as it is; each other is min-max scaled, then scaled to the
      first's mean (counted from its lowest where it goes below 0). With weights [1, 1] this is how MixKV adds
      value norm to attention;
    - "none": as it is.

    Args:
        inputs: one score or more.
        weights: one number for each input; without them, all alike, ``1/n``.
        normalize: "min-max", "rank", "z-score", "match-importance" or "none".
        over: what is normalised at once: each "head", so that all heads weigh their inputs alike; or the "layer", all
            heads of a row together, so that an input counts most in the heads that it tells most of.

    Raises:
        SettingError: when there are not as many weights as inputs.

    Key norms 5 and 1 (the shorter is better: 0, 1) and value norms 1 and 3 (0, 1), three to one:

    >>> from kvpolicy.scorers.key_norm import KeyNorm
    >>> from kvpolicy.scorers.value_norm import ValueNorm
    >>> view = LayerView(keys=torch.tensor([[[[5.0], [1.0]]]]), values=torch.tensor([[[[1.0], [3.0]]]]))
    >>> mix = Fixed(inputs=[KeyNorm(), ValueNorm()], weights=[0.75, 0.25])
    >>> mix(view, inputs=[KeyNorm()(view), ValueNorm()(view)]).tolist()
    [[[0.0, 1.0]]]
    """

    name = "fixed"
    source = "kvpolicy; match-importance: MixKV, arXiv 2510.20707; z-score over a layer: Compactor, arXiv 2507.08143"
    formula = "sum_m w_m * normalize(s_m)"
    cost = "time O(n), memory O(n), for each input; by rank, time O(n log n)"
    needs = Needs()
    inputs: Annotated[Scores, MinLen(1)]
    weights: Numbers | None = None
    normalize: Literal["min-max", "rank", "z-score", "match-importance", "none"] = "min-max"
    over: Literal["head", "layer"] = "head"

    def __post_init__(self) -> None:
        check_weights(self.name, self.weights, self.inputs)

    @property
    def across_heads(self) -> bool:
        """Whether a head's scores depend on those of other heads."""
        return self.over == "layer"

    def __call__(self, view: LayerView, *, inputs: list[Tensor]) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, higher means keep where every weight is positive.

        Args:
            view: its candidates are what is normalised over.
            inputs: float32 ``[B, Hkv, T]`` each.
        """
        weights = self.weights or (1 / len(inputs),) * len(inputs)
        mask = view.candidates
        if self.over == "layer":
            inputs, mask = [_as_one_head(scores) for scores in inputs], _as_one_head(mask)
        total = torch.zeros_like(inputs[0])
        for weight, scores in zip(weights, self._normalized(inputs, mask), strict=True):
            total = total + weight * scores
        return total.view(view.candidates.shape)

    def _normalized(self, inputs: list[Tensor], mask: Tensor) -> list[Tensor]:
        if self.normalize == "none":
            return inputs
        if self.normalize == "match-importance":
            reference = from_zero(inputs[0], mask)
            return [inputs[0], *(match_mean(min_max(scores, mask), reference, mask) for scores in inputs[1:])]
        one = {"min-max": min_max, "rank": _rank, "z-score": _z_score}[self.normalize]
        return [one(scores, mask) for scores in inputs]


def _as_one_head(slots: Tensor) -> Tensor:
    return rearrange(slots, "b h t -> b 1 (h t)")


def _rank(scores: Tensor, mask: Tensor) -> Tensor:
    return lower(scores, mask).float() / (mask.sum(-1, keepdim=True) - 1).clamp(min=1)


def _z_score(scores: Tensor, mask: Tensor) -> Tensor:
    # Of the min-max scaled scores, which have the same z-score: their squares neither overflow nor vanish.
    scores = min_max(scores, mask)
    centred = scores - masked_mean(scores, mask)
    deviation = masked_mean(centred.square(), mask).sqrt()
    return centred / deviation.where(deviation > 0, 1)


@hookimpl
def kvpolicy_combiners() -> list[type]:
    """Return the combiners of this module."""
    return [Fixed]
