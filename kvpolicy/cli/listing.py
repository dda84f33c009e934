"""``kvpolicy list``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvpolicy.cli.output import Json, OptionError, print_json, print_rich
from kvpolicy.errors import PolicyError, nearest

if TYPE_CHECKING:
    from kvpolicy.contract import Entry


KINDS = {
    "scorers": ("scorer",),
    "combiners": ("combiner",),
    "budgets": ("layers", "heads"),
    "selectors": ("selector",),
    "evicted": ("evicted",),
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
    "evicted": "what becomes of the evicted",
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

    found, broken = rows(kinds(kind))
    failed = [Failed(failure.point, str(failure), failure.origin) for failure in registry().failures] + broken
    if not as_json:
        _print_table(found, failed)
        return
    print_json(found)
    for each in failed:
        typer.echo(f"warning: {each.origin}: {each.what} could not be loaded: {each.why}", err=True)


@dataclass(frozen=True)
class Failed:
    """What could not be loaded: an entry point or a policy, why, and the distribution it is from."""

    what: str
    why: str
    origin: str


def rows(kinds: Iterable[str]) -> tuple[list[dict[str, str]], list[Failed]]:
    """Return what is registered of some kinds (kind, name, description and origin of each), and the broken policies."""
    from kvpolicy.registry import registry

    found, broken = [], []
    for entry in [entry for kind in kinds for entry in registry().entries(kind)]:
        try:
            description = _describe(entry)
        except PolicyError as error:
            broken.append(Failed(f"policy '{entry.name}'", str(error), entry.origin))
        else:
            about = {"kind": entry.kind, "name": entry.name, "description": description, "origin": entry.origin}
            found.append(about)
    return found, broken


def kinds(asked: str | None) -> tuple[str, ...]:
    """Return the kinds that a word asks for, in the plural or the singular.

    >>> kinds("budgets"), kinds("policy")
    (('layers', 'heads'), ('policy',))
    """
    if asked is None:
        return sum(KINDS.values(), ())
    singular = {"policy": "policies"} | {word.removesuffix("s"): word for word in KINDS if word != "policies"}
    word = singular.get(asked, asked)
    if word not in KINDS:
        raise OptionError(f"expected a kind, got {asked!r}.{nearest(asked, KINDS)}")
    return KINDS[word]


def _describe(entry: Entry) -> str:
    """Return one line that says what an entry is."""
    from kvpolicy.config import describe
    from kvpolicy.config.docstrings import summary

    return describe(entry.name) if entry.kind == "policy" else summary(entry.value)


def _print_table(found: list[dict[str, str]], failed: list[Failed]) -> None:
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
    if failed:
        table.add_section()
        table.add_row(Text("could not be loaded", style="bold"))
    for each in failed:
        table.add_row(f"  {each.what}", Text(each.why), each.origin)
    print_rich(table)
