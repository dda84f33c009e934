"""Prints how far evicted caches drift from the full one, by policy and slots kept; lower is better.

SmolLM2-135M-Instruct, 1,024-token contexts of real English, mean KL divergence over the next 128, in nats a token.

    python benchmarks/drift_table.py --policy snapkv --policy ecokv-snapkv --kept 128
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvpolicy import load, models
from kvpolicy.eval.drift import drift, full_logits
from kvpolicy.texts import contexts

CONTEXT = 1024
NEXT = 128
BASELINE = "snapkv"
VALUE_NORM = {
    "name": "ecokv-snapkv + value norm",
    "extends": "ecokv-snapkv",
    "score": {
        "importance": {
            "type": "fixed",
            "inputs": [{"type": "snapkv", "window": 8}, "value-norm"],
            "weights": [1, 1],
            "normalize": "match-importance",
        }
    },
}
POLICIES: tuple[str | dict[str, Any], ...] = (
    BASELINE,
    "snapkv-w8",
    "mixkv-snapkv",
    "ecokv-snapkv",
    VALUE_NORM,
    "ecokv-values-snapkv",
    "key-diff",
    "streaming-llm",
    "random",
    "ada-kv",
    "mixkv-ada-kv",
    "ecokv-ada-kv",
    "ecokv-values-ada-kv",
)

Found = dict[str, dict[int, list[float]]]
"""Mean KL of each text, by policy and slots kept."""


def measure(policies: list[str | dict[str, Any]], kept: list[int], texts: int) -> Found:
    """Return the mean KL of every policy at every size on every text."""
    model, tokenizer = models.load()
    variants = [load(policy, budget=size) for policy in policies for size in kept]
    found: Found = {}
    for ids in track(contexts(tokenizer, tokens=CONTEXT + NEXT, count=texts), "texts", console=Console(stderr=True)):
        context, continuation = torch.tensor([ids]).split([CONTEXT, NEXT], dim=1)
        full = full_logits(model, context, continuation)
        for policy in variants:
            strayed = drift(model, policy, context, continuation, full=full)
            found.setdefault(policy.name, {}).setdefault(policy.budget.tokens or 0, []).append(strayed.mean)
    return found


def table(found: Found) -> Table:
    """Return means with their standard errors, and the mean difference from `BASELINE` on the same texts with its."""
    shown = Table(title=f"KL from the full cache, nats a token (- {BASELINE}: paired difference)", title_justify="left")
    shown.add_column("policy")
    for size in next(iter(found.values())):
        shown.add_column(f"{size} kept", justify="right")
        shown.add_column(f"- {BASELINE}", justify="right")
    for name, by_size in found.items():
        cells = []
        for size, kls in by_size.items():
            baseline = found.get(BASELINE, {}).get(size)
            differences = [one - other for one, other in zip(kls, baseline, strict=True)] if baseline else []
            cells += [_mean(kls, ".3f"), _mean(differences, "+.3f")]
        shown.add_row(name, *cells)
    return shown


def _mean(numbers: list[float], form: str) -> str:
    if not numbers:
        return "-"
    mean = format(statistics.fmean(numbers), form)
    return f"{mean} ±{statistics.stdev(numbers) / len(numbers) ** 0.5:.3f}" if len(numbers) > 1 else mean


def main(
    policy: Annotated[list[str] | None, typer.Option(help="A policy's name or file, again for each.")] = None,
    kept: Annotated[list[int] | None, typer.Option(help="Slots kept a KV head, again for each.")] = None,
    texts: Annotated[int, typer.Option(min=1, help="How many texts.")] = 8,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the mean KL of each text here.")] = None,
) -> None:
    """Print the table."""
    found = measure(list(policy or POLICIES), kept or [64, 128, 256], texts)
    console = Console()
    console.width = max(console.width, 120)
    console.print(table(found))
    if json_path:
        json_path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
