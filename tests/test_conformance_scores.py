"""Scorers and combiners that are right but for one thing each: which check says so, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from faults import fault
from torch import Tensor

from kvpolicy import LayerView, Needs, Score, settings
from kvpolicy.errors import ConformanceError
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.scorers.snapkv import SnapKV
from kvpolicy.testing import check_combiner, check_scorer, checks


def scorer(needs: Needs = Needs(keys=True, values=True, queries=4), **attributes: Any) -> Callable[..., Any]:  # noqa: B008
    """Return what makes a scorer of a function of the view."""

    def make(score: Callable[[LayerView], Tensor]) -> Any:
        about = {"name": "broken", "source": "a test", "formula": "x", "needs": needs, "role": "other"}
        members = {**about, "__doc__": "It is broken.", "__module__": __name__, **attributes}
        members["__call__"] = lambda self, view: score(view)
        return settings(type(score.__name__, (), members))

    return make


def lengths(view: LayerView) -> Tensor:
    """A score that is right: the keys' lengths."""
    return view.keys.float().norm(dim=-1)


@scorer()
def Fine(view: LayerView) -> Tensor:
    return lengths(view)


@scorer(formula="")
def NoFormula(view: LayerView) -> Tensor:
    return lengths(view)


@scorer(__doc__=None)
def NoDocstring(view: LayerView) -> Tensor:
    return lengths(view)


@scorer(role="diverse")
def NoSuchRole(view: LayerView) -> Tensor:
    return lengths(view)


@scorer(Needs(values=True))
def Nosy(view: LayerView) -> Tensor:
    return lengths(view)


@scorer()
def OneHead(view: LayerView) -> Tensor:
    return lengths(view)[:, :1]


@scorer()
def Doubles(view: LayerView) -> Tensor:
    return lengths(view).double()


@scorer()
def AsStored(view: LayerView) -> Tensor:
    return view.keys.norm(dim=-1)


@scorer()
def LastOfEight(view: LayerView) -> Tensor:
    return lengths(view) + (view.keys.float()[:, :, -8].sum() * 0).nan_to_num()


@scorer()
def Standardised(view: LayerView) -> Tensor:
    score = lengths(view).where(view.valid, 0)
    span = score.amax(-1, keepdim=True) - score.amin(-1, keepdim=True)
    return score / span if view.slots > 1 else score * 0


@scorer(role="diversity")
def AlikeFirst(view: LayerView) -> Tensor:
    return -(view.keys.float() - view.keys.float().where(view.valid[..., None], 0).mean(2, keepdim=True)).norm(dim=-1)


@scorer(role="importance")
def IgnoredFirst(view: LayerView) -> Tensor:
    queries = (
        view.queries.float()
        .unflatten(1, (view.kv_heads, -1))
        .where((view.query_positions >= 0)[:, None, None, :, None], 0)
    )
    return -torch.einsum("bhgwd,bhtd->bht", queries, view.keys.float())


@scorer()
def Writes(view: LayerView) -> Tensor:
    view.keys.mul_(1)
    return lengths(view)


@scorer()
def Views(view: LayerView) -> Tensor:
    return view.keys.view(-1, view.keys.shape[-1]).float().norm(dim=-1).view(view.valid.shape)


@scorer()
def Draws(view: LayerView) -> Tensor:
    return lengths(view) + 0 * torch.rand(1)


SEEN: list[int] = []


@scorer()
def Remembers(view: LayerView) -> Tensor:
    SEEN.append(view.slots)
    return lengths(view) * len(SEEN)


@scorer()
def OverTheBatch(view: LayerView) -> Tensor:
    score = lengths(view).where(view.valid, 0)
    return score - score.sum((0, 2), keepdim=True) / view.valid.sum((0, 2), keepdim=True)


@scorer()
def CountsPadding(view: LayerView) -> Tensor:
    score = lengths(view).where(view.valid, 0)
    return score - score.mean(-1, keepdim=True)


@scorer()
def ByHead(view: LayerView) -> Tensor:
    return lengths(view) + torch.arange(view.kv_heads, device=view.valid.device)[:, None]


@scorer()
def ByPlace(view: LayerView) -> Tensor:
    return lengths(view) + view.positions * 0.1


@scorer()
def HalfPrecision(view: LayerView) -> Tensor:
    return view.keys.square().sum(-1).float().sqrt()


