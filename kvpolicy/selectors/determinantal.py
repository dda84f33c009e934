"""Determinantal: slots that score high and span as much as they can together."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import min_max, units
from kvpolicy.plugin import settings
from kvpolicy.selectors.ends import ends
from kvpolicy.selectors.greedy import greedy
from kvpolicy.types import LayerView, Needs, Selection
from kvpolicy.vectors import On, Space, check, needs, vectors


@settings
class Determinantal:
    """The set that a determinantal point process finds likeliest, as nearly as choosing one slot after another can.

    The process has the kernel ``q_i q_j cos(k_i, k_j)``, and `ridge` on its diagonal, without which no more slots than
    a key has components could be told apart; ``q_i^2 = exp(quality * s_i)``, scores scaled to [0, 1] over a head's
    candidates. What a slot adds to the determinant is ``ridge * (1 + f_i A f_i)``, with ``f_i = q_i k_i/|k_i|`` and
    ``A = (ridge + sum_j f_j f_j^T)^-1`` over what is kept, the protected among them, which each choice changes by one
    product: no matrix of slots by slots, nor of slots by slots kept. One pass over the slots for each slot that is
    kept: time grows with their product.

    Args:
        sinks: the first tokens protected.
        recent: the last tokens protected.
        quality: how much the score counts; 0 for none.
        ridge: how little a slot that is like another one loses.
        on: what is compared, "keys" or "values".
        space: keys after RoPE, as stored ("post-rope"), or before it ("pre-rope"): their positions left out.

    The second best is the best once more:

    >>> keys = torch.tensor([[[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]])
    >>> view, scores = LayerView(keys=keys, values=keys), torch.tensor([[[3.0, 2.9, 2.0]]])
    >>> Determinantal(sinks=0, recent=0, quality=1.0)(view, scores, torch.tensor([[2]])).tolist()
    [[[0, 2]]]
    """

    name = "determinantal"
    source = "greedy MAP of a DPP: Chen et al., arXiv 1709.05135; for a cache: kvpolicy"
    formula = "argmax_i det L(kept + i), L_ij = q_i q_j cos(k_i, k_j) + ridge * (i = j), q_i^2 = exp(quality * s_i)"
    cost = "time O(n K D + K D^2), memory O(n D + D^2)"
    sinks: Annotated[int, Ge(0)] = 4
    recent: Annotated[int, Ge(0)] = 8
    quality: Annotated[float, Ge(0), Le(50)] = 4.0
    ridge: Annotated[float, Ge(1e-4)] = 1.0
    on: On = "keys"
    space: Space = "post-rope"

    def __post_init__(self) -> None:
        check(self.name, self.on, self.space)

    @property
    def needs(self) -> Needs:
        """The keys, after or before RoPE, or the values."""
        return needs(self.on, self.space)

    @property
    def protects(self) -> int:
        """Sinks and recent together."""
        return self.sinks + self.recent

    def protect(self, view: LayerView, tokens: Tensor) -> Tensor:
        """Return bool ``[B, Hkv, T]``, True for the protected slots; `tokens` (``[B]``) bounds them."""
        return ends(view, tokens, self.sinks, self.recent)

    def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Selection:
        """Return the kept slots, `lengths` (int64 ``[B, Hkv]``) of them a head.

        Args:
            view: its candidates are chosen; valid slots that are no candidates are kept first.
            scores: float32 ``[B, Hkv, T]``, finite on candidates, higher means keep.
            lengths: how many slots each head keeps.
        """
        score = min_max(scores, view.candidates)
        directions = units(vectors(view, self.on, self.space).where(view.valid[..., None], 0))
        features = directions * (self.quality / 2 * score).exp()[..., None]
        size = features.shape[-1]
        inverse = torch.eye(size, device=features.device).expand(*score.shape[:2], size, size) / self.ridge

        def gain(state: tuple[Tensor, Tensor]) -> Tensor:
            return state[1]

        def add(state: tuple[Tensor, Tensor], new: Tensor) -> tuple[Tensor, Tensor]:
            inverse, adds = state
            # Sherman and Morrison: what one more feature takes from the inverse.
            turned = new @ inverse
            turned = turned / (1 + turned @ new.mT).sqrt()
            return inverse - turned.mT @ turned, adds - (features @ turned.mT).squeeze(-1).square()

        adds = features.square().sum(-1) / self.ridge
        return greedy(view, features, lengths, (inverse, adds), gain, add)


@hookimpl
def kvpolicy_selectors() -> list[type]:
    """Return the selectors of this module."""
    return [Determinantal]
