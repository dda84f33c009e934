"""The fields of a plugin class: what a policy file can give, and what is refused because none could."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from packages import Plugin, made
from pydantic import Field

import kvpolicy
from kvpolicy import Needs, Score, settings
from kvpolicy.config import schema
from kvpolicy.errors import PluginError, SettingError
from kvpolicy.plugin import Scorer, Scores


class Side(enum.Enum):
    OLD = "old"
    NEW = "new"


@settings
class Wide:
    """Settings of every type that a file writes as another."""

    name = "wide"
    needs = Needs()
    shape: tuple[int, ...] = ()
    pair: tuple[int, str] | None = None
    pairs: list[tuple[int, int]] = ()  # type: ignore[assignment]
    some: frozenset[str] = frozenset()
    side: Side = Side.NEW
    where: Path | None = None

    def __call__(self, view: kvpolicy.LayerView) -> torch.Tensor:
        return -view.positions.float()


GIVEN = {"shape": [1, 2], "pair": [1, "a"], "pairs": [[1, 2]], "some": ["b", "a"], "side": "old", "where": "/x"}


def test_what_a_file_holds_will_do() -> None:
    whole = Wide(
        shape=(1, 2), pair=(1, "a"), pairs=[(1, 2)], some=frozenset({"a", "b"}), side=Side.OLD, where=Path("/x")
    )
    assert Wide(**GIVEN) == whole  # type: ignore[arg-type]
    with kvpolicy.register(Wide):
        policy = kvpolicy.load({"name": "x", "score": {"type": "wide", **GIVEN}, "budget": 64})
        assert policy.score == whole
        assert policy.to_dict()["score"] == {"type": "wide", **GIVEN, "some": ["a", "b"]}
        assert kvpolicy.load(policy.to_dict()) == policy
        assert schema()["$defs"]["scorer.wide"]["properties"]["side"]["default"] == "new"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"shape": ["1"]}, "wide: shape.0: expected a valid integer, got '1'"),
        ({"shape": 3}, "wide: shape: expected a list, got 3"),
        ({"some": 3}, "wide: some: expected a list, got 3"),
        ({"side": "olden"}, "wide: side: expected 'old' or 'new', got 'olden'"),
    ],
)
def test_the_rest_is_as_strict_as_ever(given: Any, says: str) -> None:
    with pytest.raises(SettingError) as caught:
        Wide(**given)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("hint", "value", "says"),
    [
        (torch.dtype, torch.float32, "torch.dtype"),
        (torch.Tensor, torch.zeros(1), "torch.Tensor"),
        (Callable[[int], int], abs, "Callable[[int], int]"),
        ("Nowhere", 1, "NameError: name 'Nowhere' is not defined"),
        (int, Field(default_factory=lambda: 1 / 0), "ZeroDivisionError: division by zero"),
    ],
)
def test_a_setting_that_no_policy_file_can_give_is_refused_when_offered(hint: Any, value: Any, says: str) -> None:
    with pytest.raises(PluginError) as caught:
        kvpolicy.register(
            Plugin(scorers=lambda: [made("mine", needs=Needs(), __annotations__={"kind": hint}, kind=value)])
        )
    assert "scorer Made: no policy file can give its setting 'kind': " in str(caught.value)
    assert str(caught.value).endswith(says)


@pytest.mark.parametrize(
    "hint", [Score | None, list[Score], dict[str, Score], tuple[Score, ...], Scores | None, Scorer, Scorer | None]
)
def test_scorers_in_any_other_field_are_refused_when_the_class_is_made(hint: Any) -> None:
    with pytest.raises(
        PluginError, match=r"packages: Made: field 'inner': expected kvpolicy\.Score, .+ or kvpolicy\.plugin\.Scores"
    ):
        made("mine", needs=Needs(), __annotations__={"inner": hint})


@pytest.mark.parametrize("reserved", ["name", "needs", "role", "source", "formula", "stage"])
def test_what_a_class_says_of_itself_is_no_setting(reserved: str) -> None:
    members: dict[str, Any] = {"role": "other", "source": "", "formula": "", "needs": Needs()}
    stage = {"stage": "heads"} if reserved == "stage" else {}
    cls = made("mine", **members, **stage, __annotations__={reserved: Any})
    with pytest.raises(
        PluginError, match=f"its `{reserved}` is annotated, so a policy file could set it: write it wit"
    ):
        kvpolicy.register(cls)
    kvpolicy.register(made("mine", **members, __annotations__={"name": ClassVar[str]})).undo()


def test_an_attribute_without_annotation_is_told_from_an_unknown_setting() -> None:
    @settings
    class Loud:
        name = "loud"
        power = 1.0

        def louder(self) -> None: ...

    with pytest.raises(SettingError) as caught:
        Loud(power=2)  # type: ignore[call-arg]
    assert (
        "power: no setting of 'loud' but an attribute of its class, as it has no annotation (`power: float = 1.0` "
        in (str(caught.value))
    )
    for name in ("name", "louder", "other"):
        with pytest.raises(SettingError, match=f"{name}: unknown setting of 'loud'"):
            Loud(**{name: 2})
