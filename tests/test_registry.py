"""The registry: what plugins may offer, and whose fault an error is."""

from __future__ import annotations

import copy
from importlib.metadata import version
from itertools import permutations
from pathlib import Path
from typing import Any

import packages
import pytest
import torch
from filters import some_filters
from packages import made

from kvpolicy import LayerView, Needs, settings
from kvpolicy.contract import CONTRACT, KINDS, fault
from kvpolicy.errors import PluginError, PolicyError
from kvpolicy.loading import Plugin, Raised, built_in, read
from kvpolicy.plugin import Score
from kvpolicy.registry import Registry, registry
from kvpolicy.scorers.random import Random

ORIGINS = ("one 1.0", "two 2.0", "three 3.0")
TABLE = {"scores": [[1.0]]}
PROTECTING = {"protects": 0, "protect": lambda self, view, tokens: view.valid}


def plugin(origin: str = "one 1.0", **hooks: Any) -> Plugin:
    """Return what a distribution offers by its hooks."""
    return read(packages.Plugin(**hooks), origin)


def registered(*plugins: Plugin) -> Registry:
    """Return the registry of the built-ins and the plugins."""
    return Registry([*built_in(), *plugins])


def test_the_built_ins_come_from_kvpolicy() -> None:
    found = registered()
    entry = found.get("score", "random")
    assert (entry.kind, entry.value) == ("scorer", Random)
    assert {entry.origin for entry in found.entries()} == {f"kvpolicy {version('kvpolicy')}"}
    assert {entry.kind for entry in found.entries()} == {*KINDS, "policy"}
    assert {(entry.kind, entry.name) for entry in found.entries()} <= {
        (entry.kind, entry.name) for entry in registry().entries()
    }


def test_a_plugin_may_offer_every_kind(tmp_path: Path) -> None:
    (tmp_path / "my-policy.yaml").write_text("extends: snapkv\n")
    (tmp_path / "notes.txt").write_text("no policy")
    one = plugin(
        scorers=[made("my-score")],
        combiners=[made("my-mix")],
        budgets=(cls for cls in [made("my-layers", stage="layers"), made("my-heads", stage="heads")]),
        selectors=[made("my-choice", **PROTECTING)],
        evicted=[made("my-merge", stage="evicted", needs=Needs())],
        stores=[made("my-store")],
        policies=tmp_path,
    )
    found = [(entry.kind, entry.name) for entry in registered(one).entries() if entry.origin == "one 1.0"]
    assert found == [
        ("scorer", "my-score"),
        ("combiner", "my-mix"),
        ("layers", "my-layers"),
        ("heads", "my-heads"),
        ("selector", "my-choice"),
        ("evicted", "my-merge"),
        ("store", "my-store"),
        ("policy", "my-policy"),
    ]


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ({"scorers": [made("mine")]}, {"scorers": [made("mine")]}, "scorer 'mine'"),
        ({"scorers": [made("mine")]}, {"combiners": [made("mine")]}, "combiner 'mine'"),
        ({"selectors": [made("mine", **PROTECTING)]}, {"selectors": [made("mine", **PROTECTING)]}, "selector 'mine'"),
        ({"budgets": [made("a", stage="heads")]}, {"budgets": [made("a", stage="heads")]}, "heads 'a'"),
    ],
)
def test_a_clash_of_names_names_both_distributions(first: Any, second: Any, what: str) -> None:
    with pytest.raises(PluginError, match=rf"{what}: one 1\.0 and two 2\.0\. Uninstall one of them, leave it out \(KV"):
        registered(plugin("one 1.0", **first), plugin("two 2.0", **second))


def test_a_clash_with_oneself_is_said() -> None:
    with pytest.raises(PluginError, match=r"^one 1\.0 offers the scorer 'mine' twice\."):
        registered(plugin(scorers=[made("mine"), made("mine")]))


def test_a_clash_with_a_built_in_names_both(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"the scorer 'random': kvpolicy .+ and one 1\.0\."):
        registered(plugin(scorers=[made("random")]))
    (tmp_path / "snapkv.yaml").write_text("score: random\n")
    with pytest.raises(PluginError, match=r"the policy 'snapkv': kvpolicy .+ and one 1\.0\."):
        registered(plugin(policies=tmp_path))


def test_after_a_clash_the_registry_is_as_it_was() -> None:
    found = registered(plugin(scorers=[made("mine")]))
    before = found.entries()
    with pytest.raises(PluginError):
        found.add(plugin("two 2.0", scorers=[made("other"), made("mine")]))
    assert found.entries() == before


def test_one_name_may_stand_in_different_places() -> None:
    budgets = [made("mine", stage="layers"), made("mine", stage="heads")]
    one = plugin(scorers=[made("mine")], budgets=budgets, selectors=[made("mine", **PROTECTING)])
    found = registered(one)
    assert [found.get(place, "mine").kind for place in ("score", "layers", "heads", "selector")] == [
        "scorer",
        "layers",
        "heads",
        "selector",
    ]


