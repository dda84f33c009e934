"""Measures a model under policies: prompts, tokens and memory, at each context."""

from __future__ import annotations

import kvpolicy.compat  # noqa: F401  (first: it says so where transformers is too old for the rest)

# isort: split
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from transformers.cache_utils import DynamicCache

from kvpolicy.bench.record import Memory, Prompt, Record, Tokens, about
from kvpolicy.bench.rounds import Reader, forward, read_prompts, read_tokens
from kvpolicy.bench.subject import BenchError, Subject
from kvpolicy.bench.traces import Holding, holding, peaks, scoring
from kvpolicy.bench.ways import Bare, Under, Way
from kvpolicy.config import load
from kvpolicy.errors import SettingError
from kvpolicy.policy import Budget, Decode, Policy

BARE = "no session"
"""The model alone, with a full cache."""
FULL = "full"
"""The policy that keeps everything: what a session costs by itself."""
LIMIT = "limit"
"""The model alone, of whose context there is really no more than what is kept."""


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Args:
        contexts: tokens of the prompts.
        runs: how often each prompt is read each way.
        tokens: how many are read behind it.
        every: of them, how many lie between two evictions, where decoding evicts.
    """

    contexts: list[int]
    runs: int
    tokens: int
    every: int

    @property
    def longest(self) -> int:
        """Tokens of text that all of it takes."""
        return max(self.contexts) + self.tokens


def evicting_while_decoding(policy: Policy, every: int) -> Policy:
    """Return the policy that also evicts while decoding.

    >>> evicting_while_decoding(load("snapkv"), 64).name
    'snapkv, every 64'
    """
    return replace(policy, name=f"{policy.name}, every {every}", decode=Decode(every=every))


def steps(settings: Settings, policies: int) -> int:
    """Return how often `advance` is called by `measure`."""
    ways = 2 + policies
    return len(settings.contexts) * (settings.runs * ways + settings.tokens + ways)


def measure(
    subject: Subject, policies: Sequence[Policy], settings: Settings, advance: Callable[[], None] = lambda: None
) -> Record:
    """Return what is measured of a model without a session, under `full` and under policies of one budget.

    Args:
        subject: the model and its text.
        policies: at least one, all of the same budget.
        settings: how much.
        advance: called after each step of `steps`.

    Raises:
        BenchError: when the policies differ in budget, are called alike, or evict while decoding already.
    """
    budget, late = _budget(policies), _late(policies, settings.every)
    ways: list[Way] = [Bare(BARE), Under(load("full"), subject.model)]
    ways += [Under(policy, subject.model) for policy in policies]
    prompts: list[Prompt] = []
    tokens: list[Tokens] = []
    memory: list[Memory] = []
    for way in ways:
        # The first pass of a process is slower.
        with way.reading():
            forward(subject.model, subject.prompt(min(settings.contexts)), DynamicCache(config=subject.model.config))
    for context in settings.contexts:
        kept = min(int(budget.slots(torch.tensor([context]))), context)
        timed, readers = read_prompts(subject, ways, context, settings.runs, advance)
        prompts += timed
        before = [holding(reader.cache) for reader in readers]
        others = [_read(subject, Bare(LIMIT), kept), _read(subject, Under(late, subject.model), context)]
        tokens += read_tokens(subject, [*readers, *others], context, settings.tokens, advance)
        after = [holding(reader.cache) for reader in readers]
        del readers, others
        memory += _memory(subject, ways, context, kept, before, after, advance)
    asked = {"policies": [policy.to_dict() for policy in policies], **asdict(settings)}
    return Record(about(subject, asked), prompts, tokens, memory)


def _budget(policies: Sequence[Policy]) -> Budget:
    sizes = {(policy.budget.tokens, policy.budget.keep) for policy in policies}
    if len(sizes) != 1:
        raise BenchError(f"policies: expected one budget, which the limit has too, got {len(sizes)}")
    if decoding := [policy.name for policy in policies if policy.decode is not None]:
        raise BenchError(
            f"policies: expected none that evicts while decoding, as that is compared with not doing so, got {decoding}"
        )
    return policies[0].budget


def _late(policies: Sequence[Policy], every: int) -> Policy:
    """Return the first policy, evicting while decoding."""
    try:
        late = evicting_while_decoding(policies[0], every)
    except SettingError as error:
        raise BenchError(
            f"policies: expected a first one that can evict while decoding as well: {error}. Put another one first"
        ) from None
    names = [BARE, FULL, LIMIT, late.name, *(policy.name for policy in policies)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BenchError(
            f"policies: expected each once, and none called as what they stand beside, got {sorted(twice)}"
        )
    return late


def _read(subject: Subject, way: Way, tokens: int) -> Reader:
    """Return a reader that has read the first tokens of the text."""
    cache = DynamicCache(config=subject.model.config)
    with way.reading():
        forward(subject.model, subject.prompt(tokens), cache)
    return Reader(way, cache)


def _memory(
    subject: Subject,
    ways: Sequence[Way],
    context: int,
    kept: int,
    before: Sequence[Holding],
    after: Sequence[Holding],
    advance: Callable[[], None],
) -> list[Memory]:
    """Return what each way takes; `before` and `after` its tokens it has been looked at already."""
    policies = [way.policy for way in ways if isinstance(way, Under) and not way.policy.trivial]
    scored = dict(zip((policy.name for policy in policies), scoring(subject, policies, context), strict=True))
    full = before[0]
    found = []
    for way, first, last in zip(ways, before, after, strict=True):
        cache_peak, pass_peak = peaks(subject, way, context)
        share = 1.0 if way.name in (BARE, FULL) else kept / context
        found.append(
            Memory(
                context=context,
                way=way.name,
                ragged=first.ragged,
                bytes=first.bytes,
                slots=first.slots,
                later=last.bytes,
                later_slots=last.slots,
                full=full.slots,
                layer=full.layer,
                planned=round(full.slots * share),
                cache_peak=cache_peak,
                pass_peak=pass_peak,
                scoring=scored.get(way.name),
            )
        )
        advance()
    return found
