"""`Window`: the last queries of each row, over as many passes as it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """The last queries of each row, oldest first; of rows that have fewer, the first are -1 in `positions`.

    Args:
        queries: ``[B, Hq, W, Dk]``.
        positions: int64 ``[B, W]``, the token each belongs to.
    """

    queries: Tensor
    positions: Tensor

    def take_rows(self, rows: Tensor) -> Window:
        """Return the window of the rows `rows` (int64), which may repeat."""
        rows = rows.to(self.queries.device)
        return Window(self.queries[rows], self.positions[rows])

    def before(self, end: int) -> Window:
        """Return the window without the queries of tokens from `end` on."""
        return _last(self.queries, self.positions.where(self.positions < end, -1), self.positions.shape[1])


def extend(window: Window | None, query: Tensor, visible: Tensor | None, start: int, size: int) -> Window:
    """Return the last `size` queries of each row that are no padding.

    Args:
        window: those of the passes before, or None.
        query: ``[B, Hq, q, Dk]`` of this pass.
        visible: bool ``[B, start + q]`` or wider, False for padding; None where none of this pass's tokens is padding.
        start: the position of the first of them.
        size: how many to keep.
    """
    batch, _, length, _ = query.shape
    positions = torch.arange(start, start + length, device=query.device).expand(batch, -1)
    if visible is None:
        query, positions = query[:, :, -size:], positions[:, -size:]
    else:
        positions = positions.where(visible[:, start : start + length].to(query.device), -1)
    # A copy: a slice would pin every query there was.
    window = Window(query[:, :, :0], positions[:, :0]) if window is None else window
    query, positions = torch.cat([window.queries, query], dim=2), torch.cat([window.positions, positions], dim=1)
    if visible is None:
        # In order already.
        return Window(query[:, :, -size:], positions[:, -size:])
    return _last(query, positions, size)


def _last(queries: Tensor, positions: Tensor, size: int) -> Window:
    # Ascending, and so oldest first, with what is missing in front.
    last = positions.argsort(dim=-1, stable=True)[:, -size:]
    index = last[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])
    return Window(queries.gather(2, index), positions.gather(1, last))
