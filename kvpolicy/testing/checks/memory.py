"""How large the tensors get that something makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Largest(TorchDispatchMode):
    """Watches every operation for the largest storage among its results; a view has that of what it looks at."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


def largest(run: Callable[[], object]) -> int:
    """Return the bytes of the largest tensor that an operation of `run` returns.

    >>> import torch
    >>> largest(lambda: torch.zeros(10) + torch.zeros(10, 1))
    400
    """
    with _Largest() as watch:
        run()
    return watch.bytes
