"""Prints what a policy adds to the time of a prompt, at several lengths, on SmolLM2-135M-Instruct.

Two figures, both medians over runs:

- `of full`: the prompt's time under the policy over its time under `full`, which keeps everything, in the same round.
  All policies take turns within a round, so that what slows the machine slows them alike; the spread is least to most.
- the stages' own seconds, from the report, as a share of the prompt's: the steadier figure on a busy machine.

    python benchmarks/prefill_share.py --runs 3
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvpolicy import load, models
from kvpolicy.policy import Policy
from kvpolicy.report import STAGES
from kvpolicy.texts import contexts

CONTEXTS = (1024, 2048, 4096)
POLICIES = ("snapkv", "ada-kv", "ecokv-snapkv", "ecokv-ada-kv")


@dataclass(frozen=True)
class Prefill:
    """One prompt under one policy.

    Args:
        context: tokens of the prompt.
        policy: its name.
        seconds: of the whole forward pass.
        stages: seconds in each of `STAGES`.
        of_full: `seconds` over those under `full` in the same round.
    """

    context: int
    policy: str
    seconds: float
    stages: dict[str, float]
    of_full: float


def prefill(model: Any, policy: Policy, ids: torch.Tensor) -> tuple[float, dict[str, float]]:
    """Return the seconds of one prompt (int64 ``[1, T]``), and those of each stage within."""
    with policy.on(model) as run, torch.no_grad():
        started = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        seconds = time.perf_counter() - started
    return seconds, run.report.to_dict()["seconds"]


def measure(runs: int, budget: int) -> Iterator[Prefill]:
    """Yield `runs` prefills of every policy at every length."""
    model, tokenizer = models.load()
    full, policies = load("full"), [load(name, budget=budget) for name in POLICIES]
    text = torch.tensor(contexts(tokenizer, tokens=max(CONTEXTS), count=1))
    prefill(model, policies[0], text[:, : min(CONTEXTS)])  # the first pass of a process is slower
    for length in CONTEXTS:
        ids = text[:, :length]
        for _ in track(range(runs), f"{length} tokens", console=Console(stderr=True)):
            whole, _ = prefill(model, full, ids)
            for policy in policies:
                seconds, stages = prefill(model, policy, ids)
                yield Prefill(length, policy.name, seconds, stages, seconds / whole)


def table(found: list[Prefill]) -> Table:
    """Return the medians, a line for each length and policy."""
    shown = Table(title="time of a prompt", title_justify="left")
    for heading in ("tokens", "policy", "seconds", "of full", "least to most", "stages", *STAGES):
        shown.add_column(heading, justify="left" if heading == "policy" else "right")
    for context, policy in dict.fromkeys((one.context, one.policy) for one in found):
        runs = [one for one in found if (one.context, one.policy) == (context, policy)]
        ratios = [one.of_full for one in runs]
        shares = [statistics.median(one.stages[stage] / one.seconds for one in runs) for stage in STAGES]
        whole = statistics.median(sum(one.stages.values()) / one.seconds for one in runs)
        shown.add_row(
            f"{context:,}",
            policy,
            f"{statistics.median(one.seconds for one in runs):.2f}",
            f"{statistics.median(ratios):.3f}",
            f"{min(ratios):.3f} to {max(ratios):.3f}",
            *(f"{share:.1%}" for share in (whole, *shares)),
        )
    return shown


def main(
    runs: Annotated[int, typer.Option(min=1, help="Rounds at each length.")] = 5,
    budget: Annotated[int, typer.Option(min=1, help="Slots kept a KV head.")] = 512,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write every prefill here.")] = None,
) -> None:
    """Print the table."""
    found = list(measure(runs, budget))
    Console(width=120).print(table(found))
    if json_path:
        json_path.write_text(json.dumps([asdict(one) for one in found], indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
