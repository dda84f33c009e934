"""`Window`: the last queries of each row, over as many passes as it takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# More pieces than this are joined at once, so that adding one never costs more than a few pointers.
_PIECES = 32


@dataclass(frozen=True)
class Window:
    """The last queries of each row, oldest first; of rows that have fewer, the first are -1 in `positions`.

    Args:
        joined: ``[B, Hq, W, Dk]``, queries.
        places: int64 ``[B, W]``, the token each belongs to.
        later: ``[B, Hq, 1, Dk]`` each, the queries of the tokens that came after those, joined when read.
        start: the position of the first of `later`.
        size: how many queries there are at most, once joined.
        later_bytes: held by the storages of `later`.
    """

    joined: Tensor
    places: Tensor
    later: tuple[Tensor, ...] = ()
    start: int = 0
    size: int = 0
    later_bytes: int = 0

    @property
    def queries(self) -> Tensor:
        """``[B, Hq, W, Dk]``."""
        return self._whole[0]

    @property
    def positions(self) -> Tensor:
        """int64 ``[B, W]``, the token each query belongs to."""
        return self._whole[1]

    @cached_property
    def _whole(self) -> tuple[Tensor, Tensor]:
        if not self.later:
            return self.joined, self.places
        came = torch.arange(self.start, self.start + len(self.later), device=self.places.device)
        places = torch.cat([self.places, came.expand(len(self.places), -1)], dim=1)
        every = Window(torch.cat([self.joined, *self.later], dim=2), places).last(self.size)
        return every.joined, every.places

    @property
    def nbytes(self) -> int:
        """Bytes held by the storages of its queries and positions."""
        return self.joined.untyped_storage().nbytes() + self.places.untyped_storage().nbytes() + self.later_bytes

    def followed_by(self, query: Tensor, start: int, size: int) -> Window:
        """Return the window with the query ``[B, Hq, 1, Dk]`` of the token at `start`, which is no row's padding."""
        if len(self.later) == _PIECES:
            return self.whole().followed_by(query, start, size)
        first = self.start if self.later else start
        nbytes = self.later_bytes + query.untyped_storage().nbytes()
        return Window(self.joined, self.places, (*self.later, query), first, size, nbytes)

    def whole(self) -> Window:
        """Return the same window in one piece."""
        return Window(self.queries, self.positions) if self.later else self

    def last(self, count: int) -> Window:
        """Return the window of the last `count` queries, which holds none of the others."""
        if self.queries.shape[2] <= count:
            return self
        # A copy: a slice would pin what it leaves out.
        return Window(self.queries[:, :, -count:].clone(), self.positions[:, -count:].clone())

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
