"""Loading: a stranger's package is found, and a broken one takes no other down."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from packages import install, python

import kvpolicy
from kvpolicy.errors import PluginError, PolicyFileError
from kvpolicy.loading import ALLOW, Failure, allowed, load, points
from kvpolicy.registry import registry


def origins() -> set[str]:
    return {entry.origin.split()[0] for entry in registry().entries()}


def test_an_installed_package_is_found(site: Path) -> None:
    install(site, "acme")
    install(site, "bravo", name="other")
    assert registry().get("score", "middle").origin == "acme 1.5"
    assert registry().get("score", "other").origin == "bravo 1.5"
    policy = kvpolicy.load({"extends": "ecokv", "name": "x", "score": {"importance": {"type": "middle", "power": 2}}})
    assert policy.to_dict()["score"]["importance"] == {"type": "middle", "power": 2.0}


def test_a_plugin_is_loaded_once_and_not_by_importing_kvpolicy(site: Path) -> None:
    install(site, "acme", last="print('loaded')", first="print('asked')")
    code = "import kvpolicy, kvpolicy.registry; print('imported')\nfor _ in range(2): kvpolicy.load('snapkv')"
    ended = python(site, "-c", f"{code}\nprint('done')")
    # What a plugin prints is no part of what a command does.
    assert (ended.stdout.split(), ended.stderr.split()) == (["imported", "done"], ["loaded", "asked"])


def test_what_a_plugin_prints_does_not_end_up_in_the_json_of_a_command(tmp_path: Path) -> None:
    install(tmp_path, "acme", last="print('loaded')", first="print('asked')")
    for command in (["list", "--json"], ["show", "middle", "--json"], ["schema"], ["doctor", "--json"]):
        ended = python(tmp_path, "-m", "kvpolicy.cli", *command)
        assert json.loads(ended.stdout), command
        assert ended.stderr.split()[:2] == ["loaded", "asked"]


BROKEN = {
    "import": ({"last": "import nowhere"}, "ModuleNotFoundError: No module named 'nowhere' ({file}:27)"),
    "hook": ({"first": "raise KeyError('x')"}, "KeyError: 'x' ({file}:24)"),
    "syntax": ({"last": "def :"}, "SyntaxError: invalid syntax (acme.py, line 27)"),
    "exit": ({"last": "raise SystemExit(3)"}, "SystemExit: 3 ({file}:27)"),
    "needs": ({"last": "Needs(queries=-1)"}, "PluginError: Needs: queries: expected a whole number from 0, got -1 ("),
    "lines": ({"last": "raise OSError('two\\n lines')"}, "OSError: two lines ({file}:27)"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_package_whose_code_raises_is_left_out_and_said(site: Path, how: str) -> None:
    wrong, says = BROKEN[how]
    install(site, "acme", **wrong)
    install(site, "bravo", name="other")
    assert registry().get("score", "other").origin == "bravo 1.5"
    (failure,) = registry().failures
    assert (failure.origin, failure.point) == ("acme 1.5", "plugin = acme")
    assert str(failure).startswith(says.replace("{file}", f"{site}/acme.py"))
    with pytest.raises(PolicyFileError) as caught:
        kvpolicy.load({"name": "x", "score": "middle", "budget": 64})
    assert "unknown scorer or combiner 'middle'." in str(caught.value)
    assert f"A plugin that could not be loaded may offer it (acme 1.5: {failure})" in str(caught.value)


def test_a_package_that_is_not_there_is_left_out_without_a_place(site: Path) -> None:
    install(site, "acme")
    (site / "acme.py").unlink()
    (failure,) = registry().failures
    assert str(failure) == "ModuleNotFoundError: No module named 'acme'"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"hook": "kvpolicy_scorer"}, "unknown hook 'kvpolicy_scorer'. Did you mean 'kvpolicy_scorers'"),
        (
            {"arguments": "registry"},
            "expected the hook kvpolicy_scorers(), without arguments, got kvpolicy_scorers(reg",
        ),
        ({"last": "kvpolicy_contract = 99"}, "is written for contract 99, this kvpolicy"),
        ({"last": "Middle.needs = None"}, "scorer Middle: its `needs` is None"),
        ({"marker": ""}, "`kvpolicy_scorers` in acme is not a function marked with @kvpolicy.hookimpl. Uninstall"),
        (
            {"last": "def kvpolicy_budgets():\n    return []"},
            "`kvpolicy_budgets` in acme is not a function marked with @kvpolicy.hookimpl. Uninstall",
        ),
        (
            {"last": "kvpolicy_stores = []"},
            "`kvpolicy_stores` in acme is not a function marked with @kvpolicy.hookimpl",
        ),
        (
            {"point": "acme:Middle"},
            "expected its entry point to name the module with its hooks (plugin = acme), got plugin = acme:Middle. Un",
        ),
        (
            {"last": "del kvpolicy_scorers"},
            "the module acme has no hooks: functions such as kvpolicy_scorers(), marked with @kvpolicy.hookimpl. Unin",
        ),
        ({"first": "return None"}, "got None. Uninstall acme"),
    ],
)
def test_a_package_that_says_something_wrong_is_named_with_the_way_out(
    site: Path, wrong: dict[str, str], says: str
) -> None:
    install(site, "acme", **wrong)
    with pytest.raises(PluginError) as caught:
        registry()
    assert str(caught.value).startswith("acme 1.5")
    assert says in str(caught.value)
    assert str(caught.value).endswith("Uninstall acme, or leave it out: KVPOLICY_PLUGINS names those to load.")


def test_packages_that_clash_are_both_named(site: Path) -> None:
    install(site, "acme")
    install(site, "bravo")
    with pytest.raises(
        PluginError, match=r"two plugins offer the scorer 'middle': acme 1\.5 and bravo 1\.5\. Uninstal"
    ):
        registry()


@pytest.mark.parametrize(
    ("named", "loaded"),
    [
        (None, {"acme", "Bravo_Two"}),
        ("", set()),
        (" , ", set()),
        ("bravo.two", {"Bravo_Two"}),
        ("ACME, bravo-two", {"acme", "Bravo_Two"}),
    ],
)
def test_an_allow_list_of_distributions(
    site: Path, monkeypatch: pytest.MonkeyPatch, named: str | None, loaded: set[str]
) -> None:
    install(site, "acme")
    install(site, "bravo", distribution="Bravo_Two", name="other")
    if named is not None:
        monkeypatch.setenv(ALLOW, named)
    assert origins() & {"acme", "Bravo_Two"} == loaded
    assert "kvpolicy" in origins()


def test_what_the_allow_list_leaves_out_is_not_even_imported(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "acme", last="import nowhere")
    install(site, "bravo", hook="kvpolicy_scorer")
    install(site, "charlie")
    monkeypatch.setenv(ALLOW, "charlie")
    assert registry().failures == []
    assert "acme" not in sys.modules
    with pytest.raises(PolicyFileError) as caught:
        kvpolicy.load({"name": "x", "score": "centre", "budget": 64})
    assert str(caught.value).endswith(" A plugin that KVPOLICY_PLUGINS leaves out may offer it (acme 1.5, bravo 1.5).")


def test_an_allow_list_with_a_stranger_lists_those_there_are(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "acme")
    monkeypatch.setenv(ALLOW, "acme,akme")
    with pytest.raises(
        PluginError, match=r"KVPOLICY_PLUGINS: expected .+, got 'akme'\. Did you mean 'acme'\? Known: ac"
    ):
        registry()


def test_points_come_in_order_and_load_alone(site: Path) -> None:
    install(site, "bravo", last="import nowhere")
    install(site, "acme")
    found = [point for point in allowed(points()) if point.module in ("acme", "bravo")]
    assert [point.module for point in found] == ["acme", "bravo"]
    first, second = map(load, found)
    assert not isinstance(first, Failure)
    assert [entry.name for entry in first.entries] == ["middle"]
    assert isinstance(second, Failure)


def test_the_command_line_shows_an_installed_package_and_what_was_left_out(tmp_path: Path) -> None:
    install(tmp_path, "acme")
    install(tmp_path, "bravo", last="import nowhere")
    ended = python(tmp_path, "-m", "kvpolicy.cli", "list", "scorers", "--json")
    assert ended.returncode == 0, ended.stderr
    rows = {row["name"]: row for row in json.loads(ended.stdout)}
    assert rows["middle"]["origin"] == "acme 1.5"
    assert rows["middle"]["description"] == "The slots in the middle."
    assert ended.stderr == (
        f"warning: bravo 1.5: plugin = bravo could not be loaded: ModuleNotFoundError: No module named 'nowhere' "
        f"({tmp_path}/bravo.py:27)\n"
    )


def test_the_command_line_ends_with_one_message_where_a_package_is_wrong(tmp_path: Path) -> None:
    install(tmp_path, "acme", hook="kvpolicy_scorer")
    ended = python(tmp_path, "-m", "kvpolicy.cli", "list")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: acme 1.5: unknown hook 'kvpolicy_scorer'")
    assert len(ended.stderr.splitlines()) == 1
