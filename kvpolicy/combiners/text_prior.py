"""Text prior: what holds text is kept before what holds images (LOOK-M)."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import from_zero
from kvpolicy.plugin import Modalities, Score, settings
from kvpolicy.types import LayerView, Needs


@settings
class TextPrior:
    """An importance to which slots of text have the largest one of their head added, so that images go first.

    No image is kept before a text slot then, and at each end the importance decides. The largest is that of the
    candidates. A score that falls below 0 is shifted up first, by head: adding a largest one below 0 would turn the
    order round. The authors' code takes 65,516 off images, which puts the slots in the same order.

    Args:
        importance: the score that says how much a slot matters.
        of: the modalities that go first: of "text", "image", "video", "audio".

    >>> import torch
    >>> from kvpolicy.scorers.key_norm import KeyNorm
    >>> kinds = torch.tensor([[[0, 1, 1, 0]]], dtype=torch.int8)
    >>> view = LayerView(keys=torch.zeros(1, 1, 4, 2), values=torch.zeros(1, 1, 4, 2), modality=kinds)
    >>> TextPrior(importance=KeyNorm())(view, importance=torch.tensor([[[1.0, 5.0, 2.0, 3.0]]])).tolist()
    [[[6.0, 5.0, 2.0, 8.0]]]
    """

    name = "text-prior"
    source = "LOOK-M, arXiv 2406.18139, equation 5"
    formula = "importance + max_j importance_j where the slot holds text, else importance"
    cost = "time O(n), memory O(n)"
    needs = Needs(modality=True)
    importance: Score
    of: Modalities = ("text",)

    def __call__(self, view: LayerView, *, importance: Tensor) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, 0 or more, higher means keep.

        Args:
            view: says what each slot holds.
            importance: float32 ``[B, Hkv, T]``.
        """
        scores = from_zero(importance, view.candidates).where(view.candidates, 0)
        return scores + scores.amax(-1, keepdim=True) * view.holds(self.of)


@hookimpl
def kvpolicy_combiners() -> list[type]:
    """Return the combiners of this module."""
    return [TextPrior]
