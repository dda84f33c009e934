"""One layer keeps what a policy chooses of its slots, and frees the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.plugin import Store
from kvpolicy.policy import Policy
from kvpolicy.session.parallel import HeadGroup
from kvpolicy.step import Left
from kvpolicy.store.layer import EvictingLayer
from kvpolicy.types import LayerView, Merged, Selection

Stored = tuple[Tensor, Tensor, Tensor | None]
"""Keys, values and positions of what a layer holds."""


@dataclass(frozen=True)
class Scored:
    """What a policy has said of the slots that a layer holds.

    Args:
        scores: float32 ``[B, Hkv, T]``.
        importance: likewise, the importance part, or None.
        candidates: bool ``[B, Hkv, T]``: what is not protected.
    """

    scores: Tensor
    importance: Tensor | None
    candidates: Tensor

    def of(self, selection: Selection) -> Scored:
        """Return the same of the selected slots alone, as a store aligns them: each head's at the last."""
        kept = selection.to_mask(self.scores.shape[-1])
        order = kept.int().argsort(dim=-1, stable=True)[..., kept.shape[-1] - int(selection.lengths.max()) :]
        importance = None if self.importance is None else self.importance.gather(-1, order)
        return Scored(self.scores.gather(-1, order), importance, (self.candidates & kept).gather(-1, order))


@dataclass(frozen=True)
class Kept:
    """What an eviction kept.

    Args:
        selection: the slots, the last `tail` not counted.
        tail: how many of the newest stay besides.
        merged: what the selected slots hold from now on; None for what they held.
    """

    selection: Selection
    tail: int
    merged: Merged | None

    def of(self, stored: Stored) -> Left:
        """Return what is left of the slots that the pass of the eviction has stored."""
        keys, values, _ = stored
        kept = self.selection.to_mask(keys.shape[2] - self.tail)
        every = torch.cat([kept, kept.new_ones(*kept.shape[:2], self.tail)], dim=-1)
        if self.merged is None:
            return Left(every)
        at = kept.nonzero(as_tuple=True)
        return Left(every, keys.index_put(at, self.merged.keys), values.index_put(at, self.merged.values))


def keep(
    policy: Policy,
    layer: EvictingLayer,
    stored: Stored,
    view: LayerView,
    scored: Scored,
    tokens: Tensor,
    hold: Store,
    peers: HeadGroup | None,
    time: Callable[[str, torch.device], AbstractContextManager[None]],
) -> Kept:
    """Evict from `layer` all but its budget, and return what was kept.

    Args:
        policy: what chooses, and merges.
        layer: which layer.
        stored: what it holds.
        view: its slots; what it holds beyond them stays.
        scored: what the policy has said of them.
        tokens: int64 ``[B]``, the layer's budget in slots a KV head.
        hold: how the kept slots are held.
        peers: the ranks that hold the layer's other heads.
        time: measures a stage.
    """
    keys = stored[0]
    with time("select", keys.device):
        selection = policy.choose(view, scored.scores, scored.importance, tokens, peers=peers)
    with time("store", keys.device):
        merged = policy.merge(view, selection, layer.memory)
        kept = Kept(selection, keys.shape[2] - view.slots, merged)
        own = selection.of_heads(keys.shape[1]) if view.shared else selection
        layer.evict(stored, own, kept.tail, hold, merged)
    return kept
