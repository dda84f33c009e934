"""Score against bytes, a line a policy, as SVG."""

from __future__ import annotations

import io
from importlib.util import find_spec

from kvpolicy.eval.cells import ResultError
from kvpolicy.eval.table import Row, Table

INSTALL = "pip install 'kvpolicy[eval]'"


def require() -> None:
    """Raise where what plots are drawn with is not installed.

    Raises:
        ResultError: when matplotlib is not there.
    """
    if find_spec("matplotlib") is None:
        raise ResultError(f"plots need matplotlib, which is not installed: {INSTALL}")


def pareto(table: Table) -> bytes:
    """Return a picture of the table's first score against the bytes kept, as SVG.

    A line for each policy through its budgets, with 95% intervals; what keeps everything is a dashed line across. The
    Pareto front, which no policy beats in both, is drawn grey behind.
    """
    import matplotlib
    from matplotlib.figure import Figure

    score, more = next(iter(table.scores.items()))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    # By name, so that a policy has one colour in all pictures of the same policies.
    lines: dict[str, list[Row]] = {}
    for row in sorted(table.rows, key=lambda row: (row.policy, row.bytes)):
        lines.setdefault(row.policy, []).append(row)
    for name, rows in lines.items():
        means = [row.scores[score].mean for row in rows]
        if all(row.budget is None for row in rows):
            axes.axhline(means[0], color="black", linestyle="--", linewidth=1, label=name)
            continue
        axes.errorbar(
            [row.bytes / 1e6 for row in rows], means, yerr=_bars(rows, score), label=name, marker="o", capsize=3
        )
    front = sorted(
        (row.bytes / 1e6, row.scores[score].mean) for row in table.rows if row.front and row.budget is not None
    )
    if front:
        axes.plot(*zip(*front, strict=True), color="lightgrey", linewidth=6, zorder=0, label="Pareto front")
    axes.set_xlabel("MB of keys and values kept")
    axes.set_ylabel(f"{score} ({'more' if more else 'less'} is better)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    file = io.BytesIO()
    # Text stays text; equal tables make equal bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvpolicy"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _bars(rows: list[Row], score: str) -> list[list[float]]:
    """Return how far the intervals go below and above the means."""
    found = [row.scores[score] for row in rows]
    # Of equal examples, rounding can put the mean a hair outside.
    below = [max(one.mean - one.low, 0) if one.low is not None else 0 for one in found]
    above = [max(one.high - one.mean, 0) if one.high is not None else 0 for one in found]
    return [below, above]
