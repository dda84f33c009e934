"""``kvpolicy plan``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.output import Json, OptionError, print_json, print_rich
from kvpolicy.cli.run import Dtype, load_policy

if TYPE_CHECKING:
    from rich.table import Table

    from kvpolicy.analysis.devices import Device
    from kvpolicy.analysis.footprint import Footprint, LayerBytes
    from kvpolicy.analysis.shape import LayerShape, ModelShape
    from kvpolicy.plugin import Store
    from kvpolicy.policy import Policy


@dataclass(frozen=True)
class _Answer:
    """What is asked, and what is found: first the full cache, then what the policy keeps in its own store."""

    shape: ModelShape
    policy: Policy
    context: int
    batch: int
    device: Device | None
    found: list[Footprint]

    @property
    def full(self) -> Footprint:
        return self.found[0]

    @property
    def own(self) -> Footprint:
        return self.found[1]

    def notes(self) -> list[str]:
        """Return what a reader would not expect, one line each."""
        notes = []
        pairs = zip(self.full.layers, self.own.layers, strict=True)
        if not self.policy.trivial and all(kept.slots == whole.slots for whole, kept in pairs):
            notes.append("the budget holds the whole context: nothing is evicted")
        if self.policy.across_layers:
            name = self.policy.budget.layers.name
            notes.append(
                f"what '{name}' gives each layer depends on the text: layers are alike here, their sum is exact"
            )
        longest = self.shape.longest
        if longest is not None and self.context > longest:
            notes.append(f"the model is made for {longest:,} positions, fewer than the context has")
        if self.device is not None and self.shape.bytes > self.device.memory:
            notes.append(f"the weights alone, {self.shape.bytes:,} bytes, are more than {self.device.name} holds")
        return notes

    def sequences(self, one: Footprint) -> int | None:
        """Return how many sequences fit, None where no GPU is named."""
        return None if self.device is None else one.sequences(self.shape, self.device)

    def seconds(self, one: Footprint) -> float | None:
        """Return the least time of a step, None where it is not known."""
        return None if self.device is None else one.seconds(self.shape, self.device, self.batch)


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder, a config.json, a GGUF file, or a Hugging Face id in the local cache; default: "
            "SmolLM2-135M-Instruct."
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="A policy's name, or the path of a policy file.")] = "ecokv-snapkv",
    budget: Annotated[str | None, typer.Option(help="Slots a KV head (512) or a share (0.25).")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")] = 8192,
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded at once, for the time of a step.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="What the model's numbers are stored in.")] = Dtype.BFLOAT16,
    gpu: Annotated[
        str | None, typer.Option(help="A GPU's name (h100) or memory (24GB); one that is not known lists the names.")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(min=1, metavar="GB/S", help="Of the GPU's memory, in 10^9 bytes a second.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a context takes in a model's cache, in full and under a policy, from the model's config alone.

    No weights are read. With --gpu also: how many sequences fit at most, and how long a token takes at least.
    """
    device = _device(gpu, bandwidth)
    chosen = load_policy(policy, budget)

    import torch

    from kvpolicy.analysis.footprint import footprints
    from kvpolicy.analysis.shape import model_shape, read_config

    shape = model_shape(read_config(model), dtype=getattr(torch, dtype), batch=batch)
    answer = _Answer(shape, chosen, context, batch, device, footprints(shape, chosen, context))
    if as_json:
        print_json(_plain(answer))
    else:
        _print(answer)


def _device(gpu: str | None, bandwidth: float | None) -> Device | None:
    from kvpolicy.analysis.devices import find_device

    if gpu is None:
        if bandwidth is not None:
            raise OptionError("--bandwidth: expected --gpu with it, got none")
        return None
    device = find_device(gpu)
    return device if bandwidth is None else replace(device, bandwidth=bandwidth * 1e9)


def _label(store: Store | None) -> str:
    """Return a way to store as a line names it."""
    if store is None:
        return "full cache"
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(store) if dataclasses.is_dataclass(store) else ()
    return "  ".join([store.name, *(f"{field.name}={getattr(store, field.name)}" for field in fields)])


