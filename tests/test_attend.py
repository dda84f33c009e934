"""The mask for slots that are held, against a loop over every entry."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from kvpolicy.attend.function import attention
from kvpolicy.attend.masks import cut_mask, part
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.step import Step, mark, tag
from kvpolicy.store import build
from kvpolicy.types import Selection

BATCH, QUERY_HEADS, KV_HEADS, NEW, SLOTS, START = 2, 4, 2, 3, 6, 9


def positions() -> torch.Tensor:
    held = [torch.randperm(START)[: SLOTS - NEW].sort().values for _ in range(BATCH * KV_HEADS)]
    new = torch.arange(START, START + NEW)
    out = torch.stack([torch.cat([one, new]) for one in held]).view(BATCH, KV_HEADS, SLOTS).to(torch.int32)
    out[0, 1, 0] = -1
    return out


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["none", "bool", "bool a head", "additive"])
def test_cut_mask(kind: str, implementation: str) -> None:
    torch.manual_seed(0)
    held, query = positions(), torch.randn(BATCH, QUERY_HEADS, NEW, 4)
    seen = START + NEW
    causal = torch.ones(NEW, seen, dtype=torch.bool).tril(START)
    logical = torch.rand(BATCH, QUERY_HEADS if kind == "bool a head" else 1, NEW, seen) < 0.7
    mask = None if kind == "none" else logical & causal
    lowest = torch.finfo(torch.float32).min
    if kind == "additive":
        mask = torch.zeros(()).where(logical & causal, lowest)
    got = cut_mask(mask, held, START, query, implementation)
    assert got.shape == (BATCH, QUERY_HEADS, NEW, SLOTS)
    visible = got if got.dtype == torch.bool else got == 0
    assert (got.dtype == torch.bool) == (implementation == "sdpa" and kind != "additive")
    for b in range(BATCH):
        for h in range(QUERY_HEADS):
            for q in range(NEW):
                for t in range(SLOTS):
                    at = int(held[b, h // 2, t])
                    want = at >= 0 and bool(causal[q, at])
                    if kind != "none":
                        want = want and bool(logical[b, h if kind == "bool a head" else 0, q, at])
                    assert bool(visible[b, h, q, t]) == want
                    if got.dtype != torch.bool and not want:
                        assert got[b, h, q, t] == lowest


def test_a_part_of_a_block_mask_is_the_part_of_a_tensor() -> None:
    shown = torch.rand(BATCH, 1, 7, 9, generator=torch.Generator().manual_seed(0)) < 0.6
    block = create_block_mask(lambda b, h, q, t: shown[b, 0, q, t], BATCH, None, 7, 9, device="cpu")
    rows, columns = part(shown, 2, 6, 5), part(block, 2, 6, 5)
    assert rows.shape == (BATCH, 1, 4, 5) and columns.shape == (BATCH, 1, 4, 5)
    for b, q, t in itertools.product(range(BATCH), range(4), range(5)):
        place = [torch.tensor(at) for at in (b, 0, q, t)]
        assert bool(columns.mask_mod(*place)) == bool(rows[b, 0, q, t])


def test_a_mask_of_another_width_is_refused() -> None:
    mask = torch.ones(BATCH, 1, NEW, SLOTS, dtype=torch.bool)
    with pytest.raises(UnsupportedModelError, match="expected 12 columns"):
        cut_mask(mask, positions(), START, torch.randn(BATCH, QUERY_HEADS, NEW, 4), "sdpa")


def test_a_bias_of_the_models_own_is_added_where_heads_differ_in_length() -> None:
    torch.manual_seed(0)
    keep = torch.ones(1, 2, 6, dtype=torch.bool)
    keep[0, 1, 1:4] = False
    keys, values = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    store, _ = build(keys, values, None, Selection.from_mask(keep))
    query, bias, reached = torch.randn(1, 4, 1, 4), torch.randn(1, 1, 1, 6), []
    step = Step(
        layer=0,
        store=store,
        keys=mark(keys),
        values=mark(values),
        positions=None,
        start=5,
        new=1,
        plain=True,
        shared=False,
        cut=None,
        attended=lambda _: reached.append(True),
    )
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    got, _ = attention("sdpa", module, query, tag(keys, step), values, bias, scaling=0.5)
    for head in range(4):
        logits = (keys[0, head // 2] @ query[0, head, 0]) * 0.5 + bias[0, 0, 0]
        weights = logits.masked_fill(~keep[0, head // 2], -torch.inf).softmax(-1)
        torch.testing.assert_close(got[0, 0, head], weights @ values[0, head // 2])
    assert reached == [True]
