"""A model repeats the prompt it has read, and what it attends to meanwhile is measured."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvpolicy.blocks import attention_blocks
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.session.decoder import cache_name, forward_names
from kvpolicy.session.facts import Text
from kvpolicy.session.layers import evicting_layers
from kvpolicy.step import Attended, forget
from kvpolicy.store.layer import EvictingLayer
from kvpolicy.types import LayerView, Repetition

_REPEATED = ("input_ids", "attention_mask", "position_ids", "cache_position")
"""Of the tensors that a decoder is called with, those that a repetition has of its own."""


class Repeater:
    """Has a decoder repeat the prompt that a cache holds, from which nothing has been evicted.

    Args:
        decoder: whose cache it is.
        repetition: how it repeats.
    """

    def __init__(self, decoder: PreTrainedModel, repetition: Repetition) -> None:
        self._decoder = decoder
        self._how = repetition

    def text(self, given: dict[str, Any]) -> Text:
        """Return the tokens that the decoder is called with.

        Raises:
            UnsupportedModelError: when it is called with something else, which a repetition would be without.
        """
        ids, positions = given.get("input_ids"), given.get("position_ids")
        what = f"{type(self._decoder).__name__}: to repeat its prompt, expected"
        if ids is None:
            raise UnsupportedModelError(
                f"{what} token ids, got embeddings: a model that takes pictures makes them of any prompt"
            )
        if positions is not None and positions.ndim != 2:
            raise UnsupportedModelError(f"{what} one position a token, got position_ids {list(positions.shape)}")
        others = [name for name, value in given.items() if isinstance(value, Tensor) and name not in _REPEATED]
        if others:
            raise UnsupportedModelError(f"{what} token ids and nothing that goes with them, got {', '.join(others)}")
        device = ids.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return Text(ids, None if positions is None else positions.expand(len(ids), -1), autocast)

    def __call__(self, cache: Cache, text: Text, visible: Tensor | None) -> dict[int, Tensor]:
        """Return by layer the most attention that each token was paid, float32 ``[B, Hkv, T]``; 0 for padding.

        The cache is left as it was.

        Args:
            cache: of the decoder.
            text: the prompt.
            visible: bool ``[B, T]``, False for padding, or None.
        """
        there = torch.ones_like(text.ids, dtype=torch.bool) if visible is None else visible.to(text.ids.device)
        rows = [_Row(ids[own].tolist(), own.nonzero()[:, 0]) for ids, own in zip(text.ids, there, strict=True)]
        found = {layer.index: _nothing_yet(layer) for layer in evicting_layers(cache) if layer.seen}
        turns = [self._how.inputs(row.ids) for row in rows]
        self._check_length(text, max(map(len, chain.from_iterable(turns)), default=0))
        autocast = torch.autocast(text.ids.device.type, dtype=text.autocast, enabled=text.autocast is not None)
        for turn in range(max(map(len, turns))):
            inputs = [each[turn] if turn < len(each) else [] for each in turns]
            parts = [row.part(turn, self._how, asked) for row, asked in zip(rows, inputs, strict=True)]
            with _aside(cache, _Listener(parts, found, plain=visible is None)), torch.no_grad(), autocast:
                self._decoder.forward(**self._arguments(inputs, text, visible), **{cache_name(self._decoder): cache})
        return found

    def _check_length(self, text: Text, longest: int) -> None:
        """Raise where the model would read what it repeats in another way than the prompt, or not at all."""
        config, read = self._decoder.config, text.ids.shape[1]
        kinds, limit = _rope(config)
        what = f"{type(self._decoder).__name__}: expected to repeat"
        if "dynamic" in kinds:
            raise UnsupportedModelError(f"{what} a prompt without turning keys by how much is read (dynamic RoPE)")
        if not kinds:
            limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and read <= limit < read + longest:
            raise UnsupportedModelError(
                f"{what} a prompt of {read} tokens within the {limit} positions that it reads like the prompt, got up "
                f"to {longest} more: set a smaller `chunk`, or use another policy"
            )

    def _arguments(self, inputs: Sequence[list[int]], text: Text, visible: Tensor | None) -> dict[str, Any]:
        # Padded behind: what comes later changes nothing of what is before it, and is not looked at.
        asked = [torch.tensor(each, dtype=text.ids.dtype, device=text.ids.device) for each in inputs]
        ids = pad_sequence(asked, batch_first=True)
        given: dict[str, Any] = {"input_ids": ids, "use_cache": True}
        if "logits_to_keep" in forward_names(self._decoder):
            given["logits_to_keep"] = 1
        if visible is not None:
            given["attention_mask"] = torch.cat([visible.to(ids.device), ids.new_ones(ids.shape)], dim=1).long()
        if text.positions is not None:
            last = text.positions if visible is None else text.positions.where(visible.to(ids.device), -1)
            given["position_ids"] = last.amax(-1, keepdim=True) + 1 + torch.arange(ids.shape[1], device=ids.device)
        return given


@dataclass(frozen=True)
class _Part:
    """What one row repeats in one pass.

    Args:
        chunk: int64 ``[n]``, the slots of the tokens that it repeats.
        sinks: int64 ``[s]``, those of the first tokens, where they come before the chunk.
        length: how many tokens of the pass are the row's own; 0 where it has nothing left to repeat.
    """

    chunk: Tensor
    sinks: Tensor
    length: int


@dataclass(frozen=True)
class _Row:
    """The prompt of one row: its ids, and the slots that hold them, int64 ``[n]``."""

    ids: list[int]
    slots: Tensor

    def part(self, turn: int, how: Repetition, asked: Sequence[int]) -> _Part:
        start = turn * how.chunk
        return _Part(self.slots[start : start + how.chunk], self.slots[: min(how.sinks, start)], len(asked))


class _Listener:
    """Owns evicting layers while the prompt is repeated.

    Args:
        parts: what each row repeats.
        found: by layer, what has been measured so far.
        plain: whether no row has padding.
    """

    def __init__(self, parts: Sequence[_Part], found: dict[int, Tensor], *, plain: bool) -> None:
        self.plain = plain
        self._parts = parts
        self._found = found
        self._seen: set[int] = set()

    def updating(self, layer: EvictingLayer, new: int) -> None:
        """Return that the pass evicts nothing."""

    def took_rows(self, layer: EvictingLayer, rows: Tensor) -> None:
        """Take no note."""

    def cropped(self, layer: EvictingLayer) -> None:
        """Take no note."""

    def attended(self, layer: EvictingLayer, attended: Attended) -> None:
        """Measure what each slot was paid."""
        if attended.derived is not None:
            raise UnsupportedModelError(
                f"layer {layer.index}: its keys are derived from what it caches, and are there during a pass alone: "
                "use a policy that needs no repetition"
            )
        # Keys that several modules share call back more than once.
        if layer.index in self._seen:
            return
        self._seen.add(layer.index)
        keys, query = layer.padded()[0], attended.query
        held = keys.shape[2] - query.shape[2]
        found = self._found[layer.index]
        with torch.autocast(keys.device.type, enabled=False):
            for row, part in enumerate(self._parts):
                if part.length:
                    paid = _paid(keys[row], query[row, :, : part.length], held, part, attended.scaling)
                    found[row, :, part.chunk.to(keys.device)] = paid


def _paid(keys: Tensor, query: Tensor, held: int, part: _Part, scaling: float | None) -> Tensor:
    """Return the most attention that each slot of a chunk is paid by any query of its group, float32 ``[Hkv, n]``.

    The softmax is over sinks, chunk and the repetition itself alone.

    Args:
        keys: ``[Hkv, held + q, Dk]``.
        query: ``[Hq, n, Dk]``, those of the repetition.
        held: how many slots the prompt has.
        part: what is repeated.
        scaling: what ``q @ k`` is multiplied by.
    """
    own = torch.arange(held, held + part.length, device=keys.device)
    seen = keys[None, :, torch.cat([part.sinks.to(keys.device), part.chunk.to(keys.device), own])]
    last = torch.arange(seen.shape[2] - part.length, seen.shape[2], device=keys.device)
    # As if sinks, chunk and repetition were all there is, in this order.
    view = LayerView(keys=seen, values=seen, queries=query[None], query_positions=last[None], scaling=scaling)  # type: ignore[arg-type]
    chunk = slice(len(part.sinks), len(part.sinks) + len(part.chunk))
    most = [block.attention()[0, ..., chunk].amax((1, 2)) for block in attention_blocks(view)]
    return torch.stack(most).amax(0)


@contextmanager
def _aside(cache: Cache, listener: _Listener) -> Iterator[None]:
    """Let `listener` own the evicting layers of a cache; leave all of its layers as they were before."""
    evicting = evicting_layers(cache)
    before = [(layer, layer.owner, layer.window, layer.seen, layer.beside) for layer in evicting]
    layers = cache.layers
    cache.layers = [layer if isinstance(layer, EvictingLayer) else _copied(layer) for layer in layers]
    for layer in evicting:
        layer.owner = listener
        vars(layer).update(_detached(layer.beside))
    try:
        yield
    finally:
        for layer, owner, window, seen, beside in before:
            if layer.store is not None and layer.seen > seen:
                layer.store.drop_last(layer.seen - seen)
            layer.owner, layer.window, layer.seen = owner, window, seen
            vars(layer).update(beside)
        cache.layers = layers
        forget()


def _copied(layer: Any) -> Any:
    copied = copy.copy(layer)
    vars(copied).update(_detached(vars(layer)))
    return copied


def _detached(held: Any) -> Any:
    """Return a copy of tensors and what holds them, of which no gradient is taken."""
    if isinstance(held, Tensor):
        return held.detach().clone()
    if isinstance(held, dict):
        return {name: _detached(each) for name, each in held.items()}
    return [_detached(each) for each in held] if isinstance(held, list) else held


def _nothing_yet(layer: EvictingLayer) -> Tensor:
    keys = layer.padded()[0]
    return keys.new_zeros(keys.shape[:3], dtype=torch.float32)


def _rope(config: Any) -> tuple[set[str], int | None]:
    """Return the kinds of RoPE of a decoder with this config, and, of longrope, up to where keys are turned alike."""
    given = getattr(config, "rope_parameters", None) or {}
    every = [given] if "rope_type" in given else [each for each in given.values() if isinstance(each, dict)]
    kinds = {str(each.get("rope_type", "default")) for each in every}
    limits = [each.get("original_max_position_embeddings") for each in every if each.get("rope_type") == "longrope"]
    return kinds, next((limit for limit in limits if limit is not None), None)
