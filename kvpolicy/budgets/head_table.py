"""Head table: budgets by how much each head of a model is known to matter, as HeadKV and DuoAttention share them."""

from __future__ import annotations

from functools import cached_property
from math import fsum
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
from annotated_types import Ge, Le, MinLen
from einops import rearrange
from pydantic import BeforeValidator
from torch import Tensor

from kvpolicy.budgets.head_file import read
from kvpolicy.budgets.uniform import UniformLayers
from kvpolicy.errors import SettingError
from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import ranks
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView


def _as_tuples(value: object) -> object:
    return tuple(tuple(row) if isinstance(row, list) else row for row in value) if isinstance(value, list) else value


_Row = Annotated[tuple[Annotated[float, Ge(0)], ...], MinLen(1)]
Table = Annotated[tuple[_Row, ...], MinLen(1), BeforeValidator(_as_tuples)]
"""A list of layers, each a list with the score of every KV head."""


def weights(owner: str, scores: Table, beta: float) -> list[list[float]]:
    """Return each head's part of the budget, layer by layer, of mean 1: ``1 - 1/beta + S/beta``.

    S is the table over its mean: the heads' shares, times how many heads there are.

    Raises:
        SettingError: when layers differ in length, or all scores are 0.

    >>> weights("x", ((1.0, 0.0), (2.0, 1.0)), beta=2)
    [[1.0, 0.5], [1.5, 1.0]]
    """
    if len({len(row) for row in scores}) > 1:
        message = "expected as many scores in each layer"
        raise SettingError(owner, [(("scores",), "value_error", message, [len(row) for row in scores])])
    mean = fsum(map(fsum, scores)) / (len(scores) * len(scores[0]))
    if not mean:
        raise SettingError(owner, [(("scores",), "value_error", "expected a score above 0", scores)])
    return [[1 - 1 / beta + score / mean / beta for score in row] for row in scores]


def table(owner: str, scores: Table | None, file: Path | None) -> Table:
    """Return the table that is given, or that in the file that is.

    Raises:
        SettingError: when neither or both are given, or the file is of another kind.
    """
    if (scores is None) == (file is None):
        found = {"scores": scores, "file": None if file is None else str(file)}
        raise SettingError(owner, [((), "value_error", "expected exactly one of 'scores' and 'file'", found)])
    if file is None:
        return scores  # type: ignore[return-value]
    try:
        return read(file)
    except ValueError as error:
        raise SettingError(owner, [(("file",), "value_error", str(error), str(file))]) from None


def of_kv_heads(scores: Table, kv_heads: int) -> Table:
    """Return a table with the mean score of the query heads that share a KV head.

    >>> of_kv_heads(((1.0, 0.0, 0.5, 0.5),), 2)
    ((0.5, 0.5),)
    """
    group = len(scores[0]) // kv_heads
    return tuple(tuple(fmean(row[head * group : (head + 1) * group]) for head in range(kv_heads)) for row in scores)


def lowest(scores: Table, share: float) -> set[tuple[int, int]]:
    """Return the layer and head of the `share` of all scores that are lowest; of equal ones, the first.

    >>> sorted(lowest(((1.0, 0.0), (0.5, 0.5)), 0.5))
    [(0, 1), (1, 0)]
    """
    places = [(layer, head) for layer, row in enumerate(scores) for head in range(len(row))]
    places.sort(key=lambda place: scores[place[0]][place[1]])
    return set(places[: round(share * len(places))])


def shared_out(parts: list[float], least: Tensor, most: Tensor, total: Tensor, limit: int) -> Tensor:
    """Return whole numbers from `least` to `most`, as near to `parts` as that and their sum allow, int64 ``[B, n]``.

    Slot by slot, the next one goes to whom it leaves furthest below its part (Webster's method): the largest
    ``part / (slots + 1/2)``; of equal ones, to who has fewer, then to the earlier. Between 0 parts this is evenly.

    Args:
        parts: n numbers, 0 or more.
        least: int64 ``[B, n]``.
        most: int64 ``[B, n]``, at most `limit`.
        total: int64 ``[B]``, their sum.
        limit: how far is counted.

    >>> one = torch.tensor([[1, 1, 1]])
    >>> shared_out([3.0, 1.0, 0.0], one, 6 * one, torch.tensor([9]), 6).tolist()
    [[6, 2, 1]]
    """
    slot = torch.arange(limit, device=least.device)
    due = torch.tensor(parts, dtype=torch.float64, device=least.device)
    quotients = (due[:, None] / (slot + 0.5)).expand(len(least), -1, -1)
    quotients = quotients.where(slot >= least[..., None], torch.inf).where(slot < most[..., None], -torch.inf)
    won = ranks(rearrange(quotients, "b n t -> b (t n)")) < total[:, None]
    return rearrange(won, "b (t n) -> b n t", n=len(parts)).sum(-1)


