"""Keys before RoPE, against what the models' own key projections (and key norms) gave before they were rotated."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from releases import installed
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.llama import modeling_llama

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.rotary import RotaryRecord, RotaryRecorder, Rotation, find_rotations, unrotate
from kvpolicy.rotary.calls import Call, listen, rotary_modules
from kvpolicy.session.decoder import cache_name, find_decoders
from kvpolicy.testing.models import tiny

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
} | HEADS
SMALL |= {"head_dim": 16, "max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": 1}
GPT = {"vocab_size": 128, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "rotary_dim": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def scaled(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | settings}


LONGROPE = scaled(
    "longrope",
    short_factor=[1.0] * 8,
    long_factor=[1.0 + step for step in range(8)],
    factor=4.0,
    original_max_position_embeddings=16,
)
LLAMA3 = scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
MROPE = scaled("default", mrope_section=[4, 2, 2])

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "linear": {"model_type": "llama", **scaled("linear", factor=4.0)},
    "dynamic": {"model_type": "llama", **scaled("dynamic", factor=2.0), "max_position_embeddings": 16},
    "yarn": {"model_type": "llama", **scaled("yarn", factor=4.0, original_max_position_embeddings=16)},
    "llama3": {"model_type": "llama", **LLAMA3},
    "longrope": {"model_type": "llama", **LONGROPE},
    "key norm": {"model_type": "qwen3"},
    "table": {"model_type": "gptj", **GPT},
    "interleaved": {"model_type": "cohere"},
    "interleaved, partial": {"model_type": "glm"},
    "partial": {"model_type": "phi"},
    "partial, stablelm": {"model_type": "stablelm"},
    "complex": {"model_type": "llama4_text", "use_qk_norm": False, "intermediate_size_mlp": 64, **MOE},
    "sinks, half tables": {"model_type": "gpt_oss", **MOE, **MIXED},
    "some layers without": {"model_type": "smollm3"},
    "local and global": {"model_type": "gemma3_text", **MIXED},
    "qwen2-vl": {"model_type": "qwen2_vl_text", **MROPE},
    "qwen2.5-vl": {"model_type": "qwen2_5_vl_text", **MROPE},
    "qwen3-vl": {"model_type": "qwen3_vl_text", **MROPE},
    "linear layers between": {
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}
LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
OTHERS: dict[str, dict[str, Any]] = {
    "latent": LATENT,
    "pairs across axes": {"model_type": "hunyuan_vl_text", **scaled("default", mrope_section=[2, 2, 2, 2], alpha=1.0)},
    "backwards": {"model_type": "nanochat"},
    "key widths": {"model_type": "gemma4_text", **MIXED, "global_head_dim": 32, "hidden_size_per_layer_input": 0},
    "norm after": {"model_type": "hunyuan_v1_dense"},
    "own by layer": {"model_type": "moshi", "ffn_dim": 64, "sliding_window": 64},
}
NEWER = {"table", "qwen2-vl", "qwen2.5-vl", "linear layers between", "latent", "pairs across axes", "key widths"}
"""Models that older versions of transformers rotate elsewhere, or that have a cache of their own there."""
WITH_AXES = ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"]
CLASSES = {
    "hunyuan_vl_text": "HunYuanVLTextModel",
    "moshi": "MoshiForCausalLM",
    "qwen2_vl_text": "Qwen2VLTextModel",
    "qwen2_5_vl_text": "Qwen2_5_VLTextModel",
    "qwen3_vl_text": "Qwen3VLTextModel",
}


def needs_newer() -> None:
    if not installed(">=5.24"):
        pytest.skip("older versions of transformers rotate elsewhere, which is refused, or cannot do this")


def build(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> PreTrainedModel:
    """Return a tiny decoder whose every weight is random, norms included: weights of one would hide that they scale."""
    if name in NEWER:
        needs_newer()
    return build_anyway(name, dtype, **more)


def build_anyway(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> PreTrainedModel:
    settings = (MODELS | OTHERS)[name] | more
    small = {} if settings["model_type"] == "gptj" else SMALL
    config = AutoConfig.for_model(**(small | settings))
    torch.manual_seed(0)
    made = CLASSES.get(settings["model_type"])
    model = getattr(transformers, made)(config) if made else AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn(weight.shape)
    return find_decoders(model.to(dtype).eval())[0]


def new_cache(decoder: PreTrainedModel) -> DynamicCache:
    """Return a cache in which layers of every kind of attention keep everything."""
    linear = "linear_attention" in (getattr(decoder.config, "layer_types", None) or ())
    return DynamicCache(config=decoder.config) if linear else DynamicCache()


def attending(decoder: PreTrainedModel) -> list[int]:
    kinds = getattr(decoder.config, "layer_types", None) or ["full_attention"] * decoder.config.num_hidden_layers
    return [index for index, kind in enumerate(kinds) if kind != "linear_attention"]


@dataclass
class Ran:
    """What a decoder's passes left: its cache, the record, and by layer the keys before they were rotated."""

    cache: DynamicCache
    record: RotaryRecord
    before: dict[int, list[Tensor]]

    def true_keys(self, layer: int) -> Tensor:
        heads = self.cache.layers[layer].keys.shape[1]
        return torch.cat([by_head(part, heads) for part in self.before[layer]], dim=2)


