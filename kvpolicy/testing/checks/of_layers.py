"""What layer budgets are checked for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import ConformanceError
from kvpolicy.plugin import SharedOut
from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.selectors.top_k import TopK
from kvpolicy.testing.checks.tools import expect_on_device, expect_untouched
from kvpolicy.testing.views import make_view

LAYERS = (1, 2, 3, 12, 30)


def checks_of(budget: Any) -> dict[str, Callable[[Any], None]]:
    """Return by name the checks that apply to a layer budget."""
    return {
        "lengths": lengths,
        "device": device,
        "inputs_untouched": inputs_untouched,
        "batch_mates": batch_mates,
        **({"shares": shares} if isinstance(budget, SharedOut) else {}),
    }


def _rows() -> tuple[Tensor, Tensor]:
    """Return budgets and available slots, every pair of some."""
    pairs = list(product((1, 2, 3, 7, 16, 100, 513), (1, 2, 5, 16, 17, 100, 8191)))
    return torch.tensor([tokens for tokens, _ in pairs]), torch.tensor([available for _, available in pairs])


def lengths(budget: Any) -> None:
    """Its layers keep 1 to all slots, and add up to the budget exactly."""
    tokens, available = _rows()
    for layers in LAYERS:
        found = budget(tokens, available, layers)
        if not isinstance(found, Tensor) or found.dtype != torch.int64 or found.shape != (len(tokens), layers):
            got = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ConformanceError(f"expected int64 [B={len(tokens)}, layers={layers}], got {got}")
        mean = torch.minimum(tokens, available)
        for row in range(len(tokens)):
            kept, case = found[row], f"{layers} layers, a budget of {tokens[row]} and {available[row]} slots"
            if int(kept.sum()) != layers * int(mean[row]):
                raise ConformanceError(
                    f"with {case}: expected layers that add up to layers * min(tokens, available) = "
                    f"{layers * int(mean[row])}, got {kept.tolist()}, which add up to {int(kept.sum())}"
                )
            if int(kept.min()) < 1 or int(kept.max()) > int(available[row]):
                raise ConformanceError(
                    f"with {case}: expected layers that keep 1 to {available[row]} slots, got {kept.tolist()}"
                )


def device(budget: Any) -> None:
    """What it returns is on the device of what it is given."""
    tokens, available = _rows()
    expect_on_device(lambda: [budget(tokens, available, 3)], tokens.device)


def inputs_untouched(budget: Any) -> None:
    """It writes into nothing that it is given."""
    given = _rows()
    expect_untouched(given, lambda: budget(*given, 3), "writes into `tokens` or `available`: make new tensors")


def batch_mates(budget: Any) -> None:
    """A row gets the same alone and in a batch."""
    tokens, available = _rows()
    together = budget(tokens, available, 12)
    for row in range(len(tokens)):
        single = budget(tokens[row : row + 1], available[row : row + 1], 12)
        if not torch.equal(single[0], together[row]):
            raise ConformanceError(
                f"expected that a row gets the same alone and beside others in a batch, got {single[0].tolist()} "
                f"and {together[row].tolist()}"
            )


def shares(budget: Any) -> None:
    """One that shares slots out: what a layer may hold never rises as others are read, and in the end adds up exactly.

    Each keeps from what is protected to all it has, a row the same alone as beside others.
    """
    for padding in ("none", "left"):
        views = [make_view(seed, padding=padding, sinks=2, recent=3) for seed in range(5)]
        scores = [KeyNorm()(view) for view in views]
        for tokens in (1, 5, 6, 11, 23, 200):
            limit, none = Budget(tokens=tokens, layers=budget), TopK(sinks=0, recent=0)
            policy = Policy(name="conformance", score=KeyNorm(), budget=limit, select=none)
            notes = [policy.note(view, score) for view, score in zip(views, scores, strict=True)]
            before = None
            for read in range(1, len(views) + 1):
                found = policy.shared_slots(notes[:read], views[0], len(views))
                if before is not None and bool((found[:, :-1] > before).any()):
                    raise ConformanceError(
                        f"with {padding} padding and a budget of {tokens}: expected that layers hold no more once "
                        f"{read} of {len(views)} are read than before, got {found.tolist()} after {before.tolist()}: "
                        "what is evicted does not come back"
                    )
                before = found
            for row in range(len(views[0].valid)):
                single = [note[row : row + 1] for note in notes]
                alone = policy.shared_slots(
                    single, views[0].part(row, slice(None), torch.arange(views[0].slots)), len(views)
                )
                if before is not None and not torch.equal(alone[0], before[row]):
                    raise ConformanceError(
                        f"expected that a row gets the same alone and beside others in a batch, got "
                        f"{alone[0].tolist()} and {before[row].tolist()}"
                    )
