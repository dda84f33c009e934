"""MMR: slots that score high and are unlike those already chosen."""

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
class MMR:
    """Maximal marginal relevance: one slot after another, each for its score less its likeness to what is kept.

    Scores are scaled to [0, 1] over a head's candidates; likeness is the largest cosine with a slot that is kept, the
    protected among them. One pass over the slots for each slot that is kept: time grows with their product.

    Args:
        sinks: the first tokens protected.
        recent: the last tokens protected.
        relevance: the weight of the score, from 0 (likeness alone) to 1 (as `top-k`); lambda in the paper.
        on: what is compared, "keys" or "values".
        space: keys after RoPE, as stored ("post-rope"), or before it ("pre-rope"): their positions left out.

    The second best is the best once more:

    >>> keys = torch.tensor([[[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]])
    >>> view, scores = LayerView(keys=keys, values=keys), torch.tensor([[[3.0, 2.0, 1.0]]])
    >>> MMR(sinks=0, recent=0)(view, scores, torch.tensor([[2]])).tolist()
    [[[0, 2]]]
    """

    name = "mmr"
    source = "Carbonell and Goldstein, The use of MMR, SIGIR 1998; for a cache: kvpolicy"
    formula = "argmax_i lambda * s_i - (1 - lambda) * max_j cos(k_i, k_j), j over what is kept"
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
        directions = units(vectors(view, self.on, self.space).where(view.valid[..., None], 0))
        score = min_max(scores, view.candidates)

        def gain(alike: Tensor) -> Tensor:
            return self.relevance * score - (1 - self.relevance) * alike

        def add(alike: Tensor, new: Tensor) -> Tensor:
            return torch.maximum(alike, (directions @ new.mT).squeeze(-1))

        return greedy(view, directions, lengths, torch.full_like(score, -1), gain, add)


@hookimpl
def kvpolicy_selectors() -> list[type]:
    """Return the selectors of this module."""
    return [MMR]
