"""Every class of the installed transformers evicts correctly, or is refused with the reason."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import transformers
from releases import installed

from kvpolicy.store.layer import EvictingLayer
from kvpolicy.testing.architectures.build import Case, cases
from kvpolicy.testing.architectures.check import Row, judge
from kvpolicy.testing.architectures.table import states, summary
from kvpolicy.types import Selection

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"
LLAMA = Case("text", "llama", "LlamaForCausalLM")
judged = functools.cache(judge)

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_wrong_position_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fault most reported of all: positions that follow what is stored.
    monkeypatch.setattr(EvictingLayer, "get_seq_length", lambda self: self.keys.shape[2] if self.is_initialized else 0)
    assert judge(LLAMA).verdict == "wrong"


def test_a_layer_left_whole_in_silence_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    evict = EvictingLayer.evict

    def lazy(self: EvictingLayer, *args: Any, **kwargs: Any) -> Any:
        return None if self.index == 1 else evict(self, *args, **kwargs)

    monkeypatch.setattr(EvictingLayer, "evict", lazy)
    row = judge(LLAMA)
    assert (row.verdict, row.reason) == ("wrong", "layers [1] kept everything, in silence")


def test_one_wrong_slot_of_one_head_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    evict = EvictingLayer.evict

    def off_by_one(self: EvictingLayer, stored: Any, selection: Selection, *args: Any) -> None:
        slots = selection.slots.clone()
        last = int(selection.lengths[0, 0])
        # A kept slot whose neighbour is not kept: the neighbour takes its place.
        place = next(at for at in range(last) if slots[at] + 1 < slots[at + 1])
        slots[place] += 1
        evict(self, stored, Selection(slots, selection.lengths, selection.layer), *args)

    monkeypatch.setattr(EvictingLayer, "evict", off_by_one)
    row = judge(LLAMA)
    assert row.verdict == "wrong"
    assert row.error > 1000 * row.rounding


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "llava"])
def test_common_kinds_are_correct(model_type: str) -> None:
    row = judged(next(case for case in cases() if case.model_type == model_type))
    if model_type == "qwen3_next" and not installed(">=5.6"):
        assert row.verdict == "refused"
        assert "a cache of its own" in row.reason
    else:
        assert row.verdict == "correct", row.reason


def test_a_class_without_the_interface_is_refused() -> None:
    row = judged(Case("text", "bloom", "BloomForCausalLM"))
    assert row.verdict == "refused"
    assert "attention interface" in row.reason


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=str)
def test_class(case: Case) -> None:
    row = judged(case)
    assert row.verdict != "wrong", row.reason
    assert row.verdict == "correct" or row.reason


@pytest.mark.slow
def test_page_says_what_a_fresh_run_finds() -> None:
    text = PAGE.read_text()
    rows: list[Row] = [judged(case) for case in cases()]
    print(summary(rows))
    if f"transformers {transformers.__version__} " not in text:
        pytest.skip(f"the page is of another transformers than {transformers.__version__}")
    assert states(text) == {(f"`{row.case.name}`", f"`{row.case.model_type}`"): row.verdict for row in rows}
    assert len({row.case.name for row in rows if row.verdict == "correct"}) >= 200
