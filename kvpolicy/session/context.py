"""`Context`: a text read once under a policy, to be asked as many questions as one likes; kept in a file."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvpolicy.config import load
from kvpolicy.errors import ContextError, InactiveSessionError, PolicyError, UnsupportedModelError
from kvpolicy.policy import Policy
from kvpolicy.report import Report
from kvpolicy.session import Session
from kvpolicy.session.cache_state import cache_state, disown, restored
from kvpolicy.session.decoder import cache_name, find_decoders, forward_names
from kvpolicy.session.fingerprint import fingerprint
from kvpolicy.session.fork import Fork, Held
from kvpolicy.session.inputs import Tokens, read, read_question
from kvpolicy.session.layers import evictable_layers
from kvpolicy.session.positions import deltas_of, keepers, keeping
from kvpolicy.session.run import CacheRun, run_of
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
        header = Header(versions(), policy, fingerprint(_decoder(self._model)), self.aware, cache.plain["cache"])
        deltas = {f"deltas.{name}": part for name, part in self._held.deltas.items() if part is not None}
        write_file(path, header, {"ids": self.tokens.ids, "mask": self.tokens.mask, **deltas, **cache.tensors})


def compress(policy: Policy, model: nn.Module, inputs: Any, question: Any = None) -> Context:
    """Return the context that `model` makes of `inputs` under `policy`: see `Policy.compress`."""
    decoder = _decoder(model)
    tokens, rest = read(inputs, "inputs", decoder.device)
    last = Tokens(tokens.ids[:, :0], tokens.mask[:, :0])
    if question is not None:
        asked = read_question(question, decoder.device, len(tokens.ids))
        if asked.length < 2:
            raise ContextError("question: expected at least 2 tokens, as its last one is read by the forks, got 1")
        asked, last = asked.split(-1)
        # The question is text.
        rest |= {
            name: torch.cat([value, value.new_zeros(len(value), asked.length)], dim=1)
            for name, value in rest.items()
            if name.endswith("token_type_ids")
        }
        tokens = tokens.join(asked)
    # What is held outlives `torch.inference_mode`.
    with torch.inference_mode(False), torch.no_grad(), keeping(model, {}), policy.on(model):
        cache = DynamicCache(config=decoder.config)
        model(**_call(model, tokens, rest), **{cache_name(model): cache})  # type: ignore[arg-type]
        deltas = deltas_of(model)
        disown(cache)
    run = run_of(cache)
    if run is not None and run.policy is not policy:
        raise InactiveSessionError(
            f"compress: expected the cache to itself, but a session of policy '{run.policy.name}', entered meanwhile "
            "on the same model by another thread, took it: let one wait for the other"
        )
    if run is None:
        raise UnsupportedModelError(f"{type(model).__name__}: it has no full-attention layer to compress")
    held = Held(cache, tokens.join(last), deltas)
    held.check_padding(held.tokens, "inputs")
    return Context(policy, model, held, aware=question is not None)


@torch.inference_mode(False)
def load_context(path: str | os.PathLike[str], model: nn.Module) -> Context:
    """Return the context in the file `path`, which `Context.save` wrote, for `model`, where its weights are.

    Raises:
        ContextError: when the file is not there, damaged, newer than this kvpolicy, or of another model.
        PolicyFileError: when a plugin of its policy is not installed here.
    """
    header, tensors = read_file(path)
    decoder = _decoder(model)
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
    held = Held(cache, Tokens(tensors["ids"].to(device), tensors["mask"].to(device)), deltas)
    return Context(policy, model, held, aware=header.aware)


def _decoder(model: nn.Module) -> PreTrainedModel:
    found = find_decoders(model)
    if len(found) > 1:
        names = ", ".join(type(one).__name__ for one in found)
        raise UnsupportedModelError(f"model: expected one decoder, whose cache a context keeps, got {names}")
    return found[0]


def _call(model: nn.Module, tokens: Tokens, rest: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward pass that reads a prompt, as `generate` would call it."""
    names = forward_names(model)
    given: dict[str, Any] = {"input_ids": tokens.ids, "use_cache": True, **rest}
    if "logits_to_keep" in names:
        given["logits_to_keep"] = 1
    if tokens.padded:
        given["attention_mask"] = tokens.mask
        # Only `generate` derives positions from padding; models with positions of their own do, where they see images.
        if "position_ids" in names and not (keepers(model) and rest):
            given["position_ids"] = _positions(tokens.mask)
    return given


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
