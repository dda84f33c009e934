"""Tuning: what a space may say, what the search tries, that nothing is lost, and what is written and said of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from benches import bench, letters
from typer.testing import CliRunner

from kvpolicy import Policy, load, models
from kvpolicy.cli import app
from kvpolicy.config import dump
from kvpolicy.errors import PolicyFileError, UnsupportedModelError
from kvpolicy.eval.bench import Bench, Measured
from kvpolicy.eval.drift import drift
from kvpolicy.eval.tasks.drift import DriftTask
from kvpolicy.eval.tasks.example import Stretch
from kvpolicy.eval.tasks.haystack import Haystack
from kvpolicy.texts import unrepeated
from kvpolicy.tune.halves import halves
from kvpolicy.tune.outcome import compare
from kvpolicy.tune.read import read_space
from kvpolicy.tune.record import NotFiniteError, Record, TuneError
from kvpolicy.tune.search import STARTUP, Refusal, Trial, best, search
from kvpolicy.tune.space import Range, Space

Write = Callable[..., Path]

SPACE = """\
extends: ecokv-values-snapkv
search:
  score.importance.window: [4, 8, 16]
  score.diversity.weights[0]: {from: 0.0, to: 1.0}
  score.diversity.inputs[0].space: [post-rope, pre-rope]
  budget.layers: [uniform, {type: pyramid, beta: 4}]
  select.recent: [2, 8, 200]
