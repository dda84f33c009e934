"""Tiny random models: every shape of attention that the core has to meet, in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-gqa": {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2},
    "llama-mha": {"model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 3},
    "llama-mqa": {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 1},
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "phi3": {"model_type": "phi3", "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
    "gemma2": {
        "model_type": "gemma2",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 1024},
}
"""Name -> settings of its config."""


def tiny(name: str = "llama-gqa", dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    """Return a tiny model with random weights, always the same ones.

    Args:
        name: one of `SHAPES`.
        dtype: of its weights.
        settings: of its config, over those of the shape.
    """
    config = AutoConfig.for_model(**(_SMALL | SHAPES[name] | settings))
    torch.manual_seed(0)
    # Weights ten times the usual spread: with the usual one, attention is flat and evicting changes nothing.
    if hasattr(config, "initializer_range"):
        config.initializer_range = 0.2
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()
