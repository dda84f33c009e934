"""Statistics, tables, the page, and the two commands."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benches import bench, letters
from browser import needs_chromium, show
from rich.console import Console
from typer.testing import CliRunner

from kvpolicy import load, models
from kvpolicy.analysis.plots import COLOURS
from kvpolicy.cli import app
from kvpolicy.config import dump
from kvpolicy.eval import plots
from kvpolicy.eval.asked import read_asked, write_asked
from kvpolicy.eval.bench import Bench
from kvpolicy.eval.cells import Cell, ResultError, measure, write_whole
from kvpolicy.eval.page import page
from kvpolicy.eval.results import Result, read_result, read_results
from kvpolicy.eval.show import notes, terminal
from kvpolicy.eval.statistics import interval
from kvpolicy.eval.table import Row, tables


def result(
    policy: str, scores: list[float], *, budget: float | None = 64, mode: Any = "query-aware", **cell: Any
) -> Result:
    """Return a result of a task with the scores of its examples; bytes are a thousand a slot."""
    loaded = load(policy) if budget is None else load(policy, budget=budget)
    task = {"task": "niah-single", "length": 200}
    settings = {"model": "tiny", "weights": "w", "seed": 0, "examples": "e", "task": task, **cell}
    made = Cell(policy=dump(loaded), mode=mode, **settings)
    kept = 200_000 if budget is None else int(budget * 1000)
    lines = [
        {"example": at, "scores": {"string_match_all": score}, "bytes": kept, "bytes_full": 200_000}
        for at, score in enumerate(scores)
    ]
    header = {
        "kvpolicy-eval": 1,
        "cell": dataclasses.asdict(made),
        "scores": {"string_match_all": True},
        "fingerprint": {"weights": "w"},
        **{name: name for name in ("attention", "stop_tokens", "versions", "machine")},
    }
    return Result(header, made, lines)


FULL = result("full", [1, 1, 1, 0], budget=None, mode="either")
SNAP = result("snapkv", [0, 1, 0, 0])
ECO = result("ecokv", [1, 1, 0, 0])
MORE = result("ecokv", [1, 1, 1, 0], budget=128)


def rows(*results: Result, baseline: str | None = None) -> dict[tuple[str, Any], Row]:
    (table,) = tables(results, baseline)
    return {(row.policy, row.budget): row for row in table.rows}


# Statistics


def test_an_interval_is_that_of_the_mean() -> None:
    values = np.random.default_rng(1).normal(3, 2, size=400)
    found = interval(values.tolist())
    assert found.mean == pytest.approx(values.mean())
    assert found.low is not None and found.high is not None
    # Of so many, the bootstrap's is the normal one: 1.96 standard errors of the mean, of which chance moves the ends.
    error = values.std() / 20
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    random = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        found = interval(random.normal(size=50).tolist())
        assert found.low is not None and found.high is not None
        covered += found.low <= 0 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_an_interval_repeats() -> None:
    values = np.random.default_rng(3).normal(size=30).tolist()
    assert interval(values) == interval(values)


# Tables


def test_rows_hold_means_and_bytes() -> None:
    found = rows(FULL, SNAP, ECO, MORE)
    assert [(policy, budget) for policy, budget in found] == [
        ("full", None),
        ("ecokv", 128),
        ("ecokv", 64),
        ("snapkv", 64),
    ]
    row = found["ecokv", 64]
    assert (row.examples, row.bytes, row.bytes_full) == (4, 64_000, 200_000)
    assert row.scores["string_match_all"] == interval([1, 1, 0, 0])
    assert row.differences == {}


def test_differences_are_paired_and_at_the_same_budget() -> None:
    found = rows(FULL, SNAP, ECO, MORE, baseline="snapkv")
    assert found["ecokv", 64].differences["string_match_all"] == interval([1, 0, 0, 0])
    assert found["ecokv", 128].differences == {}
    against_all = rows(FULL, SNAP, ECO, MORE, baseline="full")
    assert against_all["ecokv", 128].differences["string_match_all"] == interval([0, 0, 0, 0])
    assert against_all["snapkv", 64].differences["string_match_all"].mean == -0.5


def test_pairs_are_of_the_examples_that_both_have() -> None:
    longer = result("ecokv", [1, 1, 0, 0, 1, 1])
    assert rows(SNAP, longer, baseline="snapkv")["ecokv", 64].differences["string_match_all"].mean == 0.25


def test_the_front_is_what_no_row_beats() -> None:
    worse = result("random", [0, 0, 0, 0], budget=128)
    found = rows(FULL, SNAP, ECO, MORE, worse)
    assert {key for key, row in found.items() if row.front} == {("ecokv", 64), ("ecokv", 128)}


def test_seeds_are_examples_of_one_row() -> None:
    other = result("ecokv", [0, 0, 0, 0], seed=1, examples="f")
    row = rows(ECO, other)["ecokv", 64]
    assert row.examples == 8
    assert row.scores["string_match_all"].mean == 0.25


def test_each_mode_has_a_table_and_the_full_cache_is_in_both() -> None:
    agnostic = result("snapkv", [0, 0, 0, 0], mode="query-agnostic")
    found = tables([FULL, SNAP, agnostic])
    assert [table.title for table in found] == ["niah-single, query-agnostic", "niah-single, query-aware"]
    assert [[row.policy for row in table.rows] for table in found] == [["full", "snapkv"]] * 2


def test_models_and_settings_have_tables_of_their_own() -> None:
    longer = result("snapkv", [1], task={"task": "niah-single", "length": 400})
    assert len(tables([SNAP, result("snapkv", [1], model="other"), longer])) == 3


def test_two_policies_of_one_name_are_told_apart() -> None:
    changed = dump(load("snapkv", budget=64, select={"recent": 8}))
    other = dataclasses.replace(SNAP, cell=dataclasses.replace(SNAP.cell, policy=changed))
    names = [row.policy for row in tables([SNAP, other])[0].rows]
    assert len(set(names)) == 2
    assert all(name.startswith("snapkv #") for name in names)


def test_results_of_two_texts_are_refused() -> None:
    with pytest.raises(ResultError, match="expected the same examples of niah-single"):
        tables([SNAP, result("ecokv", [1, 1], examples="others")])


def test_an_unknown_baseline_is_refused() -> None:
    with pytest.raises(ResultError, match=r"got 'snapkb'. Did you mean 'snapkv'\? Known: ecokv, snapkv"):
        tables([SNAP, ECO], "snapkb")


# What a folder lacks


SAYS = "asked for, and not in the folder: "
UNKNOWN = "the folder does not say what was asked for: what is missing is not known"
FIRST = result("snapkv", [1, 1, 1, 0], budget=128)


def lacking(asked: list[Result], there: list[Result]) -> dict[str, str]:
    """Return what each table says that it lacks of what was asked for."""
    return {
        table.title: note.removeprefix(SAYS)
        for table in tables(there, asked=[one.cell for one in asked])
        for note in notes(table)
        if note.startswith(SAYS) or note == UNKNOWN
    }


def test_a_table_names_what_was_asked_for_and_is_not_there() -> None:
    asked = [FULL, MORE, ECO, SNAP, FIRST]
    assert lacking(asked, asked) == {}
    assert lacking(asked, [FULL, MORE, ECO, SNAP]) == {"niah-single, query-aware": "snapkv at 128"}
    assert lacking(asked, [MORE, SNAP]) == {"niah-single, query-aware": "full; ecokv at 64; snapkv at 128"}
    # What others have is not asked for thereby.
    assert lacking([SNAP, MORE], [SNAP, MORE]) == {}
    # What is there besides is no gap.
    assert lacking([SNAP], [SNAP, ECO, MORE]) == {}


def test_a_task_without_any_result_has_a_table_of_gaps() -> None:
    drift = result("snapkv", [1], task={"task": "drift", "length": 200}, mode="query-agnostic")
    other = result("ecokv", [1], model="other")
    empty, *_ = found = tables([SNAP], asked=[one.cell for one in (SNAP, drift, other)])
    assert [(table.title, table.model, len(table.rows)) for table in found] == [
        ("niah-single, query-aware", "other", 0),
        ("drift, query-agnostic", "tiny", 0),
        ("niah-single, query-aware", "tiny", 1),
    ]
    assert [notes(table) for table in found[:2]] == [[f"{SAYS}ecokv at 64"], [f"{SAYS}snapkv at 64"]]
    assert terminal(empty, "snapkv", 80) == ["niah-single, query-aware: model other, length 200"]
    text = page(found, [SNAP], "snapkv")
    assert text.count("<h2>") == 4 and text.count("<table>") == text.count("<img") == 1
    assert f"Note: {SAYS}ecokv at 64." in text


def test_gaps_are_of_each_mode_and_seed() -> None:
    agnostic = result("snapkv", [0], mode="query-agnostic")
    assert lacking([FULL, SNAP, ECO, agnostic], [ECO]) == {
        "niah-single, query-agnostic": "full; snapkv at 64",
        "niah-single, query-aware": "full; snapkv at 64",
    }
    second = [result(name, [0], seed=1, examples="f") for name in ("snapkv", "ecokv")]
    assert lacking([SNAP, ECO, *second], [SNAP, second[0]]) == {"niah-single, query-aware": "ecokv at 64"}
    assert lacking([SNAP, ECO, *second], [SNAP, ECO]) == {
        "niah-single, query-aware": "snapkv at 64 (seed 1); ecokv at 64 (seed 1)"
    }


def test_a_policy_that_was_changed_is_told_from_what_it_was() -> None:
    changed = dataclasses.replace(SNAP.cell, policy=dump(load("snapkv", budget=64, select={"recent": 8})))
    (table,) = tables([SNAP], asked=[SNAP.cell, changed])
    (row,), (gap,) = table.rows, table.gaps or []
    assert row.policy.startswith("snapkv #") and gap.policy.startswith("snapkv #") and row.policy != gap.policy


def test_what_no_folder_says_is_not_known() -> None:
    assert lacking([], [FULL, SNAP]) == {"niah-single, query-aware": UNKNOWN}
    agnostic = result("snapkv", [0], mode="query-agnostic")
    assert lacking([FULL, agnostic], [FULL, agnostic, SNAP]) == {"niah-single, query-aware": UNKNOWN}


def test_a_share_that_protected_slots_take_whole_is_noted() -> None:
    """Finch protects 32 slots, SnapKV 36, of a context of 200 tokens."""
    found = [result(name, [1] * 8, budget=share) for share in (0.16, 0.18, 0.5) for name in ("finch", "snapkv")]
    (table,) = tables([*found, FULL], asked=[])
    says = "sinks and recent tokens take the whole budget, so that nothing is left to the score: "
    (note,) = [note for note in notes(table) if note.startswith(says)]
    assert sorted(note.removeprefix(says).split("; ")) == ["finch at 0.16", "snapkv at 0.16", "snapkv at 0.18"]


def test_what_was_asked_for_comes_back_and_is_written_once(tmp_path: Path) -> None:
    cells = [one.cell for one in (FULL, ECO, MORE)]
    assert read_asked(tmp_path) == []
    write_asked(cells, tmp_path)
    assert read_asked(tmp_path) == cells
    (path,) = tmp_path.iterdir()
    before = path.stat().st_mtime_ns
    write_asked(cells[::-1], tmp_path)
    assert [(each, each.stat().st_mtime_ns) for each in tmp_path.iterdir()] == [(path, before)]
    write_asked([SNAP.cell, ECO.cell], tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert sorted(cell.name for cell in read_asked(tmp_path)) == sorted(one.name for one in [*cells, SNAP.cell])
    assert read_results(tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"kvpolicy-eval": 1', '"kvpolicy-eval": 2', ":1: expected format 1 or older, got 2"),
        ('"seed": 0', '"seed": 1', "it is damaged: not what was written"),
        ('"seed": 0, ', "", "it is damaged"),
        ('{"cell": ', "{", "expected JSON"),
    ],
)
def test_a_damaged_file_of_what_was_asked_for_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    write_asked([FULL.cell, SNAP.cell], tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ResultError, match=message):
        read_asked(tmp_path)


@pytest.mark.parametrize("damage", ["", "{", '{"kvpolicy-eval": 1, "asked": 2}\n'])
def test_a_damaged_file_of_what_is_asked_for_again_is_written_again(tmp_path: Path, damage: str) -> None:
    write_asked([FULL.cell, SNAP.cell], tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    path.write_text(damage)
    write_asked([FULL.cell, SNAP.cell], tmp_path)
    assert path.read_text() == whole and read_asked(tmp_path) == [FULL.cell, SNAP.cell]


def test_what_was_asked_for_of_another_text_is_refused() -> None:
    says = rf"results {SNAP.cell.name} and \w+ \(asked for\): expected the same .* or remove the asked-\*.jsonl of one"
    with pytest.raises(ResultError, match=says):
        tables([SNAP], asked=[result("ecokv", [1], examples="others").cell])


# Result files


def save(one: Result, folder: Path) -> Path:
    path = folder / f"{one.cell.name}.jsonl"
    write_whole(path, [one.header, *one.examples])
    return path


def test_results_come_back_from_their_files(tmp_path: Path) -> None:
    odd = dataclasses.replace(SNAP, examples=[{**SNAP.examples[0], "text": "one\u2028two\x85\r\n"}])
    assert read_result(save(odd, tmp_path)) == odd


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ResultError, match="found none in"):
            read_results(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"kvpolicy-eval": 1', '"other": 1', ":1: expected the header of a result"),
        ('"kvpolicy-eval": 1', '"kvpolicy-eval": 2', ":1: expected format 1 or older, got 2"),
        ('"seed": 0', '"seed": 1', "it is damaged: not what was written"),
        ('"seed": 0, ', "", "it is damaged"),
        ('"bytes": 64000, ', "", "it is damaged: 'bytes'"),
        ('{"example": 1', '{"example": 1 {', "it is damaged: line 3: expected JSON.*Remove it and run"),
        ('{"example": 1', '7\n{"example": 1', "it is damaged: line 3: expected a JSON object, got '7'"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = save(SNAP, tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ResultError, match=message):
        read_results(tmp_path)


def test_a_file_with_too_few_examples_is_refused(tmp_path: Path) -> None:
    task = {"task": "niah-single", "length": 200, "samples": 5}
    path = save(result("snapkv", [0, 1, 0, 0], task=task), tmp_path)
    with pytest.raises(ResultError, match=rf"{path}: it is damaged: expected 5 examples, got 4\. Remove it"):
        read_results(tmp_path)
    path.unlink()
    # Of a user's own, there may be fewer than asked for.
    save(result("snapkv", [0, 1], task={"task": "examples", "file": "a.jsonl", "samples": 5}), tmp_path)
    assert len(read_results(tmp_path)) == 1


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = save(SNAP, tmp_path)
    path.write_bytes(path.read_bytes() + b"\xff")
    with pytest.raises(ResultError, match="cannot be read"):
        read_results(tmp_path)


# In a terminal


def drawn(*results: Result, width: int) -> list[str]:
    """Return the lines of a table in a terminal so wide."""
    console = Console(file=StringIO(), width=width, record=True)
    for part in terminal(tables(results, "snapkv")[0], "snapkv", width):
        console.print(part)
    return console.export_text().splitlines()


@pytest.mark.parametrize(("width", "parts"), [(80, 3), (230, 1), (260, 1)])
def test_a_table_fits_into_a_terminal_and_is_whole(width: int, parts: int) -> None:
    three = {"kl": False, "agreement": True, "perplexity": False}
    found = []
    for one in (FULL, MORE, SNAP, result("ecokv-values-snapkv", [0, 1, 1, 1])):
        named = {**one.cell.policy, "name": f"{one.cell.policy['name']}, no redundancy weight"}
        cell = one.cell if one is SNAP else dataclasses.replace(one.cell, policy=named)
        examples = [{**line, "scores": dict.fromkeys(three, 12.345)} for line in one.examples]
        found.append(Result({**one.header, "scores": three}, cell, examples))
    lines = drawn(*found, width=width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width and "…" not in text
    assert sum("┡" in line for line in lines) == parts
    # Nothing is broken but headings and names, and these between words.
    assert text.count("[12.345, 12.345]") == 3 * 4
    assert text.count("[+0.000, +0.000]") == 3 * 2
    assert text.count("ecokv-values-snapkv,") == parts
    assert ("examples" in text) == (parts == 1)
    assert any("ecokv-values-snapkv, no redundancy weight" in line for line in lines) == (width == 260)


# The page


class Reader(HTMLParser):
    """Collects the texts of a page and all that it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "data")]
        assert tag not in ("script", "link", "iframe")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_needs_nothing_else_and_shows_text_as_it_is() -> None:
    strange = dataclasses.replace(SNAP.cell, policy={**SNAP.cell.policy, "name": "<b>&snap</b>"})
    results = [FULL, dataclasses.replace(SNAP, cell=strange), ECO, MORE]
    reader = Reader()
    reader.feed(page(tables(results, "ecokv"), results, "ecokv"))
    assert [each[:26] for each in reader.fetched] == ["data:image/svg+xml;base64,"]
    assert "<b>&snap</b>" in reader.texts
    assert "+0.000 [+0.000, +0.000]" in reader.texts
    assert any("window: 32" in text for text in reader.texts)  # the policy in full


