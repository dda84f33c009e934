"""Cosine diversity: how far a key's direction is from the mean direction of its head."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import centroid_cosine
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs
from kvpolicy.vectors import On, Space, check, needs, vectors


@settings
class CosineDiversity:
    """How little the direction of a slot's key is like the mean direction of the head's candidates.

    Length plays no part. The cosine with a zero vector is 0.

    Args:
        on: what is compared, "keys" or "values".
        space: keys after RoPE, as stored ("post-rope"), or before it ("pre-rope"): their positions left out.

    Directions (1, 0), (1, 0), (0, 1): their mean points to (2, 1)/sqrt(5), and the odd one out scores
    highest.

    >>> import torch
    >>> keys = torch.tensor([[[[1.0, 0.0], [5.0, 0.0], [0.0, 1.0]]]])
    >>> [round(score, 3) for score in CosineDiversity()(LayerView(keys=keys, values=keys))[0, 0].tolist()]
    [-0.894, -0.894, -0.447]
    """

    name = "cosine-diversity"
    role = "diversity"
    source = "MixKV, arXiv 2510.20707; one of the two diversities of ECOKV, arXiv 2609.06663"
    formula = "-cos(k_i, mean_j k_j/|k_j|), j over the candidates"
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
        """Return float32 ``[B, Hkv, T]``, in [-1, 1], higher means more unlike the others."""
        return -centroid_cosine(vectors(view, self.on, self.space), view.candidates)


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [CosineDiversity]
