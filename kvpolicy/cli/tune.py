"""``kvpolicy tune``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.eval import read_texts
from kvpolicy.cli.output import Json, OptionError, print_json, print_rich, progress_bar
from kvpolicy.cli.run import Attention, Dtype, read_budget

if TYPE_CHECKING:
    from rich.table import Table

    from kvpolicy.eval.tasks.example import Stretch
    from kvpolicy.tune.outcome import Outcome
    from kvpolicy.tune.record import Record
    from kvpolicy.tune.search import Refusal, Trial
    from kvpolicy.tune.space import Space


def tune(
    file: Annotated[Path, typer.Argument(metavar="SPACE", help="A policy file with a mapping 'search' as well.")],
    out: Annotated[Path, typer.Option(help="The policy file to write; what is measured goes beside it, as .jsonl.")],
    budget: Annotated[
        str | None, typer.Option(help="Slots a KV head (512) or a share (0.25); default: the policy's own.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="How many policies to try besides the one as it is.")] = 60,
    samples: Annotated[int, typer.Option(min=1, help="How many texts to search on.")] = 8,
    held_out: Annotated[int, typer.Option(min=2, help="How many other texts to show on what was found.")] = 24,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each text before its continuation.")] = 1024,
    seed: Annotated[int, typer.Option(min=0, help="What decides by chance in the search.")] = 0,
    text: Annotated[Path | None, typer.Option(help="A text file; default: pydoc_data.topics of Python.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face id or a folder; default: SmolLM2-135M-Instruct.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="What the model's numbers are stored in.")] = Dtype.FLOAT32,
    attention: Annotated[Attention, typer.Option(help="The model's own attention.")] = Attention.SDPA,
    as_json: Json = False,
) -> None:
    """Search a policy's settings for the least drift from the full cache, and show the best on text held out.

    Writes a policy file that says where it is from. Interrupted, the same command goes on where it stopped.
    """
    from kvpolicy.tune.read import read_space
    from kvpolicy.tune.search import require

    require()
    space = read_space(file, read_budget(budget))
    _check_out(out)

    from kvpolicy import models
    from kvpolicy.eval.worker import BenchSpec
    from kvpolicy.tune.halves import halves
    from kvpolicy.tune.policy_file import provenance, write_policy
    from kvpolicy.tune.record import Record

    texts = read_texts(text)
    bench = BenchSpec(model or models.DEFAULT, tuple(texts), dtype.value, attention.value).bench()
    searched, kept_back = (
        _stretches(option, bench.tokenizer, half, length, count)
        for option, half, count in zip(("--samples", "--held-out"), halves(texts), (samples, held_out), strict=True)
    )
    record = Record(bench, out.with_suffix(".jsonl"))
    try:
        found = _search(space, record, searched, kept_back, trials, seed)
    except KeyboardInterrupt:
        typer.echo(
            f"Interrupted. What was measured is in {record.file}; the same command goes on from there.", err=True
        )
        raise typer.Exit(130) from None
    options = {
        "--budget": budget,
        "--trials": trials,
        "--samples": samples,
        "--held-out": held_out,
        "--length": length,
        "--seed": seed,
        "--text": text,
        "--model": model,
        "--dtype": dtype.value,
        "--attention": attention.value,
    }
    write_policy(found.policy(out), provenance(found, bench, texts, _command(file, out, options)), out)
    if as_json:
        print_json({"file": str(out), "record": str(record.file), **found.to_dict()})
    else:
        _print(found, out, record)


def _check_out(out: Path) -> None:
    """Raise where the policy could not be written, before an hour is spent on it."""
    if out.suffix not in (".yaml", ".yml"):
        raise OptionError(f"--out: expected a new file that ends in .yaml, got {str(out)!r}")
    if out.exists():
        raise OptionError(
            f"--out: expected a new file, got {str(out)!r}, which is there: move it away, or name another"
        )
    if not out.parent.is_dir():
        raise OptionError(f"--out: expected a file in a folder that is there, found no {str(out.parent)!r}")


def _stretches(option: str, tokenizer: Any, texts: Sequence[str], length: int, count: int) -> list[Stretch]:
    from kvpolicy.eval.tasks.drift import DriftTask
    from kvpolicy.eval.tasks.haystack import Haystack
    from kvpolicy.texts import TextError

    try:
        return DriftTask(length=length, samples=count).examples(Haystack(tokenizer, tuple(texts)), seed=0)
    except TextError as error:
        raise OptionError(f"{option}: {error} It is half of the text, as the other half is kept apart.") from error


def _command(file: Path, out: Path, options: Mapping[str, object]) -> str:
    given = [(name, str(value)) for name, value in options.items() if value is not None]
    return shlex.join(["kvpolicy", "tune", str(file), "--out", str(out), *(word for pair in given for word in pair)])


def _search(
    space: Space, record: Record, searched: list[Stretch], held_out: list[Stretch], trials: int, seed: int
) -> Outcome:
    """Return what is found, with a progress bar."""
    from kvpolicy.tune.outcome import Outcome
    from kvpolicy.tune.search import best, search

    tried: list[Trial | Refusal] = []
    with progress_bar() as progress:
        bar = progress.add_task("the policy as it is", total=(1 + trials) * len(searched) + 2 * len(held_out))

        for trial in search(space, record.kl, searched, trials=trials, seed=seed):
            tried.append(trial)
            least = f"least drift {best(tried).mean:.3f}, trial {best(tried).number}"
            progress.update(bar, advance=len(searched), description=least)
        progress.update(bar, description="text held out")
        pairs = []
        for text in held_out:
            pairs.append((record.kl(space.base, text), record.kl(best(tried).policy, text)))
            progress.advance(bar, 2)
    base, tuned = zip(*pairs, strict=True)
    return Outcome(space, tuple(tried), base, tuned)


def _print(found: Outcome, out: Path, record: Record) -> None:
    counts = ", ".join(f"{count} {name}" for name, count in found.counts.items())
    typer.echo(f"{found.space.base.name}: {counts}")
    print_rich(_settings(found))
    print_rich(_drift(found))
    typer.echo(_verdict(found))
    for reason, count in found.refusals.items():
        typer.echo(f"note: {count} refused: {reason}")
    typer.echo(f"wrote {out}; what was measured is in {record.file}")


def _settings(found: Outcome) -> Table:
    from rich.table import Table

    from kvpolicy.config.source import show

    table = Table("setting", "tried", "as it is", "tuned")
    for place, values in found.settings.items():
        table.add_row(place, *map(show, values.values()))
    return table


def _drift(found: Outcome) -> Table:
    from rich.table import Table

    from kvpolicy.eval.show import span

    table = Table("drift, nats a token", "texts", "as it is", "tuned", "difference")
    for name, one in (("searched", found.searched), ("held out", found.held_out)):
        spans = span(one.base), span(one.tuned), span(one.difference, signed=True)
        table.add_row(name, str(one.texts), *spans)
    return table


def _verdict(found: Outcome) -> str:
    from kvpolicy.eval.statistics import LEAST

    if found.best.number == 0:
        return "Nothing that was tried drifts less than the policy as it is."
    shown = found.held_out.shown
    if found.held_out.texts < LEAST:
        return f"Not shown to be better: with fewer than {LEAST} texts --held-out, intervals are too narrow to say so."
    if shown == "nothing":
        return "Not shown to be better: on text held out, the 95% interval of the difference holds 0."
    return f"On text held out, the tuned policy is {shown}: the 95% interval of the difference does not hold 0."
