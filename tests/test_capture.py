"""Capture: what is padding, and which queries are the last of each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy.capture import layer_view, visible_columns
from kvpolicy.errors import PluginError, UnsupportedModelError
from kvpolicy.types import Needs

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


def test_the_window_is_the_last_queries_of_each_row() -> None:
    """Row 0 has one pad on the left, row 1 three on the right."""
    query = torch.arange(6.0).view(1, 1, 6, 1).expand(2, 2, -1, 4)
    columns = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    view = layer_view(stored(6), query, columns, Needs(queries=4), seen=6, layer=3, scaling=None)
    assert view.query_slots.tolist() == [[2, 3, 4, 5], [-1, 0, 1, 2]]
    assert view.queries is not None
    assert view.queries[0, 0, :, 0].tolist() == [2, 3, 4, 5]
    assert view.queries[1, 0, 1:, 0].tolist() == [0, 1, 2]
    assert view.seen.tolist() == [5, 3]
    assert view.valid[:, 0].tolist() == columns.tolist()
    assert (view.layer, view.scaling) == (3, 0.5)


def test_a_follow_up_turn_on_evicted_slots() -> None:
    """Of 10 tokens seen, 3 new; row 1 keeps one slot less, and its last new token is padding."""
    positions = torch.tensor([[[0, 4, 7, 8, 9]], [[-1, 5, 7, 8, 9]]], dtype=torch.int32)
    columns = torch.ones(2, 10, dtype=torch.bool)
    columns[1, 9] = False
    query = torch.randn(2, 2, 3, 4)
    view = layer_view(stored(5, positions), query, columns, Needs(queries=8), seen=10, layer=0, scaling=0.1)
    assert view.valid[:, 0].tolist() == [[True] * 5, [False, True, True, True, False]]
    assert view.query_slots.tolist() == [[2, 3, 4], [-1, 2, 3]]
    assert view.seen.tolist() == [10, 9]


def test_no_more_than_declared_is_recorded() -> None:
    view = layer_view(stored(6), torch.randn(2, 2, 6, 4), None, Needs(keys=True), seen=6, layer=0, scaling=None)
    assert view.queries is None
    with pytest.raises(PluginError, match="scorer 'nosy' reads 'values' but declares"):
        view.limit(Needs(keys=True), "scorer 'nosy'").values  # noqa: B018


def test_a_bias_in_an_additive_mask_hides_nothing() -> None:
    bias = torch.zeros(()).where(FOUR_D, torch.finfo(torch.float32).min) - 0.5
    assert visible_columns(bias, 3).tolist() == TWO_D.bool().tolist()
