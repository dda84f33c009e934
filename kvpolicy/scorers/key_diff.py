"""KeyDiff: keep the keys that are least like the mean key direction."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import centroid_cosine
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs


@settings
class KeyDiff:
    """How little the direction of a slot's key is like the mean direction of all the head's keys.

    As `cosine-diversity`, but the mean is taken over all valid slots, protected ones too, as the paper does.

    >>> import torch
    >>> keys = torch.tensor([[[[1.0, 0.0], [5.0, 0.0], [0.0, 1.0]]]])
    >>> [round(score, 3) for score in KeyDiff()(LayerView(keys=keys, values=keys))[0, 0].tolist()]
    [-0.894, -0.894, -0.447]
    """

    name = "key-diff"
    role = "diversity"
    source = "KeyDiff, arXiv 2504.15364, with the mean of normalised keys as anchor"
    formula = "-cos(k_i, mean_j k_j/|k_j|), j over the valid slots"
    cost = "time O(n D), memory O(n D)"
    needs = Needs(keys=True)

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, in [-1, 1], higher means more unlike the others."""
        return -centroid_cosine(view.keys, view.valid)


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [KeyDiff]
