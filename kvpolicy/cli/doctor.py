"""``kvpolicy doctor``."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Any

import typer

from kvpolicy.cli.output import Json, print_json, print_rich

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import EntryPoint

    from kvpolicy.contract import Entry
    from kvpolicy.registry import Registry


def doctor(as_json: Json = False) -> None:
    """Say what is installed and which plugins work; exit with 1 when something is wrong."""
    found = examine()
    if as_json:
        print_json(found)
    else:
        _print(found)
    if not found["ok"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Return what is installed, what works and, as `problems`, what does not."""
    plugins, problems = _plugins()
    model, fault = _default_model()
    problems = [*_unmet(), *([fault] if fault else []), *problems, *_misnamed()]
    return {
        "ok": not problems,
        "versions": _versions(),
        "devices": _devices(),
        "default_model": model,
        "KVPOLICY_PLUGINS": os.environ.get("KVPOLICY_PLUGINS"),
        "plugins": plugins,
        "problems": problems,
    }


def _versions() -> dict[str, str]:
    from kvpolicy.contract import CONTRACT

    installed = {name: _installed(name) or "not installed" for name in ("kvpolicy", "torch", "transformers")}
    return {**installed, "python": platform.python_version(), "contract": str(CONTRACT)}


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _unmet() -> list[str]:
    """Return what kvpolicy requires and has not, one line each."""
    from packaging.requirements import Requirement

    problems = []
    for needed in map(Requirement, requires("kvpolicy") or ()):
        # A requirement of an extra is not needed by all.
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        installed = _installed(needed.name)
        if installed is None or not needed.specifier.contains(installed, prereleases=True):
            problems.append(f"{needed.name}: expected {needed.specifier or 'any version'}, got {installed or 'none'}")
    return problems


def _devices() -> list[str]:
    import torch

    found = [f"cpu ({torch.get_num_threads()} threads)"]
    found += [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())]
    return found + (["mps"] if torch.backends.mps.is_available() else [])


def _default_model() -> tuple[str, str]:
    """Return whether the default model is there, and what keeps models from loading at all."""
    try:
        from kvpolicy import models
    except Exception as error:
        return "unknown", f"models cannot be loaded: {type(error).__name__}: {error}"
    if lacking := models.default_lacks():
        return f"not there: {', '.join(lacking)} not installed ({models.INSTALL})", ""
    folder = models.default_folder()
    return (f"there, in {folder}" if folder.is_dir() else "there; converted once, when it is first loaded"), ""


def _plugins() -> tuple[list[dict[str, Any]], list[str]]:
    """Return what each installed plugin offers or why it does not, and what is wrong, one line each."""
    from kvpolicy.errors import PluginError
    from kvpolicy.loading import allowed, built_in, points
    from kvpolicy.registry import Registry

    every = points()
    problems: list[str] = []
    try:
        chosen = allowed(every)
    except PluginError as error:
        problems.append(str(error))
        chosen = []
    trial = Registry(built_in())
    rows = [
        _row(point, **(_state(point, trial) if any(point is one for one in chosen) else {"state": "left out"}))
        for point in every
    ]
    if not problems and all(row["state"] != "wrong" for row in rows):
        # Else there is no registry to load them with.
        for row in rows:
            row |= _policies(row)
    return rows, problems + [problem for row in rows for problem in row["why"].split("\n") if problem]


def _misnamed() -> list[str]:
    """Return the plugins that are never found because of what the group of their entry point is called."""
    from kvpolicy.loading import GROUP, misnamed, origin_of

    return [
        f"{origin_of(point)}: expected its entry point {point.name} = {point.value} in the group '{GROUP}', "
        f"got '{point.group}'"
        for point in misnamed()
    ]


def _row(
    point: EntryPoint, *, state: str, offers: Iterable[Entry] = (), contract: int | None = None, why: str = ""
) -> dict[str, Any]:
    from kvpolicy.loading import distribution_of, version_of

    return {
        "distribution": distribution_of(point),
        "version": version_of(point),
        "entry_point": f"{point.name} = {point.value}",
        "contract": contract,
        "offers": [{"kind": entry.kind, "name": entry.name} for entry in offers],
        "state": state,
        "why": why,
    }


def _state(point: EntryPoint, trial: Registry) -> dict[str, Any]:
    """Return what a plugin offers and whether it can be registered in `trial`, where it then is."""
    from kvpolicy.errors import PluginError
    from kvpolicy.loading import Failure, load

    try:
        plugin = load(point)
        if isinstance(plugin, Failure):
            return {"state": "could not be loaded", "why": f"{plugin.origin} could not be loaded: {plugin}"}
        trial.add(plugin)
    except PluginError as error:
        return {"state": "wrong", "why": str(error)}
    return {"state": "ok", "offers": plugin.entries, "contract": plugin.contract}


def _policies(row: dict[str, Any]) -> dict[str, str]:
    """Return what the policies of a plugin change in its row: those that cannot be loaded, a line each."""
    from kvpolicy import load
    from kvpolicy.errors import KVPolicyError
    from kvpolicy.loading import said

    whys = []
    for policy in [offer["name"] for offer in row["offers"] if offer["kind"] == "policy"]:
        try:
            load(policy)
        except Exception as error:
            why = "; ".join(str(error).splitlines()) if isinstance(error, KVPolicyError) else said(error)
            whys.append(f"{row['distribution']} {row['version']}: policy '{policy}': {why}")
    return {"state": "wrong", "why": "\n".join(whys)} if whys else {}


def _print(found: dict[str, Any]) -> None:
    from rich.table import Table

    facts = Table(show_header=False)
    for name, said in found["versions"].items():
        facts.add_row(name, said)
    facts.add_row("devices", ", ".join(found["devices"]))
    facts.add_row("default model", found["default_model"])
    named = found["KVPOLICY_PLUGINS"]
    facts.add_row("KVPOLICY_PLUGINS", "not set: every plugin is loaded" if named is None else named or "empty: none is")
    print_rich(facts)
    if found["plugins"]:
        table = Table("distribution", "version", "entry point", "contract", "offers", "state")
        for row in found["plugins"]:
            offers = ", ".join(f"{offer['kind']} {offer['name']}" for offer in row["offers"])
            contract = "" if row["contract"] is None else str(row["contract"])
            table.add_row(row["distribution"], row["version"], row["entry_point"], contract, offers, row["state"])
        print_rich(table)
    for problem in found["problems"]:
        typer.echo(f"problem: {problem}")
    if found["ok"]:
        typer.echo("All is well." if found["plugins"] else "All is well. No plugins are installed.")
