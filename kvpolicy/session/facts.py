"""What is known of the tokens a cache has seen, besides their keys and values: how they were rotated, what they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.rotary import RotaryRecord, RotaryRecorder, find_rotations, unrotate


@dataclass(frozen=True)
class Text:
    """Tokens as the model was given them.

    Args:
        ids: int64 ``[B, q]``.
        positions: int64 ``[B, q]``; None where the model counts by itself.
        autocast: the dtype of the autocast that they were read under; None where there was none.
    """

    ids: Tensor
    positions: Tensor | None
    autocast: torch.dtype | None = None

    def join(self, other: Text) -> Text:
        """Return these tokens and `other` behind them."""
        both = None
        if self.positions is not None and other.positions is not None:
            both = torch.cat([self.positions, other.positions], dim=1)
        return Text(torch.cat([self.ids, other.ids], dim=1), both, other.autocast)

    def take_rows(self, rows: Tensor) -> Text:
        """Return the batch rows `rows` (int64), which may repeat."""
        rows = rows.to(self.ids.device)
        return replace(self, ids=self.ids[rows], positions=None if self.positions is None else self.positions[rows])

    def crop(self, count: int) -> Text:
        """Return the first `count` tokens."""
        positions = None if self.positions is None else self.positions[:, :count]
        return replace(self, ids=self.ids[:, :count], positions=positions)


@dataclass(frozen=True)
class Facts:
    """By token of the sequence; a value, so that copies of a cache share it safely.

    Args:
        rotary: at which positions each was rotated.
        modality: int8 ``[B, seen]``, what each is; None where no policy asks.
        text: those of the prompt; None where no policy asks.
        change: by layer, float32 ``[B, seen]``, the cosine similarity of each token of the prompt before and after the
            layer's attention; empty where no policy asks.
    """

    rotary: RotaryRecord = field(default_factory=RotaryRecord)
    modality: Tensor | None = None
    text: Text | None = None
    change: Mapping[int, Tensor] = field(default_factory=dict)

    def extended(self, modality: Tensor | None, text: Text | None) -> Facts:
        """Return the facts with those of a pass behind them: what its tokens are, int8 ``[B, q]``, and its text."""
        if modality is not None and self.modality is not None:
            modality = torch.cat([self.modality, modality], dim=1)
        if text is not None and self.text is not None:
            text = self.text.join(text)
        return replace(self, modality=modality, text=text or self.text)

    def changed(self, change: Mapping[int, Tensor]) -> Facts:
        """Return the facts with what a pass has shown of its tokens, by layer, float32 ``[B, q]``."""
        both = {
            layer: torch.cat([self.change[layer], new], dim=1) if layer in self.change else new
            for layer, new in change.items()
        }
        return replace(self, change=both)

    @property
    def gathered(self) -> set[int]:
        """Of how many tokens of the prompt there is text, and what a layer's attention changes."""
        text = set() if self.text is None else {self.text.ids.shape[1]}
        return text | {each.shape[1] for each in self.change.values()}

    def take_rows(self, rows: Tensor) -> Facts:
        """Return the facts of the batch rows `rows` (int64), which may repeat."""
        modality = None if self.modality is None else self.modality[rows.to(self.modality.device)]
        text = None if self.text is None else self.text.take_rows(rows)
        change = {layer: each[rows.to(each.device)] for layer, each in self.change.items()}
        return Facts(self.rotary.take_rows(rows), modality, text, change)

    def crop(self, count: int) -> Facts:
        """Return the facts of the first `count` tokens."""
        modality = None if self.modality is None else self.modality[:, :count]
        text = None if self.text is None else self.text.crop(count)
        change = {layer: each[:, :count] for layer, each in self.change.items()}
        return Facts(self.rotary.crop(count), modality, text, change)


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
