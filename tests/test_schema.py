"""The JSON schema of policy files."""

from __future__ import annotations

import jsonschema
import pytest

import kvpolicy
from kvpolicy.config import dump, schema
from kvpolicy.config.source import parse
from kvpolicy.loading import built_in
from kvpolicy.registry import Registry, registry

SHIPPED = Registry(built_in()).names("policy")


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_policy_satisfies_the_schema(name: str) -> None:
    path = registry().get("policy", name).value
    jsonschema.validate(parse(path.read_text(), name).plain, schema())
    jsonschema.validate(dump(kvpolicy.load(name)), schema())


@pytest.mark.parametrize(
    "wrong",
    [
        {"score": "snapkb", "budget": 64},
        {"score": {"type": "snapkb"}, "budget": 64},
        {"score": {"type": "snapkv", "windw": 8}, "budget": 64},
        {"score": {"type": "snapkv", "window": "8"}, "budget": 64},
        {"score": {"type": "snapkv", "window": 0}, "budget": 64},
        {"score": {"type": "fixed", "inputs": ["snapkb"]}, "budget": 64},
        {"score": "fixed", "budget": 64},
        {"score": "random", "budget": 0},
        {"score": "random", "budget": 1.5},
        {"score": "random", "budget": True},
        {"score": "random", "budget": {"tokens": 64, "keep": 0.5}},
        {"score": "random", "budget": {"tokens": 64, "heads": "pyramid"}},
        {"score": "random", "budget": 64, "select": "topk"},
        {"score": "random", "bugdet": 64},
        {"extends": "snapkb"},
        {"extends": []},
        {"budget": 64},
        [],
    ],
)
def test_the_schema_refuses_what_is_wrong(wrong: object) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema())


def test_the_schema_tells_an_editor_what_a_setting_is() -> None:
    window = schema()["$defs"]["scorer.snapkv"]["properties"]["window"]
    assert window == {
        "type": "integer",
        "minimum": 1,
        "default": 32,
        "description": "how many of the last queries are observed.",
    }
    # On several lines of the docstring, on one here.
    by = schema()["$defs"]["heads.adaptive"]["properties"]["by"]["description"]
    assert by.startswith('which scores compete: "score"')
    assert by.endswith("which slots a head keeps.")
    for entry in Registry(built_in()).entries():
        if entry.kind != "policy":
            node = schema()["$defs"][f"{entry.kind}.{entry.name}"]
            assert node["description"]
            for name, setting in node["properties"].items():
                assert name == "type" or setting["description"], f"{entry.name}: {name}"
