"""Results as tables: one for each task and mode, a row for each policy and budget, with intervals."""

from __future__ import annotations

import json
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpolicy.errors import nearest
from kvpolicy.eval.asked import PREFIX
from kvpolicy.eval.cells import Cell, ResultError, digest, of_other_examples
from kvpolicy.eval.gaps import Gap, gaps
from kvpolicy.eval.results import Result
from kvpolicy.eval.statistics import Interval, interval

Scores = dict[tuple[int, int], float]
"""One score by seed and number of the example."""


@dataclass(frozen=True)
class Row:
    """A policy at a budget.

    Args:
        policy: its name.
        budget: slots a KV head, or a share of the tokens seen; None where it keeps everything.
        examples: how many.
        bytes: of keys and values kept, mean over examples.
        bytes_full: that a full cache would hold.
        scores: by name.
        differences: from the baseline, on the same examples; empty without one.
        front: whether no other row is better in the first score or in bytes without being worse in the other.
    """

    policy: str
    budget: int | float | None
    examples: int
    bytes: float
    bytes_full: float
    scores: dict[str, Interval]
    differences: dict[str, Interval]
    front: bool = False


@dataclass(frozen=True)
class Table:
    """The rows of one task in one mode.

    Args:
        model: its name.
        task: its kind as ``task``, and its settings.
        mode: whether the question is in view when policies decide.
        scores: what is measured, by name, and whether more is better; none where nothing is there yet.
        rows: by budget, the largest first; of one budget, the best first; none where nothing is there yet.
        gaps: what was asked for and is not there; None where nothing says what was asked for.
        unscored: rows, in words, whose budget is a share of the context that protected slots take whole.
    """

    model: str
    task: dict[str, Any]
    mode: str
    scores: dict[str, bool]
    rows: list[Row]
    gaps: list[Gap] | None
    unscored: Sequence[str] = ()

    @property
    def title(self) -> str:
        """Its task and mode."""
        return self.task["task"] if self.mode == "either" else f"{self.task['task']}, {self.mode}"

    @property
    def about(self) -> str:
        """The model and the task's settings, in a line."""
        settings = [f"{name} {value}" for name, value in self.task.items() if name != "task"]
        return ", ".join([f"model {self.model}", *settings])


def tables(results: Sequence[Result], baseline: str | None = None, asked: Sequence[Cell] = ()) -> list[Table]:
    """Return the tables of results, and of what was asked for.

    Args:
        results: as `read_results` returns them.
        baseline: name of a policy from which the differences of others are given, each at the same budget.
        asked: for what the folder was asked, as `read_asked` returns it.

    Raises:
        ResultError: when no result is of the baseline, or results of one task are of different texts.
    """
    if baseline is not None:
        known = {result.cell.policy["name"] for result in results}
        if baseline not in known:
            raise ResultError(f"expected a baseline among the results, got {baseline!r}.{nearest(baseline, known)}")
    there = {result.cell.name: result for result in results}
    wanted = {cell.name: cell for cell in asked}
    groups: dict[str, list[Cell]] = {}
    for cell in {**{name: result.cell for name, result in there.items()}, **wanted}.values():
        key = json.dumps([cell.model, cell.weights, cell.task], sort_keys=True)
        groups.setdefault(key, []).append(cell)
    found = []
    for _, group in sorted(groups.items()):
        _require_one_text(group, there)
        modes = sorted({cell.mode for cell in group} - {"either"}) or ["either"]
        for mode in modes:
            of_mode = [cell for cell in group if cell.mode in (mode, "either")]
            table = _table(mode, of_mode, there, baseline)
            is_asked = any(cell.mode == mode and cell.name in wanted for cell in of_mode)
            found.append(table if is_asked else replace(table, gaps=None))
    return found


def _require_one_text(cells: Iterable[Cell], there: Container[str]) -> None:
    unlike = of_other_examples(cells)
    if unlike is None:
        return
    which = [f"{one.name}{'' if one.name in there else ' (asked for)'}" for one in unlike]
    unasked = "" if all(one.name in there for one in unlike) else f", or remove the {PREFIX}*.jsonl of one"
    raise ResultError(
        f"results {' and '.join(which)}: expected the same examples of {unlike[0].task['task']}, got those of two "
        f"texts, tokenizers or releases of Python: keep each in a folder of its own{unasked}"
    )