@settings
class HeadTotals:
    """Every layer keeps what its heads are due of the whole, by the same table as `head-table`.

    With `head-table` of the same settings, this is HeadKV's allocation over all heads of a model. It takes a model all
    of whose layers evict.

    Args:
        scores: of every head, layer by layer, 0 or more.
        file: a file with them instead, ``.tsv`` of DuoAttention or ``.json`` of HeadKV; in a policy file, a path
            relative to it.
        beta: how much of the budget follows the scores: ``1/beta`` of it; the rest is the same for all.

    >>> share = HeadTotals(scores=[[1, 0], [2, 1]], beta=1)
    >>> share(torch.tensor([8]), torch.tensor([99]), layers=2).tolist()
    [[4, 12]]
    """

    name = "head-totals"
    stage = "layers"
    source = "HeadKV, arXiv 2410.19258, section 4.2 and its code"
    formula = "K_l = mean_h K * (1 - 1/beta + S_lh / (beta * mean S))"
    cost = "time O(n L log(n L)), memory O(n L)"
    scores: Table | None = None
    file: Path | None = None
    beta: Annotated[float, Ge(1)] = 1.2

    def __post_init__(self) -> None:
        weights(self.name, self._table, self.beta)

    @cached_property
    def _table(self) -> Table:
        return table(self.name, self.scores, self.file)

    def __call__(self, tokens: Tensor, available: Tensor, layers: int) -> Tensor:
        """Return int64 ``[B, layers]``, first layer first, each from 1 to `available`.

        Args:
            tokens: int64 ``[B]``, the budget in slots a KV head, mean over layers.
            available: int64 ``[B]``, how many slots there are to keep.
            layers: how many layers share the budget.

        Raises:
            SettingError: when the table has more or fewer layers.
        """
        if len(self._table) != layers:
            message = f"expected the heads of {layers} layers, as the model has that evict"
            raise SettingError(self.name, [(("scores",), "value_error", message, len(self._table))])
        even = UniformLayers()(tokens, available, layers)
        parts = [fsum(row) / len(row) for row in weights(self.name, self._table, self.beta)]
        most = available[:, None].expand(-1, layers)
        return shared_out(parts, even.clamp(max=1), most, even.sum(-1), int(available.max()))


@settings
class HeadTable:
    """The heads of a layer share its ``Hkv * K`` slots in the proportion of their scores in a table.

    Every head keeps its protected slots, and 1; none more than it has, and what it leaves goes to the others. Shares
    are rounded by Webster's method, so that they always add up, where HeadKV's code rounds each by itself.

    With `streaming` it is DuoAttention: streaming heads keep their sinks and recent tokens alone, whatever the budget
    leaves, and retrieval heads share all else: everything, where the budget has room.

    Args:
        scores: of every head, layer by layer, 0 or more; of query heads that share a KV head, their mean counts.
        file: a file with them instead, ``.tsv`` of DuoAttention or ``.json`` of HeadKV; in a policy file, a path
            relative to it.
        beta: how much of the budget follows the scores: ``1/beta`` of it; the rest is the same for all.
        streaming: the share of all heads of the model, those of the lowest scores, that keep protected slots alone;
            without it, none do.

    A head of all the worth, and one with 2 protected slots:

    >>> valid = torch.ones(1, 2, 9, dtype=torch.bool)
    >>> view = LayerView(keys=torch.zeros(1, 2, 9, 2), values=torch.zeros(1, 2, 9, 2))
    >>> view = view.decide(torch.arange(9).expand(1, 2, 9) % 8 > 0)
    >>> [HeadTable(scores=[[1, 0]], beta=1)(view, None, torch.tensor([size])).tolist() for size in (5, 6)]
    [[[8, 2]], [[9, 3]]]
    >>> HeadTable(scores=[[1, 0]], streaming=0.5)(view, None, torch.tensor([6])).tolist()
    [[9, 2]]
    """

    name = "head-table"
    stage = "heads"
    source = "HeadKV, arXiv 2410.19258, section 4.2 and its code; DuoAttention, arXiv 2410.10819"
    formula = "K_h in proportion to 1 - 1/beta + S_lh / (beta * mean S), at least the protected slots"
    cost = "time O(n log n), memory O(n)"
    scores: Table | None = None
    file: Path | None = None
    beta: Annotated[float, Ge(1)] = 1.2
    streaming: Annotated[float, Ge(0), Le(1)] | None = None

    def __post_init__(self) -> None:
        weights(self.name, self._table, self.beta)

    @cached_property
    def _table(self) -> Table:
        return table(self.name, self.scores, self.file)

    def __call__(self, view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
        """Return int64 ``[B, Hkv]``; a row's add up to ``Hkv * K``, or to what its heads may keep if that is less.

        Args:
            view: the slots; protected ones are valid and no candidates.
            scores: not read.
            tokens: int64 ``[B]``, K, the layer's budget in slots a KV head, mean over heads.

        Raises:
            SettingError: when the table does not have the view's layer and heads, or the heads keep the same slots.
        """
        fits = view.layer < len(self._table) and len(self._table[0]) % view.kv_heads == 0
        if not fits or view.shared:
            what = "one whose heads keep slots of their own" if fits else f"layer {view.layer}, {view.kv_heads} heads"
            size = f"{len(self._table)} layers, {len(self._table[0])} heads"
            raise SettingError(self.name, [(("scores",), "value_error", f"expected a table for {what}", size)])
        held = view.valid.sum(-1)
        least = torch.minimum((held - view.candidates.sum(-1)).clamp(min=1), held)
        scored = of_kv_heads(self._table, view.kv_heads)
        most = held
        if self.streaming is not None:
            streams = lowest(scored, self.streaming)
            here = [(view.layer, head) in streams for head in range(view.kv_heads)]
            most = least.where(torch.tensor(here, device=held.device), held)
        total = torch.minimum(view.kv_heads * tokens, most.sum(-1))
        parts = weights(self.name, scored, self.beta)[view.layer]
        return shared_out(parts, least, most, total, view.slots)


@hookimpl
def kvpolicy_budgets() -> list[type]:
    """Return the budgets of this module."""
    return [HeadTotals, HeadTable]
