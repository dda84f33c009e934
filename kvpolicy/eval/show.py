"""Tables as text: the headings and cells that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Sequence

import rich.table

from kvpolicy.eval.statistics import LEAST, Interval
from kvpolicy.eval.table import Row, Table


def headings(table: Table, baseline: str | None) -> list[str]:
    """Return the names of the columns."""
    names = ["policy", "budget", "examples", "KV MB", "of full"]
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
    """Return what a reader of the table has to know: of how little it is, and where the model cannot do the task."""
    found = []
    fewest = min(row.examples for row in table.rows)
    if fewest < LEAST:
        found.append(f"{fewest} examples: intervals of fewer than {LEAST} are too narrow to say anything")
    score, more = next(iter(table.scores.items()))
    if more and any(row.budget is None and row.scores[score].mean == 0 for row in table.rows):
        found.append(f"{score} is 0 with the full cache: the model cannot do this task, which says nothing of policies")
    return found


def terminal(table: Table, baseline: str | None) -> rich.table.Table:
    """Return a table for the terminal."""
    shown = rich.table.Table(title=f"{table.title}: {table.about}", title_justify="left")
    for at, name in enumerate(headings(table, baseline)):
        shown.add_column(name, justify="right" if at else "left")
    for row in table.rows:
        shown.add_row(*cells(row, list(table.scores), baseline))
    return shown
