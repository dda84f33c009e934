"""The order that the paper claims, on a real model and real text."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvpolicy
from kvpolicy.eval.drift import compare, evicted_logits, full_logits
from kvpolicy.texts import contexts

pytestmark = [pytest.mark.model, pytest.mark.slow]

CONTEXT, AHEAD, TEXTS = 1024, 128, 8


def test_ecokv_drifts_less_than_snapkv_and_mixkv(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    """ECOKV protects and observes 8 tokens, the other two their usual 32."""
    model, tokenizer = smollm2
    texts = torch.tensor(contexts(tokenizer, tokens=CONTEXT + AHEAD, count=TEXTS))
    drifts: dict[tuple[str, int], list[float]] = {}
    for ids, ahead in zip(texts[:, None, :CONTEXT], texts[:, None, CONTEXT:], strict=True):
        full = full_logits(model, ids, ahead)
        for name in ("snapkv", "mixkv-snapkv", "ecokv-snapkv"):
            for budget in (64, 128, 256):
                evicted = evicted_logits(model, kvpolicy.load(name, budget=budget), ids, ahead)
                drifts.setdefault((name, budget), []).append(compare(full, evicted).mean)
    mean = {case: sum(found) / len(found) for case, found in drifts.items()}
    for budget in (64, 128, 256):
        assert mean["ecokv-snapkv", budget] < mean["mixkv-snapkv", budget] < mean["snapkv", budget]
