"""The memory trace: what a policy takes while it compresses is linear in the prompt, and goes layer by layer."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

import kvpolicy
from kvpolicy.bench.rounds import forward
from kvpolicy.bench.subject import Subject, made_up
from kvpolicy.bench.traces import holding, peaks, scoring
from kvpolicy.bench.ways import Under
from kvpolicy.loading import built_in
from kvpolicy.plugin import settings
from kvpolicy.policy import Budget, Policy
from kvpolicy.registry import Registry
from kvpolicy.testing.checks.memory import largest
from kvpolicy.types import LayerView, Needs

NAMES = sorted(entry.name for entry in Registry(built_in()).entries("policy"))
TOKENS = 512
SLACK = 1.05
"""Storages that have died are looked for once those counted exceed the peak by a twentieth."""


@pytest.fixture(scope="module")
def subject() -> Subject:
    return made_up("tiny", layers=None, tokens=2 * TOKENS, dtype=torch.float32, device="cpu")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scorers that read all attention read it in blocks: let one be full at the shorter of the prompts already."""
    monkeypatch.setattr("kvpolicy.blocks.BLOCK", 2**15)


def named(name: str) -> Policy:
    # What is repeated at once attends to all of the prompt: as many tokens of either.
    chunk = {"score": {"chunk": 128}} if name == "kvzip" else {}
    return kvpolicy.load(name, budget=None if name == "full" else 64, **chunk)


def of_a_prompt(subject: Subject, policy: Policy, tokens: int) -> tuple[int, int, int]:
    """Return bytes: of the pass's largest tensor, of all alive at once in it, and of those of one layer's scoring."""
    way, cache = Under(policy, subject.model), DynamicCache(config=subject.model.config)
    with way.reading():
        one = largest(partial(forward, subject.model, subject.prompt(tokens), cache))
    return one, peaks(subject, way, tokens)[1], scoring(subject, [policy], tokens)[0]


def linear(before: int) -> float:
    """Return the most bytes that twice the tokens may take: linear but for a constant, of lag-kv a negative one."""
    return 2 * SLACK * before + 2**16


@pytest.mark.parametrize("name", NAMES)
def test_memory_grows_no_faster_than_the_prompt(subject: Subject, name: str) -> None:
    short, long = (of_a_prompt(subject, named(name), tokens) for tokens in (TOKENS, 2 * TOKENS))
    assert long[0] <= 2 * short[0]
    assert all(after <= linear(before) for before, after in zip(short[1:], long[1:], strict=True))


@settings
class AllPairs:
    """The sum of the products of a slot's key with all keys, by way of a table of all of them."""

    name = "all-pairs"
    formula = "sum_j k_i . k_j"
    needs = Needs(keys=True)

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``."""
        return (view.keys.float() @ view.keys.float().mT).sum(-1)


def test_a_table_of_all_pairs_is_seen(subject: Subject) -> None:
    policy = Policy(name="all pairs", score=AllPairs(), budget=Budget(tokens=64))
    short, long = (of_a_prompt(subject, policy, tokens) for tokens in (TOKENS, 2 * TOKENS))
    assert all(after > linear(before) for before, after in zip(short, long, strict=True))


@pytest.mark.parametrize("name", [name for name in NAMES if not kvpolicy.load(name).late])
def test_a_prompt_holds_at_most_one_layer_in_full_besides_what_is_kept(subject: Subject, name: str) -> None:
    way, cache = Under(named(name), subject.model), DynamicCache(config=subject.model.config)
    with way.reading():
        forward(subject.model, subject.prompt(TOKENS), cache)
    kept = holding(cache).bytes
    most, _ = peaks(subject, way, TOKENS)
    whole = DynamicCache(config=subject.model.config)
    forward(subject.model, subject.prompt(TOKENS), whole)
    assert kept <= most <= kept + holding(whole).layer


def test_a_prompt_in_chunks_holds_more_until_it_is_read(subject: Subject) -> None:
    whole = DynamicCache(config=subject.model.config)
    forward(subject.model, subject.prompt(TOKENS), whole)
    session, most = kvpolicy.load("snapkv", budget=64).on(subject.model), 0
    cache = DynamicCache(config=subject.model.config)
    with session, session.prompt():
        for chunk in subject.prompt(TOKENS).split(TOKENS // 4, dim=1):
            forward(subject.model, chunk, cache)
            most = max(most, holding(cache).bytes)
    assert most > holding(cache).bytes + holding(whole).layer
