"""`Context`: a text read once under a policy, to be asked as many questions as one likes; kept in a file."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from kvpolicy.config import load
from kvpolicy.errors import ContextError, PolicyError
from kvpolicy.policy import Policy
from kvpolicy.report import Report
from kvpolicy.session import Session
from kvpolicy.session.cache_state import cache_state, restored
from kvpolicy.session.fingerprint import fingerprint
from kvpolicy.session.fork import Fork, Held
from kvpolicy.session.inputs import Tokens
from kvpolicy.session.layers import evictable_layers
from kvpolicy.session.prefill import decoder_of, prefill, told
from kvpolicy.session.run import CacheRun
from kvpolicy.session.saved import Header, read_file, versions, write_file
from kvpolicy.store.state import State


class Context:
    """A text that a model has read once, under a policy. Made by `Policy.compress` and `kvpolicy.load_context`.

    Nothing changes it: every question is put to a fork, an independent copy.

    Args:
        policy: what decided which slots are kept.
        model: whose cache it is.
        held: the cache, and the tokens it is of.
        aware: whether a question was in view.
    """

    def __init__(self, policy: Policy, model: nn.Module, held: Held, *, aware: bool) -> None:
        self.policy = policy
        self.aware = aware
        self._model = model
        self._held = held
        self.report.query_aware = aware

    def __repr__(self) -> str:
        kind = "query-aware" if self.aware else "query-agnostic"
        size = f"{len(self.tokens.ids)} x {self.seen:,} tokens, {self.report.bytes:,} bytes"
        return f"<Context of policy '{self.policy.name}', {kind}: {size}>"

    @property
    def report(self) -> Report:
        """What was kept of it, and in how many bytes."""
        return self._held.run.report

    @property
    def seen(self) -> int:
        """How many tokens have been read, padding included."""
        return self._held.seen

    @property
    def tokens(self) -> Tokens:
        """The tokens read; behind them, with a question in view, its last one, which every fork reads first."""
        return self._held.tokens

    def fork(self, rows: int = 1) -> Fork:
        """Return an independent copy to ask, a context manager.

        Args:
            rows: how many times each row of the context is repeated, to ask as many questions at once.
        """
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            raise ContextError(f"rows: expected a whole number from 1, got {rows!r}")
        return Fork(self.policy, self._model, self._held, rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the context into a safetensors file, which appears whole or not at all.

        Raises:
            ContextError: when a file cannot hold the policy or what a layer caches, or cannot be written.
        """
        policy = self.policy.to_dict()
        try:
            again = load(policy)
        except PolicyError as error:
            raise ContextError(f"policy '{self.policy.name}' could not be loaded from a file: {error}") from error
        if again != self.policy:
            raise ContextError(f"policy '{self.policy.name}': the plugins registered under its names are others")
        cache = cache_state(self._held.cache, self._held.run).inside("cache")
        header = Header(versions(), policy, fingerprint(decoder_of(self._model)), self.aware, cache.plain["cache"])
        deltas = {f"deltas.{name}": part for name, part in self._held.deltas.items() if part is not None}
        crossed = {} if self._held.crossed is None else {"crossed": self._held.crossed}
        read = {"ids": self.tokens.ids, "mask": self.tokens.mask, **crossed}
        write_file(path, header, {**read, **deltas, **cache.tensors})


def compress(policy: Policy, model: nn.Module, inputs: Any, question: Any = None) -> Context:
    """Return the context that `model` makes of `inputs` under `policy`: see `Policy.compress`."""
    given = told(decoder_of(model), inputs, question)
    with policy.on(model) as session:
        held = prefill(session, model, given)
    return Context(policy, model, held, aware=question is not None)


@torch.inference_mode(False)
def load_context(path: str | os.PathLike[str], model: nn.Module) -> Context:
    """Return the context in the file `path`, which `Context.save` wrote, for `model`, where its weights are.

    Raises:
        ContextError: when the file is not there, damaged, newer than this kvpolicy, or of another model.
        PolicyFileError: when a plugin of its policy is not installed here.
    """
    header, tensors = read_file(path)
    decoder = decoder_of(model)
    unlike = header.model.differences(fingerprint(decoder))
    if unlike:
        raise ContextError(
            f"{path}: it is of another model: {unlike}. Give the model it was made with, or compress anew"
        )
    policy = load(header.policy)
    evictable = evictable_layers(decoder.config)
    run = CacheRun(policy, evictable, Session(policy, model))
    state = State(tensors, {"cache": header.cache}).part("cache")
    try:
        cache = restored(state, decoder, run)
    except ContextError as error:
        made, now = (", ".join(f"{name} {one}" for name, one in each.items()) for each in (header.versions, versions()))
        raise ContextError(f"{path}: {error}. It was written by {made}; this is {now}") from None
    run.report.left_alone = [index for index in range(len(cache.layers)) if index not in evictable]
    device = decoder.device
    deltas = {name: part.to(device) for name, part in State(tensors, {"deltas": {}}).part("deltas").tensors.items()}
    crossed = tensors["crossed"].to(device) if "crossed" in tensors else None
    held = Held(cache, Tokens(tensors["ids"].to(device), tensors["mask"].to(device)), deltas, crossed)
    return Context(policy, model, held, aware=header.aware)
