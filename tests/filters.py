"""Q-Filters of no model, for tests that go through every plugin."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from kvpolicy import filters


def some_filters(layers: int, heads: int, size: int, folder: Path | None = None) -> Path:
    """Return a file with random filters, in a folder of its own unless one is given."""
    path = Path(tempfile.mkdtemp() if folder is None else folder) / "q.safetensors"
    drawn = torch.randn(layers, heads, size, generator=torch.Generator().manual_seed(0))
    filters.write(path, drawn, filters.Made("no model", {}, 1))
    return path
