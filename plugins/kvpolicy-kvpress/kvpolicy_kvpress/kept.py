"""An evicted cache that needs no session: plain layers where all heads keep as much, `KeptLayer` where they do not."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvpolicy.attend.masks import cut_mask
from kvpolicy.errors import InactiveSessionError, UnsupportedModelError
from kvpolicy.session.decoder import arguments, cache_in, forward_names
from kvpolicy.session.layers import evicting_layers

_ROWS = "this cache was evicted by PolicyPress, with heads of different lengths: its rows stay as they are"
_INSTEAD = "repeat or reorder rows, or search with beams, inside policy.on(model)"


def release(cache: DynamicCache, decoder: PreTrainedModel) -> None:
    """Put layers that need no session in the place of the evicting layers of `cache`; what was freed stays free.

    The cache's length is from then on the number of slots of its longest head, as after a press: whoever reads on gives
    the positions.

    Args:
        cache: evicted by a session.
        decoder: read it.
    """
    layers = evicting_layers(cache)
    stored = {layer.index: layer.store.padded() for layer in layers if layer.store is not None}
    if not stored:
        return
    width = max(keys.shape[2] for keys, _, _ in stored.values())
    held = {index: _held(keys, positions, width) for index, (keys, _, positions) in stored.items()}
    if all(bool(one.all()) for one in held.values()):
        for index, (keys, values, _) in stored.items():
            cache.layers[index] = DynamicLayer()
            cache.layers[index].update(keys, values)
        return
    hooks = Hooks(decoder, held)
    for index, (keys, values, _) in stored.items():
        slots = held[index][:, :, width - keys.shape[2] :]
        cache.layers[index] = KeptLayer(keys[slots], values[slots], held[index], hooks)


def _held(keys: Tensor, positions: Tensor | None, width: int) -> Tensor:
    """Return bool ``[B, Hkv, width]``: which slots are held, heads aligned at their last slot."""
    held = torch.zeros(*keys.shape[:2], width, dtype=torch.bool, device=keys.device)
    held[:, :, width - keys.shape[2] :] = True if positions is None else positions >= 0
    return held


class KeptLayer(DynamicLayer):
    """What heads of different lengths keep, packed; handed to the model side by side, aligned at their last slot.

    Args:
        keys: ``[N, Dk]``, those held, head after head.
        values: ``[N, Dv]``.
        held: bool ``[B, Hkv, width]``, which slots they are.
        hooks: hide the others from attention.
    """

    def __init__(self, keys: Tensor, values: Tensor, held: Tensor, hooks: Hooks) -> None:
        self.packed = keys, values
        self.held = held
        self.is_initialized = True
        self._hooks = hooks
        self._tail = DynamicLayer()
        self._hidden = False

    @property
    def keys(self) -> Tensor:
        """``[B, Hkv, width + new, Dk]``, made anew; setting it to its own first n slots takes tokens back."""
        return self._side_by_side(0)

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        self.crop(keys.shape[2])

    @property
    def values(self) -> Tensor:
        """``[B, Hkv, width + new, Dv]``, likewise."""
        return self._side_by_side(1)

    @values.setter
    def values(self, values: Tensor) -> None:
        self.crop(values.shape[2])

    def _side_by_side(self, part: int) -> Tensor:
        packed = self.packed[part]
        whole = packed.new_zeros(*self.held.shape, packed.shape[-1])
        whole[self.held] = packed
        new = (self._tail.keys, self._tail.values)[part]
        return whole if new is None else torch.cat([whole, new], dim=2)

    def get_seq_length(self) -> int:
        """Return the slots of the longest head."""
        return self.held.shape[2] + int(self._tail.get_seq_length())

    def crop(self, max_length: int) -> None:
        """Take back the tokens read after the first `max_length` slots; a negative number takes back as many."""
        length = max_length if max_length >= 0 else self.get_seq_length() + max_length
        if length < self.held.shape[2]:
            raise InactiveSessionError(
                f"crop: expected at least the {self.held.shape[2]} slots that were kept of the prompt, got {length}"
            )
        if self._tail.is_initialized:
            self._tail.crop(length - self.held.shape[2])

    def hide(self, mask: Tensor | None, config: Any, new: int) -> Tensor:
        """Return `mask`, for `new` tokens, with what this layer does not hold hidden from each head."""
        start = self.get_seq_length()
        places = torch.arange(start + new, dtype=torch.int32, device=self.held.device)
        there = nn.functional.pad(self.held, (0, start + new - self.held.shape[2]), value=True)
        query = self.packed[0].new_empty(len(self.held), config.num_attention_heads, new, 0)
        self._hidden = True
        return cut_mask(mask, places.where(there, -1), start, query, config._attn_implementation)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values to attend to, the new ones behind.

        Raises:
            InactiveSessionError: when nothing has hidden what is not held.
        """
        if not self._hidden:
            raise InactiveSessionError("this cache was evicted by PolicyPress for another model than the one using it")
        self._hidden = False
        self._tail.update(key_states, value_states)
        return self.keys, self.values

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnsupportedModelError(f"{_ROWS}: {_INSTEAD}")

    reset = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = _refuse  # type: ignore[assignment]


