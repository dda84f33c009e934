"""Rotary embeddings as a decoder calls them: which modules they are, with what, and what they give back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

POSITIONS = "position_ids"
"""What every rotary embedding of transformers calls the positions."""


@dataclass(frozen=True)
class Source:
    """One of a decoder's rotary embeddings, as its layers use it.

    Args:
        module: its name in the decoder.
        options: what else it is called with, by name: the layer type, where it has frequencies for several.
    """

    module: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.module}({', '.join(f'{name}={value!r}' for name, value in self.options)})"


@dataclass(frozen=True)
class Call:
    """One call of a rotary embedding.

    Args:
        source: what was called.
        module: the module itself.
        positions: ``[B, T]``, or ``[A, B, T]`` where positions have several axes (M-RoPE).
        x: whose dtype and device the cosines and sines take.
    """

    source: Source
    module: nn.Module
    positions: Tensor
    x: Tensor


def rotary_modules(decoder: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a decoder that may be rotary embeddings, by name: leaves that are called with positions."""
    return {
        name: module
        for name, module in decoder.named_modules()
        if not any(module.children()) and POSITIONS in _names(module)[1:]
    }


def listen(name: str, module: nn.Module, take: Callable[[Call], None]) -> RemovableHandle:
    """Give `take` every call of a module that gives cosines and sines; the handle ends it."""

    def heard(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        options = arguments(module, args, kwargs)
        x, positions = options.pop(_names(module)[0], None), options.pop(POSITIONS, None)
        if not isinstance(x, Tensor) or not isinstance(positions, Tensor) or positions.ndim not in (2, 3):
            return
        if _tables(output, positions) and not any(isinstance(value, Tensor) for value in options.values()):
            take(Call(Source(name, tuple(sorted(options.items()))), module, positions, x))

    return module.register_forward_hook(heard, with_kwargs=True)


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a module's forward by name."""
    return dict(zip(_names(module), args, strict=False)) | kwargs


def tables(module: nn.Module, x: Tensor, positions: Tensor, source: Source) -> tuple[Tensor, Tensor]:
    """Return what a rotary embedding gives for `positions`, ``[1, N]`` or ``[A, 1, N]``: two of ``[N, width]``."""
    # The class's forward: an instance's own may be bound to another module, and hooks are for the model's calls.
    forward: Callable[..., Any] = type(module).forward
    both = _tables(forward(module, x, **{POSITIONS: positions}, **dict(source.options)), positions)
    if both is None:
        raise RuntimeError(f"{source}: expected cosines and sines, as in the model's own calls")
    return both


def state(module: nn.Module) -> dict[str, Any]:
    """Return the tensors and plain settings of a module by name."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, Tensor | int | float | str)}
    plain.pop("training", None)
    return {**plain, **module._parameters, **module._buffers}


def frozen(module: nn.Module) -> nn.Module:
    """Return a copy of a rotary embedding, without its hooks, that nothing done to the original changes."""
    twin: nn.Module = object.__new__(type(module))
    blank = vars(nn.Module())
    own = {name: value for name, value in vars(module).items() if name not in blank}
    vars(twin).update(
        blank, **{name: value.clone() if isinstance(value, Tensor) else value for name, value in own.items()}
    )
    vars(twin).update(_parameters=_cloned(module._parameters), _buffers=_cloned(module._buffers))
    return twin


@contextmanager
def untouched(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """In the block, calls of rotary embeddings change copies of their frequencies; at its end they are as before."""
    before = {name: dict(vars(module)) for name, module in modules.items()}
    try:
        for module in modules.values():
            vars(module)["_buffers"] = _cloned(module._buffers)
        yield
    finally:
        for name, module in modules.items():
            vars(module).clear()
            vars(module).update(before[name])


def _tables(output: Any, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    # One row a position, whatever the axes; which of the two are the cosines is not said.
    if isinstance(output, Tensor) and output.is_complex():
        output = (output.real, output.imag)
    if not isinstance(output, tuple) or len(output) != 2 or not all(isinstance(part, Tensor) for part in output):
        return None
    first, second = output
    rows = positions.shape[-2] * positions.shape[-1]
    if first.shape != second.shape or first.ndim < 2 or first.shape[:-1].numel() != rows:
        return None
    return first.reshape(rows, -1), second.reshape(rows, -1)


def _cloned(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if tensor is None else tensor.detach().clone() for name, tensor in tensors.items()}


def _names(module: nn.Module) -> tuple[str, ...]:
    forward: Callable[..., Any] = type(module).forward
    return tuple(inspect.signature(forward).parameters)[1:]
