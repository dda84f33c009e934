"""Random: the baseline every method must beat."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs


@settings
class Random:
    """A number in [0, 1) for each slot, from the seed, the layer, the head and the slot's place alone.

    The place counts valid slots only, so padding and batch mates change nothing, and a run repeats.

    Args:
        seed: another seed, other numbers.

    >>> view = LayerView(keys=torch.zeros(1, 1, 3, 2), values=torch.zeros(1, 1, 3, 2))
    >>> bool((Random()(view) == Random()(view)).all()), bool((Random()(view) == Random(seed=1)(view)).any())
    (True, False)
    """

    name = "random"
    role = "other"
    source = "kvpolicy"
    formula = "uniform noise, seeded"
    needs = Needs()
    seed: Annotated[int, Ge(0)] = 0

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``."""
        generator = torch.Generator("cpu").manual_seed(self.seed * 100_003 + view.layer)
        # Slot by slot, so that the numbers of the first slots do not depend on how many follow.
        noise = torch.rand(view.slots, view.kv_heads, generator=generator, dtype=torch.float32, device="cpu").T.to(
            view.valid.device
        )
        place = (view.valid.cumsum(-1) - 1).clamp(min=0)
        return noise.expand(len(place), -1, -1).gather(-1, place)


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [Random]
