"""What `kvpolicy analyze` measures, against twins that go pair by pair and slot by slot, in float64."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from views import CASES, assert_close, make_view

from kvpolicy.analysis.anisotropy import anisotropy
from kvpolicy.analysis.balance import doubled_ranks, joint_density, rank_correlation
from kvpolicy.analysis.kept import by_position, jaccard, votes
from kvpolicy.analysis.pieces import pieces
from kvpolicy.types import LayerView

NAMES = ("keys", "values", "pre_rope_keys")


def heads(mask: Tensor) -> Iterator[tuple[int, int, list[int]]]:
    """Yield each row and head of a mask, and its True slots."""
    for row, heads in enumerate(mask):
        for head, slots in enumerate(heads):
            yield row, head, slots.nonzero().flatten().tolist()


def make_scores(view: LayerView, seed: int, *, ties: bool) -> Tensor:
    """Return random scores, nan where nobody may look."""
    scores = torch.randn(view.valid.shape, generator=torch.Generator().manual_seed(seed))
    return (scores.round() if ties else scores).where(view.candidates, torch.nan)


def slow_anisotropy(vectors: list[Tensor]) -> float:
    """From the distances of all pairs: the eigenvalues of the centred products, as in multidimensional scaling."""
    count = len(vectors)
    if count < 2:
        return 0.0
    squares = torch.zeros(count, count, dtype=torch.float64)
    for i, one in enumerate(vectors):
        for j, other in enumerate(vectors):
            squares[i, j] = (one.double() - other.double()).square().sum()
    centre = torch.eye(count, dtype=torch.float64) - 1 / count
    values = torch.linalg.eigvalsh(-centre @ squares @ centre / 2)
    return float(values.max() / values.sum())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_anisotropy(case: str, name: str) -> None:
    view = make_view(3, **CASES[case])
    vectors = getattr(view, name)
    got = anisotropy(vectors, view.candidates)
    want = torch.zeros(got.shape, dtype=torch.float64)
    for row, head, slots in heads(view.candidates):
        want[row, head] = slow_anisotropy([vectors[row, head, slot] for slot in slots])
    # A product of each slot, the sums of D values, and the solver's own, about one for each direction.
    assert_close(got, want, torch.ones_like(want, dtype=torch.bool), roundings=view.slots + 4 * vectors.shape[-1])


def test_anisotropy_of_nothing_of_one_and_of_equal_vectors() -> None:
    keys = torch.randn(1, 1, 1, 5).expand(-1, -1, 1000, -1)
    every = torch.ones(1, 1, 1000, dtype=torch.bool)
    assert float(anisotropy(keys, every)) == 0
    assert float(anisotropy(keys, torch.zeros_like(every))) == 0
    assert float(anisotropy(keys, every & (torch.arange(1000) < 1))) == 0
    assert float(anisotropy(torch.zeros(1, 1, 1000, 5), every)) == 0


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_anisotropy_has_no_unit(size: float) -> None:
    corners = torch.tensor([[[[2.0, 1.0], [-2.0, 1.0], [2.0, -1.0], [-2.0, -1.0]]]])
    got = anisotropy(corners * size, torch.ones(1, 1, 4, dtype=torch.bool))
    assert_close(got, torch.tensor([[0.8]]).double(), torch.tensor([[True]]), roundings=16)


def slow_rank(scores: list[float], slot: int) -> float:
    """Return the mean rank of equal scores, from 0, counted pair by pair."""
    lower = sum(each < scores[slot] for each in scores)
    equal = sum(each == scores[slot] for each in scores)
    return lower + (equal - 1) / 2


def slow_correlation(one: list[float], other: list[float]) -> float:
    """Spearman's, from the products of all pairs of differences."""
    ranks = [[slow_rank(scores, slot) for slot in range(len(scores))] for scores in (one, other)]
    pairs = [(i, j) for i in range(len(one)) for j in range(i)]
    product, left, right = (
        sum((ranks[a][i] - ranks[a][j]) * (ranks[b][i] - ranks[b][j]) for i, j in pairs)
        for a, b in ((0, 1), (0, 0), (1, 1))
    )
    return product / math.sqrt(left * right) if left and right else 0.0


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_rank_correlation(case: str, ties: bool) -> None:
    view = make_view(5, **CASES[case])
    one, other = (make_scores(view, seed, ties=ties) for seed in (1, 2))
    got = rank_correlation(one, other, view.candidates)
    want = torch.zeros(got.shape, dtype=torch.float64)
    for row, head, slots in heads(view.candidates):
        want[row, head] = slow_correlation(one[row, head, slots].tolist(), other[row, head, slots].tolist())
    assert_close(got, want, torch.ones_like(want, dtype=torch.bool), roundings=view.slots + 16)


