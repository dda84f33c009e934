"""What speaks of modality: the combiner and the selector `by-modality`, against slow twins and numbers by hand."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
import twins
from torch import Tensor
from views import CASES, change, make_view

import kvpolicy
from kvpolicy.budgets.adaptive import AdaptiveHeads
from kvpolicy.budgets.uniform import UniformHeads
from kvpolicy.combiners.by_modality import ByModality
from kvpolicy.combiners.fixed import Fixed
from kvpolicy.combiners.redundancy_adaptive import RedundancyAdaptive
from kvpolicy.config import dump, to_yaml
from kvpolicy.config.source import parse
from kvpolicy.errors import PluginError, SettingError, ViewError
from kvpolicy.plugin import Score, importance_of, settings
from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.cosine_diversity import CosineDiversity
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.scorers.random import Random
from kvpolicy.scorers.recency import Recency
from kvpolicy.scorers.snapkv import SnapKV
from kvpolicy.scorers.value_norm import ValueNorm
from kvpolicy.selectors.by_modality import ByModality as Shared
from kvpolicy.selectors.top_k import TopK
from kvpolicy.types import LayerView, Needs

TEXT, IMAGE, VIDEO, AUDIO = range(4)
ECOKV = RedundancyAdaptive(importance=SnapKV(window=4, kernel=1), diversity=CosineDiversity())


def scores_of(score: Any, view: LayerView) -> tuple[Tensor, Tensor | None]:
    return Policy(name="test", score=score, budget=Budget(keep=1.0)).scores(view)


def of_kinds(*rows: list[int], keys: Tensor | None = None) -> LayerView:
    """A view of one head whose rows hold these modalities."""
    kinds = torch.tensor(rows, dtype=torch.int8)[:, None]
    keys = torch.zeros(*kinds.shape, 2) if keys is None else keys
    return LayerView(keys=keys, values=keys, modality=kinds)


# The combiner


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "inside", [ECOKV, Fixed(inputs=[KeyNorm(), ValueNorm()], normalize="rank")], ids=["ecokv", "rank"]
)
def test_each_child_decides_its_own_slots_and_sees_no_others(case: str, inside: Any) -> None:
    view = make_view(**CASES[case])
    outside = SnapKV(window=4)
    got, _ = scores_of(ByModality(of=["image"], inside=inside, outside=outside), view)
    for score, own in ((inside, view.modality == IMAGE), (outside, view.modality != IMAGE)):
        own = own & view.candidates
        assert torch.equal(got[own], scores_of(score, view.decide(own))[0][own])


def test_normalising_and_redundancy_are_those_of_the_image_alone() -> None:
    """By hand: three equal image keys among text keys that are orthogonal and far longer."""
    keys = torch.tensor([[[[9.0, 0.0], [0.0, 1.0], [0.0, 2.0], [0.0, 5.0], [-9.0, 0.0], [7.0, 7.0]]]])
    view = of_kinds([TEXT, IMAGE, IMAGE, IMAGE, TEXT, TEXT], keys=keys)
    # Key norm: the shorter the better. Alone, 1 is the best of the images and 5 the worst; 9 the worst of the text.
    mix = ByModality(inside=Fixed(inputs=[KeyNorm()]), outside=Fixed(inputs=[ValueNorm()]))
    image = [1.0, 0.75, 0.0]
    span = math.sqrt(98) - 9
    assert scores_of(mix, view)[0][0, 0].tolist() == pytest.approx([0.0, *image, 0.0, span / span])
    # The three images point one way: their cosine redundancy is 1, and diversity alone decides; of all six it is not.
    ecokv = RedundancyAdaptive(importance=ValueNorm(), diversity=Recency(), redundancy="cosine")
    mixed = scores_of(ByModality(inside=ecokv, outside=ValueNorm()), view)[0][0, 0]
    # Recency 0, 1/2, 1 of theirs, scaled to the mean importance of 1, 2 and 5.
    assert mixed[1:4].tolist() == pytest.approx([0.0, 8 / 3, 16 / 3])
    assert scores_of(ecokv, view)[0][0, 0, 1:4].tolist() != pytest.approx([0.0, 8 / 3, 16 / 3])
    assert mixed[[0, 4, 5]].tolist() == pytest.approx([9.0, 9.0, math.sqrt(98)])


def test_pools_do_not_reach_over_the_edge_of_an_image() -> None:
    """One query that sees six equal keys: attention 1/6 each; a pool of 3 counts slots of others as zeros."""
    view = change(of_kinds([TEXT, TEXT, IMAGE, IMAGE, TEXT, TEXT]), queries=torch.ones(1, 1, 1, 2))
    view = LayerView(keys=view.keys, values=view.values, queries=view.queries, modality=view.modality)
    mix = ByModality(inside=SnapKV(window=1, kernel=1), outside=SnapKV(window=1, kernel=3))
    assert (scores_of(mix, view)[0] * 18).round().tolist() == [[[2.0, 2.0, 3.0, 3.0, 2.0, 2.0]]]


def test_a_scorer_may_stand_in_several_places() -> None:
    """The same object, as the importance of the whole and on images alone: nothing is taken for something else."""
    view = make_view(sinks=1)
    snapkv = SnapKV(window=4, kernel=5)
    score = RedundancyAdaptive(importance=snapkv, diversity=ByModality(inside=snapkv, outside=snapkv))
    scores, importance = scores_of(score, view)
    assert importance is not None
    assert torch.equal(importance, scores_of(snapkv, view)[0])
    twice = dataclasses.replace(score, importance=SnapKV(window=4, kernel=5))
    assert torch.equal(scores, scores_of(twice, view)[0])


def test_the_importance_is_that_of_each_child() -> None:
    view = make_view(padding="left")
    mix = ByModality(of=["image"], inside=ECOKV, outside=SnapKV(window=4))
    importance = scores_of(mix, view)[1]
    assert importance_of(mix) == ByModality(of=["image"], inside=ECOKV.importance, outside=SnapKV(window=4))
    want = scores_of(ByModality(of=["image"], inside=ECOKV.importance, outside=SnapKV(window=4)), view)[0]
    assert importance is not None
    assert torch.equal(importance[view.candidates], want[view.candidates])
    by = AdaptiveHeads(by="importance")
    Policy(name="test", score=mix, budget=Budget(tokens=12, heads=by)).plan([view])
    none = ByModality(inside=ECOKV, outside=Random())
    assert importance_of(none) is None and scores_of(none, view)[1] is None
    with pytest.raises(SettingError, match="expected a score with an importance"):
        Policy(name="test", score=none, budget=Budget(tokens=12, heads=by))


@pytest.mark.parametrize("kind", [TEXT, IMAGE, AUDIO])
def test_where_a_modality_is_absent_the_other_child_is_all(kind: int) -> None:
    view = make_view(padding="ragged", sinks=1)
    view = change(view, modality=torch.full_like(view.modality, kind))
    got = scores_of(ByModality(inside=ECOKV, outside=KeyNorm()), view)[0]
    want = scores_of(ECOKV if kind == IMAGE else KeyNorm(), view)[0]
    assert torch.equal(got[view.candidates], want[view.candidates])


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"beside": torch.ones(3, 2, 24, dtype=torch.bool)}, r"expected masks by child, \['below'\], from decides"),
        (None, r"expected masks by child, \['below'\], from decides"),
        ({"below": torch.ones(3, 2, 24)}, r"decides\['below'\]: expected torch.bool \[3, 2, 24\], got torch.float32"),
        ({"below": torch.ones(3, 24, dtype=torch.bool)}, r"decides\['below'\]: expected torch.bool \[3, 2, 24\]"),
    ],
)
def test_what_decides_returns_is_checked(found: Any, message: str) -> None:
    @settings
    class Wrong:
        name = "wrong"
        needs = Needs()
        below: Score

        def decides(self, view: LayerView) -> Any:
            return found

        def __call__(self, view: LayerView, *, below: Tensor) -> Tensor:
            return below

    with pytest.raises(PluginError, match=f"combiner 'wrong'.*{message}"):
        scores_of(Wrong(below=KeyNorm()), make_view())


def test_a_child_never_decides_more_than_its_parent() -> None:
    @settings
    class Every:
        name = "every"
        needs = Needs()
        below: Score

        def decides(self, view: LayerView) -> dict[str, Tensor]:
            return {"below": torch.ones_like(view.valid)}

        def __call__(self, view: LayerView, *, below: Tensor) -> Tensor:
            return below

    view = make_view(padding="left", sinks=2)
    score = Fixed(inputs=[KeyNorm()])
    got = scores_of(Every(below=score), view)[0]
    assert torch.equal(got[view.candidates], scores_of(score, view)[0][view.candidates])


def test_a_view_that_does_not_say_is_refused() -> None:
    view = make_view()
    without = LayerView(keys=view.keys, values=view.values)
    with pytest.raises(ViewError, match=r"combiner 'by-modality' .* needs modality, but the view has none"):
        scores_of(ByModality(inside=KeyNorm(), outside=KeyNorm()), without)
    with pytest.raises(ViewError, match="expected a view with what each slot holds"):
        Policy(name="x", score=KeyNorm(), budget=Budget(tokens=12), select=Shared(protected=["text"])).plan([without])


def test_what_they_need() -> None:
    mix = ByModality(inside=ECOKV, outside=SnapKV(window=16))
    assert Policy(name="x", score=mix, budget=Budget(tokens=12)).needs == Needs(queries=16, keys=True, modality=True)
    assert Policy(name="x", score=KeyNorm(), budget=Budget(tokens=12), select=Shared()).needs.modality


# The selector

SHARES: dict[str, dict[str, float] | None] = {
    "none": None,
    "two": {"text": 0.7, "image": 0.3},
    "three": {"image": 0.15, "video": 0.35, "text": 0.5},
    "thirds": {"image": 1 / 3, "video": 1 / 3, "text": 1 / 3},
    "of what is not there": {"audio": 0.5, "image": 0.5},
    "nothing for one": {"image": 0.0, "text": 1.0},
}
NUMBERS = {"text": TEXT, "image": IMAGE, "video": VIDEO, "audio": AUDIO}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shares", SHARES)
def test_the_selector_equals_its_twin(case: str, shares: str) -> None:
    given = SHARES[shares]
    exact = {NUMBERS[name]: Fraction(share).limit_denominator(1000) for name, share in (given or {}).items()}
    for budget in (1, 3, 12, 40):
        view = make_view(budget, **CASES[case])
        for protected in (None, ["video"]):
            select = Shared(sinks=2, recent=4, shares=given, protected=protected)  # type: ignore[arg-type]
            tokens = torch.full((len(view.valid),), budget)
            mine = view.decide(view.valid & ~select.protect(view, tokens))
            scores = (torch.randn(view.valid.shape, generator=torch.Generator().manual_seed(budget)) * 3).round() * 1e37
            scores = scores.masked_fill(~mine.candidates, torch.nan)
            lengths = UniformHeads()(mine, scores, tokens)
            kept = select(mine, scores, lengths)
            assert torch.equal(kept.lengths, lengths)
            assert kept.tolist() == twins.by_modality(mine, scores, lengths, exact)


@pytest.mark.parametrize("case", CASES)
def test_without_shares_and_protected_modalities_it_is_top_k(case: str) -> None:
    view = make_view(**CASES[case])
    plans = [
        Policy(name="x", score=KeyNorm(), budget=Budget(tokens=9), select=select).plan([view]).tolist()
        for select in (Shared(sinks=2, recent=3), TopK(sinks=2, recent=3))
    ]
    assert plans[0] == plans[1]


def test_all_text_is_top_k_whatever_the_shares() -> None:
    view = make_view(padding="left")
    view = change(view, modality=torch.zeros_like(view.modality))
    select = Shared(sinks=2, recent=3, shares={"image": 0.5, "text": 0.5})
    plans = [
        Policy(name="x", score=KeyNorm(), budget=Budget(tokens=9), select=one).plan([view]).tolist()
        for one in (select, TopK(sinks=2, recent=3))
    ]
    assert plans[0] == plans[1]


def kept(select: Shared, view: LayerView, scores: list[float], tokens: int) -> list[list[int]]:
    """What each row of a view of one head keeps, protection included."""
    rows = torch.full((len(view.valid),), tokens)
    view = view.decide(view.valid & ~select.protect(view, rows))
    every = torch.tensor(scores).expand(view.valid.shape)
    return [row[0] for row in select(view, every, rows[:, None].clamp(max=view.slots)).tolist()]


MIXED = [TEXT, TEXT, IMAGE, IMAGE, IMAGE, IMAGE, TEXT, VIDEO]
RISING = [float(slot) for slot in range(8)]


@pytest.mark.parametrize(
    ("settings", "tokens", "want"),
    [
        # Two of four each, though the last text scores higher than the images; the best of each.
        ({"shares": {"text": 0.5, "image": 0.5}}, 4, [1, 4, 5, 6]),
        # 0.75 * 5 = 3.75 and 1.25: the larger remainder is rounded up.
        ({"shares": {"text": 0.25, "image": 0.75}}, 5, [2, 3, 4, 5, 6]),
        # Of equal remainders, the one named first.
        ({"shares": {"text": 0.5, "image": 0.5}}, 3, [1, 5, 6]),
        ({"shares": {"image": 0.5, "text": 0.5}}, 3, [4, 5, 6]),
        # Text has three slots for its five: the best of the others, of whatever kind, have the rest.
        ({"shares": {"text": 0.8, "image": 0.2}}, 6, [0, 1, 4, 5, 6, 7]),
        # Nobody has a share for video, which comes in only where others leave room.
        ({"shares": {"text": 0.5, "image": 0.5}}, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"shares": {"audio": 1.0}}, 3, [5, 6, 7]),
        # Protected slots count: the sink is of text, the recent one of video, whose share is none.
        ({"sinks": 1, "recent": 1, "shares": {"text": 0.5, "image": 0.5}}, 4, [0, 5, 6, 7]),
        # All text, then the best of the rest; where text does not fit, the newest of it.
        ({"protected": ["text"]}, 5, [0, 1, 5, 6, 7]),
        ({"protected": ["text"]}, 2, [1, 6]),
        ({"protected": ["text", "video"]}, 2, [6, 7]),
        ({"protected": ["image"], "recent": 1}, 3, [4, 5, 7]),
        ({"protected": ["text"], "shares": {"text": 0.25, "image": 0.75}}, 4, [0, 1, 5, 6]),
    ],
)
def test_shares_by_hand(settings: dict[str, Any], tokens: int, want: list[int]) -> None:
    select = Shared(**({"sinks": 0, "recent": 0} | settings))
    assert kept(select, of_kinds(MIXED), RISING, tokens) == [want]


def test_every_row_has_its_own_modalities() -> None:
    view = of_kinds(MIXED, [IMAGE] * 8, [TEXT] * 8)
    select = Shared(sinks=0, recent=0, shares={"text": 0.5, "image": 0.5})
    assert kept(select, view, RISING, 4) == [[1, 4, 5, 6], [4, 5, 6, 7], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("settings", "where", "message"),
    [
        ({"shares": {"image": 0.5}}, "shares", "expected shares that add up to 1"),
        ({"shares": {}}, "shares", "expected shares that add up to 1"),
        ({"shares": {"image": 0.5, "text": 0.5, "audio": 1e-6}}, "shares", "expected shares that add up to 1"),
        ({"shares": {"picture": 1.0}}, "shares", "expected 'text', 'image', 'video' or 'audio'"),
        ({"shares": {"image": "1"}}, "shares", "expected a valid number"),
        ({"shares": [1.0]}, "shares", "expected a mapping"),
        ({"protected": "text"}, "protected", "expected a list"),
        ({"protected": ["texts"]}, "protected", "expected 'text', 'image', 'video' or 'audio'"),
    ],
)
def test_wrong_settings_are_refused_where_they_stand(settings: dict[str, Any], where: str, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        Shared(**settings)
    assert caught.value.problems[0][0][0] == where
    assert message in str(caught.value)


def test_a_policy_with_both_survives_writing_and_is_laid_over() -> None:
    given = {
        "name": "mine",
        "score": {"type": "by-modality", "inside": {"type": "snapkv", "kernel": 1}, "outside": "snapkv"},
        "budget": {"tokens": 64, "heads": {"type": "adaptive", "by": "importance"}},
        "select": {"type": "by-modality", "shares": {"image": 0.25, "text": 0.75}, "protected": ["text"]},
    }
    policy = kvpolicy.load(given)
    assert policy.select == Shared(shares={"image": 0.25, "text": 0.75}, protected=["text"])
    assert policy.score.of == ("image", "video")
    assert kvpolicy.load(dump(policy)) == policy
    assert kvpolicy.load(parse(to_yaml(policy), "x").plain) == policy
    assert hash(policy) == hash(kvpolicy.load(given))
    other = kvpolicy.load(given, select={"shares": {"image": 0.5, "text": 0.5}, "protected": None})
    assert other.select == Shared(shares={"image": 0.5, "text": 0.5})
    dump(policy)["select"]["shares"]["image"] = 1.0
    assert policy.select.shares == {"image": 0.25, "text": 0.75}
