"""`kvpolicy plugin new`: what it writes installs, passes its own tests, and is listed; and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packages import made, python
from typer.testing import CliRunner

import kvpolicy
from kvpolicy.cli import app, plugin, scaffold
from kvpolicy.config.source import parse

ROOT = Path(__file__).parents[1]


def new(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plugin", "new", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plugin", "new", *arguments], catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_it_says_what_it_wrote_and_what_is_next(tmp_path: Path) -> None:
    lines = new("my-score").splitlines()
    files = ["README.md", "example.yaml", "kvpolicy_my_score.py", "pyproject.toml", "test_kvpolicy_my_score.py"]
    assert written(tmp_path / "kvpolicy-my-score") == files
    assert sorted(lines[:5]) == [f"wrote kvpolicy-my-score/{file}" for file in files]
    assert lines[-3:] == [
        "  pip install --editable 'kvpolicy-my-score[test]'",
        "  pytest kvpolicy-my-score",
        "  kvpolicy show kvpolicy-my-score/example.yaml",
    ]


def test_it_says_so_in_json(tmp_path: Path) -> None:
    said = json.loads(new("my-policy", "--kind", "policy", "--folder", "a b", "--json"))
    assert said["folder"] == "a b"
    assert sorted(said["files"]) == [f"a b/{file}" for file in written(tmp_path / "a b")]
    assert "a b/kvpolicy_my_policy/my-policy.yaml" in said["files"]
    assert said["next"][1] == "pytest 'a b'"


@pytest.mark.parametrize(
    "name", ["", "My-Score", "my_score", "my score", "1st", "-a", "a-", "a--b", "null", "../a", "à"]
)
def test_a_name_that_will_not_do_is_refused(tmp_path: Path, name: str) -> None:
    assert "expected a name such as my-score" in refused("--", name)
    assert written(tmp_path) == []


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    assert "expected a new name, got 'snapkv', which kvpolicy 0.1.0 offers" in refused("snapkv", "--kind", "combiner")
    assert "got 'pyramid'" in refused("pyramid", "--kind", "layer-budget")
    assert "class would be called LayerView" in refused("layer-view")
    assert "class would be called Path" in refused("path")
    assert written(tmp_path) == []
    new("pyramid", "--kind", "head-budget")
    new("path", "--kind", "policy")


def test_a_name_with_the_prefix_of_the_package_is_refused(tmp_path: Path) -> None:
    assert "expected a name without 'kvpolicy-', which the package gets in front: foo\n" in refused("kvpolicy-foo")
    assert written(tmp_path) == []


@pytest.mark.parametrize(
    ("role", "example"),
    [
        ("importance", {"extends": "ecokv-snapkv", "score": {"importance": "mine"}}),
        ("diversity", {"extends": "ecokv-snapkv", "score": {"diversity": "mine"}}),
        ("other", {"extends": "snapkv", "score": "mine"}),
    ],
)
def test_a_scorer_stands_where_its_role_belongs(tmp_path: Path, role: str, example: dict[str, Any]) -> None:
    new("mine", "--role", role)
    folder = tmp_path / "kvpolicy-mine"
    said = parse((folder / "example.yaml").read_text(), "example.yaml").plain
    assert {"extends": said["extends"], "score": said["score"]} == example
    assert f'    role = "{role}"\n' in (folder / "kvpolicy_mine.py").read_text()
    with kvpolicy.register(made("mine", role=role)):
        assert kvpolicy.load(folder / "example.yaml").description == said["description"]


def test_only_a_scorer_has_a_role() -> None:
    assert "--role: expected none, as a selector has no role, got 'other'" in refused(
        "mine", "--kind", "selector", "--role", "other"
    )


@pytest.mark.parametrize("kind", scaffold.KINDS)
def test_it_depends_on_what_its_module_imports(tmp_path: Path, kind: str) -> None:
    new("mine", "--kind", kind, "--folder", ".")
    needed = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["dependencies"]
    (module,) = [path for path in tmp_path.rglob("*.py") if not path.name.startswith("test")]
    imported = set(re.findall(r"^(?:from|import) (\w+)", module.read_text(), re.MULTILINE)) - sys.stdlib_module_names
    assert {name.replace("-", "_") for name in needed} == imported


@pytest.mark.parametrize("how", ["full", "file", "below a file"])
def test_what_is_there_is_left_alone(tmp_path: Path, how: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.py").write_text("mine")
    folder = {"full": "there", "file": "there/mine.py", "below a file": "there/mine.py/new"}[how]
    says = "cannot write into" if how == "below a file" else "expected a new or empty folder"
    assert f"{says}" in refused("my-score", "--folder", folder)
    assert written(tmp_path) == ["there/mine.py"]
    assert (tmp_path / "there" / "mine.py").read_text() == "mine"


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    new("my-score", "--folder", "there")
    assert len(written(tmp_path / "there")) == 5


def test_the_kinds_are_those_of_the_templates() -> None:
    folders = {path.name for path in (Path(scaffold.__file__).parent / "templates").iterdir()} - {"shared"}
    assert folders == set(scaffold.KINDS) == {kind.value for kind in plugin.Kind}


@pytest.mark.parametrize("kind", scaffold.KINDS)
def test_what_it_writes_is_clean(tmp_path: Path, kind: str) -> None:
    ruff = Path(sys.executable).parent / "ruff"
    if not ruff.exists():
        pytest.skip("needs ruff")
    new("my-own-one", "--kind", kind, "--folder", ".")
    for command in (["check"], ["format", "--check"]):
        ended = subprocess.run(
            [ruff, *command, "--no-cache", "--config", ROOT / "pyproject.toml", "."],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", scaffold.KINDS)
def test_what_it_writes_installs_is_listed_and_passes_its_tests(tmp_path: Path, kind: str) -> None:
    new("my-own-one", "--kind", kind, "--folder", "source")
    site = tmp_path / "site"
    # A copy, as setuptools builds beside the source. Its backend is there: torch requires setuptools.
    source = shutil.copytree(tmp_path / "source", tmp_path / "copy")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    ended = python(tmp_path, "-m", "pip", "install", *options, "--target", str(site), str(source))
    assert ended.returncode == 0, ended.stderr

    ended = python(site, "-m", "kvpolicy.cli", "list", scaffold.KINDS[kind].listed, "--json")
    (row,) = [row for row in json.loads(ended.stdout) if row["name"] == "my-own-one"]
    assert row["origin"] == "kvpolicy-my-own-one 0.1.0"
    assert row["description"]

    # Not in the folder of the sources, where the module could be imported without being installed.
    test = shutil.copy(tmp_path / "source" / "test_kvpolicy_my_own_one.py", tmp_path)
    shutil.copy(tmp_path / "source" / "example.yaml", tmp_path)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    ended = python(site, "-m", "pytest", *options, test)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout

    # Where it is not installed, its own test says so.
    if kind != "policy":
        alone = ["-k", "offers", str(tmp_path / "source" / "test_kvpolicy_my_own_one.py")]
        ended = python(tmp_path, "-m", "pytest", *options, *alone)
        assert ended.returncode == 1
        assert "'my-own-one'" in ended.stdout

    (example,) = (tmp_path / "source").glob("example.yaml")
    assert example.read_text() in (tmp_path / "source" / "README.md").read_text()
    ended = python(site, "-m", "kvpolicy.cli", "validate", str(example))
    assert ended.returncode == 0, ended.stderr
