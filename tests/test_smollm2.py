"""The order that the paper claims, on a real model and real text."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvpolicy
from kvpolicy.eval.drift import compare, evicted_logits
from kvpolicy.testing import oracle
from kvpolicy.texts import contexts
from kvpolicy.types import Needs

pytestmark = [pytest.mark.model, pytest.mark.slow]

CONTEXT, AHEAD, TEXTS = 1024, 128, 8
POLICIES, KEPT = ("snapkv", "mixkv-snapkv", "ecokv-snapkv"), (64, 128, 256)


def test_ecokv_drifts_less_than_snapkv_and_mixkv(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    """ECOKV protects and observes 8 tokens, the other two their usual 32.

    The oracle reads each text once for all policies; that sessions give the same logits is checked on the first.
    """
    model, tokenizer = smollm2
    policies = [kvpolicy.load(name, budget=kept) for name in POLICIES for kept in KEPT]
    found: list[list[float]] = []
    for text in contexts(tokenizer, tokens=CONTEXT + AHEAD, count=TEXTS):
        ids, ahead = torch.tensor([text]).split([CONTEXT, AHEAD], dim=1)
        views = oracle.views(model, ids, None, Needs(queries=32))
        plans = [policy.plan(views) for policy in policies]
        full, *evicted = oracle.continuations(model, ids, ahead, [None, *plans])
        if not found:
            torch.testing.assert_close(evicted[-1], evicted_logits(model, policies[-1], ids, ahead), rtol=0, atol=1e-3)
        found.append([compare(full, logits).mean for logits in evicted])
    means = torch.tensor(found).mean(0).view(len(POLICIES), len(KEPT))
    snapkv, mixkv, ecokv = means
    assert (ecokv < mixkv).all() and (mixkv < snapkv).all(), means
