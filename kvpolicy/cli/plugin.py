"""``kvpolicy plugin``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from kvpolicy.cli import scaffold
from kvpolicy.cli.output import Json, OptionError, print_json
from kvpolicy.errors import PluginError

app = typer.Typer(help="Write plugins of your own.", no_args_is_help=True)


class Kind(StrEnum):
    """What a new package can offer."""

    SCORER = "scorer"
    COMBINER = "combiner"
    LAYER_BUDGET = "layer-budget"
    HEAD_BUDGET = "head-budget"
    SELECTOR = "selector"
    EVICTED = "evicted"
    STORE = "store"
    POLICY = "policy"


class Role(StrEnum):
    """What a new scorer can measure."""

    IMPORTANCE = "importance"
    DIVERSITY = "diversity"
    OTHER = "other"


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="What policy files will call it, such as my-score.")],
    kind: Annotated[Kind, typer.Option(help="What it is.")] = Kind.SCORER,
    role: Annotated[Role | None, typer.Option(help="What a scorer measures; default: importance.")] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write it; default: kvpolicy-NAME, here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a package with a plugin that works, to put your own maths into."""
    if role is not None and kind is not Kind.SCORER:
        raise OptionError(f"--role: expected none, as a {scaffold.KINDS[kind.value].what} has no role, got '{role}'")
    texts = scaffold.package(name, kind.value, (role or Role.IMPORTANCE).value)
    _refuse_if_taken(name, scaffold.KINDS[kind.value])
    into = Path(f"kvpolicy-{name}") if folder is None else folder
    scaffold.write(into, texts)
    commands = [
        f"pip install --editable {quote(f'{into}[test]')}",
        f"pytest {quote(str(into))}",
        f"kvpolicy show {quote(str(into / 'example.yaml'))}",
    ]
    if as_json:
        print_json({"folder": str(into), "files": [str(into / path) for path in texts], "next": commands})
        return
    for path in texts:
        typer.echo(f"wrote {into / path}")
    typer.echo("\nNext:")
    for command in commands:
        typer.echo(f"  {command}")


def _refuse_if_taken(name: str, kind: scaffold.Kind) -> None:
    """Raise where an installed plugin has the name already: the two could not both be loaded."""
    from kvpolicy.loading import built_in
    from kvpolicy.registry import Registry, registry

    try:
        known = registry()
    except PluginError as error:
        typer.echo(f"warning: {name!r} is compared with kvpolicy's own names alone: {error}", err=True)
        known = Registry(built_in())
    if name in known.names(kind.place):
        raise OptionError(f"expected a new name, got {name!r}, which {known.get(kind.place, name).origin} offers")
