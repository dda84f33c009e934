"""What store hands to attend: one update of one layer, tied to the key tensor that the model carries between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

_TAG = "_kvpolicy_step"


class Stored(Protocol):
    """A layer's slots: dense (every head keeps the same number) or ragged."""

    @property
    def ragged(self) -> bool:
        """Whether heads hold different numbers of slots."""

    def padded(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys ``[B, Hkv, T, Dk]``, values ``[B, Hkv, T, Dv]`` and positions, int32 ``[B, Hkv, T]``.

        Heads are aligned at their last slot; an empty slot has position -1. Positions are None where slot t is
        position t in every head.
        """

    def heads(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and the values of each (row, head), ``[n, D]``, without copying."""


@dataclass(frozen=True)
class Step:
    """One update of one layer, as attention has to see it.

    Args:
        store: the layer's slots, the new tokens among them.
        values: the values handed to the model with the keys.
        positions: int32 ``[B, Hkv, T]`` of the dense keys handed to the model, None where slot t is position t.
        start: tokens seen before this update.
        plain: whether the mask is nothing but causal order and padding, and every stored slot is visible.
        attended: called once attention has run, with the query heads' tensor and the scaling.
    """

    store: Stored
    values: Tensor
    positions: Tensor | None
    start: int
    plain: bool
    attended: Callable[[Tensor, float | None], None]

    def carries(self, values: Tensor) -> bool:
        """Return whether these are the values handed to the model, unchanged."""
        return values.shape == self.values.shape and values.data_ptr() == self.values.data_ptr()


def tag(keys: Tensor, step: Step) -> Tensor:
    """Return `keys`, now carrying `step` to the attention function."""
    setattr(keys, _TAG, step)
    return keys


def step_of(keys: Tensor) -> Step | None:
    """Return the step that `keys` carries, or None when it does not come from an evicting layer."""
    return getattr(keys, _TAG, None)
