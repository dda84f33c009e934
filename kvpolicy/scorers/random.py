"""Random: the baseline every method must beat."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Lt
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import noise
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs


@settings
class Random:
    """A number in [0, 1) for each slot, from the seed, the layer, the head and the slot's place alone.

    The place counts valid slots only, so padding and batch mates change nothing, and a run repeats.

    Args:
        seed: another seed, other numbers.

    >>> import torch
    >>> view = LayerView(keys=torch.zeros(1, 1, 3, 2), values=torch.zeros(1, 1, 3, 2))
    >>> bool((Random()(view) == Random()(view)).all()), bool((Random()(view) == Random(seed=1)(view)).any())
    (True, False)
    """

    name = "random"
    role = "other"
    source = "kvpolicy"
    formula = "uniform noise, seeded"
    cost = "time O(n), memory O(n)"
    needs = Needs()
    seed: Annotated[int, Ge(0), Lt(2**47)] = 0

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``."""
        return noise(view.valid, self.seed * 100_003 + view.layer)


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [Random]