def test_a_picture_has_a_line_for_each_policy_and_repeats() -> None:
    (table,) = tables([FULL, SNAP, ECO, MORE])
    found = plots.pareto(table)
    assert found == plots.pareto(table)
    text = found.decode()
    for name in ("full", "snapkv", "ecokv", "Pareto front", "string_match_all (more is better)"):
        assert f">{name}</text>" in text


def test_policies_that_keep_as_many_bytes_stand_side_by_side() -> None:
    policies = ["ecokv", "key-norm", "random", "snapkv"]
    (table,) = tables([result(policy, [1, 0, 0, 0], budget=budget) for policy in policies for budget in (64, 128)])
    axes, _, _ = plots.pareto(table).decode().partition('id="legend_1"')
    marks = re.findall(r'<use [^>]* x="([\d.]+)" y="[\d.]+" style="fill: (#\w+); stroke: \2"', axes)
    by_policy = [sorted({float(x) for x, colour in marks if colour == each.lower()}) for each in COLOURS[:4]]
    (low, high), *others = by_policy
    for number, (x, beyond) in enumerate(others, start=1):
        assert x - low == pytest.approx(number * (others[0][0] - low), abs=1e-3)
        assert x - low >= 4 * number
        assert beyond - x == pytest.approx(high - low, abs=1e-3)


