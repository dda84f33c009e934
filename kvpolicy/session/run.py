"""`CacheRun`: what one cache goes through in a session."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvpolicy.capture import layer_view, visible_columns
from kvpolicy.errors import InactiveSessionError, UnsupportedModelError
from kvpolicy.policy import Policy
from kvpolicy.report import LayerRecord, Report
from kvpolicy.session.layers import evicting_layers
from kvpolicy.session.when import Prompt, eviction_point, reads, unread
from kvpolicy.step import Attended, forget
from kvpolicy.store.layer import EvictingLayer
from kvpolicy.types import LayerView
from kvpolicy.window import extend


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
        self._pass: _Pass | None = None
        self._read: _Pass | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> CacheRun:
        # A copied cache has tensors of its own, and the same session.
        copied = CacheRun(self.policy, list(self._depth), self.owner)
        copied.report.left_alone = self.report.left_alone
        copied.report.layers = dict(self.report.layers)
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> NoReturn:
        raise InactiveSessionError("an evicted cache belongs to a session in this process: it cannot be pickled")

    def require_active(self) -> None:
        """Raise unless the session that made this cache is entered."""
        if not self.owner.active:
            raise InactiveSessionError(
                f"this cache belongs to a session of policy '{self.policy.name}' that is not active here: "
                "use it inside its `with policy.on(model):` block"
            )

    def begin(self, cache: Cache, mask: Any, prompt: Prompt) -> None:
        """Start a forward pass of `cache` with the model's attention mask, over a part of `prompt`."""
        layers = evicting_layers(cache)
        half = self._pass is not None and (self._pass.pending or self._pass.reached)
        if half or len({layer.seen for layer in layers if layer.seen}) > 1:
            raise InactiveSessionError(
                "this cache was left half-written by a forward pass that failed: start again with an empty one"
            )
        self._pass = _Pass(mask, prompt)
        # Only a CPU asks: reading a mask on another device would wait for it.
        self.plain = mask is None or (
            isinstance(mask, Tensor)
            and mask.ndim == 2
            and mask.device.type == "cpu"
            and bool(mask[:, max(layer.settled_at for layer in layers) :].all())
        )

    def finish(self) -> None:
        """End a forward pass: check that the policy reached every layer that has cached something."""
        ended, self._pass = self._pass, None
        forget()
        if ended is None:
            return
        self._read = ended if ended.prompt.unfinished else None
        missed = sorted(ended.pending)
        if missed:
            self.owner.cannot_act(f"layers {missed} do not attend through transformers' attention interface")
        elif not ended.reached:
            self.owner.cannot_act(f"none of its layers {sorted(self._depth)} has cached anything")

    def updating(self, layer: EvictingLayer, new: int) -> int | None:
        """Return how many of `new` tokens come before the pass evicts, None where it does not evict in its middle."""
        self.require_active()
        now = self._pass
        if now is None:
            raise InactiveSessionError(
                f"this cache belongs to a session of policy '{self.policy.name}' on another model than the one using it"
            )
        if now.new is None:
            now.new = new
            start, end = layer.seen, layer.seen + new
            now.decoding = not reads(now.prompt, start, end)
            now.point = eviction_point(self.policy, now.prompt, start=start, end=end, settled=layer.settled_at)
        elif now.new != new:
            raise UnsupportedModelError(
                f"layer {layer.index}: expected the {now.new} new tokens of this pass, got {new}: it does not cache "
                "what the other layers do"
            )
        now.pending.add(layer.index)
        if now.point is None or now.point == layer.seen + new or self.policy.trivial:
            return None
        return now.point - layer.seen

    def attended(self, layer: EvictingLayer, attended: Attended) -> Tensor | None:
        """Evict from `layer` if the pass is due to, and record what it holds."""
        now = self._pass
        if now is None:
            raise InactiveSessionError("attention ran outside a forward pass of the model of this cache's session")
        # Keys that several modules share, or that are attended to twice, call back more than once for an update.
        if layer.index not in now.pending:
            return now.kept.get(layer.index)
        now.pending.remove(layer.index)
        now.reached.add(layer.index)
        layer.scaling = attended.scaling
        layer.shared = attended.derived is not None
        # Scores are float32 whatever the model computes in, and what is stored outlives `torch.inference_mode`.
        device = attended.query.device
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            if self.policy.trivial:
                layer.own()
            else:
                self._record_queries(layer, attended.query, now)
                if now.point is not None:
                    self._evict(layer, now, now.point, attended.derived)
        self.report.layers[layer.index] = _record(layer)
        return now.kept.get(layer.index)

    def settle(self, cache: Cache) -> None:
        """Evict now from every layer of a cache whose prompt has been read in several passes.

        Raises:
            UnsupportedModelError: when the model derives what it attends to: it is there during a pass only.
        """
        read, self._read = self._read, None
        if read is None or self.policy.trivial or self.policy.prefill == "chunks":
            return
        read.prompt = Prompt()
        for layer in evicting_layers(cache):
            if layer.shared:
                raise UnsupportedModelError(
                    f"layer {layer.index}: its keys are derived from what it caches, so that it evicts within a pass "
                    "only: read the prompt in one pass, or declare `prefill: chunks`"
                )
            if layer.seen:
                with torch.inference_mode(False), torch.no_grad():
                    self._evict(layer, read, layer.seen, None)
                self.report.layers[layer.index] = _record(layer)

    def _record_queries(self, layer: EvictingLayer, query: Tensor, now: _Pass) -> None:
        size = self.policy.needs.queries
        unread_after = unread(now.prompt, layer.seen)
        if not size or (now.point is None and not unread_after and self.policy.decode is None):
            return
        with self.report.stopwatch.time("capture", query.device):
            visible = now.visible(layer.seen)
            start = layer.seen - (now.new or 0)
            layer.window = extend(layer.window, query, visible, start, size)

    def _evict(self, layer: EvictingLayer, now: _Pass, point: int, derived: tuple[Tensor, Tensor] | None) -> None:
        policy, time = self.policy, self.report.stopwatch.time
        tail = layer.seen - point
        stored = layer.padded()
        device = stored[0].device
        with time("capture", device):
            view = self._view(layer, stored, now.visible(layer.seen), point, derived)
            if now.budgets is None:
                now.budgets = policy.layer_slots(view.seen, len(self._depth))
            tokens = now.budgets[:, self._depth[layer.index]].to(device)
            grace = policy.decode.grace if policy.decode is not None and now.decoding else 0
            view = policy.protect(view, tokens, grace=grace)
        with time("score", device):
            scores, importance = policy.scores(view)
        with time("select", device):
            selection = policy.choose(view, scores, importance, tokens)
        with time("store", device):
            if tail:
                kept = selection.to_mask(view.slots)
                now.kept[layer.index] = torch.cat([kept, kept.new_ones(*kept.shape[:2], tail)], dim=-1)
            if derived is not None:
                selection = selection.of_heads(stored[0].shape[1])
            layer.evict(stored, selection, tail)
        if policy.decode is None and not unread(now.prompt, layer.seen):
            layer.window = None

    def _view(
        self,
        layer: EvictingLayer,
        stored: tuple[Tensor, Tensor, Tensor | None],
        visible: Tensor | None,
        point: int,
        derived: tuple[Tensor, Tensor] | None,
    ) -> LayerView:
        """Return the view of what the layer holds of the first `point` tokens."""
        keys, values, positions = stored
        if derived is not None:
            keys, values = derived
            if positions is not None:
                positions = positions[:, :1].expand(-1, keys.shape[1], -1)
        end = stored[0].shape[2] - (layer.seen - point)
        parts = keys[:, :, :end], values[:, :, :end], None if positions is None else positions[:, :, :end]
        return layer_view(
            parts,
            layer.window,
            visible,
            seen=point,
            layer=layer.index,
            scaling=layer.scaling,
            shared=derived is not None,
        )

    def took_rows(self, layer: EvictingLayer, rows: Tensor) -> None:
        """Take note that the layer's batch is now its rows `rows`."""
        self.report.layers[layer.index] = _record(layer)

    def cropped(self, layer: EvictingLayer) -> None:
        """Take note that the layer has lost its last tokens."""
        self.report.layers[layer.index] = _record(layer)


@dataclass
class _Pass:
    """One forward pass.

    Args:
        mask: the model's attention mask.
        prompt: what is known of the prompt it belongs to.
        new: its tokens; None before its first layer.
        decoding: whether it comes after the prompt.
        point: tokens seen when it evicts, None where it does not.
        budgets: int64 ``[B, layers]``, once known.
        kept: by layer, what stays of the slots, bool ``[B, Hkv, T]``, where the pass goes on after it evicts.
        pending: layers that have cached its tokens and not yet attended to them.
        reached: layers that have attended.
    """

    mask: Any
    prompt: Prompt
    new: int | None = None
    decoding: bool = False
    point: int | None = None
    budgets: Tensor | None = None
    kept: dict[int, Tensor] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    _visible: tuple[Tensor | None] | None = None

    def visible(self, seen: int) -> Tensor | None:
        """Return bool ``[B, seen]``, False for padding, or None where nothing is padded."""
        if self._visible is None:
            self._visible = (visible_columns(self.mask, seen),)
        return self._visible[0]


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
