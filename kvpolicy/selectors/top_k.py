"""Top-k: the best-scored slots of each head, with sinks and recent tokens protected by index."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt
from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import ranks
from kvpolicy.plugin import settings
from kvpolicy.selectors.ends import ends
from kvpolicy.types import LayerView, Selection


def _tokens_or_share(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Return what `check` makes of a value; of one that is neither, one error that names both."""
    try:
        return check(value)
    except ValidationError:
        raise ValueError("expected whole tokens from 0 (8), or a share above 0 and below 1 (0.5)") from None


Recent = Annotated[Annotated[int, Ge(0)] | Annotated[float, Gt(0), Lt(1)], WrapValidator(_tokens_or_share)]
"""How many of the last tokens are protected: whole tokens, or a share."""


@settings
class TopK:
    """The best-scored slots of each head; the first `sinks` and the last `recent` are kept whatever their score.

    A budget too small for both (a short prompt under a share, a layer at the thin end of a pyramid) keeps the last
    token, then sinks, then recent tokens, newest first. Equal scores: the earlier slot wins.

    Args:
        sinks: the first tokens protected.
        recent: the last tokens protected; or a share of the layer's budget without the sinks, in (0, 1), rounded down.

    >>> view = LayerView(keys=torch.zeros(1, 1, 6, 2), values=torch.zeros(1, 1, 6, 2))
    >>> select = TopK(sinks=1, recent=1)
    >>> view = view.decide(~select.protect(view, torch.tensor([4])))
    >>> select(view, torch.tensor([[[0.0, 3.0, 1.0, 9.0, 2.0, 0.0]]]), torch.tensor([[4]])).tolist()
    [[[0, 1, 3, 5]]]
    """

    name = "top-k"
    source = "sinks: StreamingLLM, arXiv 2309.17453"
    formula = "sinks + recent + the highest scores, K_h slots a head"
    cost = "time O(n log n), memory O(n)"
    sinks: Annotated[int, Ge(0)] = 4
    recent: Recent = 8

    @property
    def protects(self) -> int:
        """Sinks and recent together; a share of recent tokens fits into any budget."""
        return self.sinks + (self.recent if isinstance(self.recent, int) else 0)

    def protect(self, view: LayerView, tokens: Tensor) -> Tensor:
        """Return bool ``[B, Hkv, T]``, True for the protected slots; `tokens` (``[B]``) bounds them."""
        return ends(view, tokens, self.sinks, self.recent)

    def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Selection:
        """Return the kept slots, `lengths` (int64 ``[B, Hkv]``) of them a head.

        Args:
            view: its candidates are chosen by score; valid slots that are no candidates are kept first.
            scores: float32 ``[B, Hkv, T]``, finite on candidates, higher means keep.
            lengths: how many slots each head keeps.
        """
        protected = view.valid & ~view.candidates
        order = scores.where(view.candidates, -torch.inf).where(~protected, torch.inf)
        return Selection.from_mask(ranks(order) < lengths[..., None], layer=view.layer)


@hookimpl
def kvpolicy_selectors() -> list[type]:
    """Return the selectors of this module."""
    return [TopK]
