"""The results as one HTML page that needs nothing else: tables, pictures, and what it takes to repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from kvpolicy.config.source import to_text
from kvpolicy.eval.plots import pareto
from kvpolicy.eval.results import Result
from kvpolicy.eval.show import cells, headings, notes
from kvpolicy.eval.table import Table
from kvpolicy.webpage import document, picture

STYLE = """\
tbody { border-top: 2px solid #999; } tr.front { background: #eef6ee; }
pre { background: #f6f6f6; padding: .6rem; overflow-x: auto; }
"""
NOTE = (
    "Means with 95% bootstrap intervals over the examples; differences are taken example by example. KV MB: keys and "
    "values kept of the prompt, in millions of bytes. A star and green: no row is better in the first score or in "
    "bytes without being worse in the other."
)


def page(tables: Sequence[Table], results: Sequence[Result], baseline: str | None) -> str:
    """Return the page.

    Args:
        tables: of the results, and of what was asked for.
        results: whose policies and versions it lists.
        baseline: from which differences are given.
    """
    parts = [f"<p>{escape(NOTE)}</p>"]
    for table in tables:
        parts += [f"<h2>{escape(table.title)}</h2>", f"<p>{escape(table.about)}</p>"]
        parts += [f"<p>Note: {escape(note)}.</p>" for note in notes(table)]
        if table.rows:
            parts += [picture(pareto(table), f"{table.title}: score against bytes"), _rows(table, baseline)]
    parts += ["<h2>To repeat it</h2>", *_provenance(results)]
    return document("kvpolicy results", "\n".join(["<h1>kvpolicy results</h1>", *parts]), STYLE)


def _rows(table: Table, baseline: str | None) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in headings(table, baseline))
    bodies = []
    for _, same in groupby(table.rows, key=lambda row: row.budget):
        lines = []
        for row in same:
            columns = "".join(f"<td>{escape(text)}</td>" for text in cells(row, list(table.scores), baseline))
            lines.append(f"<tr{' class=front' if row.front else ''}>{columns}</tr>")
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>{"".join(bodies)}</table></div>'


def _provenance(results: Sequence[Result]) -> list[str]:
    """Return the policies in full, and models, versions and machines, each once."""
    policies = dict.fromkeys(to_text(result.cell.policy) for result in results)
    runs = dict.fromkeys(
        to_text(
            {
                "model": result.cell.model,
                "weights": result.header["fingerprint"]["weights"],
                **{name: result.header[name] for name in ("attention", "stop_tokens", "versions", "machine")},
            }
        )
        for result in results
    )
    listed = [("Models, versions and machines", runs), ("Policies in full", policies)]
    return [
        f"<details><summary>{title}</summary>{''.join(f'<pre>{escape(text)}</pre>' for text in texts)}</details>"
        for title, texts in listed
    ]
