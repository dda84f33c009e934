"""A stranger's package, as it is published: a wheel that pip installs, found, composed, and run in a model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvpolicy.scorers.euclidean_diversity import EuclideanDiversity
from kvpolicy.testing import checks

SOURCE = Path(__file__).parents[1] / "plugins" / "kvpolicy-example"

# What a user does with it: their own score as the diversity of a built-in combiner, in `model.generate`.
USE = """
import json
import torch
import kvpolicy
from kvpolicy.testing.models import tiny

policy = kvpolicy.load({
    "name": "snapkv-and-norms",
    "extends": "snapkv",
    "score": {"type": "redundancy-adaptive", "importance": "inherited", "diversity": "norm-diversity"},
    "budget": 12,
    "select": {"sinks": 2, "recent": 4},
})
model = tiny()
prompt = torch.arange(40)[None] + 3
with policy.on(model) as run:
    model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
print(json.dumps({"score": policy.to_dict()["score"]["diversity"], "layers": run.report.to_dict()["layers"]}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which pip has installed the package's wheel, without any network."""
    folder = tmp_path_factory.mktemp("plugin")
    # A copy, as setuptools builds beside the source. Its backend is there: torch requires setuptools.
    source = shutil.copytree(SOURCE, folder / "source")
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    (wheel,) = folder.glob("*.whl")
    pip("install", "--target", str(folder / "site"), str(wheel))
    return folder / "site"


def pip(command: str, *arguments: str) -> None:
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    run = [sys.executable, "-m", "pip", command, *options, *arguments]
    ended = subprocess.run(run, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def python(site: Path, *arguments: str) -> str:
    """Return what Python prints with `site` on its path."""
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
        cwd=site.parent,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_it_is_listed_with_its_distribution_and_version(installed: Path) -> None:
    rows = json.loads(python(installed, "-m", "kvpolicy.cli", "list", "scorers", "--json"))
    (row,) = [row for row in rows if row["name"] == "norm-diversity"]
    assert row["origin"] == "kvpolicy-example 0.1.0"
    assert row["description"].startswith("How far the length of a slot's key is from the mean length")


@pytest.mark.slow
def test_it_composes_with_a_built_in_and_runs_in_generate(installed: Path) -> None:
    said = json.loads(python(installed, "-c", USE).splitlines()[-1])
    assert said["score"] == {"type": "norm-diversity", "on": "keys"}
    for layer in said["layers"]:
        # 12 of the prompt, and the new tokens; the last one is never fed back.
        assert (layer["seen"], layer["kept"]) == (43, [[15, 15]])


@pytest.mark.slow
def test_the_policy_of_its_readme_is_valid(installed: Path) -> None:
    (policy,) = re.findall(r"^```yaml\n(.*?)^```$", (SOURCE / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (installed.parent / "policy.yaml").write_text(policy)
    assert "ok: snapkv-and-norms" in python(installed, "-m", "kvpolicy.cli", "validate", "policy.yaml")


@pytest.mark.slow
def test_its_own_tests_pass(installed: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", "source"]
    said = python(installed, "-m", "pytest", *options, "source/test_kvpolicy_example.py").splitlines()[-1]
    # Each check of each of its two settings, and one more.
    assert re.match(rf"{2 * len(checks(EuclideanDiversity())) + 1} passed in", said), said
