"""A record as tables, for the terminal and for a page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import rich.table

from kvpolicy.bench.figures import Figure, figures, median_of, seconds_of
from kvpolicy.bench.record import Record
from kvpolicy.report import STAGES


@dataclass(frozen=True)
class Table:
    """A table of text.

    Args:
        title: above it.
        headings: of its columns.
        rows: of its cells.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def terminal(self) -> rich.table.Table:
        """Return it for the terminal."""
        shown = rich.table.Table(title=self.title, title_justify="left")
        for heading in self.headings:
            shown.add_column(heading, justify="left" if heading == "way" else "right")
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def markdown(self) -> str:
        """Return it for a page."""
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        return "\n".join([f"{self.title}:\n", *(f"| {' | '.join(line)} |" for line in lines), ""])


_VERDICT = {True: "met", False: "missed", None: "undecided"}


def cell(figure: Figure | None) -> str:
    """Return a figure in words.

    >>> cell(Figure("bytes, of full", "snapkv", 4096, 0.25))
    '0.250'
    >>> cell(Figure("token, of the limit", "snapkv", 4096, 1.02, 1.01, 1.04, target=1.05))
    '1.020 [1.010, 1.040] 1.05 met'
    >>> cell(Figure("token, of the limit", "snapkv", 4096, 1.02, 1.01, 1.09, target=1.05))
    '1.020 [1.010, 1.090] 1.05 undecided'
    """
    if figure is None:
        return ""
    said = [f"{figure.value:.3f}"]
    if figure.low is not None and figure.high is not None:
        said.append(f"[{figure.low:.3f}, {figure.high:.3f}]")
    if figure.target is not None:
        said.append(f"{figure.target:g} {_VERDICT[figure.met]}")
    return " ".join(said)


def tables(record: Record) -> list[Table]:
    """Return a record as tables: of prompts, of tokens, of memory and of growth."""
    found = {(one.what, one.way, one.context): one for one in figures(record)}

    def columns(names: Sequence[str], way: str, context: int | None) -> list[str]:
        return [cell(found.get((name, way, context))) for name in names]

    shown = [_prompts(record, columns), _tokens(record, columns), _memory(record, columns)]
    growth = [f"growth of {stage}" for stage in STAGES] + ["growth of scoring's memory"]
    ways = dict.fromkeys(way for what, way, _ in found if what in growth)
    if ways:
        rows = [[way, *columns(growth, way, None)] for way in ways]
        shown.append(Table("Growth with the context, exponents", ["way", *growth], rows))
    return shown


def summary(record: Record) -> list[str]:
    """Return how many targets are met and how many are undecided, then a line for each that is missed."""
    aimed = [one for one in figures(record) if one.target is not None]
    met, undecided = sum(one.met is True for one in aimed), sum(one.met is None for one in aimed)
    lines = [f"{met} of {len(aimed)} targets are met" + (f", {undecided} undecided" if undecided else "")]
    for one in (one for one in aimed if one.met is False):
        where = "" if one.context is None else f", {one.context:,} tokens"
        lines.append(f"missed: {one.what}: {one.way}{where}: {one.value:.3f}, expected at most {one.target:g}")
    return lines


def page(record: Record) -> str:
    """Return a record in Markdown: on what it was measured, its tables, and which targets are missed."""
    first, *missed = summary(record)
    tail = [f"{first}{':' if missed else '.'}\n", *(f"- {line}" for line in missed)]
    return "\n".join([f"{machine(record.about)}.\n", *(table.markdown() for table in tables(record)), *tail, ""])


Columns = Callable[[Sequence[str], str, int | None], list[str]]
"""From names of figures, a way and a context to cells."""


def _prompts(record: Record, columns: Columns) -> Table:
    names = ["prompt, of no session"]
    rows = []
    for one in record.memory:
        at = record.prompts, one.way, one.context
        seconds = median_of(*at, lambda run: run.seconds)
        share = median_of(*at, lambda run: sum(run.stages.values()) / run.seconds)
        each = [f"{seconds_of(*at, stage) * 1000:.1f}" for stage in STAGES]
        stages = [f"{share:.2%}", *each] if share else [""] * (1 + len(STAGES))
        rows.append([f"{one.context:,}", one.way, f"{seconds:.3f}", *columns(names, one.way, one.context), *stages])
    stages = ["stages", *(f"{stage}, ms" for stage in STAGES)]
    return Table("Time of a prompt", ["tokens", "way", "seconds", *map(_heading, names), *stages], rows)


def _tokens(record: Record, columns: Columns) -> Table:
    names = ["token, of no session", "token, of the limit", "token, of dense", "token, of not evicting"]
    rows = []
    for one in record.tokens:
        share = sum(one.stages.values()) / sum(one.seconds)
        middle = f"{statistics.median(one.seconds) * 1000:.2f}"
        row = [f"{one.context:,}", one.way, middle, *columns(names, one.way, one.context)]
        rows.append([*row, f"{share:.2%}" if share else ""])
    return Table("Time of a token behind it", ["tokens", "way", "ms", *map(_heading, names), "stages"], rows)


def _memory(record: Record, columns: Columns) -> Table:
    names = [
        "bytes, of full",
        "bytes, of the plan",
        "bytes, of the slots",
        "peak, layers above",
        "all tensors, of no session",
    ]
    rows = []
    for one in record.memory:
        scoring = "" if one.scoring is None else _megabytes(one.scoring)
        cells = columns(names, one.way, one.context)
        rows.append([f"{one.context:,}", one.way, _megabytes(one.bytes), *cells, _megabytes(one.pass_peak), scoring])
    return Table(
        "Memory, in keys and values but for the last three columns",
        ["tokens", "way", "MB", *map(_heading, names), "all, MB", "scoring, MB"],
        rows,
    )


def _heading(name: str) -> str:
    """Return a figure's name without what the table's title says."""
    return name.removeprefix("prompt, ").removeprefix("token, ").removeprefix("bytes, ")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f}"


def machine(about: dict[str, Any]) -> str:
    """Return in one line on what a record was measured."""
    on, versions = about["machine"], about["versions"]
    where = on["device_name"] or f"{on['processor']}, {on['threads']} threads"
    of = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{about['model']}, {about['dtype']}, {about['attention']}; {where}; {of}"
