"""A scorer that remembers what it saw."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs

SEEN: list[LayerView] = []


@settings
class Watching:
    """Scores at random."""

    name = "watching"
    pre_rope: bool = False
    modality: bool = False
    call: bool = False
    change: bool = False

    @property
    def needs(self) -> Needs:
        return Needs(pre_rope=self.pre_rope, modality=self.modality, call=self.call, change=self.change)

    def __call__(self, view: LayerView) -> Tensor:
        SEEN.append(view)
        return torch.rand(view.valid.shape, generator=torch.Generator().manual_seed(view.layer))
