"""`kvpolicy.register`: plugins of a notebook, and that nothing of them stays."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import packages
import pytest
from packages import made
from torch import Tensor

import kvpolicy
from kvpolicy import Needs, wrap_score
from kvpolicy.combiners.redundancy_adaptive import RedundancyAdaptive
from kvpolicy.config import schema
from kvpolicy.errors import PluginError, PolicyFileError, SettingError
from kvpolicy.plugin import Score
from kvpolicy.registry import loaded, registry
from kvpolicy.scorers.random import Random


@pytest.fixture(autouse=True)
def _unchanged() -> Iterator[None]:
    before = registry().entries()
    yield
    after = registry().entries()
    loaded.cache_clear()
    assert after == before, "the test left something registered"


def cell(name: str = "mine", **attributes: Any) -> type:
    """Return the class that a cell of a notebook makes, each time anew."""
    return made(name, **attributes)


def names(kind: str) -> list[str]:
    return [entry.name for entry in registry().entries(kind)]


def scored(name: str) -> type:
    return type(kvpolicy.load({"name": "x", "score": name, "budget": 64}).score)


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (made("mine"), "scorer"),
        (made("mine", stage="layers"), "layers"),
        (made("mine", stage="heads"), "heads"),
        (made("mine", protects=0, protect=lambda self, view, tokens: view.valid, needs=kvpolicy.Needs()), "selector"),
        (made("mine", needs=kvpolicy.Needs(), __annotations__={"inner": Score}), "combiner"),
    ],
)
def test_a_class_is_registered_as_what_it_is(cls: type, kind: str) -> None:
    with kvpolicy.register(cls):
        assert "mine" in names(kind)
        assert registry().get("score" if kind in ("scorer", "combiner") else kind, "mine").value is cls
    assert "mine" not in names(kind)


def test_everything_knows_what_is_registered() -> None:
    cls = cell()
    assert "scorer.mine" not in schema()["$defs"]
    with kvpolicy.register(cls):
        assert scored("mine") is cls
        assert "scorer.mine" in schema()["$defs"]
        assert registry().get("score", "mine").origin == "module packages (registered in code)"
    assert "scorer.mine" not in schema()["$defs"]
    with pytest.raises(PolicyFileError, match="unknown scorer or combiner 'mine'"):
        scored("mine")


def test_it_is_undone_by_hand_too_and_when_the_block_raises() -> None:
    registration = kvpolicy.register(cell())
    registration.undo()
    assert "mine" not in names("scorer")
    registration.undo()
    with pytest.raises(ZeroDivisionError), kvpolicy.register(cell()):
        raise ZeroDivisionError
    assert "mine" not in names("scorer")


def test_modules_and_objects_with_hooks(tmp_path: Path) -> None:
    (tmp_path / "my-policy.yaml").write_text("extends: snapkv\n")
    module = types.ModuleType("my_module")
    module.kvpolicy_policies = kvpolicy.hookimpl(lambda: tmp_path)  # type: ignore[attr-defined]
    with kvpolicy.register(module, packages.Plugin(scorers=[cell()])) as registration:
        assert registry().get("policy", "my-policy").origin == "module my_module (registered in code)"
        assert kvpolicy.load("my-policy").name == "my-policy"
        assert scored("mine")
        assert repr(registration) == "<Registration of policy 'my-policy', scorer 'mine'>"


def test_a_cell_that_runs_again_replaces_its_class() -> None:
    first = kvpolicy.register(cell())
    again = cell()
    second = kvpolicy.register(again)
    assert scored("mine") is again
    # What has been replaced is gone: undoing it takes nothing away, and it does not come back.
    first.undo()
    assert scored("mine") is again
    second.undo()
    assert "mine" not in names("scorer")


def test_a_class_registered_twice_is_there_until_both_are_undone() -> None:
    cls = cell()
    with kvpolicy.register(cls):
        with kvpolicy.register(cls):
            assert scored("mine") is cls
        assert scored("mine") is cls
    assert "mine" not in names("scorer")


def test_a_class_given_twice_is_there_once() -> None:
    cls, module = cell(), types.SimpleNamespace(kvpolicy_scorers=kvpolicy.hookimpl(lambda: [made("other")]))
    with kvpolicy.register(cls, module, cls) as registration:
        assert repr(registration) == "<Registration of scorer 'mine', scorer 'other'>"


def test_a_hook_that_is_not_marked_is_said() -> None:
    with pytest.raises(
        PluginError, match="`kvpolicy_scorers` in SimpleNamespace is not a function marked with @kvpolicy"
    ):
        kvpolicy.register(types.SimpleNamespace(kvpolicy_scorers=lambda: [cell()]))


def test_another_class_of_a_name_that_is_taken_is_refused() -> None:
    other = cell()
    other.__qualname__ = "Other"
    with kvpolicy.register(cell()):
        before = registry().entries()
        with pytest.raises(
            PluginError, match=r"module packages \(registered in code\) offers the scorer 'mine' twice\. Give"
        ):
            kvpolicy.register(cell("fine"), other)
        assert registry().entries() == before
    with pytest.raises(
        PluginError, match=r"the scorer 'random': kvpolicy .+ and module kvpolicy\.scorers\.random \(reg"
    ):
        kvpolicy.register(Random)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            3,
            "module builtins (registered in code): expected plugin classes, got 3: a scorer has `needs`, a combine",
        ),
        (Random(), "expected plugin classes, got Random(seed=0)"),
        (type("Bare", (), {}), "got <class 'test_registering.Bare'>: a scorer has `needs`"),
        (types, "module types (registered in code): expected plugin classes, got <module 'types'"),
        (made("my score"), "scorer Made: its `name` is 'my score'"),
        (
            made("mine", stage="layer"),
            "class Made: expected stage = 'layers' or 'heads', of a budget, or 'evicted', got 'layer'",
        ),
        (
            made("mine", needs=Needs(), __call__=lambda self, view, selection, memory: None),
            "scorer Made: its `__call__` takes (view, selection, memory), a scorer's the view alone: write stage = ",
        ),
        (
            made("mine", needs=Needs(), __call__=lambda self, view, scores, tokens: None),
            "takes (view, scores, tokens), a scorer's the view alone",
        ),
        (packages.Plugin(scorer=[]), "unknown hook 'kvpolicy_scorer'. Did you mean 'kvpolicy_scorers'"),
        (packages.Plugin(scorers=lambda: 1 / 0), "its hooks raised ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_plugin_is_refused_and_nothing_registered(value: Any, says: str) -> None:
    before = registry().entries()
    with pytest.raises(PluginError) as caught:
        kvpolicy.register(cell(), value)
    assert says in str(caught.value)
    assert registry().entries() == before


def test_what_a_scorer_may_be_called_with_besides_is_up_to_it() -> None:
    def call(self: Any, view: Any, scale: float = 1.0, *rest: Any, power: int = 2, **named: Any) -> None: ...

    def join(self: Any, view: Any, inner: Any) -> None: ...

    with kvpolicy.register(
        made("mine", needs=Needs(), __call__=call),
        made("ours", needs=Needs(), __annotations__={"inner": Score}, __call__=join),
    ):
        assert "mine" in names("scorer") and "ours" in names("combiner")


def test_a_class_without_a_stage_is_no_score_either() -> None:
    found = made("mine", needs=Needs(), __call__=lambda self, view, selection, memory: None)
    with pytest.raises(
        SettingError, match=r"expected a scorer or combiner, not a Made: its `__call__` takes \(view, sel"
    ):
        RedundancyAdaptive(importance=found(), diversity=Random())


def test_the_command_line_in_this_process_lists_it() -> None:
    from kvpolicy.cli.listing import rows

    with kvpolicy.register(cell()):
        (row,) = [row for row in rows(["scorer"])[0] if row["name"] == "mine"]
    assert row["origin"] == "module packages (registered in code)"


def test_scorers_of_two_functions_that_share_a_name_clash() -> None:
    def one(keys: Tensor) -> Tensor:
        return keys[..., 0]

    def two(keys: Tensor) -> Tensor:
        return keys[..., 1]

    first, again, other = (
        wrap_score(function, needs=Needs(keys=True), name="shared-name") for function in (one, one, two)
    )
    with kvpolicy.register(first), kvpolicy.register(again), pytest.raises(PluginError, match="'shared-name'"):
        kvpolicy.register(other)
