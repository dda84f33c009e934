"""`find_rotations`: how each layer of a decoder rotates its keys, found by trying and not by name.

Single tokens are run through the decoder, each at several positions. A token alone attends to itself wherever it is, so
that its keys before RoPE are the same at all positions, in every layer: a rotation is the right one if undoing it makes
the cached keys the same.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.compat import CACHE_NAMES
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.rotary.calls import POSITIONS, Call, Source, arguments, listen, rotary_modules, state, untouched
from kvpolicy.rotary.record import RotaryRecord
from kvpolicy.rotary.rotation import ENTRIES, PAIRS, Rotation, undo

_TOKENS = 3
_PLACES = 8
_ROWS = _PLACES * _TOKENS
_LENGTH = 64
"""How many positions a decoder has at least, where its config has no `max_position_embeddings`."""
_FAR = 8192
"""The least number of positions that rotary embeddings are asked for."""

Tables = tuple[Tensor, Tensor]


def find_rotations(decoder: nn.Module, layers: Sequence[int]) -> dict[int, Rotation]:
    """Return how each of `layers` rotates the keys that it caches, each verified on the decoder's own numbers.

    The decoder runs once, on 24 tokens; its state, its hooks and the random state are afterwards as before.

    Args:
        decoder: the innermost transformers model that takes a cache.
        layers: the model's own layer indices.

    Raises:
        UnsupportedModelError: when the decoder has no rotary embedding, or layers rotate in a way that is not known.
    """
    name = type(decoder).__name__
    keys, calls = _probe(decoder, layers)
    if not calls:
        raise UnsupportedModelError(
            f"{name} calls no rotary embedding that gives one cosine and sine for each token: its keys cannot be taken "
            "back to before RoPE"
        )
    unmoved = sorted({str(call.source) for call, _ in calls if not _is_moved(call)})
    if unmoved:
        raise UnsupportedModelError(
            f"{name}: its rotary embedding {', '.join(unmoved)} is not called with the positions of the tokens: its "
            "keys cannot be taken back to before RoPE"
        )
    sources = {call.source: record.tracks[call.source].tables(call.source, None) for call, record in calls}
    found: dict[int, Rotation] = {}
    refused: list[str] = []
    for alike in _by_shape(keys):
        stored = torch.stack([keys[layer].float().cpu() for layer in alike])
        for layer, (rotation, off) in zip(alike, _best(stored, sources), strict=True):
            found[layer] = rotation
            # Written so that NaN is refused too.
            if not off <= tolerance(keys[layer].dtype):
                refused.append(f"{layer} (off by {off:.2g})")
    if refused:
        raise UnsupportedModelError(
            f"{name}: no known rotation explains how the keys cached in layers {', '.join(refused)} depend on their "
            "positions: they cannot be taken back to before RoPE"
        )
    return {layer: found[layer] for layer in layers}


def tolerance(dtype: torch.dtype) -> float:
    """Return how far apart equal keys may be, relative to their size: half of the digits of `dtype`.

    Rounding takes a few units in the last digit; undoing a wrong rotation leaves differences of order 1.
    """
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** 0.5


def _by_shape(keys: dict[int, Tensor]) -> Iterable[list[int]]:
    alike = defaultdict(list)
    for layer, stored in keys.items():
        alike[stored.shape, stored.dtype].append(layer)
    return alike.values()


def _best(stored: Tensor, sources: dict[Source, Tables]) -> list[tuple[Rotation, float]]:
    # stored: [layers, rows, Hkv, 1, Dk].
    rotations, spreads = [Rotation()], [_spread(stored, stored.abs())]
    for source, given in sources.items():
        tables = given[0].float().cpu(), given[1].float().cpu()
        for rotation in _candidates(source, tables, stored.shape[-1]):
            keys = undo(stored, rotation, *rotation.angles(*tables))
            length = torch.hypot(*rotation.members(keys))
            rotations.append(rotation)
            spreads.append(_spread(keys, rotation.joined(keys.abs(), length, length)))
    least = torch.stack(spreads).min(0)
    return [(rotations[index], off) for index, off in zip(least.indices.tolist(), least.values.tolist(), strict=True)]


def _candidates(source: Source, tables: Tables, size: int) -> Iterator[Rotation]:
    width = tables[0].shape[-1]
    # The first place is 0: there, the sines are.
    swapped = not tables[0][0].any()
    for entries, pairs, sign in product(ENTRIES, PAIRS, (1, -1)):
        rotated = 2 * width if entries == "all" else width
        if rotated % 2 == 0 and rotated <= size:
            for start in sorted({0, size - rotated}):
                yield Rotation(source, start, rotated, pairs, entries, swapped, sign)


def _spread(keys: Tensor, sizes: Tensor) -> Tensor:
    # By layer: the largest distance from the mean over places, relative to the dimension's pair and the key as a whole.
    keys, sizes = (part.unflatten(1, (_PLACES, _TOKENS)) for part in (keys, sizes))
    off = (keys - keys.mean(1, keepdim=True)).abs()
    whole = keys.square().mean(-1, keepdim=True).sqrt()
    return (off / (sizes + whole).clamp(min=torch.finfo(torch.float32).tiny)).flatten(1).amax(1)


def _probe(decoder: Any, layers: Sequence[int]) -> tuple[dict[int, Tensor], list[tuple[Call, RotaryRecord]]]:
    calls: list[tuple[Call, RotaryRecord]] = []

    mine = threading.get_ident()

    def take(call: Call) -> None:
        # Other threads may run the model meanwhile.
        if threading.get_ident() == mine:
            calls.append((call, RotaryRecord().extended(call)))

    modules = rotary_modules(decoder)
    length = int(getattr(decoder.config, "max_position_embeddings", None) or _LENGTH)
    try:
        with torch.no_grad(), _evaluating(decoder), untouched(modules), ExitStack() as hooks:
            for path, module in modules.items():
                hooks.enter_context(_moving(module, max(2 * length, _FAR)))
                hooks.callback(listen(path, module, take).remove)
            cache = _run(decoder, length)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: cannot see how it rotates its keys, as it fails on single tokens: {error!r}"
        ) from error
    stored: list[Any] = [getattr(layer, "keys", None) for layer in getattr(cache, "layers", ())]
    without = [layer for layer in layers if layer >= len(stored) or stored[layer] is None]
    if without:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: cannot see how it rotates its keys, as it caches none in layers {without}"
        )
    return {layer: stored[layer] for layer in layers}, calls


def _run(decoder: Any, length: int) -> Any:
    tokens = torch.arange(1, _TOKENS + 1, device=decoder.device) * decoder.config.vocab_size // (_TOKENS + 1)
    given = {"input_ids": tokens.repeat(_PLACES)[:, None], "use_cache": True, "return_dict": True}
    if POSITIONS in inspect.signature(type(decoder).forward).parameters:
        given[POSITIONS] = _places(length)[0].to(decoder.device)
    # Not a call of the module: its hooks, those of sessions among them, are for the passes of a user.
    output = decoder.forward(**given)
    return next((getattr(output, name) for name in CACHE_NAMES if getattr(output, name, None) is not None), None)


def _places(length: int, axes: int = 1) -> Tensor:
    # int64 [axes, rows, 1]: from 0 to the last, ever further apart, on each axis in another order but for the first, 0.
    far = [round((length - 1) ** (step / (_PLACES - 2))) for step in range(_PLACES - 1)]
    places = torch.tensor([[0, *far[axis:], *far[:axis]] for axis in range(axes)], device="cpu")
    return places.repeat_interleave(_TOKENS, dim=1)[:, :, None]


@contextmanager
def _moving(module: nn.Module, length: int) -> Iterator[None]:
    # In the block, a rotary embedding is told that the tokens are at places of ours: on each axis that it asks for, and
    # past what the model was made for, where scaled frequencies differ from plain ones. A table has an end: it is not.
    mine = threading.get_ident()
    ends = any(isinstance(part, Tensor) and part.ndim > 1 for part in state(module).values())

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = arguments(module, args, kwargs)
        positions = given.get(POSITIONS)
        if threading.get_ident() != mine or ends or not isinstance(positions, Tensor):
            return None
        if tuple(positions.shape[-2:]) not in ((1, 1), (_ROWS, 1)):
            return None
        axes = _places(length, len(positions) if positions.ndim == 3 else 1)
        return (), {**given, POSITIONS: axes.reshape(*positions.shape[:-2], _ROWS, 1).to(positions)}

    handle = module.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _is_moved(call: Call) -> bool:
    positions = call.positions
    return tuple(positions.shape[-2:]) == (_ROWS, 1) and len(positions.unique()) == _PLACES


@contextmanager
def _evaluating(decoder: nn.Module) -> Iterator[None]:
    training = [module for module in decoder.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
