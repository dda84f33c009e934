"""Policy files: what `load` refuses, and what it says then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.config import extend as extend_module
from kvpolicy.errors import PolicyFileError
from kvpolicy.loading import built_in, read
from kvpolicy.registry import Registry

Write = Callable[..., Path]


def refusal(source: Any, **keywords: Any) -> PolicyFileError:
    with pytest.raises(PolicyFileError) as caught:
        kvpolicy.load(source, **keywords)
    return caught.value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("score: snapkb\nbudget: 64\n", "1:8: score: unknown scorer or combiner 'snapkb'. Did you mean 'snapkv'?"),
        (
            "score: {type: snapkb, window: 3}\nbudget: 64\n",
            "1:15: score: unknown scorer or combiner 'snapkb'. Did you mean 'snapkv'?",
        ),
        (
            "budget: 64\nscore:\n  type: snapkv\n  windw: 8\n",
            "4:3: score.windw: unknown setting of 'snapkv'. Did you mean 'window'? Known: kernel, pooling, window.",
        ),
        (
            "budget: 64\nscore:\n  type: fixed\n  inputs:\n  - key-norm\n  - {type: snapkv, windw: 8}\n",
            "6:20: score.inputs[1].windw: unknown setting of 'snapkv'. Did you mean 'window'?",
        ),
        (
            "budget: 64\nscore: {type: snapkv, window: '8'}\n",
            '2:31: score.window: expected a valid integer, got "8"',
        ),
        ("budget: 64\nscore: {type: snapkv, window: 0}\n", "2:31: score.window: expected a number greater than or"),
        ("budget: 64\nscore: {type: snapkv, window: true}\n", "2:31: score.window: expected a valid integer, got true"),
        ("budget: 64\nscore: {type: snapkv, window: [8]}\n", "2:31: score.window: expected a valid integer, got [8]"),
        (
            "budget: 64\nscore: {type: snapkv, pooling: mean}\n",
            "2:32: score.pooling: expected 'avg' or 'max', got \"mean\"",
        ),
        (
            "budget: 64\nscore: {type: fixed, inputs: [key-norm, random], weights: [1]}\n",
            "2:59: score.weights: expected one weight for each of 2 inputs, got [1.0]",
        ),
        (
            "budget: 64\nscore: {type: fixed, inputs: [key-norm], weights: [x]}\n",
            '2:52: score.weights[0]: expected a valid number, got "x"',
        ),
        ("budget: 64\nscore: {type: fixed, inputs: key-norm}\n", "2:30: score.inputs: expected a list of scorers"),
        ("budget: 64\nscore: {type: fixed}\n", "2:8: score.inputs: expected this setting, which 'fixed' cannot do"),
        ("budget: 64\nscore: {type: random, self: 1}\n", "2:23: score.self: unknown setting of 'random'."),
        ("budget: 64\nscore: {window: 8}\n", "2:8: score: expected a scorer or combiner: its name, or a mapping with"),
        ("budget: 64\nscore: {type: 3}\n", "2:15: score: expected a scorer or combiner: its name, or a mapping with"),
        ("budget: 64\nscore:\n", "2:7: score: expected a scorer or combiner: its name, or a mapping with its name"),
        ("budget: 64\n", "1:1: score: expected this setting"),
        ("score: random\n", "1:1: budget: expected exactly one of 'tokens' and 'keep'"),
        ("score: random\nbudget: {tokens: 11}\n", "2:18: budget.tokens: expected at least the 12 slots that 'top-k'"),
        ("score: random\nbudget: 11\n", "2:9: budget.tokens: expected at least the 12 slots that 'top-k' protects"),
        ("score: random\nbudget: {tokens: 64, keep: 0.5}\n", "2:9: budget: expected exactly one of 'tokens' and"),
        ("score: random\nbudget: {tokens: '512'}\n", '2:18: budget.tokens: expected a valid integer, got "512"'),
        ("score: random\nbudget: {keep: 'false'}\n", '2:16: budget.keep: expected a valid number, got "false"'),
        ("score: random\nbudget: {keep: .nan}\n", "2:16: budget.keep: expected a finite number"),
        ("score: random\nbudget: {token: 512}\n", "2:10: budget.token: unknown setting of 'budget'. Did you mean 'tok"),
        (
            "score: random\nbudget: '512'\n",
            '2:9: budget: expected whole tokens (512), a share (0.25) or a mapping, got "51',
        ),
        (
            "score: random\nbudget: true\n",
            "2:9: budget: expected whole tokens (512), a share (0.25) or a mapping, got tr",
        ),
        (
            "score: random\nbudget: {tokens: 64, layers: pyramd}\n",
            "2:30: budget.layers: unknown layer budget 'pyramd'. Did you mean 'pyramid'?",
        ),
        (
            "score: random\nbudget: {tokens: 64, heads: pyramid}\n",
            "2:29: budget.heads: unknown head budget 'pyramid'. Known: adaptive, ",
        ),
        ("score: random\nbudget: 64\nselect: topk\n", "3:9: select: unknown selector 'topk'. Did you mean 'top-k'?"),
        ("score: random\nbudget: 64\nselect: {sinks: -1}\n", "3:17: select.sinks: expected a number greater than or"),
        ("score: random\nbugdet: 64\n", "2:1: unknown setting 'bugdet' of a policy. Did you mean 'budget'?"),
        ("name: 3\nscore: random\nbudget: 64\n", "1:7: name: expected a valid string, got 3"),
        ("extends: snapkb\n", "1:10: extends: unknown policy 'snapkb'. Did you mean 'snapkv'"),
        ("extends: [snapkv, 3]\n", "1:19: extends: expected the name or path of a policy, got 3"),
        ("extends: []\n", "1:10: extends: expected a policy, or a list of them, got none"),
        ("extends: min.yaml\n", "1:10: expected a policy file, found no"),
        ("extends: min.yaml\n", "min.yaml'. Did you mean 'mine.yaml'?"),
        ("extends: os.system\n", "1:10: extends: unknown policy 'os.system'"),
        ("", "1:1: expected a policy, a mapping; the file is empty"),
        ("# nothing\n", "1:1: expected a policy, a mapping; the file is empty"),
        ("- snapkv\n", '1:1: expected a policy, a mapping, got ["snapkv"]'),
        ("\n  snapkv\n", '2:3: expected a policy, a mapping, got "snapkv"'),
        ("score: random\n---\nbudget: 3\n", "2:1: not one YAML document: expected a single document"),
        (
            "score: random\nbudget: 64\nscore: snapkv\n",
            "3:1: expected each key once, got 'score' again (first: line 1)",
        ),
        ("score: {type: snapkv,\n  window: 3, window: 3}\n", "2:14: expected each key once, got 'window' again"),
        ("score: &a {type: fixed, inputs: [*a]}\n", "1:8: expected a value, got one that holds an alias to itself"),
        ("score: *nothing\n", "1:8: not one YAML document: found undefined alias 'nothing'"),
        ("1: random\n", "1:1: expected text as a key, got 1"),
        ("true: random\n", "1:1: expected text as a key, got true"),
        ("[a]: random\n", '1:1: expected text as a key, got ["a"]'),
        ("score: {type: snapkv\n", "2:1: not one YAML document: while parsing a flow mapping"),
        ("score: random\nbudget: a: b\n", "2:10: not one YAML document: mapping values are not allowed here"),
        ("score: 'x\n", "2:1: not one YAML document: while scanning a quoted scalar"),
        ("score: a\0b\n", "1:9: expected plain text, got the character U+0000"),
        (b"name: caf\xe9\n", "1:10: expected UTF-8 text, got the byte 0xe9"),
        (b"name: x\n# ok\ndescription: \xff\xfe\n", "3:14: expected UTF-8 text, got the byte 0xff"),
        ("score: !!int abc\n", '1:8: expected a value of type int, got "abc"'),
        ("score: !!int 1_000\n", '1:8: expected a value of type int, got "1_000"'),
        ("score: !!bool yes\n", '1:8: expected a value of type bool, got "yes"'),
        ("score: !!timestamp 2026-01-31\n", "1:8: expected plain YAML, got the tag 'tag:yaml.org,2002:timestamp'"),
        ("score: !!set {a}\n", "1:8: expected plain YAML, got the tag 'tag:yaml.org,2002:set'"),
        ("score: !mine {a: 1}\n", "1:8: expected plain YAML, got the tag '!mine'"),
        ("score: !!str [a]\n", "1:8: expected plain YAML, got the tag 'tag:yaml.org,2002:str'"),
        ("<<: {score: random}\nbudget: 64\n", "1:1: unknown setting '<<' of a policy"),
        ("[" * 3000, "1:1: expected a policy, a mapping; the file nests lists or mappings too deeply"),
    ],
)
def test_a_wrong_file_is_refused(write: Write, text: str | bytes, says: str) -> None:
    error = refusal(write(text))
    assert says in str(error)
    assert str(error).startswith(f"{error.file}:{error.line}:{error.column}: ")


def test_every_problem_of_a_plugin_is_told_in_one_error(write: Write) -> None:
    error = refusal(write("budget: 64\nscore: {type: snapkv, window: 0, kernel: x}\n"))
    first, second = str(error).splitlines()
    assert "mine.yaml:2:31: score.window: " in first
    assert "mine.yaml:2:42: score.kernel: " in second


def test_aliases_of_aliases_do_not_blow_up(write: Write) -> None:
    lines = ["a0: &a0 x"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "expected at most 10000 values, aliases followed" in str(refusal(write("\n".join(lines))))


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system ['touch {ran}']",
        "!!python/object/new:os.system ['touch {ran}']",
        "!!python/name:os.system",
        "!!python/module:os",
        "!!python/tuple [1, 2]",
    ],
)
def test_a_tag_that_builds_a_python_object_builds_nothing(write: Write, tmp_path: Path, tag: str) -> None:
    ran = tmp_path / "ran"
    error = refusal(write(f"budget: 64\nscore: {tag.format(ran=ran)}\n"))
    assert "mine.yaml:2:8: expected plain YAML, got the tag 'tag:yaml.org,2002:python/" in str(error)
    assert not ran.exists()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, write: Write) -> None:
    write("score: random\n")
    missing = refusal(tmp_path / "min.yaml")
    assert f"expected a policy file, found no '{tmp_path}/min.yaml'. Did you mean 'mine.yaml'?" in str(missing)
    assert (missing.file, missing.line) == (f"{tmp_path}/min.yaml", None)
    folder = refusal(tmp_path)
    assert f"{tmp_path}: expected a policy file, got '{tmp_path}', which is a folder, pipe or device" in str(folder)
    assert "cannot read" in str(refusal("a\0b.yaml"))


def test_a_wrong_source_is_named() -> None:
    assert "unknown policy 'snapkb'. Did you mean 'snapkv'" in str(refusal("snapkb"))
    assert "expected a name, a path or a mapping, got 5" in str(refusal(5))
    assert "policy mapping: expected text as a key, got 3" in str(refusal({3: 4}))
    assert "policy mapping: score.sed: unknown setting of 'random'. Did you mean 'seed'?" in str(
        refusal({"name": "x", "score": {"type": "random", "sed": 1}, "budget": 64})
    )
    with pytest.raises(kvpolicy.KVPolicyError):
        kvpolicy.load("snapkb")
    with pytest.raises(ValueError):
        kvpolicy.load("snapkb")


def test_without_a_base_there_is_nothing_to_inherit(write: Write) -> None:
    error = refusal(write("budget: 64\nscore: {type: fixed, inputs: [key-norm, inherited]}\n"))
    says = (
        "mine.yaml:2:41: score: expected a policy to inherit the importance of; this one extends none: add extends: POL"
    )
    assert says in str(error)


def test_a_child_of_a_plain_score_hints_at_a_combiner(write: Write) -> None:
    error = refusal(write("extends: snapkv\nscore: {diversity: cosine-diversity}\n"))
    assert str(error).endswith(
        "mine.yaml:2:9: score.diversity: unknown setting of 'snapkv'. Known: kernel, pooling, window. "
        "It is a part of a combiner: add type: redundancy-adaptive."
    )
    assert "combiner" not in str(refusal(write("extends: snapkv\nscore: {windw: 3}\n")))


def test_policies_in_the_wrong_order_are_named_with_the_right_one(write: Write) -> None:
    path = write("budget: 64\nextends: [ecokv, ada-kv]\n")
    error = refusal(path)
    assert (error.file, error.line, error.column) == (str(path), 2, 18)
    assert str(error).startswith(f"{path}:2:18: extends: laying 'ada-kv' over 'ecokv': ")
    assert "ada-kv.yaml:9:9: score.kernel: unknown setting of 'redundancy-adaptive'." in str(error)
    assert str(error).endswith(" The other order works: extends: [ada-kv, ecokv].")
    error = refusal({"extends": ["snapkv", "ecokv", "ada-kv"]})
    assert str(error).startswith("policy mapping: extends: laying 'ada-kv' over 'snapkv' + 'ecokv': ")
    assert str(error).endswith(" The other order works: extends: [ada-kv, snapkv, ecokv].")


def test_no_order_is_advised_where_it_is_not_the_order(write: Write) -> None:
    error = refusal(write("extends: [random, ecokv]\n"))
    assert "mine.yaml:1:19: extends: laying 'ecokv' over 'random': " in str(error)
    assert str(error).endswith("got that of 'random', whose role is 'other'.")
    # What the file itself says is wrong stays where it is.
    assert "mine.yaml:2:9: budget: expected" in str(refusal(write("extends: [ada-kv, ecokv]\nbudget: many\n")))
    assert str(refusal("ecokv", budget="many")).startswith("argument budget=: ")


@pytest.mark.parametrize(
    ("files", "ring"),
    [
        ({"mine.yaml": "extends: mine.yaml"}, ["mine", "mine"]),
        ({"mine.yaml": "extends: ./mine.yaml"}, ["mine", "mine"]),
        ({"mine.yaml": "extends: [snapkv, mine.yaml]"}, ["mine", "mine"]),
        (
            {"mine.yaml": "extends: a.yaml", "a.yaml": "extends: b.yaml", "b.yaml": "\nextends: mine.yaml"},
            ["mine", "a", "b", "mine"],
        ),
        ({"mine.yaml": "extends: a.yaml", "a.yaml": "extends: a.yaml"}, ["mine", "a", "a"]),
    ],
)
def test_a_ring_is_shown(write: Write, tmp_path: Path, files: dict[str, str], ring: list[str]) -> None:
    for name, text in files.items():
        write(text, name)
    error = refusal(tmp_path / "mine.yaml")
    assert " -> ".join(f"{tmp_path}/{name}.yaml" for name in ring) in str(error).replace("./", "")
    assert Path(str(error.file)).name == f"{ring[-2]}.yaml"
    assert error.line == files[f"{ring[-2]}.yaml"].count("\n") + 1


def test_a_ring_through_names_is_shown(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("extends: b\n", "a.yaml")
    write("extends: a\n", "b.yaml")
    with_rings = Registry([*built_in(), read(_Policies(tmp_path), "one 1.0")])
    monkeypatch.setattr(extend_module, "registry", lambda: with_rings)
    assert "a -> b -> a" in str(refusal("a"))


class _Policies:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @kvpolicy.hookimpl
    def kvpolicy_policies(self) -> Path:
        return self.folder


def test_an_error_in_a_base_points_into_the_base(write: Write) -> None:
    write("budget: 64\nscore:\n  type: snapkv\n  windw: 3\n", "base.yaml")
    error = refusal(write("extends: base.yaml\nscore: {kernel: 3}\n"))
    assert "base.yaml:4:3: score.windw: unknown setting of 'snapkv'. Did you mean 'window'?" in str(error)
    assert (Path(str(error.file)).name, error.line, error.column) == ("base.yaml", 4, 3)


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"budget": True}, "argument budget=: budget: expected whole tokens (512), a share (0.25)"),
        (
            {"budget": "512"},
            'argument budget=: budget: expected whole tokens (512), a share (0.25) or a mapping, got "512"',
        ),
        ({"budget": 0}, "argument budget=: budget.tokens: expected a number greater than or equal to 1, got 0"),
        ({"budget": 2.0}, "argument budget=: budget.keep: expected a number less than or equal to 1, got 2.0"),
        ({"budget": float("nan")}, "argument budget=: budget.keep: expected a finite number, got NaN"),
        ({"budget": 35}, "argument budget=: budget.tokens: expected at least the 36 slots that 'top-k' protects"),
        (
            {"budget": {"tokens": 64, "keep": 0.5}},
            "argument budget=: budget: expected exactly one of 'tokens' and 'keep'",
        ),
        ({"budget": {"kep": 0.5}}, "argument budget=: budget.kep: unknown setting of 'budget'. Did you mean 'keep'?"),
        ({"select": {"sink": 1}}, "argument select=: select.sink: unknown setting of 'top-k'. Did you mean 'sinks'?"),
        ({"score": {"window": "8"}}, 'argument score=: score.window: expected a valid integer, got "8"'),
        ({"score": object()}, "argument score=: expected text, a number, true, false, a list or a mapping"),
        ({"name": None}, "argument name=: name: expected a valid string, got null"),
        ({"bugdet": 3}, "unknown argument 'bugdet' of load(). Did you mean 'budget'?"),
    ],
)
def test_a_wrong_keyword_is_named(keywords: dict[str, Any], says: str) -> None:
    error = refusal("snapkv", **keywords)
    assert says in str(error)
    assert error.file is None
