"""``kvpolicy calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpolicy.cli.output import Json, OptionError, print_json
from kvpolicy.cli.run import Dtype, read_prompt

app = typer.Typer(help="Find what a scorer has to know of a model.", no_args_is_help=True)


@app.callback()
def _one_of_several() -> None:
    """Keep the name of the scorer in the command, though there is one alone."""


@app.command("q-filters")
def q_filters(
    file: Annotated[str, typer.Option(metavar="PATH", help="A file that holds the text; - for stdin.")],
    out: Annotated[Path, typer.Option(metavar="PATH", help="Write the filters here, as safetensors.")],
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face id or a folder; default: SmolLM2-135M-Instruct.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="What the model's numbers are stored in.")] = Dtype.FLOAT32,
    length: Annotated[int, typer.Option(min=1, help="How many tokens are read in one pass.")] = 2048,
    samples: Annotated[int, typer.Option(min=1, help="Of how many of them queries count.")] = 3000,
    as_json: Json = False,
) -> None:
    """Have a model read a text, and write the vector that the queries of each KV head have in common.

    The text should be like those that the model will read, and several thousand tokens long.
    """
    text = read_prompt(None, file, None)
    if not out.parent.is_dir() or out.is_dir():
        raise OptionError(f"--out: expected a file in a folder that is there, got {str(out)!r}")

    import torch

    from kvpolicy import calibrate, filters, models
    from kvpolicy.session.decoder import find_decoders

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded, tokenizer = models.load(model, dtype=getattr(torch, dtype), device=device)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0].to(device)
    found = calibrate.q_filters(loaded, ids, length=length, samples=samples)
    made = filters.Made(model or models.DEFAULT, filters.kind(find_decoders(loaded)[0].config), min(samples, len(ids)))
    try:
        filters.write(out, found, made)
    except OSError as error:
        raise OptionError(f"--out: cannot write {str(out)!r}: {error.strerror}") from error
    layers, heads, size = found.shape
    if as_json:
        print_json({"file": str(out), "layers": layers, "kv_heads": heads, "head_size": size, "tokens": made.tokens})
    else:
        typer.echo(f"{out}: {layers} layers of {heads} KV heads of size {size}, from {made.tokens:,} tokens")
