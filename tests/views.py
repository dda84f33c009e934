"""The cases that every scorer and combiner meets, and how exact float32 can be."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvpolicy.testing.views import make_view
from kvpolicy.types import LayerView

CASES: dict[str, dict[str, Any]] = {
    "gqa": {"sinks": 2, "recent": 3},
    "mha": {"heads": (3, 3), "recent": 8},
    "mqa": {"heads": (4, 1), "sinks": 4},
    "size 80": {"sizes": (80, 80)},
    "size 128": {"sizes": (128, 128), "sinks": 1, "recent": 1},
    "sizes differ": {"sizes": (96, 40), "sinks": 1},
    "one slot": {"slots": 1},
    "fewer slots than the window": {"slots": 5},
    "window of one": {"window": 1},
    "left padding": {"padding": "left", "sinks": 1, "recent": 2},
    "right padding": {"padding": "right", "sinks": 1, "recent": 2},
    "ragged heads": {"padding": "ragged", "sinks": 1, "recent": 2},
    "bfloat16": {"dtype": torch.bfloat16, "sinks": 2, "recent": 3},
    "float16": {"dtype": torch.float16, "sinks": 2, "recent": 3},
    "bfloat16, padded": {"dtype": torch.bfloat16, "padding": "left", "heads": (8, 2)},
    "long": {"slots": 90, "batch": 1, "sinks": 4, "recent": 8},
}
"""What every scorer and combiner meets."""


def change(view: LayerView, **tensors: Tensor) -> LayerView:
    return dataclasses.replace(view, **tensors)


def assert_close(got: Tensor, want: Tensor, where: Tensor, *, roundings: float, size: float = 1.0) -> None:
    """Assert that float32 `got` is what float64 `want` says, as nearly as float32 can be after so many roundings.

    Each rounding errs by 2**-24 of what it rounds, which `size` bounds.
    """
    assert got.dtype == torch.float32
    error = (got.double() - want)[where].abs()
    assert not error.isnan().any()
    allowed = roundings * 2**-24 * size
    assert bool((error <= allowed).all()), f"off by {float(error.max()):.3g}, float32 allows {allowed:.3g}"


__all__ = ["CASES", "assert_close", "change", "make_view"]
