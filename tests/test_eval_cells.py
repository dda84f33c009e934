"""Cells: what one measures, that its result is whole or not there, and which cells a comparison has."""

from __future__ import annotations

import copy
import dataclasses
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import bench, letters
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpolicy import load
from kvpolicy.config import to_yaml
from kvpolicy.eval.answer import answer, match, prompt
from kvpolicy.eval.bench import Bench
from kvpolicy.eval.cells import Cell, ResultError, digest, measure, result_path, write_whole
from kvpolicy.eval.drift import drift, evicted_logits, full_logits, perplexity
from kvpolicy.eval.grid import Grid, policies, shard, without_weight
from kvpolicy.eval.readings import Readings
from kvpolicy.eval.results import read_result, read_results
from kvpolicy.eval.sweep import sweep_here
from kvpolicy.eval.tasks.example import Question
from kvpolicy.eval.tasks.files import load_tasks
from kvpolicy.eval.tasks.haystack import TaskError
from kvpolicy.texts import unrepeated

SMALL = {"samples": 2, "length": 200}
ASKED = Question("It is a long and winding road, " * 5, "Where does it lead?", ("x", "y"), "It leads ")


def grid(*names: str, tasks: str = "drift,odd-one-out", modes: Any = ("query-agnostic",), seed: int = 0) -> Grid:
    found = [task for name in tasks.split(",") for task in load_tasks(name, SMALL)]
    return Grid([load(name, budget=80) if name != "full" else load(name) for name in names], found, modes, seed)


def cell(policy: str, task: str = "odd-one-out", **settings: Any) -> Cell:
    return grid(policy, tasks=task, **settings).cells(bench())[0]


# What a cell measures


def test_models_that_differ_in_their_head_alone_have_cells_of_their_own() -> None:
    asked, here = grid("snapkv", tasks="odd-one-out"), bench()
    tuned = copy.deepcopy(here.model)
    with torch.no_grad():
        tuned.lm_head.weight.mul_(2)
    other = Bench(here.name, tuned, here.tokenizer, unrepeated())
    assert asked.cells(other)[0].name != asked.cells(here)[0].name


def test_what_is_in_a_file_that_a_policy_names_is_part_of_its_cells(tmp_path: Path) -> None:
    """Of a file that has changed, a result would be another policy's."""
    table = tmp_path / "heads.tsv"
    own = {
        "extends": "snapkv",
        "name": "own",
        "budget": {"tokens": 80, "heads": {"type": "head-table", "file": str(table)}},
    }
    found = []
    for text in ("1\t0\n" * 3, "0\t1\n" * 3):
        table.write_text(text)
        found.append(Grid([load(own)], load_tasks("odd-one-out", SMALL), ["query-agnostic"]).cells(bench())[0])
    first, second = found
    assert first.policy == second.policy and first.name != second.name
    assert list(first.files) == [str(table)]
    # Of policies without files, cells are named as they were before there were any.
    plain = dataclasses.asdict(cell("snapkv"))
    assert plain.pop("files") == {} and digest(plain) == cell("snapkv").name


def test_the_full_cache_answers_as_the_model_does_alone() -> None:
    context, question = prompt(letters(), ASKED)
    whole = torch.cat([context, question], dim=1)
    expected = bench().model.generate(whole, max_new_tokens=9, do_sample=False, attention_mask=torch.ones_like(whole))
    text = letters().decode(expected[0, whole.shape[1] :], skip_special_tokens=True)
    for aware in (False, True):
        found = answer(Readings(bench().model), letters(), load("full"), ASKED, query_aware=aware, new_tokens=9)
        assert found.text == text
        assert found.bytes == found.bytes_full


def test_an_evicted_answer_is_that_of_the_compressed_context() -> None:
    policy = load("snapkv", budget=40)
    context, question = prompt(letters(), ASKED)
    texts = set()
    for aware in (False, True):
        held = policy.compress(bench().model, context, question if aware else None)
        with held.fork() as fork:
            ids = fork.generate(None if aware else question, max_new_tokens=9, do_sample=False)
        found = answer(Readings(bench().model), letters(), policy, ASKED, query_aware=aware, new_tokens=9)
        assert found.text == letters().decode(ids[0], skip_special_tokens=True)
        assert (found.bytes, found.bytes_full) == (held.report.bytes, held.report.bytes_full)
        assert found.bytes < found.bytes_full / 2
        texts.add(found.text)
    assert len(texts) == 2


