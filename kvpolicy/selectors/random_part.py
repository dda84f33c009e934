"""Random part: some of the slots are drawn, the likelier the higher their score (NACL)."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import HUGE, exact, noise, ranks
from kvpolicy.plugin import settings
from kvpolicy.selectors.ends import ends
from kvpolicy.types import LayerView, Selection


@settings
class RandomPart:
    """The best-scored slots of each head, and some of the others by chance, so that no bias of the score decides all.

    Of the slots that a head keeps besides the protected ones, a share is drawn without replacement from those that the
    score leaves, by the softmax of their scores. The numbers that decide come from the seed, the layer, the head and a
    slot's place among the valid slots alone: padding and batch mates change nothing, and a run repeats.

    Args:
        sinks: the first tokens protected.
        recent: the last tokens protected.
        random: the share that is drawn, rounded down.
        temperature: what scores are divided by in the softmax; lower is nearer to `top-k`.
        seed: another seed, other numbers.

    Two of four slots are drawn, at a low temperature the best:

    >>> view = LayerView(keys=torch.zeros(1, 1, 6, 2), values=torch.zeros(1, 1, 6, 2))
    >>> scores, four = torch.tensor([[[6.0, 5.0, 4.0, 3.0, 2.0, 1.0]]]), torch.tensor([[4]])
    >>> for temperature in (0.1, 3.0):
    ...     RandomPart(sinks=0, recent=0, random=0.5, temperature=temperature)(view, scores, four).tolist()
    [[[0, 1, 2, 3]]]
    [[[0, 1, 4, 5]]]
    """

    name = "random-part"
    source = "NACL, arXiv 2408.03675, its random eviction and its code"
    formula = "sinks + recent + the highest scores + those drawn with p_i = softmax_i(s_i / temperature)"
    cost = "time O(n log n), memory O(n)"
    sinks: Annotated[int, Ge(0)] = 4
    recent: Annotated[int, Ge(0)] = 8
    random: Annotated[float, Ge(0), Le(1)] = 0.3685
    temperature: Annotated[float, Gt(0)] = 1.0
    seed: Annotated[int, Ge(0), Lt(2**47)] = 0

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
        protected = view.valid & ~view.candidates
        free = (lengths - protected.sum(-1))[..., None]
        share = exact(self.random)
        drawn = share.numerator * free // share.denominator
        best = view.candidates & (ranks(scores.where(view.candidates, -torch.inf)) < free - drawn)
        others = view.candidates & ~best
        # The highest sums of score and Gumbel noise are a draw without replacement by the softmax.
        tickets = (scores / self.temperature).clamp(-HUGE, HUGE) + self._gumbel(view)
        keep = protected | best | (others & (ranks(tickets.where(others, -torch.inf)) < drawn))
        return Selection.from_mask(keep, layer=view.layer)

    def _gumbel(self, view: LayerView) -> Tensor:
        # Heads that keep the same slots draw the same.
        valid = view.valid[:, :1] if view.shared else view.valid
        # Neither 0 nor 1, whose logarithms would be none.
        uniform = noise(valid, self.seed * 100_003 + view.layer).double().clamp(min=2.0**-25)
        return -(-uniform.log()).log().expand_as(view.valid)


@hookimpl
def kvpolicy_selectors() -> list[type]:
    """Return the selectors of this module."""
    return [RandomPart]
