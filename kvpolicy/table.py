"""The printed form of a report."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from kvpolicy.report import LayerRecord, Report


def report_table(report: Report) -> str:
    """Return `report` as a text table: a line for each run of like layers, then the totals."""
    if not report.layers:
        return f"policy {report.policy}: nothing has run yet"
    table = Table(title=f"policy {report.policy}", title_justify="left")
    for heading in ("layers", "seen", "kept a head (least, mean, most)", "KV bytes a layer", "of full"):
        table.add_column(heading, justify="right")
    for _, group in groupby(report.layers.values(), key=lambda one: replace(one, layer=0)):
        first, *rest = group
        layers = f"{first.layer}-{rest[-1].layer}" if rest else str(first.layer)
        share = _share(first.bytes, first.bytes_full)
        table.add_row(layers, f"{first.seen:,}", _kept(first), f"{first.bytes:,}", share)
    table.add_section()
    table.add_row("all", "", "", f"{report.bytes:,}", _share(report.bytes, report.bytes_full))
    seconds = ", ".join(f"{stage} {spent:.3f}" for stage, spent in report.stopwatch.seconds().items())
    table.caption = f"seconds: {seconds}"
    if report.query_bytes:
        table.caption += f"\nrecorded queries, beside keys and values: {report.query_bytes:,} bytes"
    if report.query_aware is not None:
        table.caption += f"\nquery-aware: {'yes' if report.query_aware else 'no'}"
    if report.left_alone:
        table.caption += f"\nlayers left alone: {', '.join(map(str, report.left_alone))}"
    if report.peers is not None:
        table.caption += f"\nrank {report.peers.rank} of {report.peers.size} alone: over_ranks() adds them up"
    out = io.StringIO()
    Console(file=out, width=100).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def _kept(record: LayerRecord) -> str:
    counts = [count for row in record.kept for count in row]
    if not counts:
        return "-"
    mean = sum(counts) / len(counts)
    return f"{min(counts):,}  {mean:,.1f}  {max(counts):,}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
