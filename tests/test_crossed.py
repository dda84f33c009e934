"""Contexts of a model that reaches pictures by cross-attention: what follows sees those that the prompt sees."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvpolicy
from kvpolicy.testing.vision import prompt, tiny_model

ROWS = {"one": [[20, "image", 9, "image", 30]], "two, of fewer pictures": [[20, "image", 9, "image"], [15, "image"]]}
QUESTION = torch.tensor([[40, 41, 42]])
FULL = kvpolicy.load("full")


@functools.cache
def crossing() -> PreTrainedModel:
    return tiny_model("mllama")


def told(rows: str) -> dict[str, Tensor]:
    given = prompt(crossing(), ROWS[rows])
    return {"input_ids": given.ids, "attention_mask": given.mask, **given.pictures}


def joined(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs with the question behind them, as a model reads both at once."""
    asked = QUESTION.expand(len(inputs["input_ids"]), -1)
    crossed = inputs["cross_attention_mask"]
    return {
        **inputs,
        "input_ids": torch.cat([inputs["input_ids"], asked], dim=1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones_like(asked)], dim=1),
        "cross_attention_mask": torch.cat([crossed, crossed[:, -1:].expand(-1, asked.shape[1], -1, -1)], dim=1),
    }


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", ROWS)
def test_a_question_sees_the_pictures_that_the_prompt_does(rows: str, tmp_path: Path) -> None:
    model, inputs = crossing(), told(rows)
    both = joined(inputs)
    places = (both["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        want = model(**both, position_ids=places).logits[:, -3:]
    context = FULL.compress(model, inputs)
    context.save(tmp_path / "context")
    contexts = {
        "compressed": context,
        "read": kvpolicy.read(model, inputs, policies=[FULL]).compress(FULL),
        "from a file": kvpolicy.load_context(tmp_path / "context", model),
    }
    for one in contexts.values():
        with one.fork() as fork:
            assert_close(fork.logits(QUESTION), want)
        with one.fork(rows=2) as fork:
            assert_close(fork.logits(QUESTION), want.repeat_interleave(2, dim=0))
    aware = FULL.compress(model, inputs, QUESTION)
    with aware.fork() as fork:
        assert_close(fork.logits(), want[:, -1:])


@pytest.mark.parametrize("aware", [False, True])
def test_an_answer_is_that_of_the_model_alone(aware: bool) -> None:
    model: Any = crossing()
    inputs, settings = told("one"), {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    both = joined(inputs)
    context = FULL.compress(model, inputs, QUESTION if aware else None)
    for beams in (1, 2):
        want = model.generate(**both, **settings, num_beams=beams)[:, both["input_ids"].shape[1] :]
        with context.fork() as fork:
            assert fork.generate(None if aware else QUESTION, **settings, num_beams=beams).tolist() == want.tolist()
