"""What the attention modules of a decoder are called with, for as long as each of them runs."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.session.bound import Bound
from kvpolicy.session.decoder import arguments, forward_names
from kvpolicy.types import Call

_HIDDEN = "hidden_states"
_TURNED = "position_embeddings"


class _Running(threading.local):
    """The arguments of the modules that are running in a thread, by module."""

    def __init__(self) -> None:
        self.given: dict[nn.Module, dict[str, Any]] = {}


class CallWatch(Bound):
    """Reads what attention modules are called with; it is held while the module runs, and no longer.

    Args:
        decoder: whose modules they are.
        layers: the model's indices of the layers.

    Raises:
        UnsupportedModelError: when a layer has no module that is called with hidden states.
    """

    def __init__(self, decoder: PreTrainedModel, layers: Iterable[int]) -> None:
        wanted = set(layers)
        # Which of these attends, the attention function will say.
        self._modules = [
            module
            for module in decoder.modules()
            if getattr(module, "layer_idx", None) in wanted and _HIDDEN in forward_names(module)
        ]
        without = sorted(wanted - {module.layer_idx for module in self._modules})
        if without:
            raise UnsupportedModelError(
                f"{type(decoder).__name__}: expected attention modules with a 'layer_idx' that are called with "
                f"'{_HIDDEN}', got none in layers {without}: use a policy whose scorers do not need them (`call`)"
            )
        self._running = _Running()
        self._hooks: list[RemovableHandle] = []

    def attach(self) -> None:
        """Start to listen."""
        for module in self._modules:
            before = module.register_forward_pre_hook(self._take, with_kwargs=True)
            self._hooks += [before, module.register_forward_hook(self._forget, always_call=True)]

    def detach(self) -> None:
        """Stop to listen."""
        while self._hooks:
            self._hooks.pop().remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = arguments(module, args, kwargs)
        self._running.given[module] = {name: given.get(name) for name in (_HIDDEN, _TURNED)}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forget(self, module: nn.Module, *_: Any) -> None:
        self._running.given.pop(module, None)

    def of(self, module: nn.Module, *, read: int, end: int) -> Call:
        """Return what `module`, which is running, was called with for the first `end` of the `read` tokens of its pass.

        Raises:
            UnsupportedModelError: when that is not one vector a token, and cos and sin where it is given any.
        """
        given = self._running.given.get(module)
        if given is None:
            raise UnsupportedModelError(
                f"{type(module).__name__}: expected an attention module with a 'layer_idx' that is called with "
                f"'{_HIDDEN}': use a policy whose scorers do not need them (`call`)"
            )
        hidden, turned = given[_HIDDEN], given[_TURNED]
        if not by_token(hidden, read):
            raise UnsupportedModelError(
                f"{type(module).__name__}: expected {_HIDDEN} [B, {read}, size], got {shown(hidden)}"
            )
        if turned is None:
            return Call(module, hidden[:, :end])
        if not (isinstance(turned, tuple) and len(turned) == 2 and all(by_token(part, read) for part in turned)):
            raise UnsupportedModelError(
                f"{type(module).__name__}: expected {_TURNED} (cos, sin), each [B, {read}, size], got {shown(turned)}"
            )
        cos, sin = (part[:, :end].expand(len(hidden), -1, -1) for part in turned)
        return Call(module, hidden[:, :end], (cos, sin))


def by_token(tensor: Any, count: int) -> bool:
    """Return whether `tensor` is one vector a token, ``[B, count, size]``."""
    return isinstance(tensor, Tensor) and tensor.ndim == 3 and tensor.shape[1] == count


def shown(given: Any) -> str:
    """Return what an error says that a module was called with: shapes of tensors, or what it is instead."""
    if isinstance(given, tuple):
        return f"({', '.join(shown(part) for part in given)})"
    return str(list(given.shape)) if isinstance(given, Tensor) else type(given).__name__