class Hooks:
    """Stand before a decoder and its attention modules for as long as a layer of `KeptLayer` needs them.

    Args:
        decoder: reads the cache.
        layers: the model's indices of the layers.

    Raises:
        UnsupportedModelError: when masks cannot be cut for some layer.
    """

    def __init__(self, decoder: PreTrainedModel, layers: Iterable[int]) -> None:
        wanted = set(layers)
        takes = {"hidden_states", "attention_mask"}
        modules = [
            module
            for module in decoder.modules()
            if getattr(module, "layer_idx", None) in wanted and takes <= set(forward_names(module))
        ]
        without = wanted - {module.layer_idx for module in modules}
        implementation = decoder.config._attn_implementation
        if without or implementation not in ("sdpa", "eager"):
            raise UnsupportedModelError(
                f"PolicyPress: heads of different lengths need attention modules that take a mask, under 'sdpa' or "
                f"'eager', got {implementation!r} and none in layers {sorted(without)}: use policy.on(model)"
            )
        handles = [module.register_forward_pre_hook(_hide, with_kwargs=True) for module in modules]
        handles.append(decoder.register_forward_pre_hook(_check, with_kwargs=True))
        weakref.finalize(self, _remove, handles)

    def __deepcopy__(self, memo: dict[int, object]) -> Hooks:
        return self


def _check(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise unless the rows and the mask of a pass are those of the cache: the model itself cuts a longer mask."""
    given = arguments(decoder, args, kwargs)
    layer = next((layer for layer in getattr(cache_in(given), "layers", ()) if isinstance(layer, KeptLayer)), None)
    if layer is None:
        return
    mask = given.get("attention_mask")
    rows, new = (given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]).shape[:2]
    slots = layer.get_seq_length()
    if rows != len(layer.held):
        raise UnsupportedModelError(f"{_ROWS}, expected tokens for {len(layer.held)}, got {rows}: {_INSTEAD}")
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] != slots + new:
        raise UnsupportedModelError(
            f"attention mask: expected none, or {slots + new} columns ({slots} slots that PolicyPress left and "
            f"{new} new tokens), got {mask.shape[1]}: nothing is left of the prompt's padding that it could hide"
        )


def _hide(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = arguments(module, args, kwargs)
    layers = dict(enumerate(getattr(cache_in(given), "layers", ())))
    layer = layers.get(module.layer_idx)  # type: ignore[call-overload]
    if not isinstance(layer, KeptLayer):
        return None
    new = given["hidden_states"].shape[1]
    return (), given | {"attention_mask": layer.hide(given.get("attention_mask"), module.config, new)}


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
