"""Q-Filters: scores and calibration equal slow twins; a file that is not the model's is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from filters import some_filters
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache
from twins import blank, heads, slots
from typer.testing import CliRunner
from views import make_view

import kvpolicy
from kvpolicy import calibrate, filters
from kvpolicy.cli import app
from kvpolicy.errors import ContextError, PolicyFileError, SettingError, UnsupportedModelError
from kvpolicy.models import TINY_LLAVA_FOLDER
from kvpolicy.scorers.q_filters import QFilters
from kvpolicy.session.decoder import cache_name
from kvpolicy.testing import oracle
from kvpolicy.testing.models import tiny
from kvpolicy.types import LayerView, Needs


def twin(view: LayerView, vectors: Tensor) -> Tensor:
    scores = blank(view)
    for b, h in heads(view):
        for t in slots(view.valid[b, h]):
            scores[b, h, t] = -sum(float(x) * float(y) for x, y in zip(vectors[h], view.keys[b, h, t], strict=True))
    return scores


@pytest.mark.parametrize("padding", ["none", "left", "ragged"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_score_is_the_projection_on_the_filter_with_its_sign_turned(layer: int, padding: str, tmp_path: Path) -> None:
    path = some_filters(layers=3, heads=2, size=64, folder=tmp_path)
    view = make_view(layer, padding=padding)
    view = LayerView(**{**vars(view), "layer": layer})
    want = twin(view, filters.read(path)[0][layer])
    found = QFilters(file=path)(view)
    # Of 64 products of up to 5 times 5, each rounded.
    torch.testing.assert_close(found[view.valid].double(), want[view.valid], rtol=0, atol=64 * 25 * 2**-23)


def calibrated(model: Any, parts: list[Tensor], chosen: list[int]) -> Tensor:
    """The twin: queries as the oracle sees them; the main direction is that of the largest eigenvalue of their Gram."""
    views = [oracle.views(model, part[None], None, Needs(queries=len(part))) for part in parts]
    found = []
    for layer in zip(*views, strict=True):
        queries = torch.cat([view.queries[0] for view in layer], dim=1)[:, chosen].double()
        group = layer[0].group
        by_head = []
        for own in queries:
            main = torch.linalg.eigh(own.T @ own).eigenvectors[:, -1]
            along = [float(query @ main) for query in own]
            ahead = sum(x > 0 for x in along) - sum(x < 0 for x in along)
            by_head.append(-main if (ahead or math.fsum(along)) > 0 else main)
        found.append(torch.stack([sum(by_head[i : i + group]) / group for i in range(0, len(by_head), group)]))
    return torch.stack(found)


@pytest.mark.parametrize("shape", ["llama-gqa", "llama-mha", "qwen3"])
@pytest.mark.parametrize(("length", "samples"), [(40, 1000), (1000, 1000), (40, 31)])
def test_calibration_equals_its_twin(shape: str, length: int, samples: int) -> None:
    model = tiny(shape, torch.float64)
    ids = torch.randint(0, 128, (100,), generator=torch.Generator().manual_seed(3))
    chosen = [round(i * 99 / 30) for i in range(31)] if samples == 31 else list(range(100))
    want = calibrated(model, list(ids.split(length)), chosen)
    found = calibrate.q_filters(model, ids, length=length, samples=samples)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), want, rtol=0, atol=1e-5)


def test_ids_are_those_of_one_text() -> None:
    model, ids = tiny(), torch.arange(96)
    assert torch.equal(calibrate.q_filters(model, ids[None]), calibrate.q_filters(model, ids))
    for wrong in (ids.view(2, 48), ids[:0]):
        with pytest.raises(ContextError, match=r"ids: expected those of one text, \[T\] or \[1, T\], got"):
            calibrate.q_filters(model, wrong)
    for given in ({"length": 0}, {"samples": 0}):
        with pytest.raises(ContextError, match="length and samples: expected 1 or more"):
            calibrate.q_filters(model, ids, **given)


def test_filters_point_away_from_the_queries() -> None:
    """So that what queries have in common scores high."""
    model = tiny("llama-mha", torch.float64)
    ids = torch.arange(96)
    found = calibrate.q_filters(model, ids)
    for view, vectors in zip(oracle.views(model, ids[None], None, Needs(queries=96)), found, strict=True):
        along = torch.einsum("hwd,hd->hw", view.queries[0], vectors.double())
        assert bool(((along < 0).double().mean(-1) >= 0.5).all())


def policy(path: Path, **more: Any) -> dict[str, Any]:
    select = {"sinks": 2, "recent": 4}
    return {"name": "q", "score": {"type": "q-filters", "file": str(path)}, "budget": 16, "select": select, **more}


@pytest.mark.parametrize("decode", [None, {"every": 2}])
def test_a_padded_row_keeps_what_it_keeps_alone(decode: dict[str, int] | None, tmp_path: Path) -> None:
    model, ids = tiny(), torch.randint(1, 128, (2, 60), generator=torch.Generator().manual_seed(1))
    filters.write(path := tmp_path / "q.safetensors", calibrate.q_filters(model, torch.arange(96)), made_of(model))
    mask = torch.ones_like(ids)
    mask[0, :21] = 0
    chosen = kvpolicy.load(policy(path, decode=decode))

    def kept(ids: Tensor, mask: Tensor) -> list[Any]:
        cache = DynamicCache()
        with chosen.on(model):
            for _ in range(3):
                places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                model(ids, attention_mask=mask, position_ids=places, **{cache_name(model): cache})
                ids, mask = ids[:, -1:], torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        return [layer.held[0] for layer in cache.layers]

    together, alone = kept(ids, mask), kept(ids[:1, 21:], mask[:1, 21:])
    assert together == [[[slot + 21 for slot in head] for head in layer] for layer in alone]


def made_of(model: Any) -> filters.Made:
    return filters.Made("mine", filters.kind(model.config), 96)


@pytest.mark.parametrize(
    ("tensors", "metadata", "says"),
    [
        ({"filters": torch.zeros(2, 2, 8)}, None, "one float tensor 'q_filters' .*, one with filters"),
        ({}, None, "one with none"),
        ({"q_filters": torch.zeros(2, 8)}, None, r"one of float32 \[2, 8\]"),
        ({"q_filters": torch.zeros(2, 2, 8, dtype=torch.int64)}, None, "one of int64"),
        ({"q_filters": torch.full((2, 2, 8), torch.nan)}, None, "float32 numbers that are not finite"),
        ({"q_filters": torch.full((2, 2, 8), 1e300, dtype=torch.float64)}, None, "numbers that are not finite"),
        ({"q_filters": torch.zeros(2, 2, 8).to(torch.float8_e4m3fn)[:, :, :0]}, None, r"float8_e4m3fn \[2, 2, 0\]"),
        ({"q_filters": torch.zeros(2, 2, 8)}, {"kvpolicy": "{}"}, "whose 'kvpolicy' metadata says whose they are"),
        (
            {"q_filters": torch.zeros(2, 2, 8)},
            {"kvpolicy": '{"model": "mine", "config": null, "tokens": 1}'},
            "whose 'kvpolicy' metadata says whose they are",
        ),
    ],
)
def test_a_file_of_something_else_is_refused(
    tensors: dict[str, Tensor], metadata: dict[str, str] | None, says: str, tmp_path: Path
) -> None:
    save_file(tensors, path := tmp_path / "q.safetensors", metadata=metadata)
    with pytest.raises(SettingError, match=rf"q-filters: file: expected a safetensors file .*{says}"):
        QFilters(file=path)


def test_a_file_that_is_not_there_or_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("words")
    with pytest.raises(SettingError, match=r"which cannot be read: .*q\.txt"):
        QFilters(file=tmp_path / "q.txt")
    file = tmp_path / "mine.yaml"
    file.write_text("score:\n  type: q-filters\n  file: lost.safetensors\nbudget: 64\n")
    with pytest.raises(PolicyFileError, match=r"mine\.yaml:3:9: score\.file: expected .*, found none, got .*lost"):
        kvpolicy.load(file)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (("llama-gqa", {"num_hidden_layers": 2}), "expected a model of 3 layers, got 2"),
        (("qwen3", {}), "filters of mine: expected .*model_type='llama', got 'qwen3'.* Calibrate anew"),
        (("llama-mha", {}), "expected .*num_key_value_heads=2, got "),
    ],
)
def test_a_model_that_the_filters_are_not_of_is_refused(model: tuple[str, Any], says: str, tmp_path: Path) -> None:
    filters.write(path := tmp_path / "q.safetensors", torch.zeros(3, 2, 8), made_of(tiny("llama-gqa")))
    other = tiny(model[0], **model[1])
    with pytest.raises(UnsupportedModelError, match=says):
        kvpolicy.load(policy(path)).on(other)


def test_filters_that_do_not_say_whose_they_are_have_to_have_the_heads_of_the_model(tmp_path: Path) -> None:
    """As those that the authors publish."""
    save_file({"q_filters": torch.zeros(3, 3, 8)}, path := tmp_path / "q.safetensors")
    chosen = kvpolicy.load(policy(path))
    says = "expected 3 layers of 3 KV heads of size 8, got layer 0 with 2 of size 8"
    with pytest.raises(UnsupportedModelError, match=says):
        chosen.compress(tiny(), torch.arange(60))


def test_a_path_is_relative_to_the_file_that_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (inner := tmp_path / "inner").mkdir()
    path = some_filters(3, 2, 8, folder=inner)
    base = inner / "base.yaml"
    base.write_text("score: {type: q-filters, file: q.safetensors}\nbudget: 64\n")
    (above := tmp_path / "above.yaml").write_text("extends: inner/base.yaml\nbudget: 32\n")
    for file in (base, above):
        assert kvpolicy.load(file).score == QFilters(file=path)
    monkeypatch.chdir(inner)
    # From any folder: a context, or a result of eval, says where the file is.
    plain = kvpolicy.load("../above.yaml").to_dict()
    monkeypatch.chdir("/")
    assert kvpolicy.load(plain).score.file == path
    monkeypatch.chdir(inner)
    assert kvpolicy.load(policy(Path("q.safetensors"))).score == QFilters(file="q.safetensors")
    base.write_text(f"score: {{type: q-filters, file: {path}}}\nbudget: 64\n")
    assert kvpolicy.load(base).score.file == path
    assert kvpolicy.load(kvpolicy.load(base).to_dict()) == kvpolicy.load(base)


def test_the_command_writes_what_the_function_finds(tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text("what shape is the red thing and how many are there " * 8)
    options = ["--file", str(text), "--out", str(out := tmp_path / "q.safetensors"), "--model", "tiny-llava"]
    done = CliRunner().invoke(app, ["calibrate", "q-filters", *options, "--samples", "40", "--json"])
    assert done.exit_code == 0, done.output
    model, tokenizer = kvpolicy.models.load("tiny-llava")
    ids = tokenizer(text.read_text(), return_tensors="pt")["input_ids"][0]
    found, made = filters.read(out)
    assert torch.equal(found, calibrate.q_filters(model, ids, samples=40))
    config = json.loads((TINY_LLAVA_FOLDER / "config.json").read_text())["text_config"]
    assert made is not None
    assert (made.model, made.tokens, made.config["hidden_size"]) == ("tiny-llava", 40, config["hidden_size"])
    assert json.loads(done.stdout)["layers"] == len(found)
    context = kvpolicy.load(policy(out)).compress(model, ids)
    assert context.report.layers[0].kept == [[16] * made.config["num_key_value_heads"]]


@pytest.mark.parametrize("out", ["nowhere/q.safetensors", "."])
def test_the_command_says_where_it_cannot_write_before_it_reads(out: str, tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text("words")
    options = ["--file", str(text), "--out", str(tmp_path / out), "--model", "/nowhere"]
    done = CliRunner().invoke(app, ["calibrate", "q-filters", *options])
    assert done.exit_code == 2 and "error: --out: expected a file in a folder that is there" in done.stderr
