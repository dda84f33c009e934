"""`Rotation`: how one layer turns the pairs of a key's dimensions, and how that is undone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.rotary.calls import Source
from kvpolicy.rotary.record import RotaryRecord

PAIRS = ("half", "interleaved")
"""Which dimensions turn together: i and i + r/2, or 2i and 2i + 1."""

ENTRIES = ("all", "first half", "even")
"""Which entries of a table belong to the pairs, in order, where it has one a pair, or two."""


@dataclass(frozen=True)
class Rotation:
    """How one layer rotates its keys.

    Args:
        source: the rotary embedding that it uses; None where it does not rotate.
        start: the first dimension that is rotated.
        size: r, how many are.
        pairs: "half" or "interleaved".
        entries: which entries of a table are the pairs': "all", "first half" or "even".
        swapped: whether the embedding gives the sines first.
        sign: -1 where pairs turn the other way.

    >>> print(Rotation(), "|", Rotation(Source("rotary_emb"), size=64))
    none | half pairs of dimensions 0 to 64, rotary_emb()
    """

    source: Source | None = None
    start: int = 0
    size: int = 0
    pairs: str = "half"
    entries: str = "first half"
    swapped: bool = False
    sign: int = 1

    def __str__(self) -> str:
        if self.source is None:
            return "none"
        end = self.start + self.size
        return f"{self.pairs} pairs of dimensions {self.start} to {end}{' backwards' * (self.sign < 0)}, {self.source}"

    def angles(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the pairs, each ``[..., r/2]``, from the two tables of the source."""
        half = self.size // 2
        chosen = {"all": slice(None), "first half": slice(half), "even": slice(None, None, 2)}[self.entries]
        cos, sin = (second, first) if self.swapped else (first, second)
        return cos[..., chosen], self.sign * sin[..., chosen]

    def members(self, dims: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the second members of the pairs among the last dimension of `dims`."""
        part = dims[..., self.start : self.start + self.size]
        if self.pairs == "half":
            return part[..., : self.size // 2], part[..., self.size // 2 :]
        return part[..., 0::2], part[..., 1::2]

    def joined(self, dims: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return `dims` with the members of its pairs replaced."""
        together = (
            torch.cat([first, second], -1) if self.pairs == "half" else torch.stack([first, second], -1).flatten(-2)
        )
        return torch.cat([dims[..., : self.start], together, dims[..., self.start + self.size :]], dim=-1)


def unrotate(keys: Tensor, columns: Tensor | None, rotation: Rotation, record: RotaryRecord) -> Tensor:
    """Return the keys before RoPE, float32 ``[B, Hkv, T, Dk]``; a scaling of cosines and sines (YaRN) is divided out.

    Args:
        keys: ``[B, Hkv, T, Dk]``, any float dtype, as stored.
        columns: int ``[B, Hkv, T]``: the column of the sequence each slot holds, -1 for none. None: slot t, column t.
        rotation: how their layer rotates, from `find_rotations`.
        record: where the columns of their cache were rotated.

    Raises:
        UnsupportedModelError: when the record does not hold the columns.
    """
    if rotation.source is None:
        return keys.float()
    track = record.tracks.get(rotation.source)
    heard = 0 if track is None else track.positions.shape[-1]
    if track is None or (columns is None and heard != keys.shape[2]):
        raise UnsupportedModelError(
            f"keys before RoPE: expected one position for each of {keys.shape[2]} keys from the model's "
            f"{rotation.source}, got {heard}: run the whole sequence in one session"
        )
    return undo(keys, rotation, *rotation.angles(*track.tables(rotation.source, columns)))


def undo(keys: Tensor, rotation: Rotation, cos: Tensor, sin: Tensor) -> Tensor:
    """Return float32 keys from which the turns with `cos` and `sin`, one a pair, are taken back."""
    keys, cos, sin = keys.float(), cos.to(keys.device, torch.float32), sin.to(keys.device, torch.float32)
    first, second = rotation.members(keys)
    # The inverse of what was applied: with the same rounded cosines and sines, whatever they are scaled by.
    norm = cos.square() + sin.square()
    return rotation.joined(keys, (first * cos + second * sin) / norm, (second * cos - first * sin) / norm)
