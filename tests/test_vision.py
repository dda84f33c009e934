"""Vision-language models with pixels: what a view says of image tokens, and that evicting does what hiding does.

Every model reads pictures, answers, reads a turn of text and answers again, all through `generate`; rows of a batch
have pictures of their own and padding on the left. All is float64, and nothing but the order of sums may differ.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from releases import installed
from torch import Tensor
from transformers import PreTrainedModel, Qwen2_5OmniThinkerConfig
from transformers.cache_utils import DynamicCache
from watching import SEEN, Watching

import kvpolicy
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.policy import Budget, Policy
from kvpolicy.selectors.top_k import TopK
from kvpolicy.session.decoder import cache_name, find_decoders
from kvpolicy.session.modality import modalities
from kvpolicy.store.layer import EvictingLayer
from kvpolicy.testing.architectures.hide import hiding
from kvpolicy.testing.models import tiny
from kvpolicy.testing.vision import FAMILIES, Prompt, Replay, converse, prompt, tiny_model
from kvpolicy.testing.vision.replay import ANSWER, TURN, projections
from kvpolicy.types import MODALITIES

EXACT = {"rtol": 0, "atol": 1e-9}
"""A thousand roundings of float64 on logits of size ten."""
ROWS: dict[str, list[list[int | str]]] = {
    "one row": [[5, "image", 4, "image", 9]],
    "two rows": [[4, "image", 12], [6, "image", 3, "image", 12]],
}
KINDS: dict[str, tuple[list[int], list[int]]] = {
    "qwen3_5": ([2], [0, 1]),
    "gemma3": ([2], [0, 1]),
    "aya_vision": ([2], [0, 1]),
    "mllama": ([0, 2], [1]),
}
"""Which layers of a tiny model evict, and which are left alone, where that is not all and none."""
WITH_AXES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"]
BY_MODALITY: dict[str, Any] = {
    "name": "by modality",
    "score": {
        "type": "by-modality",
        "inside": {
            "type": "redundancy-adaptive",
            "importance": {"type": "snapkv", "window": 4, "kernel": 1},
            "diversity": "cosine-diversity",
        },
        "outside": {"type": "snapkv", "window": 4},
    },
    "budget": 18,
}
LIKE_TOP_K = {"type": "top-k", "sinks": 1, "recent": 2}
POLICIES: dict[str, Policy] = {
    "ecokv": kvpolicy.load("ecokv", budget=18, select=LIKE_TOP_K),
    "heads of their own length": kvpolicy.load("ecokv-ada-kv", budget=18, select=LIKE_TOP_K),
    "before rope": kvpolicy.load("ecokv-pre-rope", budget=18, select=LIKE_TOP_K),
    "text protected": kvpolicy.load(
        BY_MODALITY, budget=26, select={"type": "by-modality", "sinks": 1, "recent": 2, "protected": ["text"]}
    ),
    "shares": kvpolicy.load(
        BY_MODALITY, select={"type": "by-modality", "sinks": 1, "recent": 2, "shares": {"image": 0.25, "text": 0.75}}
    ),
}


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    if family == "qwen3_5" and not installed(">=5.6"):
        pytest.skip("before transformers 5.6 it has a cache of its own, and is refused")
    return tiny_model(family)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config())


def held(cache: DynamicCache, layers: list[int]) -> list[list[list[list[int]]]]:
    """The positions that each layer holds, by row and head."""
    found = []
    for layer in layers:
        positions = cache.layers[layer].padded()[2]
        found.append([[head[head >= 0].tolist() for head in row] for row in positions])
    return found


def same_as_replay(model: PreTrainedModel, policy: Policy, given: Prompt, layers: list[int]) -> DynamicCache:
    cache, full = new_cache(model), Replay(model, None, given, layers)
    with policy.on(model):
        got = converse(model, given, cache)
    replay = Replay(model, policy, given, layers)
    with hiding(model, replay), projections(find_decoders(model)[0], replay):
        want = converse(model, given, replay)
    with hiding(model, full):
        whole = converse(model, given, full)
    real = torch.nn.functional.pad(given.mask.bool(), (0, ANSWER + TURN), value=True)
    after = list(range(real.shape[1], real.shape[1] + ANSWER - 1))
    kept = [
        [
            [[*(head & real[row]).nonzero().flatten().tolist(), *after] for head in heads]
            for row, heads in enumerate(rows)
        ]
        for rows in (replay.keep[layer] for layer in layers)
    ]
    assert held(cache, layers) == kept
    assert torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.logits, want.logits, **EXACT)
    assert not torch.allclose(whole.logits, want.logits, rtol=0, atol=1e-3), "evicting changed nothing"
    return cache


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_evicting_does_what_hiding_does(family: str, rows: str) -> None:
    model = model_of(family)
    evicting, left = KINDS.get(family, ([0, 1, 2], []))
    cache = same_as_replay(model, POLICIES["ecokv"], prompt(model, ROWS[rows]), evicting)
    assert [isinstance(layer, EvictingLayer) for layer in cache.layers].count(True) == len(evicting)
    assert not any(isinstance(cache.layers[layer], EvictingLayer) for layer in left)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "ecokv"])
@pytest.mark.parametrize("family", [*WITH_AXES, "llava", "gemma3", "mllama"])
def test_policies_that_ask_for_more(family: str, name: str) -> None:
    """Keys before RoPE, rotated at positions of three axes; what each slot holds; heads of different length."""
    model = model_of(family)
    if name == "before rope" and family in ("qwen2_vl", "qwen2_5_vl") and installed("==5.2.*"):
        with pytest.raises(UnsupportedModelError, match="calls no rotary embedding"), POLICIES[name].on(model):
            pass
        return
    same_as_replay(model, POLICIES[name], prompt(model, ROWS["two rows"]), KINDS.get(family, ([0, 1, 2], []))[0])


WATCHING = Policy(
    name="watching", score=Watching(modality=True), budget=Budget(tokens=18), select=TopK(sinks=1, recent=2)
)


def seen_modality(model: PreTrainedModel, given: Prompt) -> None:
    """Check every view of a conversation: of whole prompts, and of what the first eviction left."""
    SEEN.clear()
    with WATCHING.on(model):
        converse(model, given, new_cache(model))
    truth = torch.nn.functional.pad(given.modality, (0, ANSWER + TURN))
    for view in SEEN:
        index = view.positions.clamp(min=0).long()
        assert torch.equal(view.modality, truth[:, None].expand(-1, view.kv_heads, -1).gather(-1, index))
    assert {view.slots for view in SEEN} == {given.ids.shape[1], 18 + ANSWER - 1 + 1 + TURN}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_view_says_what_each_slot_holds(family: str, rows: str) -> None:
    model = model_of(family)
    given = prompt(model, ROWS[rows])
    images = sum(row.count("image") for row in ROWS[rows])
    # The pictures of cross-attention are in a sequence of their own.
    tokens = FAMILIES[family].tokens * images if FAMILIES[family].placed else 0
    assert int((given.modality == MODALITIES.index("image")).sum()) == tokens
    seen_modality(model, given)


@pytest.mark.parametrize("family", FAMILIES)
def test_vision_towers_are_left_as_they_are(family: str) -> None:
    """Inside a session: the attention that every module but the decoder's uses."""
    model = model_of(family)
    decoder = find_decoders(model)[0]
    mine = {id(module) for module in decoder.modules()}
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    of_decoder = {id(module.config) for module in decoder.modules() if hasattr(module, "config")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    others = [module for module in model.modules() if id(module) not in mine and getattr(module, "config", None)]
    assert any(id(module.config) not in of_decoder for module in others)
    with POLICIES["ecokv"].on(model):
        inside = {key: config._attn_implementation for key, config in configs.items()}
    assert {key for key in before if before[key] != inside[key]} == {id(decoder.config)}
    assert before == {key: config._attn_implementation for key, config in configs.items()}


@pytest.mark.parametrize("family", WITH_AXES)
def test_positions_go_on_from_the_picture_in_forward_passes_by_hand(family: str) -> None:
    """Without `generate`: the model itself derives positions, from tokens seen and the picture's size."""
    model = model_of(family)
    given = prompt(model, ROWS["one row"])
    rest = torch.randint(64, 128, (1, 7), generator=torch.Generator().manual_seed(3))

    def run(cache: Any) -> Tensor:
        passes: list[dict[str, Any]] = [{"input_ids": given.ids, **given.pictures}]
        passes += [{"input_ids": piece} for piece in (*rest[:, :4].split(1, dim=1), rest[:, 4:])]
        with torch.no_grad():
            return torch.cat([model(**one, **{cache_name(model): cache}).logits for one in passes], dim=1)

    layers = KINDS.get(family, ([0, 1, 2], []))[0]
    with POLICIES["ecokv"].on(model):
        got = run(new_cache(model))
    full, replay = (Replay(model, policy, given, layers) for policy in (None, POLICIES["ecokv"]))
    with hiding(model, replay):
        want = run(replay)
    with hiding(model, full):
        whole = run(full)
    torch.testing.assert_close(got, want, **EXACT)
    assert not torch.allclose(whole, want, rtol=0, atol=1e-3), "evicting changed nothing"


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_video(family: str) -> None:
    """Two frames after a picture."""
    model = model_of(family)
    given = prompt(model, [[5, "image", 4, 8, 9]])
    video = torch.zeros_like(given.modality)
    video[:, 17:25] = MODALITIES.index("video")
    random = torch.Generator().manual_seed(4)
    pictures = given.pictures | {
        "pixel_values_videos": torch.randn(2 * 16, 3 * 2 * 8 * 8, dtype=torch.float64, generator=random),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
    }
    if "mm_token_type_ids" in pictures:
        pictures["mm_token_type_ids"] = given.modality.long() + video.long()
    ids = given.ids.masked_fill(video > 0, model.config.video_token_id)
    given = Prompt(ids, given.mask, pictures, given.modality + video)
    seen_modality(model, given)
    same_as_replay(model, POLICIES["shares"], given, [0, 1, 2])


def test_shares_are_exact_in_a_session() -> None:
    """A quarter of 18 slots is 4.5, three quarters 13.5: of equal remainders, the first named is rounded up."""
    model = model_of("llava")
    given = prompt(model, ROWS["two rows"])
    with POLICIES["shares"].on(model):
        cache = new_cache(model)
        with torch.no_grad():
            model(input_ids=given.ids, attention_mask=given.mask, **given.pictures, **{cache_name(model): cache})
    for rows in held(cache, [0, 1, 2]):
        for row, heads in enumerate(rows):
            assert [int(given.modality[row, head].sum()) for head in heads] == [5, 5]


def test_the_page_names_every_family() -> None:
    page = (Path(__file__).parent.parent / "docs" / "vision.md").read_text()
    assert all(f"`{family.name}`" in page for family in FAMILIES.values())


def test_placeholders_are_those_that_the_config_names() -> None:
    config = Qwen2_5OmniThinkerConfig()
    ids = torch.tensor([[7, config.image_token_id, config.video_token_id, config.audio_token_id]])
    assert modalities(ids, config).tolist() == [[0, 1, 2, 3]]


def test_a_model_of_text_holds_text() -> None:
    SEEN.clear()
    model = tiny()
    with WATCHING.on(model):
        model.generate(torch.arange(3, 51)[None], max_new_tokens=1)
    assert len(SEEN) == 3 and not any(view.modality.any() for view in SEEN)


def test_embeddings_alone_are_refused() -> None:
    """Nobody can say which of them are of a picture; not the ids of an earlier call either."""
    model = model_of("llava")
    given = prompt(model, ROWS["one row"])
    embeddings = model.get_input_embeddings()(given.ids)
    with WATCHING.on(model), torch.no_grad():
        model(input_ids=given.ids, **given.pictures)
        with pytest.raises(UnsupportedModelError, match=r"one for each of \[1, 50\] tokens.*got embeddings only"):
            model(inputs_embeds=embeddings)
        with pytest.raises(ValueError):
            model(input_ids=given.ids, pixel_values=torch.zeros(1, 1))
        with pytest.raises(UnsupportedModelError, match="got embeddings only"):
            model(inputs_embeds=embeddings)


def test_the_outermost_model_is_called_with_the_ids_that_count() -> None:
    """An inner one may be called with ids in which placeholders are gone."""
    SEEN.clear()
    model = model_of("llava")
    ids = torch.arange(64, 112)[None]
    ids[0, 5:9] = model.config.image_token_index

    def without(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "input_ids": kwargs["input_ids"].clamp(min=64)}

    with WATCHING.on(model):
        handle = model.model.register_forward_pre_hook(without, prepend=True, with_kwargs=True)
        model(input_ids=ids)
    handle.remove()
    assert SEEN[0].modality[0, 0].nonzero().flatten().tolist() == [5, 6, 7, 8]


def test_ids_that_a_model_makes_more_tokens_of_are_refused() -> None:
    model = model_of("llava")

    def longer(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "inputs_embeds": kwargs["inputs_embeds"].repeat(1, 2, 1)}

    with WATCHING.on(model):
        # Before the session's own hook.
        handle = find_decoders(model)[0].register_forward_pre_hook(longer, prepend=True, with_kwargs=True)
        with pytest.raises(
            UnsupportedModelError, match=r"one for each of \[1, 96\] tokens.*got ids \[1, 48\] for other"
        ):
            model(input_ids=torch.arange(64, 112)[None])
    handle.remove()
