"""Which kept slot each evicted one is most like, and weighted means of them: time O(n * K * D), memory O(n * D).

n slots of a head are evicted and K are kept. Cosines are made block by block, so that nothing of n x K is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.maths import units
from kvpolicy.types import LayerView, Selection

NUMBERS = 2**24
"""How many numbers a block holds at most, unless one slot alone has more: 64 MiB."""


@dataclass(frozen=True)
class Matches:
    """Evicted slots, head after head, each with the kept slot of its head whose key is most like its own.

    Args:
        owners: int64 ``[M]``: ``row * Hkv + head`` of each.
        slots: int64 ``[M]``: which slot it is.
        into: int64 ``[M]``: which entry of the selection it is most like.
        cosines: float32 ``[M]``: of its key and that one's, after RoPE, as stored.
    """

    owners: Tensor
    slots: Tensor
    into: Tensor
    cosines: Tensor

    def __len__(self) -> int:
        return len(self.slots)

    def only(self, these: Tensor) -> Matches:
        """Return those where `these`, bool ``[M]``, is True."""
        return Matches(self.owners[these], self.slots[these], self.into[these], self.cosines[these])

    def head_means(self, heads: int) -> Tensor:
        """Return the mean cosine of each of `heads` rows and heads, float32 ``[heads]``; nan where nothing is evicted.

        >>> owners = torch.tensor([0, 0, 2])
        >>> Matches(owners, owners, owners, torch.tensor([0.5, 1.0, 0.25])).head_means(3).tolist()
        [0.75, nan, 0.25]
        """
        return summed(self.owners, self.cosines, heads) / summed(self.owners, torch.ones_like(self.cosines), heads)


def nearest(view: LayerView, selection: Selection) -> Matches:
    """Return every evicted slot with the kept slot of its head that it is most like, by the cosine of their keys.

    Args:
        view: the layer's slots; those that are valid and not selected are evicted.
        selection: the slots that are kept.

    >>> keys = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [0.1, 2.0]]]])
    >>> kept = Selection(slots=torch.tensor([0, 1]), lengths=torch.tensor([[2]]))
    >>> found = nearest(LayerView(keys=keys, values=keys), kept)
    >>> found.slots.tolist(), found.into.tolist()
    ([2], [1])
    """
    keep = selection.to_mask(view.slots)
    kept, held = in_front(keep)
    evicted, gone = in_front(view.valid & ~keep)
    directions = units(_at(view.keys, kept, held)).mT
    size = max(1, NUMBERS // (keep.shape[0] * keep.shape[1] * max(directions.shape[2:])))
    best, places = [], []
    for some, real in zip(evicted.split(size, dim=-1), gone.split(size, dim=-1), strict=True):
        cosines = units(_at(view.keys, some, real)) @ directions
        found = cosines.masked_fill(~held[:, :, None], -torch.inf).max(-1)
        best.append(found.values)
        places.append(found.indices)
    ends = selection.lengths.flatten().cumsum(0).view(selection.lengths.shape)
    into = (ends - selection.lengths)[..., None] + torch.cat(places, dim=-1)
    owners = torch.arange(ends.numel(), device=ends.device).view(*ends.shape, 1).expand(evicted.shape)
    return Matches(owners[gone], evicted[gone], into[gone], torch.cat(best, dim=-1)[gone])


def blend(
    vectors: Tensor, selection: Selection, matches: Matches, weights: Tensor, own: Tensor, total: Tensor
) -> Tensor:
    """Return ``(own_j x_j + sum_i weights_i x_i) / total_j``, over the i matched with the kept slot j, ``[N, D]``.

    A slot that nothing is matched with stays as it is, to the last bit.

    Args:
        vectors: ``[B, Hkv, T, D]``, keys or values.
        selection: the kept slots.
        matches: the evicted slots that count.
        weights: ``[M]``, one for each of them.
        own: ``[N]``, one for each kept slot.
        total: ``[N]``, likewise.
    """
    old = selection.take(vectors)
    exact = torch.promote_types(vectors.dtype, torch.float32)
    mixed = old.to(exact) * own[:, None].to(exact)
    heads = selection.lengths.shape[1]
    for part in blocks(len(matches), vectors.shape[-1], mixed.device):
        owner, slot = matches.owners[part], matches.slots[part]
        some = vectors[owner // heads, owner % heads, slot].to(exact) * weights[part, None].to(exact)
        mixed.index_put_((matches.into[part],), some, accumulate=True)
    touched = torch.zeros(len(old), dtype=torch.bool, device=mixed.device)
    touched[matches.into] = True
    return (mixed / total[:, None].to(exact)).to(old.dtype).where(touched[:, None], old)


def blocks(count: int, size: int, device: torch.device) -> Iterator[Tensor]:
    """Return the places of `count` vectors of `size` numbers, int64, in blocks of `NUMBERS` numbers.

    >>> [part.tolist() for part in blocks(3, NUMBERS // 2, torch.device("cpu"))]
    [[0, 1], [2]]
    """
    return iter(torch.arange(count, device=device).split(max(1, NUMBERS // size)))


def summed(places: Tensor, numbers: Tensor, size: int) -> Tensor:
    """Return `numbers` ``[M]`` added up where they belong, ``[size]``.

    >>> summed(torch.tensor([2, 0, 2]), torch.tensor([1.0, 5.0, 2.0]), 3).tolist()
    [5.0, 0.0, 3.0]
    """
    # Not index_add_, whose order of addition is by chance on a GPU.
    return numbers.new_zeros(size).index_put_((places,), numbers, accumulate=True)


def in_front(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the True slots of each head, rising, int64 ``[B, Hkv, n]``, and which of them there are; n is the most.

    >>> slots, there = in_front(torch.tensor([[[False, True, True], [True, False, False]]]))
    >>> slots.tolist(), there.tolist()
    ([[[1, 2], [0, 1]]], [[[True, True], [True, False]]])
    """
    count = mask.sum(-1, keepdim=True)
    order = mask.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., : int(count.max())]
    return order, torch.arange(order.shape[-1], device=mask.device) < count


def _at(keys: Tensor, slots: Tensor, there: Tensor) -> Tensor:
    """Return the keys at `slots`, ``[B, Hkv, n, D]``; zeros where none is there."""
    return keys.take_along_dim(slots[..., None], dim=2).where(there[..., None], 0)


__all__ = ["Matches", "blend", "blocks", "in_front", "nearest", "summed"]
