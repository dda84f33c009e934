"""Anisotropy: how much of the spread of a head's vectors lies along one direction."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.maths import centroid, norms

# What rounding may leave between equal vectors, for their length.
_SAME = 32 * torch.finfo(torch.float32).eps


def anisotropy(vectors: Tensor, mask: Tensor) -> Tensor:
    """Return the share of the largest variance in the variance over all directions, ``[B, Hkv]`` in [0, 1].

    ``s_1^2 / sum_i s_i^2``, with ``s`` the singular values of the vectors less their mean; 1 means that they lie on a
    line, ``1/D`` that they spread alike in all directions. Fewer than two slots, or all the same: 0. After Razzhigaev
    et al., arXiv 2311.05928. The other definition in use, the mean cosine of two vectors (Ethayarajh, arXiv
    1909.00512), is `kvpolicy.maths.cosine_redundancy`; less their mean, the two say different things.

    The squares are the eigenvalues of the ``D x D`` matrix of covariance: linear in the number of slots.

    Args:
        vectors: ``[B, Hkv, T, D]``, any float dtype.
        mask: bool ``[B, Hkv, T]``, the slots that count.

    >>> corners = torch.tensor([[[[2.0, 1.0], [-2.0, 1.0], [2.0, -1.0], [-2.0, -1.0]]]])  # variances 4 and 1
    >>> round(float(anisotropy(corners, torch.ones(1, 1, 4, dtype=torch.bool))), 4)
    0.8
    """
    vectors = vectors.float().where(mask[..., None], 0)
    # Of length 1 at most, so that no square overflows or vanishes.
    longest = norms(vectors).amax(-1)[..., None, None]
    vectors = vectors / longest.where(longest > 0, 1)
    spread = (vectors - centroid(vectors, mask)).where(mask[..., None], 0)
    variances = torch.linalg.eigvalsh(spread.mT @ spread).clamp(min=0)
    total = variances.sum(-1)
    there = total > mask.sum(-1) * _SAME**2
    return (variances[..., -1] / total.where(there, 1)).where(there, 0)
