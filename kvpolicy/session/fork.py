"""`Fork`: an independent copy of a compressed cache, to be asked."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvpolicy.errors import ContextError, InactiveSessionError, UnsupportedModelError
from kvpolicy.policy import Policy
from kvpolicy.report import Report
from kvpolicy.session import Session
from kvpolicy.session.decoder import cache_name
from kvpolicy.session.inputs import CROSSED, Tokens, forward_arguments, read_question
from kvpolicy.session.layers import evicting_layers
from kvpolicy.session.positions import Deltas, deltas_of, keepers, keeping
from kvpolicy.session.run import CacheRun, run_of
from kvpolicy.session.watch import DRAFTS, setting
from kvpolicy.store.layer import EvictingLayer

_REPEATED = ("num_beams", "num_return_sequences")
"""Settings of `generate` by which it repeats the rows it is given."""


@dataclass(frozen=True)
class Held:
    """What goes on from one pass to the next.

    Args:
        cache: of a session.
        tokens: those read, and behind them those to be read first.
        deltas: what the model keeps of its positions outside the cache.
        crossed: which pictures the tokens behind may attend to, where that is by cross-attention.
    """

    cache: DynamicCache
    tokens: Tokens
    deltas: Deltas
    crossed: Tensor | None = None

    @property
    def seen(self) -> int:
        """How many tokens the cache has seen, padding included."""
        return max(layer.seen for layer in evicting_layers(self.cache))

    @property
    def run(self) -> CacheRun:
        """Who owns the cache's layers."""
        run = run_of(self.cache)
        if run is None:
            raise InactiveSessionError("this cache belongs to no session")
        return run

    @property
    def rows(self) -> int:
        """How many rows the cache has."""
        return max(len(layer.kept) for layer in evicting_layers(self.cache))

    def check_padding(self, told: Tokens, what: str) -> None:
        """Raise where padding stands behind a token and a layer of `cache` counts it as one."""
        others = [index for index, layer in enumerate(self.cache.layers) if type(layer) is not EvictingLayer]
        if others and told.gaps:
            raise ContextError(
                f"{what}: expected no padding behind a row's first token, as layers {others} (sliding window, "
                "recurrent) count it: pad a context on the left, and ask questions of unlike length in separate forks"
            )

    def repeat(self, repeats: int) -> Tensor:
        """Repeat each row of the cache `repeats` times; return which row each one was, int64."""
        rows = torch.arange(self.rows, device="cpu").repeat_interleave(repeats)
        if repeats > 1:
            self.cache.reorder_cache(rows)  # type: ignore[arg-type]
        return rows

    def copied(self, repeats: int) -> Held:
        """Return a copy that shares nothing with this one, each row `repeats` times."""
        cache = copy.deepcopy(self.cache)
        rows = replace(self, cache=cache).repeat(repeats)
        deltas = {name: None if part is None else part[rows.to(part.device)] for name, part in self.deltas.items()}
        crossed = None if self.crossed is None else self.crossed[rows.to(self.crossed.device)]
        return Held(cache, self.tokens.take_rows(rows), deltas, crossed)

    def crossing(self, count: int) -> dict[str, Tensor]:
        """Return the argument of a pass over so many tokens that says which pictures each may attend to."""
        return {} if self.crossed is None else {CROSSED: self.crossed.expand(-1, count, -1, -1)}