def test_rank_correlation_with_a_constant_is_0() -> None:
    every = torch.ones(1, 1, 9, dtype=torch.bool)
    assert float(rank_correlation(torch.arange(9.0)[None, None], torch.full((1, 1, 9), 3.0), every)) == 0


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_joint_density(case: str, ties: bool) -> None:
    bins = 5
    view = make_view(6, **CASES[case])
    one, other = (make_scores(view, seed, ties=ties) for seed in (3, 4))
    counts: Counter[tuple[int, int]] = Counter()
    for row, head, slots in heads(view.candidates):
        first, second = (scores[row, head, slots].tolist() for scores in (one, other))
        for slot in range(len(slots)):
            # The middle of the slot's share of the head: exact in quarters of a slot.
            places = (2 * slow_rank(scores, slot) + 1 for scores in (first, second))
            cell = tuple(int(place * bins) // (2 * len(slots)) for place in places)
            counts[cell] += 1
    got = joint_density(one, other, view.candidates, bins)
    total = sum(counts.values())
    want = [[counts[row, column] * bins**2 / max(total, 1) for column in range(bins)] for row in range(bins)]
    assert got.tolist() == [pytest.approx(row, rel=1e-6) for row in want]
    if total:
        assert float(got.mean()) == pytest.approx(1, rel=1e-6)


def test_ranks_do_not_read_what_is_masked() -> None:
    scores = torch.tensor([[[torch.nan, 5.0, torch.inf, 4.0]]])
    mask = torch.tensor([[[False, True, False, True]]])
    assert doubled_ranks(scores, mask)[mask].tolist() == [3, 1]


def make_keep(view: LayerView, seed: int) -> Tensor:
    return view.valid & (torch.rand(view.valid.shape, generator=torch.Generator().manual_seed(seed)) < 0.4)


def as_set(keep: Tensor) -> set[tuple[int, int, int]]:
    return {(row, head, slot) for row, head, slots in heads(keep) for slot in slots}


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept(case: str) -> None:
    view = make_view(7, **CASES[case])
    one, other = make_keep(view, 1), make_keep(view, 2)
    mine, theirs = as_set(one), as_set(other)
    either = mine | theirs
    assert jaccard(one, other) == (len(mine & theirs) / len(either) if either else 1)

    counted = Counter((row, slot) for keep in (mine, theirs) for row, _, slot in keep)
    batch, _, slots = view.valid.shape
    want = [[counted[row, slot] for slot in range(slots)] for row in range(batch)]
    assert votes([one, other]).tolist() == want

    bins = 4
    kept, there = [0] * bins, [0] * bins
    for row, head, own in heads(view.valid):
        for place, slot in enumerate(own):
            there[place * bins // len(own)] += 1
            kept[place * bins // len(own)] += (row, head, slot) in mine
    shares = [part / whole if whole else 0 for part, whole in zip(kept, there, strict=True)]
    assert by_position(one, view.valid, bins).tolist() == pytest.approx(shares, rel=1e-6)


def test_two_ways_that_keep_nothing_are_the_same() -> None:
    nothing = torch.zeros(1, 1, 3, dtype=torch.bool)
    assert jaccard(nothing, nothing) == 1


class Bytes:
    """A tokenizer with a token a byte, which drops a space at the beginning of what it decodes, as some do."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize("text", ["plain text", "a é 日本 🙂.", "\ufffd\ufffd", "two  spaces\n\n", "x"])
def test_pieces_are_the_text(text: str) -> None:
    ids = list(text.encode())
    found = pieces(Bytes(), ids)
    assert len(found) == len(ids)
    assert "".join(found) == text


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    assert pieces(Bytes(), list("a é🙂b".encode())) == ["a", " ", "", "é", "", "", "", "🙂", "b"]


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    broken = [0xFF] * 9 + list(b"end")
    assert "".join(pieces(Bytes(), broken)) == Bytes().decode(broken)
    # No character is longer than 4 bytes: no token waits longer.
    assert pieces(Bytes(), broken[:5]) == ["", "", "", 4 * "\ufffd", "\ufffd"]
    assert pieces(Bytes(), [*b"ab", 0xF0, 0x9F]) == ["a", "b", "", "\ufffd"]


def test_nothing_has_no_pieces() -> None:
    assert pieces(Bytes(), []) == []
