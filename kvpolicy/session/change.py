"""How little the attention of each layer changes what goes through it, as the prompt is read."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvpolicy.attention import LIMIT
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.session.bound import Bound
from kvpolicy.session.calls import by_token, shown
from kvpolicy.session.decoder import arguments

_HIDDEN = "hidden_states"
_NUMBERS = 2**24
"""How many numbers are compared at once, unless one token alone has more: 64 MiB in float32."""


class _Reading(threading.local):
    """What the pass that runs in a thread has shown so far; `found` is None where none runs that is listened to."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, found: dict[int, Tensor] | None) -> None:
        self.entered: dict[nn.Module, Any] = {}
        self.attended: dict[nn.Module, tuple[int, int]] = {}
        self.found = found


class ChangeWatch(Bound):
    """Compares each token before a layer's attention with itself after it, cosine similarity, in passes over a prompt.

    Before is what the decoder layer is called with; after is that and what its attention module gives, whatever the
    layer makes of it: a norm (Gemma 2, OLMo 2) or a factor (Granite) that comes between is left out, and so is an MLP
    (GPT-J) or a mixer (Falcon-H1) that runs beside the attention. On the ranks of a tensor-parallel model the attention
    module gives the sum over all of them, so that each rank comes to the same.

    Args:
        decoder: whose layers they are.

    Raises:
        UnsupportedModelError: when it has no decoder layers that hold their attention module themselves.
    """

    def __init__(self, decoder: PreTrainedModel) -> None:
        self._decoder = decoder
        lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList))
        # By attention module, the decoder layer; which of these attends, the attention function will say.
        self._layers = {
            module: layer
            for each in lists
            for layer in each
            for module in layer.children()
            if getattr(module, "layer_idx", None) is not None
        }
        if not self._layers:
            raise self._unsupported(decoder, "none")
        self._now = _Reading()
        self._hooks: list[RemovableHandle] = []

    def _unsupported(self, module: nn.Module, got: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{type(module).__name__}: expected an attention module with a 'layer_idx' right inside a decoder layer of "
            f"a ModuleList, both of which make [B, q, size] of [B, q, size], got {got}: use a policy that does not "
            "need how little each layer's attention changes (`change`), as with another layer budget than 'squeeze'"
        )

    def attach(self) -> None:
        """Start to listen."""
        for layer in dict.fromkeys(self._layers.values()):
            before = layer.register_forward_pre_hook(self._enter, with_kwargs=True)
            self._hooks += [before, layer.register_forward_hook(self._leave, always_call=True)]
        self._hooks += [module.register_forward_hook(self._compare) for module in self._layers]
        # Of a pass that fails, nothing stays.
        self._hooks.append(self._decoder.register_forward_hook(self._forget, always_call=True))

    def detach(self) -> None:
        """Stop to listen."""
        while self._hooks:
            self._hooks.pop().remove()

    def begin(self) -> None:
        """Start a forward pass of one cache."""
        self._now.begin({})

    def end(self) -> dict[int, Tensor]:
        """End the pass; return by layer the similarity of each of its tokens, float32 ``[B, q]``, in [-1, 1]."""
        found = self._now.found or {}
        self._now.begin(None)
        return found

    def attended(self, module: nn.Module, layer: int, new: int) -> None:
        """Take note that `module`, which is running, attends for layer `layer` to a prompt's next `new` tokens.

        Raises:
            UnsupportedModelError: when it is not known which decoder layer's it is.
        """
        if module not in self._layers:
            raise self._unsupported(module, f"one that stands elsewhere, in layer {layer}")
        self._now.attended[module] = layer, new

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._now.found is not None:
            given = arguments(layer, args, kwargs)
            self._now.entered[layer] = given.get(_HIDDEN, next(iter(given.values()), None))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, layer: nn.Module, *_: Any) -> None:
        self._now.entered.pop(layer, None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forget(self, *_: Any) -> None:
        self._now.begin(None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compare(self, module: nn.Module, _: Any, output: Any) -> None:
        index, new = self._now.attended.pop(module, (None, 0))
        if index is None or self._now.found is None:
            return
        before: Any = self._now.entered.get(self._layers[module])
        added = output[0] if isinstance(output, tuple) else output
        if not (by_token(added, new) and getattr(before, "shape", None) == added.shape):
            raise self._unsupported(module, f"{shown(before)} and {shown(added)} of {new} tokens")
        with torch.no_grad():
            self._now.found[index] = _similarity(before, added)


def mean_over(similarity: Tensor, visible: Tensor | None) -> Tensor:
    """Return the mean of each row over the tokens that are not padding, float32 ``[B]``; 0 of none.

    Args:
        similarity: float32 ``[B, seen]``.
        visible: bool ``[B, seen]`` or wider, False for padding, or None.

    >>> mean_over(torch.tensor([[0.5, 1.0, 0.0]]), torch.tensor([[False, True, True]])).tolist()
    [0.5]
    """
    counted = torch.ones_like(similarity, dtype=torch.bool)
    if visible is not None:
        counted = visible[:, : similarity.shape[1]].to(similarity.device).expand_as(similarity)
    total = similarity.double().where(counted, 0).sum(-1)
    return (total / counted.sum(-1).clamp(min=1)).float()


def _similarity(before: Tensor, added: Tensor) -> Tensor:
    """Return the cosine similarity of each token's ``before`` and ``before + added``, float32 ``[B, q]``.

    Args:
        before: ``[B, q, size]``, any float dtype; compared in float32 at least.
        added: likewise.
    """
    size = max(1, _NUMBERS // (before.shape[0] * before.shape[2]))
    exact = torch.promote_types(before.dtype, torch.float32)
    found = []
    for one, other in zip(before.split(size, dim=1), added.split(size, dim=1), strict=True):
        one = one.to(exact).clamp(-LIMIT, LIMIT)
        found.append(cosine_similarity(one, one + other.to(one).clamp(-LIMIT, LIMIT), dim=-1))
    return torch.cat(found, dim=1).clamp(-1, 1).float()
