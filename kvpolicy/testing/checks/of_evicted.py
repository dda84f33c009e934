"""What is checked of those that say what becomes of the evicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import ConformanceError
from kvpolicy.merging import merged
from kvpolicy.testing.checks.tools import (
    NEAR,
    alone,
    expect_any_default_dtype,
    expect_on_device,
    expect_untouched,
    tensors_of,
)
from kvpolicy.testing.views import make_view
from kvpolicy.types import LayerView, Merged, Selection

PADDINGS = ("none", "left", "right", "ragged")


def checks_of(evicted: Any) -> dict[str, Callable[[Any], None]]:
    """Return by name the checks that apply to what becomes of the evicted."""
    return {
        "undeclared_reads": undeclared_reads,
        "shapes": shapes,
        "nothing_evicted": nothing_evicted,
        "again": again,
        "device": device,
        "default_dtype": default_dtype,
        "inputs_untouched": inputs_untouched,
        "repeatable": repeatable,
        "batch_mates": batch_mates,
    }


def _view(padding: str = "none", **given: Any) -> tuple[LayerView, Selection]:
    """Return a view and the slots of it that are kept, by chance, of tokens of which some have gone before."""
    view = make_view(padding=padding, **given)
    noise = torch.rand(view.valid.shape, generator=torch.Generator().manual_seed(0))
    keep = view.valid & ((noise < 0.5) | (view.valid.cumsum(-1) == 1))
    return replace(view, seen=view.seen + 3), Selection.from_mask(keep)


def _held(evicted: Any, view: LayerView, kept: Selection, memory: Tensor | None = None) -> Merged:
    """Return what the kept slots hold, checked and limited as in a run."""
    with torch.no_grad():
        found = merged(evicted, view, kept, memory)
    return Merged(kept.take(view.keys), kept.take(view.values), memory) if found is None else found


def undeclared_reads(evicted: Any) -> None:
    """It reads nothing that its `needs` does not declare."""
    _held(evicted, *_view())


def shapes(evicted: Any) -> None:
    """It returns finite keys and values of the kept slots alone, whatever stands in slots that are not valid."""
    for padding in PADDINGS:
        for given in ({}, {"sizes": (80, 128)}, {"heads": (3, 3)}, {"dtype": torch.bfloat16}, {"slots": 2}):
            _held(evicted, *_view(padding, **given))


def nothing_evicted(evicted: Any) -> None:
    """Where every slot is kept, they stay as they are, to the last bit."""
    for padding in PADDINGS:
        view, _ = _view(padding)
        every = Selection.from_mask(view.valid)
        found = _held(evicted, view, every)
        if not (torch.equal(found.keys, every.take(view.keys)) and torch.equal(found.values, every.take(view.values))):
            raise ConformanceError(
                f"padding {padding}: expected slots as they were, as none is evicted: return None there"
            )


def again(evicted: Any) -> None:
    """It takes back what it returned as `memory`, at the layer's next eviction and of some of the rows."""
    view, kept = _view("left")
    memory = _held(evicted, view, kept).memory
    _held(evicted, *_view("right"), memory)
    if memory is not None:
        later, kept = _view("right")
        row, slots = alone(later, 2)
        keep = kept.to_mask(later.slots)[2:, :, slots]
        _held(evicted, row, Selection.from_mask(keep), memory[2:])


def device(evicted: Any) -> None:
    """What it returns is on the device of the view."""
    view, kept = _view()

    def run() -> list[Tensor]:
        found = _held(evicted, view, kept)
        return [found.keys, found.values, *([] if found.memory is None else [found.memory])]

    expect_on_device(run, view.keys.device)


def default_dtype(evicted: Any) -> None:
    """What it returns does not depend on torch's default dtype."""
    view, kept = _view()
    expect_any_default_dtype(lambda: _held(evicted, view, kept).values)


def inputs_untouched(evicted: Any) -> None:
    """It writes into nothing that it is given."""
    view, kept = _view("ragged")
    memory: Tensor | None = None
    message = "writes into what it is given: make new tensors"

    def run() -> None:
        nonlocal memory
        memory = _held(evicted, view, kept, memory).memory

    # The first eviction of a layer, which has no memory, and a later one.
    for _ in range(2):
        given = [*tensors_of(view), kept.slots, kept.lengths, *([] if memory is None else [memory])]
        expect_untouched(given, run, message)


def repeatable(evicted: Any) -> None:
    """The same view, selection and memory give the same, whatever came before and whatever torch's random state is."""
    view, kept = _view()
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        found.append(_held(evicted, view, kept))
        _held(evicted, *_view(seed=seed))
    if not all(torch.equal(one.keys, found[0].keys) and torch.equal(one.values, found[0].values) for one in found):
        raise ConformanceError(
            "expected equal keys and values when it is called again: it keeps something, or draws numbers. What it has "
            "to know of earlier evictions goes into `memory`"
        )


def batch_mates(evicted: Any) -> None:
    """A row becomes the same alone as beside others in a batch, with padding on either side."""
    for padding in ("none", "left", "right"):
        view, kept = _view(padding)
        together, keep = _held(evicted, view, kept), kept.to_mask(view.slots)
        pieces = kept.lengths.sum(-1).tolist()
        for row, keys, values in zip(
            range(len(keep)), together.keys.split(pieces), together.values.split(pieces), strict=True
        ):
            single, slots = alone(view, row)
            found = _held(evicted, single, Selection.from_mask(keep[row : row + 1, :, slots]))
            off = max(_apart(found.keys, keys), _apart(found.values, values))
            if off > NEAR:
                raise ConformanceError(
                    f"with {padding} padding: expected that a row becomes the same alone and beside others in a batch "
                    f"(off by {off:.2g} of the largest number)"
                )


def _apart(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())
