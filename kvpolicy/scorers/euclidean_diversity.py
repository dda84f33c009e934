"""Euclidean diversity: how far a key is from the mean key of its head."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import centroid_distance
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs
from kvpolicy.vectors import On, Space, check, needs, vectors


@settings
class EuclideanDiversity:
    """How far a slot's key is from the mean key of the head's candidates: direction and length both count.

    Args:
        on: what is compared, "keys" or "values".
        space: keys after RoPE, as stored ("post-rope"), or before it ("pre-rope"): their positions left out.

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
    cost = "time O(n D), memory O(n D)"
    on: On = "keys"
    space: Space = "post-rope"

    def __post_init__(self) -> None:
        check(self.name, self.on, self.space)

    @property
    def needs(self) -> Needs:
        """The keys, after or before RoPE, or the values."""
        return needs(self.on, self.space)

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, 0 or more, in the unit of what is compared, higher means farther."""
        return centroid_distance(vectors(view, self.on, self.space), view.candidates)


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [EuclideanDiversity]
