"""The registry: what plugins may offer, whose fault an error is, and a stranger's package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import hookimpl, settings
from kvpolicy.errors import PluginError, PolicyError
from kvpolicy.registry import KINDS, Registry, new_manager, registry
from kvpolicy.scorers.random import Random


class Plugin:
    """A plugin whose hooks return what it is made with."""

    def __init__(self, **hooks: Any) -> None:
        for name, offer in hooks.items():
            setattr(self, f"kvpolicy_{name}", hookimpl(_returning(offer, f"kvpolicy_{name}")))


def _returning(offer: Any, name: str) -> Callable[[], Any]:
    def hook() -> Any:
        return offer() if callable(offer) and not isinstance(offer, type) else offer

    hook.__name__ = name
    return hook


def made(name: str, **attributes: Any) -> type:
    """Return a plugin class with a name."""
    return settings(type("Made", (), {"name": name, "__doc__": "Made.", **attributes}))


def registered(*plugins: object, origins: Iterable[str] = ("one 1.0", "two 2.0", "three 3.0")) -> Registry:
    """Return the registry of the built-ins and the plugins, which come from these distributions."""
    manager = new_manager()
    named = dict(zip(origins, plugins, strict=False))
    for origin, plugin in named.items():
        manager.register(plugin, name=origin)
    return Registry(manager, {origin: origin for origin in named})


def test_the_built_ins_come_from_kvpolicy() -> None:
    built_in = Registry(new_manager())
    entry = built_in.get("score", "random")
    assert (entry.kind, entry.value) == ("scorer", Random)
    assert {entry.origin for entry in built_in.entries()} == {f"kvpolicy {version('kvpolicy')}"}
    assert {entry.kind for entry in built_in.entries()} == {*KINDS, "policy"}
    assert {(entry.kind, entry.name) for entry in built_in.entries()} <= {
        (entry.kind, entry.name) for entry in registry().entries()
    }


def test_a_plugin_may_offer_every_kind(tmp_path: Path) -> None:
    (tmp_path / "my-policy.yaml").write_text("extends: snapkv\n")
    (tmp_path / "notes.txt").write_text("no policy")
    plugin = Plugin(
        scorers=[made("my-score")],
        combiners=[made("my-mix")],
        budgets=[made("my-layers", stage="layers"), made("my-heads", stage="heads")],
        selectors=[made("my-choice")],
        policies=tmp_path,
    )
    found = [(entry.kind, entry.name) for entry in registered(plugin).entries() if entry.origin == "one 1.0"]
    assert found == [
        ("scorer", "my-score"),
        ("combiner", "my-mix"),
        ("layers", "my-layers"),
        ("heads", "my-heads"),
        ("selector", "my-choice"),
        ("policy", "my-policy"),
    ]


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ({"scorers": [made("mine")]}, {"scorers": [made("mine")]}, "scorer 'mine'"),
        ({"scorers": [made("mine")]}, {"combiners": [made("mine")]}, "r 'mine'"),
        ({"selectors": [made("mine")]}, {"selectors": [made("mine")]}, "selector 'mine'"),
        ({"budgets": [made("a", stage="heads")]}, {"budgets": [made("a", stage="heads")]}, "heads 'a'"),
    ],
)
def test_a_clash_of_names_names_both_distributions(first: Any, second: Any, what: str) -> None:
    with pytest.raises(PluginError, match=rf"{what}: one 1\.0 and two 2\.0\. Uninstall one of them"):
        registered(Plugin(**first), Plugin(**second))


def test_a_clash_with_a_built_in_names_both(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"the scorer 'random': kvpolicy .+ and one 1\.0\."):
        registered(Plugin(scorers=[made("random")]))
    (tmp_path / "snapkv.yaml").write_text("score: random\n")
    with pytest.raises(PluginError, match=r"the policy 'snapkv': kvpolicy .+ and one 1\.0\."):
        registered(Plugin(policies=tmp_path))


def test_one_name_may_stand_in_different_places() -> None:
    budgets = [made("mine", stage="layers"), made("mine", stage="heads")]
    found = registered(Plugin(scorers=[made("mine")], budgets=budgets, selectors=[made("mine")]))
    assert [found.get(place, "mine").kind for place in ("score", "layers", "heads", "selector")] == [
        "scorer",
        "layers",
        "heads",
        "selector",
    ]


def test_the_order_of_plugins_does_not_matter() -> None:
    plugins = [Plugin(scorers=[made(name)]) for name in ("b", "c", "a")]
    origins = ["one 1.0", "two 2.0", "three 3.0"]
    pairs = list(zip(plugins, origins, strict=True))
    listings = []
    for order in permutations(pairs):
        found = registered(*(plugin for plugin, _ in order), origins=[origin for _, origin in order])
        listings.append([(entry.kind, entry.name, entry.value, entry.origin) for entry in found.entries()])
    assert all(listing == listings[0] for listing in listings)


@pytest.mark.parametrize(
    ("hooks", "says"),
    [
        (
            {"scorers": [settings(type("Nameless", (), {}))]},
            "one 1.0: expected a class with a string `name`, got <class",
        ),
        ({"scorers": [made(3)]}, "one 1.0: expected a class with a string `name`"),  # type: ignore[arg-type]
        ({"scorers": [Random()]}, "one 1.0: expected a class with a string `name`, got Random(seed=0)"),
        ({"scorers": [type("Bare", (), {"name": "bare"})]}, "'bare': expected a class made with @kvpolicy.settings"),
        ({"scorers": [made("inherited")]}, "scorer 'inherited': expected another name"),
        ({"budgets": [made("mine")]}, "one 1.0: budget 'mine': expected stage = 'layers' or 'heads', got ''"),
        ({"budgets": [made("mine", stage="head")]}, "expected stage = 'layers' or 'heads', got 'head'"),
        ({"scorers": None}, "one 1.0: expected a list of classes from kvpolicy_scorers(), got TypeError"),
        (
            {"policies": "folder"},
            "one 1.0: expected the folder (a pathlib.Path) of its policies from kvpolicy_policies()",
        ),
        ({"policies": Path("/nowhere")}, "of its policies from kvpolicy_policies(), got FileNotFoundError"),
        ({"selectors": lambda: 1 / 0}, "from kvpolicy_selectors(), got ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_offer_is_its_distributions_fault(hooks: dict[str, Any], says: str) -> None:
    with pytest.raises(PluginError) as caught:
        registered(Plugin(**hooks))
    assert says in str(caught.value)
    assert "one 1.0: " in str(caught.value)


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(PolicyError, match=r"unknown scorer or combiner 'snapkb'\. Did you mean 'snapkv'"):
        Registry(new_manager()).get("score", "snapkb")
    with pytest.raises(PolicyError, match=r"unknown head budget 'pyramid'. Known: adaptive, uniform\."):
        Registry(new_manager()).get("heads", "pyramid")


# A stranger's package, installed: a module and what an installer writes beside it.

SCORER = """
import torch
from kvpolicy import LayerView, Needs, hookimpl, settings

