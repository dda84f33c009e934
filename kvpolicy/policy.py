"""`Policy`: a declared composition of plugins, and the pure decisions it makes from tensors.

score tree -> budget (how many, per layer and head) -> select (which) -> evicted (what becomes of the others)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from pydantic import Field
from torch import Tensor

from kvpolicy.budgets.uniform import UniformHeads, UniformLayers
from kvpolicy.errors import PluginError, SettingError, UnsupportedModelError
from kvpolicy.evicted.drop import Drop
from kvpolicy.maths import exact, newest
from kvpolicy.merging import merged
from kvpolicy.plugin import (
    Evicted,
    HeadBudget,
    LayerBudget,
    Score,
    Selector,
    SharedOut,
    Store,
    importance_of,
    needs_of,
    settings,
    walk,
)
from kvpolicy.selectors.top_k import TopK
from kvpolicy.store.settings import Plain
from kvpolicy.tree import check, compares_heads, evaluate
from kvpolicy.types import LayerView, Merged, Needs, Plan, Selection

if TYPE_CHECKING:
    from kvpolicy.session import Session
    from kvpolicy.session.context import Context
    from kvpolicy.session.parallel import HeadGroup


@settings
class Budget:
    """How many slots are kept per KV head, averaged over heads and layers, protected slots included.

    Give exactly one of `tokens` (whole tokens) and `keep` (a share of the tokens seen, rounded half up, never under 1).

    Args:
        tokens: slots a KV head.
        keep: share of the tokens seen, in (0, 1].
        layers: how layers share the budget.
        heads: how the KV heads of one layer share the layer's budget.

    >>> Budget(keep=0.25).slots(torch.tensor([1, 9, 10])).tolist()
    [1, 2, 3]
    """

    name = "budget"
    tokens: Annotated[int, Ge(1)] | None = None
    keep: Annotated[float, Gt(0), Le(1)] | None = None
    layers: LayerBudget = Field(default_factory=UniformLayers, kw_only=True)
    heads: HeadBudget = Field(default_factory=UniformHeads, kw_only=True)

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.keep is None):
            found = {"tokens": self.tokens, "keep": self.keep}
            raise SettingError("budget", [((), "value_error", "expected exactly one of 'tokens' and 'keep'", found)])

    def slots(self, seen: Tensor) -> Tensor:
        """Return the budget of each row in whole slots, int64 ``[B]``, from the tokens it has seen, int64 ``[B]``."""
        if self.tokens is not None:
            return torch.full_like(seen, self.tokens)
        share = exact(self.keep)  # type: ignore[arg-type]
        return ((2 * share.numerator * seen + share.denominator) // (2 * share.denominator)).clamp(min=1)


@settings
class Decode:
    """Eviction while decoding: a cache holds from its budget to ``budget + every - 1`` slots a KV head.

    Args:
        every: how many new tokens are read between evictions.
        grace: how many of the newest tokens an eviction spares whatever their score, besides the recent ones that
            `select` protects; within the budget.

    >>> Decode(every=64)
    Decode(every=64, grace=0)
    """

    name = "decode"
    every: Annotated[int, Ge(1)]
    grace: Annotated[int, Ge(0)] = 0


@settings
class Policy:
    """A declared eviction policy: score tree, budget, selector, and what becomes of the evicted.

    Args:
        name: what reports call it.
        score: the score tree.
        budget: how many slots are kept.
        select: which slots are kept, given how many.
        evicted: what becomes of the others.
        prefill: when a prompt that is read in chunks evicts: "whole", once all of it is read, or "chunks", after
            each, so that no more than budget and chunk are ever held.
        decode: eviction while decoding; without it, only prompts evict.
        store: how the kept slots are held.
        description: one line for ``kvpolicy list``.

    >>> from kvpolicy.scorers.random import Random
    >>> policy = Policy(name="two of six", score=Random(), budget=Budget(tokens=2), select=TopK(sinks=1, recent=1))
    >>> policy.plan([LayerView(keys=torch.zeros(1, 1, 6, 4), values=torch.zeros(1, 1, 6, 4))]).tolist()
    [[[[0, 5]]]]
    """

    name: str
    score: Score
    budget: Budget
    select: Selector = Field(default_factory=TopK, kw_only=True)
    evicted: Evicted = Field(default_factory=Drop, kw_only=True)
    prefill: Literal["whole", "chunks"] = "whole"
    decode: Decode | None = None
    store: Store = Field(default_factory=Plain, kw_only=True)
    description: str = ""

    def __post_init__(self) -> None:
        protected = self.select.protects
        if self.budget.tokens is not None and self.budget.tokens < protected:
            message = f"expected at least the {protected} slots that '{self.select.name}' protects (sinks + recent)"
            raise SettingError(self.name, [(("budget", "tokens"), "value_error", message, self.budget.tokens)])
        if self.budget.tokens is not None and self.decode is not None and self.decode.grace > self.budget.tokens:
            message = f"expected at most the budget of {self.budget.tokens}"
            raise SettingError(self.name, [(("decode", "grace"), "value_error", message, self.decode.grace)])
        ways = {node.needs.repetition for node in walk(self.score)} - {None}
        if len(ways) > 1:
            message = f"expected one way to repeat the prompt: give its scorers the same settings, got {len(ways)}"
            raise SettingError(self.name, [(("score",), "value_error", message, self.score.name)])
        needs = self.needs
        if needs.call and needs.late:
            late = replace(needs.of_prompts, call=False)
            message = (
                f"expected no part that needs {Needs(call=True).words}, gone with the layer, beside one that needs "
                f"{late.words}, there once all layers have read the prompt"
            )
            layers = self.budget.layers
            late_layers = getattr(layers, "needs", Needs()).late
            at, found = (("budget", "layers"), layers.name) if late_layers else (("score",), self.score.name)
            raise SettingError(self.name, [(at, "value_error", message, found)])
        readers = (*walk(self.score), self.evicted, self.select)
        if self.decode is not None:
            # What a layer budget has read of the prompt goes on: its shares.
            self._require_prompt_alone("decode", "expected none", self.decode, readers)
        if self.prefill == "chunks":
            self._require_prompt_alone("prefill", "expected 'whole'", self.prefill, (*readers, self.budget.layers))
        if getattr(self.budget.heads, "by", "score") == "importance" and importance_of(self.score) is None:
            message = f"expected a score with an importance, which '{self.score.name}' has not"
            raise SettingError(self.name, [(("budget", "heads", "by"), "value_error", message, "importance")])

    def _require_prompt_alone(self, setting: str, expected: str, found: object, readers: Iterable[Any]) -> None:
        """Raise where one of `readers` reads what only an eviction of a whole prompt has."""
        for node in readers:
            alone = getattr(node, "needs", Needs()).of_prompts
            if alone != Needs():
                why = f"with '{node.name}', which needs {alone.words}, there for a whole prompt alone"
                raise SettingError(self.name, [((setting,), "value_error", f"{expected} {why}", found)])

    @property
    def trivial(self) -> bool:
        """Whether the policy keeps everything as it is."""
        return self.budget.keep == 1 and isinstance(self.store, Plain)

    @cached_property
    def late(self) -> bool:
        """Whether it decides only once all of a prompt has been read, in every layer."""
        return self.needs.late and not self.trivial

    @property
    def needs(self) -> Needs:
        """What the score tree, layer budget, selector and merging of the evicted read, all together."""
        nothing = Needs()
        own: Needs = getattr(self.select, "needs", nothing) | getattr(self.budget.layers, "needs", nothing)
        return own | self.evicted.needs | needs_of(self.score)

    @property
    def merges(self) -> bool:
        """Whether kept slots change by what is evicted."""
        return not isinstance(self.evicted, Drop)

    # Once: each eviction asks, and a walk over the score tree takes as long as a small layer's scores.
    @cached_property
    def across_heads(self) -> bool:
        """Whether the heads of a layer score together, or decide together how many slots each of them keeps."""
        return self._heads_compete or any(map(compares_heads, walk(self.score)))

    @property
    def _heads_compete(self) -> bool:
        return bool(getattr(self.budget.heads, "across_heads", True))

    @cached_property
    def across_layers(self) -> bool:
        """Whether a layer's budget depends on what other layers hold."""
        return isinstance(self.budget.layers, SharedOut)

    def check_model(self, config: Any) -> None:
        """Raise where a part of the score was made for another decoder than the one with this config.

        Raises:
            UnsupportedModelError: when a scorer or combiner with a `check_model` says so.
        """
        for node in walk(self.score):
            if hasattr(node, "check_model"):
                node.check_model(config)

    def layer_slots(self, seen: Tensor, layers: int) -> Tensor:
        """Return each layer's budget in slots a KV head before any layer is read, int64 ``[B, layers]``.

        Args:
            seen: int64 ``[B]``, tokens seen by each row, padding excluded.
            layers: how many layers share the budget.
        """
        tokens = self.budget.slots(seen)
        found = self.budget.layers(tokens, seen, layers)
        who = f"layer budget '{self.budget.layers.name}'"
        check(found, (len(seen), layers), torch.int64, who)
        total = layers * torch.minimum(tokens, seen)
        if (found.sum(-1) != total).any() or (found < 0).any():
            raise PluginError(f"{who}: expected layers that add up to {total.tolist()}, got {found.tolist()}")
        return found

    def note(self, view: LayerView, scores: Tensor, peers: HeadGroup | None = None) -> Tensor:
        """Return what the layer's share depends on, float32 ``[B, Hkv, n]`` of all heads.

        Args:
            view: the layer's slots.
            scores: float32 ``[B, Hkv, T]``, of its candidates.
            peers: the ranks that hold the layer's other heads.
        """
        budget = self._shared_out
        tokens = self.budget.slots(view.seen)
        found = budget.note(view.limit(budget.needs, f"layer budget '{budget.name}'"), scores, tokens)
        size = found.shape[-1] if isinstance(found, Tensor) and found.ndim else 0
        check(found, (*view.valid.shape[:2], size), torch.float32, f"note of layer budget '{budget.name}'")
        return found if peers is None else peers.gather(found)

    def shared_slots(self, notes: Sequence[Tensor], view: LayerView, layers: int) -> Tensor:
        """Return the budgets of the layers read so far in slots a KV head, int64 ``[B, l]``.

        Args:
            notes: of each of them, what `note` returned.
            view: the slots of one of them.
            layers: how many layers share the budget.
        """
        budget = self._shared_out
        who = f"shares of layer budget '{budget.name}'"
        tokens = self.budget.slots(view.seen)
        mean = torch.minimum(tokens, view.seen)
        # One at least: no head can do without.
        protected = torch.minimum((view.valid & ~view.candidates).sum(-1).amax(-1).clamp(min=1), mean)
        sizes = {tuple(note.shape) for note in notes}
        if len(sizes) > 1:
            raise UnsupportedModelError(
                f"{who}: expected layers with the same number of KV heads, got {sorted(size[1] for size in sizes)}"
            )
        # Layers may be on several devices.
        every = torch.stack([note.to(tokens.device) for note in notes], dim=1)
        found = budget.share(every, tokens, view.seen, protected, layers)
        check(found, tuple(every.shape[:2]), torch.int64, who)
        outside = (found < protected[:, None]) | (found > view.seen[:, None])
        if outside.any() or (len(notes) == layers and (found.sum(-1) != layers * mean).any()):
            raise PluginError(
                f"{who}: expected from {protected.tolist()} (protected) to {view.seen.tolist()} (seen) slots, all "
                f"layers together {(layers * mean).tolist()}, got {found.tolist()}"
            )
        return found

    @property
    def _shared_out(self) -> SharedOut:
        budget = self.budget.layers
        if not isinstance(budget, SharedOut):
            raise PluginError(f"layer budget '{budget.name}': expected one that shares slots out (note and share)")
        return budget

    def plan_layer(self, view: LayerView, tokens: Tensor) -> Selection:
        """Return the slots that one layer keeps.

        Args:
            view: the layer's slots.
            tokens: int64 ``[B]``, the layer's budget in slots a KV head.
        """
        view = self.protect(view, tokens)
        scores, importance = self.scores(view)
        return self.choose(view, scores, importance, tokens)

    def protect(self, view: LayerView, tokens: Tensor, *, grace: int = 0) -> LayerView:
        """Return `view` with the slots that are not protected as its candidates.

        Args:
            view: the layer's slots.
            tokens: int64 ``[B]``, bounds the protected slots of a head.
            grace: the newest tokens protected besides those the selector protects, as far as `tokens` allows.
        """
        protected = self.select.protect(view, tokens)
        if grace:
            room = tokens[:, None, None] - protected.sum(-1, keepdim=True)
            protected = protected | newest(newest(view.valid, grace) & ~protected, room)
        return view.decide(view.valid & ~protected)

    def scores(self, view: LayerView, *, peers: HeadGroup | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the score tree's float32 ``[B, Hkv, T]`` and that of its importance part, if it has one.

        Args:
            view: the layer's slots.
            peers: the ranks that hold the layer's other heads.
        """
        scores, importance = evaluate(self.score, view, peers)
        if view.shared:
            scores = _mean_of_heads(scores, peers)
            importance = None if importance is None else _mean_of_heads(importance, peers)
        return scores, importance

    def choose(
        self,
        view: LayerView,
        scores: Tensor,
        importance: Tensor | None,
        tokens: Tensor,
        *,
        peers: HeadGroup | None = None,
    ) -> Selection:
        """Return the kept slots.

        Args:
            view: the layer's slots.
            scores: float32 ``[B, Hkv, T]``, of its candidates.
            importance: likewise, their importance part, or None.
            tokens: int64 ``[B]``, the layer's budget in slots a KV head.
            peers: the ranks that hold the layer's other heads.
        """
        heads = self.budget.heads
        decisive = importance if importance is not None and getattr(heads, "by", "score") == "importance" else scores
        lengths = self._lengths(view, decisive, tokens, peers)
        selection = self.select(view, scores, lengths)
        self._check_selection(selection, view, lengths)
        return selection

    def merge(self, view: LayerView, selection: Selection, memory: Tensor | None) -> Merged | None:
        """Return what the kept slots hold once the evicted are merged into them; None where they stay as they are.

        Args:
            view: the layer's slots.
            selection: the slots that are kept.
            memory: what this returned as such at the layer's last eviction; None before that.
        """
        return merged(self.evicted, view, selection, memory) if self.merges else None

    def _lengths(self, view: LayerView, scores: Tensor, tokens: Tensor, peers: HeadGroup | None) -> Tensor:
        """Return how many slots each head of `view` keeps, int64 ``[B, Hkv]``."""
        heads = self.budget.heads
        # Heads that keep the same slots score alike: each rank comes to the same lengths alone.
        if view.shared or not self._heads_compete:
            peers = None
        if peers is not None:
            view, scores = peers.whole(view, scores)
        lengths = heads(view, scores, tokens)
        check(lengths, tuple(view.valid.shape[:2]), torch.int64, f"head budget '{heads.name}'")
        held = view.valid.sum(-1)
        least = torch.minimum((held - view.candidates.sum(-1)).clamp(min=1), held)
        if (lengths > held).any() or (lengths < least).any() or (lengths.sum(-1) > held.shape[1] * tokens).any():
            raise PluginError(
                f"head budget '{heads.name}': expected lengths from {least.tolist()} (protected, or 1) to "
                f"{held.tolist()} (valid), {held.shape[1]} heads * {tokens.tolist()} in all at most, "
                f"got {lengths.tolist()}"
            )
        return lengths if peers is None else peers.own(lengths)

    def _check_selection(self, selection: Selection, view: LayerView, lengths: Tensor) -> None:
        who = f"selector '{self.select.name}'"
        if not isinstance(selection, Selection):
            raise PluginError(f"{who}: expected a Selection, got {type(selection).__name__}")
        slots = selection.slots
        fits = torch.equal(selection.lengths, lengths) and len(slots) == int(lengths.sum())
        inside = fits and bool(((slots >= 0) & (slots < view.slots)).all())
        keep = selection.to_mask(view.slots) if inside else None
        if keep is None or not torch.equal(keep.sum(-1), lengths) or bool((keep & ~view.valid).any()):
            raise PluginError(f"{who}: expected {lengths.tolist()} different valid slots a head, got {slots.tolist()}")

    def plan(self, views: Sequence[LayerView]) -> Plan:
        """Return the slots that every layer keeps; pure: no model, nothing changed.

        Args:
            views: one view a layer, first layer first.
        """
        budgets = [self.layer_slots(view.seen, len(views))[:, depth] for depth, view in enumerate(views)]
        if not self.across_layers:
            return Plan(tuple(map(self.plan_layer, views, budgets)))
        views = [self.protect(view, tokens) for view, tokens in zip(views, budgets, strict=True)]
        scored = [self.scores(view) for view in views]
        notes = [self.note(view, scores) for view, (scores, _) in zip(views, scored, strict=True)]
        shares = [self.shared_slots(notes, view, len(views))[:, depth] for depth, view in enumerate(views)]
        kept = zip(views, scored, shares, strict=True)
        return Plan(tuple(self.choose(view, *each, tokens) for view, each, tokens in kept))

    def on(self, model: Any, *, inactive: str = "raise") -> Session:
        """Return a session: a context manager in which `model` runs under this policy.

        Args:
            model: any transformers decoder, or a module that holds one.
            inactive: "raise" or "warn": what to do when the policy could not act.
        """
        from kvpolicy.session import Session

        return Session(self, model, inactive=inactive)

    def compress(self, model: Any, inputs: Any, question: Any = None) -> Context:
        """Return what `model` keeps of `inputs` under this policy, read once and to be asked many times.

        Without `question` the context is query-agnostic: the queries that score are its own last ones. With it, it is
        query-aware, and for that question: it stands behind the inputs, and all but its last token, which every fork
        reads first, decide with them. Either way asking evicts nothing more, unless `decode` does.

        Args:
            model: any transformers decoder.
            inputs: ids ``[T]`` or ``[B, T]``, or the mapping that a tokenizer or processor returns.
            question: likewise, text alone; one row for all of the inputs, or one for each.

        Raises:
            ContextError: when inputs or question are wrong.
            UnsupportedModelError: when the policy cannot act on the model.

        >>> import torch, kvpolicy
        >>> from kvpolicy.testing.models import tiny
        >>> model, text = tiny(), torch.arange(96)
        >>> context = kvpolicy.load("snapkv", budget=40).compress(model, text)
        >>> context
        <Context of policy 'snapkv', query-agnostic: 1 x 96 tokens, 15,360 bytes>
        >>> with context.fork() as fork:
        ...     answer = fork.generate(torch.tensor([5, 6, 7]), max_new_tokens=4, min_new_tokens=4)
        >>> answer.shape
        torch.Size([1, 4])
        """
        from kvpolicy.session.context import compress

        return compress(self, model, inputs, question)

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as the mapping that a policy file holds; `kvpolicy.load` reads it back."""
        from kvpolicy.config import dump

        return dump(self)


def _mean_of_heads(scores: Tensor, peers: HeadGroup | None) -> Tensor:
    """Return in each head the mean of `scores` ``[B, H, T]`` over all heads."""
    every = scores if peers is None else peers.gather(scores)
    return every.mean(1, keepdim=True).expand_as(scores)
