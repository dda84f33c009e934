"""The quantizer against exact fractions, and the quantized store against a twin of plain lists."""

from __future__ import annotations

import copy
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy.errors import SettingError
from kvpolicy.store import build
from kvpolicy.store.dense import DenseStore
from kvpolicy.store.packing import dequantize, pack, quantize, unpack
from kvpolicy.store.quantized import QuantizedStore
from kvpolicy.store.ragged import RaggedStore
from kvpolicy.store.settings import Plain, Quantized
from kvpolicy.types import Selection

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [1, 7, 8, 9, 15, 16, 17, 26]
GROUP = 8


# The quantizer.


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32, offset: float = 3.0) -> Tensor:
    """Return random numbers, each channel (the last axis) about a centre and of a width of its own."""
    random = torch.Generator().manual_seed(seed)
    centre = torch.randn(shape[-1], generator=random) * offset
    return (torch.randn(*shape, generator=random) * torch.rand(shape[-1], generator=random) + centre).to(dtype)


@examples(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 2), st.integers(0, 19), st.integers(1, 21)),
    group=st.integers(1, 9),
    dim=st.sampled_from([-1, -2]),
    bits=st.sampled_from([4, 8]),
    dtype=st.sampled_from(DTYPES),
    offset=st.sampled_from([0.0, 3.0, 1000.0]),
)
def test_a_number_errs_by_half_a_step_of_its_group(
    seed: int, shape: tuple[int, int, int], group: int, dim: int, bits: int, dtype: torch.dtype, offset: float
) -> None:
    numbers = noise(seed, *shape, dtype=dtype, offset=offset)
    codes, low, high = quantize(numbers, group, dim, bits)
    assert codes.shape == numbers.shape and codes.dtype == torch.uint8
    assert low.dtype == high.dtype == dtype and low.shape[dim] == -(-numbers.shape[dim] // group)
    found = dequantize(codes, low, high, group, dim, bits)
    assert found.shape == numbers.shape and found.dtype == dtype
    lines = zip(*(part.movedim(dim, -1).flatten(0, -2) for part in (numbers, codes, found)), strict=True)
    for line, line_codes, line_found in lines:
        for end in range(len(line), 0, -group):
            members = slice(max(end - group, 0), end)
            assert_group(line[members], line_codes[members], line_found[members], bits)


def assert_group(numbers: Tensor, codes: Tensor, found: Tensor, bits: int) -> None:
    """Assert what exact fractions say of one group."""
    exact = [Fraction(x) for x in numbers.double().tolist()]
    low, high, levels = min(exact), max(exact), 2**bits - 1
    # float32: a difference, a span, a quotient, a product, each rounded by 2**-24 of it; and so again on the way back,
    # of numbers no larger than the ends. Then the rounding to the dtype.
    tiny = Fraction(1, 2**24)
    unit = Fraction(torch.finfo(numbers.dtype).eps) / 2
    subnormal = Fraction(torch.finfo(numbers.dtype).smallest_normal) * 2 * unit
    for x, code, y in zip(exact, codes.tolist(), found.double().tolist(), strict=True):
        assert 0 <= code <= levels
        if low == high:
            assert (code, y) == (0, x)
            continue
        place = (x - low) / (high - low) * levels
        assert abs(code - place) <= Fraction(1, 2) + 4 * tiny * levels
        want = low + (high - low) * Fraction(code, levels)
        size = max(abs(low), abs(high))
        assert abs(Fraction(y) - want) <= 4 * tiny * (high - low) + tiny * size + unit * abs(want) + subnormal
        assert low <= Fraction(y) <= high
        if x in (low, high):
            assert Fraction(y) == x


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("bits", [4, 8])
def test_extremes_of_a_dtype_stay_finite(dtype: torch.dtype, bits: int) -> None:
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    half = most / 2 if dtype != torch.float16 else most
    for line in ([-half, 0.0, half / 3, half], [0.0, least, 3 * least, -least], [most, most, most, most], [0.0] * 4):
        numbers = torch.tensor(line, dtype=torch.float64).to(dtype)
        found = dequantize(*quantize(numbers, 4, -1, bits), 4, -1, bits)
        step = (numbers.double().max() - numbers.double().min()) / (2**bits - 1)
        rounding = numbers.double().abs().max() * torch.finfo(dtype).eps
        assert float((found.double() - numbers.double()).abs().max()) <= float(step / 2 + rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [[torch.nan], [torch.inf], [-torch.inf], [torch.inf, -torch.inf], [3e38, -3e38]])
def test_what_is_not_finite_is_not_hidden(bad: list[float], dtype: torch.dtype) -> None:
    numbers = noise(0, 12, 5, dtype=dtype)
    for at, number in enumerate(bad):
        numbers[5 + at, 2] = number
    codes, low, high = quantize(numbers, 4, -2, 4)
    found = dequantize(codes, low, high, 4, -2, 4)
    assert int(codes.max()) <= 15
    assert not found[4:8, 2].isfinite().any()
    found[4:8, 2] = 0
    assert found.isfinite().all()


@given(
    codes=st.lists(st.integers(0, 15), min_size=1, max_size=30),
    rows=st.integers(1, 3),
)
def test_packing_is_undone_and_small(codes: list[int], rows: int) -> None:
    tensor = torch.tensor([codes] * rows, dtype=torch.uint8)
    packed = pack(tensor, 4)
    assert packed.untyped_storage().nbytes() == rows * -(-len(codes) // 2)
    assert torch.equal(unpack(packed, 4, len(codes)), tensor)
    assert torch.equal(unpack(pack(tensor, 8), 8, len(codes)), tensor)


# The store.


def twin_line(line: np.ndarray[Any, Any], group: int, bits: int) -> np.ndarray[Any, Any]:
    """Return a line of float32 numbers as they come back, group by group and number by number."""
    back = line.copy()
    for end in range(len(line), 0, -group):
        low, high = line[max(end - group, 0) : end].min(), line[max(end - group, 0) : end].max()
        for at in range(max(end - group, 0), end):
            if high > low:
                code = np.rint((line[at] - low) / (high - low) * np.float32(2**bits - 1))
                back[at] = np.float64(low) + (np.float64(high) - np.float64(low)) * code / (2**bits - 1)
    return back


class Twin:
    """For each row and head, groups of quantized slots and the slots that follow: lists of (position, key, value)."""

    def __init__(self, keys: Tensor, values: Tensor, keep: Tensor, bits: int, residual: int) -> None:
        self.bits, self.residual = bits, residual
        self.groups: list[list[Any]] = []
        self.newest: list[list[Any]] = []
        self.heads = keys.shape[1]
        for b in range(keys.shape[0]):
            for h in range(keys.shape[1]):
                slots = [self.slot(t, keys[b, h, t], values[b, h, t]) for t in range(keys.shape[2]) if keep[b, h, t]]
                ends = range(len(slots), 0, -GROUP)
                self.groups.append([self.quantized(slots[max(end - GROUP, 0) : end]) for end in ends][::-1])
                self.newest.append([])

    @staticmethod
    def slot(position: int, key: Tensor, value: Tensor) -> tuple[int, Any, Any]:
        return position, key.float().numpy(), value.float().numpy()

    def quantized(self, slots: list[Any]) -> list[Any]:
        keys = np.stack([key for _, key, _ in slots])
        for channel in range(keys.shape[1]):
            keys[:, channel] = twin_line(keys[:, channel], GROUP, self.bits)
        return [(slot[0], key, twin_line(slot[2], GROUP, self.bits)) for slot, key in zip(slots, keys, strict=True)]

    def append(self, keys: Tensor, values: Tensor, start: int) -> None:
        for at, (groups, newest) in enumerate(zip(self.groups, self.newest, strict=True)):
            while len(newest) >= self.residual + GROUP:
                groups.append(self.quantized(newest[:GROUP]))
                del newest[:GROUP]
            b, h = divmod(at, self.heads)
            newest += [self.slot(start + q, keys[b, h, q], values[b, h, q]) for q in range(keys.shape[2])]

    def drop_last(self, count: int) -> None:
        """Remove them; `adopt` after this, if a group was cut."""
        for groups, newest in zip(self.groups, self.newest, strict=True):
            while len(newest) < count:
                newest[:0] = groups.pop()
            del newest[len(newest) - count :]

    def adopt(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Take the store's numbers for the newest slots, which are near: once more, a last bit could decide a code."""
        for newest, key, value in zip(self.newest, keys, values, strict=True):
            last = slice(len(key) - len(newest), None)
            for at, (position, twin_key, twin_value) in enumerate(newest):
                assert_near(key[last][at], torch.from_numpy(twin_key))
                assert_near(value[last][at], torch.from_numpy(twin_value))
                newest[at] = self.slot(position, key[last][at], value[last][at])

    def take_rows(self, rows: list[int]) -> None:
        flat = [row * self.heads + head for row in rows for head in range(self.heads)]
        self.groups, self.newest = ([copy.deepcopy(each[at]) for at in flat] for each in (self.groups, self.newest))

    def slots(self) -> list[list[Any]]:
        return [
            [*(slot for group in groups for slot in group), *newest]
            for groups, newest in zip(self.groups, self.newest, strict=True)
        ]


def assert_same(store: QuantizedStore, twin: Twin) -> None:
    keys, values, positions = store.padded()
    slots = twin.slots()
    longest = max(len(head) for head in slots)
    assert keys.shape[2] == values.shape[2] == longest
    if positions is None:
        positions = torch.arange(longest).expand(keys.shape[:3])
    assert store.positions is None or torch.equal(store.positions, positions)
    one_keys, one_values = store.heads()
    for at, head in enumerate(slots):
        b, h = divmod(at, twin.heads)
        empty = longest - len(head)
        assert positions[b, h].tolist() == [-1] * empty + [slot[0] for slot in head]
        for got, alone, part in ((keys, one_keys[at], 1), (values, one_values[at], 2)):
            assert torch.equal(got[b, h, empty:], alone)
            if head:
                want = torch.from_numpy(np.stack([slot[part] for slot in head]))
                assert_near(alone, want)
                newest = len(head) - len(twin.newest[at])
                assert torch.equal(alone[newest:].float(), want[newest:])
    if not store.ragged:
        assert torch.equal(store.keys, keys) and torch.equal(store.values, values)
    else:
        assert torch.equal(store.keys, torch.cat(one_keys)) and torch.equal(store.values, torch.cat(one_values))


def assert_near(got: Tensor, want: Tensor) -> None:
    # The store works in float32, the twin's last step in float64: five float32 roundings of numbers no larger than
    # the ends of a group, which stay under 16 here; and a last one to the dtype, which may fall to either side.
    eps = torch.finfo(got.dtype).eps
    assert bool(((got.float() - want).abs() <= 5 * 2**-24 * 16 + eps * want.abs()).all())


def kept(lengths: Tensor, slots: int, seed: int = 0) -> Tensor:
    """Return bool ``[B, Hkv, slots]`` of which each row and head keeps `lengths`, at random."""
    order = torch.rand(*lengths.shape, slots, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order < lengths[..., None]


def make(
    lengths: Tensor,
    *,
    sizes: tuple[int, int] = (6, 5),
    bits: int = 4,
    residual: int = 8,
    group: int = GROUP,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    slots: int | None = None,
) -> tuple[QuantizedStore, Tensor, Tensor, Tensor]:
    """Return a quantized store of so many slots a row and head, and the keys, values and mask it was made of."""
    slots = int(lengths.max()) + 3 if slots is None else slots
    keys = noise(seed, *lengths.shape, slots, sizes[0], dtype=dtype, offset=1)
    values = noise(seed + 1, *lengths.shape, slots, sizes[1], dtype=dtype, offset=1)
    keep = kept(lengths, slots, seed)
    plain, _ = build(keys, values, None, Selection.from_mask(keep))
    return Quantized(bits=bits, group=group, residual=residual)(plain), keys, values, keep


@examples(max_examples=80, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), bits=st.sampled_from([4, 8]), residual=st.sampled_from([0, 3, 8]))
def test_the_store_equals_its_twin(data: st.DataObject, dtype: torch.dtype, bits: int, residual: int) -> None:
    batch, heads = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    length = st.sampled_from(LENGTHS)
    count = batch * heads
    drawn = data.draw(st.lists(length, min_size=count, max_size=count) | length.map(lambda one: [one] * count))
    sizes = data.draw(st.tuples(st.sampled_from([1, 3, 8, 20]), st.sampled_from([1, 5, 16, 20])))
    lengths = torch.tensor(drawn).view(batch, heads)
    slots = int(lengths.max()) + data.draw(st.sampled_from([0, 3]))
    store, keys, values, keep = make(
        lengths, sizes=sizes, bits=bits, residual=residual, dtype=dtype, seed=data.draw(st.integers(0, 99)), slots=slots
    )
    twin = Twin(keys, values, keep, bits, residual)
    assert store.ragged == (len(set(drawn)) > 1)
    assert_same(store, twin)
    seen = slots
    for action in data.draw(st.lists(st.sampled_from(["token", "tokens", "drop", "rows"]), max_size=12)):
        if action in ("token", "tokens"):
            new = 1 if action == "token" else data.draw(st.integers(2, 20))
            k, v = (noise(seen + part, batch, heads, new, sizes[part], dtype=dtype, offset=1) for part in (0, 1))
            store.append(k, v, seen)
            twin.append(k, v, seen)
            seen += new
        elif action == "drop":
            count = data.draw(st.integers(0, seen - slots))
            store.drop_last(count)
            twin.drop_last(count)
            twin.adopt(*store.heads())
            seen -= count
        else:
            rows = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3))
            store.take_rows(torch.tensor(rows))
            twin.take_rows(rows)
            batch = len(rows)
        assert_same(store, twin)


def test_a_head_may_hold_nothing() -> None:
    store, keys, values, keep = make(torch.tensor([[0, 17, 1]]))
    twin = Twin(keys, values, keep, bits=4, residual=8)
    for position in range(20, 50):
        assert_same(store, twin)
        token = noise(position, 1, 3, 1, 6), noise(position, 1, 3, 1, 5)
        store.append(*token, position)
        twin.append(*token, position)
    dense, keys, values, keep = make(torch.tensor([[0, 0]]))
    assert dense.padded()[0].shape == (1, 2, 0, 6)
    dense.append(keys[:, :, :2], values[:, :, :2], 3)
    assert torch.equal(dense.keys, keys[:, :, :2]) and dense.positions.tolist() == [[[3, 4]] * 2]


def size(counts: Tensor, sizes: tuple[int, int], bits: int, group: int, itemsize: int) -> int:
    """Return the bytes of so many quantized slots: codes, and two ends a group."""
    slots, groups = int(counts.sum()), int((-(-counts // group)).sum())
    row = sum(-(-each * bits // 8) for each in sizes) + 2 * -(-sizes[1] // group) * itemsize
    return slots * row + groups * 2 * sizes[0] * itemsize


@pytest.mark.parametrize(
    "kept", [[[64, 64]], [[33, 33]], [[1]], [[33]], [[100, 7]], [[31, 32, 33], [1, 64, 95]]], ids=str
)
@pytest.mark.parametrize("sizes", [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (20, 20), (33, 17)], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_codes_and_ends_alone(
    kept: list[list[int]], sizes: tuple[int, int], bits: int, dtype: torch.dtype
) -> None:
    counts = torch.tensor(kept)
    store, *_ = make(counts, sizes=sizes, bits=bits, group=32, dtype=dtype)
    numbers, index = store.nbytes
    assert numbers == size(counts, sizes, bits, 32, dtype.itemsize)
    assert index == 4 * int(counts.sum()) + store.ragged * 4 * int((-(-counts // 32)).sum())


def test_four_bits_are_less_than_a_third_of_sixteen() -> None:
    store, *_ = make(torch.tensor([[256, 256]]), sizes=(128, 128), group=32, dtype=torch.bfloat16)
    # 4 bits a code and 2 * 16 bits a group of 32.
    assert store.nbytes[0] == 2 * 256 * 2 * 128 * 2 * 5 / 16


def storages(held: object, found: dict[int, int]) -> dict[int, int]:
    """Return the bytes of each storage of which an object holds a tensor."""
    if isinstance(held, Tensor):
        found[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
    elif isinstance(held, (list, tuple)):
        for each in held:
            storages(each, found)
    elif hasattr(held, "__dict__"):
        storages(list(vars(held).values()), found)
    return found


@pytest.mark.parametrize("lengths", [[[40, 40]], [[40, 21]]], ids=str)
def test_nothing_else_is_held_and_bytes_stay_bounded_as_tokens_come(lengths: list[list[int]]) -> None:
    counts, sizes = torch.tensor(lengths), (64, 48)
    store, keys, values, keep = make(counts, sizes=sizes, bits=8, residual=8)
    twin = Twin(keys, values, keep, bits=8, residual=8)
    for step in range(300):
        token = noise(step, 1, 2, 1, sizes[0], offset=1), noise(step, 1, 2, 1, sizes[1], offset=1)
        store.append(*token, 43 + step)
        twin.append(*token, 43 + step)
        newest = len(twin.newest[0])
        assert newest <= 8 + GROUP
        settled = size(counts + step + 1 - newest, sizes, 8, GROUP, 4)
        numbers, index = store.nbytes
        assert settled <= numbers <= 1.05 * settled + 2 * (8 + GROUP) * sum(sizes) * 4
        # A ragged store's starts and counts are 8 bytes a head each, twice.
        assert sum(storages(store, {}).values()) == numbers + index + store.ragged * 2 * 2 * 2 * 8
    assert_same(store, twin)


@pytest.mark.parametrize("lengths", [[[17, 17], [17, 17]], [[17, 3], [9, 26]]], ids=str)
def test_rows_taken_equal_a_store_made_of_those_rows(lengths: list[list[int]]) -> None:
    counts, rows = torch.tensor(lengths), torch.tensor([1, 0, 1])
    store, keys, values, keep = make(counts)
    fresh = Quantized(group=GROUP, residual=8)(
        build(keys[rows], values[rows], None, Selection.from_mask(keep[rows]))[0]
    )
    for position in range(30, 60):
        k, v = noise(position, 2, 2, 1, 6), noise(position, 2, 2, 1, 5)
        store.append(k, v, position)
        fresh.append(k[rows], v[rows], position)
        taken = copy.deepcopy(store)
        taken.take_rows(rows)
        for got, want in zip(taken.padded(), fresh.padded(), strict=True):
            assert torch.equal(got, want)
        if position == 29 + GROUP:
            # What is taken is whole: it goes on by itself.
            store, counts = taken, counts[rows]
            break
    for position in range(30 + GROUP, 60):
        k, v = noise(position, 3, 2, 1, 6), noise(position, 3, 2, 1, 5)
        store.append(k, v, position)
        fresh.append(k, v, position)
    for got, want in zip(store.padded(), fresh.padded(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("lengths", [[[17, 17]], [[17, 3]]], ids=str)
def test_rejected_drafts_leave_no_trace(lengths: list[list[int]]) -> None:
    store, keys, values, _ = make(torch.tensor(lengths), residual=0, slots=30)
    store.append(keys[:, :, :GROUP], values[:, :, :GROUP], 30)
    before, bytes_before = store.padded(), store.nbytes
    store.append(keys[:, :, :20], values[:, :, :20], 38)
    assert store.nbytes != bytes_before
    # The drafts themselves are as the model computed them, however many.
    assert torch.equal(store.padded()[0][:, :, -20:], keys[:, :, :20])
    store.drop_last(20)
    settled, after = store.padded(), before
    assert torch.equal(settled[2], after[2])
    assert torch.equal(settled[0][:, :, :-GROUP], after[0][:, :, :-GROUP])


def test_positions_are_none_while_slot_t_is_position_t() -> None:
    keys = noise(0, 1, 2, 20, 6)
    whole, _ = build(keys, keys, None, Selection.from_mask(torch.ones(1, 2, 20, dtype=torch.bool)))
    store = Quantized(group=GROUP, residual=0)(whole)
    for position in range(20, 40):
        store.append(keys[:, :, :1], keys[:, :, :1], position)
    assert store.positions is None and store.padded()[2] is None and store.nbytes[1] == 0
    assert store.keys.shape[2] == 40


def test_nothing_of_the_plain_store_is_held() -> None:
    plain, _ = build(
        noise(0, 1, 2, 20, 6), noise(1, 1, 2, 20, 5), None, Selection.from_mask(kept(torch.tensor([[9, 9]]), 20))
    )
    store = Quantized(group=GROUP)(plain)
    before = [part.clone() for part in store.padded()]
    assert not storages(plain, {}).keys() & storages(store, {}).keys()
    for part in plain.padded():
        part.zero_()
    for got, want in zip(store.padded(), before, strict=True):
        assert torch.equal(got, want)


class Garbled(RaggedStore):
    """A ragged store whose empty slots, which nobody may read, show it when somebody does."""

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        keys, values, positions = super().padded()
        empty = (positions < 0)[..., None]
        return keys.masked_fill(empty, torch.nan), values.masked_fill(empty, torch.nan), positions


def test_empty_slots_are_not_read() -> None:
    lengths = [[3, 17], [9, 26]]
    parts = noise(0, 55, 6), noise(1, 55, 5), torch.arange(55, dtype=torch.int32)
    stores = [Quantized(group=GROUP)(kind(*parts, lengths)) for kind in (RaggedStore, Garbled)]
    assert torch.equal(stores[0].keys, stores[1].keys) and torch.equal(stores[0].values, stores[1].values)


# The settings.


def test_settings_are_strict_and_make_stores() -> None:
    for wrong in ({"bits": 5}, {"bits": "4"}, {"group": 4}, {"residual": -1}, {"backend": "hqq"}):
        with pytest.raises(SettingError, match="quantized"):
            Quantized(**wrong)
    plain, _ = build(
        noise(0, 1, 2, 20, 6), noise(1, 1, 2, 20, 5), None, Selection.from_mask(kept(torch.tensor([[9, 3]]), 20))
    )
    assert isinstance(plain, RaggedStore)
    assert Plain()(plain) is plain
    store = Quantized()(plain)
    assert isinstance(store, QuantizedStore) and not isinstance(store, DenseStore) and store.ragged


def test_settings_load_no_transformers() -> None:
    code = "import sys, kvpolicy.store.settings; print('transformers' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"