@pytest.mark.parametrize("chat", [True, False])
def test_a_prompt_is_cut_where_the_question_begins(chat: bool) -> None:
    context, question = (letters().decode(ids[0]) for ids in prompt(letters(chat=chat), ASKED))
    opening = "<user>" if chat else ""
    assert context == opening + ASKED.context
    closing = "</><assistant>" if chat else "\n\n"
    assert question == f"\n\n{ASKED.question}{closing}It leads"


def test_a_template_that_changes_what_is_said_is_refused() -> None:
    tokenizer = letters(chat=False)
    tokenizer.chat_template = "{{ messages[0].content | upper }}"
    try:
        with pytest.raises(TaskError, match="expected a chat template that holds a message as it is"):
            prompt(tokenizer, ASKED)
    finally:
        tokenizer.chat_template = None


@pytest.mark.parametrize(
    ("text", "whole", "part"), [("", 0, 0), ("It is ONE.", 0.5, 1), ("two, one", 1, 1), ("three", 0, 0)]
)
def test_strings_match_whatever_their_case(text: str, whole: float, part: float) -> None:
    assert match(text, ("one", "two")) == {"string_match_all": whole, "string_match_part": part}


def test_drift_is_that_of_the_same_policy_and_text(tmp_path: Path) -> None:
    made = cell("snapkv", "drift")
    assert sweep_here([made], tmp_path, bench())
    policy, model = load("snapkv", budget=80), bench().model
    examples = bench().examples(load_tasks("drift", SMALL)[0], 0)
    for line, each in zip(read_result(result_path(made, tmp_path)).examples, examples, strict=True):
        ids, continuation = torch.tensor([each.context]), torch.tensor([each.continuation])  # type: ignore[union-attr]
        expected = drift(model, policy, ids, continuation)
        logits = evicted_logits(model, policy, ids, continuation)
        assert line["scores"] == {
            "kl": expected.mean,
            "agreement": expected.agreement,
            "perplexity": perplexity(logits, continuation),
        }
        assert expected.mean > 0
        assert line["bytes"] == 80 * line["bytes_full"] // 200
        with torch.no_grad():
            logits = model(torch.cat([ids, continuation], 1)).logits[0, 200:-1]
        by_torch = torch.nn.functional.cross_entropy(logits.double(), continuation[0, 1:]).exp()
        full = perplexity(full_logits(model, ids, continuation), continuation)
        assert full == pytest.approx(float(by_torch), rel=1e-5)


def test_examples_without_finite_scores_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cell("snapkv", "drift")
    monkeypatch.setattr("kvpolicy.eval.bench.perplexity", lambda *_: float("nan"))
    with pytest.raises(ResultError, match="snapkv, drift, example 0: perplexity is nan"):
        measure(made, bench())


# The result file


def test_a_result_holds_what_it_takes_to_repeat_it(tmp_path: Path) -> None:
    made = cell("ecokv", seed=3)
    steps = []
    assert sweep_here([made], tmp_path, bench(), advance=lambda: steps.append(1))
    assert [path.name for path in tmp_path.iterdir()] == [f"{made.name}.jsonl"]
    found = read_result(result_path(made, tmp_path))
    assert found.cell == made
    assert to_yaml(load(found.cell.policy)) == to_yaml(load("ecokv", budget=80))
    assert found.header["fingerprint"]["weights"] == made.weights
    assert found.header["chat_template"] == letters().chat_template
    assert found.header["stop_tokens"] == 256
    assert {"python", "kvpolicy", "torch", "transformers", "tokenizers"} == set(found.header["versions"])
    assert found.header["machine"]["threads"] == torch.get_num_threads()
    assert [line["example"] for line in found.examples] == [0, 1] == [*range(len(steps))]
    for line in found.examples:
        assert line["bytes"] < line["bytes_full"]
        assert line["scores"] == {"string_match_all": float(line["answers"][0] in line["text"])}


def test_the_mode_says_whether_the_question_is_in_view(tmp_path: Path) -> None:
    made = grid("snapkv", tasks="odd-one-out", modes=("query-agnostic", "query-aware")).cells(bench())
    held = []
    for each in made:
        sweep_here([each], tmp_path, bench())
        held.append([line["bytes_full"] for line in read_result(result_path(each, tmp_path)).examples])
    assert all(aware > agnostic for agnostic, aware in zip(*held, strict=True))  # by the question


def test_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    made = cell("snapkv")
    assert sweep_here([made], tmp_path, bench())
    before = result_path(made, tmp_path).stat().st_mtime_ns
    assert not sweep_here([made], tmp_path, bench())
    assert result_path(made, tmp_path).stat().st_mtime_ns == before


