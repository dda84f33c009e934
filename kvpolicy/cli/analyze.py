"""``kvpolicy analyze``."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.output import Json, OptionError, print_json, print_rich
from kvpolicy.cli.run import Dtype, load_policy, read_prompt
from kvpolicy.errors import UnsupportedModelError, not_installed

if TYPE_CHECKING:
    from rich.table import Table

    from kvpolicy.analysis.plots import Picture
    from kvpolicy.analysis.result import Analysis
    from kvpolicy.policy import Policy

DEFAULT = "SmolLM2-135M-Instruct"


class Data(StrEnum):
    """What the numbers behind a report are written as."""

    JSON = "json"
    PARQUET = "parquet"


def analyze(
    prompt: Annotated[str | None, typer.Option(help="The text.")] = None,
    file: Annotated[str | None, typer.Option(metavar="PATH", help="A file that holds it; - for stdin.")] = None,
    question: Annotated[str | None, typer.Option(help="Text that comes after it.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="A picture, for a vision-language model, before the text or where it has <image>; repeatable."
        ),
    ] = None,
    policies: Annotated[
        str, typer.Option(help="Names of policies, or paths of policy files, with commas between them.")
    ] = "snapkv,ecokv-snapkv",
    budget: Annotated[str | None, typer.Option(help="Slots a KV head (512) or a share (0.25).")] = None,
    model: Annotated[str | None, typer.Option(help=f"A Hugging Face id or a folder; default: {DEFAULT}.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="What the model's numbers are stored in.")] = Dtype.FLOAT32,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write report.html and the numbers behind it here.")
    ] = None,
    data: Annotated[
        Data, typer.Option(help="How --out writes them: analysis.json, or a .parquet a table.")
    ] = Data.JSON,
    as_json: Json = False,
) -> None:
    """Show what a model's keys and values are like on a text, and what policies keep of it.

    The text is read as it is, not as a chat, but for a prompt with pictures where the model has a template. With --out
    also: a page to look at, with text and pictures coloured by how many heads keep each token.
    """
    text = read_prompt(prompt, file, question)
    chosen = _policies(policies, budget)
    if out is not None:
        _check_out(out, data)
    elif data is Data.PARQUET:
        raise OptionError("--data parquet: expected --out with it, the folder for the files, got none")
    if image:
        _require("--image: reading pictures", "Pillow", "PIL", "eval")

    import torch

    from kvpolicy import models
    from kvpolicy.analysis.analyze import analyze as measure
    from kvpolicy.analysis.pieces import pieces
    from kvpolicy.analysis.prompts import ask, read_image
    from kvpolicy.texts import too_many_unknown

    images = [read_image(path) for path in image or ()]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # First, as it is quick to say that the model sees nothing.
    processor: Any = models.load_processor(model) if images else None
    loaded, tokenizer = models.load(model, dtype=getattr(torch, dtype), device=device)
    inputs: Any = ask(processor, text, images).to(loaded.dtype) if images else tokenizer(text, return_tensors="pt")
    ids = inputs["input_ids"][0].tolist()
    if unknown := too_many_unknown(tokenizer, ids):
        raise OptionError(
            f"--model: expected one that knows the words of the text, got one to which {unknown} of {len(ids)} are "
            "unknown: choose another model, or words that it knows"
        )
    tokens = pieces(tokenizer, ids)
    found = measure(loaded, inputs, chosen, tokens=tokens, name=model or DEFAULT)
    if out is not None:
        drawn: list[Picture] = []
        if images:
            found, drawn = _draw(found, loaded.config, processor, inputs, images)
        _write(found, drawn, out, data)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found, out)


def _policies(names: str, budget: str | None) -> list[Policy]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise OptionError(f"--policies: expected names with commas between them, got {names!r}")
    return [load_policy(name, budget) for name in wanted]


def _check_out(out: Path, data: Data) -> None:
    """Raise where the report could not be made, before a minute is spent on what would be in it."""
    _require("--out: drawing the report", "matplotlib", "matplotlib", "eval")
    if data is Data.PARQUET:
        _require("--data parquet", "pyarrow", "pyarrow", "parquet")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise _unwritable(out, error) from error


def _require(what: str, package: str, module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise OptionError(not_installed(what, package, extra))


def _draw(
    found: Analysis, config: Any, processor: Any, inputs: Any, images: Sequence[Any]
) -> tuple[Analysis, list[Picture]]:
    """Return the images with what is kept of them, or the analysis with a note that says why they cannot be drawn."""
    from kvpolicy.analysis.analyze import AnalysisError
    from kvpolicy.analysis.images import as_seen, grids, on_images

    try:
        where = grids(config, inputs)
    except (AnalysisError, UnsupportedModelError) as error:
        return replace(found, notes=[*found.notes, f"what is kept is not drawn on the images: {error}"]), []
    return found, list(on_images(found, as_seen(processor, inputs, images), where))


def _write(found: Analysis, drawn: Sequence[Picture], out: Path, data: Data) -> None:
    from kvpolicy.analysis.page import page
    from kvpolicy.files import whole

    try:
        if data is Data.PARQUET:
            from kvpolicy.analysis.tables import write

            write(found, out)
        else:
            with whole(out / "analysis.json") as partial:
                text = json.dumps(found.to_dict(), ensure_ascii=False, allow_nan=False)
                partial.write_text(f"{text}\n", encoding="utf-8")
        with whole(out / "report.html") as partial:
            partial.write_text(page(found, drawn), encoding="utf-8")
    except OSError as error:
        raise _unwritable(out, error) from error


def _unwritable(out: Path, error: OSError) -> OptionError:
    return OptionError(f"--out: expected a folder to write into, got {str(out)!r}: {error.strerror}")


def _print(found: Analysis, out: Path | None) -> None:
    typer.echo(f"{found.model}: {len(found.tokens):,} tokens, {len(found.layers)} layers to evict from")
    print_rich(_likeness(found))
    print_rich(_kept(found))
    for note in found.notes:
        typer.echo(f"note: {note}")
    if out is not None:
        typer.echo(f"report: {out / 'report.html'}")


def _likeness(found: Analysis) -> Table:
    """Return a table of how alike vectors are, mean of all heads."""
    table = _table("mean of all heads", "slots that hold", "redundancy, cosine", "redundancy, Euclid", "anisotropy")
    for one in found.likeness:
        means = (_mean(by_head) for by_head in (one.cosine, one.euclidean, one.anisotropy))
        table.add_row(one.of, "anything" if one.slots == "all" else one.slots, *(f"{mean:.3f}" for mean in means))
    table.caption = f"rank correlation of importance and diversity: {_mean(found.balance.correlation):+.3f}"
    table.caption_justify = "left"
    return table


def _kept(found: Analysis) -> Table:
    """Return a table of what policies keep, and have in common."""
    table = _table("policy", "kept a head", *(f"overlap with {one.policy}" for one in found.kept))
    shared = {frozenset(pair.policies): pair.mean for pair in found.overlap}
    for one in found.kept:
        pairs = (shared.get(frozenset((one.policy, other.policy))) for other in found.kept)
        table.add_row(
            one.policy, f"{_mean(one.lengths):,.1f}", *("" if pair is None else f"{pair:.3f}" for pair in pairs)
        )
    return table


def _mean(by_head: list[list[float]] | list[list[int]]) -> float:
    every = [value for layer in by_head for value in layer]
    return sum(every) / len(every)


def _table(first: str, *headings: str) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table
