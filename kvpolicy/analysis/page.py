"""The report of an `Analysis`: one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator
from html import escape
from itertools import chain

from kvpolicy.analysis.plots import Picture, pictures
from kvpolicy.analysis.result import Analysis, Kept

STEPS = 10
"""Shades of a token, besides none."""


def page(analysis: Analysis, images: Iterable[Picture] = ()) -> str:
    """Return the report as the text of an HTML file: pictures inside, no script, nothing fetched.

    Args:
        analysis: what it is of.
        images: of the prompt, from `kvpolicy.analysis.images.on_images`.
    """
    shown = map(_picture, chain(images, pictures(analysis)))
    body = "\n".join([*_head(analysis), *_texts(analysis), *shown])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>kvpolicy: {escape(analysis.model)}</title>\n<style>\n{_STYLE}{_shades()}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _head(analysis: Analysis) -> Iterator[str]:
    heads = sum(map(len, analysis.kept[0].lengths))
    yield f"<h1>What policies keep: {escape(analysis.model)}</h1>"
    yield (
        f"<p>A prompt of {len(analysis.tokens):,} tokens; {len(analysis.layers):,} layers to evict from, with "
        f"{heads:,} KV heads in all. The numbers behind this page are in analysis.json beside it.</p>"
    )
    for note in analysis.notes:
        yield f'<p class="note">{escape(note)}</p>'
    yield '<div class="scroll"><table>'
    names = [one.policy for one in analysis.kept]
    against = "".join(f"<th>overlap with {escape(name)}</th>" for name in names)
    yield f"<tr><th>policy</th><th>kept a head (least, mean, most)</th><th>of all</th>{against}</tr>"
    shared = {pair.policies: pair.mean for pair in analysis.overlap}
    for one in analysis.kept:
        cells = []
        for name in names:
            found = shared.get((one.policy, name), shared.get((name, one.policy)))
            cells.append(f"<td>{'' if found is None else f'{found:.2f}'}</td>")
        yield f"<tr><td>{escape(one.policy)}</td>{_counts(one, len(analysis.tokens))}{''.join(cells)}</tr>"
    yield "</table></div>"
    if len(names) > 1:
        yield "<p>Overlap: the Jaccard index of what two policies keep, mean of the layers; 1 means the same.</p>"


def _counts(one: Kept, tokens: int) -> str:
    lengths = [length for layer in one.lengths for length in layer]
    mean = sum(lengths) / len(lengths)
    return f"<td>{min(lengths):,} &nbsp; {mean:,.1f} &nbsp; {max(lengths):,}</td><td>{mean / tokens:.1%}</td>"


def _texts(analysis: Analysis) -> Iterator[str]:
    heads = sum(map(len, analysis.kept[0].lengths))
    yield "<h2>Which tokens are kept</h2>"
    yield (
        f"<p>The darker a token, the more of the {heads:,} heads keep it; grey letters: none does. "
        "Point at a token to see how many.</p>"
    )
    legend = "".join(f'<span class="k{step}"> {step / STEPS:.0%} </span>' for step in range(STEPS + 1))
    yield f'<p class="legend">{legend}</p>'
    for number, one in enumerate(analysis.kept):
        yield f"<details{'' if number else ' open'}><summary>{escape(one.policy)}</summary>"
        counted = enumerate(zip(analysis.tokens, one.votes, strict=True))
        spans = (
            f'<span class="k{shade(count, heads)}" title="token {place}: {count} heads">{escape(text)}</span>'
            for place, (text, count) in counted
        )
        yield f'<div class="text">{"".join(spans)}</div></details>'


def shade(count: int, heads: int) -> int:
    """Return the shade of a token that `count` of `heads` heads keep: 0 for none, then up to `STEPS` for all.

    >>> [shade(count, 90) for count in (0, 1, 9, 10, 90)]
    [0, 1, 1, 2, 10]
    """
    return math.ceil(STEPS * count / heads)


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.svg()).decode()
    title = escape(picture.title)
    return (
        f'<h2>{title}</h2>\n<p>{escape(picture.text)}</p>\n<img alt="{title}" src="data:image/svg+xml;base64,{data}">'
    )


def _shades() -> str:
    rules = [".k0 { color: #767676; }"]
    for step in range(1, STEPS + 1):
        letters = " color: #fff;" if step > 0.6 * STEPS else ""
        rules.append(f".k{step} {{ background: rgba(0, 90, 170, {0.9 * step / STEPS:.2f});{letters} }}")
    return "\n".join(rules) + "\n"


_STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; }
th, td { padding: 0.3rem 0.8rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
img { width: 100%; } summary { cursor: pointer; font-weight: 600; padding: 0.3rem 0; }
.scroll { overflow-x: auto; } .note { background: #fff4d6; padding: 0.5rem 0.8rem; } .legend span { padding: 0.2rem; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; border: 1px solid #ddd;
  padding: 0.8rem; max-height: 32rem; overflow-y: auto; }
"""