def test_the_order_of_plugins_does_not_matter() -> None:
    plugins = [plugin(origin, scorers=[made(name)]) for origin, name in zip(ORIGINS, ("b", "c", "a"), strict=True)]
    listings = [registered(*order).entries() for order in permutations(plugins)]
    assert all(listing == listings[0] for listing in listings)


def needing(needs: Any) -> dict[str, Any]:
    return {"scorers": [made("mine", needs=needs)]}


def test_what_it_needs_may_be_a_property() -> None:
    assert plugin(**needing(property(lambda self: Needs()))).entries


@pytest.mark.parametrize(
    ("hooks", "says"),
    [
        ({"scorers": [settings(type("Nameless", (), {}))]}, "scorer Nameless: it has no `name`: what a policy file"),
        ({"scorers": [settings(type("ValueNovelty", (), {}))]}, "policy file calls it, as in name = 'value-novelty'"),
        ({"scorers": [made(3)]}, "scorer Made: its `name` is 3, not text"),
        ({"scorers": [made("my score")]}, "scorer Made: its `name` is 'my score', not such as 'my-score'"),
        ({"scorers": [made("1e5")]}, "its `name` is '1e5', not such as"),
        ({"scorers": [made("null")]}, "its `name` is 'null', not such as"),
        ({"scorers": [made("mine\n")]}, r"its `name` is 'mine\n', not such as"),
        ({"scorers": [Random()]}, "expected a class, got Random(seed=0)"),
        ({"scorers": [type("Bare", (), {"name": "bare"})]}, "scorer Bare: expected a class made with @kvpolicy.settin"),
        ({"scorers": [made("inherited")]}, "scorer Made: expected another name than 'inherited'"),
        ({"scorers": [made("mine", stage="heads")]}, "scorer Made: it has no `needs`: what it reads, as in needs = "),
        ({"combiners": [made("mine", stage="heads")]}, "combiner Made: it has no `needs`"),
        (needing({"keys": True}), "scorer Made: its `needs` is {'keys': True}, not a kvpolicy.Needs or a property"),
        (needing(lambda self: Needs()), "scorer Made: its `needs` is <function"),
        ({"scorers": [made("mine", role="importanc")]}, "its `role` is 'importanc', not one of 'importance', 'divers"),
        ({"selectors": [made("mine")]}, "selector Made: it has no `protects` and no `protect` (see kvpolicy.plugin.Se"),
        ({"selectors": [made("mine", protects=3)]}, "selector Made: it has no `protect` (see"),
        (
            {"stores": [settings(type("Mute", (), {"name": "mute"}))]},
            "store Mute: it has no `__call__`, which does its",
        ),
        ({"budgets": [made("mine")]}, "budget Made: expected stage = 'layers' or 'heads', got ''"),
        ({"budgets": [made("mine", stage="store")]}, "expected stage = 'layers' or 'heads', got 'store'"),
        ({"scorers": None}, "expected a list of classes from kvpolicy_scorers(), got None"),
        ({"scorers": made("mine")}, "expected a list of classes from kvpolicy_scorers(), got <class"),
        (
            {"policies": "folder"},
            "expected the folder (a pathlib.Path) of its policies from kvpolicy_policies(), got 'f",
        ),
        (
            {"policies": Path(__file__).parent},
            "expected *.yaml files in the folder from kvpolicy_policies(), got none in '",
        ),
        ({"policies": Path("/nowhere")}, "of its policies from kvpolicy_policies(), got PosixPath('/nowhere')"),
        ({"scorer": []}, "unknown hook 'kvpolicy_scorer'. Did you mean 'kvpolicy_scorers'"),
        (
            {"scorers": lambda registry: []},
            "expected the hook kvpolicy_scorers(), without arguments, got kvpolicy_scorer",
        ),
        ({"scorers": lambda *, registry: []}, "without arguments, got kvpolicy_scorers(*, registry)"),
    ],
)
def test_a_wrong_offer_is_its_distributions_fault(hooks: dict[str, Any], says: str) -> None:
    with pytest.raises(PluginError) as caught:
        plugin(**hooks)
    assert str(caught.value).startswith("one 1.0: ")
    assert says in str(caught.value)


@pytest.mark.parametrize("hooks", [{"selectors": lambda: 1 / 0}, {"scorers": lambda: (1 / 0 for _ in range(1))}])
def test_a_hook_that_raises_is_told_from_one_that_is_wrong(hooks: dict[str, Any]) -> None:
    with pytest.raises(Raised) as caught:
        plugin(**hooks)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_hook_may_have_parameters_that_no_call_gives() -> None:
    assert plugin(scorers=lambda only=None, *more, **named: [made("mine")]).entries


