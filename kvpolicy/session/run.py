"""`CacheRun`: what one cache goes through in a session."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvpolicy.capture import layer_view, visible_columns
from kvpolicy.errors import InactiveSessionError
from kvpolicy.policy import Policy
from kvpolicy.report import LayerRecord, Report
from kvpolicy.store.layer import EvictingLayer


class RunOwner(Protocol):
    """The session a run belongs to."""

    @property
    def active(self) -> bool:
        """Whether it is entered."""

    def cannot_act(self, reason: str) -> None:
        """Raise or warn that the policy could not act."""


class CacheRun:
    """The owner of one cache's evicting layers: decides what they keep, and records it.

    It holds none of their tensors, so that a cache dies with its last user.

    Args:
        policy: what decides.
        evictable: the indices of the layers it owns.
        owner: the session it belongs to.
    """

    def __init__(self, policy: Policy, evictable: list[int], owner: RunOwner) -> None:
        self.policy = policy
        self.owner = owner
        self.report = Report(policy.name, {index: LayerRecord(index) for index in evictable})
        self.plain = True
        self._depth = {index: depth for depth, index in enumerate(evictable)}
        self._mask: Any = None
        self._columns: Tensor | None = None
        self._budgets: Tensor | None = None
        self._pending: set[int] = set()
        self._reached: set[int] = set()
        self._open = False

    def __deepcopy__(self, memo: object) -> CacheRun:
        # A copied cache has tensors of its own, and the same session.
        return self

    def __reduce__(self) -> NoReturn:
        raise InactiveSessionError("an evicted cache belongs to a session in this process: it cannot be pickled")

    def require_active(self) -> None:
        """Raise unless the session that made this cache is entered."""
        if not self.owner.active:
            raise InactiveSessionError(
                f"this cache belongs to a session of policy '{self.policy.name}' that is not active here: "
                "use it inside its `with policy.on(model):` block"
            )

    def begin(self, cache: Cache, mask: Any) -> None:
        """Start a forward pass of `cache` with the model's attention mask."""
        layers = evicting_layers(cache)
        if (self._open and self._reached | self._pending) or len({layer.seen for layer in layers}) > 1:
            raise InactiveSessionError(
                "this cache was left half-written by a forward pass that failed: start again with an empty one"
            )
        self._mask, self._columns, self._budgets = mask, None, None
        self._pending, self._reached = set(), set()
        self._open = True
        # Only a CPU asks: reading a mask on another device would wait for it.
        self.plain = mask is None or (
            isinstance(mask, Tensor)
            and mask.ndim == 2
            and mask.device.type == "cpu"
            and bool(mask[:, layers[0].settled_at :].all())
        )

    def finish(self) -> None:
        """End a forward pass: check that the policy reached every layer."""
        self._mask = self._columns = self._budgets = None
        self._open = False
        missed = sorted(self._depth.keys() - self._reached)
        if missed:
            self.owner.cannot_act(
                f"layers {missed} do not attend through transformers' attention interface with the keys and values "
                "that they cache"
            )

    def updating(self, layer: EvictingLayer) -> None:
        """Take note before an update; raise where the session is not active."""
        self.require_active()
        if not self._open:
            raise InactiveSessionError(
                f"this cache belongs to a session of policy '{self.policy.name}' on another model than the one using it"
            )
        self._pending.add(layer.index)

    def attended(self, layer: EvictingLayer, query: Tensor, scaling: float | None) -> None:
        """Evict from `layer` after a prompt's tokens, and record what it holds."""
        # Keys that several modules share, or that are attended to twice, call back more than once for an update.
        if layer.index not in self._pending:
            return
        self._pending.remove(layer.index)
        self._reached.add(layer.index)
        if query.shape[2] == layer.seen or query.shape[2] > 1:
            if self.policy.trivial:
                layer.own()
            else:
                self._evict(layer, query, scaling)
        self.report.layers[layer.index] = _record(layer)

    def _evict(self, layer: EvictingLayer, query: Tensor, scaling: float | None) -> None:
        policy, time = self.policy, self.report.stopwatch.time
        device = query.device
        # Scores are float32 whatever the model computes in, and what is stored outlives `torch.inference_mode`.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            with time("capture", device):
                if self._columns is None:
                    self._columns = visible_columns(self._mask, layer.seen)
                stored = layer.padded()
                view = layer_view(
                    stored, query, self._columns, policy.needs, seen=layer.seen, layer=layer.index, scaling=scaling
                )
                if self._budgets is None:
                    self._budgets = policy.layer_slots(view.seen, len(self._depth))
                tokens = self._budgets[:, self._depth[layer.index]].to(device)
                view = policy.protect(view, tokens)
            with time("score", device):
                scores, importance = policy.scores(view)
            with time("select", device):
                selection = policy.choose(view, scores, importance, tokens)
            with time("store", device):
                layer.evict(stored, selection)


def evicting_layers(cache: Any) -> list[EvictingLayer]:
    """Return the evicting layers of a cache; none for a cache that is not ours."""
    return [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, EvictingLayer)]


def run_of(cache: Any) -> CacheRun | None:
    """Return the run a cache belongs to, or None."""
    owner = next((layer.owner for layer in evicting_layers(cache)), None)
    return owner if isinstance(owner, CacheRun) else None


def _record(layer: EvictingLayer) -> LayerRecord:
    if layer.store is None:
        return LayerRecord(layer.index)
    stored, index = layer.store.nbytes
    slot = sum(part.shape[-1] * part.itemsize for part in (layer.store.keys, layer.store.values))
    heads = sum(len(row) for row in layer.kept)
    return LayerRecord(layer.index, layer.seen, layer.kept, stored, index, heads * layer.seen * slot)
