"""How much memory something takes: its largest tensor, and all that are alive at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class _Watch(TorchDispatchMode):
    """Watches the storages among the results of every operation; a view has that of what it looks at.

    Args:
        there: tensors that are there already: what looks at them takes nothing.
    """

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._there = {tensor.untyped_storage()._cdata for tensor in there}
        self.largest = 0
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._there:
            return
        size = storage.nbytes()
        self.largest = max(self.largest, size)
        reference = StorageWeakRef(storage)
        known = self._alive.get(reference.cdata)
        if known is not None and not known[0].expired():
            return
        self._alive[reference.cdata] = reference, size
        self._bytes += size
        # Looking for dead ones at each operation would take longer than the operations.
        if self._bytes > 1.05 * self.peak:
            self._alive = {key: (one, held) for key, (one, held) in self._alive.items() if not one.expired()}
            self._bytes = sum(held for _, held in self._alive.values())
            self.peak = max(self.peak, self._bytes)


def largest(run: Callable[[], object]) -> int:
    """Return the bytes of the largest tensor that an operation of `run` returns.

    >>> import torch
    >>> largest(lambda: torch.zeros(10) + torch.zeros(10, 1))
    400
    """
    with _Watch() as watch:
        run()
    return watch.largest


def peak(run: Callable[[], object], *, there: Iterable[Tensor] = ()) -> int:
    """Return the bytes of all tensors that operations of `run` have returned and that are alive at once, at most.

    Args:
        run: what is watched.
        there: tensors that are there already and do not count, the weights of a model say.

    >>> import torch
    >>> weight = torch.ones(100)
    >>> peak(lambda: weight[:10] + 1), peak(lambda: weight[:10] + 1, there=[weight])
    (440, 40)
    >>> peak(lambda: [torch.zeros(10) for _ in range(5)]), peak(lambda: [int(torch.zeros(10).sum()) for _ in range(5)])
    (200, 44)
    """
    with _Watch(there) as watch:
        run()
    return watch.peak
