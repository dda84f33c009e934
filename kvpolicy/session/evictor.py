"""`Evictor`: has the layers of one cache keep what a policy decides, one by one or with all of them in view."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from kvpolicy.capture import at_slots, layer_view
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.policy import Policy
from kvpolicy.report import Report
from kvpolicy.session.change import mean_over
from kvpolicy.session.facts import BeforeRope, Facts
from kvpolicy.session.keep import Scored, keep
from kvpolicy.session.listening import Listening
from kvpolicy.session.parallel import HeadGroup
from kvpolicy.session.passes import Pass, record
from kvpolicy.session.waiting import Waiting
from kvpolicy.session.when import unread
from kvpolicy.step import Attended
from kvpolicy.store.layer import EvictingLayer
from kvpolicy.store.settings import Plain
from kvpolicy.types import LayerView


class Evictor:
    """What is known of the tokens of one cache, and what its layers keep of them.

    Args:
        policy: what decides.
        depth: which place each layer of the cache has among those that evict, by the model's index of the layer.
        report: what was kept is written there.
        listening: what stands beside the decoder.
    """

    def __init__(self, policy: Policy, depth: Mapping[int, int], report: Report, listening: Listening) -> None:
        self._policy = policy
        self._depth = depth
        self._report = report
        self.listening = listening
        self.facts = Facts()
        # How many tokens of each row were padding at the last eviction, int64 [B]; None where none were.
        self.hidden: Tensor | None = None
        # What the prompt has said of each layer, float32 [B, layers, Hkv, n], where layers share their slots out.
        self.notes: Tensor | None = None
        # By layer, float32 [B, Hkv, seen]: what a repetition of the prompt attended to, until the layer has evicted.
        self.repeated: dict[int, Tensor] = {}

    def know(self, other: Evictor) -> None:
        """Know of the tokens what another one knows, whose cache this one's is a copy of."""
        self.facts, self.hidden, self.notes = other.facts, other.hidden, other.notes

    def take_rows(self, rows: Tensor) -> None:
        """Know of the batch rows `rows` (int64), which may repeat."""
        self.facts = self.facts.take_rows(rows)
        if self.hidden is not None:
            self.hidden = self.hidden[rows.to(self.hidden.device)]
        if self.notes is not None:
            self.notes = self.notes[rows.to(self.notes.device)]

    def crop(self, count: int) -> None:
        """Know of the first `count` tokens alone; of none, nothing."""
        self.facts = self.facts.crop(count) if count else Facts()
        if not count:
            self.hidden = self.notes = None

    def evict(
        self, layer: EvictingLayer, now: Pass, point: int, attended: Attended | None, peers: HeadGroup | None
    ) -> None:
        """Have a layer keep what the policy decides of what it holds.

        Args:
            layer: which layer.
            now: the pass that has read its last tokens.
            point: how many tokens of the sequence it decides on; what it holds of later ones stays.
            attended: what attention has just read; None where the pass is over.
            peers: the ranks that may hold other heads of the model.
        """
        derived = None if attended is None else attended.derived
        policy, time = self._policy, self._report.stopwatch.time
        before_rope, calls = self.listening.before_rope, self.listening.calls
        if before_rope is not None and attended is not None:
            self.facts = replace(self.facts, rotary=before_rope.recorder.record)
        stored = layer.padded()
        device = stored[0].device
        with time("capture", device):
            layer.window = None if layer.window is None else layer.window.whole()
            visible = now.visible(layer.seen)
            view = self._view(layer, stored, visible, point, derived)
            if calls is not None and attended is not None:
                view = replace(view, call=calls.of(attended.module, read=layer.seen, end=point))
            if now.budgets is None:
                now.budgets = self._budgets(view, now)
                self.hidden = None if visible is None else ~visible[:, :point]
            tokens = now.budgets[:, self._depth[layer.index]].to(device)
            grace = policy.decode.grace if policy.decode is not None and now.decoding else 0
            view = policy.protect(view, tokens, grace=grace)
        sharing = policy.across_layers and not self._knows_shares(now)
        with time("score", device):
            asked = policy.across_heads or sharing or view.shared
            peers = peers.of(view) if peers is not None and asked else None
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
        budgets = self._policy.layer_slots(view.seen, layers)
        if self.notes is None or not self._knows_shares(now):
            return budgets
        protecting = self._policy.protect(view, budgets[:, self._depth[view.layer]].to(view.seen.device))
        return self._policy.shared_slots(self.notes.unbind(1), protecting, layers)

    def _knows_shares(self, now: Pass) -> bool:
        """Return whether the prompt has said already how much each layer keeps."""
        return now.decoding and self.notes is not None

    def _refuse_sharing(self, layer: EvictingLayer, derived: object) -> NoReturn:
        why = (
            "tokens that follow the prompt in the same pass would see what is evicted only once all layers are read: "
            "read the prompt in a pass of its own (run.prompt()), or generate without drafts"
            if derived is None
            else "its keys are derived from what it caches, and are there during its own pass alone"
        )
        budget = self._policy.budget.layers.name
        raise UnsupportedModelError(
            f"layer {layer.index}: layer budget '{budget}' shares slots out among layers; {why}"
        )

    def _share(self, now: Pass, view: LayerView, point: int, peers: HeadGroup | None) -> None:
        """Cut the layers read so far to what each may hold by now."""
        policy, layers = self._policy, len(self._depth)
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
            share, time = share.to(stored[0].device), self._report.stopwatch.time
            kept = keep(policy, one.layer, stored, held, one.scored, share, hold, peers, time)
            now.waiting[depth] = replace(one, scored=one.scored.of(kept.selection))
            self._report.layers[one.layer.index] = record(one.layer)
        if done:
            self.notes = torch.stack([each.note.to(shares.device) for each in now.waiting], dim=1)
            if policy.decode is None and not unread(now.prompt, point):
                for one in now.waiting:
                    one.layer.window = None
                    self._report.layers[one.layer.index] = record(one.layer)
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
        if self.listening.before_rope is not None:
            view = replace(view, pre_rope_keys=self._keys_before_rope(view, self.listening.before_rope))
        if self.facts.modality is not None:
            view = replace(view, modality=at_slots(self.facts.modality.to(view.positions.device), view.positions))
        if self.repeated:
            repeated = self.repeated[layer.index].gather(-1, view.positions.clamp(min=0).long())
            view = replace(view, repetition=repeated)
        if layer.index in self.facts.change:
            change = self.facts.change[layer.index].to(view.keys.device)
            view = replace(view, similarity=mean_over(change[:, :point], visible))
        return view

    def _keys_before_rope(self, view: LayerView, before_rope: BeforeRope) -> Tensor:
        if view.shared:
            raise UnsupportedModelError(
                f"layer {view.layer}: its keys are derived from what it caches and cannot be taken back to before RoPE"
            )
        return before_rope(view.layer, view.keys, view.positions, self.facts)


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Scores are float32 whatever the model computes in, and what is stored outlives `torch.inference_mode`."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
