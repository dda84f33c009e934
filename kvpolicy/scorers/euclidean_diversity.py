"""Euclidean diversity: how far a key is from the mean key of its head."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import centroid_distance
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs


@settings
class EuclideanDiversity:
    """How far a slot's key is from the mean key of the head's candidates: direction and length both count.

    Args:
        on: what is compared, "keys" (after RoPE, as stored) or "values".

    The mean of (0, 0), (0, 3), (0, 6) is (0, 3).

    >>> import torch
    >>> keys = torch.tensor([[[[0.0, 0.0], [0.0, 3.0], [0.0, 6.0]]]])
    >>> EuclideanDiversity()(LayerView(keys=keys, values=keys)).tolist()
    [[[3.0, 0.0, 3.0]]]
    """

    name = "euclidean-diversity"
    role = "diversity"
    source = "ManifoldKV, arXiv 2602.08343; one of the two diversities of ECOKV, arXiv 2609.06663"
    formula = "|k_i - mean_j k_j|, j over the candidates"
    on: Literal["keys", "values"] = "keys"

    @property
    def needs(self) -> Needs:
        """The keys or the values."""
        return Needs(keys=self.on == "keys", values=self.on == "values")

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, 0 or more, in the unit of what is compared, higher means farther."""
        return centroid_distance(view.keys if self.on == "keys" else view.values, view.candidates)


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [EuclideanDiversity]
