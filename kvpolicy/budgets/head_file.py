"""The files in which others publish how much each head of a model matters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

Rows = tuple[tuple[float, ...], ...]


def read(path: Path) -> Rows:
    """Return the scores in a file, layer by layer.

    Args:
        path: one of two kinds. ``.tsv``, as DuoAttention's ``full_attention_heads.tsv``: a line a layer, a number
            between tabs for each KV head, taken to be within [0, 1]. ``.json``, as the ``head_score`` files of HeadKV
            and Retrieval Head: from ``"layer-head"``, of query heads, to their scores in each trial, whose mean counts.

    Raises:
        ValueError: when it is not such a file; says what was expected.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "heads.json"
    >>> _ = path.write_text('{"0-0": [1, 0], "0-1": [0, 0]}')
    >>> read(path)
    ((0.5, 0.0),)
    """
    readers = {".tsv": _lines, ".json": _trials}
    expected = "expected a .tsv of DuoAttention or a .json of HeadKV, with a score of each head of each layer"
    if path.suffix not in readers:
        raise ValueError(expected)
    try:
        found = readers[path.suffix](path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{expected}, found none") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{expected}, which cannot be read: {type(error).__name__}: {error}") from None
    if not found or not all(0 <= score < math.inf for row in found for score in row):
        raise ValueError(f"{expected}, 0 or more")
    return found


def _lines(text: str) -> Rows:
    rows = (line.split("\t") for line in text.splitlines() if line.strip())
    return tuple(tuple(min(max(float(number), 0.0), 1.0) for number in row) for row in rows)


def _trials(text: str) -> Rows:
    said: dict[str, Any] = json.loads(text)
    places = [tuple(map(int, name.split("-"))) for name in said]
    layers, heads = (max(one) + 1 for one in zip(*places, strict=True))
    return tuple(tuple(fmean(said[f"{layer}-{head}"]) for head in range(heads)) for layer in range(layers))
