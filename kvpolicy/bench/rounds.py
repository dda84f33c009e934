"""Rounds: prompts and tokens timed in turns, so that what slows the machine slows all ways alike."""

from __future__ import annotations

import kvpolicy.compat  # noqa: F401  (first: it says so where transformers is too old for the rest)

# isort: split
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvpolicy.bench.record import Prompt, Tokens
from kvpolicy.bench.subject import Subject
from kvpolicy.bench.ways import Way
from kvpolicy.session.decoder import cache_name
from kvpolicy.session.inputs import Tokens as Ids
from kvpolicy.session.inputs import forward_arguments


@dataclass(frozen=True)
class Reader:
    """A way and the cache that its latest prompt has left.

    Args:
        way: what tokens are read within.
        cache: they are read by.
    """

    way: Way
    cache: DynamicCache


def forward(model: PreTrainedModel, ids: Tensor, cache: DynamicCache) -> None:
    """Read tokens (int64 ``[1, n]``) into a cache, as `generate` would."""
    given = forward_arguments(model, Ids(ids, torch.ones_like(ids)), {}, last=1)
    with torch.no_grad():
        model(**given, **{cache_name(model): cache})


def read_prompts(
    subject: Subject, ways: Sequence[Way], context: int, runs: int, advance: Callable[[], None] = lambda: None
) -> tuple[list[Prompt], list[Reader]]:
    """Return the times of one prompt, each way in each run, and what the last run has left of it.

    Args:
        subject: who reads.
        ways: that take turns, in another order in each run.
        context: tokens of the prompt.
        runs: how often each way takes its turn.
        advance: called after each prompt.
    """
    prompts: list[Prompt] = []
    left: dict[str, DynamicCache] = {}
    for run in range(runs):
        for way in _in_turn(ways, run):
            left.pop(way.name, None)
            cache = DynamicCache(config=subject.model.config)
            with way.reading():
                seconds = timed(subject, subject.prompt(context), cache)
            prompts.append(Prompt(context, way.name, seconds, way.stages()))
            left[way.name] = cache
            advance()
    return prompts, [Reader(way, left[way.name]) for way in ways]


def read_tokens(
    subject: Subject, readers: Sequence[Reader], context: int, count: int, advance: Callable[[], None] = lambda: None
) -> list[Tokens]:
    """Return the times of the tokens behind a prompt, one by one, each reader in turn.

    Args:
        subject: who reads.
        readers: with what they hold of the prompt.
        context: tokens of the prompt, after which the text goes on.
        count: how many tokens each of them reads.
        advance: called after each token.
    """
    before = {reader.way.name: reader.way.stages() for reader in readers}
    seconds: dict[str, list[float]] = {name: [] for name in before}
    for at in range(count):
        token = subject.ids[:, context + at : context + at + 1]
        for reader in _in_turn(readers, at):
            with reader.way.decoding():
                took = timed(subject, token, reader.cache)
            seconds[reader.way.name].append(took)
        advance()
    return [
        Tokens(context, reader.way.name, seconds[reader.way.name], _since(reader.way, before[reader.way.name]))
        for reader in readers
    ]


def timed(subject: Subject, ids: Tensor, cache: DynamicCache) -> float:
    """Return the seconds of `forward`, the device's work included and the garbage collector's left out."""
    with _no_collection():
        wait(subject.ids.device)
        started = time.perf_counter()
        forward(subject.model, ids, cache)
        wait(subject.ids.device)
        return time.perf_counter() - started


def wait(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _no_collection() -> Iterator[None]:
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _in_turn(all_of_them: Sequence[Any], turn: int) -> list[Any]:
    """Return them in an order that differs from turn to turn, and not from time to time."""
    return random.Random(turn).sample(all_of_them, len(all_of_them))


def _since(way: Way, before: dict[str, float]) -> dict[str, float]:
    return {stage: seconds - before[stage] for stage, seconds in way.stages().items()}