class Fork:
    """An independent copy of a context's cache, to be used inside its ``with`` block, where it can be read on from.

    Reading evicts nothing more, except under a policy whose `decode` says so: then every token read counts.
    """

    def __init__(self, policy: Policy, model: nn.Module, held: Held, rows: int) -> None:
        self._model = model
        self._held = held
        self._repeats = rows
        self._session = Session(policy, model)
        self._open: Held | None = None
        self._seen = 0
        self._asked = False

    def __enter__(self) -> Fork:
        if self._open is not None:
            raise InactiveSessionError("fork: it is in use; make another one with context.fork()")
        copied = self._held.copied(self._repeats)
        self._session.__enter__()
        self._session.adopt(copied.cache)
        self._open, self._seen, self._asked = copied, copied.seen, False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open = None
        self._session.__exit__(kind, error, at)

    @property
    def cache(self) -> DynamicCache:
        """The copy, for forward passes by hand.

        Raises:
            InactiveSessionError: outside the fork's block.
            UnsupportedModelError: for a model that keeps positions outside its cache.
        """
        kept = sorted(keepers(self._model))
        if kept:
            raise UnsupportedModelError(
                f"fork.cache: the model's '{kept[0]}' keeps the positions of the prompt it read last, whichever that "
                "is, so that a forward pass by hand could take those of another one: use fork.generate or fork.logits"
            )
        return self._now().cache

    @property
    def tokens(self) -> Tokens:
        """All tokens that `generate` goes on from: the context's, and those of the turns so far."""
        return self._now().tokens

    @property
    def report(self) -> Report:
        """What the copy holds."""
        return self._session.report

    def generate(self, question: Any = None, **settings: Any) -> Any:
        """Return what the model generates after `question`: new tokens alone, ``[B, new]``.

        Another call, on a fork of one row, goes on from there: the next turn of the conversation.

        Args:
            question: ids or what a tokenizer returns, one row for all of the fork's or one for each. None where the
                context was compressed with its question in view.
            settings: of the model's own `generate`; with `return_dict_in_generate`, its output with new tokens alone
                as `sequences`.

        Raises:
            ContextError: when the question does not fit, or there is none to go on from.
        """
        model = self._model
        if not isinstance(model, GenerationMixin) or not isinstance(model, PreTrainedModel):
            raise UnsupportedModelError(f"fork.generate: expected a model with generate, got {type(model).__name__}")
        held, told = self._told("fork.generate", question, settings)
        known = {name: setting(model, settings, name) for name in (*DRAFTS, *_REPEATED)}
        if settings.get("use_cache") is False:
            raise ContextError("fork.generate: expected use_cache=True, as what was kept is in a cache")
        drafts = [name for name in DRAFTS if known[name]]
        if drafts:
            raise UnsupportedModelError(
                f"fork.generate({drafts[0]}=...): expected decoding without drafts, with which transformers would read "
                "the context again"
            )
        repeats = max(known[name] or 1 for name in _REPEATED)
        if repeats > 1:
            # As `generate` repeats the rows of the ids; of a copy, as it may fail.
            held = replace(held, cache=copy.deepcopy(held.cache))
            held.repeat(repeats)
        given: dict[str, Any] = {
            **held.crossing(told.length),
            **settings,
            "attention_mask": told.mask,
            cache_name(model): held.cache,
        }
        with keeping(model, held.deltas):
            output = model.generate(told.ids, **given)
            deltas = deltas_of(model)
        new = (output if isinstance(output, Tensor) else output.sequences)[:, told.length :]
        read = told.length + new.shape[1] - 1
        # The best of several beams may be shorter than what was read.
        if held.seen > read and (known["num_beams"] or 1) == 1:
            raise UnsupportedModelError(
                f"fork.generate: expected {read} tokens in the cache, got {held.seen}: with these settings, this "
                "release of transformers reads the context again"
            )
        if held.rows == 1:
            told = told.join(Tokens(new, torch.ones_like(new)))
        self._open, self._seen, self._asked = replace(held, tokens=told, deltas=deltas), held.seen, True
        if isinstance(output, Tensor):
            return new
        output.sequences = new
        return output

    def logits(self, tokens: Any = None) -> Tensor:
        """Return what the model predicts after each of `tokens`, ``[B, q, V]``, and go on from there.

        With the question in view, or after an answer, the token that is still to be read comes first. Padding and
        positions that a model keeps outside its cache are taken care of, which a forward pass by hand has to do itself.

        Args:
            tokens: as of `generate`.

        Raises:
            ContextError: when the tokens do not fit, or there are none to read.
        """
        model = self._model
        held, told = self._told("fork.logits", tokens, {})
        new = told.length - held.seen
        given = forward_arguments(model, told, held.crossing(new), last=new, seen=held.seen)
        with torch.no_grad(), keeping(model, held.deltas):
            logits: Tensor = model(**given, **{cache_name(model): held.cache}).logits  # type: ignore[arg-type]
            deltas = deltas_of(model)
        self._open, self._seen = replace(held, tokens=told, deltas=deltas), held.seen
        return logits[:, -new:]

    def _told(self, method: str, question: Any, settings: dict[str, Any]) -> tuple[Held, Tokens]:
        """Return what the fork holds, and all tokens that it is to have read, `question` behind the others."""
        held = self._now()
        if held.seen != self._seen:
            raise ContextError(
                f"{method}: expected the {self._seen} tokens that it knows of, got {held.seen} in the cache: some "
                "were read by hand, so go on by hand"
            )
        if self._asked and held.rows > 1:
            raise ContextError(
                f"{method}: expected one row to go on from after an answer, got {held.rows}, whose answers may "
                "differ in length: make another fork"
            )
        told = held.tokens
        if question is not None:
            told = told.join(read_question(question, told.ids.device, len(told.ids)))
        if told.length <= held.seen:
            spread = "; give what the tokenizer returned as one argument, not as **keywords" * ("input_ids" in settings)
            raise ContextError(f"{method}: expected a question, as this context was compressed without one{spread}")
        held.check_padding(told, "question")
        return held, told

    def _now(self) -> Held:
        if self._open is None:
            raise InactiveSessionError("fork: expected to be inside its block, `with context.fork() as fork:`")
        return self._open
