"""The printed form of a report."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from kvpolicy.report import LayerRecord, Report


def report_table(report: Report) -> str:
    """Return `report` as a text table: a line a layer, then the totals."""
    table = Table(title=f"policy {report.policy}", title_justify="left")
    for heading in ("layer", "seen", "kept a head (least, mean, most)", "KV bytes", "of full"):
        table.add_column(heading, justify="right")
    for one in report.layers.values():
        table.add_row(str(one.layer), f"{one.seen:,}", _kept(one), f"{one.bytes:,}", _share(one.bytes, one.bytes_full))
    table.add_section()
    table.add_row("all", "", "", f"{report.bytes:,}", _share(report.bytes, report.bytes_full))
    seconds = ", ".join(f"{stage} {spent:.3f}" for stage, spent in report.stopwatch.seconds().items())
    table.caption = f"seconds: {seconds}"
    if report.left_alone:
        table.caption += f"\nlayers left alone: {', '.join(map(str, report.left_alone))}"
    out = io.StringIO()
    Console(file=out, width=100).print(table)
    return out.getvalue().rstrip()


def _kept(record: LayerRecord) -> str:
    counts = [count for row in record.kept for count in row]
    if not counts:
        return "-"
    mean = sum(counts) / len(counts)
    return f"{min(counts):,}  {mean:,.1f}  {max(counts):,}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
