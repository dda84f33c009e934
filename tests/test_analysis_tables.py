"""`kvpolicy analyze --data parquet`: an analysis as tables that dataframe libraries read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

pytest.importorskip("pyarrow")

import pyarrow.parquet

import kvpolicy
from kvpolicy.analysis.analyze import analyze
from kvpolicy.analysis.result import Analysis
from kvpolicy.analysis.tables import tables, write
from kvpolicy.cli import app
from kvpolicy.testing.models import tiny
from kvpolicy.testing.vision import prompt, tiny_model

NAMES = ["balance", "density", "kept", "likeness", "overlap", "policies", "tokens"]


@pytest.fixture(scope="module")
def found() -> Analysis:
    chosen = [kvpolicy.load(name, budget=40) for name in ("snapkv", "ecokv-ada-kv", "random")]
    return analyze(tiny("gemma2"), torch.arange(3, 123), chosen, name="tiny")


def test_kept_slots_are_rows(found: Analysis) -> None:
    rows = tables(found)["kept"].to_pylist()
    for one in found.kept:
        own = [row for row in rows if row["policy"] == one.policy]
        for layer, heads in zip(found.layers, one.slots, strict=True):
            for head, slots in enumerate(heads):
                assert [row["position"] for row in own if (row["layer"], row["head"]) == (layer, head)] == slots
        assert len(own) == sum(map(sum, one.lengths))


def test_numbers_are_rows(found: Analysis) -> None:
    made = {name: table.to_pylist() for name, table in tables(found).items()}
    assert sorted(made) == NAMES
    # A layer with a sliding window lies between those that a policy evicts from.
    assert found.layers != list(range(len(found.layers)))
    values = next(one for one in found.likeness if one.of == "values")
    assert made["likeness"][-1] == {
        **{"of": "values", "slots": "all", "layer": found.layers[-1], "head": len(values.cosine[-1]) - 1},
        **{name: getattr(values, name)[-1][-1] for name in ("cosine", "euclidean", "anisotropy")},
    }
    correlation = {(row["layer"], row["head"]): row["correlation"] for row in made["balance"]}
    assert correlation[found.layers[-1], 1] == found.balance.correlation[-1][1]
    assert made["density"][20 * 3 + 7] == {"importance": 3, "diversity": 7, "density": found.balance.density[3][7]}
    assert [row["jaccard"] for row in made["overlap"]] == [value for pair in found.overlap for value in pair.jaccard]
    assert {(row["policy"], row["other"]) for row in made["overlap"]} == {pair.policies for pair in found.overlap}
    assert [json.loads(row["budget"]) for row in made["policies"]] == [one.budget for one in found.kept]
    assert made["tokens"][5] == {"position": 5, "text": found.tokens[5], "modality": None}


def test_no_list_is_in_a_cell(found: Analysis) -> None:
    kinds = {str(kind) for table in tables(found).values() for kind in table.schema.types}
    assert kinds <= {"string", "int64", "double"}


def test_one_policy_has_a_table_of_no_overlaps() -> None:
    model = tiny_model("llava")
    given = prompt(model, [[20, "image", 30]])
    inputs = {"input_ids": given.ids, "attention_mask": given.mask, **given.pictures}
    made = tables(analyze(model, inputs, [kvpolicy.load("snapkv", budget=40)]))
    assert made["overlap"].num_rows == 0
    assert made["overlap"].column_names == ["policy", "other", "layer", "jaccard"]
    assert made["tokens"]["modality"].to_pylist().count("image") == 16
    assert set(made["likeness"]["slots"].to_pylist()) == {"all", "text", "image"}


def test_files_hold_the_tables_and_what_they_are_of(found: Analysis, tmp_path: Path) -> None:
    write(found, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.parquet" for name in NAMES]
    for name, table in tables(found).items():
        back = pyarrow.parquet.read_table(tmp_path / f"{name}.parquet")
        assert back.equals(table)
        assert json.loads(back.schema.metadata[b"kvpolicy"]) == {"model": "tiny", "notes": found.notes}


def test_the_command_writes_parquet_instead_of_json(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "report"
    words = WordLevel({str(number): number for number in range(100)}, unk_token="0")
    backend = Tokenizer(words)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="0").save_pretrained(model)
    tiny().save_pretrained(model)
    text = " ".join(map(str, range(1, 61)))
    options = ["analyze", "--prompt", text, "--budget", "40", "--model", str(model), "--out", str(out)]
    result = CliRunner().invoke(app, [*options, "--data", "parquet"], catch_exceptions=False)
    assert result.exit_code == 0
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [f"{name}.parquet" for name in NAMES] + ["report.html"]
    )
    kept = pyarrow.parquet.read_table(out / "kept.parquet")
    assert kept.num_rows == 2 * 3 * 2 * 40  # policies, layers, heads, slots
    assert set(kept["policy"].to_pylist()) == {"snapkv", "ecokv-snapkv"}
    # A folder where a file is to be.
    (out / "tokens.parquet").unlink()
    (out / "tokens.parquet").mkdir()
    result = CliRunner().invoke(app, [*options, "--data", "parquet"], catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--out: expected a folder to write into" in result.stderr and "None" not in result.stderr
