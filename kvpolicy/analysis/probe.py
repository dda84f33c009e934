"""A model without numbers, on torch's meta device, that reads a few tokens: what its cache holds, and what it reads."""

from __future__ import annotations

import kvpolicy.compat  # noqa: F401  (first: it says so where transformers is too old for the rest)

# isort: split
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import logging as transformers_logging
from transformers.utils.generic import maybe_autocast

from kvpolicy import attend
from kvpolicy.errors import UnsupportedModelError, UnsupportedVersionError
from kvpolicy.session.decoder import cache_name
from kvpolicy.session.layers import prepare, take_over
from kvpolicy.step import Attended, forget
from kvpolicy.store.layer import EvictingLayer

PROBE = 8
"""Tokens of the prompt that is read."""


@dataclass(frozen=True)
class Probe:
    """What there is once a prompt and one token behind it are read.

    Args:
        cache: with its layers.
        attending: which of them attended through transformers' attention interface.
        read: bytes of weights that the token's pass read.
    """

    cache: DynamicCache
    attending: set[int]
    read: int


def require_meta() -> None:
    """Raise unless models of the installed transformers run on the meta device: rotary embeddings ask for autocast.

    Raises:
        UnsupportedVersionError: when they do not, as in transformers 5.2.
    """
    try:
        maybe_autocast("meta", enabled=False)
    except RuntimeError as error:
        raise UnsupportedVersionError(
            f"transformers: expected a release whose models run on the meta device, got {transformers.__version__}. "
            "Run: pip install --upgrade transformers"
        ) from error


def without_weights(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of a config, in evaluation mode, whose weights have a shape and no numbers.

    Raises:
        UnsupportedModelError: when the config is of another kind of model.
    """
    tasks: tuple[Any, ...] = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    kind: Any = next((task[type(config)] for task in tasks if type(config) in task), None)
    if kind is None:
        raise UnsupportedModelError(
            f"model: expected the config of a causal or an image-text-to-text model, got {type(config).__name__}"
        )
    with torch.device("meta"):
        # The implementation of experts that reads those chosen, and no numbers.
        model: PreTrainedModel = kind._from_config(
            copy.deepcopy(config), dtype=dtype, experts_implementation="batched_mm"
        )
    return model.eval()


def probe(model: PreTrainedModel, decoder: PreTrainedModel, batch: int) -> Probe:
    """Return what is in a cache, and what was read, once `model` has read a prompt of `PROBE` tokens and one more.

    Args:
        model: from `without_weights`.
        decoder: in it.
        batch: how many such prompts.

    Raises:
        UnsupportedModelError: when it does not run without numbers, or no policy can act on it.
    """
    watcher = _Watcher()
    cache = DynamicCache(config=decoder.config)
    take_over(cache, prepare(cache, decoder.config), watcher)
    given: dict[str, Any] = {cache_name(model): cache, "use_cache": True}
    reads = _WeightReads(model)
    try:
        with torch.device("meta"), torch.no_grad(), _attending(decoder):
            model(input_ids=torch.zeros(batch, PROBE, dtype=torch.long), **given)
            with reads:
                model(input_ids=torch.zeros(batch, 1, dtype=torch.long), **given)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"model: {type(model).__name__} cannot be planned from its config alone, as it does not run without "
            f"numbers: {type(error).__name__}: {error}"
        ) from error
    return Probe(cache, watcher.attending, reads.bytes)


class _Watcher:
    """The owner of the layers of a cache that evicts nothing: takes note of those that attend."""

    plain = True

    def __init__(self) -> None:
        self.attending: set[int] = set()

    def updating(self, layer: EvictingLayer, new: int) -> None:
        """Evict nothing."""

    def attended(self, layer: EvictingLayer, attended: Attended) -> None:
        """Take note that attention has run."""
        self.attending.add(layer.index)
        layer.shared = attended.derived is not None

    def took_rows(self, layer: EvictingLayer, rows: Tensor) -> None:
        """Nothing reorders this cache."""

    def cropped(self, layer: EvictingLayer) -> None:
        """Nothing crops this cache."""


class _WeightReads(TorchDispatchMode):
    """Counts the bytes that operations read of each weight, each once, however many read it."""

    _LOOKUPS = (torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default)

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = {_storage(weight): weight.nbytes for weight in model.parameters()}
        self._read: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        return sum(self._read.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for arg in args:
            if isinstance(arg, Tensor) and (weight := _storage(arg)) in self._sizes:
                # A view reads nothing; looking up reads what comes out.
                if isinstance(result, Tensor) and _storage(result) == weight:
                    continue
                read = min(arg.nbytes, result.nbytes) if func in self._LOOKUPS else arg.nbytes
                self._read[weight] = min(max(self._read.get(weight, 0), read), self._sizes[weight])
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _attending(decoder: PreTrainedModel) -> Iterator[None]:
    attend.switch(decoder.config)
    # A model may say which fast kernels it lacks: here none would run.
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        forget()
        attend.restore(decoder.config)
