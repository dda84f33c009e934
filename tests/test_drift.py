"""Drift: what it measures, and that one forward pass over a continuation measures it."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.cache_utils import DynamicCache

from kvpolicy import Policy, load
from kvpolicy.eval.drift import compare, drift, evicted_logits, full_logits
from kvpolicy.testing import oracle
from kvpolicy.testing.models import tiny

SMALL = {"budget": 12, "select": {"sinks": 1, "recent": 3}}
DENSE, RAGGED = load("ecokv-snapkv", **SMALL), load("ecokv-ada-kv", **SMALL)
BOTH = pytest.mark.parametrize("policy", [DENSE, RAGGED], ids=lambda policy: policy.name)
MODELS = pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gemma2", "gpt2"])

_random = torch.Generator().manual_seed(0)
IDS = torch.randint(128, (2, 40), generator=_random)
CONTINUATION = torch.randint(128, (2, 9), generator=_random)


def test_divergence_and_agreement_of_known_distributions() -> None:
    full = torch.tensor([[[0.5, 0.5, 0.0], [0.9, 0.05, 0.05]]]).log()
    evicted = torch.tensor([[[0.25, 0.75, 0.0], [0.9, 0.05, 0.05]]]).log()
    smallest = torch.finfo(torch.float32).min
    found = compare(full.clamp(min=smallest), evicted.clamp(min=smallest))
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert found.kl.tolist() == [[pytest.approx(expected), pytest.approx(0)]]
    assert found.mean == pytest.approx(expected / 2)
    assert found.agrees.tolist() == [[False, True]]
    assert found.agreement == 0.5


@MODELS
def test_a_cache_that_keeps_everything_does_not_drift(name: str) -> None:
    found = drift(tiny(name), load("full"), IDS, CONTINUATION)
    assert found.kl.shape == found.agrees.shape == CONTINUATION.shape
    assert found.kl.abs().max() < 1e-9
    assert found.agreement == 1


@MODELS
def test_a_cache_that_keeps_next_to_nothing_drifts_far(name: str) -> None:
    model = tiny(name)
    least = load("streaming-llm", budget=1, select={"sinks": 0, "recent": 1})
    nothing, little = (drift(model, policy, IDS, CONTINUATION) for policy in (least, DENSE))
    assert nothing.mean > 100 * drift(model, load("full"), IDS, CONTINUATION).mean
    assert nothing.mean > little.mean > 0
    assert nothing.agreement < 1


@BOTH
@MODELS
def test_one_pass_over_the_continuation_gives_what_single_steps_give(name: str, policy: Policy) -> None:
    model = tiny(name, dtype=torch.float64)
    steps = []
    with policy.on(model):
        cache = DynamicCache(config=model.config)
        oracle.forward(model, IDS, cache, None)
        for token in CONTINUATION.split(1, dim=1):
            steps.append(oracle.forward(model, token, cache, None))
    at_once = evicted_logits(model, policy, IDS, CONTINUATION)
    tolerance = 1e-5 if name == "gemma2" else 1e-9  # gemma2 computes its norms in float32 whatever the dtype
    torch.testing.assert_close(at_once, torch.cat(steps, dim=1), rtol=tolerance, atol=tolerance)


@BOTH
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gpt2"])
def test_the_logits_are_those_of_a_full_cache_that_hides_what_is_evicted(name: str, policy: Policy) -> None:
    model = tiny(name, dtype=torch.float64)
    kept = oracle.plan(policy, model, IDS)
    for found, plan in (
        (evicted_logits(model, policy, IDS, CONTINUATION), kept),
        (full_logits(model, IDS, CONTINUATION), None),
    ):
        expected = oracle.logits(model, IDS, [CONTINUATION], plan)[:, IDS.shape[1] :]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_given_logits_of_the_full_cache_are_used() -> None:
    model = tiny()
    full = full_logits(model, IDS, CONTINUATION)
    assert drift(model, DENSE, IDS, CONTINUATION, full=full).mean == drift(model, DENSE, IDS, CONTINUATION).mean
