"""The command line: what it prints where, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from packages import install
from typer.testing import CliRunner

import kvpolicy
from kvpolicy import models
from kvpolicy.cli import app
from kvpolicy.cli.run import read_prompt
from kvpolicy.config import dump, schema
from kvpolicy.config.source import parse
from kvpolicy.registry import registry
from kvpolicy.texts import topics

Write = Callable[..., Path]
WRONG = "budget: 64\nscore: {type: snapkv, windw: 8}\n"


def call(*arguments: str, stdin: str | bytes | None = None) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of a command; an error that no user should see is raised."""
    result = CliRunner().invoke(app, arguments, input=stdin, catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: str, stdin: str | bytes | None = None) -> str:
    """Return the one message of a command that ends with exit code 2 and prints nothing else."""
    code, out, err = call(*arguments, stdin=stdin)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    return err


def test_list_says_what_each_plugin_is_and_where_it_is_from() -> None:
    code, out, _ = call("list")
    assert code == 0
    for entry in registry().entries():
        assert any(f" {entry.name} " in line and entry.origin in line for line in out.splitlines()), entry.name
    assert "The attention of the observation window to each slot" in out
    assert "SnapKV (arXiv 2404.14469), the tokens that the last 32 queries attend to" in out


def test_list_as_json() -> None:
    _, out, _ = call("list", "--json")
    rows = json.loads(out)
    assert [(row["kind"], row["name"]) for row in rows] == [(one.kind, one.name) for one in registry().entries()]
    assert all(row["description"] and row["origin"] for row in rows)


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        ("scorers", {"scorer"}),
        ("combiners", {"combiner"}),
        ("budgets", {"layers", "heads"}),
        ("selectors", {"selector"}),
        ("evicted", {"evicted"}),
        ("stores", {"store"}),
        ("policies", {"policy"}),
        ("scorer", {"scorer"}),
        ("budget", {"layers", "heads"}),
        ("policy", {"policy"}),
    ],
)
def test_list_one_kind(kind: str, kinds: set[str]) -> None:
    assert {row["kind"] for row in json.loads(call("list", kind, "--json")[1])} == kinds


def test_list_of_something_else_names_what_there_is() -> None:
    assert refused("list", "scores") == (
        "error: expected a kind, got 'scores'. Did you mean 'scorers' or 'stores' or 'selectors'? "
        "Known: budgets, combiners, evicted, policies, scorers, selectors, stores.\n"
    )


def test_version() -> None:
    assert call("--version") == (0, f"kvpolicy {version('kvpolicy')}\n", "")


def test_show_every_part_with_settings_formula_and_source(write: Write) -> None:
    path = write(
        """
        description: 'a [mix] of :two:'
        score:
          type: redundancy-adaptive
          importance: {type: snapkv, window: 8}
          diversity:
            type: fixed
            inputs: [cosine-diversity, {type: euclidean-diversity, on: values}]
            weights: [1, 0.5]
        budget: {tokens: 300, heads: {type: adaptive, floor: 0.3}}
        """
    )
    code, out, _ = call("show", str(path))
    assert code == 0
    for text in (
        "a [mix] of :two:",
        "score: redundancy-adaptive  redundancy=both",
        "r * diversity + (1 - r) * importance",
        "importance: snapkv  window=8  kernel=5  pooling=avg",
        "SnapKV, arXiv 2404.14469",
        "diversity: fixed  weights=[1.0, 0.5]",
        "inputs[1]: euclidean-diversity  on=values",
        "budget: 300 slots a KV head",
        "layers: uniform",
        "heads: adaptive  floor=0.3  by=score",
        "select: top-k  sinks=4  recent=8",
    ):
        assert text in out


