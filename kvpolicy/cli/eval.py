"""``kvpolicy eval``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.output import Json, OptionError, print_json
from kvpolicy.cli.run import Attention, Dtype, read_budget
from kvpolicy.errors import nearest
from kvpolicy.eval.executors import Engine

if TYPE_CHECKING:
    from kvpolicy.eval.cells import Cell, Mode

MODES: tuple[Mode, ...] = ("query-agnostic", "query-aware")
WORKERS = 2


def evaluate(
    policies: Annotated[
        str, typer.Option(help="Names or files of policies, with commas between; shipped: all of kvpolicy itself.")
    ],
    out: Annotated[Path, typer.Option(help="The folder for results; what is there already is not measured again.")],
    budgets: Annotated[str, typer.Option(help="Slots a KV head (512) or shares (0.25), with commas between.")] = "0.25",
    tasks: Annotated[
        str, typer.Option(help="Kinds of tasks, task files (.yaml) or examples (.jsonl), with commas between.")
    ] = "drift,niah-single",
    mode: Annotated[str, typer.Option(help=f"{' or '.join(MODES)}, or both with a comma between.")] = MODES[0],
    samples: Annotated[int | None, typer.Option(min=1, help="How many examples of each task.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of each context.")] = None,
    seed: Annotated[int, typer.Option(help="What decides by chance in the tasks.")] = 0,
    text: Annotated[
        Path | None, typer.Option(help="A text file to make tasks from; default: pydoc_data.topics of Python.")
    ] = None,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Measure only each Nth cell, from the Ith on; folders merge.")
    ] = "1/1",
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face id, a folder, or tiny-llava; default: SmolLM2-135M-Instruct.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="What the model's numbers are stored in.")] = Dtype.FLOAT32,
    attention: Annotated[Attention, typer.Option(help="The model's own attention.")] = Attention.SDPA,
    executor: Annotated[Engine | None, typer.Option(help="Measure cells on workers of this engine.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help=f"How many cells the executor measures at a time; default: {WORKERS}.")
    ] = None,
    executor_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Of the engine, like address=tcp://head:8786; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure policies at budgets on tasks, into a folder of results; run again, it goes on where it stopped."""
    modes = [_mode(word) for word in _words(mode, "--mode")]
    index, count = _shard(shard)
    options = dict(_option(each) for each in executor_option or ())
    if executor is None and (workers or options):
        raise OptionError("--workers, --executor-option: expected --executor with them, got none")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--out: expected a folder, cannot make {str(out)!r}: {error.strerror}") from error

    from kvpolicy import models
    from kvpolicy.cli import measuring
    from kvpolicy.eval import grid
    from kvpolicy.eval.cells import result_path
    from kvpolicy.eval.tasks.files import load_tasks
    from kvpolicy.eval.worker import BenchSpec, launched

    process, processes = launched()
    if executor is not None and processes > 1:
        raise OptionError(f"--executor: expected one process to start it, got {processes} of a launcher")
    sizes = [size for word in _words(budgets, grid.BUDGETS) if (size := read_budget(word, grid.BUDGETS)) is not None]
    settings = {name: value for name, value in (("samples", samples), ("length", length)) if value is not None}
    named = _words(policies, "--policies")
    asked = grid.Grid(
        policies=grid.policies(named, sizes, left_out=_say_left_out),
        tasks=[task for word in _words(tasks, "--tasks") for task in load_tasks(word, settings)],
        modes=modes,
        seed=seed,
    )
    spec = BenchSpec(model or models.DEFAULT, tuple(read_texts(text)), dtype.value, attention.value)

    def pick(cells: Sequence[Cell]) -> Sequence[Cell]:
        return grid.shard(grid.shard(cells, index, count), process, processes)

    try:
        if executor is None:
            cells, measured = measuring.measure_here(asked, spec, pick, out)
        else:
            cells, measured = measuring.measure_elsewhere(
                asked, spec, pick, out, engine=executor, workers=workers or WORKERS, options=options
            )
    except KeyboardInterrupt:
        typer.echo(f"Interrupted. What was finished is in {out}; the same command goes on from there.", err=True)
        raise typer.Exit(130) from None
    if as_json:
        rows = [{"policy": cell.policy["name"], "task": cell.task["task"], "mode": cell.mode} for cell in cells]
        files = [str(result_path(cell, out)) for cell in cells]
        print_json(
            {
                "folder": str(out),
                "measured": measured,
                "there_before": len(cells) - measured,
                "cells": [{**row, "file": file} for row, file in zip(rows, files, strict=True)],
            }
        )
        return
    of_many = f"process {process} of {processes}: " if processes > 1 else ""
    typer.echo(f"{of_many}{measured} cells measured, {len(cells) - measured} there before, in {out}")
    typer.echo(f"Next: kvpolicy report {out}")


def _say_left_out(name: str, budget: int | float) -> None:
    typer.echo(f"{name} is left out at {budget}: it protects more slots", err=True)


def _words(text: str, option: str) -> list[str]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise OptionError(f"{option}: expected at least one, with commas between, got {text!r}")
    return list(dict.fromkeys(found))


def _mode(word: str) -> Mode:
    for mode in MODES:
        if word == mode:
            return mode
    raise OptionError(f"--mode: unknown mode {word!r}.{nearest(word, MODES)}")


def _shard(text: str) -> tuple[int, int]:
    """Return which shard of how many.

    >>> _shard("2/4")
    (2, 4)
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = (int(part) for part in found.groups()) if found else (0, 0)
    if not 1 <= index <= count:
        raise OptionError(f"--shard: expected I/N with I from 1 to N, like 2/4, got {text!r}")
    return index, count


def _option(text: str) -> tuple[str, Any]:
    """Return the name and value of an option; what is JSON is read as such.

    >>> _option("gpus_per_node=1"), _option("slurm_partition=long")
    (('gpus_per_node', 1), ('slurm_partition', 'long'))
    """
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise OptionError(f"--executor-option: expected KEY=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def read_texts(path: Path | None) -> list[str]:
    """Return the text of a file, or the default ones, Python's topics."""
    from kvpolicy.cli.run import read_file
    from kvpolicy.texts import unrepeated

    return unrepeated() if path is None else [read_file(str(path))]
