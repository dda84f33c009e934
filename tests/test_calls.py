"""What an attention module was called with, for scorers that need it: there in one pass, and nowhere else."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.models.llama import modeling_llama
from watching import SEEN, Watching

from kvpolicy import functional
from kvpolicy.errors import PluginError, PolicyError, UnsupportedModelError, ViewError
from kvpolicy.plugin import settings
from kvpolicy.policy import Budget, Decode, Policy
from kvpolicy.selectors.top_k import TopK
from kvpolicy.session.decoder import cache_name
from kvpolicy.testing.models import tiny
from kvpolicy.testing.oracle import forward
from kvpolicy.types import Call, LayerView, Needs


@settings
class Asking:
    """Scores a slot by its hidden state, and remembers what it saw."""

    name = "asking"
    needs = Needs(queries=8, keys=True, call=True)

    def __call__(self, view: LayerView) -> Tensor:
        SEEN.append(view)
        return view.call.hidden_states.float().norm(dim=-1)[:, None].expand(view.valid.shape).contiguous()


def asking(budget: int = 24, **kwargs: Any) -> Policy:
    SEEN.clear()
    return Policy(name="asking", score=Asking(), budget=Budget(tokens=budget), select=TopK(sinks=2, recent=4), **kwargs)


def tokens(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 128, (batch, count), generator=torch.Generator().manual_seed(seed))


def half_turned(vectors: Tensor) -> Tensor:
    low, high = vectors.chunk(2, dim=-1)
    return torch.cat([-high, low], dim=-1)


def projected(call: Call, name: str) -> Tensor:
    """What the module makes of its hidden states, after RoPE: ``[B, H, T, D]``."""
    vectors = getattr(call.module, f"{name}_proj")(call.hidden_states).unflatten(-1, (-1, call.module.head_dim))
    if hasattr(call.module, f"{name}_norm"):
        vectors = getattr(call.module, f"{name}_norm")(vectors)
    cos, sin = (part[:, None] for part in call.position_embeddings)
    vectors = vectors.transpose(1, 2)
    return vectors * cos + half_turned(vectors) * sin


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("shape", ["llama-gqa", "qwen3"])
def test_it_makes_the_queries_and_keys_of_the_view(shape: str, side: str) -> None:
    model, mask = tiny(shape, dtype=torch.float64), None
    if side != "none":
        mask = torch.ones(2, 60, dtype=torch.int64)
        mask[0, slice(0, 9) if side == "left" else slice(51, 60)] = 0
    with asking().on(model):
        forward(model, tokens(2, 60), DynamicCache(), mask)
    assert [view.layer for view in SEEN] == [0, 1, 2]
    for view in SEEN:
        assert view.call.module is model.model.layers[view.layer].self_attn
        keys, queries = projected(view.call, "k"), projected(view.call, "q")
        torch.testing.assert_close(keys, view.keys)
        index = view.query_positions[:, None, :, None].expand_as(view.queries)
        torch.testing.assert_close(queries.gather(2, index), view.queries)
        # Each row by itself, without its padding.
        for at, pads in enumerate((0 if side == "none" else 9, 0)):
            row = view.part(at, slice(None), view.valid[at, 0].nonzero()[:, 0])
            assert row.slots == 60 - pads
            torch.testing.assert_close(projected(row.call, "k"), row.keys)


def test_it_decides() -> None:
    """Of the candidates, those with the largest hidden states stay."""
    model, cache = tiny(), DynamicCache()
    with asking().on(model):
        forward(model, tokens(1, 60), cache, None)
    sizes = SEEN[0].call.hidden_states[0].norm(dim=-1)
    best = sizes[2:56].topk(18).indices + 2
    assert cache.layers[0].held[0] == [sorted([0, 1, *best.tolist(), *range(56, 60)])] * 2


@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup_num_tokens": 4}], ids=str)
def test_generate(drafts: dict[str, Any]) -> None:
    """A prompt and its drafts in one pass: the call is that of the prompt alone."""
    model, ids = tiny(dtype=torch.float64), tokens(1, 20).repeat(1, 3)
    with asking().on(model):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, pad_token_id=0, **drafts)
    assert [view.slots for view in SEEN] == [60] * 3
    for view in SEEN:
        assert view.call.hidden_states.shape == (1, 60, 48)
        torch.testing.assert_close(projected(view.call, "k"), view.keys)


def test_a_model_that_names_its_arguments_otherwise() -> None:
    """gpt2: no position embeddings, and hidden states by place."""
    model = tiny("gpt2")
    with asking().on(model):
        forward(model, tokens(1, 60), DynamicCache(), None)
    assert [view.call.position_embeddings for view in SEEN] == [None] * 3


def test_nothing_is_held_after_the_pass() -> None:
    model, cache = tiny(), DynamicCache()
    with asking().on(model) as run:
        forward(model, tokens(1, 60), cache, None)
        gone = [weakref.ref(view.call.hidden_states) for view in SEEN]
        SEEN.clear()
        gc.collect()
        assert [one() for one in gone] == [None] * 3
        assert not any(watch._running.given for each in run._listening.values() for watch in [each.calls])
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    pickle.dumps(model)
    copy.deepcopy(model)


def test_nothing_is_held_after_a_pass_that_fails() -> None:
    model = tiny()

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    handle = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(fail)
    with asking().on(model) as run:
        with pytest.raises(RuntimeError, match="on purpose"):
            forward(model, tokens(1, 60), DynamicCache(), None)
        assert not any(watch._running.given for each in run._listening.values() for watch in [each.calls])
    handle.remove()


def test_who_does_not_need_it_hooks_no_module() -> None:
    model = tiny()
    policy = Policy(name="x", score=Watching(), budget=Budget(tokens=24))
    with policy.on(model):
        assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)


def refused(match: str) -> Any:
    return pytest.raises(UnsupportedModelError, match=match)


def test_a_prompt_in_chunks_is_refused_at_its_first_and_a_later_one_works() -> None:
    model, cache = tiny(), DynamicCache()
    with asking().on(model):
        with refused(r"policy 'asking' needs .* whole prompt in one pass .* got a part of it"):
            given = {"max_new_tokens": 2, "pad_token_id": 0, cache_name(model): cache}
            model.generate(tokens(1, 60), prefill_chunk_size=20, **given)
        assert cache.get_seq_length() == 0 and not SEEN
        forward(model, tokens(1, 60), cache, None)
    assert cache.layers[0].kept == [[24, 24]]


def test_a_prompt_of_several_passes_by_hand_is_refused() -> None:
    model, cache = tiny(), DynamicCache()
    with asking().on(model) as run, refused("got a part of it"), run.prompt():
        forward(model, tokens(1, 60), cache, None)
    assert cache.get_seq_length() == 0 and not SEEN


def test_a_second_turn_is_refused_before_it_reads() -> None:
    """Decoding goes on; a turn of several tokens would evict from slots of which the call is gone."""
    model, cache = tiny(), DynamicCache()
    with asking().on(model):
        forward(model, tokens(1, 60), cache, None)
        forward(model, tokens(1, 1), cache, None)
        with refused("into an empty cache, got a cache that has already seen 61 tokens"):
            forward(model, tokens(1, 7), cache, None)
        forward(model, tokens(1, 1), cache, None)
    assert cache.layers[0].kept == [[26, 26]] and cache.get_seq_length() == 62


def test_a_fork_goes_on_without() -> None:
    """It evicts nothing more, and so needs nothing more."""
    context = asking().compress(tiny(), tokens(1, 60))
    SEEN.clear()
    with context.fork() as fork:
        assert fork.generate(tokens(1, 5), max_new_tokens=3, min_new_tokens=3).shape == (1, 3)
    assert not SEEN


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"decode": Decode(every=4)}, r"decode: expected none with 'asking', which needs what the attention module"),
        ({"prefill": "chunks"}, r"prefill: expected 'whole' with 'asking', which needs .* got 'chunks'"),
    ],
)
def test_a_policy_that_could_never_have_it_is_refused_when_it_is_made(setting: dict[str, Any], match: str) -> None:
    with pytest.raises(PolicyError, match=match):
        asking(**setting)


class Renamed(modeling_llama.LlamaAttention):
    """Its hidden states have another name."""

    def forward(self, states: Tensor, **kwargs: Any) -> Any:
        return super().forward(states, **kwargs)


def test_modules_that_take_other_arguments_are_refused_when_the_session_is_made() -> None:
    model = tiny()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Renamed
    with refused(r"LlamaModel: .* called with 'hidden_states', got none in layers \[0, 1, 2\]"):
        asking().on(model)


def test_position_embeddings_of_another_shape_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of models with three positions a token."""
    model, cache, turn = tiny(), DynamicCache(), modeling_llama.apply_rotary_pos_emb
    model.model.rotary_emb.register_forward_hook(
        lambda _, __, output: tuple(one.expand(3, 1, -1, -1) for one in output)
    )
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: turn(q, k, cos[0], sin[0]))
    wanted = r"LlamaAttention: expected position_embeddings \(cos, sin\), each \[B, 60, size\], got \(\[3, 1, 60, 8\], "
    with asking().on(model), refused(wanted):
        forward(model, tokens(1, 60), cache, None)
    assert not SEEN


