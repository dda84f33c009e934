"""`Subject`: the model that is timed, and the text that it reads."""

from __future__ import annotations

import kvpolicy.compat  # noqa: F401  (first: it says so where transformers is too old for the rest)

# isort: split
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvpolicy import models
from kvpolicy.errors import KVPolicyError, nearest
from kvpolicy.texts import contexts, unrepeated

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 131072,
    },
}
"""Name -> config of a model whose weights are made up: time and memory do not depend on their numbers."""


class BenchError(KVPolicyError, ValueError):
    """What is to be measured is wrong, or a file holds no measurements."""


@dataclass(frozen=True)
class Subject:
    """A model and the text it reads.

    Args:
        name: of the model.
        model: in evaluation mode.
        ids: int64 ``[1, N]``, the text.
    """

    name: str
    model: PreTrainedModel
    ids: Tensor

    def prompt(self, tokens: int) -> Tensor:
        """Return the first tokens of the text, int64 ``[1, tokens]``."""
        return self.ids[:, :tokens]


def read_model(name: str | None, *, tokens: int, dtype: torch.dtype, device: str) -> Subject:
    """Return a model that is there, and real English text.

    Args:
        name: as `kvpolicy.models.load` takes it.
        tokens: how long the text is.
        dtype: of the weights.
        device: where it computes.
    """
    model, tokenizer = models.load(name, dtype=dtype, device=device)
    # One text: no topic alone is as long as the longest contexts.
    text = contexts(tokenizer, tokens=tokens, count=1, of=["\n\n".join(unrepeated())])
    return Subject(name or models.DEFAULT, model, torch.tensor(text, device=device))


def made_up(shape: str, *, layers: int | None, tokens: int, dtype: torch.dtype, device: str) -> Subject:
    """Return a model of a known shape with random weights, always the same, and random text.

    Args:
        shape: one of `SHAPES`.
        layers: how many it has instead of all of them.
        tokens: how long the text is.
        dtype: of the weights.
        device: where it computes.

    Raises:
        BenchError: when the shape is not known.

    >>> subject = made_up("tiny", layers=2, tokens=8, dtype=torch.float32, device="cpu")
    >>> subject.name, subject.model.config.num_hidden_layers, list(subject.prompt(4).shape)
    ('tiny, 2 layers', 2, [1, 4])
    """
    if shape not in SHAPES:
        raise BenchError(f"shape: unknown shape {shape!r}.{nearest(shape, SHAPES)}")
    cut = {} if layers is None else {"num_hidden_layers": layers}
    config = AutoConfig.for_model(**(SHAPES[shape] | cut))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        ids = torch.randint(config.vocab_size, (1, tokens))
    return Subject(f"{shape}, {config.num_hidden_layers} layers", model, ids)
