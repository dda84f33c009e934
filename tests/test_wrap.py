"""Functions of tensors made into scorers, and rows without padding."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from views import make_view

import kvpolicy
from kvpolicy import Budget, LayerView, Needs, Policy, wrap_score
from kvpolicy.config import to_yaml
from kvpolicy.config.source import parse
from kvpolicy.errors import PluginError, SettingError, UndeclaredReadError
from kvpolicy.scorers.key_diff import KeyDiff
from kvpolicy.scorers.value_norm import ValueNorm
from kvpolicy.testing import check_scorer
from kvpolicy.wrap import by_row


def mean_key(keys: Tensor) -> Tensor:
    """Distance from the mean key of all slots: right for one row without padding alone."""
    units = torch.nn.functional.normalize(keys.float(), dim=-1)
    return -torch.nn.functional.cosine_similarity(units, units.mean(2, keepdim=True), dim=-1)


def loud_value(values: Tensor, keys: Tensor, power: float = 1.0, on: Literal["values", "keys"] = "values") -> Tensor:
    """Length of the value, or of the key.

    Args:
        power: how sharply.
        on: of which.
    """
    return (values if on == "values" else keys).float().norm(dim=-1).pow(power)


def attended(queries: Tensor, keys: Tensor, scaling: float, *, window: int) -> Tensor:
    """Attention of the last queries, mean over the window and the group; without the causal mask."""
    queries = queries[:, :, -window:].float().unflatten(1, (keys.shape[1], -1))
    logits = torch.einsum("bhgwd,bhtd->bhgwt", queries, keys.float()) * scaling
    return logits.softmax(-1).mean((2, 3))


MeanKey = wrap_score(mean_key, needs=Needs(keys=True), role="diversity", source="a test", formula="-cos(k, mean u)")
LoudValue = wrap_score(loud_value, needs=Needs(keys=True, values=True), source="a test", formula="|v| ^ power")
Attended = wrap_score(
    attended,
    needs=lambda scorer: Needs(keys=True, queries=scorer.window),
    source="a test",
    formula="mean softmax(qk)",
)


@pytest.mark.parametrize(
    "scorer", [MeanKey(), LoudValue(), LoudValue(power=2, on="keys"), Attended(window=1)], ids=repr
)
def test_a_wrapped_function_keeps_the_contract_of_a_scorer(scorer: Any) -> None:
    check_scorer(scorer)


@pytest.mark.parametrize("padding", ["none", "left", "right", "ragged"])
def test_it_scores_what_a_scorer_that_minds_padding_does(padding: str) -> None:
    view = make_view(padding=padding)
    pairs: list[tuple[Any, Any]] = [(MeanKey(), KeyDiff()), (LoudValue(), ValueNorm())]
    for wrapped, ours in pairs:
        got, want = (one(view.limit(one.needs, "test")) for one in (wrapped, ours))
        torch.testing.assert_close(got[view.valid], want[view.valid])
        assert bool((got[~view.valid] == 0).all())


def test_its_name_settings_and_description_are_those_of_the_function() -> None:
    assert (LoudValue.name, LoudValue.__name__, LoudValue.role) == ("loud-value", "LoudValue", "importance")
    assert repr(LoudValue(power=3)) == "LoudValue(power=3.0, on='values')"
    assert LoudValue.__doc__ == loud_value.__doc__
    for wrong in ({"power": "3"}, {"on": "queries"}, {"sharpness": 2}):
        with pytest.raises(SettingError, match="loud-value"):
            LoudValue(**wrong)
    with pytest.raises(SettingError, match="window: expected this setting"):
        Attended()
    assert Attended(window=5).needs == Needs(queries=5, keys=True)
    assert wrap_score(lambda keys: keys[..., 0], needs=Needs(keys=True), name="first").__name__ == "First"


def test_it_pickles_and_stands_in_yaml() -> None:
    policy = Policy(name="mine", score=LoudValue(power=3), budget=Budget(tokens=16))
    assert pickle.loads(pickle.dumps(policy)) == policy
    with kvpolicy.register(LoudValue):
        assert kvpolicy.load(parse(to_yaml(policy), "mine").plain) == policy


def test_data_that_is_not_declared_raises() -> None:
    nosy = wrap_score(mean_key, needs=Needs(values=True))()
    with pytest.raises(UndeclaredReadError, match=r"mean-key.*reads 'keys'"):
        Policy(name="mine", score=nosy, budget=Budget(keep=1.0)).scores(make_view())


def no_annotation(keys: Tensor, power=2) -> Tensor:  # type: ignore[no-untyped-def]
    return keys[..., 0]


def many(*keys: Tensor) -> Tensor:
    return keys[0][..., 0]


def options(keys: Tensor, **more: float) -> Tensor:
    return keys[..., 0]


def a_tensor(keys: Tensor, mask: Tensor) -> Tensor:
    return keys[..., 0]


def a_name(keys: Tensor, role: str = "x") -> Tensor:
    return keys[..., 0]


def a_list(keys: Tensor, sizes: list[int] = [1]) -> Tensor:  # noqa: B006
    return keys[..., 0]


def unknown(keys: Nowhere, power: Nowhere = 1) -> Tensor:  # type: ignore[name-defined]  # noqa: F821
    return keys[..., 0]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (no_annotation, "expected parameter 'power' to be a setting with an annotation"),
        (many, r"expected parameters that can be given by name, got '\*keys"),
        (options, r"expected parameters that can be given by name, got '\*\*more"),
        (a_tensor, "parameter 'mask' is a tensor: expected one of queries"),
        (a_name, "expected another name for the setting 'role'"),
        (a_list, r"parameter 'sizes': expected a default that cannot change, got \[1\]"),
        (unknown, "parameter 'power': cannot resolve its annotation"),
        (torch.linalg.vector_norm, "expected a function with a signature"),
        (partial(mean_key), r"expected name='\.\.\.'"),
        (lambda keys: keys[..., 0], r"expected name='\.\.\.'"),
        (3, "expected a function, got 3"),
    ],
)
def test_parameters_are_data_or_settings(function: Any, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        wrap_score(function, needs=Needs(keys=True))


def test_annotations_of_data_need_not_resolve_and_partials_take_a_name() -> None:
    def untyped(keys: Nowhere, power: float = 2) -> Tensor:  # type: ignore[name-defined]  # noqa: F821
        return keys[..., 0] ** power

    made = wrap_score(partial(untyped), needs=Needs(keys=True), name="first-number")
    assert repr(made()) == "FirstNumber(power=2)"


@pytest.mark.parametrize("needs", [None, {"keys": True}])
def test_needs_are_needs(needs: Any) -> None:
    with pytest.raises(PluginError, match=r"needs: expected a kvpolicy\.Needs, or a function"):
        wrap_score(mean_key, needs=needs)


def test_a_class_that_would_break_the_contract_is_refused_at_once() -> None:
    with pytest.raises(PluginError, match="wrap_score of 'mean-key': its `role` is 'imp'"):
        wrap_score(mean_key, needs=Needs(keys=True), role="imp")


@pytest.mark.parametrize(
    ("returns", "got"),
    [
        (lambda keys: 3.0, "got float"),
        (lambda keys: keys, r"got torch.float32 \[1, 2, 24, 64\]"),
        (lambda keys: keys[..., 0].long(), "got torch.int64"),
        (lambda keys: keys[:, :1, :, 0], r"got torch.float32 \[1, 1, 24\]"),
    ],
)
def test_what_it_returns_is_checked(returns: Any, got: str) -> None:
    scorer = wrap_score(returns, needs=Needs(keys=True), name="wrong")()
    with pytest.raises(
        PluginError, match=rf"scorer 'wrong' \(test_wrap\): expected a float tensor \[1, 2, 24\].*{got}"
    ):
        scorer(make_view().limit(scorer.needs, "test"))


def test_by_row_leaves_out_padding_and_queries_that_do_not_exist() -> None:
    view = make_view(padding="left", slots=10, window=8)
    seen = []

    def score(row: LayerView) -> Tensor:
        assert row.queries is not None
        seen.append((row.slots, row.queries.shape[2], row.positions[0, 0].tolist(), int(row.seen)))
        assert not row.keys.isnan().any() and not row.queries.isnan().any()
        return torch.ones(row.valid.shape)

    assert torch.equal(by_row(view, score), view.valid.float())
    assert seen == [(10, 8, list(range(10)), 10), (5, 5, list(range(5, 10)), 5), (1, 1, [9], 1)]


def test_by_row_takes_heads_that_hold_different_slots_one_by_one() -> None:
    view = make_view(padding="ragged", batch=1, heads=(6, 2))
    heads = []

    def score(row: LayerView) -> Tensor:
        heads.append((row.kv_heads, row.queries.shape[1]))  # type: ignore[union-attr]
        return row.keys.sum(-1)

    got = by_row(view, score)
    assert heads == [(1, 3), (1, 3)]
    assert torch.equal(got[view.valid], view.keys.sum(-1)[view.valid])
