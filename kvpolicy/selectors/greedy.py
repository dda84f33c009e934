"""Choosing one slot after another, each with those before in view: time O(n * K * D), memory O(n * D)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from kvpolicy.types import LayerView, Selection

State = TypeVar("State")


def greedy(
    view: LayerView,
    vectors: Tensor,
    lengths: Tensor,
    state: State,
    gain: Callable[[State], Tensor],
    add: Callable[[State, Tensor], State],
) -> Selection:
    """Return the slots chosen one by one by the largest gain, the protected before all others; ties: the earlier.

    Args:
        view: valid slots that are no candidates are protected.
        vectors: ``[B, Hkv, T, D]``, finite.
        lengths: int64 ``[B, Hkv]``, how many slots each head keeps.
        state: what is known of the slots before any is chosen.
        gain: returns ``[B, Hkv, T]``, finite on candidates, from a state.
        add: returns the state once the slots of these vectors, ``[B, Hkv, 1, D]``, are chosen.

    Points on a line, by how far they are from the nearest one that is chosen:

    >>> line = torch.tensor([0.0, 1.0, 7.0, 10.0]).view(1, 1, 4, 1)
    >>> nearer = lambda state, new: torch.minimum(state, (line - new).abs().squeeze(-1))
    >>> view = LayerView(keys=line, values=line)
    >>> greedy(view, line, torch.tensor([[2]]), torch.full((1, 1, 4), 99.0), lambda state: state, nearer).tolist()
    [[[0, 3]]]
    """
    keep = torch.zeros_like(view.valid)
    left = view.valid.clone()
    for chosen in range(int(lengths.max())):
        gains = gain(state).where(view.candidates, torch.inf).where(left, -torch.inf)
        slot = gains.argmax(-1, keepdim=True)
        # Heads that have all they keep go on choosing, for nothing.
        keep.scatter_(-1, slot, keep.gather(-1, slot) | (chosen < lengths[..., None]))
        left.scatter_(-1, slot, False)
        state = add(state, vectors.take_along_dim(slot[..., None], dim=2))
    return Selection.from_mask(keep, layer=view.layer)


__all__ = ["greedy"]
