"""An `Analysis` as long tables, written as Parquet with pyarrow, of the extra `parquet`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped, import-not-found, unused-ignore]
import pyarrow.parquet as pq  # type: ignore[import-untyped, import-not-found, unused-ignore]

from kvpolicy.analysis.result import Analysis, Kept
from kvpolicy.files import whole

_TEXT, _WHOLE, _REAL = pa.string(), pa.int64(), pa.float64()


def tables(analysis: Analysis) -> dict[str, pa.Table]:
    """Return the tables of an analysis by name, one value a cell.

    `tokens`: position, text, modality. `likeness`: of, slots, layer, head, cosine, euclidean, anisotropy. `balance`:
    layer, head, correlation. `density`: importance, diversity (parts of both, the lowest first), density. `policies`:
    policy, budget (as JSON). `kept`, a row for each kept slot: policy, layer, head, position. `overlap`: policy, other,
    layer, jaccard. Layers are the model's indices. What else an analysis holds of a policy follows from `kept`.

    Each has the model's name and the notes in its metadata, as JSON under "kvpolicy".
    """
    about = {"kvpolicy": json.dumps({"model": analysis.model, "notes": analysis.notes})}
    by_head = {"layer": _WHOLE, "head": _WHOLE}
    found = {
        "tokens": _table({"position": _WHOLE, "text": _TEXT, "modality": _TEXT}, _tokens(analysis)),
        "likeness": _table(
            {"of": _TEXT, "slots": _TEXT, **by_head, "cosine": _REAL, "euclidean": _REAL, "anisotropy": _REAL},
            _likeness(analysis),
        ),
        "balance": _table({**by_head, "correlation": _REAL}, _balance(analysis)),
        "density": _table({"importance": _WHOLE, "diversity": _WHOLE, "density": _REAL}, _density(analysis)),
        "policies": _table(
            {"policy": _TEXT, "budget": _TEXT}, ((one.policy, json.dumps(one.budget)) for one in analysis.kept)
        ),
        "kept": pa.concat_tables([_kept(one, analysis.layers) for one in analysis.kept]),
        "overlap": _table({"policy": _TEXT, "other": _TEXT, "layer": _WHOLE, "jaccard": _REAL}, _overlap(analysis)),
    }
    return {name: table.replace_schema_metadata(about) for name, table in found.items()}


def write(analysis: Analysis, folder: Path) -> None:
    """Write each table into ``<name>.parquet`` of a folder that is there.

    Raises:
        OSError: when a file cannot be written.
    """
    for name, table in tables(analysis).items():
        with whole(folder / f"{name}.parquet") as partial:
            pq.write_table(table, partial)


def _table(columns: Mapping[str, Any], rows: Iterable[tuple[Any, ...]]) -> pa.Table:
    values = list(zip(*rows, strict=True)) or [()] * len(columns)
    arrays = [pa.array(column, kind) for column, kind in zip(values, columns.values(), strict=True)]
    return pa.table(arrays, names=list(columns))


def _tokens(analysis: Analysis) -> Iterator[tuple[int, str, str | None]]:
    modality: Sequence[str | None] = analysis.modality or [None] * len(analysis.tokens)
    for position, (text, kind) in enumerate(zip(analysis.tokens, modality, strict=True)):
        yield position, text, kind


def _likeness(analysis: Analysis) -> Iterator[tuple[Any, ...]]:
    for one in analysis.likeness:
        for layer, *measures in zip(analysis.layers, one.cosine, one.euclidean, one.anisotropy, strict=True):
            for head, values in enumerate(zip(*measures, strict=True)):
                yield one.of, one.slots, layer, head, *values


def _balance(analysis: Analysis) -> Iterator[tuple[int, int, float]]:
    for layer, heads in zip(analysis.layers, analysis.balance.correlation, strict=True):
        for head, value in enumerate(heads):
            yield layer, head, value


def _density(analysis: Analysis) -> Iterator[tuple[int, int, float]]:
    for importance, row in enumerate(analysis.balance.density):
        for diversity, value in enumerate(row):
            yield importance, diversity, value


def _kept(one: Kept, layers: Sequence[int]) -> pa.Table:
    # Millions of rows, of a long prompt: no tuple for each.
    heads = [(layer, head) for layer, by_head in zip(layers, one.slots, strict=True) for head in range(len(by_head))]
    slots = list(chain.from_iterable(one.slots))
    places = np.repeat(np.array(heads), list(map(len, slots)), axis=0)
    position = np.fromiter(chain.from_iterable(slots), np.int64)
    columns = {"layer": places[:, 0], "head": places[:, 1], "position": position}
    return pa.table({"policy": pa.repeat(one.policy, len(position)), **columns})


def _overlap(analysis: Analysis) -> Iterator[tuple[str, str, int, float]]:
    for pair in analysis.overlap:
        for layer, value in zip(analysis.layers, pair.jaccard, strict=True):
            yield *pair.policies, layer, value
