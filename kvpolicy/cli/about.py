"""A plugin as ``kvpolicy show`` prints it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvpolicy.cli.output import print_rich

if TYPE_CHECKING:
    from kvpolicy.config.about import About
    from kvpolicy.types import Needs


def print_plugin(found: About) -> None:
    """Print what a plugin says of itself, and the table of its settings."""
    from rich.table import Table
    from rich.text import Text

    from kvpolicy.config.about import written

    print_rich(Text.assemble((found.name, "bold"), f", a {found.what} of {found.origin}"))
    facts = {
        "": found.description,
        "formula": found.formula,
        "source": found.source,
        "role": found.role,
        "needs": _needs(found.needs) if found.kind in ("scorer", "combiner", "selector") else "",
    }
    for fact, said in facts.items():
        if said:
            print_rich(Text(f"  {fact}{fact and ': '}{said}"))
    if not found.settings:
        print_rich(Text("  no settings"))
        return
    table = Table("setting", "value", "default", "what it does")
    for one in found.settings:
        default = "required" if one.required else written(one.default)
        table.add_row(one.name, one.values.replace("`", ""), default, one.description)
    print_rich(table)


def _needs(needs: Needs | None) -> str:
    """Return what is read of a view, in words."""
    if needs is None:
        return "as its settings say"
    queries = [f"the last {needs.queries} queries"] if needs.queries else []
    flags = [name for name, asked in dataclasses.asdict(needs).items() if asked and name != "queries"]
    return ", ".join([*queries, *flags]) or "nothing"
