"""Tiny configs of every architecture: the defaults of transformers' own config classes, shrunk by rule.

A rule says what an attribute's name means (a width, a number of layers, a list with one entry a layer) and how large it
is in a tiny model. What no rule can know stands in `SETTINGS`, by model type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from kvpolicy.testing.architectures.settings import SETTINGS

VOCABULARY = 128
PLAIN_TOKENS = 64
"""Token ids from here on mean nothing special to any tiny model."""
_LAYERS = 3
_HEADS = 4
_HEAD = 16

_RULES = {
    r"(\w+_)?num_key_value_heads|(num_)?kv_(n_)?heads|multi_query_group_num|num_query_groups": 2,
    r"mamba_n(um)?_heads": 8,
    r"(\w+_)?(n|num|attention|n_mamba|resampler)_heads?": _HEADS,
    r"(moe_)?num_(local_)?experts|n_routed_experts": 4,
    r"num_experts_per_tok(en)?|moe_top_?k|moe_k": 2,
    r"num_expert_group|topk_group|(\w+_)?n_?groups?|\w*shared_experts|first_k_dense_replace|num_dense_layers": 1,
    r"zero_expert_num": 2,
    r"rotary_dim": 8,
    r"qk_head_dim": 2 * _HEAD,
    r"(\w+_)?(head_?dim|d_head|head_size)|d_kv|dim_head|kv_channels": _HEAD,
    r"(\w+_)?(rank|lowrank)": 16,
    r"(\w+_)?d_state|(ssm_)?state_size": 8,
    r"sliding_window(_size)?|attention_chunk_size|attention_window_size|local_attention|(\w+_)?chunk_size": 16,
    r"\w*_channels|channels?": 32,
    r"num_filters": 8,
    r"image_size": 32,
    r"patch_size": 8,
    r"(\w+_)?max_(\w+_)?position(s|_embeddings)|n_positions|n_ctx|max_seq_len|model_max_length": 256,
    r"(\w+_)?vocab_size(_\w+)?|\w+_vocab|codebook_size|num_embeddings": VOCABULARY,
    r"(\w+_)?(hidden|intermediate|ffn|ff|inner|embedding|projection|embed|projector|dense)_?(sizes?|dim|channels)(_\w+)?"
    r"|n_embd|n_inner|d_model|embed_dim|d_ff|dff|dim_ff|lru_width|mlp_dim|word_embed_proj_dim|d_inner|share_expert_dim"
    r"|emb_dim|(\w+_)?(input|output|in|out)_(dim|size)|pooler_output_size|\w*feed_forward_size": 64,
}
_SMALL = [(re.compile(names), size) for names, size in _RULES.items()]
_NONE = {"head_dim": _HEAD, "num_key_value_heads": _HEADS, "num_experts_per_tok": 2}
"""What other values follow from where these are not given."""
_LAYERED = re.compile(r"(\w+_)?(num_)?(hidden_|decoder_|encoder_)?layers|n_layers?|(\w+_)?depth|num_blocks")
_TOKEN = re.compile(r"\w+_(token_)?(id|index)")
_LAYER_COUNT = re.compile(r"(num_)?(hidden_|decoder_)?layers|n_layers?|num_blocks")


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return the default config of a model type, shrunk, its sub-configs too."""
    config = CONFIG_MAPPING[model_type]()
    _shrink(config)
    if "is_decoder" in vars(config):
        config.is_decoder = True
    return config


def _shrink(config: PreTrainedConfig) -> None:
    layers = next((value for name, value in vars(config).items() if _LAYER_COUNT.fullmatch(name) and value), 0)
    kept = _kept_layers(config, layers) if isinstance(layers, int) else []
    special = iter(range(3, PLAIN_TOKENS))
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _shrink(value)
        elif not name.startswith("_"):
            setattr(config, name, _small(name, value, layers, kept, special))
    if {"kv_lora_rank", "num_key_value_heads"} <= vars(config).keys():
        # A latent is expanded to as many key heads as there are query heads.
        config.num_key_value_heads = _HEADS
    for path, value in SETTINGS.get(config.model_type, {}).items():
        *parents, name = path.split(".")
        home = attrgetter(*parents)(config) if parents else config
        had = vars(home).get(name)
        setattr(home, name, had | value if isinstance(had, dict) and isinstance(value, dict) else value)


def _kept_layers(config: PreTrainedConfig, layers: int) -> list[int]:
    """Return the first layer of every kind, and more up to `_LAYERS`; kinds are what lists of words say."""
    words = [
        value
        for value in vars(config).values()
        if isinstance(value, (list, tuple)) and len(value) == layers and all(isinstance(one, str) for one in value)
    ]
    kinds: dict[tuple[str, ...], int] = {}
    for layer, kind in enumerate(zip(*words, strict=True)):
        kinds.setdefault(kind, layer)
    kept = set(kinds.values())
    more = (layer for layer in range(layers) if layer not in kept)
    while len(kept) < min(_LAYERS, layers):
        kept.add(next(more))
    return sorted(kept)


def _small(name: str, value: Any, layers: int, kept: list[int], special: Iterator[int]) -> Any:
    if value is None:
        return _NONE.get(name)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if _TOKEN.fullmatch(name):
            return _token(name, value, special)
        return (len(kept) or _LAYERS) if _LAYERED.fullmatch(name) and value > 0 else _size(name, value)
    if isinstance(value, (list, tuple)):
        of_layers = [value[layer] for layer in kept] if kept and len(value) == layers else value
        return type(value)(_size(name, one) if type(one) is int else one for one in of_layers)
    if isinstance(value, dict) and name.startswith("rope"):
        return _rope(value)
    return value


def _token(name: str, value: int, special: Iterator[int]) -> int:
    standard = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if name in standard:
        return standard[name]
    return value if value < len(standard) else next(special)


def _size(name: str, value: int) -> int:
    small = next((size for names, size in _SMALL if names.fullmatch(name)), value)
    return min(value, small) if value > 0 else value


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    small = {name: _rope(inner) if isinstance(inner, dict) else inner for name, inner in value.items()}
    if sections := value.get("mrope_section"):
        small["mrope_section"] = [2, 3, 3][: len(sections)]
    for name in ("short_factor", "long_factor"):
        if name in value:
            small[name] = value[name][: _HEAD // 2]
    return small
