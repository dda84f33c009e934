"""Policies shipped with the package, one YAML file each."""

from pathlib import Path

from kvpolicy.hookspecs import hookimpl


@hookimpl
def kvpolicy_policies() -> Path:
    """Return this folder."""
    return Path(__file__).parent
