"""A layer that waits for its share: it has evicted, and may have to again as later layers are read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvpolicy.session.keep import Scored
from kvpolicy.store.layer import EvictingLayer

# Each cut copies what is kept: by waiting for an eighth, a layer is cut some times instead of once for each later one.
_SLACK = 8


@dataclass(frozen=True)
class Waiting:
    """A layer whose share other layers may still lower.

    Args:
        layer: which layer.
        note: float32 ``[B, Hkv, n]``, what the shares depend on.
        scored: what the policy has said of the slots that it holds.
    """

    layer: EvictingLayer
    note: Tensor
    scored: Scored

    def exceeds(self, share: Tensor) -> bool:
        """Return whether a row holds an eighth more than `share` (int64 ``[B]``, slots a head), so that it is cut."""
        rows = zip(self.layer.kept, share.tolist(), strict=True)
        return any(_SLACK * sum(row) > (_SLACK + 1) * len(row) * most for row, most in rows)
