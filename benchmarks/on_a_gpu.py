"""Checks every shipped policy on a GPU against the CPU, then times some of them there: one command, a few minutes.

What is checked, on a small random model in float32: that each policy keeps the same slots on both, and that decoding
goes on with the same logits. What is timed: what `kvpolicy bench` times, and the share of the memory's bandwidth that
a token reaches: bytes of weights and cache over its time, of what copying a large tensor reaches.

    python benchmarks/on_a_gpu.py --contexts 32768 --layers 8 --out gpu.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import PreTrainedModel

from kvpolicy import load
from kvpolicy.bench.measure import Settings, measure
from kvpolicy.bench.record import Record, write_record
from kvpolicy.bench.rounds import wait
from kvpolicy.bench.show import Table, machine, summary, tables
from kvpolicy.bench.subject import made_up
from kvpolicy.eval.grid import shipped
from kvpolicy.policy import Policy
from kvpolicy.session.layers import evicting_layers
from kvpolicy.testing.models import tiny

PROMPT, BUDGET, NEXT = 200, 96, 8
NEAR = 1e-3
"""Logits of the small model are some tenths; sums in another order move them by less than a hundredth of this."""


def differences(device: str) -> Iterator[tuple[str, str]]:
    """Yield each shipped policy, and what it does otherwise on `device` than on the CPU, if anything."""
    ids = torch.randint(100, (1, PROMPT + NEXT), generator=torch.Generator().manual_seed(0))
    for name in shipped():
        policy = load(name, budget=BUDGET)
        kept, logits = _run(tiny(), policy, ids)
        try:
            there, others = _run(tiny().to(device), policy, ids.to(device))
        except Exception as error:  # whatever it is, the others are to be checked as well
            yield name, f"{type(error).__name__}: {error}"
            continue
        same = all(torch.equal(one, other) for one, other in zip(kept, there, strict=True))
        off = float((logits - others).abs().max())
        yield name, "" if same and off < NEAR else f"slots {'the same' if same else 'differ'}, logits {off:.1e} apart"


def _run(model: PreTrainedModel, policy: Policy, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the positions kept in each layer, and the logits of what follows."""
    context = policy.compress(model, ids[:, :PROMPT])
    with context.fork() as fork:
        kept = [layer.padded()[2] for layer in evicting_layers(fork.cache)]
        logits = fork.logits(ids[:, PROMPT:])
    return [torch.empty(0) if one is None else one.cpu() for one in kept], logits.float().cpu()


def bandwidth(device: str, size: int) -> float:
    """Return the bytes a second that copying a tensor of `size` bytes moves, read and written."""
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    seconds = []
    for _ in range(10):
        wait(here.device)
        started = time.perf_counter()
        there.copy_(here)
        wait(here.device)
        seconds.append(time.perf_counter() - started)
    return 2 * size / statistics.median(seconds)


def shares(record: Record, weights: int, reached: float) -> Table:
    """Return what share of the bandwidth `reached` each token moves at: weights and what the cache holds, read once."""
    held = {(one.context, one.way): one.later for one in record.memory}
    rows = []
    for tokens in record.tokens:
        if (tokens.context, tokens.way) in held:
            seconds = statistics.median(tokens.seconds)
            moved = (weights + held[tokens.context, tokens.way]) / seconds
            rows.append([f"{tokens.context:,}", tokens.way, f"{seconds * 1e3:.2f}", f"{moved / reached:.3f}"])
    return Table("Share of the memory's bandwidth", ["tokens", "way", "ms", "share"], rows)


def _read_by_a_token(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a token reads: all but the embedding, where it is not the head's weights too."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return sum(one.nbytes for one in model.parameters() if one is head or one is not embedding)


def main(
    contexts: Annotated[str, typer.Option(help="Tokens of the prompts, with commas between.")] = "32768",
    policies: Annotated[str, typer.Option(help="Names, with commas between.")] = "snapkv,ada-kv,ecokv-ada-kv",
    keep: Annotated[float, typer.Option(min=0.01, max=0.99, help="The share of slots kept.")] = 0.25,
    shape: Annotated[str, typer.Option(help="Of the model that is timed.")] = "llama-3.1-8b",
    layers: Annotated[int, typer.Option(min=1, help="How many layers it is cut to.")] = 8,
    runs: Annotated[int, typer.Option(min=1, help="How often each prompt is read each way.")] = 3,
    device: Annotated[str, typer.Option(help="cuda; cpu tries the script itself.")] = "cuda",
    copied: Annotated[int, typer.Option(min=1, help="Megabytes copied to find the bandwidth.")] = 4096,
    out: Annotated[Path | None, typer.Option(help="Also write every measurement into this file.")] = None,
) -> None:
    """Check, then time; exit with 1 where a policy does something else than on the CPU."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(f"--device {device}: torch finds no GPU here; --device cpu tries the script itself")
    if out is not None:
        out.touch()
    settings = Settings(sorted(int(word) for word in contexts.split(",")), runs, tokens=64, every=64)
    chosen = [load(name, budget=keep) for name in policies.split(",")]
    subject = made_up(shape, layers=layers, tokens=settings.longest, dtype=torch.bfloat16, device=device)
    console = Console(width=160)
    wrong = 0
    for name, found in differences(device):
        wrong += bool(found)
        console.print(f"{name}: {found or 'as on the CPU'}", markup=False)
    record = measure(subject, chosen, settings)
    if out is not None:
        write_record(record, out)
    console.print(machine(record.about), markup=False)
    share = shares(record, _read_by_a_token(subject.model), bandwidth(device, copied * 2**20))
    for table in [*tables(record), share]:
        console.print(table.terminal(), markup=False)
    for line in summary(record):
        console.print(line, markup=False)
    raise typer.Exit(int(wrong > 0))


if __name__ == "__main__":
    typer.run(main)
