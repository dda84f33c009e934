"""``kvpolicy show``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.listing import KINDS, kinds
from kvpolicy.cli.output import Json, OptionError, print_json, print_rich

if TYPE_CHECKING:
    from rich.tree import Tree

    from kvpolicy.contract import Entry
    from kvpolicy.policy import Policy


def show(
    name: Annotated[str, typer.Argument(help="The name of a policy or a plugin, or the path of a policy file.")],
    kind: Annotated[
        str | None, typer.Option(metavar="|".join(KINDS), help="Only what of that name is one of these.")
    ] = None,
    as_json: Json = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print the policy in full as a policy file.")] = False,
) -> None:
    """Show what a policy is made of, or what a plugin is: settings, formula and where that is from.

    A name may stand for a policy and for plugins: all are shown, as JSON the policy alone. Plugins are a list in JSON.
    """
    from kvpolicy import load
    from kvpolicy.config.extend import is_path

    if as_json and as_yaml:
        raise OptionError("expected one of --json and --yaml, got both")
    plugins = [] if is_path(name) else _called(name, kind)
    policy = None
    if not plugins or plugins[0].kind == "policy":
        policy = load(name)
        plugins = plugins[1:]
    if as_json or as_yaml:
        _print_data(policy, plugins, as_yaml)
    else:
        _print(policy, plugins)


def _called(name: str, kind: str | None) -> list[Entry]:
    """Return what is registered under a name, or that of one kind; a policy comes first."""
    from kvpolicy.config.extend import A_PATH
    from kvpolicy.errors import PolicyError
    from kvpolicy.registry import registry

    try:
        every = registry().called(name)
    except PolicyError as error:
        raise PolicyError(f"{error} {A_PATH}") from None
    found = [entry for entry in every if entry.kind in kinds(kind)]
    if not found:
        there = ", ".join(entry.what for entry in every)
        raise OptionError(f"--kind: expected a kind of what {name!r} is ({there}), got {kind!r}")
    return found


def _print(policy: Policy | None, plugins: list[Entry]) -> None:
    from kvpolicy.cli.about import print_plugin
    from kvpolicy.config.about import about

    if policy is not None:
        print_rich(_policy(policy))
    for index, entry in enumerate(plugins):
        if policy is not None or index:
            typer.echo()
        print_plugin(about(entry))


def _print_data(policy: Policy | None, plugins: list[Entry], as_yaml: bool) -> None:
    from kvpolicy.config import about as of
    from kvpolicy.config import dump, to_yaml

    if policy is None:
        if as_yaml:
            raise OptionError(f"--yaml: expected a policy, got the {plugins[0].what} '{plugins[0].name}'")
        print_json([of.as_json(of.about(entry)) for entry in plugins])
        return
    if as_yaml:
        typer.echo(to_yaml(policy), nl=False)
    else:
        print_json(dump(policy))
    for entry in plugins:
        typer.echo(f"note: '{entry.name}' is a {entry.what} too: --kind {entry.kind}", err=True)


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
    if policy.merges:
        _add(tree, "evicted", policy.evicted)
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
