"""Views of random tensors to test plugins on, and how exact float32 can be."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvpolicy.types import LayerView


def make_view(
    seed: int = 0,
    *,
    batch: int = 3,
    heads: tuple[int, int] = (6, 2),
    slots: int = 24,
    sizes: tuple[int, int] = (64, 64),
    window: int = 8,
    dtype: torch.dtype = torch.float32,
    padding: str = "none",
    sinks: int = 0,
    recent: int = 0,
) -> LayerView:
    """Return a view whose invalid slots hold nan, so that whoever reads them shows it.

    `heads` are Hq and Hkv, `sizes` Dk and Dv; `padding` is "none", "left", "right" or "ragged" (heads differ). Each row
    has text, images and video in an order of its own.
    """
    random = torch.Generator().manual_seed(seed)
    valid = torch.ones(batch, heads[1], slots, dtype=torch.bool)
    for row in range(batch):
        pads = min(row * slots // 2, slots - 1)
        if padding == "left":
            valid[row, :, :pads] = False
        elif padding == "right":
            valid[row, :, slots - pads :] = False
        elif padding == "ragged":
            valid[row] = torch.rand(heads[1], slots, generator=random) < 0.6
            valid[row, :, -1] = True
    window = min(window, slots)
    keys = torch.randn(batch, heads[1], slots, sizes[0], generator=random) + torch.randn(sizes[0], generator=random) / 2
    values = torch.randn(batch, heads[1], slots, sizes[1], generator=random)
    queries = torch.randn(batch, heads[0], window, sizes[0], generator=random) * 2
    before = torch.randn(keys.shape, generator=random) + torch.randn(sizes[0], generator=random)
    kinds = torch.randint(0, 3, (batch, 1, slots), generator=random, dtype=torch.int8).expand(-1, heads[1], -1)
    query_positions = torch.full((batch, window), -1)
    candidates = valid.clone()
    for row in range(batch):
        there = valid[row].any(0).nonzero().flatten()[-window:]
        query_positions[row, window - len(there) :] = there
        for head in range(heads[1]):
            own = valid[row, head].nonzero().flatten()
            candidates[row, head, own[:sinks]] = False
            candidates[row, head, own[max(len(own) - recent, 0) :]] = False
    return LayerView(
        keys=keys.to(dtype).masked_fill(~valid[..., None], torch.nan),
        values=values.to(dtype).masked_fill(~valid[..., None], torch.nan),
        queries=queries.to(dtype).masked_fill((query_positions < 0)[:, None, :, None], torch.nan),
        valid=valid,
        query_positions=query_positions,
        candidates=candidates,
        seen=valid.any(1).sum(-1),
        pre_rope_keys=before.masked_fill(~valid[..., None], torch.nan),
        modality=kinds.masked_fill(~valid, 3),
    )


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
