"""`Merged`: what the kept slots of one layer hold once the evicted are merged into them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Merged:
    """Keys and values of the kept slots, packed as their `Selection` is.

    A slot keeps its position, and with it the rotation that its key had.

    Args:
        keys: ``[N, Dk]``, in the dtype of the view's.
        values: ``[N, Dv]``, likewise.
        memory: ``[B, ...]``, what the layer's next eviction has to know; None for nothing.
    """

    keys: Tensor
    values: Tensor
    memory: Tensor | None = None
