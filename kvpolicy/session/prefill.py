"""One forward pass over a prompt, with or without a question behind it, into a cache that outlives the pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvpolicy.errors import ContextError, InactiveSessionError, UnsupportedModelError
from kvpolicy.session import Session
from kvpolicy.session.cache_state import disown
from kvpolicy.session.decoder import cache_name, find_decoders
from kvpolicy.session.fork import Held
from kvpolicy.session.inputs import CROSSED, Tokens, crossed_behind, forward_arguments, read, read_question
from kvpolicy.session.positions import deltas_of, keeping
from kvpolicy.session.run import run_of


@dataclass(frozen=True)
class Told:
    """What a model is to read.

    Args:
        tokens: those of the inputs, and of the question all but the last.
        last: the question's last token, ``[B, 1]``, which every fork reads first; without a question ``[B, 0]``.
        rest: what else the model is called with: pixels and the like.
    """

    tokens: Tokens
    last: Tokens
    rest: dict[str, Any]


def told(decoder: PreTrainedModel, inputs: Any, question: Any) -> Told:
    """Return what `decoder` is to read of inputs, and of the question, or None, behind them.

    Raises:
        ContextError: when inputs or question are wrong.
    """
    tokens, rest = read(inputs, "inputs", decoder.device)
    if question is None:
        return Told(tokens, Tokens(tokens.ids[:, :0], tokens.mask[:, :0]), rest)
    asked = read_question(question, decoder.device, len(tokens.ids))
    if asked.length < 2:
        raise ContextError("question: expected at least 2 tokens, as its last one is read by the forks, got 1")
    asked, last = asked.split(-1)
    # The question is text, and attends to the pictures that the text before it does.
    if (crossed := crossed_behind(rest, tokens)) is not None:
        rest |= {CROSSED: torch.cat([rest[CROSSED], crossed.expand(-1, asked.length, -1, -1)], dim=1)}
    rest |= {
        name: torch.cat([value, value.new_zeros(len(value), asked.length)], dim=1)
        for name, value in rest.items()
        if name.endswith("token_type_ids")
    }
    return Told(tokens.join(asked), last, rest)


def prefill(session: Session, model: nn.Module, given: Told) -> Held:
    """Return what a session on `model`, entered by the caller, holds of what it is told.

    Raises:
        ContextError: when a layer would count padding as tokens.
        InactiveSessionError: when another session took the cache.
        UnsupportedModelError: when no layer of the model is evicted from.
    """
    cache = DynamicCache(config=decoder_of(model).config)
    # What is held outlives `torch.inference_mode`.
    with torch.inference_mode(False), torch.no_grad(), keeping(model, {}):
        model(**forward_arguments(model, given.tokens, given.rest, last=1), **{cache_name(model): cache})  # type: ignore[arg-type]
        deltas = deltas_of(model)
        disown(cache)
    run = run_of(cache)
    if run is not None and run.owner is not session:
        raise InactiveSessionError(
            f"compress: expected the cache to itself, but a session of policy '{run.policy.name}', entered meanwhile "
            "on the same model by another thread, took it: let one wait for the other"
        )
    if run is None:
        raise UnsupportedModelError(f"{type(model).__name__}: it has no full-attention layer to compress")
    held = Held(cache, given.tokens.join(given.last), deltas, crossed_behind(given.rest, given.tokens))
    held.check_padding(held.tokens, "inputs")
    return held


def decoder_of(model: nn.Module) -> PreTrainedModel:
    """Return the one decoder of a model.

    Raises:
        UnsupportedModelError: when it has several.
    """
    found = find_decoders(model)
    if len(found) > 1:
        names = ", ".join(type(one).__name__ for one in found)
        raise UnsupportedModelError(f"model: expected one decoder, whose cache a context keeps, got {names}")
    return found[0]
