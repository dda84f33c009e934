"""The command line. Each command loads what it needs when it runs, so that the light ones start fast."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvpolicy.cli import calibrate, plugin
from kvpolicy.cli.analyze import analyze
from kvpolicy.cli.bench import bench
from kvpolicy.cli.doctor import doctor
from kvpolicy.cli.eval import evaluate
from kvpolicy.cli.listing import list_plugins
from kvpolicy.cli.plan import plan
from kvpolicy.cli.report import report
from kvpolicy.cli.run import run
from kvpolicy.cli.schema import schema
from kvpolicy.cli.show import show
from kvpolicy.cli.tune import tune
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


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"kvpolicy {version('kvpolicy')}")
        raise typer.Exit


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """KV-cache eviction policies for Hugging Face decoders: see, check and run them."""


app.command("run")(run)
app.command("list")(list_plugins)
app.command("show")(show)
app.command("validate")(validate)
app.command("schema")(schema)
app.command("doctor")(doctor)
app.command("plan")(plan)
app.command("analyze")(analyze)
app.command("eval")(evaluate)
app.command("report")(report)
app.command("bench")(bench)
app.command("tune")(tune)
app.add_typer(calibrate.app, name="calibrate")
app.add_typer(plugin.app, name="plugin")
