"""Prints how kvpolicy and kvpress compare at the same methods, in one process and one run: prompts, tokens and bytes.

Window, pooling and the share kept are the same for both. Prompts and tokens are read in turns, as `kvpolicy bench`
reads them. It needs an environment with kvpress, and so with transformers 5.2: `make bench` has one.

    python benchmarks/against_kvpress.py --contexts 4096
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

# Importing it replaces transformers' attention functions, for all that run here.
from kvpress import AdaKVPress, PyramidKVPress, SnapKVPress
from rich.console import Console
from transformers import PreTrainedModel

from kvpolicy import load
from kvpolicy.bench.figures import Figure
from kvpolicy.bench.measure import BARE
from kvpolicy.bench.record import Memory, Prompt, Record, Tokens, about, write_record
from kvpolicy.bench.rounds import read_prompts, read_tokens
from kvpolicy.bench.show import Table, cell, machine
from kvpolicy.bench.statistics import ratios
from kvpolicy.bench.subject import Subject, made_up, read_model
from kvpolicy.bench.traces import holding, peaks
from kvpolicy.bench.ways import Bare, Under, Way
from kvpolicy.report import STAGES

WINDOW = {"window": 32, "kernel": 5, "pooling": "avg"}
METHODS = ("snapkv", "pyramidkv", "ada-kv")


class Pressed:
    """A model under a press, for its prompts alone, as kvpress has it.

    Args:
        press: of kvpress.
        name: of the method.
        model: that runs under it.
    """

    def __init__(self, press: Any, name: str, model: PreTrainedModel) -> None:
        self.name = f"{name}, kvpress"
        self._press = press
        self._model = model
        self._hidden: dict[torch.nn.Module, Any] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read a prompt within the press."""
        with self._press(self._model):
            yield
        self._hidden = self._taken_off()

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Read a token, with the slots hidden that the press has evicted by name alone."""
        for module, indices in self._hidden.items():
            module.masked_key_indices = indices
        yield
        self._taken_off()

    def stages(self) -> dict[str, float]:
        """Return no seconds: kvpress does not say."""
        return dict.fromkeys(STAGES, 0.0)

    def _taken_off(self) -> dict[torch.nn.Module, Any]:
        """Return which slots are hidden by module, and hide none: other ways read by the same modules."""
        found = {}
        for module in self._model.modules():
            if getattr(module, "masked_key_indices", None) is not None:
                found[module], module.masked_key_indices = module.masked_key_indices, None
        return found


def ways(model: PreTrainedModel, keep: float) -> list[Way]:
    """Return the model alone, then each method by kvpolicy and by kvpress."""
    snapkv = {"compression_ratio": 1 - keep, "window_size": WINDOW["window"], "kernel_size": WINDOW["kernel"]}
    presses = (SnapKVPress(**snapkv), PyramidKVPress(**snapkv), AdaKVPress(SnapKVPress(**snapkv)))
    found: list[Way] = [Bare(BARE)]
    for name, press in zip(METHODS, presses, strict=True):
        found += [Under(load(name, budget=keep, score=WINDOW), model), Pressed(press, name, model)]
    return found


def measure(subject: Subject, contexts: Sequence[int], *, keep: float, runs: int, tokens: int) -> Record:
    """Return the times and bytes of every way at every context."""
    prompts: list[Prompt] = []
    read: list[Tokens] = []
    memory: list[Memory] = []
    compared = ways(subject.model, keep)
    read_prompts(subject, compared, min(contexts), 1)  # the first pass of a process is slower
    for context in contexts:
        timed, readers = read_prompts(subject, compared, context, runs)
        prompts += timed
        before = [holding(reader.cache) for reader in readers]
        read += read_tokens(subject, readers, context, tokens)
        after = [holding(reader.cache) for reader in readers]
        del readers
        full = before[0]
        for way, first, last in zip(compared, before, after, strict=True):
            cache_peak, pass_peak = peaks(subject, way, context)
            planned = full.slots if way.name == BARE else round(full.slots * keep)
            sizes = (first.bytes, first.slots, last.bytes, last.slots, full.slots, full.layer, planned)
            memory.append(Memory(context, way.name, first.ragged, *sizes, cache_peak, pass_peak, None))
    return Record(about(subject, {"keep": keep, "runs": runs, "every": 1}), prompts, read, memory)


def tables(record: Record) -> list[Table]:
    """Return a table of prompts, one of tokens and one of bytes."""
    times: list[list[list[str]]] = [[], []]
    sizes = []
    for context in dict.fromkeys(one.context for one in record.prompts):
        prompts: dict[str, list[float]] = {}
        for one in record.prompts:
            if one.context == context:
                prompts.setdefault(one.way, []).append(one.seconds)
        tokens = {one.way: one.seconds for one in record.tokens if one.context == context}
        held = {one.way: one for one in record.memory if one.context == context}
        for name in METHODS:
            theirs = f"{name}, kvpress"
            for rows, seconds in zip(times, (prompts, tokens), strict=True):
                pairs = ((name, BARE, None), (theirs, BARE, None), (name, theirs, 1.0))
                rows.append([f"{context:,}", name, *(_ratio(seconds, *pair) for pair in pairs)])
            mine, other = held[name], held[theirs]
            shares = [f"{one.bytes / one.full:.3f}" for one in (mine, other)]
            peaks_of_full = [f"{one.cache_peak / one.full:.3f}" for one in (mine, other)]
            sizes.append([f"{context:,}", name, *shares, *peaks_of_full])
    of_time = ["tokens", "way", "kvpolicy, of no session", "kvpress, of no session", "kvpolicy, of kvpress"]
    of_size = [
        "tokens",
        "way",
        "kvpolicy, of full",
        "kvpress, of full",
        "kvpolicy, at its peak",
        "kvpress, at its peak",
    ]
    return [
        Table("Time of a prompt", of_time, times[0]),
        Table("Time of a token behind it", of_time, times[1]),
        Table("Bytes of keys and values", of_size, sizes),
    ]


def _ratio(seconds: dict[str, list[float]], way: str, other: str, target: float | None) -> str:
    found = ratios(seconds[way], seconds[other])
    return cell(Figure("", way, None, found.median, found.low, found.high, target))


def main(
    contexts: Annotated[str, typer.Option(help="Tokens of the prompts, with commas between.")] = "1024,2048",
    keep: Annotated[float, typer.Option(min=0.01, max=0.99, help="The share of slots kept.")] = 0.25,
    model: Annotated[str | None, typer.Option(help="A folder; default: SmolLM2-135M-Instruct.")] = None,
    shape: Annotated[str | None, typer.Option(help="Instead: a shape with random weights.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="How many layers it is cut to.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="How often each prompt is read each way.")] = 5,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens are read behind it.")] = 64,
    out: Annotated[Path | None, typer.Option(help="Also write every measurement into this file.")] = None,
) -> None:
    """Print the tables."""
    lengths = sorted(int(word) for word in contexts.split(","))
    given: dict[str, Any] = {"tokens": max(lengths) + tokens, "dtype": torch.float32, "device": "cpu"}
    subject = read_model(model, **given) if shape is None else made_up(shape, layers=layers, **given)
    record = measure(subject, lengths, keep=keep, runs=runs, tokens=tokens)
    if out is not None:
        write_record(record, out)
    console = Console(width=160)
    console.print(machine(record.about), markup=False)
    for table in tables(record):
        console.print(table.terminal(), markup=False)


if __name__ == "__main__":
    typer.run(main)