"""
TEXT = unrepeated()[0][:8000]
TEXTS = [Stretch((at,), (at, at)) for at in range(8)]


# The space


def refusal(path: Path, budget: int | float | None = 64) -> str:
    with pytest.raises(PolicyFileError) as caught:
        read_space(path, budget)
    return str(caught.value).removeprefix(f"{path}:")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("extends: snapkv\n", "1:1: expected a policy with a mapping 'search'"),
        ("extends: snapkv\nsearch: [1]\n", "2:9: search: expected a mapping of places to what to try, got [1]"),
        ("extends: snapkv\nsearch: {}\n", "2:9: search: expected a mapping of places to what to try, got {}"),
        ("extends: snapkb\nsearch: {select.recent: [1, 2]}\n", "1:10: extends: unknown policy 'snapkb'. Did you mean"),
        (
            "extends: snapkv\nsearch:\n  budget.tokens: [1, 2]\n",
            "3:3: search: expected the place of a setting within score, budget.layers, budget.heads, select, evicted, "
            "store",
        ),
        ("extends: snapkv\nsearch:\n  score..window: [1, 2]\n", "3:3: search: expected the place of a setting"),
        (
            "extends: snapkv\nsearch:\n  score.windw: [1, 2]\n",
            "3:3: score.windw: unknown setting of 'snapkv'. Did you mean 'window'?",
        ),
        (
            "extends: ecokv-snapkv\nsearch:\n  score.importanc.window: [1, 2]\n",
            "3:3: score.importanc: unknown setting of 'redundancy-adaptive'. Did you mean 'importance'?",
        ),
        (
            "extends: ecokv-snapkv\nsearch:\n  score.diversity.inputs[2].on: [keys, values]\n",
            "3:3: score.diversity.inputs: expected a list of more than 2 in the policy, got [",
        ),
        (
            "extends: snapkv\nsearch:\n  score.window.size: [1, 2]\n",
            "3:3: score.window: expected a mapping in the policy, got 32",
        ),
        (
            "extends: snapkv\nsearch:\n  score.window: [4, '8']\n",
            '3:21: score.window: expected a valid integer, got "8"',
        ),
        (
            "extends: snapkv\nsearch:\n  budget.layers: [uniform, pyramd]\n",
            "3:28: budget.layers: unknown layer budget 'pyramd'. Did you mean 'pyramid'?",
        ),
        (
            "extends: snapkv\nsearch:\n  score.kernel: {from: 1, to: 4}\n",
            "3:31: score.kernel: expected an odd",
        ),
        (
            "extends: snapkv\nsearch:\n  score.window: [4]\n",
            "3:17: search.score.window: expected a list of two choices",
        ),
        ("extends: snapkv\nsearch:\n  score.window: [4, 4]\n", "3:21: search.score.window: expected each choice once"),
        ("extends: snapkv\nsearch:\n  score.window: 4\n", "3:17: search.score.window: expected a list of two choices"),
        (
            "extends: snapkv\nsearch:\n  score.window: {from: 1, till: 4}\n",
            "3:27: search.score.window.till: unknown setting of a range. Known: from, log, to.",
        ),
        ("extends: snapkv\nsearch:\n  score.window: {from: 1}\n", "3:17: search.score.window: expected a range {from:"),
        (
            "extends: snapkv\nsearch:\n  score.window: {from: 4, to: 4}\n",
            "3:31: search.score.window: expected a range that",
        ),
        (
            "extends: snapkv\nsearch:\n  score.window: {from: 1, to: .inf}\n",
            "3:31: search.score.window.to: expected a n",
        ),
        (
            "extends: snapkv\nsearch:\n  select.recent: {from: 0, to: 8, log: true}\n",
            "3:25: search.select.recent: expected a range from above 0, as it is log, got 0",
        ),
        (
            "extends: snapkv\nsearch:\n  select.recent: {from: 1, to: 8, log: 1}\n",
            "3:40: search.select.recent.log: exp",
        ),
        (
            "extends: snapkv\nsearch:\n  budget.layers: [uniform, pyramid]\n  budget.layers.beta: [2, 4]\n",
            "4:3: search.budget.layers.beta: expected places apart, got one within another: budget.layers",
        ),
    ],
)
def test_a_wrong_space_is_refused_with_its_place(write: Write, text: str, says: str) -> None:
    assert refusal(write(text)).startswith(says)


def test_a_policy_that_cannot_be_tuned_is_refused(write: Write) -> None:
    search = "search: {select.recent: [1, 2]}\n"
    assert refusal(write(f"extends: full\n{search}"), None).startswith("1:1: expected a policy that evicts")
    assert refusal(write(f"extends: snapkv\n{search}"), 8).startswith(
        "--budget: budget.tokens: expected at least the 36"
    )


def test_a_path_in_a_space_is_relative_to_it(write: Write) -> None:
    write("extends: snapkv\nbudget: 77\n", "below.yaml")
    assert read_space(write("extends: below.yaml\nsearch: {score.window: [4, 8]}\n")).base.budget.tokens == 77


def test_a_space_holds_what_the_file_says(write: Write) -> None:
    space = read_space(write(SPACE), 64)
    assert space.base == load("ecokv-values-snapkv", budget=64, name="mine", description=space.base.description)
    values = {setting.place: 1 for setting in space.settings} | {"score.diversity.weights[0]": 0.125}
    expected = dump(space.base)
    expected["score"]["importance"]["window"] = 8
    expected["score"]["diversity"]["weights"][0] = 0.125
    expected["score"]["diversity"]["inputs"][0]["space"] = "pre-rope"
    expected["budget"]["layers"] = {"type": "pyramid", "beta": 4}
    expected["select"]["recent"] = 8
    assert dump(space.policy(values)) == expected
    assert space.shown(values)["budget.layers"] == {"type": "pyramid", "beta": 4}


def test_only_whole_numbers_are_tried_where_a_setting_takes_no_others(write: Write) -> None:
    text = (
        "extends: ada-kv\nsearch: {score.window: {from: 2, to: 4, log: true}, budget.heads.floor: {from: 0, to: 1}}\n"
    )
    window, floor = read_space(write(text), 64).settings
    assert isinstance(window, Range) and (window.whole, window.log) == (True, True)
    assert isinstance(floor, Range) and (floor.whole, floor.log) == (False, False)


@pytest.mark.parametrize(
    ("tried", "value"),
    [
        ("score.importance.window: [4, 8]", 1),
        ("score.importance.window: [4, 16]", None),
        ("score.importance.window: {from: 2, to: 16}", 8),
        ("score.importance.window: {from: 9, to: 16}", None),
        ("score.diversity.weights[1]: {from: 0.0, to: 1.0}", 0.5),
        ("score.redundancy: {from: 0.0, to: 1.0}", None),
        ("budget.layers: [pyramid, {type: uniform}]", 1),
        ("select.recent: [200, 8]", 1),
    ],
)
def test_a_space_knows_where_the_policy_as_it_is_lies(write: Write, tried: str, value: float | None) -> None:
    space = read_space(write(f"extends: ecokv-snapkv\nsearch:\n  {tried}\n"), 64)
    values = space.base_values()
    assert values == (None if value is None else {tried.split(":")[0]: value})
    if values is not None:
        assert space.policy(values) == space.base


# The search


@pytest.fixture
def space(write: Write) -> Space:
    return read_space(write(SPACE), 64)


def steep(policy: Policy, text: Stretch) -> float:
    """A made-up drift with its least at a weight of 0.25, a window of 16 and the fewest recent tokens."""
    plain = dump(policy)
    weight, window = plain["score"]["diversity"]["weights"][0], plain["score"]["importance"]["window"]
    noise = 0.01 * ((text.context[0] * 7) % 5)
    return float(1 + (weight - 0.25) ** 2 + (16 - window) / 16 + plain["select"]["recent"] / 32 + noise)


def test_the_search_starts_from_the_policy_as_it_is_and_finds_better_ones(space: Space) -> None:
    first, *others = search(space, steep, TEXTS, trials=40, seed=0)
    assert isinstance(first, Trial)
    assert (first.number, first.settings, first.policy) == (0, {}, space.base)
    assert first.kl == tuple(steep(space.base, text) for text in TEXTS)
    assert [trial.number for trial in others] == list(range(1, 41))
    found = best([first, *others])
    settings = dump(found.policy)
    assert (settings["score"]["importance"]["window"], settings["select"]["recent"]) == (16, 2)
    assert abs(settings["score"]["diversity"]["weights"][0] - 0.25) < 0.2
    assert found.mean < first.mean


def test_the_search_is_told_of_the_policy_as_it_is(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    studies = []
    create = optuna.create_study
    monkeypatch.setattr(optuna, "create_study", lambda **given: studies.append(create(**given)) or studies[-1])
    trials = list(search(space, steep, TEXTS, trials=2, seed=0))
    (study,) = studies
    assert study.trials[0].params == space.base_values()
    assert study.trials[0].value == pytest.approx(best(trials[:1]).mean)
    assert len(study.trials) == 3


def test_where_the_policy_as_it_is_lies_outside_the_search_begins_without_it(write: Write) -> None:
    outside = read_space(write("extends: ecokv-values-snapkv\nsearch: {score.importance.window: [4, 16]}\n"), 64)
    first, *others = search(outside, steep, TEXTS, trials=4, seed=0)
    assert isinstance(first, Trial) and first.policy == outside.base
    assert len(others) == 4


def test_equal_seeds_try_the_same_and_others_do_not(space: Space) -> None:
    one, same, other = (list(search(space, steep, TEXTS, trials=15, seed=seed)) for seed in (1, 1, 2))
    assert one == same
    assert [trial.settings for trial in one] != [trial.settings for trial in other]


def test_a_trial_that_is_worse_than_half_of_the_others_is_given_up_early(space: Space) -> None:
    asked: list[Policy] = []

    def counted(policy: Policy, text: Stretch) -> float:
        asked.append(policy)
        return steep(policy, text)

    trials = list(search(space, counted, TEXTS, trials=40, seed=0))
    given_up = [trial for trial in trials if isinstance(trial, Trial) and trial.given_up]
    assert given_up
    assert all(2 < len(trial.kl) < len(TEXTS) for trial in given_up)
    assert min(trial.number for trial in given_up) >= STARTUP
    assert len(asked) == sum(len(trial.kl) for trial in trials if isinstance(trial, Trial))
    # None that was given up would have been the best.
    least = min(sum(steep(trial.policy, text) for text in TEXTS) / len(TEXTS) for trial in given_up)
    assert best(trials).mean < least


def test_what_cannot_be_measured_is_refused_with_its_reason(space: Space) -> None:
    def measure(policy: Policy, text: Stretch) -> float:
        if dump(policy)["score"]["diversity"]["inputs"][0]["space"] == "pre-rope":
            raise UnsupportedModelError("its rotation cannot be verified")
        if dump(policy)["budget"]["layers"] != "uniform":
            raise NotFiniteError("the drift is nan")
        return steep(policy, text)

    trials = list(search(space, measure, TEXTS, trials=30, seed=0))
    reasons = {trial.reason for trial in trials if isinstance(trial, Refusal)}
    assert reasons == {
        "its rotation cannot be verified",
        "the drift is nan",
        "--budget: budget.tokens: expected at least the 204 slots that 'top-k' protects (sinks + recent), got 64",
    }


def test_a_policy_that_cannot_be_measured_as_it_is_ends_the_search(space: Space) -> None:
    def measure(policy: Policy, text: Stretch) -> float:
        raise NotFiniteError("the drift is nan")

    with pytest.raises(NotFiniteError):
        list(search(space, measure, TEXTS, trials=1, seed=0))


def test_a_fault_of_a_plugin_ends_the_search(space: Space) -> None:
    def measure(policy: Policy, text: Stretch) -> float:
        if policy != space.base:
            raise ZeroDivisionError
        return 1.0

    with pytest.raises(ZeroDivisionError):
        list(search(space, measure, TEXTS, trials=9, seed=0))


def test_optuna_is_silent_and_left_as_it_was(space: Space, capfd: pytest.CaptureFixture[str]) -> None:
    before = optuna.logging.get_verbosity()
    list(search(space, steep, TEXTS, trials=3, seed=0))
    assert optuna.logging.get_verbosity() == before
    assert capfd.readouterr() == ("", "")


# The texts


@pytest.mark.parametrize("texts", [unrepeated()[:6], ["".join(f"line {at} of many\n" for at in range(400))]])
def test_no_part_of_a_text_is_both_searched_and_held_out(texts: list[str]) -> None:
    parts = halves(texts)
    assert sorted(len(text) for part in parts for text in part) == sorted(map(len, texts)) or len(texts) == 1
    assert sum(map(len, parts[0] + parts[1])) == sum(map(len, texts))
    windows: list[set[tuple[int, ...]]] = []
    for part in parts:
        stretches = DriftTask(length=200, samples=9).examples(Haystack(letters(), part), 0)
        whole = [each.context + each.continuation for each in stretches]
        windows.append({ids[at : at + 150] for ids in whole for at in range(len(ids) - 150)})
    assert windows[0] and windows[1] and not windows[0] & windows[1]


# The record


def measured(record: Record, count: int = 2) -> list[float]:
    policies = [load("snapkv", budget=budget) for budget in (40, 80)]
    return [record.kl(policy, text) for policy in policies for text in stretches(count)]


def stretches(count: int) -> list[Stretch]:
    return DriftTask(length=128, samples=count).examples(Haystack(letters(), (TEXT,)), 0)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[Policy]:
    """Return a list of the policies measured from now on."""
    asked: list[Policy] = []
    measure = Bench.measure

    def counted(self: Bench, policy: Policy, *rest: Any, **more: Any) -> Any:
        asked.append(policy)
        return measure(self, policy, *rest, **more)

    monkeypatch.setattr(Bench, "measure", counted)
    return asked


def test_a_record_is_the_drift_measured_once(tmp_path: Path, measurements: list[Policy]) -> None:
    file = tmp_path / "tuned.jsonl"
    found = measured(Record(bench(), file))
    for at, value in enumerate(found):
        text = stretches(2)[at % 2]
        ids = torch.tensor([text.context]), torch.tensor([text.continuation])
        assert value == pytest.approx(
            drift(bench().model, load("snapkv", budget=(40, 80)[at // 2]), *ids).mean, rel=1e-5
        )
    assert len(measurements) == 4
    again = Record(bench(), file)
    assert measured(again) == found
    again.kl(load("snapkv", budget=40, name="other", description="other"), stretches(1)[0])
    assert len(measurements) == 4
    again.kl(load("snapkv", budget=48), stretches(1)[0])
    assert len(measurements) == 5


def test_another_model_and_another_attention_are_measured_anew(tmp_path: Path, measurements: list[Policy]) -> None:
    file, policy, text = tmp_path / "tuned.jsonl", load("snapkv", budget=40), stretches(1)[0]
    model = bench().model
    eager, other = copy.deepcopy(model), copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    other.lm_head.weight.data += 0.1
    for each in (model, eager, other, model):
        Record(Bench("tiny", each, letters(), unrepeated()), file).kl(policy, text)
    assert len(measurements) == 3


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path, measurements: list[Policy]) -> None:
    file = tmp_path / "tuned.jsonl"
    found = measured(Record(bench(), file))
    whole = file.read_text()
    file.write_text(whole[:-9])
    assert measured(Record(bench(), file)) == found
    assert len(measurements) == 5
    assert file.read_text() == whole


@pytest.mark.parametrize(
    "text", ["no record", "no record\n", '{"x": 1}\n', '{"measured": "a", "kl": 1}\nno record', "[]\n"]
)
def test_a_file_that_is_no_record_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tuned.jsonl"
    file.write_text(text)
    with pytest.raises(TuneError, match="expected what an earlier `kvpolicy tune` with this --out measured"):
        Record(bench(), file)
    assert file.read_text() == text


def test_a_drift_that_is_not_finite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(bench(), tmp_path / "tuned.jsonl")
    broken = Measured({"kl": float("nan")}, bytes=0, bytes_full=0)
    monkeypatch.setattr(Bench, "measure", lambda *_, **__: broken)
    with pytest.raises(NotFiniteError, match="the drift is nan"):
        record.kl(load("snapkv", budget=40), stretches(1)[0])
    assert not (tmp_path / "tuned.jsonl").exists()


# What is said of it


def test_only_an_interval_without_0_shows_anything() -> None:
    base = [0.5, 0.6, 0.7, 0.8] * 2
    assert compare(base, [0.4, 0.5, 0.6, 0.75] * 2).shown == "better"
    assert compare(base, [0.6, 0.7, 0.8, 0.85] * 2).shown == "worse"
    assert compare(base, [0.4, 0.7, 0.6, 0.9] * 2).shown == "nothing"
    assert compare(base, base).shown == "nothing"
    # Of fewer texts than eight, an interval is too narrow to say so.
    assert compare(base[:7], [0.4, 0.5, 0.6, 0.75, 0.4, 0.5, 0.6]).shown == "nothing"
    assert compare([0.5], [0.4]).shown == "nothing"


# The command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder, now the current one, with a space; every model is a tiny one."""
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load", lambda *_, **__: (bench().model, letters()))
    return tmp_path


