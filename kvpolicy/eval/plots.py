"""Score against bytes, a line a policy, as SVG."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvpolicy.errors import not_installed
from kvpolicy.eval.cells import ResultError
from kvpolicy.eval.table import Row, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "os^DvP"
"""Not as many as there are colours, so that 42 policies are told apart by both."""
APART, TOGETHER = 0.012, 0.1
"""How far lines stand from their neighbours at most, and the first from the last, as shares of the width."""
MARGIN = 1.25
"""How many times the most bytes, and the fewest, the axis goes on."""


def require() -> None:
    """Raise where what plots are drawn with is not installed.

    Raises:
        ResultError: when matplotlib is not there.
    """
    if find_spec("matplotlib") is None:
        raise ResultError(not_installed("--html: drawing the plots", "matplotlib", "eval"))


def pareto(table: Table) -> bytes:
    """Return a picture of the table's first score against the bytes kept, as SVG.

    A line for each policy through its budgets, with 95% intervals; what keeps everything is a dashed line across. The
    Pareto front, which no policy beats in both, is drawn grey behind. Bytes are on a logarithmic scale, and policies
    that keep as many stand side by side a little, so that no interval hides another.
    """
    import matplotlib
    from matplotlib.figure import Figure

    from kvpolicy.analysis.plots import COLOURS

    score, more = next(iter(table.scores.items()))
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    # By name, so that a policy has one colour in all pictures of the same policies.
    lines: dict[str, list[Row]] = {}
    for row in sorted(table.rows, key=lambda row: (row.policy, row.bytes)):
        lines.setdefault(row.policy, []).append(row)
    whole = [name for name, rows in lines.items() if all(row.budget is None for row in rows)]
    for name in whole:
        axes.axhline(lines.pop(name)[0].scores[score].mean, color="black", linestyle="--", linewidth=1, label=name)
    kept = [row.bytes / 1e6 for rows in lines.values() for row in rows] or [1.0]
    low, high = min(kept) / MARGIN, max(kept) * MARGIN
    _scale(axes, low, high)
    front = []
    for number, (name, rows) in enumerate(lines.items()):
        aside = (high / low) ** (min(APART, TOGETHER / len(lines)) * (number - (len(lines) - 1) / 2))
        across = [row.bytes / 1e6 * aside for row in rows]
        means = [row.scores[score].mean for row in rows]
        front += [(x, y) for x, y, row in zip(across, means, rows, strict=True) if row.front]
        axes.errorbar(
            across,
            means,
            yerr=_bars(rows, score),
            label=name,
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            elinewidth=1,
            capsize=2,
        )
    if front:
        axes.plot(*zip(*sorted(front), strict=True), color="lightgrey", linewidth=7, zorder=0, label="Pareto front")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("MB of keys and values kept")
    axes.set_ylabel(f"{score} ({'more' if more else 'less'} is better)")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    file = io.BytesIO()
    # Text stays text; equal tables make equal bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvpolicy"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _scale(axes: Axes, low: float, high: float) -> None:
    """Make the axis of bytes logarithmic, as budgets are doubled and halved, with plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_xlim(low, high)
    # Each at most 1.5 times the one before: within the margins, there is always one.
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")


def _bars(rows: list[Row], score: str) -> list[list[float]]:
    """Return how far the intervals go below and above the means."""
    found = [row.scores[score] for row in rows]
    # Of equal examples, rounding can put the mean a hair outside.
    below = [max(one.mean - one.low, 0) if one.low is not None else 0 for one in found]
    above = [max(one.high - one.mean, 0) if one.high is not None else 0 for one in found]
    return [below, above]