def _plain(answer: _Answer) -> dict[str, Any]:
    """Return the plan as plain data, ready for JSON."""
    shape, device = answer.shape, answer.device
    return {
        "model": {
            "class": shape.name,
            "parameters": shape.parameters,
            "dtype": str(shape.dtype).removeprefix("torch."),
            "bytes": shape.bytes,
            "bytes_read": shape.read,
        },
        "policy": answer.policy.name,
        "context": answer.context,
        "batch": answer.batch,
        "gpu": None if device is None else dataclasses.asdict(device),
        "caches": [
            {
                "store": _label(one.store),
                "own": one is answer.own,
                "bytes": one.bytes,
                "index_bytes": one.index_bytes,
                "state_bytes": one.state_bytes,
                "device_bytes": one.device,
                "host_bytes": one.host,
                "working_bytes": one.working,
                "sequences": answer.sequences(one),
                "seconds": answer.seconds(one),
            }
            for one in answer.found
        ],
        "layers": [
            {
                "layer": index,
                "kind": layer.kind,
                "evictable": layer.evictable,
                "heads": layer.heads,
                "key_size": layer.key_size,
                "value_size": layer.value_size,
                "slots": kept.slots,
                "slots_full": whole.slots,
                "bytes": kept.bytes,
                "index_bytes": kept.index_bytes,
                "state_bytes": kept.state_bytes,
                "bytes_full": whole.bytes,
            }
            for index, (layer, whole, kept) in enumerate(_rows(answer))
        ],
        "notes": answer.notes(),
    }


def _rows(answer: _Answer) -> list[tuple[LayerShape, LayerBytes, LayerBytes]]:
    """Return of each layer its shape, what it holds in full, and what it holds under the policy."""
    return list(zip(answer.shape.layers, answer.full.layers, answer.own.layers, strict=True))


def _print(answer: _Answer) -> None:
    shape = answer.shape
    dtype = str(shape.dtype).removeprefix("torch.")
    typer.echo(f"{shape.name}: {shape.parameters:,} weights in {dtype}, {shape.bytes:,} bytes")
    typer.echo(f"policy {answer.policy.name}, a context of {answer.context:,} tokens")
    print_rich(_layers(answer))
    if answer.device is not None:
        typer.echo(f"{answer.device.name}: sequences and tokens a second at most, ms at least; batch {answer.batch}")
    print_rich(_caches(answer))
    for note in answer.notes():
        typer.echo(f"note: {note}")


def _layers(answer: _Answer) -> Table:
    """Return a table of a line for each run of like layers."""
    table = _table("layers", "kind", "KV heads", "key + value", "slots a head", "of", "bytes", "of full")
    for (layer, whole, kept), group in groupby(enumerate(_rows(answer)), key=lambda one: one[1]):
        indices = [index for index, _ in group]
        span = str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}"
        held = kept.device + kept.host
        stored = [""] * 4
        if layer.heads:
            sizes = f"{layer.key_size} + {layer.value_size}"
            stored = [f"{layer.heads}", sizes, f"{kept.slots:,}", f"{whole.slots:,}"]
        table.add_row(span, layer.kind, *stored, f"{held:,}", _share(held, whole.device))
    return table


def _caches(answer: _Answer) -> Table:
    """Return a table of a line for each way to hold a sequence."""
    timed = ("sequences", "ms a token", "tokens a second") if answer.device else ()
    table = _table("a sequence", "bytes", "of full", "on the device", "on the CPU", *timed)
    for one in answer.found:
        label = _label(one.store) + (", the policy's" if one is answer.own else "")
        cells = [f"{one.total:,}", _share(one.total, answer.full.total), f"{one.device:,}", f"{one.host:,}"]
        if answer.device:
            seconds = answer.seconds(one)
            times = ["", ""] if seconds is None else [f"{seconds * 1000:.3f}", f"{answer.batch / seconds:,.0f}"]
            cells += [f"{answer.sequences(one):,}", *times]
        table.add_row(label, *cells)
    return table


def _table(first: str, *others: str) -> Table:
    from rich.table import Table

    table = Table(first)
    for name in others:
        table.add_column(name, justify="left" if name == "kind" else "right")
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""
