"""The demo: what its table says is measured."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import typer
from rich.console import Console

from kvpolicy import load
from kvpolicy.eval import demo
from kvpolicy.eval.drift import full_logits

FULL = demo.Row("full", 1000, 1000.0, 2_000_000, 2_000_000, 0.0, 1.0, "It is 4817.", 2.0, 0.05)
NEAR = demo.Row("near", 1000, 250.0, 500_000, 2_000_000, 0.1, 0.9, "4817", 2.1, 0.04)
FAR = demo.Row("far", 1000, 250.0, 510_000, 2_000_000, 0.2, 0.8, "I do\n[b]not[/b] know.", 2.2, None)


def shown(part) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(part)
    return out.getvalue()


def test_the_table_shows_what_was_measured_in_80_columns() -> None:
    lines = shown(demo.table([FULL, NEAR, FAR])).splitlines()
    near = next(line for line in lines if "near" in line)
    far = next(line for line in lines if "far" in line)
    assert near.replace("│", " ").split() == ["near", "250", "0.5", "25.0%", "0.100", "90%", "2.1", "40"]
    assert far.replace("│", " ").split() == ["far", "250", "0.5", "25.5%", "0.200", "80%", "2.2", "-"]


def test_answers_are_shown_as_they_are_a_line_each() -> None:
    assert "I do [b]not[/b] know." in shown(demo.answers([FULL, NEAR, FAR]))


def test_the_explanation_says_who_answered_and_who_drifted_least() -> None:
    text = demo.explanation([FULL, NEAR, FAR])
    assert "found by: full, near." in text
    assert "Least: near, with 25.0% of the bytes." in text
    assert "found by: none." in demo.explanation([FAR, FAR])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"policy": ["snapkw"]}, "snapkw"), ({"budget": 4}, "sinks"), ({"context": 10**8}, "shorter")],
)
@pytest.mark.model
def test_a_wrong_option_is_one_message_and_exit_code_2(options, message: str, capsys) -> None:
    with pytest.raises(typer.Exit) as caught:
        demo.main(**options)
    assert caught.value.exit_code == 2
    assert message in capsys.readouterr().err


@pytest.mark.model
@pytest.mark.slow
def test_every_column_is_a_real_measurement(smollm2) -> None:
    model, tokenizer = smollm2
    task = demo.make_task(tokenizer, 400)
    reference = full_logits(model, task.context, task.continuation)
    policies = [load("full"), load("snapkv", budget=100), load("ecokv-ada-kv", budget=100)]
    full, dense, ragged = (demo.measure(model, tokenizer, policy, task, reference) for policy in policies)

    assert [row.policy for row in (full, dense, ragged)] == [policy.name for policy in policies]
    assert full.seen == dense.seen == ragged.seen == task.prompt.shape[1]
    assert full.kept == full.seen
    assert dense.kept == ragged.kept == 100
    # 30 layers, 3 KV heads, keys and values of 64 numbers, 4 bytes each.
    assert full.bytes == full.bytes_full == dense.bytes_full == full.seen * 30 * 3 * 2 * 64 * 4
    assert dense.bytes / full.bytes == pytest.approx(100 / full.seen, rel=0.02)
    assert ragged.bytes / full.bytes == pytest.approx(100 / full.seen, rel=0.05)

    assert full.drift == pytest.approx(0, abs=1e-6)
    assert full.agreement == 1
    assert min(dense.drift, ragged.drift) > 0.001
    assert demo.EXPECTED in full.answer
    for row in (full, dense, ragged):
        assert 0 < row.agreement <= 1
        assert row.prompt_seconds > 0
        assert row.token_seconds is None or row.token_seconds > 0


@pytest.mark.model
@pytest.mark.slow
def test_the_rows_are_printed_and_written(tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.json"
    demo.main(context=200, budget=60, policy=["streaming-llm"], json_path=path)
    rows = json.loads(path.read_text())
    assert [row["policy"] for row in rows] == ["full", "streaming-llm"]
    assert rows[1]["kept"] == 60
    assert "Least: streaming-llm" in capsys.readouterr().out
