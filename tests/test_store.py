"""Both stores against a twin of plain lists, through random sequences of what happens to a cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy.store import build
from kvpolicy.store.dense import DenseStore
from kvpolicy.store.ragged import RaggedStore
from kvpolicy.types import Selection

DK, DV = 3, 2
Slot = tuple[int, list[float], list[float]]


class Twin:
    """For each row and head, the list of (position, key, value)."""

    def __init__(self, keys: Tensor, values: Tensor, keep: Tensor) -> None:
        self.rows: list[list[list[Slot]]] = [
            [
                [(t, keys[b, h, t].tolist(), values[b, h, t].tolist()) for t in range(keys.shape[2]) if keep[b, h, t]]
                for h in range(keys.shape[1])
            ]
            for b in range(keys.shape[0])
        ]

    def append(self, keys: Tensor, values: Tensor, start: int) -> None:
        for b, row in enumerate(self.rows):
            for h, head in enumerate(row):
                head += [(start + q, keys[b, h, q].tolist(), values[b, h, q].tolist()) for q in range(keys.shape[2])]

    def drop_last(self, count: int) -> None:
        self.rows = [[head[: len(head) - count] for head in row] for row in self.rows]

    def take_rows(self, rows: list[int]) -> None:
        self.rows = [[list(head) for head in self.rows[row]] for row in rows]


def same(store: DenseStore | RaggedStore, twin: Twin) -> None:
    keys, values, positions = store.padded()
    longest = max(len(head) for row in twin.rows for head in row)
    assert keys.shape[:3] == (len(twin.rows), len(twin.rows[0]), longest)
    if positions is None:
        positions = torch.arange(longest).expand(keys.shape[:3])
    for b, row in enumerate(twin.rows):
        for h, head in enumerate(row):
            empty = longest - len(head)
            assert positions[b, h].tolist() == [-1] * empty + [slot[0] for slot in head]
            assert keys[b, h, empty:].tolist() == [slot[1] for slot in head]
            assert values[b, h, empty:].tolist() == [slot[2] for slot in head]
    flat = [head for row in twin.rows for head in row]
    one_keys, one_values = store.heads()
    assert [k.tolist() for k in one_keys] == [[slot[1] for slot in head] for head in flat]
    assert [v.tolist() for v in one_values] == [[slot[2] for slot in head] for head in flat]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), equal=st.booleans())
def test_stores_equal_their_twin(data: st.DataObject, equal: bool) -> None:
    batch, heads, slots = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)))
    seed = data.draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(batch, heads, slots, DK, generator=generator), torch.randn(batch, heads, slots, DV)
    keep = torch.rand(batch, heads, slots, generator=generator) < 0.5
    keep[..., -1] = True
    if equal:
        keep = keep[:1, :1].expand(batch, heads, -1).contiguous()
    store, lengths = build(keys, values, None, Selection.from_mask(keep))
    twin = Twin(keys, values, keep)
    assert lengths == keep.sum(-1).tolist()
    assert isinstance(store, RaggedStore) == (len(keep.sum(-1).unique()) > 1)
    same(store, twin)
    seen = slots
    for action in data.draw(st.lists(st.sampled_from(["append", "drop", "rows"]), max_size=8)):
        if action == "append":
            new = data.draw(st.integers(1, 4))
            k, v = torch.randn(batch, heads, new, DK), torch.randn(batch, heads, new, DV)
            store.append(k, v, seen)
            twin.append(k, v, seen)
            seen += new
        elif action == "drop":
            count = data.draw(st.integers(0, min(2, seen - slots)))
            store.drop_last(count)
            twin.drop_last(count)
            seen -= count
        else:
            rows = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=4))
            store.take_rows(torch.tensor(rows))
            twin.take_rows(rows)
            batch = len(rows)
        same(store, twin)


def stored(kind: str, slots: int) -> DenseStore | RaggedStore:
    keep = torch.ones(1, 4, slots, dtype=torch.bool)
    if kind == "ragged":
        keep[0, 0, slots // 2 :] = False
    return build(torch.randn(1, 4, slots, 8), torch.randn(1, 4, slots, 8), None, Selection.from_mask(keep))[0]


@pytest.mark.parametrize(("kind", "bound"), [("dense", 1.02), ("ragged", 1.05)])
@pytest.mark.parametrize("slots", [10, 64, 500, 2000])
def test_bytes_stay_near_what_is_stored(kind: str, bound: float, slots: int) -> None:
    store = stored(kind, slots)
    token = torch.randn(1, 4, 1, 8)
    moves, most = 0, 0.0
    for step in range(200):
        at = store.padded()[0].data_ptr() if kind == "dense" else store.keys.data_ptr()
        store.append(token, token, slots + step)
        moves += at != (store.padded()[0].data_ptr() if kind == "dense" else store.keys.data_ptr())
        held = sum(len(head) for head in store.heads()[0]) * (8 + 8) * 4
        most = max(most, store.nbytes[0] / held)
        assert store.nbytes[0] >= held
    assert most <= bound
    if slots >= 500:
        # The stored slots move once for many tokens, not once for each.
        assert moves <= 25


@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_nothing_pins_the_full_cache(kind: str) -> None:
    store = stored(kind, 100)
    for tensor in (store.keys, store.values):
        assert tensor.untyped_storage().nbytes() == sum(len(head) for head in store.heads()[0]) * 8 * 4


def test_owning_copies_a_view_of_a_larger_tensor() -> None:
    fused = torch.randn(1, 2, 10, 24)
    store = DenseStore(fused[..., :8], fused[..., 8:16], None)
    store.own()
    assert torch.equal(store.keys, fused[..., :8])
    assert store.nbytes[0] == 2 * 2 * 10 * 8 * 4
