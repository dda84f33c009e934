"""``kvpolicy list``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from kvpolicy.cli.output import Json, OptionError, print_json, print_rich
from kvpolicy.errors import PluginError, PolicyError, nearest

if TYPE_CHECKING:
    from kvpolicy.contract import Entry
    from kvpolicy.loading import Failure


KINDS = {
    "scorers": ("scorer",),
    "combiners": ("combiner",),
    "budgets": ("layers", "heads"),
    "selectors": ("selector",),
    "stores": ("store",),
    "policies": ("policy",),
}
"""What can be asked for."""

TITLES = {
    "scorer": "scorers",
    "combiner": "combiners",
    "layers": "layer budgets",
    "heads": "head budgets",
    "selector": "selectors",
    "store": "stores",
    "policy": "policies",
}


def list_plugins(
    kind: Annotated[
        str | None, typer.Argument(metavar=f"[{'|'.join(KINDS)}]", help="Only these; default: all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List what a policy can be made of, what each is and which package it comes from."""
    from kvpolicy.registry import registry

    found = rows(_kinds(kind))
    failures = registry().failures
    if not as_json:
        _print_table(found, failures)
        return
    print_json(found)
    for failure in failures:
        typer.echo(f"warning: {failure.origin} could not be loaded: {failure}", err=True)


def rows(kinds: Iterable[str]) -> list[dict[str, str]]:
    """Return what is registered of some kinds: kind, name, description and origin of each."""
    from kvpolicy.registry import registry

    entries = [entry for kind in kinds for entry in registry().entries(kind)]
    return [
        {"kind": entry.kind, "name": entry.name, "description": _describe(entry), "origin": entry.origin}
        for entry in entries
    ]


def _kinds(asked: str | None) -> tuple[str, ...]:
    """Return the kinds that a word asks for, in the plural or the singular.

    >>> _kinds("budgets"), _kinds("policy")
    (('layers', 'heads'), ('policy',))
    """
    if asked is None:
        return sum(KINDS.values(), ())
    singular = {"policy": "policies"} | {word.removesuffix("s"): word for word in KINDS if word != "policies"}
    word = singular.get(asked, asked)
    if word not in KINDS:
        raise OptionError(f"expected what to list, got {asked!r}.{nearest(asked, KINDS)}")
    return KINDS[word]


def _describe(entry: Entry) -> str:
    """Return one line that says what an entry is."""
    from kvpolicy.config import describe
    from kvpolicy.config.docstrings import summary

    if entry.kind != "policy":
        return summary(entry.value)
    try:
        return describe(entry.name)
    except PolicyError as error:
        raise PluginError(f"{entry.origin}: policy '{entry.name}': {error}") from error


def _print_table(found: list[dict[str, str]], failures: list[Failure]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    # A name that is cut cannot be used: descriptions give way.
    table.add_column("name", no_wrap=True)
    table.add_column("what it is")
    table.add_column("from", no_wrap=True)
    for kind, title in TITLES.items():
        these = [row for row in found if row["kind"] == kind]
        if these:
            table.add_section()
            table.add_row(Text(title, style="bold"))
        for row in these:
            table.add_row(f"  {row['name']}", row["description"], row["origin"])
    if failures:
        table.add_section()
        table.add_row(Text("could not be loaded", style="bold"))
    for failure in failures:
        table.add_row(f"  {failure.point}", str(failure), failure.origin)
    print_rich(table)
