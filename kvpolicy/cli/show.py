"""``kvpolicy show``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.output import Json, OptionError, print_json, print_rich

if TYPE_CHECKING:
    from rich.tree import Tree

    from kvpolicy.policy import Policy


def show(
    policy: Annotated[str, typer.Argument(help="A policy's name, or the path of a policy file.")],
    as_json: Json = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print it in full as a policy file.")] = False,
) -> None:
    """Show what a policy is made of: each part with its settings, its formula and where that is from."""
    from kvpolicy import load
    from kvpolicy.config import dump, to_yaml

    if as_json and as_yaml:
        raise OptionError("expected one of --json and --yaml, got both")
    loaded = load(policy)
    if as_json:
        print_json(dump(loaded))
    elif as_yaml:
        typer.echo(to_yaml(loaded), nl=False)
    else:
        print_rich(_policy(loaded))


def _policy(policy: Policy) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(policy.name, style="bold"))
    if policy.description:
        tree.add(Text(policy.description))
    _add(tree, "score", policy.score)
    budget = policy.budget
    size = f"{budget.tokens} slots" if budget.tokens is not None else f"{budget.keep:.12g} of the tokens seen, in slots"
    branch = tree.add(Text(f"budget: {size} a KV head, averaged over heads and layers"))
    _add(branch, "layers", budget.layers)
    _add(branch, "heads", budget.heads)
    _add(tree, "select", policy.select)
    # What most policies leave as it is, only where it is not.
    if policy.prefill != "whole":
        tree.add(Text(f"prefill: {policy.prefill}"))
    if policy.decode is not None:
        tree.add(Text(f"decode: every {policy.decode.every} tokens  grace={policy.decode.grace}"))
    if policy.store.name != "plain":
        _add(tree, "store", policy.store)
    return tree


def _add(tree: Tree, place: str, plugin: Any) -> None:
    """Add a plugin and the children below it to the tree."""
    from rich.text import Text

    from kvpolicy.plugin import children

    below = children(plugin)
    settings = {field.name: getattr(plugin, field.name) for field in dataclasses.fields(plugin)}
    shown = [f"{name}={_value(value)}" for name, value in settings.items() if name not in below]
    label = Text.assemble(f"{place}: ", (plugin.name, "bold"), *(f"  {one}" for one in shown))
    for about in ("formula", "source"):
        text = getattr(plugin, about, "")
        label.append(f"\n{text}" if text else "", style="dim")
    branch = tree.add(label)
    for name, child in below.items():
        for index, one in enumerate(child if isinstance(child, tuple) else (child,)):
            _add(branch, f"{name}[{index}]" if isinstance(child, tuple) else name, one)


def _value(value: object) -> str:
    """Return a setting as a policy file would hold it."""
    from kvpolicy.config.source import show

    return value if isinstance(value, str) else show(value)
