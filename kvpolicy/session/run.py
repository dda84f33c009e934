"""`CacheRun`: what one cache goes through in a session."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvpolicy.errors import ContextError, InactiveSessionError, UnsupportedModelError
from kvpolicy.policy import Policy
from kvpolicy.report import LayerRecord, Report
from kvpolicy.session.evictor import Evictor, apart
from kvpolicy.session.facts import Facts, Text
from kvpolicy.session.layers import evicting_layers, lengths
from kvpolicy.session.listening import Listening
from kvpolicy.session.parallel import HeadGroup
from kvpolicy.session.passes import Pass, record
from kvpolicy.session.when import Prompt, eviction_point, reads, unread
from kvpolicy.step import Attended, Left, forget
from kvpolicy.store.layer import EvictingLayer
from kvpolicy.store.state import State
from kvpolicy.window import extend

_NOTHING = Listening()


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
        listening: what stands beside the decoder.
    """

    def __init__(self, policy: Policy, evictable: list[int], owner: RunOwner, listening: Listening = _NOTHING) -> None:
        self.policy = policy
        # Once: a walk over the score tree for each token and layer is a tenth of a small model's decoding.
        self._window = policy.needs.queries
        self.owner = owner
        self.report = Report(policy.name, {index: LayerRecord(index) for index in evictable}, peers=owner.peers)
        self.plain = True
        self._depth = {index: depth for depth, index in enumerate(evictable)}
        self._pass: Pass | None = None
        self._read: Pass | None = None
        # Tokens seen when the prompt was settled for good: what follows decodes, in passes of any length.
        self._ended: int | None = None
        self._evictor = Evictor(policy, self._depth, self.report, listening)

    @property
    def _listening(self) -> Listening:
        return self._evictor.listening

    def __deepcopy__(self, memo: dict[int, object]) -> CacheRun:
        if self._read is not None:
            raise InactiveSessionError("this cache is in the midst of a prompt: copy it once the prompt is read")
        # A copied cache has tensors of its own, and the same session.
        copied = CacheRun(self.policy, list(self._depth), self.owner, self._listening)
        copied._evictor.know(self._evictor)
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

    def move(self, owner: RunOwner, listening: Listening, ended: int) -> None:
        """Belong to another session; the prompt has ended after `ended` tokens, and what follows decodes."""
        self.owner, self._ended = owner, ended
        # Only an eviction asks, and only of a prompt for the rest.
        before_rope = None if self.policy.decode is None else listening.before_rope
        self._evictor.listening = Listening(before_rope=before_rope)

    def state(self) -> State:
        """Return what later passes need to know of the tokens seen.

        Raises:
            ContextError: when a file cannot hold it.
        """
        known = {} if self._evictor.hidden is None else {"hidden": self._evictor.hidden}
        if self.policy.decode is None or self.policy.trivial:
            return State(known, {})
        if self._evictor.notes is not None:
            known["notes"] = self._evictor.notes
        if self.policy.needs.pre_rope:
            raise ContextError(
                f"policy '{self.policy.name}' evicts while decoding, by keys before RoPE: expected a policy without "
                "`decode` or without `space: pre-rope`, as a file cannot hold how the keys were rotated"
            )
        if self._evictor.facts.modality is not None:
            known["modality"] = self._evictor.facts.modality
        return State(known, {})

    def restore(self, state: State, cache: Cache) -> None:
        """Take what the run of another cache knew, and record what `cache` holds."""
        self._evictor.facts = Facts(modality=state.tensors.get("modality"))
        self._evictor.hidden = state.tensors.get("hidden")
        self._evictor.notes = state.tensors.get("notes")
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
        kept = None if self._listening.repeat is None else given
        self._pass = Pass(mask, prompt if self._ended is None else Prompt(end=self._ended), modality, kept)
        if self._listening.before_rope is not None:
            self._listening.before_rope.recorder.begin(self._evictor.facts.rotary)
        if self._listening.change is not None:
            self._listening.change.begin()
        self.plain = mask is None or self._is_plain(mask, max(layer.settled_at for layer in layers))

    def _is_plain(self, mask: Any, settled: int) -> bool:
        """Return whether a mask hides what was padding at the last eviction, and nothing since."""
        # Only a CPU asks: reading a mask on another device would wait for it.
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.device.type != "cpu":
            return False
        if not mask[:, settled:].all():
            return False
        hidden = mask[:, :settled] == 0
        return not hidden.any() if self._evictor.hidden is None else torch.equal(hidden, self._evictor.hidden)

    def finish(self) -> bool:
        """End a forward pass; return whether a prompt has been read that is to be settled now.

        It is checked that the policy reached every layer that has cached something.
        """
        ended, self._pass = self._pass, None
        forget()
        if self._listening.before_rope is not None:
            self._evictor.facts = replace(self._evictor.facts, rotary=self._listening.before_rope.recorder.end())
        if self._listening.change is not None and (seen := self._listening.change.end()):
            self._evictor.facts = self._evictor.facts.changed(seen)
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
            if self._listening.calls is not None:
                self._require_one_pass(now, start, end)
            if self.policy.late and not now.decoding:
                self._wait_for_all(now, layer, end)
            now.new = new
            self._evictor.facts = self._evictor.facts.extended(now.modality, self._text(now))
        elif now.new != new:
            raise UnsupportedModelError(
                f"layer {layer.index}: expected the {now.new} new tokens of this pass, got {new}: it does not cache "
                "what the other layers do"
            )
        now.pending.add(layer.index)
        if now.point is None or now.point == layer.seen + new or self.policy.trivial:
            return None
        return now.point - layer.seen

    def _text(self, now: Pass) -> Text | None:
        """Return the tokens of a pass over a part of the prompt, where the policy needs them."""
        given, now.given = now.given, None
        if self._listening.repeat is None or given is None or now.decoding:
            return None
        return self._listening.repeat.text(given)

    def _wait_for_all(self, now: Pass, layer: EvictingLayer, end: int) -> None:
        """Have a pass over a part of the prompt evict nothing until all layers have read it."""
        needs, start = self.policy.needs.of_prompts.words, layer.seen
        what = f"policy '{self.policy.name}' needs {needs}, once all layers have read the prompt"
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
        if start and self._evictor.facts.gathered != {start}:
            raise UnsupportedModelError(
                f"{what}: expected parts of one prompt, got one behind {start} tokens of which some were decoded: read "
                "all parts within one `with run.prompt():`, into an empty cache"
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
        if self._listening.change is not None and not now.decoding:
            self._listening.change.attended(attended.module, layer.index, now.new or 0)
        if self.policy.trivial:
            layer.own()
        else:
            self._require_own_keys(layer)
            self._record_queries(layer, attended.query, now)
            if now.point is not None:
                with apart(attended.query.device):
                    self._evictor.evict(layer, now, now.point, attended, self.owner.peers)
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
        # Until it is over: what fails meanwhile leaves the cache half-written.
        self._pass = read
        text = self._evictor.facts.text
        if self._listening.repeat is not None and text is not None:
            visible = read.visible(text.ids.shape[1])
            with self.report.stopwatch.time("capture", text.ids.device):
                self._evictor.repeated = self._listening.repeat(cache, text, visible)
        for layer in evicting_layers(cache):
            if not self.policy.trivial and layer.seen:
                self._settle(layer, read)
            self.report.layers[layer.index] = record(layer)
        self._evictor.repeated, self._evictor.facts = {}, replace(self._evictor.facts, text=None, change={})
        self._pass = None

    def _settle(self, layer: EvictingLayer, read: Pass) -> None:
        if layer.shared:
            advice = "read the prompt in one pass, or declare `prefill: chunks`"
            if self.policy.late:
                advice = f"use a policy that does not need {self.policy.needs.of_prompts.words}"
            raise UnsupportedModelError(
                f"layer {layer.index}: its keys are derived from what it caches, so that it evicts within a pass only: "
                f"{advice}"
            )
        with apart(layer.padded()[0].device):
            self._evictor.evict(layer, read, layer.seen, None, self.owner.peers)

    def of_policy(self, policy: Policy, owner: RunOwner) -> CacheRun:
        """Return the run of another policy over the prompt that this one has read and not evicted from.

        Args:
            policy: it needs no more than the policy of this run.
            owner: the session it belongs to.
        """
        if self._read is None:
            raise InactiveSessionError("expected a prompt that has been read and not been evicted from")
        listening = Listening(before_rope=self._listening.before_rope if policy.needs.pre_rope else None)
        other = CacheRun(policy, list(self._depth), owner, listening)
        facts = self._evictor.facts
        other._evictor.facts = facts if policy.needs.modality else replace(facts, modality=None)
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
        with apart(query.device), self.report.stopwatch.time("capture", query.device):
            visible = None if self.plain else now.visible(layer.seen)
            layer.window = extend(layer.window, query, visible, start, self._window)

    def took_rows(self, layer: EvictingLayer, rows: Tensor) -> None:
        """Take note that the layer's batch is now its rows `rows`."""
        if layer.index == next(iter(self._depth)):
            self._evictor.take_rows(rows)
            if self._read is not None:
                self._read.take_rows(rows, layer.seen)
        self.report.layers[layer.index] = record(layer)

    def cropped(self, layer: EvictingLayer) -> None:
        """Take note that the layer has lost its last tokens."""
        if layer.index == next(iter(self._depth)):
            self._evictor.crop(layer.seen)
            if not layer.seen:
                self._ended = self._pass = None
        self.report.layers[layer.index] = record(layer)


def run_of(cache: Any) -> CacheRun | None:
    """Return the run a cache belongs to, or None."""
    owner = next((layer.owner for layer in evicting_layers(cache)), None)
    return owner if isinstance(owner, CacheRun) else None
