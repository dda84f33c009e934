"""benchmarks/against_kvpress.py: it runs, it counts bytes, and a press leaves the model's other ways alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvpolicy.bench.measure import BARE
from kvpolicy.bench.record import Record
from kvpolicy.bench.rounds import forward
from kvpolicy.bench.subject import Subject, made_up

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "against_kvpress.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("against_kvpress", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def subject() -> Subject:
    return made_up("tiny", layers=None, tokens=260, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def record(script: Any, subject: Subject) -> Record:
    return script.measure(subject, [256], keep=0.25, runs=2, tokens=4)


def test_both_keep_a_quarter_and_only_one_frees_what_heads_evict_apart(script: Any, record: Record) -> None:
    shares = {one.way: one.bytes / one.full for one in record.memory}
    assert shares == {
        BARE: 1,
        **{name: 0.25 for name in script.METHODS},
        "snapkv, kvpress": 0.25,
        "pyramidkv, kvpress": 0.25,
        "ada-kv, kvpress": 1,
    }
    assert {one.way: len(one.seconds) for one in record.tokens} == dict.fromkeys(shares, 4)
    assert sorted(one.way for one in record.prompts) == sorted([*shares] * 2)


def test_every_method_has_a_row_a_table(script: Any, record: Record) -> None:
    for table in script.tables(record):
        assert [row[1] for row in table.rows] == list(script.METHODS)


def test_what_a_press_hides_is_hidden_from_its_own_tokens_alone(script: Any, subject: Subject) -> None:
    pressed = script.ways(subject.model, 0.25)[-1]
    cache = DynamicCache(config=subject.model.config)
    with pressed.reading():
        forward(subject.model, subject.prompt(256), cache)

    def hidden() -> list[bool]:
        modules = [layer.self_attn for layer in subject.model.model.layers]
        return [getattr(module, "masked_key_indices", None) is not None for module in modules]

    assert hidden() == [False] * 3
    with pressed.decoding():
        assert hidden() == [True] * 3
    assert hidden() == [False] * 3
