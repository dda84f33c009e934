"""A stranger's package, as it is published: built and installed by pip, found, composed, and run in a model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    """Return a folder into which pip has installed the package, without any network."""
    folder = tmp_path_factory.mktemp("plugin")
    # A copy, as setuptools builds beside the source. Its backend is there: torch requires setuptools.
    source = shutil.copytree(SOURCE, folder / "source")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder / "site"), str(source)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder / "site"


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
def test_its_own_test_passes(installed: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", "source"]
    assert "1 passed" in python(installed, "-m", "pytest", *options, "source/test_kvpolicy_example.py")
