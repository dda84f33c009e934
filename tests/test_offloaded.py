"""The offloaded store: on the CPU what is held, on the model's device what is attended to, and nothing else changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.cache_utils import DynamicCache

import kvpolicy
from kvpolicy.policy import Policy
from kvpolicy.store.dense import DenseStore
from kvpolicy.store.offloaded import OffloadedStore
from kvpolicy.testing import oracle
from kvpolicy.testing.models import tiny


def tokens(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 128, (batch, count), generator=torch.Generator().manual_seed(seed))


def load(name: str, **settings: Any) -> Policy:
    return kvpolicy.load(name, budget=24, select={"type": "top-k", "sinks": 2, "recent": 4}, **settings)


@pytest.mark.parametrize("decode", [None, {"every": 5}], ids=["prompt", "decode"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["snapkv-w8", "ada-kv"])
def test_everything_is_as_with_a_plain_store(name: str, side: str, decode: dict[str, int] | None) -> None:
    model, pieces = tiny(dtype=torch.float64), [tokens(2, 64), *tokens(2, 12, 1).split(1, dim=1), tokens(2, 5, 2)]
    mask = torch.ones(2, 81, dtype=torch.int64)
    mask[0, :11] = 0
    found = []
    for store in ("plain", "offloaded"):
        cache, logits, seen = DynamicCache(config=model.config), [], 0
        with load(name, store=store, decode=decode).on(model) as run:
            for piece in pieces:
                seen += piece.shape[1]
                logits.append(oracle.forward(model, piece, cache, mask[:, :seen] if side == "left" else None))
            oracle.forward(model, tokens(2, 1, 4), cache, None)
            cache.crop(-1)
            cache.reorder_cache(torch.tensor([1, 0, 1]))
            logits.append(oracle.forward(model, tokens(3, 1, 3), cache, None)[:2])
        found.append((torch.cat(logits, dim=1), [layer.held for layer in cache.layers], run.report.bytes))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    assert isinstance(cache.layers[0].store, OffloadedStore)


def test_each_part_lies_where_it_should() -> None:
    """In place of an accelerator, a device that computes nothing; the tensors have shapes and devices alone."""
    with FakeTensorMode():
        keys, values = torch.empty(1, 2, 6, 8, device="meta"), torch.empty(1, 2, 6, 4, device="meta")
        kept = DenseStore(keys, values, torch.empty(1, 2, 6, dtype=torch.int32, device="meta"))
        store = OffloadedStore(kept)
        for _ in range(2):
            store.append(keys[:, :, :1], values[:, :, :1], 6)
        assert {part.device.type for part in store.padded() if part is not None} == {"meta"}
        assert {part.device.type for parts in store.heads() for part in parts} == {"meta"}
        assert store.padded()[0].shape == (1, 2, 8, 8)
        assert {tensor.device.type for tensor in store.state().tensors.values()} == {"cpu"}


def test_a_context_keeps_it(tmp_path: Path) -> None:
    model = tiny(dtype=torch.float64)
    context = load("ada-kv", store="offloaded").compress(model, tokens(1, 64))
    context.save(tmp_path / "context.safetensors")
    loaded = kvpolicy.load_context(tmp_path / "context.safetensors", model)
    answers = []
    for each in (context, loaded):
        with each.fork() as fork:
            answers.append(fork.generate(tokens(1, 5, 1), max_new_tokens=6, pad_token_id=0, eos_token_id=None))
            assert isinstance(fork.cache.layers[0].store, OffloadedStore)
    assert torch.equal(*answers)
