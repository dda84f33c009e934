"""`CacheRun`: what one cache goes through in a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvpolicy.capture import at_slots, layer_view
from kvpolicy.errors import ContextError, InactiveSessionError, UnsupportedModelError
from kvpolicy.policy import Policy
from kvpolicy.report import LayerRecord, Report
from kvpolicy.session.calls import CallWatch
from kvpolicy.session.change import ChangeWatch, mean_over
from kvpolicy.session.facts import BeforeRope, Facts
from kvpolicy.session.keep import Scored, keep
from kvpolicy.session.layers import evicting_layers, lengths
from kvpolicy.session.parallel import HeadGroup
from kvpolicy.session.passes import Pass, record
from kvpolicy.session.repetition import Repeater
from kvpolicy.session.waiting import Waiting
from kvpolicy.session.when import Prompt, eviction_point, reads, unread
from kvpolicy.step import Attended, Left, forget
from kvpolicy.store.layer import EvictingLayer
from kvpolicy.store.settings import Plain
from kvpolicy.store.state import State
from kvpolicy.types import LayerView
from kvpolicy.window import extend


class RunOwner(Protocol):
    """The session a run belongs to."""

    @property
    def active(self) -> bool:
        """Whether it is entered."""

    @property
    def peers(self) -> HeadGroup | None:
        """The ranks that may hold other heads of the model, or None."""

    def cannot_act(self, reason: str) -> None:
        """Raise or warn that the policy could not act."""


class CacheRun:
    """The owner of one cache's evicting layers: decides what they keep, and records it.

    It holds none of their tensors, so that a cache dies with its last user.

    Args:
        policy: what decides.
        evictable: the indices of the layers it owns.
        owner: the session it belongs to.
        before_rope: takes keys back to before RoPE, where the policy needs it.
        calls: reads what attention modules are called with, where the policy needs it.
        repeat: has the model repeat the prompt, where the policy needs it.
        change: sees how little each layer's attention changes, where the policy needs it.
    """

    def __init__(
        self,
        policy: Policy,
        evictable: list[int],
        owner: RunOwner,
        before_rope: BeforeRope | None = None,
        calls: CallWatch | None = None,
        repeat: Repeater | None = None,
        change: ChangeWatch | None = None,
    ) -> None:
        self.policy = policy
        # Once: a walk over the score tree for each token and layer is a tenth of a small model's decoding.
        self._window = policy.needs.queries
        self._before_rope = before_rope
        self._calls = calls
        self._repeat = repeat
        self._change = change
        self._facts = Facts()
        self.owner = owner
        self.report = Report(policy.name, {index: LayerRecord(index) for index in evictable}, peers=owner.peers)
        self.plain = True
        self._depth = {index: depth for depth, index in enumerate(evictable)}
        self._pass: Pass | None = None
        self._read: Pass | None = None
        # Tokens seen when the prompt was settled for good: what follows decodes, in passes of any length.
        self._ended: int | None = None
        # How many tokens of each row were padding at the last eviction, int64 [B]; None where none were.
        self._hidden: Tensor | None = None
        # What the prompt has said of each layer, float32 [B, layers, Hkv, n], where layers share their slots out.
        self._notes: Tensor | None = None
        # By layer, float32 [B, Hkv, seen]: what a repetition of the prompt attended to, until the layer has evicted.
        self._repeated: dict[int, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> CacheRun:
        if self._read is not None:
            raise InactiveSessionError("this cache is in the midst of a prompt: copy it once the prompt is read")
        # A copied cache has tensors of its own, and the same session.
        listening = self._before_rope, self._calls, self._repeat, self._change
        copied = CacheRun(self.policy, list(self._depth), self.owner, *listening)
        copied._facts = self._facts
        copied._hidden = self._hidden
        copied._notes = self._notes
        copied.report.left_alone = self.report.left_alone
        copied.report.layers = dict(self.report.layers)
        copied.report.query_aware = self.report.query_aware
        copied._ended = self._ended
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

    def move(self, owner: RunOwner, before_rope: BeforeRope | None, ended: int) -> None:
        """Belong to another session; the prompt has ended after `ended` tokens, and what follows decodes."""
        self.owner, self._ended = owner, ended
        # Only an eviction asks.
        self._before_rope = None if self.policy.decode is None else before_rope
        self._calls = self._repeat = self._change = None

    def state(self) -> State:
        """Return what later passes need to know of the tokens seen.

        Raises:
            ContextError: when a file cannot hold it.
        """
        known = {} if self._hidden is None else {"hidden": self._hidden}
        if self.policy.decode is None or self.policy.trivial:
            return State(known, {})
        if self._notes is not None:
            known["notes"] = self._notes
        if self.policy.needs.pre_rope:
            raise ContextError(
                f"policy '{self.policy.name}' evicts while decoding, by keys before RoPE: expected a policy without "
                "`decode` or without `space: pre-rope`, as a file cannot hold how the keys were rotated"
            )
        if self._facts.modality is not None:
            known["modality"] = self._facts.modality
        return State(known, {})

    def restore(self, state: State, cache: Cache) -> None:
        """Take what the run of another cache knew, and record what `cache` holds."""
        self._facts = Facts(modality=state.tensors.get("modality"))
        self._hidden = state.tensors.get("hidden")
        self._notes = state.tensors.get("notes")
        self.report.layers = {layer.index: record(layer) for layer in evicting_layers(cache)}

    def begin(self, cache: Cache, mask: Any, prompt: Prompt, modality: Tensor | None, given: dict[str, Any]) -> None:
        """Start a forward pass of `cache`.

        Args:
            cache: the one this run belongs to.
            mask: the model's attention mask.
            prompt: what is known of the prompt that the pass is a part of.
            modality: int8 ``[B, q]``, what each token of the pass is, where the policy needs it.
            given: what the decoder is called with, by name.
        """
        layers = evicting_layers(cache)
        half = self._pass is not None and (self._pass.pending or self._pass.reached)
        if half or len(lengths(cache)) > 1:
            raise InactiveSessionError(
                "this cache was left half-written by a forward pass that failed: start again with an empty one"
            )
        text = None if self._repeat is None else self._repeat.text(given)
        self._pass = Pass(mask, prompt if self._ended is None else Prompt(end=self._ended), modality, text)
        if self._before_rope is not None:
            self._before_rope.recorder.begin(self._facts.rotary)
        if self._change is not None:
            self._change.begin()
        self.plain = mask is None or self._is_plain(mask, max(layer.settled_at for layer in layers))

    def _is_plain(self, mask: Any, settled: int) -> bool:
        """Return whether a mask hides what was padding at the last eviction, and nothing since."""
        # Only a CPU asks: reading a mask on another device would wait for it.
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.device.type != "cpu":
            return False
        if not mask[:, settled:].all():
            return False
        hidden = mask[:, :settled] == 0
        return not hidden.any() if self._hidden is None else torch.equal(hidden, self._hidden)

    def finish(self) -> bool:
        """End a forward pass; return whether a prompt has been read that is to be settled now.

        It is checked that the policy reached every layer that has cached something.
        """
        ended, self._pass = self._pass, None
        forget()
        if self._before_rope is not None:
            self._facts = replace(self._facts, rotary=self._before_rope.recorder.end())
        if self._change is not None and (seen := self._change.end()):
            self._facts = self._facts.changed(seen)
        if ended is None:
            return False
        self._read = ended if ended.prompt.unfinished or ended.ends else None
        missed = sorted(ended.pending)
        if missed:
            self.owner.cannot_act(f"layers {missed} do not attend through transformers' attention interface")
        elif not ended.reached:
            self.owner.cannot_act(f"none of its layers {sorted(self._depth)} has cached anything")
        return ended.ends

    def updating(self, layer: EvictingLayer, new: int) -> int | None:
        """Return how many of `new` tokens come before the pass evicts, None where it does not evict in its middle."""
        self.require_active()
        now = self._pass
        if now is None:
            raise InactiveSessionError(
                f"this cache belongs to a session of policy '{self.policy.name}' on another model than the one using it"
            )
        if now.new is None:
            start, end = layer.seen, layer.seen + new
            now.decoding = not reads(now.prompt, start, end)
            now.point = eviction_point(self.policy, now.prompt, start=start, end=end, settled=layer.settled_at)
            if self._calls is not None:
                self._require_one_pass(now, start, end)
            if self.policy.late and not now.decoding:
                self._wait_for_all(now, layer, end)
            now.new = new
            self._facts = self._facts.extended(now.modality, None if now.decoding else now.text)
        elif now.new != new:
            raise UnsupportedModelError(
                f"layer {layer.index}: expected the {now.new} new tokens of this pass, got {new}: it does not cache "
                "what the other layers do"
            )
        now.pending.add(layer.index)
        if now.point is None or now.point == layer.seen + new or self.policy.trivial:
            return None
        return now.point - layer.seen

    def _wait_for_all(self, now: Pass, layer: EvictingLayer, end: int) -> None:
        """Have a pass over a part of the prompt evict nothing until all layers have read it."""
        what = f"policy '{self.policy.name}' needs {self.policy.needs.words}, once all layers have read the prompt"
        if now.point is not None and now.point < end:
            raise UnsupportedModelError(
                f"{what}: expected a pass that ends with the prompt, got one that reads {end - now.point} tokens more: "
                "generate without drafts"
            )
        if layer.settled_at:
            raise UnsupportedModelError(
                f"{what}: expected a prompt in an empty cache, got one behind {layer.settled_at} tokens that have been "
                "evicted from: read what follows one token at a time, or use policy.compress and ask a fork"
            )
        now.ends, now.point = now.point is not None, None

    def _require_one_pass(self, now: Pass, start: int, end: int) -> None:
        if not unread(now.prompt, end) and (start == 0 or now.point is None):
            return
        got = f"a cache that has already seen {start} tokens" if start else "a part of it"
        raise UnsupportedModelError(
            f"policy '{self.policy.name}' needs what the attention modules are called with (`call`), which is there "
            f"during one pass: expected the whole prompt in one pass into an empty cache, got {got}. Read it without "
            "run.prompt() and prefill_chunk_size, or use scorers that read keys, values and queries alone"
        )

    def attended(self, layer: EvictingLayer, attended: Attended) -> Left | None:
        """Evict from `layer` if the pass is due to, and record what it holds."""
        now = self._pass
        if now is None:
            raise InactiveSessionError("attention ran outside a forward pass of the model of this cache's session")
        # Keys that several modules share, or that are attended to twice, call back more than once for an update.
        if layer.index not in now.pending:
            return now.left.get(layer.index)
        now.pending.remove(layer.index)
        now.reached.add(layer.index)
        layer.scaling = attended.scaling
        layer.shared = attended.derived is not None
        if self._change is not None and not now.decoding:
            self._change.attended(attended.module, layer.index, now.new or 0)
        if self.policy.trivial:
            layer.own()
        else:
            self._require_own_keys(layer)
            self._record_queries(layer, attended.query, now)
            if now.point is not None:
                with _apart(attended.query.device):
                    self._evict(layer, now, now.point, attended)
        self.report.layers[layer.index] = record(layer)
        return now.left.get(layer.index)

    def _require_own_keys(self, layer: EvictingLayer) -> None:
        if layer.shared and self.policy.merges:
            raise UnsupportedModelError(
                f"layer {layer.index}: its keys are derived from what it caches, which is nothing that "
                f"'{self.policy.evicted.name}' could merge the evicted into: declare `evicted: drop`"
            )

    def settle(self, cache: Cache) -> None:
        """Evict now from every layer of a cache whose prompt has been read and not been evicted from.

        Raises:
            UnsupportedModelError: when the model derives what it attends to: it is there during a pass only.
        """
        read, self._read = self._read, None
        if read is None or read.point is not None:
            return
        read.prompt = Prompt()
        if self._repeat is not None and self._facts.text is not None:
            visible = read.visible(self._facts.text.ids.shape[1])
            with self.report.stopwatch.time("capture", self._facts.text.ids.device):
                self._repeated = self._repeat(cache, self._facts.text, visible)
        for layer in evicting_layers(cache):
            if not self.policy.trivial and layer.seen:
                self._settle(layer, read)
            self.report.layers[layer.index] = record(layer)
        self._repeated, self._facts = {}, replace(self._facts, text=None, change={})

    def _settle(self, layer: EvictingLayer, read: Pass) -> None:
        if layer.shared:
            raise UnsupportedModelError(
                f"layer {layer.index}: its keys are derived from what it caches, so that it evicts within a pass "
                "only: read the prompt in one pass, or declare `prefill: chunks`"
            )
        with _apart(layer.padded()[0].device):
            self._evict(layer, read, layer.seen, None)

    def of_policy(self, policy: Policy, owner: RunOwner) -> CacheRun:
        """Return the run of another policy over the prompt that this one has read and not evicted from.

        Args:
            policy: it needs no more than the policy of this run.
            owner: the session it belongs to.
        """
        if self._read is None:
            raise InactiveSessionError("expected a prompt that has been read and not been evicted from")
        before_rope = self._before_rope if policy.needs.pre_rope else None
        other = CacheRun(policy, list(self._depth), owner, before_rope)
        other._facts = self._facts if policy.needs.modality else replace(self._facts, modality=None)
        other._read = replace(self._read, waiting=[])
        other.report.left_alone = self.report.left_alone
        return other

    def _record_queries(self, layer: EvictingLayer, query: Tensor, now: Pass) -> None:
        later = self.policy.decode is not None or now.ends or unread(now.prompt, layer.seen)
        if not self._window or (now.point is None and not later):
            return
        start = layer.seen - (now.new or 0)
        # Under a plain mask, what is padding was there before the last eviction: none of it is of this pass.
        if self.plain and layer.window is not None and query.shape[2] == 1:
            # A copy: the model's own tensor may be a view of a larger one, or hold what a gradient would be taken by.
            layer.window = layer.window.followed_by(query.detach().clone(), start, self._window)
            return
        with _apart(query.device), self.report.stopwatch.time("capture", query.device):
            visible = None if self.plain else now.visible(layer.seen)
            layer.window = extend(layer.window, query, visible, start, self._window)

    def _evict(self, layer: EvictingLayer, now: Pass, point: int, attended: Attended | None) -> None:
        derived = None if attended is None else attended.derived
        policy, time = self.policy, self.report.stopwatch.time
        stored = layer.padded()
        device = stored[0].device
        with time("capture", device):
            layer.window = None if layer.window is None else layer.window.whole()
            visible = now.visible(layer.seen)
            view = self._view(layer, stored, visible, point, derived)
            if self._calls is not None and attended is not None:
                view = replace(view, call=self._calls.of(attended.module, read=layer.seen, end=point))
            if now.budgets is None:
                now.budgets = self._budgets(view, now)
                self._hidden = None if visible is None else ~visible[:, :point]
            tokens = now.budgets[:, self._depth[layer.index]].to(device)
            grace = policy.decode.grace if policy.decode is not None and now.decoding else 0
            view = policy.protect(view, tokens, grace=grace)
        sharing = policy.across_layers and not self._knows_shares(now)
        with time("score", device):
            peers = self.owner.peers if policy.across_heads or sharing or view.shared else None
            peers = None if peers is None else peers.of(view)
            scores, importance = policy.scores(view, peers=peers)
        scored = Scored(scores, importance, view.candidates)
        if sharing:
            if derived is not None or layer.seen > point:
                self._refuse_sharing(layer, derived)
            now.waiting.append(Waiting(layer, policy.note(view, scores, peers), scored))
            self._share(now, view, point, peers)
            return
        left = keep(policy, layer, stored, view, scored, tokens, policy.store, peers, time)
        if layer.seen > point:
            now.left[layer.index] = left.of(stored)
        if policy.decode is None and not unread(now.prompt, layer.seen):
            layer.window = None

    def _budgets(self, view: LayerView, now: Pass) -> Tensor:
        """Return the budgets that the layers of a pass begin with, int64 ``[B, layers]``."""
        layers = len(self._depth)
        budgets = self.policy.layer_slots(view.seen, layers)
        if self._notes is None or not self._knows_shares(now):
            return budgets
        protecting = self.policy.protect(view, budgets[:, self._depth[view.layer]].to(view.seen.device))
        return self.policy.shared_slots(self._notes.unbind(1), protecting, layers)

    def _knows_shares(self, now: Pass) -> bool:
        """Return whether the prompt has said already how much each layer keeps."""
        return now.decoding and self._notes is not None

    def _refuse_sharing(self, layer: EvictingLayer, derived: object) -> NoReturn:
        why = (
            "tokens that follow the prompt in the same pass would see what is evicted only once all layers are read: "
            "read the prompt in a pass of its own (run.prompt()), or generate without drafts"
            if derived is None
            else "its keys are derived from what it caches, and are there during its own pass alone"
        )
        raise UnsupportedModelError(
            f"layer {layer.index}: layer budget '{self.policy.budget.layers.name}' shares slots out among layers; {why}"
        )

    def _share(self, now: Pass, view: LayerView, point: int, peers: HeadGroup | None) -> None:
        """Cut the layers read so far to what each may hold by now."""
        policy, layers = self.policy, len(self._depth)
        shares = policy.shared_slots([each.note for each in now.waiting], view, layers)
        done = len(now.waiting) == layers
        # What is stored in fewer bits would be rounded again by each cut.
        hold = policy.store if done else Plain()
        for depth, (one, share) in enumerate(zip(now.waiting, shares.unbind(1), strict=True)):
            if not done:
                # What is merged into slots that go later would be lost: it waits for the last layer.
                share = view.seen if policy.merges else one.due(share, view.seen)
            if not done and bool((share == view.seen).all()):
                continue
            stored = one.layer.padded()
            held = self._view(one.layer, stored, now.visible(one.layer.seen), point, None)
            held = held.decide(one.scored.candidates)
            share, time = share.to(stored[0].device), self.report.stopwatch.time
            kept = keep(policy, one.layer, stored, held, one.scored, share, hold, peers, time)
            now.waiting[depth] = replace(one, scored=one.scored.of(kept.selection))
            self.report.layers[one.layer.index] = record(one.layer)
        if done:
            self._notes = torch.stack([each.note.to(shares.device) for each in now.waiting], dim=1)
            if policy.decode is None and not unread(now.prompt, point):
                for one in now.waiting:
                    one.layer.window = None
                    self.report.layers[one.layer.index] = record(one.layer)
            now.waiting.clear()

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
        view = layer_view(
            parts,
            layer.window,
            visible,
            seen=point,
            layer=layer.index,
            scaling=layer.scaling,
            shared=derived is not None,
        )
        if self._before_rope is not None:
            view = replace(view, pre_rope_keys=self._keys_before_rope(view))
        if self._facts.modality is not None:
            view = replace(view, modality=at_slots(self._facts.modality.to(view.positions.device), view.positions))
        if self._repeated:
            repeated = self._repeated[layer.index].gather(-1, view.positions.clamp(min=0).long())
            view = replace(view, repetition=repeated)
        if layer.index in self._facts.change:
            change = self._facts.change[layer.index].to(view.keys.device)
            view = replace(view, similarity=mean_over(change[:, :point], visible))
        return view

    def _keys_before_rope(self, view: LayerView) -> Tensor:
        if self._before_rope is None or view.shared:
            raise UnsupportedModelError(
                f"layer {view.layer}: its keys are derived from what it caches and cannot be taken back to before RoPE"
            )
        facts = self._facts
        if self._pass is not None:
            facts = replace(facts, rotary=self._before_rope.recorder.record)
        return self._before_rope(view.layer, view.keys, view.positions, facts)

    def took_rows(self, layer: EvictingLayer, rows: Tensor) -> None:
        """Take note that the layer's batch is now its rows `rows`."""
        if layer.index == next(iter(self._depth)):
            self._facts = self._facts.take_rows(rows)
            if self._hidden is not None:
                self._hidden = self._hidden[rows.to(self._hidden.device)]
            if self._notes is not None:
                self._notes = self._notes[rows.to(self._notes.device)]
            if self._read is not None:
                self._read.take_rows(rows, layer.seen)
        self.report.layers[layer.index] = record(layer)

    def cropped(self, layer: EvictingLayer) -> None:
        """Take note that the layer has lost its last tokens."""
        if layer.index == next(iter(self._depth)):
            self._facts = self._facts.crop(layer.seen) if layer.seen else Facts()
            if not layer.seen:
                self._ended = self._hidden = self._notes = self._pass = None
        self.report.layers[layer.index] = record(layer)


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Scores are float32 whatever the model computes in, and what is stored outlives `torch.inference_mode`."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def run_of(cache: Any) -> CacheRun | None:
    """Return the run a cache belongs to, or None."""
    owner = next((layer.owner for layer in evicting_layers(cache)), None)
    return owner if isinstance(owner, CacheRun) else None
