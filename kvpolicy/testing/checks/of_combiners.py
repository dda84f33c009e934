"""What combiners are checked for besides what scores are: how they treat the scores of their children."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import ConformanceError
from kvpolicy.maths import ranks
from kvpolicy.plugin import children
from kvpolicy.testing.checks import of_scores
from kvpolicy.testing.checks.of_scores import view_for
from kvpolicy.testing.checks.tools import expect_same, expect_untouched
from kvpolicy.types import LayerView


def checks_of(combiner: Any) -> dict[str, Callable[[Any], None]]:
    """Return by name the checks that apply to a combiner."""
    own = {
        "children_untouched": children_untouched,
        "children_outside": children_outside,
        "children_finite": children_finite,
        "children_orientation": children_orientation,
    }
    return {**of_scores.checks_of(combiner), **own}


def _combined(combiner: Any, view: LayerView, scores: list[Tensor]) -> Tensor:
    """Return what the combiner makes of scores, one for each child, in order."""
    given = iter(scores)
    below: dict[str, Any] = {}
    for name, child in children(combiner).items():
        below[name] = [next(given) for _ in child] if isinstance(child, tuple) else next(given)
    made: Tensor = combiner(view.limit(combiner.needs, combiner.name), **below)
    return made


def _random(combiner: Any, view: LayerView) -> list[Tensor]:
    count = sum(len(child) if isinstance(child, tuple) else 1 for child in children(combiner).values())
    random = torch.Generator().manual_seed(0)
    return [torch.rand(view.valid.shape, generator=random) for _ in range(count)]


def children_untouched(combiner: Any) -> None:
    """It writes into no score of its children."""
    view = view_for(combiner, sinks=1)
    scores = _random(combiner, view)
    message = "writes into the scores of its children: make new tensors"
    expect_untouched(scores, lambda: _combined(combiner, view, scores), message)


def children_outside(combiner: Any) -> None:
    """What its children score at slots that are no candidates, changes nothing."""
    view = view_for(combiner, padding="ragged", sinks=1, recent=2)
    scores = _random(combiner, view)
    spoiled = [tensor.where(view.candidates, torch.nan) for tensor in scores]
    message = "scores of slots that are no candidates change others: leave those outside view.candidates out of sums"
    got, want = _combined(combiner, view, spoiled), _combined(combiner, view, scores)
    expect_same(got, want, view.candidates, message)


def children_finite(combiner: Any) -> None:
    """Its scores are finite where children score all slots alike, and where they score large."""
    view = view_for(combiner, padding="left")
    for level, spread in ((0.0, 0.0), (-3.25, 0.0), (0.0, 1e6)):
        scores = [level + spread * (tensor - 0.5) for tensor in _random(combiner, view)]
        made = _combined(combiner, view, scores)
        if not bool(torch.isfinite(made.where(view.candidates, 0)).all()):
            what = f"up to {spread / 2:g} in size" if spread else f"all {level:g}"
            raise ConformanceError(f"expected finite scores when those of its children are {what}, got nan or inf")


def children_orientation(combiner: Any) -> None:
    """Higher means keep: a slot that all its children score higher than before does not fall behind others."""
    view = view_for(combiner, batch=1)
    scores = _random(combiner, view)
    before = ranks(_combined(combiner, view, scores))
    for slot in range(view.slots):
        raised = [tensor.clone() for tensor in scores]
        for tensor in raised:
            tensor[..., slot] += 1
        after = ranks(_combined(combiner, view, raised))
        if bool((after[..., slot] > before[..., slot]).any()):
            raise ConformanceError(
                f"higher means keep: expected that slot {slot} stays or rises when every child scores it 1 higher, got "
                f"place {before[..., slot].tolist()} before and {after[..., slot].tolist()} after, by row and head"
            )
