"""What becomes of the evicted, at work: the plugin with what it declares, and what it returns checked."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.errors import PluginError
from kvpolicy.plugin import Evicted
from kvpolicy.types import LayerView, Merged, Selection


def merged(evicted: Evicted, view: LayerView, selection: Selection, memory: Tensor | None) -> Merged | None:
    """Return what the kept slots hold from now on; None where they stay as they are.

    Args:
        evicted: says what becomes of the others.
        view: the layer's slots.
        selection: the slots that are kept.
        memory: what it returned as such at the layer's last eviction; None before that.

    Raises:
        PluginError: when it returns or reads what it must not; names it.

    >>> from kvpolicy.evicted.drop import Drop
    >>> view = LayerView(keys=torch.zeros(1, 1, 3, 2), values=torch.zeros(1, 1, 3, 2))
    >>> merged(Drop(), view, Selection(torch.tensor([0]), torch.tensor([[1]])), None) is None
    True
    """
    who = f"'{evicted.name}' of the evicted ({type(evicted).__module__})"
    found = evicted(view.limit(evicted.needs, who), selection, memory)
    if found is None:
        return None
    if not isinstance(found, Merged):
        raise PluginError(f"{who}: expected a kvpolicy.Merged or None, got {type(found).__name__}")
    for name, old in (("keys", view.keys), ("values", view.values)):
        new, shape = getattr(found, name), (len(selection.slots), old.shape[-1])
        if not isinstance(new, Tensor) or tuple(new.shape) != shape or new.dtype != old.dtype:
            got = f"{new.dtype} {list(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
            raise PluginError(f"{who}: {name}: expected {old.dtype} {list(shape)}, one for each kept slot, got {got}")
        if not torch.isfinite(new).all():
            raise PluginError(f"{who}: {name}: expected finite numbers, got nan or inf")
    rows = len(view.valid)
    if found.memory is not None and (not isinstance(found.memory, Tensor) or found.memory.shape[:1] != (rows,)):
        raise PluginError(f"{who}: memory: expected a tensor [{rows}, ...], one row for each of the batch")
    return found
