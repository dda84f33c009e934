"""`kvpolicy bench`: what it measures, what it says of it, and how it refuses. No test depends on the clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kvpolicy
from kvpolicy.bench.figures import Figure, figures
from kvpolicy.bench.measure import BARE, FULL, LIMIT, Settings, measure, steps
from kvpolicy.bench.record import Memory, Prompt, Record, Tokens, read_record
from kvpolicy.bench.show import summary, tables
from kvpolicy.bench.statistics import spread
from kvpolicy.bench.subject import BenchError, made_up
from kvpolicy.bench.traces import peaks
from kvpolicy.bench.ways import Bare
from kvpolicy.cli import app
from kvpolicy.report import STAGES

QUICK = ("--shape", "tiny", "--contexts", "256,128", "--runs", "2", "--tokens", "8", "--every", "4")
POLICIES = "snapkv,ecokv-ada-kv"
LATE = "snapkv, every 4"


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench") / "bench.json"


@pytest.fixture(scope="module")
def found(file: Path) -> dict[str, Any]:
    """What the command says of a tiny model, as JSON."""
    code, out, err = call(*QUICK, "--policies", POLICIES, "--out", str(file), "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_every_way_is_measured_as_often_as_asked(found: dict[str, Any]) -> None:
    ways = [BARE, FULL, "snapkv", "ecokv-ada-kv"]
    prompts = [(one["context"], one["way"]) for one in found["prompts"]]
    assert sorted(prompts) == sorted((context, way) for context in (128, 256) for way in ways * 2)
    assert [(one["context"], one["way"]) for one in found["memory"]] == [(n, way) for n in (128, 256) for way in ways]
    assert {(one["context"], one["way"], len(one["seconds"])) for one in found["tokens"]} == {
        (context, way, 8) for context in (128, 256) for way in [*ways, LIMIT, LATE]
    }


def test_stages_are_those_of_the_prompt_and_of_the_tokens_apart(found: dict[str, Any]) -> None:
    for one in found["prompts"]:
        spent = sum(one["stages"].values())
        assert (spent > 0) == (one["way"] not in (BARE, FULL))
        assert list(one["stages"]) == list(STAGES) and spent < one["seconds"]
    for one in found["tokens"]:
        # Only what evicts while decoding scores again.
        assert (one["stages"]["score"] > 0) == (one["way"] == LATE)


def test_bytes_are_those_of_the_cache(found: dict[str, Any]) -> None:
    of_slot = 3 * 2 * (8 + 8) * 4  # layers, heads, a key and a value, float32
    for one in found["memory"]:
        kept = one["context"] if one["way"] in (BARE, FULL) else one["context"] // 4
        assert one["bytes"] == one["slots"] == one["planned"] == kept * of_slot
        assert one["full"] == one["context"] * of_slot and one["layer"] == one["full"] // 3
        assert one["later_slots"] == (kept + 8) * of_slot <= one["later"]
        assert one["ragged"] == (one["way"] == "ecokv-ada-kv")
        assert one["bytes"] <= one["cache_peak"] <= one["full"] < one["pass_peak"]
        assert (one["scoring"] is None) == (one["way"] in (BARE, FULL))


def test_the_file_holds_what_was_printed(found: dict[str, Any], file: Path) -> None:
    record = read_record(file)
    assert record.to_dict() == {name: part for name, part in found.items() if name != "figures"}
    assert [one.value for one in figures(record)] == [one["value"] for one in found["figures"]]
    about = found["about"]
    assert about["model"] == "tiny, 3 layers" and about["versions"]["torch"] == torch.__version__
    assert [policy["budget"]["keep"] for policy in about["policies"]] == [0.25, 0.25]
    assert about["contexts"] == [128, 256] and about["machine"]["threads"] == torch.get_num_threads()


def test_as_a_table() -> None:
    code, out, _ = call(*QUICK, "--policies", "snapkv")
    assert code == 0
    for text in ("Time of a prompt", "Time of a token behind it", "Memory", LATE, "targets are met", "1.02 met"):
        assert text in out


def test_weights_do_not_count_as_what_a_pass_takes() -> None:
    subject = made_up("tiny", layers=None, tokens=1, dtype=torch.float32, device="cpu")
    assert 0 < peaks(subject, Bare(BARE), context=1)[1] < sum(one.nbytes for one in subject.model.parameters()) / 2


def test_it_takes_as_many_steps_as_it_says() -> None:
    options = Settings(contexts=[64], runs=2, tokens=4, every=2)
    subject = made_up("tiny", layers=1, tokens=options.longest, dtype=torch.float32, device="cpu")
    taken: list[None] = []
    measure(subject, [kvpolicy.load("snapkv", budget=40)], options, advance=lambda: taken.append(None))
    assert len(taken) == steps(options, policies=1)


def record(seconds: dict[str, float], *, context: int = 8192, ragged: bool = False, **memory: int) -> Record:
    """Return what might be measured of one policy: the time of a prompt and of each of four tokens, by way."""
    stages = dict.fromkeys(STAGES, 0.0)
    prompts = [Prompt(context, way, spent, stages) for way, spent in seconds.items()]
    tokens = [Tokens(context, way, [spent] * 4, stages) for way, spent in seconds.items()]
    sizes: dict[str, Any] = dict.fromkeys(("bytes", "slots", "later", "later_slots", "planned", "layer"), 100)
    sizes |= {"full": 400, "cache_peak": 200, "pass_peak": 1000, "scoring": None, **memory}
    held = [Memory(context=context, way=way, ragged=ragged, **sizes) for way in seconds if way not in (LIMIT, LATE)]
    return Record({"every": 4}, prompts, tokens, held)


def figure(record: Record, what: str, way: str = "snapkv") -> Figure:
    return next(one for one in figures(record) if (one.what, one.way) == (what, way))


@pytest.mark.parametrize(
    ("what", "seconds", "met"),
    [
        ("prompt, of no session", 1.03, True),
        ("prompt, of no session", 1.031, False),
        ("token, of the limit", 1.05, True),
        ("token, of the limit", 1.06, False),
    ],
)
def test_a_target_is_met_up_to_its_bound(what: str, seconds: float, met: bool) -> None:
    one = figure(record({BARE: 1.0, LIMIT: 1.0, "snapkv": seconds}), what)
    assert (one.value, one.met) == (seconds, met)


def test_heads_of_different_length_have_targets_of_their_own() -> None:
    found = record({BARE: 1.0, LIMIT: 0.5, "ada-kv": 0.9}, ragged=True, later=105)
    assert figure(found, "token, of no session", "ada-kv").met is False
    assert figure(found, "bytes, of the slots", "ada-kv").met is True
    assert figure(record({BARE: 1.0, LIMIT: 0.5, "snapkv": 0.9}, later=105), "bytes, of the slots").met is False


def test_short_prompts_have_no_target_that_is_set_for_long_ones() -> None:
    found = record({BARE: 1.0, LIMIT: 1.0, "ada-kv": 1.5}, context=1024, ragged=True)
    assert figure(found, "prompt, of no session", "ada-kv").met is None
    assert figure(found, "token, of no session", "ada-kv").met is None


def test_evicting_while_decoding_counts_whole_periods() -> None:
    found = record({BARE: 1.0, LIMIT: 1.0, "snapkv": 1.0, LATE: 1.0})
    late = next(one for one in found.tokens if one.way == LATE)
    late.seconds[-1] = 1.4
    one = figure(found, "token, of not evicting", LATE)
    assert (round(one.value, 3), one.met) == (1.1, False)


def test_a_peak_is_counted_in_layers() -> None:
    one = figure(record({BARE: 1.0, LIMIT: 1.0, "snapkv": 1.0}, cache_peak=350), "peak, layers above")
    assert (one.value, one.met) == (2.5, False)


def test_what_is_missed_is_listed() -> None:
    lines = summary(record({BARE: 1.0, LIMIT: 1.0, "snapkv": 2.0}))
    assert "missed: prompt, of no session: snapkv, 8,192 tokens: 2.000, expected at most 1.03" in lines
    assert lines[0].endswith("targets are met")


def growing(power: float) -> Record:
    """Return what might be measured where every stage and the memory of scoring grow with a power of the context."""
    prompts, tokens, memory = [], [], []
    for context in (1024, 2048, 4096, 8192):
        # The shortest context stands out, and does not count.
        cost = 1e9 if context == 1024 else float(context) ** power
        one = record({BARE: 1.0, LIMIT: 1.0, "snapkv": 1.0}, context=context, scoring=round(cost))
        prompts += [Prompt(context, each.way, 1.0, dict.fromkeys(STAGES, cost)) for each in one.prompts]
        tokens += one.tokens
        memory += one.memory
    return Record({"every": 4}, prompts, tokens, memory)


@pytest.mark.parametrize(("power", "met"), [(1.0, True), (1.2, False)])
def test_growth_is_fitted_from_2048_tokens_on(power: float, met: bool) -> None:
    for what in (*(f"growth of {stage}" for stage in STAGES), "growth of scoring's memory"):
        one = figure(growing(power), what)
        assert one.value == pytest.approx(power, abs=1e-3)
        assert one.met is met


def test_growth_is_a_table_of_its_own() -> None:
    assert [table.title for table in tables(growing(1.0))][-1] == "Growth with the context, exponents"
    assert "| snapkv | 1.000 1.1 met |" in tables(growing(1.0))[-1].markdown()


@pytest.mark.parametrize(("count", "outside"), [(5, 0), (6, 0), (8, 0), (9, 1), (20, 5)])
def test_an_interval_of_the_median_leaves_out_what_the_binomial_allows(count: int, outside: int) -> None:
    # Conover's table A3, and of five values none, as even all of them are fewer than it takes.
    found = spread([float(one) for one in range(count)])
    assert (found.low, found.high) == (outside, count - 1 - outside)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "8"], "--tokens: expected at least the 32 of --every, got 8"),
        (["--contexts", "1k"], "--contexts: expected numbers of tokens, with commas between, got '1k'"),
        (["--layers", "2"], "--layers: expected --shape with it, got none"),
        (["--shape", "tiny", "--model", "x"], "--shape: expected no --model with it, got both"),
        (["--shape", "tinny"], "shape: unknown shape 'tinny'. Did you mean 'tiny'?"),
        (["--policies", ","], "--policies: expected at least one"),
        (["--shape", "tiny", "--out", "/nowhere/bench.json"], "--out: expected a file in a folder that can be written"),
        (["--shape", "tiny", "--out", "."], "--out: expected a file in a folder that can be written"),
    ],
)
def test_wrong_options_are_refused(options: list[str], message: str) -> None:
    code, out, err = call(*options)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ([kvpolicy.load("snapkv", budget=40), kvpolicy.load("ecokv", budget=50)], "expected one budget"),
        ([kvpolicy.load("snapkv", budget=40)] * 2, "expected each once, .* got \\['snapkv'\\]"),
        ([kvpolicy.load("full", budget=40)], "expected each once, .* got \\['full'\\]"),
        ([kvpolicy.load("snapkv", budget=40, decode={"every": 8})], "expected none .* decoding, .* got \\['snapkv'\\]"),
        ([kvpolicy.load("critical-kv", budget=40)], "expected a first one that can evict while decoding as well"),
        (
            [kvpolicy.load("snapkv", budget=40), kvpolicy.load("snapkv", budget=40, name="snapkv, every 1")],
            "expected each once, .* got \\['snapkv, every 1'\\]",
        ),
    ],
)
def test_policies_that_cannot_be_compared_are_refused(policies: list[kvpolicy.Policy], message: str) -> None:
    options = Settings(contexts=[64], runs=1, tokens=2, every=1)
    subject = made_up("tiny", layers=1, tokens=options.longest, dtype=torch.float32, device="cpu")
    with pytest.raises(BenchError, match=message):
        measure(subject, policies, options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a file that `kvpolicy bench --out` wrote"),
        ("[]", "expected a file that `kvpolicy bench --out` wrote"),
        ('{"kvpolicy-bench": 1, "about": {}}', "expected a file that `kvpolicy bench --out` wrote: 'prompts'"),
        (
            '{"kvpolicy-bench": 2, "about": {}, "prompts": [], "tokens": [], "memory": []}',
            "expected format 1 or older: upgrade kvpolicy",
        ),
    ],
)
def test_other_files_are_refused(write: Callable[..., Path], text: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        read_record(write(text, "bench.json"))
