"""Chunks: tokens that stand together stay together."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import ranks
from kvpolicy.plugin import settings
from kvpolicy.selectors.ends import ends
from kvpolicy.types import LayerView, Selection


@settings
class Chunks:
    """The chunks of the best mean score, whole; of the one that no longer fits, its best-scored slots.

    A head's slots are cut into chunks of `length`, from its first one on; the last chunk may be shorter. Protected
    slots have no part in the mean. All but one of the chunks that are chosen are kept whole: with the size of a page as
    length, what is evicted are pages. Equal chunks: the earlier one wins.

    While decoding, chunks are cut anew from the slots that are left. Where the heads of a layer are on several ranks
    (tensor parallelism), those of one rank choose their chunks together.

    Args:
        sinks: the first tokens protected.
        recent: the last tokens protected.
        length: slots of a chunk.
        heads: whether the heads of a layer choose their chunks "together", by the sum of their scores, as in kvpress,
            or "apart".

    >>> view = LayerView(keys=torch.zeros(1, 1, 6, 2), values=torch.zeros(1, 1, 6, 2))
    >>> scores = torch.tensor([[[9.0, 0.0, 5.0, 5.0, 1.0, 2.0]]])
    >>> Chunks(sinks=0, recent=0, length=2)(view, scores, torch.tensor([[3]])).tolist()
    [[[0, 2, 3]]]
    """

    name = "chunks"
    source = "ChunkKV, arXiv 2502.00299, algorithm 1, as ChunkKVPress of kvpress; sinks: StreamingLLM, arXiv 2309.17453"
    formula = "sinks + recent + the chunks of the highest mean score, K_h slots a head"
    cost = "time O(n log n), memory O(n)"
    sinks: Annotated[int, Ge(0)] = 4
    recent: Annotated[int, Ge(0)] = 8
    length: Annotated[int, Ge(1)] = 20
    heads: Literal["together", "apart"] = "together"

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
            view: its candidates are chosen by score; valid slots that are no candidates are kept first.
            scores: float32 ``[B, Hkv, T]``, finite on candidates, higher means keep.
            lengths: how many slots each head keeps.
        """
        chunk = (view.valid.cumsum(-1) - 1).clamp(min=0) // min(self.length, view.slots)
        best = ranks(self._means(view, scores)).gather(-1, chunk)
        # Whole numbers: no score, however large, moves a slot into another chunk's place.
        order = best * view.slots + ranks(scores.where(view.candidates, -torch.inf))
        order = order.where(view.candidates, -1).where(view.valid, view.slots**2 + view.slots)
        return Selection.from_mask(ranks(-order) < lengths[..., None], layer=view.layer)

    def _means(self, view: LayerView, scores: Tensor) -> Tensor:
        """Return the mean score of the candidates of each chunk, ``[B, Hkv, chunks]``; -inf without any."""
        valid_first = (~view.valid).int().argsort(dim=-1, stable=True)
        length = min(self.length, view.slots)
        rest = -view.slots % length
        parts = [pad(each.gather(-1, valid_first), (0, rest)) for each in (scores, view.candidates)]
        scores, counted = (rearrange(each, "b h (n c) -> b h n c", c=length) for each in parts)
        if self.heads == "together":
            scores, counted = (rearrange(each, "b h n c -> b 1 n (h c)") for each in (scores, counted))
        count = counted.sum(-1, keepdim=True)
        # Divided first: a sum of large scores could overflow.
        means = (scores.where(counted, 0) / count.clamp(min=1)).sum(-1).where(count.squeeze(-1) > 0, -torch.inf)
        return means.expand(-1, view.kv_heads, -1)


@hookimpl
def kvpolicy_selectors() -> list[type]:
    """Return the selectors of this module."""
    return [Chunks]
