"""What selectors are checked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import ConformanceError
from kvpolicy.testing.checks.tools import alone, expect_on_device, expect_untouched, tensors_of
from kvpolicy.testing.views import make_view
from kvpolicy.types import LayerView, Selection

TOKENS = (1, 2, 6, 11, 24, 200)
"""Budgets tried, in slots a KV head, of heads with up to 24 slots."""


def checks_of(selector: Any) -> dict[str, Callable[[Any], None]]:
    """Return by name the checks that apply to a selector."""
    return {
        "protects": protects,
        "selection": selection,
        "orientation": orientation,
        "device": device,
        "inputs_untouched": inputs_untouched,
        "repeatable": repeatable,
        "scores_outside": scores_outside,
        "batch_mates": batch_mates,
    }


def _scores(view: LayerView) -> Tensor:
    return torch.randn(view.valid.shape, generator=torch.Generator().manual_seed(0))


def _keep(selector: Any, view: LayerView, scores: Tensor, tokens: int) -> tuple[LayerView, Tensor, Selection]:
    """Return the view with what is protected, the length of each head, and what is selected."""
    view = view.decide(view.valid & ~selector.protect(view, torch.full((len(view.valid),), tokens)))
    lengths = view.valid.sum(-1).clamp(max=tokens)
    return view, lengths, selector(view, scores, lengths)


def protects(selector: Any) -> None:
    """It protects valid slots alone, and of a budget above `protects` it leaves some to the score."""
    count = selector.protects
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ConformanceError(f"`protects`: expected how many slots of a head it protects, 0 or more, got {count!r}")
    for padding in ("none", "left", "right", "ragged"):
        view = make_view(padding=padding)
        for tokens in (*TOKENS, count, count + 1):
            found = selector.protect(view, torch.full((len(view.valid),), tokens))
            case = f"with {padding} padding and a budget of {tokens}"
            if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != view.valid.shape:
                raise ConformanceError(f"{case}: expected bool {list(view.valid.shape)} from protect()")
            if bool((found & ~view.valid).any()):
                raise ConformanceError(f"{case}: protect() protects slots that are not valid (padding, empty)")
            most, bound = int(found.sum(-1).max()), tokens - (tokens > count)
            if most > bound:
                raise ConformanceError(
                    f"{case}: expected at most {bound} protected slots a head, as `protects` is {count}, got {most}"
                )


def selection(selector: Any) -> None:
    """It keeps exactly as many slots as it is told, valid ones, the protected among them."""
    for padding in ("none", "left", "right", "ragged"):
        for tokens in TOKENS:
            view = make_view(padding=padding)
            view, lengths, kept = _keep(selector, view, _scores(view), tokens)
            case = f"with {padding} padding and {tokens} slots a head"
            if not isinstance(kept, Selection):
                raise ConformanceError(f"{case}: expected a kvpolicy.Selection, got {type(kept).__name__}")
            if not torch.equal(kept.lengths, lengths) or len(kept.slots) != int(lengths.sum()):
                raise ConformanceError(
                    f"{case}: expected {lengths.tolist()} slots by row and head, got {kept.lengths.tolist()}"
                )
            for row, head in torch.cartesian_prod(*(torch.arange(size) for size in lengths.shape)).tolist():
                own = kept[row][head].tolist()
                valid = set(view.valid[row, head].nonzero().flatten().tolist())
                if own != sorted(set(own)) or not set(own) <= valid:
                    raise ConformanceError(f"{case}: expected rising, different, valid slots, got {own}")
                protected = set((view.valid & ~view.candidates)[row, head].nonzero().flatten().tolist())
                if not protected <= set(own):
                    raise ConformanceError(f"{case}: expected the protected slots {sorted(protected)} among {own}")


def orientation(selector: Any) -> None:
    """Higher means keep: a slot that scores far above all others is kept."""
    view = make_view(slots=40 + selector.protects)
    scores = _scores(view)
    # Half of the slots, so that a selector of chunks or of kinds has room for it.
    tokens = selector.protects + 20
    for best in range(view.slots):
        marked = scores.clone()
        marked[..., best] = 1e4
        _, _, kept = _keep(selector, view, marked, tokens)
        if not bool(kept.to_mask(view.slots)[..., best].all()):
            raise ConformanceError(
                f"higher means keep: expected slot {best}, which scores far above all others, among the {tokens} of "
                f"{view.slots} slots kept"
            )


def device(selector: Any) -> None:
    """What it returns is on the device of the view."""
    view = make_view()
    scores, tokens = _scores(view), torch.full((len(view.valid),), 11)
    lengths = view.valid.sum(-1).clamp(max=11)

    def run() -> list[Tensor]:
        protected = selector.protect(view, tokens)
        kept = selector(view.decide(view.valid & ~protected), scores, lengths)
        return [protected, kept.slots, kept.lengths]

    expect_on_device(run, scores.device)


def inputs_untouched(selector: Any) -> None:
    """It writes into nothing that it is given."""
    view = make_view(padding="ragged")
    scores = _scores(view)
    given = [scores, *tensors_of(view)]
    expect_untouched(given, lambda: _keep(selector, view, scores, 11), "writes into what it is given: make new tensors")


def repeatable(selector: Any) -> None:
    """The same view and scores give the same slots."""
    view = make_view()
    found = [_keep(selector, view, _scores(view), 11)[2].tolist() for _ in range(3)]
    if found != found[:1] * 3:
        raise ConformanceError("expected equal slots when it is called again: it keeps something, or draws numbers")


def scores_outside(selector: Any) -> None:
    """Scores of slots that are no candidates change nothing."""
    view = make_view(padding="ragged")
    scores = _scores(view)
    decided, _, want = _keep(selector, view, scores, 11)
    _, _, got = _keep(selector, view, scores.where(decided.candidates, torch.nan), 11)
    if got.tolist() != want.tolist():
        raise ConformanceError(
            "scores of slots that are no candidates (padding, protected) change what is kept: leave those outside "
            "view.candidates out"
        )


def batch_mates(selector: Any) -> None:
    """A row keeps the same alone as beside others in a batch, with padding on either side."""
    for padding in ("none", "left", "right"):
        view = make_view(padding=padding)
        scores = _scores(view)
        _, _, together = _keep(selector, view, scores, 11)
        for row in range(len(view.valid)):
            single, slots = alone(view, row)
            _, _, kept = _keep(selector, single, scores[row : row + 1, :, slots], 11)
            if [slots[head].tolist() for head in kept[0]] != [head.tolist() for head in together[row]]:
                raise ConformanceError(
                    f"with {padding} padding: expected that a row keeps the same alone and beside others in a batch"
                )
