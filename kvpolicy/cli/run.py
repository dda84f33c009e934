"""``kvpolicy run``."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.output import Json, OptionError, print_json

if TYPE_CHECKING:
    from kvpolicy.policy import Policy
    from kvpolicy.report import Report


class Dtype(StrEnum):
    """What the model's numbers are stored in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Attention(StrEnum):
    """Which of the model's own attention functions it is loaded with."""

    SDPA = "sdpa"
    EAGER = "eager"
    FLEX = "flex_attention"


def run(
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    file: Annotated[str | None, typer.Option(metavar="PATH", help="A file that holds it; - for stdin.")] = None,
    question: Annotated[str | None, typer.Option(help="Text that comes after it.")] = None,
    policy: Annotated[str, typer.Option(help="A policy's name, or the path of a policy file.")] = "ecokv-snapkv",
    budget: Annotated[str | None, typer.Option(help="Slots a KV head (512) or a share (0.25).")] = None,
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face id or a folder; default: SmolLM2-135M-Instruct.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to generate at most.")] = 64,
    dtype: Annotated[Dtype, typer.Option(help="What the model's numbers are stored in.")] = Dtype.FLOAT32,
    attention: Annotated[Attention, typer.Option(help="The model's own attention.")] = Attention.SDPA,
    chat: Annotated[bool, typer.Option(help="Put the prompt as a chat, where the model has a template.")] = True,
    as_json: Json = False,
) -> None:
    """Generate from a prompt under a policy, then report what was kept."""
    text = read_prompt(prompt, file, question)
    chosen = load_policy(policy, budget)

    import torch

    from kvpolicy import models

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any  # transformers adds `generate` to its models in a way that type checkers do not follow
    loaded, tokenizer = models.load(
        model, dtype=getattr(torch, dtype), attn_implementation=attention.value, device=device
    )
    inputs = _tokens(tokenizer, text, chat).to(device)
    with torch.inference_mode(), chosen.on(loaded) as session:
        output = loaded.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    prompt_tokens = inputs["input_ids"].shape[1]
    generated = tokenizer.decode(output[0, prompt_tokens:], skip_special_tokens=True)
    if as_json:
        counts = {"prompt_tokens": prompt_tokens, "new_tokens": output.shape[1] - prompt_tokens}
        print_json({"text": generated, **counts, "report": session.report.to_dict()})
    else:
        typer.echo(f"{generated}\n\n{session.report}")
    if not chosen.trivial and _kept_all(session.report):
        typer.echo(
            f"note: nothing was evicted, as the budget holds the whole prompt of {prompt_tokens} tokens: "
            "give a longer one, or a smaller --budget",
            err=True,
        )


def _kept_all(report: Report) -> bool:
    """Return whether every head holds all the tokens that were seen."""
    layers = report.layers.values()
    return bool(layers) and all(slots == one.seen for one in layers for row in one.kept for slots in row)


def read_prompt(prompt: str | None, file: str | None, question: str | None) -> str:
    """Return the text to go on from: the prompt or the file's text, then the question.

    Raises:
        OptionError: when there is no text, or not exactly one source of it.

    >>> read_prompt("Some text.", None, "What is it?")
    'Some text.\\n\\nWhat is it?'
    """
    if (prompt is None) == (file is None):
        raise OptionError(f"expected exactly one of --prompt and --file, got {'none' if file is None else 'both'}")
    text = prompt if file is None else read_file(file)
    if not text or not text.strip():
        raise OptionError(
            "expected text in --prompt, got none" if file is None else f"expected text in {file!r}, got none"
        )
    return text if question is None else f"{text.rstrip()}\n\n{question}"


def read_file(file: str) -> str:
    """Return the text of a file, or of stdin for ``-``."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise OptionError(f"cannot read {file!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"expected UTF-8 text in {file!r}, got the byte 0x{error.object[error.start]:02x}") from error


def load_policy(name: str, budget: str | None) -> Policy:
    """Return a policy at the budget of the option ``--budget``, or at its own."""
    from kvpolicy.config import load_at

    return load_at(name, read_budget(budget), f"--budget: policy {name!r}")


def read_budget(text: str | None, option: str = "--budget") -> int | float | None:
    """Return an option as a number: whole slots, or a share.

    Raises:
        OptionError: when it is none.

    >>> read_budget("512"), read_budget("0.25"), read_budget(None)
    (512, 0.25, None)
    """
    if text is None:
        return None
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    raise OptionError(f"{option}: expected whole slots (512) or a share (0.25), got {text!r}")


def _tokens(tokenizer: Any, text: str, chat: bool) -> Any:
    """Return the model's inputs for a text, a batch of one."""
    if not (chat and tokenizer.chat_template):
        return tokenizer(text, return_tensors="pt")
    message = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
