"""The demo: one long text, one question about it, the full cache and evicting policies side by side.

``python -m kvpolicy.eval.demo``
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from kvpolicy import load, models
from kvpolicy.errors import KVPolicyError
from kvpolicy.eval.drift import drift, full_logits
from kvpolicy.policy import Policy
from kvpolicy.texts import contexts

POLICIES = ("snapkv", "mixkv-snapkv", "ecokv-snapkv", "ecokv-ada-kv")
NEXT = 64
"""Tokens of the text over which drift is measured."""
ANSWER = 24
"""Tokens an answer may have."""
FACT = "The secret code of the lighthouse is 4817."
QUESTION = "What is the secret code of the lighthouse?"
EXPECTED = "4817"


@dataclass(frozen=True)
class Task:
    """What every policy is given.

    Args:
        context: int64 ``[1, T]``, the beginning of a text.
        continuation: int64 ``[1, NEXT]``, how the text goes on.
        prompt: int64 ``[1, P]``, a chat: the same beginning with `FACT` in its middle, then `QUESTION`.
    """

    context: Tensor
    continuation: Tensor
    prompt: Tensor


@dataclass(frozen=True)
class Row:
    """What one policy did. Slots and bytes are those held once the prompt is read and the first token is out.

    Args:
        policy: its name.
        seen: tokens of the prompt.
        kept: slots kept a KV head, mean over heads and layers.
        bytes: of keys and values, read from their storage.
        bytes_full: what keys and values of all tokens seen would hold.
        drift: mean KL divergence from the full cache over the text's next tokens, nats a token.
        agreement: share of those tokens at which both find the same one the most likely.
        answer: what the model answers, greedily.
        prompt_seconds: from the start of `generate` to the answer's first token.
        token_seconds: from one token of the answer to the next, median; None where it has but one.
    """

    policy: str
    seen: int
    kept: float
    bytes: int
    bytes_full: int
    drift: float
    agreement: float
    answer: str
    prompt_seconds: float
    token_seconds: float | None


class _Watch:
    """A streamer: notes when each token comes, and what `hold` returns once the prompt is read."""

    def __init__(self, hold: Callable[[], dict[str, Any]]) -> None:
        self._hold = hold
        self.times: list[float] = []
        self.held: dict[str, Any] = {}

    def put(self, tokens: Tensor) -> None:
        """Take the prompt, then each new token."""
        self.times.append(time.perf_counter())
        if len(self.times) == 2:
            self.held = self._hold()

    def end(self) -> None:
        """Take note that no more tokens come."""


def make_task(tokenizer: Any, tokens: int) -> Task:
    """Return the task with `tokens` tokens of real English text as its context."""
    ids = contexts(tokenizer, tokens=tokens + NEXT, count=1)[0]
    text = tokenizer.decode(ids[:tokens])
    middle = max(text.rfind("\n\n", 0, len(text) // 2), 0)  # between two paragraphs
    question = f"{text[:middle]}\n\n{FACT}{text[middle:]}\n\n{QUESTION}"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    return Task(torch.tensor([ids[:tokens]]), torch.tensor([ids[tokens:]]), prompt)


def measure(model: Any, tokenizer: Any, policy: Policy, task: Task, full: Tensor) -> Row:
    """Return what `policy` did with the task; `full` is what `full_logits` returns for its context and continuation."""
    with policy.on(model) as run:
        watch = _Watch(lambda: run.report.to_dict())
        output = model.generate(task.prompt, max_new_tokens=ANSWER, do_sample=False, streamer=watch)
    kept = [count for layer in watch.held["layers"] for row in layer["kept"] for count in row]
    pauses = [after - before for before, after in zip(watch.times[1:], watch.times[2:], strict=False)]
    strayed = drift(model, policy, task.context, task.continuation, full=full)
    return Row(
        policy=policy.name,
        seen=watch.held["layers"][0]["seen"],
        kept=statistics.fmean(kept),
        bytes=watch.held["bytes"],
        bytes_full=watch.held["bytes_full"],
        drift=strayed.mean,
        agreement=strayed.agreement,
        answer=tokenizer.decode(output[0, task.prompt.shape[1] :], skip_special_tokens=True).strip(),
        prompt_seconds=watch.times[1] - watch.times[0],
        token_seconds=statistics.median(pauses) if pauses else None,
    )


def table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table, a line a policy, that fits 80 columns."""
    found = Table(title=f"a prompt of {rows[0].seen:,} tokens", title_justify="left")
    found.add_column("policy", no_wrap=True)
    for heading in ("slots kept a head", "KV MB", "of full", "drift, nats", "same token", "prompt s", "ms a token"):
        found.add_column(heading, justify="right")
    for row in rows:
        found.add_row(
            row.policy,
            f"{row.kept:,.6g}",
            f"{row.bytes / 1e6:,.1f}",
            f"{row.bytes / row.bytes_full:.1%}",
            f"{row.drift:.3f}",
            f"{row.agreement:.0%}",
            f"{row.prompt_seconds:.1f}",
            "-" if row.token_seconds is None else f"{row.token_seconds * 1000:.0f}",
        )
    return found


def answers(rows: Sequence[Row]) -> Table:
    """Return the question and the answer under each policy."""
    found = Table.grid(padding=(0, 2))
    found.add_row("question", QUESTION)
    for row in rows:
        found.add_row(row.policy, escape(" ".join(row.answer.split())))  # a model may well say [b]
    return found


def explanation(rows: Sequence[Row]) -> str:
    """Return what the table shows, in a few plain sentences."""
    full, *evicting = rows
    right = ", ".join(row.policy for row in rows if EXPECTED in row.answer) or "none"
    nearest = min(evicting, key=lambda row: row.drift)
    return (
        f"All read the same {full.seen:,} tokens; '{full.policy}' kept them all. "
        f"{EXPECTED} stood in the middle; found by: {right}.\n"
        f"Drift: the KL divergence from the full cache over the text's next {NEXT} tokens; 0 is no change. "
        f"Least: {nearest.policy}, with {nearest.bytes / nearest.bytes_full:.1%} of the bytes. "
        "Same token: how often both find the same next token the likeliest.\n"
        "One text and one question are an example; benchmarks/drift_table.py averages over texts."
    )


def main(
    context: Annotated[int, typer.Option(min=64, help="Tokens of the text.")] = 4096,
    budget: Annotated[int, typer.Option(help="Slots kept a KV head, mean over heads and layers.")] = 512,
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy's name or file, again for each; beside the full cache.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the rows here.")] = None,
) -> None:
    """Show the full cache and evicting policies side by side on a small real model."""
    try:
        policies = [load("full"), *(load(name, budget=budget) for name in policy or POLICIES)]
        rows = run(policies, context)
    except KVPolicyError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    console = Console(highlight=False)
    for part in (table(rows), answers(rows), explanation(rows)):
        console.print(part, "")
    if json_path:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def run(policies: Sequence[Policy], context: int) -> list[Row]:
    """Return a row for each policy, on the default model, with a progress bar on the way."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    rows = []
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("loading the model", total=len(policies) + 1)
        model, tokenizer = models.load()
        task = make_task(tokenizer, context)
        progress.update(bar, description="full cache, for reference")
        full = full_logits(model, task.context, task.continuation)
        progress.advance(bar)
        for policy in policies:
            progress.update(bar, description=policy.name)
            rows.append(measure(model, tokenizer, policy, task, full))
            progress.advance(bar)
    return rows


if __name__ == "__main__":
    typer.run(main)
