"""``kvpolicy report``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from kvpolicy.cli.output import Json, OptionError, columns, print_json, print_rich


def report(
    folder: Annotated[Path, typer.Argument(help="A folder with results of `kvpolicy eval`.")],
    baseline: Annotated[
        str | None, typer.Option(help="A policy's name; others are compared with it, example by example.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write tables and plots into this page.")] = None,
    as_json: Json = False,
) -> None:
    """Show results as tables with 95% intervals, and as a page with plots of score against bytes."""
    from kvpolicy.eval import plots, show
    from kvpolicy.eval.asked import read_asked
    from kvpolicy.eval.page import page
    from kvpolicy.eval.results import read_results
    from kvpolicy.eval.table import tables
    from kvpolicy.files import whole

    if html is not None:
        plots.require()
    results = read_results(folder)
    found = tables(results, baseline, read_asked(folder))
    if html is not None:
        try:
            with whole(html) as partial:
                partial.write_text(page(found, results, baseline), encoding="utf-8")
        except OSError as error:
            raise OptionError(f"--html: cannot write {str(html)!r}: {error.strerror}") from error
    if as_json:
        print_json([dataclasses.asdict(table) for table in found])
        return
    for table in found:
        for part in show.terminal(table, baseline, columns()):
            print_rich(part)
        for note in show.notes(table):
            typer.echo(f"note: {note}")
    typer.echo(
        "[low, high]: 95% bootstrap interval. *: no row is better in the first score or in bytes without being "
        "worse in the other."
    )
    if html is not None:
        typer.echo(f"wrote {html}")
