"""Every press of kvpress has a row: wrapped and right, or why not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvpolicy_kvpress.agree import CASES, agrees
from kvpolicy_kvpress.make import press_names
from kvpolicy_kvpress.presses import NOT_WRAPPED, WRAPPED
from kvpolicy_kvpress.scorer import KVPress
from kvpolicy_kvpress.table import PART, rewritten, table
from kvpolicy_kvpress.weights import weights_for
from torch import Tensor
from transformers.utils import logging

from kvpolicy import LayerView

PAGE = Path(__file__).parents[3] / "docs" / "kvpress.md"


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def test_each_press_that_kvpress_exports_has_one_row() -> None:
    assert WRAPPED.keys() | NOT_WRAPPED.keys() == press_names()
    assert not WRAPPED.keys() & NOT_WRAPPED.keys()


def test_the_table_of_the_page_is_what_running_them_makes() -> None:
    text = PAGE.read_text()
    assert text == rewritten(text, table()), f"out of date: python -m kvpolicy_kvpress.table {PAGE}"


def test_every_wrapped_press_keeps_in_every_run_what_the_press_itself_does() -> None:
    (part,) = PART.findall(PAGE.read_text())
    told = dict(re.findall(r"^\| `(\w+)` .* \| (\d+ of \d+) runs \|$", part, re.MULTILINE))
    assert told == dict.fromkeys(WRAPPED, f"{len(CASES)} of {len(CASES)}")


@pytest.mark.parametrize("name", ["KnormPress", "LeverageScorePress", "SnapKVPress", "QFilterPress"])
def test_the_comparison_sees_a_score_that_is_slightly_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two neighbours that have changed places, on the edge of what is kept."""
    own = KVPress._score

    def off(self: KVPress, view: LayerView) -> Tensor:
        scores = own(self, view)
        order = scores.argsort(dim=-1, descending=True)
        kept = CASES[0].kept
        edge = order[..., kept - 1 : kept + 1]
        return scores.scatter(-1, edge, scores.gather(-1, edge.flip(-1)))

    with weights_for([CASES[0].model()]):
        assert agrees(name, CASES[0])
        monkeypatch.setattr(KVPress, "_score", off)
        assert not agrees(name, CASES[0])


def test_the_comparison_sees_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy_kvpress.scorer.seed_of", lambda seed, layer: seed + layer + 1)
    assert not agrees("RandomPress", CASES[0])
