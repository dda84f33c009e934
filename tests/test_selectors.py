"""Selectors: exactly the slots that were asked for, protected ones by index."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import twins
from views import CASES, change, make_view

from kvpolicy.budgets.uniform import UniformHeads
from kvpolicy.errors import SettingError
from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.selectors.top_k import TopK
from kvpolicy.types import LayerView


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("budget", [1, 3, 12, 40, 200])
def test_top_k_equals_its_twin(case: str, budget: int) -> None:
    view = make_view(**CASES[case])
    select = TopK(sinks=2, recent=4)
    tokens = torch.full((len(view.valid),), budget)
    view = view.decide(view.valid & ~select.protect(view, tokens))
    random = torch.Generator().manual_seed(budget)
    # Ties, and scores larger than whatever else might stand for "protected".
    scores = (torch.randn(view.valid.shape, generator=random) * 3).round() * 1e37
    scores = scores.masked_fill(~view.candidates, torch.nan)
    lengths = UniformHeads()(view, scores, tokens)
    kept = select(view, scores, lengths)
    assert torch.equal(kept.lengths, lengths)
    assert kept.tolist() == twins.top_k(view, scores, lengths)


@pytest.mark.parametrize("case", ["gqa", "one slot", "left padding", "right padding", "ragged heads"])
@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (4, 0), (0, 4), (4, 8), (1, 1)])
def test_protection_by_index_inside_the_budget(case: str, sinks: int, recent: int) -> None:
    """A budget too small for all keeps the last token, then sinks, then recent tokens, newest first."""
    view = make_view(**CASES[case])
    for budget in range(1, 20):
        protected = TopK(sinks=sinks, recent=recent).protect(view, torch.full((len(view.valid),), budget))
        for b, h in twins.heads(view):
            own = twins.slots(view.valid[b, h])
            order = own[::-1][: min(recent, 1)] + own[:sinks] + own[::-1][:recent]
            wanted: list[int] = []
            for slot in order:
                if slot not in wanted and len(wanted) < budget:
                    wanted.append(slot)
            assert twins.slots(protected[b, h]) == sorted(wanted)


@pytest.mark.parametrize(("sinks", "share"), [(0, 0.5), (4, 0.29), (0, 0.42), (2, 0.01)])
def test_a_share_of_the_budget_is_recent(sinks: int, share: float) -> None:
    view, select = make_view(slots=300, batch=1), TopK(sinks=sinks, recent=share)
    assert select.protects == sinks
    for budget in range(1, 250):
        protected = select.protect(view, torch.tensor([budget]))
        # Of exactly the share that is written: 0.42 * 150 in float32 is under 63.
        recent = Fraction(str(share)) * max(budget - sinks, 0) // 1
        assert torch.equal(protected, TopK(sinks=sinks, recent=int(recent)).protect(view, torch.tensor([budget])))
    assert int(TopK(sinks=4, recent=0.29).protect(view, torch.tensor([104])).sum(-1)[0, 0]) == 33


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ties_in_half_precision_never_push_a_protected_slot_out(dtype: torch.dtype) -> None:
    keys = torch.full((1, 2, 64, 4), -6e4, dtype=dtype)
    view = LayerView(keys=keys, values=keys)
    policy = Policy(name="test", score=KeyNorm(), budget=Budget(tokens=12), select=TopK(sinks=4, recent=8))
    assert policy.plan([view]).tolist() == [[[[0, 1, 2, 3, *range(56, 64)]] * 2]]
    policy = Policy(name="test", score=KeyNorm(), budget=Budget(tokens=14), select=TopK(sinks=4, recent=8))
    assert policy.plan([view]).tolist() == [[[[0, 1, 2, 3, 4, 5, *range(56, 64)]] * 2]]  # ties: the earlier


def test_lengths_of_nothing_and_of_everything() -> None:
    view = make_view(padding="left")
    scores = torch.zeros(view.valid.shape)
    every = TopK(sinks=0, recent=0)(view, scores, view.valid.sum(-1))
    assert torch.equal(every.to_mask(view.slots), view.valid)
    none = TopK(sinks=0, recent=0)(view, scores, torch.zeros_like(view.valid.sum(-1)))
    assert none.slots.numel() == 0 and none.tolist() == [[[], []]] * 3


def test_scores_outside_the_candidates_do_not_count() -> None:
    view = make_view(padding="left", sinks=1, recent=1)
    scores = torch.rand(view.valid.shape)
    lengths = view.valid.sum(-1).clamp(max=5)
    want = TopK()(view, scores, lengths).tolist()
    for noise in (torch.nan, torch.inf, -torch.inf, 1e30):
        assert TopK()(view, scores.masked_fill(~view.candidates, noise), lengths).tolist() == want


@pytest.mark.parametrize(
    "settings", [{"sinks": -1}, {"recent": 1.5}, {"recent": 1.0}, {"recent": -0.5}, {"sinks": True}, {"window": 3}]
)
def test_wrong_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(SettingError):
        TopK(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("recent", ["x", True, None, [1], -1, 0.0, 1.5, 8.0])
def test_a_wrong_number_of_recent_tokens_is_one_error_that_says_both_forms(recent: object) -> None:
    says = "top-k: recent: expected whole tokens from 0 (8), or a share above 0 and below 1 (0.5), got"
    with pytest.raises(SettingError) as caught:
        TopK(recent=recent)  # type: ignore[arg-type]
    assert str(caught.value) == f"{says} {recent!r}"


def test_a_budget_under_what_is_protected_is_refused() -> None:
    with pytest.raises(SettingError, match="protects"):
        Policy(name="test", score=KeyNorm(), budget=Budget(tokens=11), select=TopK(sinks=4, recent=8))


def test_the_layer_of_the_view_is_the_layer_of_the_selection() -> None:
    view = change(make_view(), layer=7)  # type: ignore[arg-type]
    assert TopK()(view, torch.zeros(view.valid.shape), view.valid.sum(-1)).layer == 7
