"""The command line. Each command loads what it needs when it runs, so that the light ones start fast."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from kvpolicy.cli.listing import list_plugins
from kvpolicy.cli.run import run
from kvpolicy.cli.schema import schema
from kvpolicy.cli.show import show
from kvpolicy.cli.validate import validate
from kvpolicy.errors import KVPolicyError


class _Group(TyperGroup):
    """Ends a command that its user got wrong with one message and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KVPolicyError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Group,
    help="KV-cache eviction policies for Hugging Face decoders: see, check and run them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run)
app.command("list")(list_plugins)
app.command("show")(show)
app.command("validate")(validate)
app.command("schema")(schema)
