"""What the commands share: the ``--json`` option, how they print, and the error of a wrong option."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvpolicy.errors import KVPolicyError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


class OptionError(KVPolicyError, ValueError):
    """The options of a command are wrong, or do not go together."""


def print_json(value: object) -> None:
    """Print `value` as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_rich(value: RenderableType) -> None:
    """Print a table or a tree on stdout, folded to its width."""
    _console().print(value)


def columns() -> int:
    """Return how wide stdout is: that of the terminal; of a pipe or a file, so wide that a row stays on one line."""
    return _console().width


def _console() -> Console:
    from rich.console import Console

    # What is printed is the user's text as it is, brackets and colons included.
    console = Console(markup=False, emoji=False, highlight=False)
    # Into a pipe or a file a row stays on one line, so that a search finds it whole.
    console.width = console.width if console.is_terminal else 250
    return console


def progress_bar() -> Progress:
    """Return a bar on stderr with the time left, gone when it ends; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
