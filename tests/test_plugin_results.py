"""What a plugin returns is checked where it is used, and the error names the plugin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import Budget, LayerView, Needs, Policy, Selection, settings
from kvpolicy.errors import PluginError
from kvpolicy.scorers.random import Random
from kvpolicy.selectors.top_k import TopK

SLOTS, TOKENS = 20, 8
PARTS = {"score": Random(), "select": TopK(sinks=1, recent=1)}


def plan(**parts: Any) -> Selection:
    keys = torch.randn(1, 2, SLOTS, 4)
    budget = {name: parts.pop(name) for name in ("layers", "heads") if name in parts}
    policy = Policy(name="test", **(PARTS | {"budget": Budget(tokens=TOKENS, **budget)} | parts))
    return policy.plan([LayerView(keys=keys, values=keys)])[0]


@pytest.mark.parametrize("times", [0, 2])
def test_layer_budgets_must_add_up(times: int) -> None:
    @settings
    class Wrong:
        name = "wrong"
        stage = "layers"

        def __call__(self, tokens: Tensor, available: Tensor, layers: int) -> Tensor:
            return tokens[:, None].expand(-1, layers) * times

    with pytest.raises(PluginError, match=r"layer budget 'wrong': expected layers that add up to \[8\]"):
        plan(layers=Wrong())


@pytest.mark.parametrize("lengths", [[16, 16], [0, 16], [-1, 5], [21, 0]])
def test_head_budgets_must_fit(lengths: list[int]) -> None:
    @settings
    class Wrong:
        name = "wrong"
        stage = "heads"

        def __call__(self, view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
            return torch.tensor([lengths])

    with pytest.raises(PluginError, match="head budget 'wrong': expected lengths from"):
        plan(heads=Wrong())


@pytest.mark.parametrize("slots", [[0] * 16, list(range(7)), [-1, *range(15)], [*range(15), SLOTS]])
def test_selections_must_be_as_many_different_slots(slots: list[int]) -> None:
    @settings
    class Wrong:
        name = "wrong"
        protects = 0

        def protect(self, view: LayerView, tokens: Tensor) -> Tensor:
            return torch.zeros_like(view.valid)

        def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Selection:
            return Selection(slots=torch.tensor(slots), lengths=lengths)

    with pytest.raises(PluginError, match=r"selector 'wrong': expected .* different valid slots"):
        plan(select=Wrong())


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (lambda view: None, "expected a tensor"),
        (lambda view: torch.zeros(1, 2, 3), "expected torch.float32 .1, 2, 20."),
        (lambda view: torch.zeros(1, 2, SLOTS, dtype=torch.float64), "got torch.float64"),
        (lambda view: torch.full((1, 2, SLOTS), torch.nan), "finite"),
        (lambda view: view.keys[..., 0], "reads 'keys' but declares"),
    ],
)
def test_scores_must_be_sound(scores: Any, message: str) -> None:
    @settings
    class Wrong:
        name = "wrong"
        needs = Needs()

        def __call__(self, view: LayerView) -> Tensor:
            return scores(view)

    with pytest.raises(PluginError, match=f"scorer 'wrong'.*{message}"):
        plan(score=Wrong())
