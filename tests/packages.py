"""Packages of strangers: modules, and what an installer writes beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpolicy import hookimpl, settings
from kvpolicy.plugin import kind_of
from kvpolicy.types import Needs

SCORER = """
import torch
from kvpolicy import LayerView, Needs, hookimpl, settings

@settings
class Middle:
    '''The slots in the middle.

    Args:
        power: how sharply.
    '''
    name = "{name}"
    source = "{module}"
    formula = "-|t - T/2|"
    needs = Needs()
    power: float = 1.0

    def __call__(self, view: LayerView) -> torch.Tensor:
        place = torch.arange(view.slots) - view.slots / 2
        return -place.abs().pow(self.power).expand(view.valid.shape)

{marker}
def {hook}({arguments}):
    {first}
    return [Middle]

{last}
"""


def install(
    folder: Path,
    module: str,
    *,
    distribution: str = "",
    name: str = "middle",
    hook: str = "kvpolicy_scorers",
    arguments: str = "",
    first: str = "",
    last: str = "",
    marker: str = "@hookimpl",
    point: str = "",
    group: str = "kvpolicy",
) -> None:
    """Install a package of one scorer.

    Args:
        folder: a folder on the path.
        module: what the module is called.
        distribution: what the package is called; default: as the module.
        name: of the scorer.
        hook: the function that offers it.
        arguments: of that function.
        first: its first statement.
        last: the module's last statement.
        marker: of that function.
        point: what its entry point leads to; default: the module.
        group: of its entry point.
    """
    code = SCORER.format(
        name=name, module=module, hook=hook, arguments=arguments, first=first, last=last, marker=marker
    )
    (folder / f"{module}.py").write_text(code)
    distribution = distribution or module
    info = folder / f"{distribution.replace('-', '_')}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
    # Every such package may well call its entry point alike.
    (info / "entry_points.txt").write_text(f"[{group}]\nplugin = {point or module}\n")


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return how Python ended with `folder` on its path and in it."""
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )


class Plugin:
    """An object whose hooks return what it is made with, or what a function returns."""

    def __init__(self, **hooks: Any) -> None:
        for name, offer in hooks.items():
            setattr(self, f"kvpolicy_{name}", hookimpl(_returning(offer)))


def _returning(offer: Any) -> Callable[[], Any]:
    return offer if callable(offer) and not isinstance(offer, type) else lambda: offer


def made(name: Any, **attributes: Any) -> type:
    """Return a plugin class with a name: that of a scorer, unless `attributes` make it another."""
    members = {"name": name, "__doc__": "Made.", "__call__": lambda self, *given, **named: None, **attributes}
    if not kind_of(type("Made", (), members)):
        members["needs"] = Needs()
    return settings(type("Made", (), members))
