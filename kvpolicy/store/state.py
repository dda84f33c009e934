"""`State`: what a store or a cache layer holds, as named tensors and plain data; a file can hold both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import ContextError

_SIMPLE = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class State:
    """What something holds.

    Args:
        tensors: by name.
        plain: the rest, ready for JSON.

    >>> inner = State({"keys": torch.zeros(2)}, {"kind": "dense"})
    >>> outer = State({}, {"seen": 5}) | inner.inside("store")
    >>> sorted(outer.tensors), outer.plain, outer.part("store").plain
    (['store.keys'], {'seen': 5, 'store': {'kind': 'dense'}}, {'kind': 'dense'})
    """

    tensors: dict[str, Tensor]
    plain: dict[str, Any]

    def __or__(self, other: State) -> State:
        return State(self.tensors | other.tensors, self.plain | other.plain)

    def inside(self, name: str) -> State:
        """Return the state as a part of another, called `name`."""
        return State({f"{name}.{inner}": tensor for inner, tensor in self.tensors.items()}, {name: self.plain})

    def part(self, name: str) -> State:
        """Return the part called `name`."""
        start = f"{name}."
        own = {whole.removeprefix(start): part for whole, part in self.tensors.items() if whole.startswith(start)}
        return State(own, self.plain[name])


def attributes(owner: Any, names: list[str]) -> State:
    """Return the attributes `names` of one of transformers' cache layers.

    Raises:
        ContextError: when one of them is neither plain data nor tensors.
    """
    state = State({}, {})
    for name in names:
        try:
            state.plain[name] = _taken(getattr(owner, name), name, state.tensors)
        except TypeError as error:
            raise ContextError(f"a cache layer {type(owner).__name__}: a file cannot hold its {error}") from None
    return state


def give(owner: Any, state: State) -> None:
    """Give `owner` the attributes in `state`; a device is that of its tensors, and stays unset without any."""
    device = next((tensor.device for tensor in state.tensors.values()), None)
    vars(owner).update({name: _given(value, state.tensors, device) for name, value in state.plain.items()})


def _taken(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}
    if isinstance(value, dict) and all(isinstance(key, int) for key in value):
        return {"items": [[key, _taken(one, f"{name}.{key}", tensors)] for key, one in value.items()]}
    raise TypeError(f"'{name}', a {type(value).__name__}")


def _given(value: Any, tensors: dict[str, Tensor], device: torch.device | None) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return device
    return {key: _given(one, tensors, device) for key, one in content}
