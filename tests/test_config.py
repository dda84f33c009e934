"""Policy files: what they mean, and how a policy is written as one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpolicy
from kvpolicy.budgets.uniform import UniformHeads, UniformLayers
from kvpolicy.combiners.fixed import Fixed
from kvpolicy.config import describe, dump, to_yaml
from kvpolicy.config.source import parse, to_text
from kvpolicy.loading import built_in
from kvpolicy.registry import Registry
from kvpolicy.scorers.cosine_diversity import CosineDiversity
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.scorers.random import Random
from kvpolicy.scorers.snapkv import SnapKV
from kvpolicy.selectors.top_k import TopK

SHIPPED = Registry(built_in()).names("policy")
Write = Callable[..., Path]


# What a file means


def test_a_file_in_full(write: Write) -> None:
    policy = kvpolicy.load(
        write(
            """
            name: mix
            description: two scores
            score:
              type: fixed
              inputs: [{type: snapkv, window: 16, kernel: 3}, {type: cosine-diversity, on: values}]
              weights: [1, 0.5]
            budget: {tokens: 100, layers: uniform, heads: {type: adaptive, floor: 0.5}}
            select: {type: top-k, sinks: 1, recent: 2}
            """
        )
    )
    assert policy.name == "mix"
    assert policy.description == "two scores"
    assert policy.score == Fixed(inputs=[SnapKV(window=16, kernel=3), CosineDiversity(on="values")], weights=[1.0, 0.5])
    assert (policy.budget.tokens, policy.budget.keep, policy.budget.layers) == (100, None, UniformLayers())
    assert (policy.budget.heads.name, policy.budget.heads.floor) == ("adaptive", 0.5)
    assert policy.select == TopK(sinks=1, recent=2)


def test_shorthand_equals_what_it_stands_for(write: Write) -> None:
    short = write("score: {type: fixed, inputs: [cosine-diversity, key-norm]}\nbudget: 64\n")
    full = write(
        """
        score: {type: fixed, inputs: [{type: cosine-diversity}, {type: key-norm}]}
        budget: {tokens: 64, layers: {type: uniform}, heads: {type: uniform}}
        select: {type: top-k}
        """,
        "full.yaml",
    )
    assert kvpolicy.load(short, name="x") == kvpolicy.load(full, name="x")
    assert kvpolicy.load(write("score: random\nbudget: 0.25\n")).budget.keep == 0.25


def test_without_a_name_a_file_is_called_as_it_is(write: Write) -> None:
    assert kvpolicy.load(write("extends: snapkv\n")).name == "mine"
    assert kvpolicy.load({"extends": "snapkv"}).name == "snapkv"


def test_a_source_may_be_a_name_a_path_or_a_mapping(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("score: random\nbudget: 64\n")
    monkeypatch.chdir(path.parent)
    assert kvpolicy.load("random").score == Random()
    loaded = [kvpolicy.load(source) for source in (path, str(path), "mine.yaml", "./mine.yaml")]
    mapping = {"name": "mine", "score": "random", "budget": 64}
    assert loaded == [kvpolicy.load(mapping)] * 4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("yes", "yes"),
        ("off", "off"),
        ("No", "No"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("1e-3", 0.001),
        ("1.", 1.0),
        (".5", 0.5),
        ("-2.5e+3", -2500.0),
        (".inf", float("inf")),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("+7", 7),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2026-01-31", "2026-01-31"),
        ("0b11", "0b11"),
        ("'512'", "512"),
        ("!!str 512", "512"),
        ("!!float 3", 3.0),
        ("=", "="),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = parse(f"key: {text}\n", "x").plain["key"]
    assert found == value
    assert type(found) is type(value)


def test_keys_are_never_booleans() -> None:
    assert parse("{on: keys, no: 1, yes: 2}", "x").plain == {"on": "keys", "no": 1, "yes": 2}


def test_an_alias_stands_for_its_value() -> None:
    assert parse("{a: &here [1, 2], b: *here}", "x").plain == {"a": [1, 2], "b": [1, 2]}


# Keywords


def test_a_budget_keyword_is_tokens_or_a_share() -> None:
    assert kvpolicy.load("snapkv", budget=300).budget.tokens == 300
    shared = kvpolicy.load("snapkv", budget=0.25).budget
    assert (shared.tokens, shared.keep) == (None, 0.25)
    assert kvpolicy.load("full", budget=1.0).budget.keep == 1.0
    assert kvpolicy.load("full", budget={"tokens": 64}).budget.keep is None


def test_a_budget_mapping_is_laid_over_the_file() -> None:
    budget = kvpolicy.load("pyramidkv", budget={"tokens": 64}).budget
    assert (budget.tokens, budget.layers.name) == (64, "pyramid")
    budget = kvpolicy.load("ada-kv", budget={"heads": "uniform"}).budget
    assert (budget.tokens, budget.heads) == (512, UniformHeads())


def test_keywords_are_laid_over_the_file() -> None:
    policy = kvpolicy.load("snapkv", name="mine", score={"window": 8}, select={"recent": 2}, description="new")
    assert (policy.name, policy.description) == ("mine", "new")
    assert policy.score == SnapKV(window=8)
    assert policy.select == TopK(sinks=4, recent=2)
    assert kvpolicy.load("snapkv", score="key-norm").score == KeyNorm()


# Extending


def test_a_file_is_laid_over_what_it_extends(write: Write) -> None:
    policy = kvpolicy.load(write("extends: snapkv\nscore: {kernel: 7}\nbudget: {keep: 0.5}\n"))
    assert policy.score == SnapKV(window=32, kernel=7)
    assert (policy.budget.tokens, policy.budget.keep) == (None, 0.5)
    assert policy.select == TopK(sinks=4, recent=32)


@pytest.mark.parametrize(
    ("changed", "description"),
    [
        ({"name": "mine", "budget": 0.5}, None),
        ({"budget": {"tokens": 300}}, None),
        ({"score": "key-norm"}, "after snapkv"),
        ({"score": {"window": 8}, "description": "mine"}, "mine"),
        ({"select": {"recent": 8}}, "after snapkv"),
        ({"budget": {"tokens": 300, "heads": "adaptive"}}, "after snapkv"),
    ],
)
def test_a_description_is_inherited_only_where_it_is_still_true(
    changed: dict[str, Any], description: str | None
) -> None:
    want = describe("snapkv") if description is None else description
    assert kvpolicy.load({"extends": "snapkv", **changed}).description == want
    assert kvpolicy.load("snapkv", **changed).description == want


def test_a_description_names_what_is_laid_over_each_other(write: Write) -> None:
    assert kvpolicy.load(write("extends: [ada-kv, ecokv]\n")).description == "after ada-kv + ecokv"
    write("score: key-norm\nbudget: 64\n", "base.yaml")
    assert kvpolicy.load(write("extends: base.yaml\nscore: random\n")).description == ""
    write("extends: snapkv\nscore: {window: 8}\n", "base.yaml")
    assert kvpolicy.load(write("extends: base.yaml\n")).description == "after snapkv"
    assert kvpolicy.load(write("extends: base.yaml\nscore: random\n")).description == "after base"


def test_a_path_is_relative_to_the_file_that_extends_it(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("extends: base.yaml\nselect: {recent: 3}\n")
    write("score: key-norm\nbudget: 64\nselect: {sinks: 1}\n", "base.yaml")
    monkeypatch.chdir("/")
    policy = kvpolicy.load(path)
    assert (policy.score, policy.select) == (KeyNorm(), TopK(sinks=1, recent=3))


def test_another_type_replaces_and_the_same_type_merges(write: Write) -> None:
    write("score: {type: snapkv, window: 8}\nbudget: {tokens: 64, layers: {type: pyramid, beta: 5}}\n", "base.yaml")
    score = kvpolicy.load(write("extends: base.yaml\nscore: {type: snapkv, kernel: 3}\n")).score
    assert score == SnapKV(window=8, kernel=3)
    assert kvpolicy.load(write("extends: base.yaml\nscore: snapkv\n")).score == SnapKV(window=8)
    assert kvpolicy.load(write("extends: base.yaml\nscore: key-norm\n")).score == KeyNorm()
    assert kvpolicy.load(write("extends: base.yaml\nscore: {type: random, seed: 2}\n")).score == Random(seed=2)
    budget = kvpolicy.load(write("extends: base.yaml\nbudget: {layers: uniform}\n")).budget
    assert (budget.tokens, budget.layers) == (64, UniformLayers())


def test_a_list_replaces(write: Write) -> None:
    write("score: {type: fixed, inputs: [key-norm, random], weights: [1, 2]}\nbudget: 64\n", "base.yaml")
    score = kvpolicy.load(write("extends: base.yaml\nscore: {inputs: [snapkv, snapkv], weights: [3, 4]}\n")).score
    assert score == Fixed(inputs=[SnapKV(), SnapKV()], weights=[3.0, 4.0])


def test_of_a_list_of_bases_the_later_count_without_their_own(write: Write) -> None:
    write("score: key-norm\nbudget: 64\n", "root.yaml")
    write("extends: root.yaml\nselect: {recent: 5}\n", "layer.yaml")
    policy = kvpolicy.load(write("extends: [snapkv, layer.yaml]\nbudget: 100\n"))
    assert policy.score == SnapKV(window=32)  # not root.yaml's
    assert policy.select == TopK(sinks=4, recent=5)
    assert policy.budget.tokens == 100


def test_one_line_lays_ecokv_over_any_policy(write: Write) -> None:
    write("score: {type: snapkv, window: 3}\nbudget: {tokens: 64, heads: adaptive}\n", "base.yaml")
    policy = kvpolicy.load(write("extends: [base.yaml, ecokv]\n"))
    assert policy.score.name == "redundancy-adaptive"
    assert policy.score.importance == SnapKV(window=3)
    assert policy.budget.heads.name == "adaptive"
    # Of a score that has an importance, that part is inherited; and laying it on twice changes nothing.
    assert kvpolicy.load(write("extends: [base.yaml, ecokv, ecokv]\n")).score == policy.score
    mixkv = kvpolicy.load("mixkv-snapkv").score
    assert kvpolicy.load(write("extends: [mixkv-snapkv, ecokv]\n")).score.importance == mixkv.importance


def test_inherited_importance_may_be_written_out_and_changed(write: Write) -> None:
    score = "score: {type: fixed, inputs: [{type: inherited, window: 4}, inherited, random]}\n"
    inputs = kvpolicy.load(write(f"extends: snapkv\n{score}")).score.inputs
    assert inputs == (SnapKV(window=4), SnapKV(), Random())
    keyword = {"type": "fixed", "inputs": [{"type": "inherited"}, "key-norm"]}
    assert kvpolicy.load("snapkv", score=keyword).score.inputs == (SnapKV(), KeyNorm())


# Writing


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_policy_survives_writing(name: str) -> None:
    policy = kvpolicy.load(name)
    assert policy.name == name
    assert policy.description == describe(name) != ""
    assert kvpolicy.load(dump(policy)) == policy
    assert kvpolicy.load(parse(to_yaml(policy), name).plain) == policy


def test_a_dump_is_full_and_in_order() -> None:
    policy = kvpolicy.load(
        {"select": {"recent": 2}, "budget": {"heads": "adaptive", "keep": 0.5}, "score": "snapkv", "name": "mine"}
    )
    dumped = dump(policy)
    assert list(dumped) == ["name", "description", "score", "budget", "select", "evicted", "prefill", "decode", "store"]
    assert dumped["score"] == {"type": "snapkv", "window": 32, "kernel": 5, "pooling": "avg"}
    heads = {"type": "adaptive", "floor": 0.2, "by": "score"}
    assert dumped["budget"] == {"keep": 0.5, "layers": "uniform", "heads": heads}
    assert dumped["select"] == {"type": "top-k", "sinks": 4, "recent": 2}
    assert dumped == policy.to_dict()


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_any_text_survives_writing(text: str) -> None:
    assert parse(to_text({"key": text, "keys": [text]}), "x").plain == {"key": text, "keys": [text]}


@settings(deadline=None)
@given(st.floats(allow_nan=False) | st.integers() | st.booleans() | st.none())
def test_any_number_survives_writing(number: object) -> None:
    found = parse(to_text({"key": number}), "x").plain["key"]
    assert found == number
    assert type(found) is type(number)


def test_only_an_importance_is_inherited() -> None:
    with pytest.raises(
        kvpolicy.KVPolicyError, match="importance to inherit, got that of 'random', whose role is 'other'"
    ):
        kvpolicy.load({"extends": ["random", "ecokv"]})


def test_a_composition_is_called_after_its_parts() -> None:
    assert kvpolicy.load({"extends": ["ada-kv", "ecokv"]}).name == "ada-kv + ecokv"
    assert kvpolicy.load({"extends": "ada-kv"}).name == "ada-kv"


def test_ablations_are_named_as_their_files() -> None:
    benchmarks = Path(__file__).parents[1] / "benchmarks"
    found = sorted([*benchmarks.glob("ecokv_ablations/*.yaml"), *benchmarks.glob("near_and_far/*.yaml")])
    assert len(found) > 20
    assert [kvpolicy.load(path).name for path in found] == [path.stem for path in found]
