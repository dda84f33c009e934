"""``kvpolicy bench``."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpolicy.cli.output import Json, OptionError, print_json, print_rich, progress_bar
from kvpolicy.cli.run import Dtype, load_policy

if TYPE_CHECKING:
    from kvpolicy.bench.measure import Settings
    from kvpolicy.bench.record import Record
    from kvpolicy.bench.subject import Subject

POLICIES = "snapkv,pyramidkv,ada-kv,ecokv-snapkv,ecokv-ada-kv"


def bench(
    policies: Annotated[
        str, typer.Option(help="Names or files of policies, with commas between; the first one evicts later, too.")
    ] = POLICIES,
    budget: Annotated[str, typer.Option(help="Slots a KV head (512) or a share (0.25).")] = "0.25",
    contexts: Annotated[str, typer.Option(help="Tokens of the prompts, with commas between.")] = "1024,2048",
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face id or a folder; default: SmolLM2-135M-Instruct.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Instead of a model, one of this shape with random weights: llama-3.1-8b, smollm2-135m or tiny."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="How many layers the shape is cut to.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="What the model's numbers are stored in.")] = Dtype.FLOAT32,
    runs: Annotated[int, typer.Option(min=1, help="How often each prompt is read each way.")] = 5,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens are read behind it.")] = 128,
    every: Annotated[int, typer.Option(min=1, help="How many lie between evictions, where decoding evicts.")] = 32,
    out: Annotated[Path | None, typer.Option(help="Also write every measurement into this file, as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Time a model under policies, beside itself without any, and weigh what it holds.

    Prompts and tokens are read in turns, so that what slows the machine slows all alike; ratios are of neighbours, and
    stand as median, 95% interval, target, and whether it is met.
    """
    if tokens < every:
        raise OptionError(f"--tokens: expected at least the {every} of --every, got {tokens}")
    lengths = _lengths(contexts)
    if shape is None and layers is not None:
        raise OptionError("--layers: expected --shape with it, got none")
    if shape is not None and model is not None:
        raise OptionError("--shape: expected no --model with it, got both")
    if out is not None and (out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK)):
        raise OptionError(f"--out: expected a file in a folder that can be written to, got {str(out)!r}")

    from kvpolicy.bench.figures import figures
    from kvpolicy.bench.measure import Settings, measure, steps
    from kvpolicy.bench.record import write_record

    settings = Settings(lengths, runs, tokens, every)
    chosen = [load_policy(name.strip(), budget) for name in policies.split(",") if name.strip()]
    if not chosen:
        raise OptionError(f"--policies: expected at least one, with commas between, got {policies!r}")
    subject = _subject(model, shape, layers, dtype, settings)
    with progress_bar() as progress:
        bar = progress.add_task("measuring", total=steps(settings, len(chosen)))
        record = measure(subject, chosen, settings, advance=lambda: progress.advance(bar))
    if out is not None:
        write_record(record, out)
    if as_json:
        found = [{**asdict(one), "met": one.met} for one in figures(record)]
        print_json({**record.to_dict(), "figures": found})
    else:
        _print(record)


def _lengths(text: str) -> list[int]:
    """Return the contexts, shortest first.

    >>> _lengths("2048, 1024")
    [1024, 2048]
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise OptionError(f"--contexts: expected numbers of tokens, with commas between, got {text!r}")
    return sorted(set(map(int, words)))


def _subject(model: str | None, shape: str | None, layers: int | None, dtype: Dtype, settings: Settings) -> Subject:
    import torch

    from kvpolicy.bench.subject import made_up, read_model

    kind = getattr(torch, dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if shape is None:
        return read_model(model, tokens=settings.longest, dtype=kind, device=device)
    return made_up(shape, layers=layers, tokens=settings.longest, dtype=kind, device=device)


def _print(record: Record) -> None:
    from kvpolicy.bench.show import machine, summary, tables

    typer.echo(machine(record.about))
    for table in tables(record):
        print_rich(table.terminal())
    for line in summary(record):
        typer.echo(line)
