"""The results as one HTML page that needs nothing else: tables, pictures, and what it takes to repeat them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from kvpolicy.config.source import to_text
from kvpolicy.eval.plots import pareto
from kvpolicy.eval.results import Result
from kvpolicy.eval.show import cells, headings
from kvpolicy.eval.table import Table

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
tr.front { background: #eef6ee; }
img { max-width: 100%; } pre { background: #f6f6f6; padding: .6rem; overflow-x: auto; }
"""
NOTE = (
    "Means with 95% bootstrap intervals over the examples; differences are taken example by example. KV MB: keys and "
    "values kept of the prompt, in millions of bytes. A star and green: no row is better in the first score or in "
    "bytes without being worse in the other."
)


def page(tables: Sequence[Table], results: Sequence[Result], baseline: str | None) -> str:
    """Return the page.

    Args:
        tables: of the results.
        results: whose policies and versions it lists.
        baseline: from which differences are given.
    """
    parts = [f"<p>{escape(NOTE)}</p>"]
    for table in tables:
        parts += [f"<h2>{escape(table.title)}</h2>", f"<p>{escape(table.about)}</p>"]
        parts += [_picture(table), _rows(table, baseline)]
    parts += ["<h2>To repeat it</h2>", *_provenance(results)]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>kvpolicy results</title>\n'
        f"<style>{STYLE}</style>\n<h1>kvpolicy results</h1>\n{body}\n</html>\n"
    )


def _picture(table: Table) -> str:
    # As an image of its own, so that the names inside one picture do not meet those of another.
    data = base64.b64encode(pareto(table)).decode()
    return f'<img alt="score against bytes" src="data:image/svg+xml;base64,{data}">'


def _rows(table: Table, baseline: str | None) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in headings(table, baseline))
    lines = []
    for row in table.rows:
        columns = "".join(f"<td>{escape(text)}</td>" for text in cells(row, list(table.scores), baseline))
        lines.append(f"<tr{' class=front' if row.front else ''}>{columns}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


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
