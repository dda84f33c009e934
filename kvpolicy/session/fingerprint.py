"""`Fingerprint`: what tells a model from another one whose cache it could take for its own."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpolicy.errors import ContextError

# What no key or value depends on.
_VOLATILE = frozenset(
    [
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)
_SAMPLED = 16


@dataclass(frozen=True)
class Fingerprint:
    """A decoder in a few kilobytes.

    Args:
        architecture: its class.
        config: its config, without what says nothing about keys and values.
        dtype: of its weights.
        weights: hash of names, shapes and a few numbers of each of them.
    """

    architecture: str
    config: dict[str, Any]
    dtype: str
    weights: str

    def differences(self, other: Fingerprint) -> str:
        """Return how another model differs from this one, or "": the first of architecture, config, dtype, weights."""
        if self.architecture != other.architecture:
            return f"expected a {self.architecture}, got a {other.architecture}"
        # A setting that only one of them knows comes from another release of transformers.
        unlike = [name for name in sorted(self.config.keys() & other.config) if self.config[name] != other.config[name]]
        if unlike:
            pairs = [f"{name}={self.config[name]!r}, got {other.config[name]!r}" for name in unlike]
            return "expected " + "; ".join(pairs)
        if self.dtype != other.dtype:
            return f"expected weights of {self.dtype}, got {other.dtype}"
        if self.weights != other.weights:
            return "expected the same weights, got other ones (another checkpoint, an adapter, fine-tuned)"
        return ""


def fingerprint(decoder: PreTrainedModel) -> Fingerprint:
    """Return the fingerprint of a decoder, wherever its weights are.

    Raises:
        ContextError: when some of them are not there, or in part.
    """
    whole = json.loads(decoder.config.to_json_string(use_diff=False))
    config = {name: value for name, value in whole.items() if name not in _VOLATILE}
    dtype = str(decoder.dtype).removeprefix("torch.")
    return Fingerprint(type(decoder).__name__, config, dtype, _hash(decoder))


def _hash(decoder: nn.Module) -> str:
    found = hashlib.sha256()
    for name, weight in decoder.named_parameters():
        if weight.is_meta or hasattr(weight, "device_mesh"):
            where = "on the meta device (offloaded)" if weight.is_meta else "spread over several ranks"
            raise ContextError(f"model: expected whole weights in memory, got '{name}' {where}")
        found.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        found.update(_some(weight.detach()))
    return found.hexdigest()


def _some(weight: Tensor) -> bytes:
    flat = weight.reshape(-1)
    places = torch.linspace(0, max(len(flat) - 1, 0), _SAMPLED, dtype=torch.float64).long()
    sample = flat[places.to(flat.device)] if len(flat) else flat
    return sample.cpu().contiguous().view(torch.uint8).numpy().tobytes()
