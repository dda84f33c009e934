"""CaM: the value of an evicted slot is spread over the kept slots that follow it, by chance, as attention has it."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from kvpolicy.attention import window_attention
from kvpolicy.evicted.nearest import blocks, in_front
from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import noise
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Merged, Needs, Selection


@settings
class CaM:
    """An evicted slot's value is added, in equal parts, to the next kept slots of its head, by chance.

    The chance is its attention over the mean attention of kept slots that follow it, 1 at most: how often it goes in is
    how much it matters. Keys stay as they are, and a merged slot its position. Attention is that of the last queries,
    mean over the heads of the group.

    The method is one for decoding, where one slot is evicted at a time. What is evicted of a prompt at once is dropped,
    as in the authors' code: merged, the parts of many slots would pile up in the same kept ones. A cache that has
    evicted nothing yet counts as a prompt's. A part is a `merge_budget`-th also where fewer kept slots follow.

    The numbers that decide come from the seed, the layer, the head, the tokens seen and the slot's place alone, so that
    padding and batch mates change nothing, and a run repeats.

    Args:
        merge_budget: m, how many of the kept slots that follow share the value.
        among: whose mean attention the slot's own is compared with: "all" kept slots that follow it (the code), or the
            "next" m, which share it (CAMPress of kvpress).
        window: how many of the last queries say what attention is; the newest alone in the code.
        prompt: "drop" what is evicted of a prompt, or "merge" that too.
        seed: another seed, other numbers.

    >>> values = torch.tensor([[[[8.0], [1.0], [1.0]]]])
    >>> view = LayerView(keys=torch.zeros(1, 1, 3, 2), values=values, queries=torch.ones(1, 1, 1, 2))
    >>> kept = Selection(slots=torch.tensor([1, 2]), lengths=torch.tensor([[2]]))
    >>> CaM(merge_budget=2, prompt="merge")(view, kept, None).values.tolist()  # all attended to alike: a chance of 1
    [[5.0], [5.0]]
    """

    name = "cam"
    stage = "evicted"
    source = "CaM, ICML 2024 (Zhang et al.), its code; next: CAMPress of kvpress"
    formula = "v_j + b_i v_i / m, over the m kept j that follow i; b_i is 1 with chance min(a_i / mean_j a_j, 1)"
    merge_budget: Annotated[int, Ge(1)] = 32
    among: Literal["all", "next"] = "all"
    window: Annotated[int, Ge(1)] = 1
    prompt: Literal["drop", "merge"] = "drop"
    seed: Annotated[int, Ge(0), Lt(2**47)] = 0

    @property
    def needs(self) -> Needs:
        """The values, and the attention of the last queries."""
        return Needs(queries=self.window, keys=True, values=True)

    def __call__(self, view: LayerView, selection: Selection, memory: Tensor | None) -> Merged | None:
        """Return the kept slots' keys as they are and their values with the evicted in them; None where none goes in.

        Args:
            view: the layer's slots.
            selection: the slots that are kept.
            memory: not read.
        """
        keep = selection.to_mask(view.slots)
        evicted = view.valid & ~keep
        if self.prompt == "drop":
            evicted = evicted & (view.valid.sum(-1) < view.seen[:, None])[..., None]
        if not evicted.any():
            return None
        first = keep.cumsum(-1)
        merged = evicted & (self._uniform(view) < self._chance(view, keep, first))
        if not merged.any():
            return None
        return Merged(selection.take(view.keys), self._values(view, selection, merged, first))

    def _chance(self, view: LayerView, keep: Tensor, first: Tensor) -> Tensor:
        """Return with what chance the value of each slot is merged, ``[B, Hkv, T]``; `first`: kept slots up to it."""
        attention = window_attention(view).mean(2).double()
        kept, held = in_front(keep)
        # Differences of sums: in float64 they are as exact as attention is.
        sums = attention.gather(-1, kept).where(held, 0).cumsum(-1)
        sums = torch.cat([sums.new_zeros(*sums.shape[:2], 1), sums], dim=-1)
        last = keep.sum(-1, keepdim=True).expand_as(first)
        if self.among == "next":
            last = torch.minimum(first + self.merge_budget, last)
        mean = (sums.gather(-1, last) - sums.gather(-1, first)) / (last - first).clamp(min=1)
        # Where no mean is above 0 a slot that is attended to at all goes in, if any follow to take it.
        return (attention / mean.where(mean > 0, 1)).where(mean > 0, (attention > 0).double())

    def _values(self, view: LayerView, selection: Selection, merged: Tensor, first: Tensor) -> Tensor:
        """Return the values of the kept slots with those of the `merged` ones, ``[N, Dv]``."""
        old = selection.take(view.values)
        exact = torch.promote_types(old.dtype, torch.float32)
        values = old.to(exact)
        row, head, slot = merged.nonzero(as_tuple=True)
        ends = selection.lengths.flatten().cumsum(0).view(selection.lengths.shape)
        start = (ends - selection.lengths)[row, head] + first[row, head, slot]
        ahead = torch.arange(min(self.merge_budget, int(selection.lengths.max())), device=old.device)
        for part in blocks(len(slot), len(ahead) * old.shape[-1], old.device):
            into = start[part, None] + ahead
            there = into < ends[row[part], head[part], None]
            shares = view.values[row[part], head[part], slot[part]].to(exact) / self.merge_budget
            values.index_put_((into[there],), shares[there.nonzero()[:, 0]], accumulate=True)
        return values.to(old.dtype)

    def _uniform(self, view: LayerView) -> Tensor:
        """Return a number in [0, 1) for each slot, ``[B, Hkv, T]``."""
        rows: list[Tensor] = []
        for seen in view.seen.tolist():
            number = (self.seed * 100_003 + view.layer) * 1_000_003 + seen
            rows.append(noise(view.valid[len(rows) : len(rows) + 1], number % 2**63))
        return torch.cat(rows)


@hookimpl
def kvpolicy_evicted() -> list[type]:
    """Return what this module makes of the evicted."""
    return [CaM]
