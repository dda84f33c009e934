"""Reading what a conformance error says."""

from __future__ import annotations

from kvpolicy.errors import ConformanceError


def fault(error: ConformanceError, name: str) -> str:
    """Return what an error says of the check called `name`."""
    told = {}
    for line in str(error).splitlines()[1:]:
        names, _, says = line.removeprefix("- ").partition(": ")
        told |= dict.fromkeys(names.split(", "), says)
    return told[name]