@scorer()
def AllPairs(view: LayerView) -> Tensor:
    keys = view.keys.float().where(view.valid[..., None], 0)
    return torch.einsum("bhtd,bhsd->bhts", keys, keys).sum(-1)


@scorer()
def DefaultDevice(view: LayerView) -> Tensor:
    return lengths(view) + torch.zeros(view.slots)


@scorer()
def NoSmallHeads(view: LayerView) -> Tensor:
    if view.keys.shape[-1] < 16:
        raise RuntimeError("head size 8 is too small")
    return lengths(view)


@settings
class HoldsATensor:
    """It has a setting that no YAML holds."""

    name, source, formula, role, needs = "broken", "a test", "x", "other", Needs(keys=True)
    weights: Tensor = torch.ones(1)

    def __call__(self, view: LayerView) -> Tensor:
        return lengths(view)


def hidden() -> Any:
    return scorer()(lambda view: lengths(view))()


@scorer()
def WritesBehindTheVersion(view: LayerView) -> Tensor:
    score = lengths(view).clone()
    view.values.data.zero_()
    return score


@scorer()
def ByDefaultDtype(view: LayerView) -> Tensor:
    return lengths(view) + (torch.ones((), dtype=torch.int64, device=view.valid.device) / 3).to(torch.float32)


@scorer()
def ByPosition(view: LayerView) -> Tensor:
    return lengths(view).gather(-1, view.positions.clamp(min=0).long())


@scorer()
def NanForQueriesThatDoNotExist(view: LayerView) -> Tensor:
    return lengths(view) + view.queries.float().mean((1, 2, 3))[:, None, None]  # type: ignore[union-attr]


@scorer(role="importance")
def LooksAhead(view: LayerView) -> Tensor:
    exists = (view.query_positions >= 0)[:, None, None, :, None]
    queries = view.queries.float().unflatten(1, (view.kv_heads, -1)).where(exists, 0)  # type: ignore[union-attr]
    logits = torch.einsum("bhgwd,bhtd->bhgwt", queries, view.keys.float().where(view.valid[..., None], 0))
    attention = logits.where(view.valid[:, :, None, None], -torch.inf).softmax(-1).where(exists, 0)
    return attention.sum((2, 3)) / exists.sum((2, 3))


LAST: dict[str, Any] = {}


@scorer()
def KeepsTheView(view: LayerView) -> Tensor:
    LAST["keys"] = view.keys
    return lengths(view)


@scorer()
def Memoised(view: LayerView) -> Tensor:
    if not hasattr(view.keys, "score"):
        view.keys.score = lengths(view)  # type: ignore[attr-defined]
    return view.keys.score  # type: ignore[attr-defined, no-any-return]


@scorer()
def RowsOfScores(view: LayerView) -> Tensor:
    rows = [lengths(view) * step for step in range(view.slots)]
    return rows[1 % len(rows)]


@scorer(Needs(call=True))
def OverTheCall(view: LayerView) -> Tensor:
    hidden = view.call.hidden_states.float()  # type: ignore[union-attr]
    far = (hidden - hidden.mean((0, 1), keepdim=True)).norm(dim=-1)
    return far[:, None].expand(view.valid.shape)


