"""Capture: what is padding, and which queries are the last of each row."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

import kvpolicy
from kvpolicy.capture import layer_view, visible_columns
from kvpolicy.errors import PluginError, UnsupportedModelError
from kvpolicy.session.decoder import cache_name
from kvpolicy.testing.models import tiny
from kvpolicy.types import Needs
from kvpolicy.window import extend

TWO_D = torch.tensor([[0, 1, 1], [1, 1, 0]])
FOUR_D = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril() & TWO_D.bool()[:, None, None]


@pytest.mark.parametrize(
    "mask",
    [TWO_D, FOUR_D, torch.zeros(()).where(FOUR_D, torch.finfo(torch.float32).min), {"full_attention": FOUR_D}],
    ids=["2-D", "4-D bool", "4-D additive", "by kind of layer"],
)
def test_visible_columns(mask: Any) -> None:
    assert visible_columns(mask, 3).tolist() == TWO_D.bool().tolist()


@pytest.mark.parametrize("mask", [None, {"sliding_attention": FOUR_D}])
def test_no_mask_hides_nothing(mask: Any) -> None:
    assert visible_columns(mask, 3) is None


def test_a_mask_of_another_width_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"expected \[B, 4\]"):
        visible_columns(TWO_D, 4)


def stored(slots: int, positions: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return torch.randn(2, 1, slots, 4), torch.randn(2, 1, slots, 4), positions


def numbered(count: int, start: int = 0) -> torch.Tensor:
    """Queries ``[2, 2, count, 4]`` that are their own position."""
    return torch.arange(float(start), start + count).view(1, 1, -1, 1).expand(2, 2, -1, 4)


def test_the_window_is_the_last_queries_of_each_row() -> None:
    """Row 0 has one pad on the left, row 1 three on the right."""
    visible = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    window = extend(None, numbered(6), visible, start=0, size=4)
    assert window.positions.tolist() == [[2, 3, 4, 5], [-1, 0, 1, 2]]
    assert window.queries[0, 0, :, 0].tolist() == [2, 3, 4, 5]
    assert window.queries[1, 0, 1:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pieces", [[12], [6, 6], [11, 1], [1, 11], [3, 1, 4, 4], [1] * 12])
def test_a_window_over_several_passes_is_that_of_one(pieces: list[int], padded: bool) -> None:
    visible = torch.ones(2, 12, dtype=torch.bool)
    visible[0, :5] = visible[1, 9:] = False
    window, start = None, 0
    for count in pieces:
        seen = visible[:, : start + count] if padded else None
        window = extend(window, numbered(count, start), seen, start=start, size=5)
        start += count
    assert window is not None
    assert window.positions.tolist() == ([[7, 8, 9, 10, 11], [4, 5, 6, 7, 8]] if padded else [[7, 8, 9, 10, 11]] * 2)
    assert torch.equal(window.queries[:, 1, :, 0], window.positions.float())


def test_a_window_owns_its_storage() -> None:
    query = torch.randn(1, 2, 1000, 4)
    window = extend(None, query, None, start=0, size=5)
    assert window.queries.untyped_storage().nbytes() == window.queries.numel() * 4


def test_a_window_follows_rows_and_forgets_what_was_taken_back() -> None:
    window = extend(None, numbered(6) + torch.tensor([0.0, 100.0]).view(2, 1, 1, 1), None, start=0, size=3)
    rows = window.take_rows(torch.tensor([1, 1, 0]))
    assert rows.queries[:, 0, 0, 0].tolist() == [103, 103, 3]
    assert window.before(5).positions.tolist() == [[-1, 3, 4]] * 2
    assert extend(window.before(5), numbered(1, 9), None, start=9, size=2).positions.tolist() == [[4, 9]] * 2


@pytest.mark.parametrize("size", [1, 5, 40, 1000])
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_that_follow_one_by_one_are_as_if_each_was_joined_at_once(size: int, padded: bool) -> None:
    visible = torch.ones(2, 8, dtype=torch.bool)
    visible[0, :5] = visible[1, 6:] = False
    plain = lazy = extend(None, numbered(8), visible if padded else None, start=0, size=size)
    for start in range(8, 90):
        plain = extend(plain, numbered(1, start), None, start=start, size=size)
        lazy = lazy.followed_by(numbered(1, start).clone(), start, size)
        if start in (30, 70):
            assert lazy.later and lazy.nbytes >= lazy.queries.numel() * 4
            lazy = [lazy.whole(), lazy.take_rows(torch.tensor([0, 1])), lazy.before(start + 1)][start % 3]
        if start % 9 == 0:
            assert torch.equal(lazy.positions, plain.positions) and torch.equal(lazy.queries, plain.queries)
    assert lazy.whole().queries.untyped_storage().nbytes() == plain.queries.numel() * 4


def test_queries_are_recorded_without_what_gradients_are_taken_by() -> None:
    model = tiny()
    cache = DynamicCache(config=model.config)
    with kvpolicy.load("snapkv", budget=48, decode={"every": 1000}).on(model):
        for piece in torch.arange(120)[None].split([80, *[1] * 40], dim=1):
            model(piece, **{cache_name(model): cache})
    window = cache.layers[0].window
    assert window.later and not any(part.requires_grad for part in (window.joined, window.queries, *window.later))
    assert copy.deepcopy(cache).layers[0].window.positions.tolist() == [list(range(88, 120))]


def test_the_view_of_a_padded_prompt() -> None:
    visible = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    window = extend(None, numbered(6), visible, start=0, size=4)
    view = layer_view(stored(6), window, visible, seen=6, layer=3, scaling=None)
    assert view.query_positions.tolist() == [[2, 3, 4, 5], [-1, 0, 1, 2]]
    assert view.positions.tolist() == [[list(range(6))]] * 2
    assert view.seen.tolist() == [5, 3]
    assert view.valid[:, 0].tolist() == visible.tolist()
    assert (view.layer, view.scaling) == (3, 0.5)


def test_the_view_of_evicted_slots() -> None:
    """Of 10 tokens seen, 3 new; row 1 keeps one slot less, and its last new token is padding."""
    positions = torch.tensor([[[0, 4, 7, 8, 9]], [[-1, 5, 7, 8, 9]]], dtype=torch.int32)
    visible = torch.ones(2, 10, dtype=torch.bool)
    visible[1, 9] = False
    view = layer_view(stored(5, positions), None, visible, seen=10, layer=0, scaling=0.1)
    assert view.valid[:, 0].tolist() == [[True] * 5, [False, True, True, True, False]]
    assert torch.equal(view.positions, positions)
    assert view.seen.tolist() == [10, 9]


def test_no_more_than_declared_is_there() -> None:
    view = layer_view(stored(6), None, None, seen=6, layer=0, scaling=None)
    assert view.queries is None
    with pytest.raises(PluginError, match="scorer 'nosy' reads 'values' but declares"):
        view.limit(Needs(keys=True), "scorer 'nosy'").values  # noqa: B018


def test_a_bias_in_an_additive_mask_hides_nothing() -> None:
    bias = torch.zeros(()).where(FOUR_D, torch.finfo(torch.float32).min) - 0.5
    assert visible_columns(bias, 3).tolist() == TWO_D.bool().tolist()
