"""What a view says of each slot besides its key and value, in every kind of pass: keys before RoPE, modality."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from watching import SEEN, Watching

import kvpolicy
from kvpolicy.errors import PluginError, PolicyError, UnsupportedModelError, ViewError
from kvpolicy.maths import cosine_redundancy
from kvpolicy.policy import Budget, Decode, Policy
from kvpolicy.selectors.top_k import TopK
from kvpolicy.testing.models import tiny
from kvpolicy.testing.oracle import forward
from kvpolicy.types import LayerView, Needs


def watching(budget: int = 24, **kwargs: Any) -> Policy:
    SEEN.clear()
    return Policy(
        name="watching",
        score=Watching(pre_rope=True),
        budget=Budget(tokens=budget),
        select=TopK(sinks=2, recent=4),
        **kwargs,
    )


def tokens(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 128, (batch, count), generator=torch.Generator().manual_seed(seed))


@contextmanager
def true_keys(model: PreTrainedModel) -> Iterator[dict[int, Tensor]]:
    """Every layer's keys as its projection makes them, over all passes: ``[B, Hkv, seen, Dk]``."""
    found: dict[int, Tensor] = {}

    def hook(index: int) -> Any:
        def take(_: Any, __: Any, output: Tensor) -> None:
            keys = output.unflatten(-1, (-1, model.model.layers[index].self_attn.head_dim)).transpose(1, 2)
            found[index] = torch.cat([found[index], keys], dim=2) if index in found else keys

        return take

    hooks = [layer.self_attn.k_proj.register_forward_hook(hook(at)) for at, layer in enumerate(model.model.layers)]
    yield found
    for one in hooks:
        one.remove()


def check(truth: dict[int, Tensor], views: list[LayerView], rows: Tensor | None = None) -> None:
    for view in views:
        keys = truth[view.layer] if rows is None else truth[view.layer][rows]
        index = view.positions.clamp(min=0).long()[..., None].expand(-1, -1, -1, keys.shape[-1])
        held = view.positions >= 0
        want = keys.float().gather(2, index)[held]
        # Two roundings of float32, of a key turned there and back.
        torch.testing.assert_close(view.pre_rope_keys[held], want, rtol=1e-5, atol=1e-5)


SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("side", ["none", "left"])
def test_keys_before_rope_are_the_projections(side: str, scaling: str) -> None:
    """A prompt in chunks, decoding that evicts, and a follow-up turn."""
    more = {"rope_parameters": SCALINGS[scaling]} if SCALINGS[scaling] else {}
    model = tiny(dtype=torch.float64, **more)
    mask = torch.ones(2, 74, dtype=torch.int64)
    if side == "left":
        mask[0, :9] = 0
    policy, cache, seen = watching(decode=Decode(every=3), prefill="chunks"), DynamicCache(config=model.config), 0
    pieces = [*tokens(2, 48).split(16, dim=1), *tokens(2, 6, 1).split(1, dim=1), tokens(2, 20, 2)]
    with policy.on(model), true_keys(model) as truth:
        for piece in pieces:
            seen += piece.shape[1]
            SEEN.clear()
            forward(model, piece, cache, mask[:, :seen] if side == "left" else None)
            check(truth, SEEN)
    assert len(SEEN) == 3 and SEEN[0].slots > 24


def test_a_prompt_of_several_passes_by_hand() -> None:
    model, cache = tiny(dtype=torch.float64), DynamicCache()
    with watching().on(model) as run, true_keys(model) as truth:
        with run.prompt():
            for piece in tokens(1, 60).split(20, dim=1):
                forward(model, piece, cache, None)
            assert not SEEN
        check(truth, SEEN)
    assert [view.slots for view in SEEN] == [60] * 3


def test_positions_follow_rows_crops_and_reset() -> None:
    """Rows with different padding change places; a token is taken back; the cache begins anew."""
    model = tiny(dtype=torch.float64)
    mask = torch.ones(2, 75, dtype=torch.int64)
    mask[0, :9] = 0
    cache, ids = DynamicCache(config=model.config), tokens(2, 75)
    with watching().on(model), true_keys(model) as truth:
        forward(model, ids[:, :50], cache, mask[:, :50])
        forward(model, ids[:, 50:51], cache, mask[:, :51])
        cache.crop(-1)
        for layer, keys in truth.items():
            truth[layer] = keys[[1, 0, 1], :, :50]
        rows = torch.tensor([1, 0, 1])
        cache.reorder_cache(rows)
        SEEN.clear()
        forward(model, ids[rows, 50:], cache, mask[rows])
        check(truth, SEEN)
        cache.reset()
        truth.clear()
        SEEN.clear()
        forward(model, ids[:, :40], cache, None)
        check(truth, SEEN)
    assert len(SEEN) == 3


@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 16}], ids=str)
def test_generate(drafts: dict[str, Any]) -> None:
    model, ids = tiny(dtype=torch.float64), tokens(1, 20).repeat(1, 3)
    with watching().on(model), true_keys(model) as truth:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, pad_token_id=0, **drafts)
        check({layer: keys[:, :, :60] for layer, keys in truth.items()}, SEEN)
    assert [view.slots for view in SEEN] == [60] * 3


def test_a_model_without_rope_is_refused_before_anything_is_computed() -> None:
    model, passes = tiny("gpt2"), []
    hook = model.transformer.register_forward_hook(lambda *_: passes.append(1))
    implementation = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match="GPT2Model calls no rotary embedding"), watching().on(model):
        pass
    hook.remove()
    assert not passes and model.config._attn_implementation == implementation


def test_values_are_not_rotated() -> None:
    with pytest.raises(PolicyError, match=r"space: expected 'post-rope' with values"):
        kvpolicy.load(
            {
                "name": "x",
                "score": {"type": "euclidean-diversity", "on": "values", "space": "pre-rope"},
                "budget": 64,
            }
        )


def test_what_the_shipped_policy_reads() -> None:
    policy = kvpolicy.load("ecokv-pre-rope", budget=64)
    assert policy.needs == Needs(queries=8, keys=True, values=True, pre_rope=True)
    model = tiny()
    with policy.on(model) as run:
        forward(model, tokens(2, 90), DynamicCache(), None)
    assert [layer["kept"] for layer in run.report.to_dict()["layers"]] == [[[64, 64]] * 2] * 3


def test_alike_tokens_are_alike_before_rope() -> None:
    """The same token everywhere: one key before RoPE, many after."""
    model = tiny(dtype=torch.float64)
    with watching().on(model):
        forward(model, torch.full((1, 90), 5), DynamicCache(), None)
    for view in SEEN:
        every = torch.ones_like(view.valid)
        assert cosine_redundancy(view.pre_rope_keys, every).min() > 0.9999
    with pytest.raises(PluginError, match="reads 'keys' but declares"):
        SEEN[0].keys  # noqa: B018


def test_a_view_without_them_says_so() -> None:
    view = LayerView(keys=torch.zeros(1, 1, 3, 4), values=torch.zeros(1, 1, 3, 4))
    with pytest.raises(ViewError, match="scorer 'x' needs pre_rope_keys, but the view has none"):
        view.limit(Needs(pre_rope=True), "scorer 'x'").pre_rope_keys  # noqa: B018
