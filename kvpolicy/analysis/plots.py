"""The pictures of an `Analysis`, drawn with matplotlib, of the extra `eval`."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvpolicy.analysis.result import Analysis, ByHead, Likeness

# Okabe and Ito's, which people who see colours differently can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
WIDTH = 10.0


@dataclass(frozen=True)
class Picture:
    """One picture.

    Args:
        title: what it shows.
        text: how to read it.
        figure: it.
    """

    title: str
    text: str
    figure: Figure

    def svg(self) -> bytes:
        """Return it as an SVG file that needs no fonts."""
        out = io.BytesIO()
        self.figure.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()


def pictures(analysis: Analysis) -> Iterator[Picture]:
    """Yield the pictures of an analysis, in the order of a report."""
    for slots in dict.fromkeys(one.slots for one in analysis.likeness):
        yield from _likeness(analysis, slots)
    yield _balance(analysis)
    if analysis.overlap:
        yield _overlap(analysis)
    yield _positions(analysis)
    yield _budgets(analysis)


def _likeness(analysis: Analysis, slots: str) -> Iterator[Picture]:
    found = [one for one in analysis.likeness if one.slots == slots]
    where = "" if slots == "all" else f", slots that hold {slots}"
    figure, (cosine, euclidean, spread) = _panels(3, height=3.0)
    for colour, one in enumerate(found):
        for axes, by_head in ((cosine, one.cosine), (euclidean, one.euclidean), (spread, one.anisotropy)):
            _line(axes, analysis.layers, by_head, one.of, COLOURS[colour])
    for axes, title in ((cosine, "redundancy, cosine"), (euclidean, "redundancy, Euclid"), (spread, "anisotropy")):
        _dress(axes, title)
        axes.set_ylim(0, 1)
    _legend(figure, cosine)
    yield Picture(
        f"Redundancy and anisotropy by layer{where}",
        "Mean of the KV heads of a layer; the band goes from its lowest head to its highest. Redundancy: 1 means that "
        "all vectors of a head are the same, 0 that they have nothing in common. Anisotropy: the share of their spread "
        "around their mean that lies along one direction.",
        figure,
    )
    yield Picture(
        f"Redundancy by layer and head{where}",
        "The mean of both redundancies of each head. Of keys, it is the weight that ECOKV gives to diversity.",
        _by_head(analysis, found),
    )


def _by_head(analysis: Analysis, found: Sequence[Likeness]) -> Figure:
    figure, panels = _panels(len(found), height=_height(max(map(len, found[0].cosine))))
    for axes, one in zip(panels, found, strict=True):
        pairs = zip(one.cosine, one.euclidean, strict=True)
        both = [[(a + b) / 2 for a, b in zip(*heads, strict=True)] for heads in pairs]
        image = _heads(axes, both, analysis.layers, high=1)
        _dress(axes, one.of, y="KV head")
    figure.colorbar(image, ax=panels, label="redundancy")
    return figure


def _balance(analysis: Analysis) -> Picture:
    figure, (density, correlation) = _panels(2, height=3.6)
    # Drawn with importance to the right, as charts are.
    grid = np.array(analysis.balance.density).T
    image = density.imshow(grid, origin="lower", extent=(0, 100, 0, 100), cmap="Blues", vmin=0)
    figure.colorbar(image, ax=density)
    density.set(xlabel="importance, percentile of its head", ylabel="diversity, percentile of its head")
    density.set_title("joint density; 1: as by chance", fontsize=10)
    for layer, heads in zip(analysis.layers, analysis.balance.correlation, strict=True):
        correlation.plot([layer] * len(heads), heads, "o", color=COLOURS[0], alpha=0.6, markersize=4)
    correlation.axhline(0, color="#888888", linewidth=0.8)
    correlation.set_ylim(-1, 1)
    _dress(correlation, "rank correlation of each head")
    return Picture(
        "Importance against diversity",
        f"Importance and diversity of {analysis.balance.policy}. Left, where the slots of all heads lie: the top right "
        "are those that matter and differ, the top left those that importance alone would lose. Right, their rank "
        "correlation in each head: near 0, diversity says something that importance does not.",
        figure,
    )


def _overlap(analysis: Analysis) -> Picture:
    figure, (axes,) = _panels(1, height=3.6)
    for number, pair in enumerate(analysis.overlap):
        axes.plot(
            analysis.layers, pair.jaccard, color=COLOURS[number % len(COLOURS)], label=" and ".join(pair.policies)
        )
    axes.set_ylim(0, 1.02)
    _legend(figure, axes)
    _dress(axes, "Jaccard index of what two policies keep")
    return Picture(
        "Overlap of policies by layer",
        "What both keep over what either keeps, the same slot in the same head; 1 means that they keep the same. Two "
        "random choices of a share p come to p / (2 - p), and protected slots are in both.",
        figure,
    )


def _positions(analysis: Analysis) -> Picture:
    figure, panels = tiles(len(analysis.kept))
    edges = (0, len(analysis.tokens), len(analysis.layers) - 0.5, -0.5)
    for axes, one in zip(panels, analysis.kept, strict=True):
        image = _map(axes, np.array(one.positions), low=0, high=1, extent=edges)
        _dress(axes, one.policy, x="token", y="evictable layer")
    figure.colorbar(image, ax=panels, label="share kept")
    return Picture(
        "Positions kept by layer",
        "The share kept of each stretch of the prompt, by layer, first layer on top.",
        figure,
    )


def _budgets(analysis: Analysis) -> Picture:
    heads = max(map(len, analysis.kept[0].lengths))
    figure, panels = tiles(len(analysis.kept), _height(heads))
    most = max(length for one in analysis.kept for layer in one.lengths for length in layer)
    for axes, one in zip(panels, analysis.kept, strict=True):
        image = _heads(axes, one.lengths, analysis.layers, high=most)
        _dress(axes, one.policy, y="KV head")
    figure.colorbar(image, ax=panels, label="slots kept")
    return Picture(
        "Head budgets",
        "How many slots each KV head keeps. All alike, unless layers or heads share the budget by need.",
        figure,
    )


def tiles(count: int, height: float = 2.6) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, each of that height, in rows of at most three."""
    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]