def test_show_a_file_as_yaml_and_json(write: Write) -> None:
    path = write("extends: snapkv\nbudget: 0.5\n")
    policy = kvpolicy.load(path)
    assert kvpolicy.load(parse(call("show", str(path), "--yaml")[1], "x").plain) == policy
    assert json.loads(call("show", str(path), "--json")[1]) == dump(policy)
    assert "budget: 0.5 of the tokens seen" in call("show", str(path))[1]
    assert refused("show", "ecokv", "--yaml", "--json") == "error: expected one of --json and --yaml, got both\n"


def test_show_refuses_what_is_no_policy(write: Write) -> None:
    said = refused("show", "snapkb")
    assert "unknown policy or plugin 'snapkb'. Did you mean 'snapkv'" in said
    assert said.endswith(" The path of a file has a '/' or ends in .yaml.\n")
    assert f"{write(WRONG)}:2:23: score.windw: unknown setting" in refused("show", str(write(WRONG)))


def shown(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(call("show", *arguments, "--json")[1])
    return found


def test_show_what_a_plugin_is() -> None:
    code, out, _ = call("show", "adaptive")
    assert code == 0
    first, *lines = out.splitlines()
    assert first == f"adaptive, a head budget of kvpolicy {version('kvpolicy')}"
    assert "  source: Ada-KV, arXiv 2407.11550, algorithm 1 and its safeguard" in lines
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert rows[0] == ["floor", "a number from 0 to 1", "0.2", "the share of K that every head keeps."]
    assert "  no settings" in call("show", "value-norm")[1].splitlines()
    assert "  needs: values" in call("show", "value-norm")[1].splitlines()
    assert "  needs: nothing" in call("show", "fixed")[1].splitlines()
    assert "needs" not in out


def test_show_everything_of_a_name() -> None:
    for name, titles in {
        "snapkv": ["snapkv", "snapkv, a scorer of"],
        "uniform": ["uniform, a layer budget of", "uniform, a head budget of"],
        "by-modality": ["by-modality, a combiner of", "by-modality, a selector of"],
    }.items():
        out = call("show", name)[1]
        assert [line.partition(" kvp")[0] for line in out.splitlines() if line.startswith(name)] == titles
    assert [one["kind"] for one in shown("uniform")] == ["layers", "heads"]
    code, out, err = call("show", "snapkv", "--json")
    assert (code, json.loads(out)) == (0, dump(kvpolicy.load("snapkv")))
    assert err == "note: 'snapkv' is a scorer too: --kind scorer\n"
    assert call("show", "snapkv", "--kind", "policies", "--yaml")[2] == ""
    assert "--yaml: expected a policy, got the selector 'top-k'" in refused("show", "top-k", "--yaml")
    says = "--kind: expected a kind of what 'snapkv' is (policy, scorer), got 'stores'"
    assert says in refused("show", "snapkv", "--kind", "stores")


def test_show_a_plugin_as_json() -> None:
    (found,) = shown("snapkv", "--kind", "scorers")
    assert (found["role"], found["needs"]["queries"], found["origin"]) == (
        "importance",
        32,
        f"kvpolicy {version('kvpolicy')}",
    )
    assert found["settings"][0] == {
        "name": "window",
        "values": "a whole number from 1",
        "required": False,
        "default": 32,
        "description": "how many of the last queries are observed.",
    }
    (fixed,) = shown("fixed")
    assert [(one["name"], one["required"]) for one in fixed["settings"]][:2] == [("inputs", True), ("weights", False)]
    (own,) = shown("quantized")
    assert (own["role"], own["settings"][0]["values"]) == ("", "4, 8")


def test_show_a_plugin_of_a_stranger(site: Path) -> None:
    odd = "@settings\nclass Odd:\n    name = 'odd'\n    needs = property(lambda self: Needs(queries=self.window))\n"
    odd += "    window: int\n    anything: dict[str, object] | None = None\n    def __call__(self, view): ...\n"
    install(site, "acme", last=odd + "kvpolicy_scorers.__code__ = (lambda: [Middle, Odd]).__code__")
    (found,) = shown("middle")
    assert (found["origin"], found["description"], found["formula"]) == (
        "acme 1.5",
        "The slots in the middle.",
        "-|t - T/2|",
    )
    (found,) = shown("odd")
    assert (found["description"], found["formula"], found["source"], found["needs"]) == ("", "", "", None)
    assert [(one["values"], one["required"]) for one in found["settings"]] == [
        ("a whole number", True),
        ("a mapping", False),
    ]
    assert "  needs: as its settings say" in call("show", "odd")[1].splitlines()


def test_validate_checks_every_file(write: Write) -> None:
    good, wrong = write("extends: snapkv\n", "good.yaml"), write(WRONG)
    code, out, err = call("validate", str(wrong), str(good), "nowhere.yaml")
    assert code == 2
    assert [line.split("│")[2].strip() for line in out.splitlines() if "│" in line] == ["wrong", "ok: good", "wrong"]
    first, second = err.splitlines()
    assert first.startswith(f"error: {wrong}:2:23: score.windw: unknown setting of 'snapkv'. Did you mean 'window'?")
    assert second.startswith("error: nowhere.yaml: expected a policy file, found no")
    assert call("validate", str(good))[0] == 0


def test_validate_of_a_name_says_what_to_do_instead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call("validate", "snapkv")
    assert code == 2
    assert err == (
        "error: snapkv: expected a policy file, found no 'snapkv'. That is the name of a policy, and this takes files: "
        "`kvpolicy show snapkv` shows what it is made of.\n"
    )
    assert "name of a policy" not in call("validate", "snapkb")[2]
    (tmp_path / "snapkv").write_text("extends: ecokv\n")
    assert call("validate", "snapkv")[0] == 0


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "mine.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    if kind == "folder":
        path.mkdir()
    says = f"error: {path}: expected a policy file, got '{path}', which is a folder, pipe or device\n"
    ended = _process("kvpolicy.cli", "validate", str(path), timeout=60)
    assert (ended.returncode, ended.stderr) == (2, says)


def test_validate_as_json(write: Write) -> None:
    wrong, good = write(WRONG), write("extends: snapkv\n", "good.yaml")
    code, out, err = call("validate", "--json", str(wrong), str(good))
    assert (code, err) == (2, "")
    first, second = json.loads(out)
    assert (first["ok"], first["file"], first["line"], first["column"]) == (False, str(wrong), 2, 23)
    assert second == {"path": str(good), "ok": True, "policy": "good"}


def test_schema() -> None:
    code, out, _ = call("schema")
    assert (code, json.loads(out)) == (0, schema())
    assert call("schema", "--json")[1] == out
    jsonschema.validate({"extends": "snapkv"}, json.loads(out))


@pytest.mark.model
def test_run_generates_and_reports(smollm2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str | None, **options: object) -> Any:
        asked.append((name, options["dtype"], options["attn_implementation"]))
        return smollm2

    monkeypatch.setattr(models, "load", load)
    path = tmp_path / "text.txt"
    path.write_text(topics()["with"][:400])
    options = ["--file", str(path), "--budget", "40", "--max-new-tokens", "3"]

    code, out, err = call("run", *options, "--policy", "snapkv", "--no-chat", "--json")
    said = json.loads(out)
    assert (code, err) == (0, "")
    assert isinstance(said["text"], str)
    assert 1 <= said["new_tokens"] <= 3
    assert said["report"]["policy"] == "snapkv"
    assert len(said["report"]["layers"]) == 30
    for layer in said["report"]["layers"]:
        # The last new token is never fed back.
        assert layer["kept"] == [[40 + said["new_tokens"] - 1] * 3]
        assert layer["seen"] == said["prompt_tokens"] + said["new_tokens"] - 1

    code, out, _ = call("run", *options, "--no-chat", "--policy", "snapkv", "--model", "x", "--dtype", "bfloat16")
    assert code == 0
    assert out.startswith(f"{said['text']}\n")
    assert "policy snapkv" in out
    assert call("run", *options, "--no-chat", "--policy", "full")[2] == ""
    whole = call("run", *options, "--no-chat", "--policy", "snapkv", "--budget", "1000", "--json")
    assert json.loads(whole[1])
    assert whole[2] == (
        f"note: nothing was evicted, as the budget holds the whole prompt of {said['prompt_tokens']} tokens: "
        "give a longer one, or a smaller --budget\n"
    )
    # The question and the chat template around it make the prompt longer.
    asking = [*options, "--question", "Is it so?", "--attention", "eager", "--json"]
    chat = json.loads(call("run", *asking)[1])
    assert chat["prompt_tokens"] > said["prompt_tokens"] + 4
    assert chat["report"]["policy"] == "ecokv-snapkv"
    usual = (None, torch.float32, "sdpa")
    assert asked == [usual, ("x", torch.bfloat16, "sdpa"), usual, usual, (None, torch.float32, "eager")]


@pytest.mark.parametrize(
    ("options", "stdin", "says"),
    [
        ([], None, "expected exactly one of --prompt and --file, got none"),
        (["--prompt", "a", "--file", "b"], None, "expected exactly one of --prompt and --file, got both"),
        (["--prompt", " \n"], None, "expected text in --prompt, got none"),
        (["--file", "-"], "", "expected text in '-', got none"),
        (["--file", "-"], b"caf\xe9", "expected UTF-8 text in '-', got the byte 0xe9"),
        (["--file", "nowhere.txt"], None, "cannot read 'nowhere.txt': No such file or directory"),
        (["--file", "/"], None, "cannot read '/': Is a directory"),
        (
            ["--prompt", "a", "--budget", "many"],
            None,
            "--budget: expected whole slots (512) or a share (0.25), got 'many'",
        ),
        (
            ["--prompt", "a", "--budget", "3"],
            None,
            "--budget: policy 'ecokv-snapkv': budget.tokens: expected at least the 12 slots",
        ),
        (
            ["--prompt", "a", "--budget", "1.5"],
            None,
            "--budget: policy 'ecokv-snapkv': budget.keep: expected a number less than or equal to 1, got 1.5",
        ),
        (["--prompt", "a", "--policy", "snapkb"], None, "unknown policy 'snapkb'. Did you mean 'snapkv'"),
        (["--prompt", "a", "--model", "/nowhere"], None, "cannot load the model '/nowhere'"),
    ],
)
def test_run_refuses(options: list[str], stdin: str | bytes | None, says: str) -> None:
    assert says in refused("run", *options, stdin=stdin)


def test_a_question_comes_after_a_prompt_from_anywhere(write: Write) -> None:
    path = write("Some text.\n", "text.txt")
    assert read_prompt(None, str(path), "Why?") == read_prompt("Some text.", None, "Why?") == "Some text.\n\nWhy?"
    assert read_prompt("Some text.\n", None, None) == "Some text.\n"


def test_run_reads_the_prompt_before_it_loads_a_model(write: Write) -> None:
    assert "expected text in" in refused("run", "--file", str(write("", "empty.txt")), "--model", "/nowhere")


@pytest.mark.parametrize("arguments", [["run", "--dtype", "int8"], ["list", "plugins"], ["show"], ["nonsense"], []])
def test_a_wrong_call_is_exit_code_2(arguments: list[str]) -> None:
    assert call(*arguments)[0] == 2


def _process(*arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)


def test_an_error_in_a_real_process_is_one_message_without_traceback(write: Write) -> None:
    ended = _process("kvpolicy.cli", "validate", str(write(WRONG)))
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "mine.yaml:2:23: score.windw" in ended.stderr
    ended = _process("kvpolicy.cli", "show", str(write("score: !!python/object/apply:os.system [true]\n")))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
    assert "Traceback" not in ended.stderr


def test_the_installed_command_is_this_one() -> None:
    from importlib.metadata import entry_points

    (command,) = entry_points(group="console_scripts", name="kvpolicy")
    assert command.load() is app
