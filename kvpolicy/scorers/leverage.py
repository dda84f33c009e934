"""Leverage: how little of a slot's key the other keys of its head span."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import centroid
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs
from kvpolicy.vectors import Space, needs, vectors

_BLOCK = 256


@settings
class Leverage:
    """The approximate leverage of a slot's key among all the head's keys: outliers, whatever their direction.

    Keys, centred over the slots compared, are sketched by a Gaussian matrix; one for all heads of a layer, where the
    authors' code draws one for each. A small ridge stands in for what they span no more. Memory is that of the sketch,
    a block of slots at a time, in float64.

    Args:
        sketch: columns of the Gaussian matrix; none for exact leverage.
        space: keys before RoPE ("pre-rope", as the authors), or after it ("post-rope").
        ridge: added to the diagonal.
        seed: of the Gaussian matrix: another seed, other numbers.
        among: which slots are compared: all that are "valid", or the "candidates" alone, as Compactor's blend does.

    Squares along the first axis add up to 9 + 9 + 36 + 36 = 90, along the second to 25 + 25 = 50:

    >>> keys = torch.tensor([[[[3.0, 0.0], [-3.0, 0.0], [0.0, 5.0], [0.0, -5.0], [6.0, 0.0], [-6.0, 0.0]]]])
    >>> view = LayerView(keys=keys, values=keys)
    >>> [round(score, 2) for score in Leverage(sketch=None, space="post-rope")(view)[0, 0].tolist()]
    [0.1, 0.1, 0.5, 0.5, 0.4, 0.4]
    """

    name = "leverage"
    role = "diversity"
    source = "Compactor, arXiv 2507.08143, its leverage scores"
    formula = "x_i^T (X^T X + ridge)^-1 x_i, x_i = (k_i - mean_j k_j) Phi, Phi ~ N(0, 1/sketch)"
    cost = "time O(n D S + n S^2 + S^3), memory O(n D + D S + S^2), S the columns of the sketch"
    sketch: Annotated[int, Ge(1), Le(4096)] | None = 48
    space: Space = "pre-rope"
    ridge: Annotated[float, Gt(0)] = 1e-2
    seed: Annotated[int, Ge(0), Lt(2**47)] = 0
    among: Literal["valid", "candidates"] = "valid"

    @property
    def needs(self) -> Needs:
        """The keys, before or after RoPE."""
        return needs("keys", self.space)

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, in [0, 1], higher means more alone in its direction."""
        spread, axes = torch.linalg.eigh(sum(part.mT @ part for part in self._parts(view)))
        # Less than rounding leaves of the widest is none: of huge keys it would drown the ridge.
        least = spread[..., -1:] * (torch.finfo(torch.float64).eps * spread.shape[-1])
        spread = torch.maximum(spread, least) + self.ridge
        scores = [((part @ axes) * spread.rsqrt()[..., None, :]).square().sum(-1) for part in self._parts(view)]
        return torch.cat(scores, dim=-1).float()

    def _parts(self, view: LayerView) -> Iterator[Tensor]:
        """Return the centred, sketched keys, a block of slots at a time, float64 ``[B, Hkv, n, sketch]``."""
        keys = vectors(view, "keys", self.space)
        # Divided first, as the sum of large numbers could overflow.
        compared = view.valid if self.among == "valid" else view.candidates
        mean = centroid(keys.float() / view.slots, compared) * view.slots
        phi = self._phi(keys.shape[-1], view.layer).to(keys.device)
        for start in range(0, view.slots, _BLOCK):
            there = compared[:, :, start : start + _BLOCK, None]
            part = keys[:, :, start : start + _BLOCK].double() - mean.double()
            yield part.where(there, 0) @ phi

    def _phi(self, size: int, layer: int) -> Tensor:
        if self.sketch is None:
            return torch.eye(size, dtype=torch.float64, device="cpu")
        random = torch.Generator("cpu").manual_seed(self.seed << 16 ^ layer)
        drawn = torch.randn(size, self.sketch, dtype=torch.float64, device="cpu", generator=random)
        return drawn * self.sketch**-0.5


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [Leverage]