def test_measuring_again_gives_the_same(tmp_path: Path) -> None:
    made = cell("ecokv")
    results = []
    for name in ("one", "two"):
        sweep_here([made], tmp_path / name, bench())
        results.append(read_result(result_path(made, tmp_path / name)).examples)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "change",
    [{"weights": "other"}, {"model": "other"}, {"policy": {}}, {"task": {}}, {"mode": "query-aware"}, {"seed": 1}],
)
def test_another_cell_has_another_name(change: dict[str, Any]) -> None:
    made = cell("snapkv")
    assert dataclasses.replace(made, **change).name != made.name
    assert Cell(**json.loads(json.dumps(dataclasses.asdict(made)))).name == made.name


def test_examples_of_another_text_are_refused() -> None:
    other = Bench("tiny", bench().model, letters(), ["Sheep graze on green hills. " * 100])
    with pytest.raises(ResultError, match="expected the examples it was made with"):
        measure(cell("snapkv"), other)


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond a kilobyte: not that which pytest itself writes to either, so only for a moment."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_and_leaves_no_half_file(tmp_path: Path) -> None:
    says = r"large.jsonl: cannot be written: File too large. What was finished before"
    with full_disk(), pytest.raises(ResultError, match=says):
        write_whole(tmp_path / "small.jsonl", [{"a": 1}])
        write_whole(tmp_path / "large.jsonl", [{"a": "b" * 2000}])
    assert [path.name for path in tmp_path.iterdir()] == ["small.jsonl"]


def test_an_interrupt_loses_no_finished_cell(tmp_path: Path) -> None:
    cells = grid("snapkv", "random").cells(bench())
    left = [3]  # one and a half cells of two examples

    def interrupt() -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep_here(cells, tmp_path, bench(), advance=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == [f"{cells[0].name}.jsonl"]
    assert sweep_here(cells, tmp_path, bench()) == 3
    assert len(read_results(tmp_path)) == 4


# The grid


def test_full_random_and_no_redundancy_weight_are_in_every_table() -> None:
    names = [policy.name for policy in policies(["snapkv"], [64, 0.5])]
    ablated = "ecokv-snapkv, no redundancy weight"
    assert names == ["full", "random", "random", "snapkv", "snapkv", ablated, ablated]
    names = [policy.name for policy in policies(["random", "ecokv", "full"], [64])]
    assert names == ["full", "random", "ecokv", "ecokv, no redundancy weight"]


@pytest.mark.parametrize("name", ["ecokv", "mixkv-snapkv", "ecokv-ada-kv"])
def test_without_weight_every_head_mixes_half_and_half(name: str) -> None:
    policy = load(name, budget=64)
    ablated = without_weight(policy)
    assert ablated
    assert ablated.budget == policy.budget
    assert ablated.select == policy.select
    assert ablated.score.redundancy == 0.5  # type: ignore[attr-defined]
    assert ablated.score.importance == policy.score.importance  # type: ignore[attr-defined]


def test_the_weight_is_taken_away_deep_inside_too() -> None:
    eco = {"type": "redundancy-adaptive", "importance": "value-norm", "diversity": "cosine-diversity"}
    nested = load({"name": "deep", "score": {"type": "fixed", "inputs": [eco, "recency"]}, "budget": 64})
    ablated = without_weight(nested)
    assert ablated
    assert ablated.score.inputs[0].redundancy == 0.5  # type: ignore[attr-defined]


def test_cells_are_each_of_one_policy_task_and_mode() -> None:
    made = grid("full", "snapkv", modes=("query-agnostic", "query-aware")).cells(bench())
    assert [(each.policy["name"], each.task["task"], each.mode) for each in made] == [
        ("full", "drift", "query-agnostic"),
        ("snapkv", "drift", "query-agnostic"),
        ("full", "odd-one-out", "either"),
        ("snapkv", "odd-one-out", "query-agnostic"),
        ("snapkv", "odd-one-out", "query-aware"),
    ]
    assert len({each.name for each in made}) == 5


def test_shards_are_all_cells_each_once() -> None:
    made = grid("full", "snapkv", "random").cells(bench())
    parts = [shard(made, index, 4) for index in (1, 2, 3, 4)]
    assert sorted(each.name for part in parts for each in part) == sorted(each.name for each in made)
    assert {len(part) for part in parts} == {1, 2}


@pytest.mark.model
def test_the_real_model_finds_a_needle_with_the_full_cache_alone(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    real = Bench("smollm2", *smollm2, unrepeated())
    task = load_tasks("niah-single", {"samples": 2, "length": 256})[0]
    scores = {
        policy.name: [
            real.measure(policy, task, each, query_aware=False).scores["string_match_all"]
            for each in real.examples(task, 0)
        ]
        for policy in (load("full"), load("random", budget=32))
    }
    assert scores == {"full": [1, 1], "random": [0, 0]}