@needs_chromium
def test_a_browser_shows_the_page_on_a_phone_too(tmp_path: Path) -> None:
    results = [FULL, SNAP, ECO, MORE, result("snapkv", [0, 0, 0, 0], mode="query-agnostic")]
    file = tmp_path / "page.html"
    file.write_text(page(tables(results, "snapkv"), results, "snapkv"), encoding="utf-8")
    for width in (400, 1100):
        shown = show(file, width)
        assert (shown.overflow, shown.fetched, shown.complaints) == (0, [], [])
        assert shown.rows == [1 + 2, 1 + 4]
        # Letters of 10 points in pictures of 9 inches can be read.
        assert len(shown.images) == 2 and min(shown.images) >= 700


def test_a_picture_of_a_single_example_has_no_intervals() -> None:
    (table,) = tables([result("snapkv", [0.1])])
    assert b"snapkv" in plots.pareto(table)


def test_rounding_puts_no_interval_on_the_wrong_side() -> None:
    (table,) = tables([result("snapkv", [0.1] * 3), result("ecokv", [0.7] * 7)])
    assert b"snapkv" in plots.pareto(table)


# The commands


def call(*arguments: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return found.exit_code, found.stdout, found.stderr


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every model be a tiny one."""
    monkeypatch.setattr(models, "load", lambda *_, **__: (bench().model, letters()))


EVAL = ("eval", "--policies", "snapkv", "--budgets", "80,0.5", "--samples", "2", "--length", "200")


def test_eval_measures_once_and_report_shows_it(tiny_model: None, tmp_path: Path) -> None:
    out = tmp_path / "results"
    command = (*EVAL, "--tasks", "drift,odd-one-out", "--mode", "query-agnostic,query-aware", "--out", str(out))
    for index in (1, 2):
        code, text, _ = call(*command, "--shard", f"{index}/2", "--json")
        assert code == 0
        first = json.loads(text)
        assert first["there_before"] == 0
        assert all(Path(cell["file"]).is_file() for cell in first["cells"])
    # drift: full, and three policies at two budgets; odd-one-out: full, and those in two modes.
    assert call(*command)[1].splitlines()[0] == f"0 cells measured, 20 there before, in {out}"

    html = tmp_path / "page.html"
    code, text, _ = call("report", str(out), "--baseline", "snapkv", "--html", str(html), "--json")
    assert code == 0
    found = json.loads(text)
    assert sorted((table["task"]["task"], table["mode"], len(table["rows"])) for table in found) == [
        ("drift", "query-agnostic", 7),
        ("odd-one-out", "query-agnostic", 7),
        ("odd-one-out", "query-aware", 7),
    ]
    drifted = next(table for table in found if table["task"]["task"] == "drift")
    full = next(row for row in drifted["rows"] if row["policy"] == "full")
    assert full["scores"]["kl"]["mean"] == pytest.approx(0, abs=1e-6)
    assert full["scores"]["agreement"]["mean"] == 1
    assert "</html>" in html.read_text()

    code, text, _ = call("report", str(out))
    assert code == 0
    assert "odd-one-out, query-aware: model smollm2, length 200, samples 2" in text
    assert "ecokv-snapkv, no redundancy weight" in text


def test_a_text_of_ones_own(tiny_model: None, tmp_path: Path) -> None:
    text = tmp_path / "sheep.txt"
    text.write_text("Sheep graze on green hills. " * 100)
    out = tmp_path / "results"
    assert call(*EVAL, "--tasks", "drift", "--text", str(text), "--out", str(out))[0] == 0
    own = {each.cell.examples for each in read_results(out)}
    before = sorted(out.iterdir())
    code, _, err = call(*EVAL, "--tasks", "drift", "--out", str(out))
    assert code == 2 and "it is for other examples of drift than these: another text" in err
    assert sorted(out.iterdir()) == before
    assert call(*EVAL, "--tasks", "drift", "--out", str(tmp_path / "other"))[0] == 0
    assert own.isdisjoint({each.cell.examples for each in read_results(tmp_path / "other")})


def test_another_seed_measures_no_drift_again(tiny_model: None, tmp_path: Path) -> None:
    """Its examples would be the same ones, counted twice."""
    assert call(*EVAL, "--tasks", "drift", "--out", str(tmp_path))[1].startswith("7 cells measured")
    assert call(*EVAL, "--tasks", "drift", "--seed", "1", "--out", str(tmp_path))[1].startswith(
        "0 cells measured, 7 there"
    )


def test_a_cell_that_fails_is_said_after_all_others(
    tiny_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(cell: Cell, bench: Bench, **options: Any) -> Any:
        if cell.policy["name"] == "random":
            raise RuntimeError("out of memory")
        return measure(cell, bench, **options)

    monkeypatch.setattr("kvpolicy.eval.sweep.measure", fail)
    code, out, err = call(*EVAL, "--tasks", "drift", "--out", str(tmp_path))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: 2 of 7 cells were not measured; the others are in {tmp_path}. The same command")
    assert "random (tokens 80), drift, query-agnostic" in err and "RuntimeError: out of memory" in err
    assert {one.cell.policy["name"] for one in read_results(tmp_path)} == {
        "full",
        "snapkv",
        "ecokv-snapkv, no redundancy weight",
    }

    monkeypatch.undo()
    monkeypatch.setattr(models, "load", lambda *_, **__: (bench().model, letters()))
    assert call(*EVAL, "--tasks", "drift", "--out", str(tmp_path))[1].startswith("2 cells measured, 5 there before")


def test_an_interrupt_says_how_to_go_on(tiny_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpolicy.eval.sweep.measure", interrupt)
    code, out, err = call(*EVAL, "--tasks", "drift", "--out", str(tmp_path))
    assert (code, out) == (130, "")
    assert f"What was finished is in {tmp_path}; the same command goes on from there." in err
    code, out, _ = call("report", str(tmp_path))
    assert code == 0
    assert f"note: {SAYS}full; random at 80, at 50%; snapkv at 80, at 50%; ecokv-snapkv, no redundancy weight at" in out


def test_report_says_what_a_shard_left(tiny_model: None, tmp_path: Path) -> None:
    command = (*EVAL, "--tasks", "drift", "--out", str(tmp_path))
    assert call(*command, "--shard", "1/2")[0] == 0
    (table,) = json.loads(call("report", str(tmp_path), "--json")[1])
    assert [(gap["policy"], gap["budget"]) for gap in table["gaps"]] == [
        ("random", 80),
        ("snapkv", 80),
        ("ecokv-snapkv, no redundancy weight", 80),
    ]
    before = sorted(tmp_path.iterdir())
    assert call(*command, "--shard", "2/2")[0] == 0
    assert len(list(tmp_path.iterdir())) == len(before) + 3
    (table,) = json.loads(call("report", str(tmp_path), "--json")[1])
    assert (table["gaps"], len(table["rows"])) == ([], 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mode", "aware"), "--mode: unknown mode 'aware'. Did you mean 'query-aware'?"),
        (("--shard", "3/2"), "--shard: expected I/N with I from 1 to N"),
        (("--shard", "one"), "--shard: expected I/N"),
        (("--policies", "snapkw"), "snapkw"),
        (("--policies", ","), "--policies: expected at least one"),
        (("--budgets", "some"), "--budgets: expected whole slots (512) or a share (0.25), got 'some'"),
        (("--budgets", "20"), "--budgets: policy 'snapkv': budget.tokens: expected at least the 36 slots"),
        (
            ("--budgets", "3"),
            "--budgets: policy 'random', part of every table: budget.tokens: expected at least the 12",
        ),
        (("--tasks", "nih"), "unknown task 'nih'"),
        (("--text", "/nowhere.txt"), "cannot read '/nowhere.txt'"),
        (("--out", "/dev/null/results"), "--out: expected a folder"),
    ],
)
def test_a_wrong_option_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, str], message: str
) -> None:
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    code, out, err = call(*EVAL, "--tasks", "drift", "--out", str(tmp_path), *options)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err


def test_report_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(SNAP, tmp_path)
    assert "found none in" in call("report", str(tmp_path / "nowhere"))[2]
    assert "cannot write" in call("report", str(tmp_path), "--html", str(tmp_path))[2]
    monkeypatch.setattr(plots, "find_spec", lambda _: None)
    code, _, err = call("report", str(tmp_path), "--html", "page.html")
    assert code == 2
    assert err == (
        "error: --html: drawing the plots needs matplotlib, which is not installed. Install it:  "
        "pip install 'kvpolicy[eval]'\n"
    )
    assert call("report", str(tmp_path))[0] == 0


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_page_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(SNAP, tmp_path)
    html = tmp_path / "page.html"
    html.write_text("before")
    monkeypatch.setattr("kvpolicy.files.os.fsync", full_disk)
    code, out, err = call("report", str(tmp_path), "--html", str(html))
    assert (code, out) == (2, "")
    assert err == f"error: --html: cannot write '{html}': No space left on device\n"
    assert html.read_text() == "before"


def test_a_table_says_how_little_it_is_and_that_the_model_cannot_do_the_task() -> None:
    asked = [one.cell for one in (FULL, SNAP)]
    (few,) = tables([FULL, SNAP], asked=asked)
    assert notes(few) == ["4 examples: intervals of fewer than 8 are too narrow to say anything"]
    unables = [result("full", [0] * 8, budget=None, mode="either"), result("snapkv", [0] * 7 + [1])]
    (unable,) = tables(unables, asked=asked)
    assert [note.partition(":")[0] for note in notes(unable)] == ["string_match_all is 0 with the full cache"]
    assert "Note: string_match_all is 0 with the full cache" in page([unable], [FULL], None)
    enough = [result("full", [1] * 8, budget=None, mode="either"), result("snapkv", [0] * 8)]
    assert notes(tables(enough, asked=asked)[0]) == []
