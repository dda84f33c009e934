"""``kvpolicy eval``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpolicy.cli.output import Json, OptionError, print_json
from kvpolicy.cli.run import Attention, Dtype, read_budget
from kvpolicy.errors import nearest

if TYPE_CHECKING:
    from kvpolicy.eval.bench import Bench
    from kvpolicy.eval.cells import Cell, Mode

MODES: tuple[Mode, ...] = ("query-agnostic", "query-aware")


def evaluate(
    policies: Annotated[str, typer.Option(help="Names or files of policies, with commas between.")],
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
        str | None, typer.Option(help="A Hugging Face id or a folder; default: SmolLM2-135M-Instruct.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="What the model's numbers are stored in.")] = Dtype.FLOAT32,
    attention: Annotated[Attention, typer.Option(help="The model's own attention.")] = Attention.SDPA,
    as_json: Json = False,
) -> None:
    """Measure policies at budgets on tasks, into a folder of results; run again, it goes on where it stopped."""
    modes = [_mode(word) for word in _words(mode, "--mode")]
    index, count = _shard(shard)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--out: expected a folder, cannot make {str(out)!r}: {error.strerror}") from error

    import torch

    from kvpolicy import models
    from kvpolicy.eval import cells as of_cells
    from kvpolicy.eval import grid
    from kvpolicy.eval.bench import Bench
    from kvpolicy.eval.tasks.files import load_tasks

    sizes = [size for size in map(read_budget, _words(budgets, "--budgets")) if size is not None]
    settings = {name: value for name, value in (("samples", samples), ("length", length)) if value is not None}
    asked = grid.Grid(
        policies=grid.policies(_words(policies, "--policies"), sizes),
        tasks=[task for word in _words(tasks, "--tasks") for task in load_tasks(word, settings)],
        modes=modes,
        seed=seed,
    )
    texts = _texts(text)
    loaded, tokenizer = models.load(
        model,
        dtype=getattr(torch, dtype),
        attn_implementation=attention.value,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    bench = Bench(model or models.DEFAULT, loaded, tokenizer, texts)
    cells = grid.shard(asked.cells(bench), index, count)
    try:
        measured = _run(cells, out, bench)
    except KeyboardInterrupt:
        typer.echo(f"Interrupted. What was finished is in {out}; the same command goes on from there.", err=True)
        raise typer.Exit(130) from None
    if as_json:
        rows = [{"policy": cell.policy["name"], "task": cell.task["task"], "mode": cell.mode} for cell in cells]
        files = [str(of_cells.result_path(cell, out)) for cell in cells]
        print_json(
            {
                "folder": str(out),
                "measured": sum(measured),
                "there_before": len(cells) - sum(measured),
                "cells": [{**row, "file": file} for row, file in zip(rows, files, strict=True)],
            }
        )
        return
    typer.echo(f"{sum(measured)} cells measured, {len(cells) - sum(measured)} there before, in {out}")
    typer.echo(f"Next: kvpolicy report {out}")


def _run(cells: Sequence[Cell], out: Path, bench: Bench) -> list[bool]:
    """Run the cells, with a progress bar; return which of them were not there before."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from kvpolicy.eval.cells import result_path, run_cell
    from kvpolicy.eval.tasks.files import from_plain

    missing = [cell for cell in cells if not result_path(cell, out).exists()]
    total = sum(len(bench.examples(from_plain(cell.task), cell.seed)) for cell in missing)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    done, task = [], None
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=total)
        for cell in cells:
            if cell.task != task:
                bench.forget()
                task = cell.task
            progress.update(bar, description=f"{cell.task['task']}: {cell.policy['name']}")
            done.append(run_cell(cell, out, bench, advance=lambda: progress.advance(bar)))
    return done


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


def _texts(path: Path | None) -> list[str]:
    from kvpolicy.cli.run import _read
    from kvpolicy.texts import unrepeated

    return unrepeated() if path is None else [_read(str(path))]
