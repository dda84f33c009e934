"""Redundancy-adaptive: the more alike a head's keys are, the more diversity counts."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import cosine_redundancy, euclidean_redundancy, from_zero, match_mean, min_max
from kvpolicy.plugin import Score, settings
from kvpolicy.types import LayerView, Needs
from kvpolicy.vectors import On, Space, check, needs, vectors


@settings
class RedundancyAdaptive:
    """Importance and diversity, mixed per head by how redundant the head's candidates are.

    Diversity is min-max scaled per head and then scaled to the head's mean importance (counted from its
    lowest where importance goes below 0), so that the two can be mixed. ECOKV's abstract says no more than
    that redundancy is estimated from cosine and Euclidean distance and weighs diversity against importance;
    the formulas are ours, after MixKV, and so every choice is a setting. MixKV itself: `redundancy` "cosine",
    and cosine diversity.

    Args:
        importance: the score that says how much a slot matters.
        diversity: the score that says how unlike the others it is.
        redundancy: how redundancy is measured: "cosine", "euclidean" or "both" (see `kvpolicy.maths`); or a number in
            [0, 1] that stands for that of every head, so that the weight does not adapt.
        join: how the two measures of "both" become one: "mean", "max", "min" or "product".
        on: what redundancy is measured on, "keys" or "values".
        space: keys after RoPE, as stored ("post-rope"), or before it ("pre-rope"), where they are more alike.

    Two equal keys: redundancy 1, so diversity decides, scaled to the mean importance of 2. Orthogonal keys:
    redundancy 0, so importance does.

    >>> from kvpolicy.scorers.key_norm import KeyNorm
    >>> from kvpolicy.scorers.recency import Recency
    >>> mix = RedundancyAdaptive(importance=KeyNorm(), diversity=Recency())
    >>> scores = {"importance": torch.tensor([[[3.0, 1.0]]]), "diversity": torch.tensor([[[0.0, 7.0]]])}
    >>> equal = torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]])
    >>> orthogonal = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    >>> mix(LayerView(keys=equal, values=equal), **scores).tolist()
    [[[0.0, 4.0]]]
    >>> mix(LayerView(keys=orthogonal, values=orthogonal), **scores).tolist()
    [[[3.0, 1.0]]]
    """

    name = "redundancy-adaptive"
    source = "ECOKV, arXiv 2609.06663 (abstract); formulas reconstructed from MixKV, arXiv 2510.20707"
    formula = "r * diversity + (1 - r) * importance, r the redundancy of the head"
    cost = "time O(n D), memory O(n D)"
    importance: Score
    diversity: Score
    redundancy: Literal["cosine", "euclidean", "both"] | Annotated[float, Ge(0), Le(1)] = "both"
    join: Literal["mean", "max", "min", "product"] = "mean"
    on: On = "keys"
    space: Space = "post-rope"

    def __post_init__(self) -> None:
        check(self.name, self.on, self.space)

    @property
    def needs(self) -> Needs:
        """The keys, after or before RoPE, or the values."""
        return needs(self.on, self.space)

    def __call__(self, view: LayerView, *, importance: Tensor, diversity: Tensor) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, higher means keep, in the unit of the importance.

        Args:
            view: its candidates are what is normalised and measured.
            importance: float32 ``[B, Hkv, T]``.
            diversity: float32 ``[B, Hkv, T]``.
        """
        mask = view.candidates
        diversity = match_mean(min_max(diversity, mask), from_zero(importance, mask), mask)
        weight = self.measure(view)[..., None]
        return weight * diversity + (1 - weight) * importance

    def measure(self, view: LayerView) -> Tensor:
        """Return the redundancy of each head, float32 ``[B, Hkv]`` in [0, 1]."""
        if not isinstance(self.redundancy, str):
            return torch.full(
                view.candidates.shape[:2], self.redundancy, dtype=torch.float32, device=view.candidates.device
            )
        measured = vectors(view, self.on, self.space)
        if self.redundancy == "cosine":
            return cosine_redundancy(measured, view.candidates)
        if self.redundancy == "euclidean":
            return euclidean_redundancy(measured, view.candidates)
        cosine, euclidean = (
            measure(measured, view.candidates) for measure in (cosine_redundancy, euclidean_redundancy)
        )
        if self.join == "mean":
            return (cosine + euclidean) / 2
        return {"max": torch.maximum, "min": torch.minimum, "product": torch.mul}[self.join](cosine, euclidean)


@hookimpl
def kvpolicy_combiners() -> list[type]:
    """Return the combiners of this module."""
    return [RedundancyAdaptive]
