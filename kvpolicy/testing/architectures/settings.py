"""What no rule of `configs` can know: settings of single model types.

A mapping is merged into the one that the config has; anything else replaces.
"""

from __future__ import annotations

from typing import Any

_MROPE = {"rope_parameters": {"mrope_section": [2, 3, 3]}}

SETTINGS: dict[str, dict[str, Any]] = {
    # Layers whose kind follows from numbers: without these, no layer would attend to everything.
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "mistral": {"sliding_window": None},
    "zamba": {
        "attention_hidden_size": 128,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    # Layers that reuse the keys and values of earlier ones, a layer of each kind among them.
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "num_kv_shared_layers": 2,
    },
    # Fewer or other parts than the default has, so that the rest fits.
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    "hrm_text": {"num_hidden_layers": 16, "num_layers_per_stack": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "dots3_note_text": {"head_dim": 64},
    "gemma4_text": {"per_layer_config": {2: {"head_dim": 32}}},
    "gemma4_unified_text": {"per_layer_config": {2: {"head_dim": 32}}},
    "mistral_large4_text": {"kv_source_layers": [0, 1, 2]},
    "mistral4": {"head_dim": 32},
    "falcon_h1": {"mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8},
    "zamba2": {"n_mamba_heads": 8, "hybrid_layer_ids": [2], "attention_hidden_size": 128},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "reformer": {"axial_pos_embds_dim": (32, 32)},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]]},
    "step3p5": {"sliding_window": 16},
    # Multimodal RoPE, whose sections have to fill half a head.
    **{
        name: _MROPE
        for name in (
            "hunyuan_vl_text",
            "glm4v_text",
            "glm_ocr_text",
            "paddleocr_vl_text",
            "qwen2_5_omni_text",
            "qwen2_5_vl_text",
            "qwen2_vl_text",
        )
    },
    "ernie4_5_vl_moe_text": {"rope_parameters": {"mrope_section": [3, 3, 2]}},
    "glm4v_moe_text": {"rope_parameters": {"mrope_section": [1, 1, 2]}},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    },
}
