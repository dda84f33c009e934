"""The report of an `Analysis`: one HTML page that needs nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape
from itertools import chain

from kvpolicy.analysis.plots import Picture, pictures
from kvpolicy.analysis.result import Analysis, Kept
from kvpolicy.webpage import document, picture

STEPS = 10
"""Shades of a token, besides none."""
PLACEHOLDER = "▪"
"""What stands in the text for a token of an image."""


def page(analysis: Analysis, images: Iterable[Picture] = ()) -> str:
    """Return the report as the text of an HTML file: pictures inside, no script, nothing fetched.

    Args:
        analysis: what it is of.
        images: of the prompt, from `kvpolicy.analysis.images.on_images`.
    """
    shown = map(_picture, chain(images, pictures(analysis)))
    body = "\n".join([*_head(analysis), *_texts(analysis), *shown])
    return document(f"kvpolicy: {analysis.model}", body, _STYLE + _shades())


def _head(analysis: Analysis) -> Iterator[str]:
    heads = sum(map(len, analysis.kept[0].lengths))
    yield f"<h1>What policies keep: {escape(analysis.model)}</h1>"
    kinds = Counter(analysis.modality or ())
    of_each = f" ({', '.join(f'{count:,} {kind}' for kind, count in kinds.items())})" if kinds else ""
    yield (
        f"<p>A prompt of {len(analysis.tokens):,} tokens{of_each}; {len(analysis.layers):,} layers to evict from, with "
        f"{heads:,} KV heads in all. The command <code>kvpolicy analyze</code> writes the numbers behind this page "
        "beside it.</p>"
    )
    for note in analysis.notes:
        yield f'<p class="note">{escape(note)}</p>'
    yield '<div class="scroll"><table>'
    names = [one.policy for one in analysis.kept]
    against = "".join(f"<th>overlap with {escape(name)}</th>" for name in names)
    yield f"<tr><th>policy</th><th>kept a head: mean (least to most)</th><th>of all</th>{against}</tr>"
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
    return f"<td>{mean:,.1f} ({min(lengths):,} to {max(lengths):,})</td><td>{mean / tokens:.1%}</td>"


def _texts(analysis: Analysis) -> Iterator[str]:
    heads = sum(map(len, analysis.kept[0].lengths))
    yield "<h2>Which tokens are kept</h2>"
    yield (
        f"<p>The darker a token, the more of the {heads:,} heads keep it; grey letters: none does. "
        "Point at a token to see how many.</p>"
    )
    legend = "".join(f'<span class="k{step}"> {step / STEPS:.0%} </span>' for step in range(STEPS + 1))
    yield f'<p class="legend">{legend}</p>'
    shown = _letters(analysis)
    for number, one in enumerate(analysis.kept):
        yield f"<details{'' if number else ' open'}><summary>{escape(one.policy)}</summary>"
        counted = enumerate(zip(shown, one.votes, strict=True))
        spans = (
            f'<span class="k{shade(count, heads)}" title="token {place}: {count} heads">{escape(text)}</span>'
            for place, (text, count) in counted
        )
        yield f'<div class="text">{"".join(spans)}</div></details>'


def _letters(analysis: Analysis) -> list[str]:
    """Return what stands for each token in the text: of an image, a dot instead of the same word hundreds of times."""
    kinds = analysis.modality or ["text"] * len(analysis.tokens)
    return [text if kind == "text" else PLACEHOLDER for text, kind in zip(analysis.tokens, kinds, strict=True)]


def shade(count: int, heads: int) -> int:
    """Return the shade of a token that `count` of `heads` heads keep: 0 for none, then up to `STEPS` for all.

    >>> [shade(count, 90) for count in (0, 1, 9, 10, 90)]
    [0, 1, 1, 2, 10]
    """
    return math.ceil(STEPS * count / heads)


def _picture(shown: Picture) -> str:
    return f"<h2>{escape(shown.title)}</h2>\n<p>{escape(shown.text)}</p>\n{picture(shown.svg(), shown.title)}"


def _shades() -> str:
    rules = [".k0 { color: #767676; }"]
    for step in range(1, STEPS + 1):
        # Letters stand out from their ground by 4.5 to 1 at least.
        letters = " color: #fff;" if step > 0.8 * STEPS else ""
        rules.append(f".k{step} {{ background: rgba(0, 90, 170, {0.9 * step / STEPS:.2f});{letters} }}")
    return "\n".join(rules) + "\n"


_STYLE = """\
.note { background: #fff4d6; padding: .5rem .8rem; } .legend span { padding: .2rem; display: inline-block; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; border: 1px solid #ddd;
  padding: .8rem; max-height: 32rem; overflow-y: auto; }
"""