BROKEN_SCORERS = [
    (NoFormula, "declaration", "a class attribute `formula`, one line"),
    (NoDocstring, "declaration", "expected a docstring"),
    (NoSuchRole, "declaration", "its `role` is 'diverse', not one of 'importance', 'diversity', 'other'"),
    (HoldsATensor, "yaml", "no policy file can give its setting 'weights': torch.Tensor"),
    (hidden, "pickle", "make its class at the top level of a module"),
    (Nosy, "undeclared_reads", "reads 'keys' but declares"),
    (
        OneHead,
        "shapes",
        "with grouped queries: scorer 'broken' (test_conformance_scores): expected torch.float32 [3",
    ),
    (Doubles, "shapes", "got torch.float64"),
    (AsStored, "shapes", "with bfloat16: "),
    (LastOfEight, "shapes", "with one slot: raised IndexError"),
    (Standardised, "finite", "all zeros"),
    (AlikeFirst, "orientation", "the slot that is unlike all others"),
    (IgnoredFirst, "orientation", "the slot that every query looks at"),
    (Writes, "inputs_untouched", "writes into a tensor of the view"),
    (Views, "strided_inputs", "use reshape, not view"),
    (Draws, "repeatable", "draws from torch's own random state"),
    (Remembers, "repeatable", "it keeps something"),
    (OverTheBatch, "batch_mates", "the same alone and beside others"),
    (CountsPadding, "padding", "padding on the left changes scores"),
    (ByHead, "heads", "heads and rows in another order"),
    (ByPlace, "permutation", "slots in another order"),
    (HalfPrecision, "half_precision", "take view.keys.float() first"),
    (AllPairs, "memory", "make no T x T matrix"),
    (DefaultDevice, "device", "make each with device="),
    (WritesBehindTheVersion, "inputs_untouched", "writes into a tensor of the view"),
    (ByDefaultDtype, "default_dtype", "under every default dtype"),
    (ByPosition, "evicted", "raised RuntimeError"),
    (NanForQueriesThatDoNotExist, "absent_queries", "queries that a row does not have"),
    (LooksAhead, "causal", "mask its logits"),
    (KeepsTheView, "keeps_nothing", "keeps a tensor of the view"),
    (Memoised, "keeps_nothing", "it keeps what it has seen"),
    (RowsOfScores, "memory", "make no T x T matrix"),
    (OverTheCall, "generate_alone", "the same tokens kept of a prompt alone"),
    (NoSmallHeads, "generate", "raised RuntimeError: head size 8 is too small"),
]


def test_a_right_one_passes() -> None:
    check_scorer(Fine())


@pytest.mark.parametrize(("cls", "name", "says"), BROKEN_SCORERS, ids=[case[0].__name__ for case in BROKEN_SCORERS])
def test_a_broken_scorer_is_told_its_fault(cls: Any, name: str, says: str) -> None:
    assert says in fault(cls(), name)


def test_every_check_of_a_scorer_is_failed_by_a_broken_one() -> None:
    assert {name for _, name, _ in BROKEN_SCORERS} == {check.name for check in checks(SnapKV())}


def test_what_a_broken_one_breaks_besides_is_not_told() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_scorer(Doubles())
    first, *others = str(caught.value).splitlines()[1:]
    assert first.startswith("- shapes: with grouped queries: scorer 'broken'") and first.endswith("take .float()")
    assert len(others) == 1 and others[0].endswith("tells nothing before 'shapes' passes")


def combiner(**attributes: Any) -> Callable[..., Any]:
    """Return what makes a combiner of a function of its child's scores and the view."""

    def make(combine: Callable[[Tensor, LayerView], Tensor]) -> Any:
        about = {"name": "broken", "source": "a test", "formula": "x", "needs": Needs()}
        annotations = {"__annotations__": {"child": Score}}
        members = {**about, **annotations, "__doc__": "It is broken.", "__module__": __name__, **attributes}
        members["__call__"] = lambda self, view, child: combine(child, view)
        return settings(type(combine.__name__, (), members))

    return make


@combiner()
def Doubled(child: Tensor, view: LayerView) -> Tensor:
    return 2 * child


@combiner()
def WritesChild(child: Tensor, view: LayerView) -> Tensor:
    return child.mul_(2)


@combiner()
def CountsAll(child: Tensor, view: LayerView) -> Tensor:
    return child - child.mean(-1, keepdim=True)


@combiner()
def Divides(child: Tensor, view: LayerView) -> Tensor:
    inside = child.where(view.candidates, 0)
    return inside / inside.sum(-1, keepdim=True)


@combiner()
def TurnedRound(child: Tensor, view: LayerView) -> Tensor:
    return -child


BROKEN_COMBINERS = [
    (TurnedRound, "children_orientation", "expected that slot"),
    (WritesChild, "children_untouched", "writes into the scores of its children"),
    (CountsAll, "children_outside", "scores of slots that are no candidates change others"),
    (Divides, "children_finite", "all 0"),
]


def test_a_right_combiner_passes() -> None:
    check_combiner(Doubled(child=KeyNorm()))


@pytest.mark.parametrize(("cls", "name", "says"), BROKEN_COMBINERS)
def test_a_broken_combiner_is_told_its_fault(cls: Any, name: str, says: str) -> None:
    assert says in fault(cls(child=KeyNorm()), name)


def test_every_check_of_a_combiner_is_failed_by_a_broken_one() -> None:
    own = {check.name for check in checks(Doubled(child=KeyNorm()))} - {check.name for check in checks(KeyNorm())}
    assert {name for _, name, _ in BROKEN_COMBINERS} == own
