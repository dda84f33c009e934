"""Positions that a model keeps outside its cache: how far an image moved the text behind it (M-RoPE)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_NAME = "rope_deltas"

Deltas = Mapping[str, Tensor | None]
"""By module: int64 ``[B, 1]``, what the position of each row's text is ahead of the tokens seen."""


def keepers(model: nn.Module) -> dict[str, Any]:
    """Return the modules of a model that keep the deltas of the prompt they read last, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, _NAME)}


def deltas_of(model: nn.Module) -> Deltas:
    """Return what the modules of a model keep now."""
    return {name: getattr(module, _NAME) for name, module in keepers(model).items()}


@contextmanager
def keeping(model: nn.Module, deltas: Deltas) -> Iterator[None]:
    """In the block, the modules of a model keep `deltas`, or nothing; after it, what they kept before."""
    kept = keepers(model)
    before = deltas_of(model)
    try:
        for name, module in kept.items():
            setattr(module, _NAME, deltas.get(name))
        yield
    finally:
        for name, module in kept.items():
            setattr(module, _NAME, before[name])