OPTIONS = (
    "--budget",
    "64",
    "--samples",
    "4",
    "--held-out",
    "5",
    "--length",
    "128",
    "--trials",
    "9",
    "--text",
    "text.txt",
)


def call(*arguments: str, out: str = "tuned.yaml") -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["tune", "space.yaml", "--out", out, *OPTIONS, *arguments], catch_exceptions=False)
    return found.exit_code, found.stdout, found.stderr


def test_the_policy_written_drifts_as_it_is_said_to(here: Path) -> None:
    code, text, _ = call("--json")
    assert code == 0
    found = json.loads(text)
    policy = load(found["file"])
    assert (policy.name, policy.budget.tokens) == ("tuned", 64)
    record = Record(bench(), here / "elsewhere.jsonl")
    for part, name, count in zip(halves([TEXT]), ("searched", "held_out"), (4, 5), strict=True):
        texts = DriftTask(length=128, samples=count).examples(Haystack(letters(), part), 0)
        mean = sum(record.kl(policy, each) for each in texts) / count
        assert found[name]["tuned"]["mean"] == pytest.approx(mean, rel=1e-9)
        assert found[name]["texts"] == count
    assert found["searched"]["tuned"]["mean"] <= found["searched"]["base"]["mean"]
    assert len(found["trials"]) == 10
    # The base is the same but for what was searched.
    plain = dump(policy)
    for place, way in (("select.recent", ("select", "recent")), ("budget.layers", ("budget", "layers"))):
        assert found["settings"][place]["tuned"] == plain[way[0]][way[1]]


