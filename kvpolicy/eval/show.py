"""Tables as text: the headings and cells that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import rich.console
import rich.table

from kvpolicy.eval.gaps import Gap
from kvpolicy.eval.statistics import LEAST, Interval
from kvpolicy.eval.table import Row, Table

POLICY = "policy"
SIZES = (POLICY, "budget", "examples", "KV MB", "of full")
"""The columns before the scores."""


def headings(table: Table, baseline: str | None) -> list[str]:
    """Return the names of the columns."""
    names = [*SIZES]
    for score, more in table.scores.items():
        names.append(f"{score} ({'more' if more else 'less'} is better)")
        if baseline:
            names.append(f"{score} - {baseline}")
    return names


def cells(row: Row, scores: Sequence[str], baseline: str | None) -> list[str]:
    """Return the columns of a row; a policy on the Pareto front of the first score has a star."""
    found = [
        f"{row.policy} *" if row.front else row.policy,
        budget(row.budget),
        str(row.examples),
        f"{row.bytes / 1e6:,.2f}",
        f"{row.bytes / row.bytes_full:.1%}",
    ]
    for score in scores:
        found.append(span(row.scores[score]))
        if baseline:
            found.append(span(row.differences[score], signed=True) if score in row.differences else "")
    return found


def budget(size: int | float | None) -> str:
    """Return a budget in words.

    >>> budget(None), budget(64), budget(0.25)
    ('all', '64', '25%')
    """
    if size is None:
        return "all"
    return f"{size:,}" if isinstance(size, int) else f"{size:.4g}" if size > 1 else f"{size * 100:.4g}%"


def span(found: Interval, *, signed: bool = False) -> str:
    """Return a mean with its interval.

    >>> span(Interval(0.5, 0.25, 0.75)), span(Interval(0.5, None, None), signed=True)
    ('0.500 [0.250, 0.750]', '+0.500')
    """
    form = "+.3f" if signed else ".3f"
    mean = format(found.mean, form)
    return mean if found.low is None or found.high is None else f"{mean} [{found.low:{form}}, {found.high:{form}}]"


def notes(table: Table) -> list[str]:
    """Return what a reader of the table has to know: of how little it is, what it lacks, what the model cannot do."""
    found = []
    fewest = min((row.examples for row in table.rows), default=LEAST)
    if fewest < LEAST:
        found.append(f"{fewest} examples: intervals of fewer than {LEAST} are too narrow to say anything")
    for score, more in [*table.scores.items()][:1]:
        if more and any(row.budget is None and row.scores[score].mean == 0 for row in table.rows):
            says = "the model cannot do this task, which says nothing of policies"
            found.append(f"{score} is 0 with the full cache: {says}")
    if table.unscored:
        rows = "; ".join(table.unscored)
        found.append(f"sinks and recent tokens take the whole budget, so that nothing is left to the score: {rows}")
    if table.gaps is None:
        found.append("the folder does not say what was asked for: what is missing is not known")
    elif table.gaps:
        found.append(f"asked for, and not in the folder: {_gaps(table.gaps)}")
    return found


def _gaps(gaps: Sequence[Gap]) -> str:
    """Return gaps in words, a policy with its budgets after the other."""
    by_policy: dict[str, list[str]] = {}
    for gap in gaps:
        size = f" at {budget(gap.budget)}" if gap.budget is not None else ""
        seeds = f" (seed {', '.join(map(str, gap.seeds))})" if gap.seeds else ""
        by_policy.setdefault(gap.policy, []).append(size + seeds)
    return "; ".join(f"{policy}{','.join(sizes)}" for policy, sizes in by_policy.items())


def terminal(table: Table, baseline: str | None, width: int) -> Sequence[rich.console.RenderableType]:
    """Return a table for a terminal so many columns wide; its title alone where nothing is there yet.

    Where that is too narrow, headings and names of policies are broken between words; where it is still, there is one
    for each score, without examples and megabytes, intervals below their means.
    """
    title = f"{table.title}: {table.about}"
    if not table.rows:
        return [title]
    rows = [cells(row, list(table.scores), baseline) for row in table.rows]
    columns = dict(zip(headings(table, baseline), map(list, zip(*rows, strict=True)), strict=True))
    if _frame(columns) + sum(_widths(columns, str.splitlines)) <= width:
        return [_drawn(title, columns)]
    if _frame(columns) + sum(_widths(columns, str.split)) <= width:
        return [_drawn(title, columns, width)]
    stacked = {name: [text.replace(" [", "\n[") for text in texts] for name, texts in columns.items()}
    scores, each = list(columns)[len(SIZES) :], 2 if baseline else 1
    parts = [[POLICY, "budget", "of full", *scores[at : at + each]] for at in range(0, len(scores), each)]
    drawn = [_drawn("", {name: stacked[name] for name in part}, width) for part in parts]
    drawn[0].title = title
    return drawn


def _drawn(title: str, columns: Mapping[str, Sequence[str]], width: int | None = None) -> rich.table.Table:
    """Return a table; given a width, it is broken to fit into that."""
    shown = rich.table.Table(title=title, title_justify="left")
    _, *needs = _widths(columns, str.split)
    room = None if width is None else max(1, width - sum(needs) - _frame(columns))
    named, *others = columns
    shown.add_column(named, max_width=room, overflow="fold")
    for name, need in zip(others, needs, strict=True):
        shown.add_column(name, max_width=need if width else None, justify="right")
    for row in zip(*columns.values(), strict=True):
        shown.add_row(*row)
    return shown


def _frame(columns: Mapping[str, Sequence[str]]) -> int:
    return 3 * len(columns) + 1


def _widths(columns: Mapping[str, Sequence[str]], broken: Callable[[str], list[str]]) -> list[int]:
    """Return how wide each column is with headings and names of policies broken into such parts."""
    found = []
    for name, texts in columns.items():
        of_cells = broken if name == POLICY else str.splitlines
        found.append(max(len(part) for part in [*broken(name), *(part for text in texts for part in of_cells(text))]))
    return found
