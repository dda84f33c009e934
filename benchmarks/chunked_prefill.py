"""Prints the peak memory of a long prompt on SmolLM2-135M-Instruct: in one pass or in chunks, evicting or not.

Each way runs in a process of its own. Two figures, both peaks over the prompt:

- `cache`: bytes of keys and values that the cache holds, read from storage whenever a layer has added its new
  tokens, and so before it evicts;
- `process`: how much the process grows beyond what it holds with the model loaded and warmed up (activations, masks and
  the allocator's slack besides the cache).

    python benchmarks/chunked_prefill.py --tokens 8192 --chunk 512 --budget 512
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache

from kvpolicy import load, models
from kvpolicy.session.decoder import cache_name
from kvpolicy.store.layer import EvictingLayer
from kvpolicy.texts import contexts

WAYS: dict[str, tuple[str | None, bool]] = {
    "full cache, one pass": (None, False),
    "full cache, in chunks": (None, True),
    "evicts, one pass": ("whole", False),
    "evicts at the end of the chunks": ("whole", True),
    "evicts at each chunk": ("chunks", True),
}
"""Way -> when it evicts, None for never, and whether the prompt is read in chunks."""


@dataclass(frozen=True)
class Peak:
    """One way to read a prompt.

    Args:
        way: one of `WAYS`.
        cache: most bytes of keys and values that the cache held.
        process: most bytes that the process grew by.
        seconds: of the prompt.
        left: bytes of keys and values that the cache holds after the prompt.
    """

    way: str
    cache: int
    process: int
    seconds: float
    left: int


def measure(way: str, tokens: int, chunk: int, budget: int, policy: str) -> Peak:
    """Return the peaks of one way, in this process."""
    evicts, chunked = WAYS[way]
    model, tokenizer = models.load()
    ids = torch.tensor(contexts(tokenizer, tokens=tokens, count=1))
    with torch.no_grad():
        model(ids[:, :chunk], logits_to_keep=1)  # what a first pass loads is not the prompt's
    before, most = _resident(), 0
    cache = DynamicCache(config=model.config)

    update = cache.update

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal most
        found = update(*args, **kwargs)
        most = max(most, _held(cache))
        return found

    cache.update = watched  # type: ignore[method-assign]
    settings: dict[str, Any] = {cache_name(model): cache, "max_new_tokens": 1, "do_sample": False}
    if chunked:
        settings["prefill_chunk_size"] = chunk
    session = nullcontext() if evicts is None else load(policy, budget=budget, prefill=evicts).on(model)
    started = time.perf_counter()
    with session:
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    seconds = time.perf_counter() - started
    return Peak(way, most, max(_resident() - before, 0), seconds, _held(cache))


def _held(cache: DynamicCache) -> int:
    total = 0
    for layer in cache.layers:
        if isinstance(layer, EvictingLayer):
            total += 0 if layer.store is None else layer.store.nbytes[0]
        elif layer.is_initialized:
            total += layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes()
    return total


def _resident() -> int:
    """Return the most bytes this process has ever held; Linux counts in kilobytes, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def table(found: list[Peak]) -> Table:
    """Return the peaks, one row a way."""
    shown = Table("way", "cache MB", "of full", "process MB", "seconds", "cache after MB")
    whole = found[0].cache
    for one in found:
        megabytes = (f"{one.cache / 2**20:.1f}", f"{one.cache / whole:.3f}", f"{one.process / 2**20:.0f}")
        shown.add_row(one.way, *megabytes, f"{one.seconds:.1f}", f"{one.left / 2**20:.1f}")
    return shown


def main(
    tokens: Annotated[int, typer.Option(min=16, help="Of the prompt.")] = 8192,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 512,
    budget: Annotated[int, typer.Option(min=16, help="Slots a KV head.")] = 512,
    policy: Annotated[str, typer.Option(help="What is kept.")] = "snapkv-w8",
    out: Annotated[Path | None, typer.Option(help="Also write the figures here, as JSON.")] = None,
    way: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print the peak memory of a long prompt, read in several ways."""
    if way is not None:
        print(json.dumps(asdict(measure(way, tokens, chunk, budget, policy))))
        return
    options = ["--tokens", str(tokens), "--chunk", str(chunk), "--budget", str(budget), "--policy", policy]
    found = []
    for each in track(WAYS, console=Console(stderr=True)):
        command = [sys.executable, __file__, *options, "--way", each]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(Peak(**json.loads(ended.stdout.splitlines()[-1])))
    Console().print(table(found))
    if out is not None:
        out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
