"""By modality: one score for the slots of some modalities, another one for all others."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import Modalities, Score, settings
from kvpolicy.types import LayerView, Needs


@settings
class ByModality:
    """One score for the slots that hold some modalities, another one for all others.

    Each of the two sees its own slots as the only candidates, so that redundancy, centroids and normalisations of
    `inside` are those of images alone. A softmax of attention still runs over all slots.

    Both compete for one budget, as they are: give them one unit. Attention (`snapkv`), alone or as the importance of
    `redundancy-adaptive`, is one; other scores become alike with `fixed` around each of them (`normalize: rank`), or
    never meet with shares of the selector `by-modality`.

    Args:
        of: the modalities inside: of "text", "image", "video", "audio".
        inside: the score of slots that hold one of them.
        outside: the score of all others.

    >>> from kvpolicy.scorers.key_norm import KeyNorm
    >>> from kvpolicy.scorers.recency import Recency
    >>> import torch
    >>> kinds = torch.tensor([[[0, 1, 1, 0]]], dtype=torch.int8)
    >>> view = LayerView(keys=torch.zeros(1, 1, 4, 2), values=torch.zeros(1, 1, 4, 2), modality=kinds)
    >>> inside, outside = torch.full((1, 1, 4), 7.0), torch.full((1, 1, 4), 3.0)
    >>> ByModality(inside=KeyNorm(), outside=Recency())(view, inside=inside, outside=outside).tolist()
    [[[3.0, 7.0, 7.0, 3.0]]]
    """

    name = "by-modality"
    source = "kvpolicy"
    formula = "inside where the slot holds one of these modalities, else outside"
    cost = "time O(n), memory O(n)"
    needs = Needs(modality=True)
    of: Modalities = ("image", "video")
    inside: Score
    outside: Score

    def decides(self, view: LayerView) -> dict[str, Tensor]:
        """Return which slots each child decides, bool ``[B, Hkv, T]``."""
        mine = view.holds(self.of)
        return {"inside": mine, "outside": ~mine}

    def __call__(self, view: LayerView, *, inside: Tensor, outside: Tensor) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, higher means keep.

        Args:
            view: says what each slot holds.
            inside: float32 ``[B, Hkv, T]``, as `outside`; each counts at its own slots only.
            outside: float32 ``[B, Hkv, T]``.
        """
        return inside.where(view.holds(self.of), outside)


@hookimpl
def kvpolicy_combiners() -> list[type]:
    """Return the combiners of this module."""
    return [ByModality]
