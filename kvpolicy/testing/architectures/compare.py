"""One policy on one tiny model: the logits of the evicted run, and those it has to equal."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvpolicy.compat import CACHE_NAMES
from kvpolicy.policy import Policy
from kvpolicy.testing.architectures.configs import PLAIN_TOKENS, VOCABULARY
from kvpolicy.testing.architectures.hide import HidingCache, hiding
from kvpolicy.types import LayerView

PROMPT = 40


def tokens() -> tuple[Tensor, list[Tensor]]:
    """Return a prompt and what follows: four tokens one by one, then three at once."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(PLAIN_TOKENS, VOCABULARY, (1, PROMPT + 7), generator=generator)
    return ids[:, :PROMPT], [*ids[:, PROMPT:-3].split(1, dim=1), ids[:, -3:]]


def run(model: PreTrainedModel, prompt: Tensor, pieces: Sequence[Tensor], cache: Any) -> Tensor:
    """Return the logits of prompt and pieces, float64 ``[tokens, V]``; a prompt alone may do without a cache."""
    names = inspect.signature(type(model).forward).parameters
    name = next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[-1])
    given = {} if cache is None else {name: cache, "use_cache": True}
    found = []
    for piece in (prompt, *pieces):
        with torch.no_grad():
            found.append(model(input_ids=piece, **given).logits)
        if isinstance(cache, HidingCache):
            cache.in_prompt = False
    return torch.cat(found, dim=1)[0].double()


@dataclass(frozen=True)
class Compared:
    """What a policy makes of one model.

    Args:
        got: logits of prompt and pieces of the evicted run, float64 ``[tokens, V]``.
        want: those of the oracle.
        exact: those of the oracle computing in float64.
        shorter: the layers that store less than stock ones.
        plan: who said what is kept: the oracle's own "views", or the evicted cache's "store".
    """

    got: Tensor
    want: Tensor
    exact: Tensor
    shorter: set[int]
    plan: str


def compare(model: PreTrainedModel, policy: Policy, stock: HidingCache) -> Compared:
    """Return what `policy` makes of a model; `stock` is a cache that has read prompt and pieces without it."""
    prompt, pieces = tokens()
    evicted = DynamicCache(config=model.config)
    with policy.on(model):
        start = run(model, prompt, [], evicted)
        stored = {index: _positions(layer) for index, layer in enumerate(evicted.layers)}
        got = torch.cat([start, run(model, pieces[0], pieces[1:], evicted)])
    pairs = enumerate(zip(evicted.layers, stock.layers, strict=True))
    shorter = {index for index, (ours, whole) in pairs if stored_bytes(ours) < stored_bytes(whole)}
    keep, plan = _plan(policy, stock, sorted(shorter), stored)
    want = _hidden_logits(model, prompt, pieces, keep)
    exact = exact_logits(model, prompt, pieces, keep)
    return Compared(got, want, exact, shorter, plan)


class _Double(TorchFunctionMode):
    """Makes a model compute in float64 where it asks for float32, as it does to be exact in half precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def exact_logits(model: PreTrainedModel, prompt: Tensor, pieces: Sequence[Tensor], keep: dict[int, Tensor]) -> Tensor:
    """Return the oracle's logits in float64, from the same weights."""
    double = copy.deepcopy(model).double()
    with _Double():
        return _hidden_logits(double, prompt, pieces, keep)


def _hidden_logits(model: PreTrainedModel, prompt: Tensor, pieces: Sequence[Tensor], keep: dict[int, Tensor]) -> Tensor:
    cache = HidingCache(model.config, keep)
    with hiding(model, cache):
        return run(model, prompt, pieces, cache)


def _plan(
    policy: Policy, stock: HidingCache, layers: Sequence[int], stored: dict[int, Tensor | None]
) -> tuple[dict[int, Tensor], str]:
    """Return what of the prompt each layer keeps, bool ``[B, H, prompt]``, and who said so."""
    if not all(stock.prompt[layer].as_cached for layer in layers):
        return {layer: _mask(stored[layer]) for layer in layers}, "store"
    views = [
        LayerView(
            keys=seen.keys,
            values=seen.values,
            queries=seen.queries[:, :, -policy.needs.queries :],
            layer=layer,
            scaling=seen.scaling,  # type: ignore[arg-type]
        )
        for layer, seen in ((layer, stock.prompt[layer]) for layer in layers)
    ]
    return {view.layer: kept.to_mask(PROMPT) for view, kept in zip(views, policy.plan(views), strict=True)}, "views"


def _mask(positions: Tensor | None) -> Tensor:
    if positions is None:
        raise TypeError("a shorter layer: expected one that knows the positions of its slots")
    empty = torch.zeros(*positions.shape[:2], PROMPT + 1, dtype=torch.bool)
    # Empty slots, -1, fall into the last column.
    return empty.scatter(-1, positions.long() % (PROMPT + 1), True)[..., :PROMPT]


def _positions(layer: Any) -> Tensor | None:
    """Return the positions a layer holds, int32 ``[B, H, T]``, -1 where empty; None where it does not evict."""
    store = getattr(layer, "store", None)
    return None if store is None else store.padded()[2]


def stored_bytes(layer: Any) -> int:
    """Return the bytes of the storages that hold a cache layer's keys and values."""
    held = (getattr(layer, name, None) for name in ("keys", "values"))
    return sum(part.untyped_storage().nbytes() for part in held if isinstance(part, Tensor))
