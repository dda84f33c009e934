"""A plugin as ``kvpolicy show`` prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.cli.output import print_rich

if TYPE_CHECKING:
    from kvpolicy.config.about import About


def print_plugin(found: About) -> None:
    """Print what a plugin says of itself, and the table of its settings."""
    from rich.table import Table
    from rich.text import Text

    from kvpolicy.config.about import written

    print_rich(Text.assemble((found.name, "bold"), f", a {found.what} of {found.origin}"))
    needs = "as its settings say" if found.needs is None else found.needs.words
    facts = {
        "": found.description,
        "formula": found.formula,
        "source": found.source,
        "cost": found.cost,
        "role": found.role,
        "needs": needs if found.kind in ("scorer", "combiner", "selector", "evicted") else "",
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
