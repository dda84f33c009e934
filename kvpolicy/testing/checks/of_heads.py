"""What head budgets are checked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import ConformanceError
from kvpolicy.testing.checks.tools import alone, expect_on_device, expect_untouched, tensors_of
from kvpolicy.testing.views import make_view
from kvpolicy.types import LayerView
from kvpolicy.types.view import BY_SLOT

TOKENS = (1, 6, 11, 24, 200)
"""Budgets tried, in slots a KV head, of heads with up to 24 slots."""


def checks_of(budget: Any) -> dict[str, Callable[[Any], None]]:
    """Return by name the checks that apply to a head budget."""
    own = getattr(type(budget), "across_heads", True) is False
    return {
        "lengths": lengths,
        "device": device,
        "inputs_untouched": inputs_untouched,
        "repeatable": repeatable,
        "scores_outside": scores_outside,
        "batch_mates": batch_mates,
        "heads": heads,
        **({"across_heads": across_heads} if own else {}),
    }


def _scored(padding: str = "none", protected: int = 3) -> tuple[LayerView, Tensor]:
    """Return a view of three rows and three heads, and scores that spread more in one head than in the next."""
    view = make_view(heads=(6, 3), padding=padding, sinks=1, recent=protected - 1)
    scores = torch.randn(view.valid.shape, generator=torch.Generator().manual_seed(0))
    return view, scores.exp() * torch.tensor([0.5, 1.0, 2.0])[:, None]


def _rows(tokens: int, view: LayerView) -> Tensor:
    return torch.full((len(view.valid),), tokens)


def _least(view: LayerView) -> Tensor:
    held = view.valid.sum(-1)
    return torch.minimum((held - view.candidates.sum(-1)).clamp(min=1), held)


def lengths(budget: Any) -> None:
    """Its heads keep from what is protected to all they have; together no more than ``Hkv * tokens``.

    Exactly that, or all there is, where every head holds as many slots.
    """
    by = getattr(budget, "by", "score")
    if by not in ("score", "importance"):
        raise ConformanceError(f"`by`: expected 'score' or 'importance', got {by!r}")
    for padding in ("none", "left", "right", "ragged"):
        view, scores = _scored(padding)
        least, held = _least(view), view.valid.sum(-1)
        for each in TOKENS:
            # As a run does: no more is protected than the budget holds.
            if bool((least > each).any()):
                continue
            found = budget(view, scores, _rows(each, view))
            case = f"with {padding} padding and a budget of {each}"
            if not isinstance(found, Tensor) or found.dtype != torch.int64 or found.shape != held.shape:
                got = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
                raise ConformanceError(f"{case}: expected int64 {list(held.shape)}, got {got}")
            if bool((found < least).any() or (found > held).any()):
                raise ConformanceError(
                    f"{case}: expected heads that keep from {least.tolist()} (protected) to {held.tolist()} (all) "
                    f"slots, got {found.tolist()}"
                )
            most = 3 * each
            exact = padding == "none"
            total = found.sum(-1)
            want = torch.minimum(held.sum(-1), torch.tensor(most))
            if bool((total > most).any()) or (exact and not torch.equal(total, want)):
                bound = f"exactly {want.tolist()}" if exact else f"at most {most}"
                raise ConformanceError(
                    f"{case}: expected {bound} slots in each row, got {total.tolist()} ({found.tolist()})"
                )


def device(budget: Any) -> None:
    """What it returns is on the device of the view."""
    view, scores = _scored()
    tokens = _rows(11, view)
    expect_on_device(lambda: [budget(view, scores, tokens)], tokens.device)


def inputs_untouched(budget: Any) -> None:
    """It writes into nothing that it is given."""
    view, scores = _scored("ragged")
    tokens = _rows(11, view)
    given = [scores, tokens, *tensors_of(view)]
    expect_untouched(given, lambda: budget(view, scores, tokens), "writes into what it is given: make new tensors")


def repeatable(budget: Any) -> None:
    """The same view and scores give the same lengths, whatever torch's random state is."""
    view, scores = _scored()
    found = [budget(view, scores, _rows(11, view)) for _ in range(3)]
    if not all(torch.equal(each, found[0]) for each in found):
        raise ConformanceError("expected equal lengths when it is called again: it keeps something, or draws numbers")


def scores_outside(budget: Any) -> None:
    """Scores of slots that are no candidates change nothing."""
    view, scores = _scored("ragged")
    spoiled = scores.where(view.candidates, torch.nan)
    got, want = budget(view, spoiled, _rows(11, view)), budget(view, scores, _rows(11, view))
    if not torch.equal(got, want):
        raise ConformanceError(
            "scores of slots that are no candidates (padding, protected) change lengths: leave those outside "
            f"view.candidates out, got {got.tolist()} for {want.tolist()}"
        )


def batch_mates(budget: Any) -> None:
    """A row gets the same alone as beside others in a batch, with padding on either side."""
    for padding in ("none", "left", "right"):
        view, scores = _scored(padding)
        together = budget(view, scores, _rows(11, view))
        for row in range(len(view.valid)):
            single, slots = alone(view, row)
            got = budget(single, scores[row : row + 1, :, slots], _rows(11, single))
            if not torch.equal(got[0], together[row]):
                raise ConformanceError(
                    f"with {padding} padding: expected that a row gets the same alone and beside others in a batch, "
                    f"got {got[0].tolist()} and {together[row].tolist()}"
                )


def heads(budget: Any) -> None:
    """Heads in another order get the same lengths in that order."""
    view, scores = _scored()
    order = torch.tensor([2, 0, 1])
    ordered: dict[str, Any] = {name: getattr(view, name)[:, order] for name in BY_SLOT}
    moved = replace(view, queries=None, **ordered)
    got = budget(moved, scores[:, order], _rows(11, view))
    want = budget(view, scores, _rows(11, view))[:, order]
    if not torch.equal(got, want):
        raise ConformanceError(
            f"expected that heads in another order get the same lengths in that order, got {got.tolist()} for "
            f"{want.tolist()}"
        )


def across_heads(budget: Any) -> None:
    """It says `across_heads = False`: no head's length depends on another head's scores."""
    view, scores = _scored()
    other = scores.clone()
    other[:, 1:] = other[:, 1:].flip(-1) * 100
    got, want = (budget(view, each, _rows(11, view))[:, 0] for each in (other, scores))
    if not torch.equal(got, want):
        raise ConformanceError(
            "says across_heads = False, but a head's length changes with another head's scores: take that out"
        )