def by_head(part: Tensor, heads: int) -> Tensor:
    """Return ``[B, Hkv, T, Dk]``: a norm may come before or after the heads are moved forward."""
    if part.ndim == 4 and part.shape[1] == heads:
        return part
    return part.reshape(*part.shape[:2], heads, -1).transpose(1, 2)


@contextmanager
def projections(decoder: nn.Module, lasts: tuple[str, ...] = ("k_norm", "k_proj")) -> Iterator[dict[int, list[Tensor]]]:
    """Collect by layer the output of its key norm, or of its key projection where it has none."""
    found: dict[int, list[Tensor]] = defaultdict(list)
    named = dict(decoder.named_modules())
    handles = []
    for name, module in named.items():
        stem, _, last = name.rpartition(".")
        if last == next((known for known in lasts if f"{stem}.{known}" in named), None):
            layer = int(re.search(r"\.(\d+)\.", name).group(1))  # type: ignore[union-attr]
            handles.append(module.register_forward_hook(lambda m, a, out, layer=layer: found[layer].append(out)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def run(
    decoder: PreTrainedModel, rotations: dict[int, Rotation], passes: list[dict[str, Any]], after: Ran | None = None
) -> Ran:
    cache, record = (after.cache, after.record) if after else (new_cache(decoder), RotaryRecord())
    recorder = RotaryRecorder(decoder, {rotation.source for rotation in rotations.values() if rotation.source})
    recorder.attach()
    with projections(decoder) as before, torch.no_grad():
        for given in passes:
            recorder.begin(record)
            decoder(**{cache_name(decoder): cache}, use_cache=True, **given)
            record = recorder.end()
    recorder.detach()
    return Ran(cache, record, before)


def tokens(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 128, (rows, count), generator=torch.Generator().manual_seed(seed))


def assert_close(got: Tensor, true: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Compare within rounding.

    A rotated number is off by two halves of an eps of its pair's length (products and sum), and undoing mixes two of
    them: 1.5 eps. Undoing adds, in float32, products, sum, norm and quotient of its own, and the tables' last digit: 6.
    """
    assert got.dtype == torch.float32
    true = true.float()
    length = float(true.square().sum(-1).max().sqrt())
    bound = (1.5 * torch.finfo(dtype).eps + 6 * torch.finfo(torch.float32).eps) * length
    assert float((got - true).abs().max()) <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_keys_are_those_of_the_projection(name: str, dtype: torch.dtype) -> None:
    decoder = build(name, dtype)
    rotations = find_rotations(decoder, attending(decoder))
    # The lengths pass what the scaled models were trained on, so that dynamic and longrope change their frequencies.
    ran = run(decoder, rotations, [{"input_ids": tokens(2, count, count)} for count in (11, 14, 1, 1)])
    turned = 0
    for layer, rotation in rotations.items():
        stored = ran.cache.layers[layer].keys
        true = ran.true_keys(layer)
        assert_close(unrotate(stored, None, rotation, ran.record), true, dtype)
        turned += not torch.equal(stored, true)
        columns = torch.randint(-1, 27, (2, stored.shape[1], 9), generator=torch.Generator().manual_seed(layer))
        at = columns.clamp(min=0)[..., None].expand(-1, -1, -1, stored.shape[-1])
        kept = unrotate(stored.gather(2, at), columns, rotation, ran.record)
        assert_close(kept, true.gather(2, at), dtype)
    assert turned == sum(rotation.source is not None for rotation in rotations.values()) > 0


@pytest.mark.parametrize(
    ("name", "turned"),
    [
        ("llama", ["half 0:16"] * 4),
        ("table", ["interleaved 0:8"] * 3),
        ("interleaved", ["interleaved 0:16"] * 4),
        ("interleaved, partial", ["interleaved 0:8"] * 4),
        ("partial", ["half 0:8"] * 4),
        ("complex", ["interleaved 0:16"] * 3 + ["none"]),
        ("some layers without", ["half 0:16"] * 3 + ["none"]),
    ],
)
def test_what_is_found(name: str, turned: list[str]) -> None:
    decoder = build(name)
    found = find_rotations(decoder, range(len(turned)))
    assert list(found) == list(range(len(turned)))
    assert [
        "none" if one.source is None else f"{one.pairs} {one.start}:{one.start + one.size}" for one in found.values()
    ] == turned


@pytest.mark.parametrize("kind", ["default", "dynamic", "longrope"])
def test_local_and_global_layers_have_their_own_frequencies(kind: str) -> None:
    if kind == "longrope":
        needs_newer()
    # Up to the length trained on, those that scale dynamically are the plain ones.
    plain = scaled("default")["rope_parameters"]
    own = {"default": scaled("default", rope_theta=1e6), "dynamic": scaled("dynamic", factor=2.0), "longrope": LONGROPE}
    parameters = {"sliding_attention": plain, "full_attention": own[kind]["rope_parameters"]}
    decoder = build("local and global", rope_parameters=parameters)
    found = find_rotations(decoder, range(4))
    kinds = [dict(found[layer].source.options)["layer_type"] for layer in range(4)]  # type: ignore[union-attr]
    assert kinds == MIXED["layer_types"]
    ran = run(decoder, {1: found[1]}, [{"input_ids": tokens(1, 5)}])
    assert list(ran.record.tracks) == [found[1].source]


@pytest.mark.parametrize("name", WITH_AXES)
def test_positions_of_three_axes(name: str) -> None:
    decoder = build(name)
    rotations = find_rotations(decoder, range(4))
    drawn = torch.Generator().manual_seed(1)
    passes = [
        {"input_ids": tokens(2, count, count), "position_ids": torch.randint(0, 60, (3, 2, count), generator=drawn)}
        for count in (12, 5, 1)
    ]
    ran = run(decoder, rotations, passes)
    for layer, rotation in rotations.items():
        assert_close(unrotate(ran.cache.layers[layer].keys, None, rotation, ran.record), ran.true_keys(layer))


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_columns_keep_the_frequencies_of_their_pass(name: str) -> None:
    decoder = build(name)
    rotations = find_rotations(decoder, [0])
    source = rotations[0].source
    assert source is not None
    passes = [{"input_ids": tokens(1, count)} for count in (6, 4, 10, 1)]
    ran = run(decoder, rotations, passes)
    track = ran.record.tracks[source]
    changes = {"dynamic": [0, 10, 20], "longrope": [0, 10]}
    assert [epoch.start for epoch in track.epochs] == changes[name]
    # With the frequencies of its last pass alone, the first columns would come out wrong.
    last = RotaryRecord({source: copy.copy(track)})
    object.__setattr__(last.tracks[source], "epochs", (copy.copy(track.epochs[-1]),))
    wrong = unrotate(ran.cache.layers[0].keys, None, rotations[0], last)
    assert float((wrong - ran.true_keys(0)).abs().max()) > 0.01
    assert_close(unrotate(ran.cache.layers[0].keys, None, rotations[0], ran.record), ran.true_keys(0))


@pytest.mark.parametrize("name", ["llama", "linear", "yarn", "llama3"])
def test_fixed_frequencies_are_kept_once(name: str) -> None:
    decoder = build(name)
    rotations = find_rotations(decoder, [0])
    ran = run(decoder, rotations, [{"input_ids": tokens(1, count)} for count in (6, 20, 1, 1)])
    assert [len(track.epochs) for track in ran.record.tracks.values()] == [1]


def test_padded_rows_and_beams() -> None:
    decoder = build("llama")
    rotations = find_rotations(decoder, range(4))
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[0, :4] = mask[2, :1] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    first = {"input_ids": tokens(3, 10), "attention_mask": mask, "position_ids": positions}
    ran = run(decoder, rotations, [first])
    rows = torch.tensor([2, 2, 0, 1])
    ran.cache.reorder_cache(rows)
    record = ran.record.take_rows(rows)
    for layer, rotation in rotations.items():
        assert_close(unrotate(ran.cache.layers[layer].keys, None, rotation, record), ran.true_keys(layer)[rows])


def test_rows_that_share_their_positions_may_be_repeated() -> None:
    decoder = build("llama")
    rotations = find_rotations(decoder, [0])
    ran = run(decoder, rotations, [{"input_ids": tokens(2, 7)}])
    rows = torch.tensor([1, 1, 0])
    kept = unrotate(ran.cache.layers[0].keys[rows], None, rotations[0], ran.record.take_rows(rows))
    assert_close(kept, ran.true_keys(0)[rows])


def test_a_pass_with_positions_by_row_follows_one_without() -> None:
    decoder = build("llama")
    rotations = find_rotations(decoder, [0])
    ran = run(
        decoder,
        rotations,
        [
            {"input_ids": tokens(2, 5)},
            {"input_ids": tokens(2, 2), "position_ids": torch.tensor([[5, 6], [9, 40]])},
        ],
    )
    assert_close(unrotate(ran.cache.layers[0].keys, None, rotations[0], ran.record), ran.true_keys(0))


@pytest.mark.parametrize("kept", [0, 18])
def test_crop(kept: int) -> None:
    decoder = build("dynamic")
    rotations = find_rotations(decoder, [0])
    ran = run(decoder, rotations, [{"input_ids": tokens(1, 20)}, {"input_ids": tokens(1, 4)}])
    ran.cache.crop(kept - 24)
    shorter = ran.record.crop(kept)
    assert (shorter.seen, ran.record.seen) == (kept, 24)
    assert unrotate(ran.cache.layers[0].keys, None, rotations[0], shorter).shape == (1, 2, kept, 16)
    longer = run(decoder, rotations, [{"input_ids": tokens(1, 5)}], Ran(ran.cache, shorter, ran.before))
    true = torch.cat([ran.true_keys(0)[:, :, :kept], longer.true_keys(0)], dim=2)
    assert_close(unrotate(longer.cache.layers[0].keys, None, rotations[0], longer.record), true)


def test_a_record_is_a_value_and_caches_may_take_turns() -> None:
    decoder = build("longrope")
    rotations = find_rotations(decoder, [0])
    recorder = RotaryRecorder(decoder, [rotations[0].source])  # type: ignore[list-item]
    recorder.attach()
    caches, records = [DynamicCache(config=decoder.config) for _ in range(2)], [RotaryRecord(), RotaryRecord()]
    before: list[list[Tensor]] = [[], []]
    # One of them is past what it was trained on, the other is not: each pass rewrites the other's frequencies.
    for count in (20, 1, 2):
        for turn, length in enumerate((count, 2)):
            with projections(decoder) as found, torch.no_grad():
                recorder.begin(records[turn])
                decoder(**{cache_name(decoder): caches[turn]}, input_ids=tokens(1, length), use_cache=True)
                records[turn] = recorder.end()
            before[turn] += found[0]
    recorder.detach()
    for cache, record, parts in zip(caches, records, before, strict=True):
        true = Ran(cache, record, {0: parts}).true_keys(0)
        assert [len(track.epochs) for track in record.tracks.values()] == [1]
        assert_close(unrotate(cache.layers[0].keys, None, rotations[0], record), true)


def test_a_copy_of_a_record_holds_nothing_of_the_model() -> None:
    decoder = build("dynamic")
    rotations = find_rotations(decoder, [0])
    ran = run(decoder, rotations, [{"input_ids": tokens(1, 20)}])
    epoch = next(iter(ran.record.tracks.values())).epochs[0]
    assert epoch.module._forward_hooks is not decoder.rotary_emb._forward_hooks
    keys = ran.cache.layers[0].keys
    assert torch.equal(
        unrotate(keys, None, rotations[0], copy.deepcopy(ran.record)), unrotate(keys, None, rotations[0], ran.record)
    )


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_record_made_in_inference_mode_is_of_use_outside(name: str) -> None:
    decoder = build(name)
    with torch.inference_mode():
        rotations = find_rotations(decoder, [0])
        ran = run(decoder, rotations, [{"input_ids": tokens(2, 20)}])
    after = run(decoder, rotations, [{"input_ids": tokens(2, 20)}])
    assert torch.equal(
        unrotate(ran.cache.layers[0].keys.clone(), None, rotations[0], ran.record.take_rows(torch.tensor([0, 1]))),
        unrotate(after.cache.layers[0].keys, None, rotations[0], after.record),
    )


def test_embeddings_that_each_layer_has_for_itself_are_heard_once() -> None:
    decoder = build("own by layer")
    rotations = find_rotations(decoder, range(4))
    assert {str(rotation.source) for rotation in rotations.values()} == {"layers.0.self_attn.rotary_emb()"}


def test_latents_are_not_rotated() -> None:
    assert [str(rotation) for rotation in find_rotations(build("latent"), range(4)).values()] == ["none"] * 4


@pytest.mark.skipif(not installed("==5.2.*"), reason="newer releases rotate where it is seen")
@pytest.mark.parametrize("name", ["table", "qwen2-vl", "qwen2.5-vl"])
def test_a_release_that_rotates_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="calls no rotary embedding"):
        find_rotations(build_anyway(name), range(2))


def test_a_decoder_without_rotary_embedding_is_refused() -> None:
    decoder = find_decoders(tiny("gpt2"))[0]
    with pytest.raises(UnsupportedModelError, match=r"GPT2Model calls no rotary embedding .* back to before RoPE"):
        find_rotations(decoder, range(3))


def test_pairs_that_two_axes_turn_are_refused() -> None:
    decoder = build("pairs across axes")
    for layer in decoder.layers:
        nn.init.ones_(layer.self_attn.key_layernorm.weight)
    with pytest.raises(UnsupportedModelError, match=r"HunYuanVLTextModel: no known rotation .* layers 0 .*, 3 "):
        find_rotations(decoder, range(4))


def test_a_norm_after_the_rotation_is_refused_once_it_is_trained() -> None:
    decoder = build("norm after")
    for layer in decoder.layers:
        nn.init.ones_(layer.self_attn.key_layernorm.weight)
    assert len(find_rotations(decoder, range(4))) == 4
    decoder.layers[2].self_attn.key_layernorm.weight.data += torch.linspace(0, 1, 16)
    with pytest.raises(
        UnsupportedModelError, match=r"HunYuan\w+: no known rotation .* layers 2 \(off by 0\.\d+\) depend"
    ):
        find_rotations(decoder, range(4))


def test_a_rotation_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = modeling_llama.apply_rotary_pos_emb

    def shifted(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return plain(q, k.roll(1, -1), cos, sin)[0], plain(q, k, cos, sin)[1].roll(1, -1)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", shifted)
    with pytest.raises(UnsupportedModelError, match=r"LlamaModel: no known rotation .* layers 0 .*, 1 .*, 2 .*, 3 "):
        find_rotations(build("llama"), range(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_pair_that_does_more_than_turn_is_refused(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    plain = modeling_llama.apply_rotary_pos_emb

    def nearly(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # One pair of eight is scaled with its position, as no rotation does.
        scale = torch.ones_like(cos)
        scale[..., 3] = scale[..., 11] = 1 + 0.5 * cos[..., 0].abs()
        turned = plain(q, k, cos, sin)
        return turned[0], turned[1] * scale[:, None]

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", nearly)
    with pytest.raises(UnsupportedModelError, match="no known rotation"):
        find_rotations(build("llama", dtype), range(4))


def test_the_last_dimensions_may_be_those_that_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = modeling_llama.apply_rotary_pos_emb

    def last(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned = plain(q[..., 8:], k[..., 8:], cos, sin)
        return torch.cat([q[..., :8], turned[0]], -1), torch.cat([k[..., :8], turned[1]], -1)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", last)
    decoder = build("llama", **scaled("linear", factor=1.0, partial_rotary_factor=0.5))
    rotations = find_rotations(decoder, range(4))
    ran = run(decoder, rotations, [{"input_ids": tokens(2, 9)}])
    for layer, rotation in rotations.items():
        assert_close(unrotate(ran.cache.layers[layer].keys, None, rotation, ran.record), ran.true_keys(layer))


def test_pairs_may_turn_backwards() -> None:
    decoder = build("backwards")
    rotations = find_rotations(decoder, range(4))
    with projections(decoder, ("k_proj",)) as before:
        ran = run(decoder, rotations, [{"input_ids": tokens(2, 9)}])
    for layer, rotation in rotations.items():
        true = Ran(ran.cache, ran.record, before).true_keys(layer)
        # Its norm, which has no weights, comes after the rotation, and commutes with it.
        true = true * (true.square().mean(-1, keepdim=True) + decoder.config.rms_norm_eps).rsqrt()
        off = unrotate(ran.cache.layers[layer].keys, None, rotation, ran.record) - true
        assert float(off.abs().max()) <= 16 * torch.finfo(torch.float32).eps * float(true.norm(dim=-1).max())


def test_undoing_is_done_in_float32() -> None:
    decoder = build("yarn", torch.bfloat16)
    rotations = find_rotations(decoder, [0])
    ran = run(decoder, rotations, [{"input_ids": tokens(1, 30)}])
    keys = torch.randn(1, 2, 30, 16, generator=torch.Generator().manual_seed(0))
    tables = decoder.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), torch.arange(30)[None])
    assert tables[0].dtype == torch.bfloat16
    turned = modeling_llama.apply_rotary_pos_emb(keys, keys, *(table.float() for table in tables))[1]
    assert_close(unrotate(turned, None, rotations[0], ran.record), keys)


class Embedding(nn.Module):
    """A rotary embedding that gives what it is told to."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.output


@pytest.mark.parametrize(
    ("output", "heard"),
    [
        ((torch.ones(2, 5, 8), torch.zeros(2, 5, 8)), 1),
        (torch.ones(2, 5, 8, dtype=torch.complex64), 1),
        (torch.ones(2, 5, 8), 0),
        ((torch.ones(3, 2, 5, 8), torch.zeros(3, 2, 5, 8)), 0),
        ((torch.ones(2, 5, 8), torch.zeros(2, 5, 4)), 0),
        ((torch.ones(2, 5, 8), None), 0),
    ],
)
def test_which_outputs_are_cosines_and_sines(output: Any, heard: int) -> None:
    calls: list[Call] = []
    module = Embedding(output)
    handle = listen("it", module, calls.append)
    module(torch.zeros(2, 5, 16), position_ids=torch.arange(5).expand(3, 2, 5))
    handle.remove()
    assert [str(call.source) for call in calls] == ["it()"] * heard


def test_rotary_embeddings_are_leaves() -> None:
    assert list(rotary_modules(build("llama"))) == ["rotary_emb"]


def test_an_embedding_with_positions_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = build("llama")
    # A table, which is not asked for more than the decoder asks; and a decoder that takes no positions.
    decoder.rotary_emb.register_buffer("table", torch.zeros(2, 2))
    monkeypatch.setattr(
        decoder, "forward", lambda position_ids, **given: type(decoder).forward(decoder, **given), raising=True
    )
    with pytest.raises(
        UnsupportedModelError, match=r"LlamaModel: its rotary embedding rotary_emb\(\) is not called with"
    ):
        find_rotations(decoder, [0])


def test_positions_are_kept_even_if_the_model_reuses_their_tensor() -> None:
    decoder = build("llama")
    rotations = find_rotations(decoder, [0])
    positions = torch.arange(9, dtype=torch.int32)[None]
    ran = run(decoder, rotations, [{"input_ids": tokens(1, 9), "position_ids": positions}])
    positions.zero_()
    assert_close(unrotate(ran.cache.layers[0].keys, None, rotations[0], ran.record), ran.true_keys(0))


def test_layers_are_given_in_the_order_asked_for() -> None:
    decoder = build("key widths")
    assert list(find_rotations(decoder, [3, 0, 1])) == [3, 0, 1]


def test_a_dimension_far_larger_than_the_rest_rounds_as_it_may() -> None:
    decoder = build("llama", torch.bfloat16, attention_bias=True, head_dim=1024)
    for layer in decoder.layers:
        layer.self_attn.k_proj.bias.data[5] = 300
    rotations = find_rotations(decoder, range(4))
    assert {(rotation.pairs, rotation.size) for rotation in rotations.values()} == {("half", 1024)}


def test_nothing_is_learned() -> None:
    decoder = build("llama")
    learning: list[bool] = []
    decoder.norm.register_forward_hook(lambda *_: learning.append(torch.is_grad_enabled()))
    find_rotations(decoder, [0])
    assert learning == [False]


def test_keys_that_are_not_numbers_are_refused() -> None:
    decoder = build("llama")
    decoder.layers[1].self_attn.k_proj.weight.data[0] = torch.nan
    with pytest.raises(UnsupportedModelError, match=r"layers 1 \(off by (nan|inf)\)"):
        find_rotations(decoder, [0, 1])


def test_a_layer_that_caches_nothing_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"caches none in layers \[7\]"):
        find_rotations(build("llama"), [0, 7])


def test_a_decoder_that_fails_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = build("llama")
    monkeypatch.setattr(decoder, "forward", lambda **given: 1 / 0)
    with pytest.raises(UnsupportedModelError, match="fails on single tokens: ZeroDivisionError"):
        find_rotations(decoder, [0])


@pytest.mark.parametrize("name", ["llama", "dynamic", "longrope", "table", "local and global"])
def test_nothing_is_left_behind(name: str) -> None:
    decoder = build(name).train()
    decoder.layers[0].eval() if hasattr(decoder, "layers") else decoder.h[0].eval()
    seen: list[object] = []
    decoder.register_forward_pre_hook(lambda *given: seen.append(given))
    run(decoder, {}, [{"input_ids": tokens(1, 20)}])
    seen.clear()

    def state() -> list[Any]:
        parts: list[Any] = [torch.get_rng_state().tolist()]
        for module in decoder.modules():
            parts += [module.training, len(module._forward_hooks), len(module._forward_pre_hooks)]
            if "Rotary" in type(module).__name__:
                parts += [(key, id(value)) for key, value in vars(module).items()]
                parts += [(key, id(value), value._version, value.tolist()) for key, value in module._buffers.items()]
        return parts

    before = state()
    rotations = find_rotations(decoder, [0])
    assert state() == before and not seen
    run(decoder, rotations, [])
    assert state() == before


def test_columns_that_were_not_heard_are_refused() -> None:
    decoder = build("llama")
    rotations = find_rotations(decoder, [0])
    ran = run(decoder, rotations, [{"input_ids": tokens(1, 5)}])
    keys = ran.cache.layers[0].keys
    with pytest.raises(UnsupportedModelError, match=r"expected one position for each of 4 keys .* got 5"):
        unrotate(keys[:, :, 1:], None, rotations[0], ran.record)
    with pytest.raises(UnsupportedModelError, match=r"expected one position for each of 5 keys .* got 0"):
        unrotate(keys, torch.arange(5).expand(1, 2, 5), rotations[0], RotaryRecord())


def test_other_positions_in_the_same_pass_are_refused() -> None:
    decoder = build("llama")
    rotations = find_rotations(decoder, [0])
    recorder = RotaryRecorder(decoder, [rotations[0].source])  # type: ignore[list-item]
    recorder.attach()
    recorder.begin(RotaryRecord())
    x = torch.zeros(1, 3, 64)
    decoder.rotary_emb(x, torch.arange(3)[None])
    decoder.rotary_emb(x, torch.arange(3)[None])
    assert recorder.record.seen == 3
    with pytest.raises(UnsupportedModelError, match=r"LlamaModel: its rotary embedding rotary_emb\(\) .* different"):
        decoder.rotary_emb(x, torch.arange(1, 4)[None])
    recorder.detach()


def test_passes_of_other_caches_are_not_heard() -> None:
    decoder = build("llama")
    rotations = find_rotations(decoder, [0])
    recorder = RotaryRecorder(decoder, [rotations[0].source])  # type: ignore[list-item]
    recorder.attach()
    with torch.no_grad():
        decoder(input_ids=tokens(1, 5), use_cache=False)
    assert recorder.record.seen == 0
    recorder.detach()