def test_reading_it_undeclared_raises() -> None:
    call = Call(nn.Identity(), torch.zeros(1, 3, 5))
    view = LayerView(keys=torch.zeros(1, 1, 3, 4), values=torch.zeros(1, 1, 3, 4), call=call)
    with pytest.raises(PluginError, match=r"scorer 'x' reads 'call' but declares .* Add call=True"):
        view.limit(Needs(keys=True), "scorer 'x'").call  # noqa: B018
    assert view.limit(Needs(call=True), "scorer 'x'").call is call


def test_a_view_without_it_says_so() -> None:
    queries, keys = torch.zeros(1, 2, 8, 4), torch.zeros(1, 1, 8, 4)
    with pytest.raises(ViewError, match=r"scorer 'asking' .* needs call, but the view has none"):
        functional.score(Asking(), queries, keys, keys)
    call = Call(nn.Identity(), torch.arange(8.0).view(1, 8, 1))
    assert functional.score(Asking(), queries, keys, keys, call=call).flatten().tolist() == list(range(8))


@pytest.mark.parametrize("wrong", ["hidden", "cos"])
def test_a_call_that_does_not_fit_the_view_is_refused(wrong: str) -> None:
    hidden, turned = torch.zeros(1, 3, 5), torch.zeros(1, 3, 4)
    call = (
        Call(nn.Identity(), hidden[:, 1:])
        if wrong == "hidden"
        else Call(nn.Identity(), hidden, (turned[:, 1:], turned))
    )
    with pytest.raises(ViewError, match=rf"call: expected {wrong}\w* \[B=1, T=3, size\], got \[1, 2, \d\]"):
        LayerView(keys=torch.zeros(1, 1, 3, 4), values=torch.zeros(1, 1, 3, 4), call=call)
