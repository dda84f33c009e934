"""``kvpolicy validate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.cli.output import Json, print_json, print_rich


def validate(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Policy files.")], as_json: Json = False
) -> None:
    """Check policy files; exit with 2 when any of them is wrong."""
    results = [_check(path) for path in paths]
    if as_json:
        print_json(results)
    else:
        _print_table(results)
        for result in results:
            if not result["ok"]:
                typer.echo(f"error: {result['error']}", err=True)
    if not all(result["ok"] for result in results):
        raise typer.Exit(2)


def _check(path: Path) -> dict[str, Any]:
    """Return whether the file at `path` is a policy, and what is wrong where if not."""
    from kvpolicy import load
    from kvpolicy.errors import PolicyFileError

    try:
        policy = load(path)
    except PolicyFileError as error:
        place = {"file": error.file, "line": error.line, "column": error.column}
        return {"path": str(path), "ok": False, "error": f"{error}{_if_a_name(path)}", **place}
    return {"path": str(path), "ok": True, "policy": policy.name}


def _if_a_name(path: Path) -> str:
    """Return what to do instead where `path` is the name of a registered policy and no file."""
    from kvpolicy.registry import registry

    name = str(path)
    if name not in registry().names("policy") or path.exists():
        return ""
    return f" That is the name of a policy, and this takes files: `kvpolicy show {name}` shows what it is made of."


def _print_table(results: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("file", "result")
    for result in results:
        table.add_row(result["path"], f"ok: {result['policy']}" if result["ok"] else "wrong")
    print_rich(table)
