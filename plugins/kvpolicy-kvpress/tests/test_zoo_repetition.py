"""KVzip against its press: the same slots kept, for the same words before the same chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvpolicy_kvpress.agree import CASES, Case
from kvpolicy_kvpress.make import kvpress
from test_zoo_selection import held, masked_by
from torch import Tensor

from kvpolicy import Budget, Policy
from kvpolicy.budgets.adaptive import AdaptiveHeads
from kvpolicy.budgets.dynamic_kv import DynamicKVLayers
from kvpolicy.scorers.kvzip import KVzip
from kvpolicy.selectors.top_k import TopK

WORDS = {
    "": [],
    "\n": [3],
    "\n\nRepeat the previous context exactly.": [5, 6, 7],
    "\n\nRepeat the part of the previous context exactly, starting with": [8, 9],
}
ASKED = {"instruction": [5, 6, 7], "continuation": [8, 9], "suffix": [3]}


class Tokenizer:
    """The press asks for one by the model's name; it knows the press's words."""

    chat_template = None

    @classmethod
    def from_pretrained(cls, _: str) -> Tokenizer:
        return cls()

    def encode(self, text: str, **_: Any) -> Tensor:
        return torch.tensor([WORDS[text]], dtype=torch.int64)


def mask(press: Any, weights: Tensor, size: int) -> None:
    """As the press's own, which cannot make one in float64, where both ways to score round alike."""
    press.causal_mask_score = torch.full((size, size), -1e30, dtype=weights.dtype).triu(1)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpress.presses.kvzip_press.AutoTokenizer", Tokenizer)
    monkeypatch.setattr(kvpress().KVzipPress, "_make_mask", mask)


def press(case: Case, chunk: int, *, layerwise: bool) -> Any:
    """Return a press that keeps ``case.kept`` slots a head of each layer, or of all together."""
    # A little more, as the press rounds down what it evicts.
    ratio = (case.length - case.kept) / case.length + 1e-9
    return kvpress().KVzipPress(compression_ratio=ratio, layerwise=layerwise, chunk_size=chunk)


def policy(case: Case, chunk: int, layers: Any = None, **settings: Any) -> Policy:
    given = {} if layers is None else {"layers": layers}
    budget = Budget(tokens=case.kept, heads=AdaptiveHeads(floor=0), **given)
    score = KVzip(chunk=chunk, **(ASKED | settings))
    return Policy(name="zoo", score=score, budget=budget, select=TopK(sinks=4, recent=0))


def agrees(case: Case, chunk: int, **settings: Any) -> bool:
    model = case.model()
    return held(policy(case, chunk, **settings), model, case) == masked_by(
        press(case, chunk, layerwise=True), model, case
    )


@pytest.mark.agreement("kvzip", "KVzipPress")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.length}")
@pytest.mark.parametrize("chunk", [2048, 50])
def test_it_keeps_what_the_press_keeps(chunk: int, case: Case) -> None:
    assert agrees(case, chunk)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.length}")
def test_all_layers_together_have_the_shares_that_the_press_gives_them(case: Case) -> None:
    """Up to what whole slots a KV head leave: the press counts those of all heads of a layer."""
    model = case.model()
    theirs = masked_by(press(case, 50, layerwise=False), model, case)
    ours = held(policy(case, 50, layers=DynamicKVLayers(most=1000)), model, case)
    heads = model.config.num_key_value_heads
    sizes = [[sum(map(len, layer[0])) for layer in kept] for kept in (ours, theirs)]
    assert all(abs(one - other) <= heads for one, other in zip(*sizes, strict=True)), sizes
    assert len(set(sizes[1])) > 1


def test_the_comparison_sees_other_settings() -> None:
    case = CASES[1]
    assert not agrees(case, 50, lead=7)
    assert not agrees(case, 50, sinks=0)
    assert not agrees(case, 50, suffix=[])
    assert not agrees(case, 50, instruction=[])
    assert not agrees(case, 50, continuation=[8])
    assert agrees(case, 2048, continuation=[])


def test_the_press_needs_what_it_is_given_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the words stand in `WORDS` is what makes the two alike."""
    monkeypatch.setitem(WORDS, "\n", [4])
    assert not agrees(CASES[0], 50)
