"""K-centre: slots that score high and are far from those already chosen."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import HUGE, min_max, norms
from kvpolicy.plugin import settings
from kvpolicy.selectors.ends import ends
from kvpolicy.selectors.greedy import greedy
from kvpolicy.types import LayerView, Needs, Selection
from kvpolicy.vectors import On, Space, check, needs, vectors


@settings
class KCentre:
    """Farthest point: one slot after another, each for its score and its distance from the nearest that is kept.

    Scores are scaled to [0, 1] over a head's candidates; distances are Euclidean, and counted in twice the length of
    the head's longest vector, which none exceeds. Where nothing is protected the best-scored slot comes first. One pass
    over the slots for each slot that is kept: time grows with their product.

    Args:
        sinks: the first tokens protected.
        recent: the last tokens protected.
        relevance: the weight of the score, from 0 (the paper's farthest point) to 1 (as `top-k`).
        on: what is compared, "keys" or "values".
        space: keys after RoPE, as stored ("post-rope"), or before it ("pre-rope"): their positions left out.

    >>> keys = torch.tensor([[[[0.0], [1.0], [7.0], [10.0]]]])
    >>> view, scores = LayerView(keys=keys, values=keys), torch.tensor([[[0.0, 9.0, 0.0, 0.0]]])
    >>> KCentre(sinks=0, recent=0, relevance=0.0)(view, scores, torch.tensor([[2]])).tolist()
    [[[1, 3]]]
    """

    name = "k-centre"
    source = "Gonzalez, Clustering to minimize the maximum intercluster distance, 1985; for a cache: kvpolicy"
    formula = "argmax_i w * s_i + (1 - w) * min_j |k_i - k_j| / (2 * max |k|), j over what is kept"
    cost = "time O(n K D), memory O(n D)"
    sinks: Annotated[int, Ge(0)] = 4
    recent: Annotated[int, Ge(0)] = 8
    relevance: Annotated[float, Ge(0), Le(1)] = 0.5
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
        points = vectors(view, self.on, self.space).where(view.valid[..., None], 0).float()
        # Scaled first: the square of a large distance could overflow.
        longest = norms(points).amax(-1)[..., None, None]
        points = points / (2 * longest).where(longest > 0, 1).clamp(max=HUGE)
        score = min_max(scores, view.candidates)

        def gain(distance: Tensor) -> Tensor:
            return (self.relevance * score + (1 - self.relevance) * distance).where(distance.isfinite(), score)

        def add(distance: Tensor, new: Tensor) -> Tensor:
            return torch.minimum(distance, torch.linalg.vector_norm(points - new, dim=-1))

        return greedy(view, points, lengths, torch.full_like(score, torch.inf), gain, add)


@hookimpl
def kvpolicy_selectors() -> list[type]:
    """Return the selectors of this module."""
    return [KCentre]
