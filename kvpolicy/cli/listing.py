"""``kvpolicy list``."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from kvpolicy.cli.output import Json, print_json, print_rich

if TYPE_CHECKING:
    from kvpolicy.registry import Entry


class Kind(StrEnum):
    """What ``kvpolicy list`` can be asked for."""

    SCORERS = "scorers"
    COMBINERS = "combiners"
    BUDGETS = "budgets"
    SELECTORS = "selectors"
    STORES = "stores"
    POLICIES = "policies"


KINDS = {
    Kind.SCORERS: ("scorer",),
    Kind.COMBINERS: ("combiner",),
    Kind.BUDGETS: ("layers", "heads"),
    Kind.SELECTORS: ("selector",),
    Kind.STORES: ("store",),
    Kind.POLICIES: ("policy",),
}
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
    kind: Annotated[Kind | None, typer.Argument(help="Only these; default: all.")] = None, as_json: Json = False
) -> None:
    """List what a policy can be made of, what each is and which package it comes from."""
    from kvpolicy.registry import registry

    wanted = KINDS[kind] if kind else sum(KINDS.values(), ())
    entries = [entry for name in wanted for entry in registry().entries(name)]
    rows = [
        {"kind": entry.kind, "name": entry.name, "description": _describe(entry), "origin": entry.origin}
        for entry in entries
    ]
    if as_json:
        print_json(rows)
    else:
        _print_table(rows)


def _describe(entry: Entry) -> str:
    """Return one line that says what an entry is."""
    from kvpolicy.config import describe
    from kvpolicy.config.docstrings import summary

    return describe(entry.name) if entry.kind == "policy" else summary(entry.value)


def _print_table(rows: list[dict[str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    # A name that is cut cannot be used: descriptions give way.
    table.add_column("name", no_wrap=True)
    table.add_column("what it is")
    table.add_column("from", no_wrap=True)
    for kind, title in TITLES.items():
        these = [row for row in rows if row["kind"] == kind]
        if these:
            table.add_section()
            table.add_row(Text(title, style="bold"))
        for row in these:
            table.add_row(f"  {row['name']}", row["description"], row["origin"])
    print_rich(table)
