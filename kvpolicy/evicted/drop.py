"""Drop: the evicted are gone."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Merged, Needs, Selection


@settings
class Drop:
    """The evicted are gone; the kept slots stay as they are.

    >>> Drop().name
    'drop'
    """

    name = "drop"
    stage = "evicted"
    source = "kvpolicy"
    formula = "k_j, v_j as they are"
    needs = Needs()

    def __call__(self, view: LayerView, selection: Selection, memory: Tensor | None) -> Merged | None:
        """Return None: nothing changes."""
        return None


@hookimpl
def kvpolicy_evicted() -> list[type]:
    """Return what this module makes of the evicted."""
    return [Drop]
