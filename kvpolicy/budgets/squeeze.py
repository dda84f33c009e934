"""SqueezeAttention: layers whose attention changes little keep a part of the mean, and the others share the rest."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from einops import repeat
from torch import Tensor

from kvpolicy.budgets.uniform import UniformLayers
from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import exact
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs

# Splits are as good where they differ by what rounding makes of sums of squares.
_SLACK = 1e-9


@settings
class SqueezeLayers:
    """Layers are clustered by how alike the tokens are before and after attention; those of the highest are squeezed.

    Each of them keeps `p` times the mean, and the other layers share evenly what that frees. The clusters are those of
    k-means at its optimum: of all ways to cut the layers, in order of their similarity, into `groups`, the one with the
    least sum of squares; of equally good ones the one that squeezes fewest. Layers that are equal stay together, and
    with fewer different ones than groups all keep the mean. In whole slots: a squeezed layer's are rounded down, and
    fractions go to the first of the others; what these cannot hold goes back.

    What is protected is kept in any layer: protect less than `p` of the mean, or layers are squeezed to that alone.
    Nothing is evicted before all layers have read the whole prompt. Which slots a layer keeps, the score says.

    Args:
        p: what share of the mean a squeezed layer keeps; more where the others, being few, cannot hold what it frees.
            The authors found 0.3 to 0.4 best.
        groups: how many clusters.

    Two of four layers hardly change what goes through them, and there are 20 slots for each:

    >>> notes = torch.tensor([0.2, 0.97, 0.5, 0.96]).view(1, 4, 1, 1)
    >>> SqueezeLayers(p=0.5).share(notes, torch.tensor([20]), torch.tensor([99]), torch.tensor([4]), layers=4).tolist()
    [[30, 10, 30, 10]]
    """

    name = "squeeze"
    stage = "layers"
    source = "SqueezeAttention, arXiv 2404.04793"
    formula = "K_l = p * mean in the cluster of the highest mean_t cos(h_t, h_t + attention_t); others share the rest"
    cost = "time O(n d + L^2), memory O(n + L^2), d the size of the residual stream"
    needs = Needs(change=True)
    p: Annotated[float, Gt(0), Le(1)] = 0.35
    groups: Annotated[int, Ge(2), Le(100)] = 3

    def __call__(self, tokens: Tensor, available: Tensor, layers: int) -> Tensor:
        """Return int64 ``[B, layers]``, all alike: nothing is known of the layers yet."""
        return UniformLayers()(tokens, available, layers)

    def note(self, view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
        """Return the layer's similarity, float32 ``[B, Hkv, 1]``, the same in each head.

        Args:
            view: the slots.
            scores: not used: how much a layer's attention changes is the same whatever the score.
            tokens: not used.
        """
        return repeat(view.similarity, "b -> b h 1", h=view.kv_heads)  # type: ignore[return-value]

    def share(self, notes: Tensor, tokens: Tensor, available: Tensor, protected: Tensor, layers: int) -> Tensor:
        """Return int64 ``[B, l]``, the slots a KV head: all there are until all layers are read, then each layer's.

        Args:
            notes: float32 ``[B, l, Hkv, 1]``.
            tokens: int64 ``[B]``, the budget in slots a KV head, mean over layers.
            available: int64 ``[B]``, how many slots there are to keep.
            protected: int64 ``[B]``, how many slots a head every layer keeps.
            layers: how many layers share the budget.
        """
        if notes.shape[1] < layers:
            return available[:, None].repeat(1, notes.shape[1])
        mean, part = torch.minimum(tokens, available), exact(self.p)
        squeezed = highest_cluster(notes[:, :, 0, 0].double(), self.groups)
        count = squeezed.sum(-1)
        least = torch.maximum(mean * part.numerator // part.denominator, protected)
        rest = torch.minimum(layers * mean - count * least, (layers - count) * available)
        return _evenly(layers * mean - rest, squeezed) + _evenly(rest, ~squeezed)


def highest_cluster(values: Tensor, groups: int) -> Tensor:
    """Return which values are in the highest cluster of their row, bool ``[B, L]``; none where too few differ.

    Args:
        values: float64 ``[B, L]``.
        groups: how many clusters, of which the sum of squares around their means is least; of equally good ones, those
            with the smallest highest cluster.

    >>> highest_cluster(torch.tensor([[9.0, 1.0, 8.0, 4.0], [1.0, 1.0, 2.0, 2.0]]).double(), 3).tolist()
    [[True, False, True, False], [False, False, False, False]]
    """
    ordered = values.sort(-1).values
    size, none = values.shape[1], values.new_full((), torch.inf)
    costs = _costs(ordered)
    # Equal values stay together: a cluster begins where they rise.
    rises = torch.cat([ordered.new_zeros(len(ordered), 1), ordered.diff(dim=-1)], dim=-1) > 0
    least = costs[:, 0]
    for _ in range(groups - 1):
        # By where the last cluster begins, and where it ends.
        before = torch.cat([none.expand(len(values), 1), least[:, :-1]], dim=-1).where(rises, none)
        cuts = before[:, :, None] + costs
        least = cuts.amin(1)
    last, best = cuts[:, :, -1], least[:, -1:]
    good = (last <= best * (1 + _SLACK)) & (best < torch.inf)
    begin = (good * torch.arange(size, device=values.device)).amax(-1, keepdim=True)
    return good.any(-1, keepdim=True) & (values >= ordered.gather(-1, begin))


def _costs(ordered: Tensor) -> Tensor:
    """Return the sum of squares of the values from i to j around their mean, float64 ``[B, L, L]``; inf where i > j.

    Value by value, so that nothing is lost where values are close to each other and far from 0.

    Args:
        ordered: float64 ``[B, L]``.
    """
    size = ordered.shape[1]
    costs = ordered.new_full((len(ordered), size, size), torch.inf)
    mean, sums = torch.zeros_like(ordered), torch.zeros_like(ordered)
    for end in range(size):
        count = torch.arange(end + 1, 0, -1, device=ordered.device)
        off = ordered[:, end : end + 1] - mean[:, : end + 1]
        sums[:, : end + 1] += off.square() * (count - 1) / count
        mean[:, : end + 1] += off / count
        costs[:, : end + 1, end] = sums[:, : end + 1]
    return costs


def _evenly(total: Tensor, where: Tensor) -> Tensor:
    """Return `total` (int64 ``[B]``) in equal parts where `where` (bool ``[B, L]``) is True, fractions to the first."""
    count = where.sum(-1, keepdim=True).clamp(min=1)
    whole, more = total[:, None] // count, total[:, None] % count
    return (whole + (where.cumsum(-1) <= more)).where(where, 0)


@hookimpl
def kvpolicy_budgets() -> list[type]:
    """Return the budgets of this module."""
    return [SqueezeLayers]