def test_the_file_says_where_it_is_from_and_the_command_makes_it_again(here: Path) -> None:
    assert call("--seed", "3")[0] == 0
    text = Path("tuned.yaml").read_text()
    assert text.startswith("# made by: kvpolicy tune space.yaml --out tuned.yaml --budget 64 --trials 9 --samples 4")
    for said in (
        "#   optuna: ",
        "#   weights: ",
        "# text: sha256 ",
        "#   on text held out:",
        "#     as it is: post-rope",
    ):
        assert said in text
    Path("tuned.yaml").unlink()
    Path("tuned.jsonl").unlink()
    assert call("--seed", "3")[0] == 0
    assert Path("tuned.yaml").read_text() == text


def test_the_terminal_shows_settings_drift_and_what_it_means(here: Path) -> None:
    code, text, error = call()
    assert code == 0 and error == ""
    assert text.startswith("space: 9 tried, ")
    for said in (
        "score.importance.window",
        "searched",
        "held out",
        "wrote tuned.yaml; what was measured is in tuned.jsonl",
    ):
        assert said in text
    assert (
        sum(said in text for said in ("Nothing that was tried", "Not shown to be better", "the tuned policy is")) == 1
    )
    assert "refused: --budget: budget.tokens: expected at least the 204 slots" in text


