"""What store hands to attend: one update of one layer, and how the attention function finds it again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

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


Mark = tuple[tuple[int, ...], int]
"""A tensor's shape and where its storage begins."""


def mark(tensor: Tensor) -> Mark:
    """Return what tells a tensor from others that live at the same time."""
    return tuple(tensor.shape), tensor.data_ptr()


@dataclass(frozen=True)
class Attended:
    """What attention has just read.

    Args:
        module: whose attention it is.
        query: ``[B, Hq, q, Dk]``, those up to where the pass evicts.
        scaling: what ``q @ k`` is multiplied by.
        derived: keys and values ``[B, H, T, D]`` that the model derived from what the layer caches; None where it
            attended to what the layer caches.
    """

    module: nn.Module
    query: Tensor
    scaling: float | None
    derived: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Left:
    """What an eviction leaves of the slots that attention has read, where the pass goes on after it.

    Args:
        kept: bool ``[B, H, T]``, which of them stay.
        keys: ``[B, H, T, Dk]``, what they hold from now on; None where that is what they held.
        values: ``[B, H, T, Dv]``, likewise.
    """

    kept: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """One update of one layer, as attention has to see it.

    Args:
        layer: the model's layer index.
        store: the layer's slots, the new tokens among them.
        keys: which keys were handed to the model: not themselves, as they carry the step.
        values: which values were.
        positions: int32 ``[B, Hkv, T]`` of the keys, None where slot t is position t.
        start: tokens seen before this update.
        new: tokens of this update.
        plain: whether the mask is nothing but causal order and padding, and every stored slot is visible.
        shared: whether the model derives what it attends to; None in the first pass, which shows it.
        cut: how many of the pass's queries come before it evicts, where it evicts in its middle; else None.
        attended: called once attention has run; returns what is left of the slots that were there, where the pass
            goes on after it evicts.
    """

    layer: int
    store: Stored
    keys: Mark
    values: Mark
    positions: Tensor | None
    start: int
    new: int
    plain: bool
    shared: bool | None
    cut: int | None
    attended: Callable[[Attended], Left | None]

    def derived(self, keys: Tensor, values: Tensor) -> bool:
        """Return whether the model attends to keys or values derived from those handed to it."""
        if self.shared is not None:
            return self.shared
        return (mark(keys), mark(values)) != (self.keys, self.values)


class _Latest(threading.local):
    step: Step | None = None
    module: Any = None


_latest = _Latest()


def tag(keys: Tensor, step: Step) -> Tensor:
    """Return `keys`, now carrying `step` to the attention function."""
    setattr(keys, _TAG, step)
    _latest.step, _latest.module = step, None
    return keys


def forget() -> None:
    """Forget the latest update: a pass or a session has ended."""
    _latest.step, _latest.module = None, None


def step_of(keys: Tensor, module: Any) -> Step | None:
    """Return the step that `keys` come from, or None when they do not come from an evicting layer.

    A model that derives its keys from what it caches (MLA) loses the tag: then the step is the latest update, if it is
    this module's layer and there are as many keys.
    """
    tagged: Step | None = getattr(keys, _TAG, None)
    if tagged is not None:
        return tagged
    step = _latest.step
    if step is None or _latest.module not in (None, module):
        return None
    if getattr(module, "layer_idx", step.layer) != step.layer or keys.shape[2] != step.keys[0][2]:
        return None
    _latest.module = module
    return step