@settings
class Middle:
    '''The slots in the middle.

    Args:
        power: how sharply.
    '''
    name = "{name}"
    source = "{module}"
    formula = "-|t - T/2|"
    needs = Needs()
    power: float = 1.0

    def __call__(self, view: LayerView) -> torch.Tensor:
        place = torch.arange(view.slots) - view.slots / 2
        return -place.abs().pow(self.power).expand(view.valid.shape)

@hookimpl
def {hook}({arguments}):
    return [Middle]
"""


def install(
    folder: Path, module: str, *, name: str = "middle", hook: str = "kvpolicy_scorers", arguments: str = ""
) -> None:
    (folder / f"{module}.py").write_text(SCORER.format(name=name, module=module, hook=hook, arguments=arguments))
    info = folder / f"{module}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.5\n")
    # Every such package may well call its entry point alike.
    (info / "entry_points.txt").write_text(f"[kvpolicy]\nplugin = {module}\n")


def with_installed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvpolicy.cli", *arguments]
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths})


def test_an_installed_package_is_found(tmp_path: Path) -> None:
    install(tmp_path, "acme")
    install(tmp_path, "bravo", name="other")
    ended = with_installed(tmp_path, "list", "scorers", "--json")
    assert ended.returncode == 0, ended.stderr
    rows = {row["name"]: row for row in json.loads(ended.stdout)}
    assert rows["middle"]["origin"] == "acme 1.5"
    assert rows["middle"]["description"] == "The slots in the middle."
    assert rows["other"]["origin"] == "bravo 1.5"
    (tmp_path / "mine.yaml").write_text("extends: [snapkv, ecokv]\nscore: {importance: {type: middle, power: 2}}\n")
    ended = with_installed(tmp_path, "show", str(tmp_path / "mine.yaml"), "--json")
    assert json.loads(ended.stdout)["score"]["importance"] == {"type": "middle", "power": 2.0}


def test_installed_packages_that_clash_are_both_named(tmp_path: Path) -> None:
    install(tmp_path, "acme")
    install(tmp_path, "bravo")
    ended = with_installed(tmp_path, "list")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "error: two plugins offer the scorer 'middle': acme 1.5 and bravo 1.5. "
        "Uninstall one of them, or ask its author to rename it.\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"hook": "kvpolicy_scorer"}, "unknown hook 'kvpolicy_scorer'"),
        ({"arguments": "registry"}, "Argument(s) {'registry'} are declared in the hookimpl"),
        ({"arguments": ") -> list[type]:\n    import nowhere\ndef unused("}, "got ModuleNotFoundError"),
        ({"name": '" + nonsense + "'}, "name 'nonsense' is not defined"),
    ],
)
def test_an_installed_package_that_is_broken_is_named(tmp_path: Path, wrong: dict[str, str], says: str) -> None:
    install(tmp_path, "acme", **wrong)
    ended = with_installed(tmp_path, "list")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: acme 1.5: ")
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
