"""`kvpolicy doctor`: it says what is wrong, whatever is."""

from __future__ import annotations

import importlib
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packages import install
from typer.testing import CliRunner

from kvpolicy.cli import app
from kvpolicy.contract import CONTRACT
from kvpolicy.loading import ALLOW
from kvpolicy.registry import loaded


def examined() -> dict[str, Any]:
    """Return what it says as JSON; its exit code has to go with that."""
    result = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False)
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if found["ok"] else 1)
    assert found["ok"] == (found["problems"] == [])
    return found


def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["distribution"]: row for row in found["plugins"]}


def test_all_is_well(site: Path) -> None:
    install(site, "acme", last="kvpolicy_contract = 1")
    found = examined()
    assert found["problems"] == []
    assert found["versions"] == {
        "kvpolicy": version("kvpolicy"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "contract": str(CONTRACT),
    }
    assert found["devices"][0] == f"cpu ({torch.get_num_threads()} threads)"
    assert found["KVPOLICY_PLUGINS"] is None
    assert rows(found)["acme"] == {
        "distribution": "acme",
        "version": "1.5",
        "entry_point": "plugin = acme",
        "contract": 1,
        "offers": [{"kind": "scorer", "name": "middle"}],
        "state": "ok",
        "why": "",
    }
    shown = CliRunner().invoke(app, ["doctor"], catch_exceptions=False).stdout
    assert "scorer middle" in shown
    assert "All is well." in shown


def test_each_plugin_is_examined_whatever_the_others_do(site: Path) -> None:
    install(site, "acme", last="import nowhere")
    install(site, "bravo", hook="kvpolicy_scorer")
    install(site, "charlie")
    install(site, "delta")
    install(site, "echo", name="other")
    found = examined()
    states = {name: row["state"] for name, row in rows(found).items()}
    assert {name: states[name] for name in ("acme", "bravo", "charlie", "delta", "echo")} == {
        "acme": "could not be loaded",
        "bravo": "wrong",
        "charlie": "ok",
        "delta": "wrong",
        "echo": "ok",
    }
    broken, misspelt, clash = found["problems"]
    assert broken == (
        f"acme 1.5 could not be loaded: ModuleNotFoundError: No module named 'nowhere' ({site}/acme.py:27)"
    )
    assert misspelt.startswith("bravo 1.5: unknown hook 'kvpolicy_scorer'. Did you mean 'kvpolicy_scorers'")
    assert clash.startswith("two plugins offer the scorer 'middle': charlie 1.5 and delta 1.5.")
    shown = CliRunner().invoke(app, ["doctor"], catch_exceptions=False).stdout
    assert f"problem: {broken}" in shown.splitlines()
    assert "All is well." not in shown


def test_a_policy_of_a_plugin_that_cannot_be_loaded_is_wrong(site: Path) -> None:
    offer = "import pathlib\n@hookimpl\ndef kvpolicy_policies():\n    return pathlib.Path(__file__).parent / 'policies'"
    install(site, "acme", last=offer)
    (site / "policies").mkdir()
    (site / "policies" / "good.yaml").write_text("extends: snapkv\nscore: middle\n")
    assert examined()["ok"]
    (site / "policies" / "bad.yaml").write_text("extends: snapkb\n")
    loaded.cache_clear()
    found = examined()
    assert rows(found)["acme"]["state"] == "wrong"
    (problem,) = found["problems"]
    assert problem.startswith(
        f"acme 1.5: policy 'bad': {site}/policies/bad.yaml:1:10: extends: unknown policy 'snapkb'"
    )
    (site / "policies" / "worse.yaml").write_text("extends: [\n")
    loaded.cache_clear()
    first, second = examined()["problems"]
    assert first.removesuffix(", worse.") == problem.removesuffix(".")
    assert second.startswith(f"acme 1.5: policy 'worse': {site}/policies/worse.yaml:2:1: not one YAML document")


@pytest.mark.parametrize("group", ["kvpolicies", "kv_policy", "KVPolicy.plugins"])
def test_a_group_that_is_only_called_nearly_like_ours(site: Path, group: str) -> None:
    install(site, "acme", group=group)
    found = examined()
    assert "acme" not in rows(found)
    assert found["problems"] == [
        f"acme 1.5: expected its entry point plugin = acme in the group 'kvpolicy', got '{group}'"
    ]


def test_the_allow_list(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "acme", last="import nowhere")
    install(site, "bravo")
    monkeypatch.setenv(ALLOW, "bravo")
    found = examined()
    assert found["KVPOLICY_PLUGINS"] == "bravo"
    assert [rows(found)[name]["state"] for name in ("acme", "bravo")] == ["left out", "ok"]
    monkeypatch.setenv(ALLOW, "brava")
    (problem,) = examined()["problems"]
    assert "got 'brava'. Did you mean 'bravo'?" in problem


def test_what_kvpolicy_requires_and_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["torch", "transformers>=99", "nonsense-package>=2", 'gguf>=99; extra == "demo"']
    monkeypatch.setattr(importlib.import_module("kvpolicy.cli.doctor"), "requires", lambda name: needed)
    assert examined()["problems"] == [
        f"transformers: expected >=99, got {version('transformers')}",
        "nonsense-package: expected >=2, got none",
    ]


def test_the_default_model_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvpolicy import models

    monkeypatch.setenv("KVPOLICY_CACHE", str(tmp_path))
    assert examined()["default_model"] == "there; converted once, when it is first loaded"
    models.default_folder().mkdir()
    assert examined()["default_model"] == f"there, in {models.default_folder()}"
    monkeypatch.setattr(models, "default_lacks", lambda: ["gguf"])
    found = examined()
    assert found["default_model"].startswith("not there: gguf not installed (pip install ")
    assert found["ok"]