def test_a_hook_of_a_later_kvpolicy_may_be_optional() -> None:
    from kvpolicy import hookimpl

    class Later:
        @hookimpl(optionalhook=True)
        def kvpolicy_painters(self, canvas: object) -> None: ...

    assert read(Later(), "one 1.0").entries == ()


def stating(contract: Any) -> packages.Plugin:
    module = packages.Plugin(scorers=[made("mine")])
    module.kvpolicy_contract = contract  # type: ignore[attr-defined]
    return module


def test_a_plugin_may_state_its_contract() -> None:
    assert read(stating(CONTRACT), "one 1.0").contract == CONTRACT
    assert plugin(scorers=[made("mine")]).contract == 1
    newer = f"one 1.0 is written for contract {CONTRACT + 1}, this kvpolicy {version('kvpolicy')} offers {CONTRACT}: up"
    with pytest.raises(PluginError, match=newer):
        read(stating(CONTRACT + 1), "one 1.0")


@pytest.mark.parametrize("contract", ["1", 1.0, True, 0, None])
def test_a_contract_is_a_whole_number(contract: Any) -> None:
    with pytest.raises(PluginError, match=r"one 1\.0: kvpolicy_contract: expected a whole number from 1, got"):
        read(stating(contract), "one 1.0")


def test_every_built_in_keeps_the_contract_as_an_instance(tmp_path: Path) -> None:
    required = {
        "threshold": {"threshold": 0.5},
        "head-table": TABLE,
        "head-totals": TABLE,
        "q-filters": {"file": some_filters(1, 1, 2, folder=tmp_path)},
    }
    for entry in registered().entries():
        if entry.kind != "policy" and not any("Score" in str(hint) for hint in entry.value.__annotations__.values()):
            assert fault(entry.value(**required.get(entry.name, {})), entry.kind) == "", entry.name


def test_a_score_in_python_is_checked_alike() -> None:
    @settings
    class Mix:
        name = "mix"
        needs = Needs()
        one: Score

    class Late:
        name = "late"
        needs = property(lambda self: "keys")

        def __call__(self, view: Any) -> Any: ...

    for one, says in [
        ("snapkv", "mix: one: expected a scorer or combiner, not what a policy file would hold (kvpolicy.load({...}) "),
        (Random, "one: expected a scorer or combiner, an instance: Random()"),
        (Late(), "one: expected a scorer or combiner, not a Late: its `needs` is 'keys', not a kvpolicy.Needs"),
        (object(), "one: expected a scorer or combiner, not a object: it has no `name`"),
    ]:
        with pytest.raises(PolicyError) as caught:
            Mix(one=one)  # type: ignore[arg-type]
        assert says in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("queries", -1), ("queries", True), ("queries", 1.0), ("keys", "yes")])
def test_needs_are_checked_when_they_are_made(field: str, value: Any) -> None:
    with pytest.raises(PluginError, match=f"Needs: {field}: expected .+, got {value!r}"):
        Needs(**{field: value})


def test_a_need_that_is_none_is_named() -> None:
    with pytest.raises(
        PluginError, match=r"^Needs: unknown need 'value'\. Did you mean 'values'\? Known: call, change, keys, "
    ):
        Needs(value=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("limited", [False, True])
def test_what_a_view_has_not_is_named(limited: bool) -> None:
    view = LayerView(keys=torch.zeros(1, 2, 5, 4), values=torch.zeros(1, 2, 5, 4))
    if limited:
        view = view.limit(Needs(values=True), "scorer 'mine'")
    with pytest.raises(
        AttributeError, match=r"^LayerView has no 'vals'\. Did you mean 'values' or 'valid'\? Known: call, "
    ):
        _ = view.vals  # type: ignore[attr-defined]
    assert not hasattr(view, "vals")
    assert copy.deepcopy(view).slots == 5


def test_everything_of_a_name() -> None:
    found = registered()
    assert [entry.kind for entry in found.called("snapkv")] == ["policy", "scorer"]
    assert [entry.kind for entry in found.called("uniform")] == ["layers", "heads"]
    with pytest.raises(PolicyError, match=r"^unknown policy or plugin 'topk'\. Did you mean 'top-k'"):
        found.called("topk")


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(PolicyError, match=r"unknown scorer or combiner 'snapkb'\. Did you mean 'snapkv'"):
        registered().get("score", "snapkb")
    with pytest.raises(PolicyError, match=r"unknown policy 'SnapKV'\. Did you mean 'snapkv'"):
        registered().get("policy", "SnapKV")
    with pytest.raises(
        PolicyError, match=r"unknown head budget 'pyramid'. Known: adaptive, head-table, threshold, uniform\.$"
    ):
        registered().get("heads", "pyramid")
