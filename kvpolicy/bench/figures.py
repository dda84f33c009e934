"""`Figure`: what was measured, in ratios, each beside its target."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpolicy.bench.measure import BARE, FULL, LIMIT
from kvpolicy.bench.record import Memory, Prompt, Record, Tokens
from kvpolicy.bench.statistics import Spread, exponent, ratios
from kvpolicy.report import STAGES

SESSION = 1.01
"""A session that keeps everything over none: time of a prompt, and of a token."""
OVERHEAD = 1.03, 8192
"""A policy over no session, time of a prompt: at most this, from so many tokens on."""
RAGGED_OF_FULL = 0.8, 4096
"""Heads of different length over the full cache, time of a token; from so many tokens on."""
DENSE_OF_LIMIT = 1.05
"""Heads of one length over a context which has only what is kept, time of a token."""
RAGGED_OF_DENSE = 1.10
"""Heads of different length over heads of one length that hold as many slots, time of a token."""
EVICTING = 1.02
"""Evicting while decoding over not doing so, time of a token, evictions included."""
OF_PLAN = 1.04
"""Bytes held after a prompt over those that the budget says."""
OF_SLOTS = {False: 1.02, True: 1.05}
"""Bytes held over those that the slots held take without slack; by whether heads differ in length."""
LAYERS_ABOVE = 1.0
"""How much more a cache holds at its peak than in the end, in full layers."""
GROWTH = 1.1, 2048
"""Exponent in the context of what scoring takes, in time and in memory; from so many tokens on."""


@dataclass(frozen=True)
class Figure:
    """One figure.

    Args:
        what: it is.
        way: of which way.
        context: tokens of the prompt; None where it is of all of them.
        value: the figure itself; of several runs, the median.
        low: end of its 95% interval; None where nothing varies.
        high: likewise.
        target: what it should be at most, None where there is none.
    """

    what: str
    way: str
    context: int | None
    value: float
    low: float | None = None
    high: float | None = None
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one, or where the interval holds it."""
        if self.target is None or (
            self.low is not None and self.high is not None and self.low <= self.target < self.high
        ):
            return None
        return self.value <= self.target


def figures(record: Record) -> list[Figure]:
    """Return every figure of a record."""
    found: list[Figure] = []
    for context in dict.fromkeys(one.context for one in record.prompts):
        prompts = [one for one in record.prompts if one.context == context]
        tokens = {one.way: one for one in record.tokens if one.context == context}
        memory = {one.way: one for one in record.memory if one.context == context}
        found += _of_prompts(context, prompts)
        found += _of_tokens(context, tokens, memory, record.about["every"])
        found += _of_memory(context, memory)
    return [*found, *_growth(record)]


def _figure(what: str, way: str, context: int, found: Spread, target: float | None) -> Figure:
    return Figure(what, way, context, found.median, found.low, found.high, target)


def _of_prompts(context: int, prompts: Sequence[Prompt]) -> list[Figure]:
    """Return the time of a prompt over that without a session in the same run."""
    seconds = _by_way(prompts)
    bound, since = OVERHEAD
    found = []
    for way in seconds:
        if way == BARE:
            continue
        target = SESSION if way == FULL else bound if context >= since else None
        found.append(_figure("prompt, of no session", way, context, ratios(seconds[way], seconds[BARE]), target))
    return found


def _of_tokens(context: int, tokens: dict[str, Tokens], memory: dict[str, Memory], every: int) -> list[Figure]:
    found = []

    def over(what: str, way: str, other: str, target: float | None, block: int = 1) -> None:
        paired = ratios(tokens[way].seconds, tokens[other].seconds, block=block)
        found.append(_figure(what, way, context, paired, target))

    bound, since = RAGGED_OF_FULL
    dense = next((way for way, one in memory.items() if not one.ragged and way not in (BARE, FULL)), None)
    for way in tokens:
        if way == BARE:
            continue
        ragged = way in memory and memory[way].ragged
        target = SESSION if way == FULL else bound if ragged and context >= since else None
        over("token, of no session", way, BARE, target)
        if way in (FULL, LIMIT):
            continue
        if way not in memory:
            over("token, of not evicting", way, way.rpartition(",")[0], EVICTING, block=every)
        elif not ragged:
            over("token, of the limit", way, LIMIT, DENSE_OF_LIMIT)
        elif dense is not None:
            over("token, of dense", way, dense, RAGGED_OF_DENSE)
    return found


def _of_memory(context: int, memory: dict[str, Memory]) -> list[Figure]:
    found = []
    for way, one in memory.items():
        if way == BARE:
            continue
        slack = max(one.bytes / one.slots, one.later / one.later_slots)
        above = (one.cache_peak - one.bytes) / one.layer
        found += [
            Figure("bytes, of full", way, context, one.bytes / one.full),
            Figure("bytes, of the plan", way, context, one.bytes / one.planned, target=OF_PLAN),
            Figure("bytes, of the slots", way, context, slack, target=OF_SLOTS[one.ragged]),
            Figure("peak, layers above", way, context, above, target=LAYERS_ABOVE),
            Figure("all tensors, of no session", way, context, one.pass_peak / memory[BARE].pass_peak),
        ]
    return found


def _growth(record: Record) -> list[Figure]:
    bound, since = GROWTH
    contexts = [one for one in dict.fromkeys(one.context for one in record.prompts) if one >= since]
    if len(contexts) < 2:
        return []
    found = []
    for way in dict.fromkeys(one.way for one in record.memory if one.scoring is not None):
        for stage in STAGES:
            costs = [seconds_of(record.prompts, way, context, stage) for context in contexts]
            found.append(Figure(f"growth of {stage}", way, None, exponent(contexts, costs), target=bound))
        taken = [one.scoring or 0 for one in record.memory if one.way == way and one.context in contexts]
        found.append(Figure("growth of scoring's memory", way, None, exponent(contexts, taken), target=bound))
    return found


def median_of(prompts: Sequence[Prompt], way: str, context: int, part: Callable[[Prompt], float]) -> float:
    """Return the median of a part of the prompts of one way and context."""
    return statistics.median(part(one) for one in prompts if (one.way, one.context) == (way, context))


def seconds_of(prompts: Sequence[Prompt], way: str, context: int, stage: str) -> float:
    """Return the median of the seconds of a stage."""
    return median_of(prompts, way, context, lambda one: one.stages[stage])


def _by_way(prompts: Sequence[Prompt]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for one in prompts:
        found.setdefault(one.way, []).append(one.seconds)
    return found
