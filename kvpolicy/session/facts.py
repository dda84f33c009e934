"""What is known of the tokens a cache has seen, besides their keys and values: how they were rotated, what they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.rotary import RotaryRecord, RotaryRecorder, find_rotations, unrotate


@dataclass(frozen=True)
class Facts:
    """By token of the sequence; a value, so that copies of a cache share it safely.

    Args:
        rotary: at which positions each was rotated.
        modality: int8 ``[B, seen]``, what each is; None where no policy asks.
    """

    rotary: RotaryRecord = field(default_factory=RotaryRecord)
    modality: Tensor | None = None

    def extended(self, modality: Tensor | None) -> Facts:
        """Return the facts with what the tokens of a pass are, int8 ``[B, q]``, behind the others."""
        if modality is not None and self.modality is not None:
            modality = torch.cat([self.modality, modality], dim=1)
        return replace(self, modality=modality)

    def take_rows(self, rows: Tensor) -> Facts:
        """Return the facts of the batch rows `rows` (int64), which may repeat."""
        modality = None if self.modality is None else self.modality[rows.to(self.modality.device)]
        return Facts(self.rotary.take_rows(rows), modality)

    def crop(self, count: int) -> Facts:
        """Return the facts of the first `count` tokens."""
        return Facts(self.rotary.crop(count), None if self.modality is None else self.modality[:, :count])


class BeforeRope:
    """Takes the keys of a decoder's layers back to before RoPE.

    Args:
        decoder: runs once, so that how it rotates is seen and not guessed.
        layers: the model's indices of the layers.

    Raises:
        UnsupportedModelError: when how a layer rotates is not known.
    """

    def __init__(self, decoder: PreTrainedModel, layers: Iterable[int]) -> None:
        self._rotations = find_rotations(decoder, list(layers))
        sources = {rotation.source for rotation in self._rotations.values() if rotation.source is not None}
        self.recorder = RotaryRecorder(decoder, sources)

    def __call__(self, layer: int, keys: Tensor, positions: Tensor, facts: Facts) -> Tensor:
        """Return float32 ``[B, Hkv, T, Dk]``.

        Args:
            layer: the model's index of the layer.
            keys: ``[B, Hkv, T, Dk]``, as stored.
            positions: int32 ``[B, Hkv, T]`` or ``[B, 1, T]``, which token each is.
            facts: of the cache the keys are from.
        """
        if layer not in self._rotations:
            raise UnsupportedModelError(f"layer {layer}: how it rotates its keys has not been seen")
        return unrotate(keys, positions, self._rotations[layer], facts.rotary)