def _panels(count: int, height: float = 2.8) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _height(heads: int) -> float:
    """Return the height of a panel with a row for each head."""
    return min(1.6 + 0.15 * heads, 6.0)


def _legend(figure: Figure, axes: Axes) -> None:
    figure.legend(handles=axes.get_lines(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def _line(axes: Axes, layers: Sequence[int], by_head: ByHead, label: str, colour: str) -> None:
    means = [sum(heads) / len(heads) for heads in by_head]
    axes.plot(layers, means, color=colour, label=label)
    axes.fill_between(layers, list(map(min, by_head)), list(map(max, by_head)), color=colour, alpha=0.15, linewidth=0)


def _heads(axes: Axes, by_head: Sequence[Sequence[float]], layers: Sequence[int], *, high: float) -> Any:
    """Draw a value for each layer and head; returns what its colours are of."""
    most = max(map(len, by_head))
    # Blank where a layer has fewer heads than another.
    grid = [[*heads, *[float("nan")] * (most - len(heads))] for heads in by_head]
    image = _map(axes, np.array(grid).T, low=0, high=high, origin="lower")
    # A column for each layer that is there: others may lie between them.
    places = sorted({round(place) for place in np.linspace(0, len(layers) - 1, min(len(layers), 7))})
    axes.set_xticks(places, [str(layers[place]) for place in places])
    return image


def _map(axes: Axes, grid: Any, *, low: float, high: float, **settings: Any) -> Any:
    """Draw a grid, a shade a cell; returns what its colours are of."""
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="Blues", vmin=low, vmax=high, **settings)


def _dress(axes: Axes, title: str, *, x: str = "layer", y: str = "") -> None:
    axes.set_title(title, fontsize=10)
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