def _table(mode: str, cells: Sequence[Cell], there: Mapping[str, Result], baseline: str | None) -> Table:
    """Return the table of one task in one mode; several seeds of a policy are examples of one row."""
    by_policy: dict[str, list[Cell]] = {}
    for cell in cells:
        by_policy.setdefault(digest(cell.policy), []).append(cell)
    named = list(zip(_names(by_policy.values()), by_policy.values(), strict=True))
    table = Table(cells[0].model, cells[0].task, mode, {}, [], list(gaps(named, there)))
    measured = [(name, [there[cell.name] for cell in group if cell.name in there]) for name, group in named]
    groups = [(name, group) for name, group in measured if group]
    return _filled(table, groups, baseline) if groups else table


def _filled(table: Table, groups: Sequence[tuple[str, Sequence[Result]]], baseline: str | None) -> Table:
    """Return a table with its scores and rows, one for each policy at each budget that has results."""
    scores: dict[str, bool] = groups[0][1][0].header["scores"]
    reference = {
        group[0].cell.budget: _by_example(group, scores)
        for _, group in groups
        if group[0].cell.policy["name"] == baseline
    }
    rows = [_row(name, group, scores, reference) for name, group in groups]
    first, more = next(iter(scores.items()))
    rows.sort(key=lambda row: (-_size(row.budget), row.scores[first].mean * (-1 if more else 1), row.policy))
    unscored = [f"{name} at {group[0].cell.budget:g}" for name, group in groups if _protects_all(group[0].cell)]
    return replace(table, scores=scores, rows=_with_front(rows, first, more), unscored=unscored)


def _protects_all(cell: Cell) -> bool:
    """Return whether a cell's budget is a share of the context, and no more than its selector's sinks and recent."""
    select, share, length = cell.policy.get("select"), cell.budget, cell.task.get("length")
    if not isinstance(share, float) or not isinstance(length, int) or not isinstance(select, dict):
        return False
    protects = [select.get(name) for name in ("sinks", "recent")]
    return share * length <= sum(slots for slots in protects if isinstance(slots, int))


def _row(
    name: str,
    group: Sequence[Result],
    scores: Iterable[str],
    reference: Mapping[int | float | None, dict[str, Scores]],
) -> Row:
    found = _by_example(group, scores)
    budget = group[0].cell.budget
    # A baseline that keeps everything is one at any budget.
    other = reference.get(budget, reference.get(None, {}))
    differences = {}
    for score, values in found.items() if other else ():
        pairs = [(values[at], other[score][at]) for at in sorted(values.keys() & other[score].keys())]
        if pairs:
            differences[score] = interval([one - another for one, another in pairs])
    lines = [line for result in group for line in result.examples]
    return Row(
        policy=name,
        budget=budget,
        examples=len(lines),
        bytes=statistics.fmean(line["bytes"] for line in lines),
        bytes_full=statistics.fmean(line["bytes_full"] for line in lines),
        scores={score: interval(list(values.values())) for score, values in found.items()},
        differences=differences,
    )


def _by_example(group: Iterable[Result], scores: Iterable[str]) -> dict[str, Scores]:
    return {
        score: {(one.cell.seed, line["example"]): line["scores"][score] for one in group for line in one.examples}
        for score in scores
    }


def _names(groups: Iterable[Sequence[Cell]]) -> list[str]:
    """Return what each policy is called: its name, and where two at one budget share it, a part of its hash."""
    cells = [group[0] for group in groups]
    called = [(cell.policy["name"], cell.budget) for cell in cells]
    return [
        name if called.count((name, budget)) == 1 else f"{name} #{digest(cell.policy)[:4]}"
        for cell, (name, budget) in zip(cells, called, strict=True)
    ]


def _size(budget: int | float | None) -> float:
    """Return what budgets are ordered by: all, then shares, then slots."""
    if budget is None:
        return float("inf")
    return budget if isinstance(budget, int) else budget * 1e12


def _with_front(rows: Sequence[Row], score: str, more: bool) -> list[Row]:
    """Return the rows, those marked that no other one beats in both score and bytes."""
    sign = 1 if more else -1
    points = [(sign * row.scores[score].mean, -row.bytes) for row in rows]
    return [
        replace(
            row,
            front=not any(other != own and all(a >= b for a, b in zip(other, own, strict=True)) for other in points),
        )
        for row, own in zip(rows, points, strict=True)
    ]
