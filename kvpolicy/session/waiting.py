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

    def due(self, share: Tensor, seen: Tensor) -> Tensor:
        """Return what each row is cut to, int64 ``[B]``: `share` where it holds an eighth more, else `seen`, to wait.

        Args:
            share: int64 ``[B]``, slots a head.
            seen: int64 ``[B]``, no fewer than any head holds.
        """
        held = share.new_tensor([sum(row) for row in self.layer.kept])
        return share.where(_SLACK * held > (_SLACK + 1) * len(self.layer.kept[0]) * share, seen)
