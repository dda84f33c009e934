"""Budgets and selectors that are right but for one thing each: which check says so, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from faults import fault
from torch import Tensor

from kvpolicy import LayerView, Selection, settings
from kvpolicy.selectors.top_k import TopK
from kvpolicy.testing import check_budget, check_selector, checks


def layers(**attributes: Any) -> Callable[..., Any]:
    """Return what makes a layer budget of a function of its arguments."""

    def make(allocate: Callable[[Tensor, Tensor, int], Tensor]) -> Any:
        about = {"name": "broken", "source": "a test", "formula": "x", "stage": "layers"}
        members = {**about, "__doc__": "It is broken.", "__module__": __name__, **attributes}
        members["__call__"] = lambda self, tokens, available, layers: allocate(tokens, available, layers)
        return settings(type(allocate.__name__, (), members))

    return make


def even(tokens: Tensor, available: Tensor, layers: int) -> Tensor:
    return torch.minimum(tokens, available)[:, None].repeat(1, layers)


@layers()
def Even(tokens: Tensor, available: Tensor, layers: int) -> Tensor:
    return even(tokens, available, layers)


@layers()
def OneShort(tokens: Tensor, available: Tensor, layers: int) -> Tensor:
    return (even(tokens, available, layers) - (torch.arange(layers, device=tokens.device) == layers - 1).long()).clamp(
        min=1
    )


@layers()
def FirstTakesAll(tokens: Tensor, available: Tensor, layers: int) -> Tensor:
    kept = even(tokens, available, layers)
    first = torch.arange(layers, device=tokens.device) == 0
    return torch.where(first, kept.sum(-1, keepdim=True) - (layers - 1), 1)


@layers()
def Floats(tokens: Tensor, available: Tensor, layers: int) -> Tensor:
    return even(tokens, available, layers).float()


@layers()
def LayersOnTheDefaultDevice(tokens: Tensor, available: Tensor, layers: int) -> Tensor:
    return even(tokens, available, layers) + torch.zeros(layers, dtype=torch.int64)


@layers()
def WritesTokens(tokens: Tensor, available: Tensor, layers: int) -> Tensor:
    return even(tokens.clamp_(max=available), available, layers)


@layers()
def LooksAtMates(tokens: Tensor, available: Tensor, layers: int) -> Tensor:
    kept = even(tokens, available, layers)
    if layers > 1 and len(tokens) > 1:
        more = ((kept[:, 0] > 1) & (kept[:, 0] < available)).long()
        kept[:, 0] += more
        kept[:, 1] -= more
    return kept


BROKEN_LAYERS = [
    (OneShort, "lengths", "which add up to"),
    (FirstTakesAll, "lengths", "expected layers that keep 1 to"),
    (Floats, "lengths", "expected int64 [B=49, layers=1], got torch.float32"),
    (LayersOnTheDefaultDevice, "device", "make each with device="),
    (WritesTokens, "inputs_untouched", "writes into `tokens` or `available`"),
    (LooksAtMates, "batch_mates", "a row gets the same alone"),
]


def heads(**attributes: Any) -> Callable[..., Any]:
    """Return what makes a head budget of a function of its arguments."""

    def make(allocate: Callable[[LayerView, Tensor, Tensor], Tensor]) -> Any:
        about = {"name": "broken", "source": "a test", "formula": "x", "stage": "heads"}
        members = {**about, "__doc__": "It is broken.", "__module__": __name__, **attributes}
        members["__call__"] = lambda self, view, scores, tokens: allocate(view, scores, tokens)
        return settings(type(allocate.__name__, (), members))

    return make


def alike(view: LayerView, tokens: Tensor) -> Tensor:
    return torch.minimum(tokens[:, None], view.valid.sum(-1))


def moved(kept: Tensor, view: LayerView, more: Tensor) -> Tensor:
    """Return lengths with one slot moved from the last head to the first, where `more` says so and both have room."""
    room = (more & (kept[:, 0] < view.valid[:, 0].sum(-1)) & (kept[:, -1] > 3)).long()
    change = torch.zeros_like(kept)
    change[:, 0], change[:, -1] = room, -room
    return kept + change


@heads()
def Alike(view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
    return alike(view, tokens)


@heads(across_heads=False)
def AlikeAlone(view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
    return alike(view, tokens)


@heads()
def OverProtected(view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
    kept = alike(view, tokens)
    lost = (kept[:, :1] - 1).clamp(min=0)
    return kept - torch.cat([lost, lost * 0, lost * 0], -1)


@heads()
def TooMany(view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
    return view.valid.sum(-1)


@heads(by="key norm")
def ByNothing(view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
    return alike(view, tokens)


@heads()
def HeadsOnTheDefaultDevice(view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
    return alike(view, tokens) + torch.zeros(view.kv_heads, dtype=torch.int64)


@heads()
def WritesScores(view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
    scores.nan_to_num_()
    return alike(view, tokens)


CALLS: list[int] = []


@heads()
def Alternates(view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
    CALLS.append(1)
    return moved(alike(view, tokens), view, torch.tensor(len(CALLS) % 2 == 0).expand(len(tokens)))


@heads()
def CountsNan(view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
    return moved(alike(view, tokens), view, scores.isnan().any(-1).any(-1))


@heads()
def HeadsLookAtMates(view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
    return moved(alike(view, tokens), view, torch.tensor(len(tokens) > 1).expand(len(tokens)))


@heads()
def FirstHeadMore(view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
    return moved(alike(view, tokens), view, tokens > 0)


@heads(across_heads=False)
def HidesThatHeadsCompete(view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
    inside = scores.where(view.candidates, 0)
    return moved(alike(view, tokens), view, inside[:, -1].amax(-1) > 50)


BROKEN_HEADS = [
    (OverProtected, "lengths", "expected heads that keep from [[3, 3, 3]"),
    (TooMany, "lengths", "expected exactly [18, 18, 18] slots in each row, got [72, 72, 72]"),
    (ByNothing, "lengths", "`by`: expected 'score' or 'importance', got 'key norm'"),
    (HeadsOnTheDefaultDevice, "device", "make each with device="),
    (WritesScores, "inputs_untouched", "writes into what it is given"),
    (Alternates, "repeatable", "it keeps something"),
    (CountsNan, "scores_outside", "change lengths"),
    (HeadsLookAtMates, "batch_mates", "a row gets the same alone"),
    (FirstHeadMore, "heads", "heads in another order"),
    (HidesThatHeadsCompete, "across_heads", "says across_heads = False"),
]


@pytest.mark.parametrize("cls", [Even, Alike, AlikeAlone])
def test_a_right_budget_passes(cls: Any) -> None:
    check_budget(cls())


@pytest.mark.parametrize(("cls", "name", "says"), BROKEN_LAYERS + BROKEN_HEADS)
def test_a_broken_budget_is_told_its_fault(cls: Any, name: str, says: str) -> None:
    assert says in fault(cls(), name)


class Broken:
    """A selector that is right, and stays so but for what a subclass changes."""

    name: ClassVar = "broken"
    source: ClassVar = "a test"
    formula: ClassVar = "x"
    protects: ClassVar = 2
    right: ClassVar = TopK(sinks=1, recent=1)

    def protect(self, view: LayerView, tokens: Tensor) -> Tensor:
        return self.right.protect(view, tokens)

    def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Selection:
        return self.right(view, scores, lengths)


@settings
class Right(Broken):
    """It is right."""


@settings
class ProtectsMore(Broken):
    """It protects more than it says."""

    right: ClassVar = TopK(sinks=2, recent=2)


@settings
class ProtectsPadding(Broken):
    """It protects what is not there."""

    def protect(self, view: LayerView, tokens: Tensor) -> Tensor:
        first = torch.arange(view.slots) < tokens[:, None, None].clamp(max=1)
        return first.expand(view.valid.shape)


@settings
class ProtectsByText(Broken):
    """It does not say a number."""

    protects: ClassVar = "two"


@settings
class KeepsOneLess(Broken):
    """It keeps too few."""

    def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Selection:
        return self.right(view, scores, (lengths - 1).clamp(min=0))


@settings
class DropsProtected(Broken):
    """It does not mind what is protected."""

    def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Selection:
        return self.right(view.decide(view.valid), scores, lengths)


@settings
class KeepsAMask(Broken):
    """It returns something else."""

    def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Any:
        return self.right(view, scores, lengths).to_mask(view.slots)


@settings
class KeepsTheLowest(Broken):
    """It has the sign wrong."""

    def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Selection:
        return self.right(view, -scores, lengths)


@settings
class OnTheDefaultDevice(Broken):
    """It does not mind where it is."""

    def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Selection:
        return self.right(view, scores + torch.zeros(view.slots), lengths)


@settings
class WritesIntoScores(Broken):
    """It takes the scores for its own."""

    def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Selection:
        return self.right(view, scores.mul_(2), lengths)


@settings
class Flips(Broken):
    """It draws."""

    def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Selection:
        return self.right(view, scores + 1e3 * torch.rand(scores.shape), lengths)


@settings
class MindsNan(Broken):
    """It looks at scores that do not count."""

    def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Selection:
        return self.right(view, -scores if bool(scores.isnan().any()) else scores, lengths)


@settings
class LooksAtTheBatch(Broken):
    """It looks at other rows."""

    def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Selection:
        return self.right(view, scores if len(scores) == 1 else scores + scores.roll(1, 0).nan_to_num(), lengths)


BROKEN_SELECTORS = [
    (ProtectsMore, "protects", "expected at most 2 protected slots a head, as `protects` is 2, got 3"),
    (ProtectsPadding, "protects", "slots that are not valid"),
    (ProtectsByText, "protects", "`protects`: expected how many slots"),
    (KeepsOneLess, "selection", "slots by row and head"),
    (DropsProtected, "selection", "expected the protected slots"),
    (KeepsAMask, "selection", "expected a kvpolicy.Selection, got Tensor"),
    (KeepsTheLowest, "orientation", "higher means keep"),
    (OnTheDefaultDevice, "device", "make each with device="),
    (WritesIntoScores, "inputs_untouched", "writes into what it is given"),
    (Flips, "repeatable", "it keeps something, or draws numbers"),
    (MindsNan, "scores_outside", "change what is kept"),
    (LooksAtTheBatch, "batch_mates", "a row keeps the same alone"),
]


def test_a_right_selector_passes() -> None:
    check_selector(Right())


@pytest.mark.parametrize(("cls", "name", "says"), BROKEN_SELECTORS)
def test_a_broken_selector_is_told_its_fault(cls: Any, name: str, says: str) -> None:
    assert says in fault(cls(), name)


ALWAYS = {"declaration", "yaml", "pickle", "generate", "generate_alone"}


@pytest.mark.parametrize(
    ("right", "broken"), [(Even(), BROKEN_LAYERS), (Right(), BROKEN_SELECTORS), (AlikeAlone(), BROKEN_HEADS)]
)
def test_every_check_is_failed_by_a_broken_plugin(right: Any, broken: list[Any]) -> None:
    assert {name for _, name, _ in broken} | ALWAYS == {check.name for check in checks(right)}