def test_an_interrupted_search_goes_on_and_ends_as_if_it_had_not_been(
    here: Path, measurements: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("--json", out="whole.yaml")[0] == 0
    whole = len(measurements)
    measurements.clear()
    counted = Bench.measure

    def interrupted(self: Bench, *arguments: Any, **more: Any) -> Any:
        if len(measurements) == 25:
            raise KeyboardInterrupt
        return counted(self, *arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Bench, "measure", interrupted)
        code, text, error = call()
    assert (code, text) == (130, "")
    assert error == "Interrupted. What was measured is in tuned.jsonl; the same command goes on from there.\n"
    assert not Path("tuned.yaml").exists()
    assert call("--json")[0] == 0
    assert len(measurements) == whole
    assert load("tuned.yaml") == load("whole.yaml", name="tuned", description=load("tuned.yaml").description)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize(
    ("options", "out", "says"),
    [
        ((), "there.yaml", "--out: expected a new file, got 'there.yaml', which is there"),
        ((), "tuned.json", "--out: expected a new file that ends in .yaml, got 'tuned.json'"),
        ((), "none/tuned.yaml", "--out: expected a file in a folder that is there, found no 'none'"),
        (("--budget", "much"), "tuned.yaml", "--budget: expected whole slots"),
        (("--budget", "8"), "tuned.yaml", "--budget: budget.tokens: expected at least the 12 slots"),
        (("--text", "none.txt"), "tuned.yaml", "cannot read 'none.txt'"),
        (("--text", "short.txt"), "tuned.yaml", "--samples: expected text for 4 contexts of 192 tokens"),
        (("--text", "short.txt", "--samples", "1"), "tuned.yaml", "--held-out: expected text for 5 contexts"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_measured(
    here: Path, measurements: list[Policy], options: tuple[str, ...], out: str, says: str
) -> None:
    Path("there.yaml").write_text("mine")
    Path("short.txt").write_text("Some words. " * 50)
    before = names(here)
    code, text, error = call(*options, out=out)
    assert (code, text) == (2, "")
    assert error.startswith(f"error: {says}")
    assert names(here) == before
    assert Path("there.yaml").read_text() == "mine"
    assert not measurements


def test_without_optuna_the_command_says_how_to_install_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.tune.search.find_spec", lambda name: None)
    assert call()[::2] == (
        2,
        "error: tuning needs Optuna, which is not installed. Install it:  pip install 'kvpolicy[tune]'\n",
    )


def test_a_space_is_wrong_on_the_command_line_with_its_place(here: Path) -> None:
    Path("space.yaml").write_text(SPACE.replace("window", "windw"))
    code, _, error = call()
    assert code == 2
    assert error.startswith("error: space.yaml:3:3: score.importance.windw: unknown setting of 'snapkv'. Did you mean")


def test_a_full_disk_loses_nothing_that_was_measured(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.files.os.fsync", _full)
    code, _, error = call()
    assert code == 2
    assert error.startswith(
        "error: tuned.yaml: cannot be written: No space left on device. Make room, and run the same"
    )
    assert names(here) == ["space.yaml", "text.txt", "tuned.jsonl"]


def _full(_: int) -> None:
    raise OSError(28, "No space left on device")
