"""``kvpolicy schema``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpolicy.cli.output import print_json


def schema(
    as_json: Annotated[bool, typer.Option("--json", help="Changes nothing: the schema is JSON.")] = False,
) -> None:
    """Print the JSON schema of policy files, for editors, with every installed plugin."""
    from kvpolicy.config import schema

    print_json(schema())
