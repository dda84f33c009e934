"""Prints where each measure of diversity helps: by depth, by what keys and values of a head are like, by content.

Each measure is mixed half and half into SnapKV's importance (8 queries), and what is then kept of a prompt stands
beside what importance alone keeps:

- error: of the attention outputs that the tokens behind the prompt really ask for, squared, as a share of the output,
  in each head of each layer by itself. A ratio below 1 means that the measure helps.
- drift: the KL divergence over those tokens, in nats a token, with the measure in some layers and importance alone in
  the others. A difference below 0 means that it helps. Text only.

    python benchmarks/when_metrics_help.py --content prose --out prose.json
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from einops import einsum, reduce
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from kvpolicy import load, models
from kvpolicy.analysis.views import views
from kvpolicy.attention import each_query
from kvpolicy.eval.drift import compare
from kvpolicy.eval.pictures.prompt import prompt as pictured
from kvpolicy.eval.statistics import interval
from kvpolicy.eval.tasks.pictures import Pictures
from kvpolicy.maths import cosine_redundancy, norms
from kvpolicy.policy import Policy
from kvpolicy.testing.oracle import continuations
from kvpolicy.texts import contexts
from kvpolicy.types import LayerView, Needs, Selection

CONTEXT, NEXT, WINDOW, PARTS = 2048, 64, 8, 6
SINKS, RECENT = 4, 8
ALONE = "importance alone"
MEASURES: dict[str, Any] = {
    "cosine, keys": "cosine-diversity",
    "Euclid, keys": "euclidean-diversity",
    "cosine, before RoPE": {"type": "cosine-diversity", "space": "pre-rope"},
    "Euclid, before RoPE": {"type": "euclidean-diversity", "space": "pre-rope"},
    "cosine, values": {"type": "cosine-diversity", "on": "values"},
    "Euclid, values": {"type": "euclidean-diversity", "on": "values"},
    "value norm": "value-norm",
    "key norm": "key-norm",
}


class Content(StrEnum):
    """What the prompt is made of."""

    PROSE = "prose"
    REPEATED = "repeated"
    PICTURES = "pictures"


def measure(content: Content, samples: int, kept: int) -> list[dict[str, Any]]:
    """Return what was found in each sample: error and likeness by layer and head, drift by measure and part."""
    model, reader = (
        (models.load("tiny-llava")[0], models.load_processor("tiny-llava"))
        if content is Content.PICTURES
        else models.load()
    )
    policies = {ALONE: load("snapkv-w8", budget=kept)} | {name: _mixed(one, kept) for name, one in MEASURES.items()}
    found = []
    for inputs, after in track(list(_prompts(content, reader, samples)), "samples", console=Console(stderr=True)):
        whole = views(model, inputs, Needs(queries=after + WINDOW, pre_rope=True))
        read = [_before(view, after) for view in whole]
        if kept >= read[0].slots:
            raise typer.BadParameter(f"--kept: expected fewer slots than the prompt has, {read[0].slots}, got {kept}")
        plans = {name: policy.plan(read) for name, policy in policies.items()}
        found.append(
            {
                "error": {name: _errors(whole, plan, after) for name, plan in plans.items()},
                "likeness": [_likeness(view) for view in read],
                "drift": {} if content is Content.PICTURES else _drift(model, inputs, plans),
            }
        )
    return found


def _mixed(diversity: Any, kept: int) -> Policy:
    score = {"type": "redundancy-adaptive", "importance": "inherited", "diversity": diversity, "redundancy": 0.5}
    return load({"name": "mixed", "extends": "snapkv-w8", "score": score}, budget=kept)


def _prompts(content: Content, reader: Any, samples: int) -> Iterator[tuple[Any, int]]:
    """Yield what the model reads, and how many of its last tokens stand behind the prompt."""
    if content is Content.PICTURES:
        for asked in Pictures(samples=samples).examples(None, seed=0):  # type: ignore[arg-type]  # it reads no text
            inputs, question = pictured(reader, asked)
            ids = torch.cat([inputs["input_ids"], question], dim=1)
            yield {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}, question.shape[1]
        return
    for ids in contexts(reader, tokens=CONTEXT + NEXT, count=samples):
        quarter = CONTEXT // 4
        repeated = ids[:quarter] * 4 + ids[quarter : quarter + NEXT]
        yield torch.tensor([ids if content is Content.PROSE else repeated]), NEXT


def _before(view: LayerView, after: int) -> LayerView:
    """Return the view of all but the last slots, with the queries before them."""
    asked = (view.keys, view.values, view.queries, view.pre_rope_keys)
    keys, values, queries, before_rope = (part[:, :, :-after] for part in asked if part is not None)
    return LayerView(keys, values, queries, pre_rope_keys=before_rope, layer=view.layer, scaling=view.scaling)


def _errors(whole: Sequence[LayerView], plan: Sequence[Selection], after: int) -> list[list[float]]:
    """Return the squared error of the outputs of each layer and head, as a share of them."""
    found = []
    for view, kept in zip(whole, plan, strict=True):
        visible = torch.cat([kept.to_mask(view.slots - after), view.valid[:, :, -after:]], dim=-1)
        full = _output(view, after)
        off = _output(replace(view, valid=visible), after) - full
        found.append((_square(off) / _square(full)).tolist())
    return found


def _output(view: LayerView, after: int) -> Tensor:
    attention, _ = each_query(view)
    return einsum(attention[:, :, :, -after:], view.values.float(), "b h g w t, b h t d -> b h g w d")


def _square(outputs: Tensor) -> Tensor:
    return reduce(outputs.square(), "1 h g w d -> h", "sum")


def _likeness(view: LayerView) -> dict[str, list[float]]:
    """Return what the vectors of each head that a policy decides on are like."""
    keys, values, before_rope = (
        part[:, :, SINKS:-RECENT].float() for part in (view.keys, view.values, view.pre_rope_keys) if part is not None
    )
    every = torch.ones(keys.shape[:3], dtype=torch.bool)
    lengths, channels = norms(keys), reduce(keys.square(), "b h t d -> b h d", "mean")
    found = {
        "redundancy, keys": cosine_redundancy(keys, every),
        "redundancy, before RoPE": cosine_redundancy(before_rope, every),
        "redundancy, values": cosine_redundancy(values, every),
        "spread of key lengths": lengths.std(-1) / lengths.mean(-1),
        "share of the largest channel": channels.amax(-1) / channels.sum(-1),
    }
    return {name: numbers[0].tolist() for name, numbers in found.items()}


def _drift(model: Any, ids: Tensor, plans: dict[str, Any]) -> dict[str, list[float]]:
    """Return the drift under each measure: in each part of the layers by itself, and in all."""
    alone = plans[ALONE]
    parts = [*_parts(len(alone)), range(len(alone))]
    mixed = [
        [plans[name][layer] if layer in part else alone[layer] for layer in range(len(alone))]
        for name in MEASURES
        for part in parts
    ]
    full, *others = continuations(model, ids[:, :CONTEXT], ids[:, CONTEXT:], [None, alone, *mixed])
    kls = [compare(full, logits).mean for logits in others]
    by_measure = {name: kls[1 + at * len(parts) :][: len(parts)] for at, name in enumerate(MEASURES)}
    return {ALONE: kls[:1], **by_measure}


def _parts(layers: int) -> list[range]:
    size = -(-layers // PARTS)
    return [range(first, min(first + size, layers)) for first in range(0, layers, size)]


def tables(found: list[dict[str, Any]]) -> Iterator[Table]:
    """Yield the tables of what was found."""
    # [samples, layers, heads]
    alone = torch.tensor([one["error"][ALONE] for one in found])
    logs = {name: (torch.tensor([one["error"][name] for one in found]) / alone).log() for name in MEASURES}
    parts = _parts(alone.shape[1])
    titles = [f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    shown = _table("error of attention outputs, of importance alone, by layer", [*titles, "all"])
    for name, log in logs.items():
        means = [float(log[:, list(part)].mean().exp()) for part in [*parts, range(alone.shape[1])]]
        shown.add_row(name, *(f"{mean:.3f}" for mean in means))
    shown.add_row(ALONE, *(f"{float(alone[:, list(part)].mean()):.3f} of output" for part in parts))
    yield shown

    likeness = {
        name: torch.tensor([[layer[name] for layer in one["likeness"]] for one in found]).mean(0).flatten()
        for name in found[0]["likeness"][0]
    }
    shown = _table("the same, by what heads are like: the third with the least of it, the middle, the most", likeness)
    for name, log in logs.items():
        by_head = log.mean(0).flatten()
        thirds = [by_head[order].chunk(3) for order in (of.argsort() for of in likeness.values())]
        shown.add_row(name, *(" ".join(f"{float(third.mean().exp()):.3f}" for third in three) for three in thirds))
    means = [[float(third.mean()) for third in of.sort().values.chunk(3)] for of in likeness.values()]
    shown.add_row("(how much)", *(" ".join(f"{mean:.2f}" for mean in three) for three in means))
    yield shown

    if found[0]["drift"]:
        mean = statistics.fmean(one["drift"][ALONE][0] for one in found)
        shown = _table(f"drift, less {mean:.4f} of importance alone: the measure in these layers", [*titles, "all"])
        for name in MEASURES:
            gaps = [
                interval([one["drift"][name][at] - one["drift"][ALONE][0] for one in found])
                for at in range(len(titles) + 1)
            ]
            shown.add_row(name, *(f"{gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]" for gap in gaps))
        yield shown


def _table(title: str, columns: Iterable[str]) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column("measure")
    for column in columns:
        shown.add_column(column, justify="right")
    return shown


def main(
    content: Annotated[Content, typer.Option(help="What the prompt is made of.")] = Content.PROSE,
    samples: Annotated[int, typer.Option(min=2, help="How many prompts.")] = 10,
    kept: Annotated[int, typer.Option(min=SINKS + RECENT + 1, help="Slots kept a KV head.")] = 128,
    out: Annotated[Path | None, typer.Option(help="Also write what was found in each sample here, as JSON.")] = None,
) -> None:
    """Print the tables."""
    if out:
        out.touch()
    found = measure(content, samples, kept)
    console = Console()
    console.width = max(console.width, 250)
    for table in tables(found):
        console.print(table)
    if out:
        out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    typer.run(main)
