"""By modality: a share of each head's slots for each modality, and modalities that go before all others."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvpolicy.errors import SettingError
from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import exact, newest, ranks
from kvpolicy.plugin import Modalities, settings
from kvpolicy.selectors.ends import ends
from kvpolicy.types import LayerView, Modality, Needs, Selection


@settings
class ByModality:
    """Top-k within a share for each modality; sinks, recent tokens and whole modalities are protected.

    Of the K slots that a head keeps, protected ones among them, a modality with a share gets its ``share * K``, rounded
    so that they add up (the largest remainder first), and fills them with its best-scored slots. What it cannot fill
    goes to the best-scored slots of all others, whatever they hold; so goes everything without shares. Where protected
    slots take more than their modality's share, the least-scored slots within the shares of the others give way.

    Slots of the modalities in `protected` are kept before all others but sinks and recent tokens; where a head cannot
    keep them all, the newest.

    Args:
        sinks: the first tokens protected.
        recent: the last tokens protected.
        shares: by modality, its share of a head's slots, adding up to 1.
        protected: the modalities that are kept whatever their score.

    Half of four slots is for text, though images score higher:

    >>> kinds = torch.tensor([[[0, 0, 0, 1, 1, 1]]], dtype=torch.int8)
    >>> view = LayerView(keys=torch.zeros(1, 1, 6, 2), values=torch.zeros(1, 1, 6, 2), modality=kinds)
    >>> scores = torch.tensor([[[1.0, 3.0, 2.0, 7.0, 9.0, 8.0]]])
    >>> select = ByModality(sinks=0, recent=0, shares={"text": 0.5, "image": 0.5})
    >>> select(view, scores, torch.tensor([[4]])).tolist()
    [[[1, 2, 4, 5]]]
    """

    name = "by-modality"
    source = "kvpolicy; sinks: StreamingLLM, arXiv 2309.17453"
    formula = "protected slots + the highest scores of each modality within its share of K_h + the highest of the rest"
    cost = "time O(n log n), memory O(n)"
    needs = Needs(modality=True)
    sinks: Annotated[int, Ge(0)] = 4
    recent: Annotated[int, Ge(0)] = 8
    shares: dict[Modality, Annotated[float, Ge(0), Le(1)]] | None = field(default=None, hash=False)
    protected: Modalities | None = None

    def __post_init__(self) -> None:
        if self.shares is not None and sum(map(exact, self.shares.values())) != 1:
            message = "expected shares that add up to 1"
            raise SettingError(self.name, [(("shares",), "value_error", message, self.shares)])

    @property
    def protects(self) -> int:
        """Sinks and recent together: how much else there is depends on the prompt."""
        return self.sinks + self.recent

    def protect(self, view: LayerView, tokens: Tensor) -> Tensor:
        """Return bool ``[B, Hkv, T]``, True for the protected slots; `tokens` (``[B]``) bounds them."""
        found = ends(view, tokens, self.sinks, self.recent)
        if self.protected is None:
            return found
        more = view.valid & view.holds(self.protected) & ~found
        room = tokens[:, None, None] - found.sum(-1, keepdim=True)
        return found | newest(more, room)

    def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Selection:
        """Return the kept slots, `lengths` (int64 ``[B, Hkv]``) of them a head.

        Args:
            view: its candidates are chosen by score; valid slots that are no candidates are kept first.
            scores: float32 ``[B, Hkv, T]``, finite on candidates, higher means keep.
            lengths: how many slots each head keeps.
        """
        protected = view.valid & ~view.candidates
        granted = torch.zeros_like(protected)
        for modality, quota in self._quotas(lengths).items():
            mine = view.holds([modality])
            room = quota[..., None] - (mine & protected).sum(-1, keepdim=True)
            own = mine & view.candidates
            granted |= own & (ranks(scores.where(own, -torch.inf)) < room)
        # Whole numbers: no score, however large, pushes a protected slot out.
        order = ranks(scores.where(view.candidates, -torch.inf)) + view.slots * (~granted).int()
        order = order.where(view.valid, 2 * view.slots).where(~protected, -1)
        return Selection.from_mask(ranks(-order) < lengths[..., None], layer=view.layer)

    def _quotas(self, lengths: Tensor) -> dict[Modality, Tensor]:
        """Return for each modality with a share how many of a head's slots it is due, int64 ``[B, Hkv]``."""
        if self.shares is None:
            return {}
        shares = [*self.shares.values()]
        found = [[_apportioned(shares, length) for length in row] for row in lengths.tolist()]
        return dict(zip(self.shares, lengths.new_tensor(found).unbind(-1), strict=True))


def _apportioned(shares: list[float], total: int) -> list[int]:
    """Return `total` split into whole numbers by shares that add up to 1, the largest remainders rounded up.

    >>> _apportioned([0.25, 0.25, 0.5], 7)
    [2, 2, 3]
    """
    parts = [exact(share) * total for share in shares]
    whole = [int(part) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda place: whole[place] - parts[place])
    for place in by_remainder[: total - sum(whole)]:
        whole[place] += 1
    return whole


@hookimpl
def kvpolicy_selectors() -> list[type]:
    """Return the selectors of this module."""
    return [ByModality]
