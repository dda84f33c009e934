"""The checks of each kind of plugin, by name: functions that take the plugin and raise where it breaks its contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpolicy.testing.checks import (
    of_all,
    of_combiners,
    of_evicted,
    of_heads,
    of_layers,
    of_runs,
    of_scores,
    of_selectors,
)

Run = Callable[[Any], None]


def checks_of(plugin: Any) -> dict[str, Run]:
    """Return by name the checks that apply to a plugin.

    Raises:
        ConformanceError: when it is no instance of a kind that can be checked.
    """
    own = {
        "scorer": of_scores.checks_of,
        "combiner": of_combiners.checks_of,
        "layers": of_layers.checks_of,
        "heads": of_heads.checks_of,
        "selector": of_selectors.checks_of,
        "evicted": of_evicted.checks_of,
    }[of_all.kind(plugin)]
    return {**of_all.CHECKS, **own(plugin), **of_runs.CHECKS}
