"""Budgets: exact for every prompt length, and equal to their slow twins."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
import twins
from torch import Tensor
from views import make_view

from kvpolicy.budgets.adaptive import AdaptiveHeads
from kvpolicy.budgets.pyramid import PyramidLayers
from kvpolicy.budgets.uniform import UniformHeads, UniformLayers
from kvpolicy.errors import SettingError
from kvpolicy.plugin import HeadBudget, LayerBudget
from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.random import Random
from kvpolicy.scorers.recency import Recency
from kvpolicy.selectors.top_k import TopK
from kvpolicy.types import LayerView

LENGTHS = torch.arange(1, 301)
TOKENS = [1, 2, 3, 7, 12, 16, 31, 64, 100, 128, 255, 299, 300, 512]
SHARES = [0.001, 0.01, 0.1, 0.25, 1 / 3, 0.5, 0.7, 0.99, 1.0]
BUDGETS = [Budget(tokens=n) for n in TOKENS] + [Budget(keep=share) for share in SHARES]


@pytest.mark.parametrize("layers", [1, 2, 3, 12, 30])
@pytest.mark.parametrize("allocate", [UniformLayers(), PyramidLayers(), PyramidLayers(beta=1), PyramidLayers(beta=2.5)])
def test_layers_add_up_for_every_length_and_budget(allocate: LayerBudget, layers: int) -> None:
    for budget in BUDGETS:
        mean = budget.slots(LENGTHS)
        got = allocate(mean, LENGTHS, layers)
        assert got.dtype == torch.int64 and got.shape == (300, layers)
        assert torch.equal(got.sum(-1), layers * torch.minimum(mean, LENGTHS))
        assert bool((got >= 1).all()) and bool((got <= LENGTHS[:, None]).all())
        assert bool((got.diff(dim=-1) <= 0).all()), "a later layer keeps more"


@pytest.mark.parametrize("keep", [1 / 3, 0.29, 2**-0.5, 0.123456789012345, 1e-20, 0.999999999, 1.0])
def test_a_share_is_rounded_half_up_however_long_the_prompt(keep: float) -> None:
    seen = [1, 2, 50, 1383, 1387, 9_999, 131_072, 1_000_003, 10_000_000]
    got = Budget(keep=keep).slots(torch.tensor(seen)).tolist()
    assert got == [max(1, (2 * Fraction(str(keep)) * n + 1) // 2) for n in seen]


@pytest.mark.parametrize("beta", [1, 1.5, 20, 20.125, 1000])
def test_pyramid_equals_its_twin(beta: float) -> None:
    for layers in (1, 2, 5, 12, 30):
        for budget in (1, 2, 3, 17, 64, 150, 299, 512):
            got = PyramidLayers(beta=beta)(torch.full_like(LENGTHS, budget), LENGTHS, layers).tolist()
            for available in LENGTHS.tolist()[::7]:
                assert got[available - 1] == twins.pyramid(budget, available, layers, Fraction(str(beta)))


def test_pyramid_slopes_as_the_paper_says() -> None:
    got = PyramidLayers()(torch.tensor([512]), torch.tensor([4096]), 30)[0].tolist()
    assert got[-1] in (25, 26)  # 512 / 20
    assert got[0] + got[-1] == 1024
    steps = {a - b for a, b in pairwise(got)}
    assert steps <= {33, 34}  # (998.4 - 25.6) / 29 = 33.5
    assert PyramidLayers(beta=1)(torch.tensor([512]), torch.tensor([4096]), 30).unique().tolist() == [512]


def test_a_row_without_tokens_keeps_none() -> None:
    nothing = torch.tensor([0, 5])
    assert PyramidLayers()(torch.tensor([1, 1]), nothing, 4).tolist() == [[0] * 4, [1] * 4]
    view = heads_view(5, 2)
    view = LayerView(keys=view.keys, values=view.values, valid=view.valid[:, 0] & torch.tensor([[False], [True]]))
    assert AdaptiveHeads()(view, torch.zeros(2, 3, 5), torch.tensor([1, 1])).tolist() == [[0] * 3, [1] * 3]


def test_pyramid_stays_exact_for_long_prompts() -> None:
    tokens, available = torch.tensor([999_983]), torch.tensor([10_000_019])
    got = PyramidLayers(beta=20.125)(tokens, available, 127)
    assert int(got.sum()) == 127 * 999_983
    assert got[0].tolist() == twins.pyramid(999_983, 10_000_019, 127, Fraction("20.125"))


@pytest.mark.parametrize("beta", [0.5, -1, float("nan"), float("inf"), "20"])
def test_wrong_beta_is_refused(beta: float) -> None:
    with pytest.raises(SettingError):
        PyramidLayers(beta=beta)


def heads_view(slots: int, batch: int, heads: int = 3) -> LayerView:
    nothing = torch.zeros(batch, heads, slots, 1)
    return LayerView(keys=nothing, values=nothing)


def skewed(slots: int, batch: int, heads: int = 3) -> Tensor:
    """Scores of heads that are concentrated, flat and in between; with ties."""
    scores = torch.rand(batch, heads, slots, generator=torch.Generator().manual_seed(slots))
    return (scores ** torch.tensor([1.0, 4.0, 16.0])[:heads, None] * 64).round()


@pytest.mark.parametrize("layers", [UniformLayers(), PyramidLayers()], ids=lambda one: one.name)
@pytest.mark.parametrize("allocate", [UniformHeads(), AdaptiveHeads()], ids=repr)
def test_every_length_budget_layer_and_head_adds_up(layers: LayerBudget, allocate: HeadBudget) -> None:
    """Each prompt length from 1 to 300, each budget, three layers of three heads, protected slots and all."""
    select = TopK(sinks=2, recent=3)
    for length in LENGTHS.tolist():
        seen = torch.tensor([length])
        tokens = torch.cat([layers(budget.slots(seen), seen, 3).flatten() for budget in BUDGETS]).unique()
        view = heads_view(length, len(tokens))
        protected = select.protect(view, tokens)
        lengths = allocate(view.decide(view.valid & ~protected), skewed(length, len(tokens)), tokens)
        assert lengths.dtype == torch.int64
        assert torch.equal(lengths.sum(-1), 3 * torch.minimum(tokens, view.valid[:, 0].sum(-1)))
        assert bool((lengths <= length).all()) and bool((lengths >= protected.sum(-1)).all())
        assert bool((lengths >= 1).all())
        if isinstance(allocate, AdaptiveHeads):
            floors = -(-int(allocate.floor * 10) * tokens // 10)
            assert bool((lengths >= torch.minimum(floors, torch.tensor(length))[:, None]).all())
        else:
            assert bool((lengths == lengths[:, :1]).all())


@pytest.mark.parametrize("floor", [0.0, 0.07, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("padding", ["none", "left", "ragged"])
def test_adaptive_equals_its_twin(padding: str, floor: float) -> None:
    for slots in (1, 2, 9, 40, 101):
        view = make_view(seed=slots, slots=slots, heads=(3, 3), sizes=(2, 2), padding=padding)
        for budget in (1, 2, 5, 14, 33, 100, 200):
            tokens = torch.minimum(torch.tensor([budget, max(budget // 2, 1), budget]), view.valid.sum(-1).amax(-1))
            open_view = view.decide(view.valid & ~TopK(sinks=1, recent=2).protect(view, tokens))
            scores = skewed(slots, 3).masked_fill(~open_view.candidates, torch.nan)
            got = AdaptiveHeads(floor=floor)(open_view, scores, tokens).tolist()
            assert got == twins.adaptive(open_view, scores, tokens.tolist(), Fraction(str(floor)))


@pytest.mark.parametrize(
    ("floor", "tokens", "least"), [(0.2, 5, 1), (0.2, 6, 2), (0.07, 100, 7), (0.29, 100, 29), (0.0, 9, 1)]
)
def test_the_floor_is_counted_exactly(floor: float, tokens: int, least: int) -> None:
    view = heads_view(400, 1, 2)
    scores = torch.stack([torch.full((400,), 9.0), torch.zeros(400)])[None]
    lengths = AdaptiveHeads(floor=floor)(view, scores, torch.tensor([tokens]))
    assert lengths.tolist() == [[2 * tokens - least, least]]


def test_concentrated_and_flat_heads_get_different_lengths() -> None:
    flat = torch.full((200,), 1 / 200)
    concentrated = torch.cat([torch.full((4,), 0.24), torch.full((196,), 0.04 / 196)])
    scores = torch.stack([concentrated, flat])[None]
    view = heads_view(200, 1, 2)
    assert AdaptiveHeads()(view, scores, torch.tensor([50])).tolist() == [[10, 90]]
    assert AdaptiveHeads()(view, scores.flip(1), torch.tensor([50])).tolist() == [[90, 10]]


def test_swapping_heads_swaps_lengths() -> None:
    scores = torch.rand(2, 3, 60, generator=torch.Generator().manual_seed(0)) ** torch.tensor([1.0, 3.0, 9.0])[:, None]
    view, tokens = heads_view(60, 2), torch.tensor([20, 7])
    lengths = AdaptiveHeads()(view, scores, tokens)
    assert len(set(lengths[0].tolist())) == 3
    for order in ([1, 0, 2], [2, 0, 1]):
        assert torch.equal(AdaptiveHeads()(view, scores[:, order], tokens), lengths[:, order])


@pytest.mark.parametrize("level", ["constant", "alike", "alternating"])
def test_equal_heads_get_equal_lengths(level: str) -> None:
    slots, heads = 50, 4
    one = {
        "constant": torch.zeros(slots),
        "alike": torch.rand(slots, generator=torch.Generator().manual_seed(1)),
        "alternating": torch.arange(slots) % 2.0,
    }[level]
    for budget in range(1, slots + 1):
        lengths = AdaptiveHeads()(heads_view(slots, 1, heads), one.expand(1, heads, slots), torch.tensor([budget]))
        assert lengths.tolist() == [[budget] * heads]


def test_what_short_heads_leave_goes_to_the_others() -> None:
    view = heads_view(10, 1, 2)
    valid = view.valid.clone()
    valid[0, 0, 2:] = False
    view = LayerView(keys=view.keys, values=view.values, valid=valid)
    assert AdaptiveHeads()(view, torch.ones(1, 2, 10), torch.tensor([5])).tolist() == [[2, 8]]
    assert UniformHeads()(view, torch.ones(1, 2, 10), torch.tensor([5])).tolist() == [[2, 5]]


def test_rows_have_their_own_budgets() -> None:
    view = make_view(batch=3, slots=40, heads=(3, 3), padding="left")
    together = AdaptiveHeads()(view, skewed(40, 3), torch.tensor([4, 9, 1]))
    for row, budget in enumerate([4, 9, 1]):
        alone = LayerView(
            keys=view.keys[row : row + 1], values=view.values[row : row + 1], valid=view.valid[row : row + 1]
        )
        assert torch.equal(
            AdaptiveHeads()(alone, skewed(40, 3)[row : row + 1], torch.tensor([budget])), together[row : row + 1]
        )


@pytest.mark.parametrize(
    "settings", [{"floor": -0.1}, {"floor": 1.5}, {"floor": True}, {"by": "diversity"}, {"flor": 0.2}]
)
def test_wrong_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(SettingError):
        AdaptiveHeads(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("floor", [1e-12, 0.123456789, 1 / 3, 1.0])
def test_any_floor_can_be_counted(floor: float) -> None:
    lengths = AdaptiveHeads(floor=floor)(heads_view(50, 1, 2), torch.zeros(1, 2, 50), torch.tensor([20]))
    assert lengths.sum() == 40


def test_by_importance_needs_an_importance() -> None:
    budget = Budget(tokens=20, heads=AdaptiveHeads(by="importance"))
    with pytest.raises(SettingError, match="importance"):
        Policy(name="test", score=Recency(), budget=budget)
    with pytest.raises(SettingError, match="importance"):
        Policy(name="test", score=Random(), budget=budget)
