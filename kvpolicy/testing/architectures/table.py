"""The rows of all classes as a page of Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import transformers

from kvpolicy.testing.architectures.check import Row
from kvpolicy.testing.architectures.compare import PROMPT

_HEAD = """# Architectures

What becomes of every class that transformers {version} maps to text or image-text generation. Each is built tiny, with
random weights, and reads a prompt of {prompt} tokens of text. `snapkv-w8` evicts: with heads of one length, and again
with heads of different ones. Then come four tokens one by one, and three at once.

{counts}

- **correct**: the logits are those of transformers' own full cache, its own attention and a mask that hides what was
  evicted, up to rounding: the error against float64 is at most twice what transformers' own is. Every layer that keeps
  all of a text stores less. Layers with a sliding window, a recurrent state alone or an index of their own are left
  alone.
- **refused**: kvpolicy raises `UnsupportedModelError`, with the reason.
- **not built**: transformers cannot build the tiny model, or cannot run it on text alone. That says nothing about
  eviction.

*Layers* are the kinds of the tiny model's cache layers. A *derived* one holds what the model makes its keys and values
from, a latent for instance; all heads then keep the same tokens. *Error* is the largest of a logit after eviction,
*effect* the largest change of one that evicting makes, under the policy that changes least.

To judge the transformers you have installed: `python -m kvpolicy.testing.architectures`. It takes a minute or two.

| class | model type | state | layers | evicted / left alone | error | effect | why not |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def page(rows: Iterable[Row]) -> str:
    """Return the page: what was done, how many classes came out how, and a table of them."""
    rows = list(rows)
    head = _HEAD.format(version=transformers.__version__, prompt=PROMPT, counts=summary(rows))
    return head + "".join(f"| {' | '.join(_cells(row))} |\n" for row in rows)


def summary(rows: Iterable[Row]) -> str:
    """Return how many came out how, in one sentence; a class that several model types name counts for each."""
    rows = list(rows)
    counts = Counter(row.verdict for row in rows)
    classes = len({row.case.name for row in rows})
    correct = len({row.case.name for row in rows if row.verdict == "correct"})
    return (
        f"{len(rows)} found ({classes} classes, some of which several model types name): "
        f"**{counts['correct']} correct** ({correct} classes), "
        f"{counts['refused']} refused, {counts['wrong']} wrong, {counts['not built']} not built."
    )


def states(text: str) -> dict[tuple[str, str], str]:
    """Return the state of each (class, model type) on a page."""
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {(name.removeprefix("| "), kind): state for name, kind, state, *_ in lines}


def _cells(row: Row) -> list[str]:
    shorter = f"{row.evicted} / {row.left}" if row.evicted else ""
    error, effect = (f"{row.error:.0e}", f"{row.effect:.2f}") if row.effect else ("", "")
    reason = row.reason.replace("|", "\\|")
    return [f"`{row.case.name}`", f"`{row.case.model_type}`", row.verdict, row.kinds, shorter, error, effect, reason]
