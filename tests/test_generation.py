"""Every way of generating: prompts in chunks, follow-up turns, eviction while decoding, drafts, beams, samples.

What is kept, and every logit, is that of a replay with a full cache in which a mask hides what is evicted: in float64,
where nothing but the order of sums is left between the two.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from releases import installed
from torch import Tensor
from transformers import PreTrainedModel, TextIteratorStreamer
from transformers.cache_utils import DynamicCache

import kvpolicy
from kvpolicy.errors import InactiveSessionError, PolicyError, UnsupportedModelError
from kvpolicy.policy import Policy
from kvpolicy.session.decoder import cache_name
from kvpolicy.store.layer import EvictingLayer
from kvpolicy.testing import oracle
from kvpolicy.testing.models import tiny
from kvpolicy.testing.oracle import Point

EXACT = {"rtol": 0, "atol": 1e-9}
"""A thousand roundings of float64 on logits of size ten."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny(dtype=torch.float64)


def tokens(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 128, (batch, count), generator=torch.Generator().manual_seed(seed))


def load(name: str, budget: Any = 24, **settings: Any) -> Policy:
    """A shipped policy small enough for prompts of 64 tokens."""
    return kvpolicy.load(name, budget=budget, select={"type": "top-k", "sinks": 2, "recent": 4}, **settings)


def padded(batch: int, count: int) -> Tensor:
    """A mask in which row 0 has pads on the left."""
    mask = torch.ones(batch, count, dtype=torch.int64)
    mask[0, :11] = 0
    return mask


def generate(model: PreTrainedModel, ids: Tensor, new: int = 12, **kwargs: Any) -> Tensor:
    kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, **kwargs}
    out = model.generate(ids, max_new_tokens=new, pad_token_id=0, **kwargs)
    return out[:, ids.shape[1] :]


def shown(cache: DynamicCache) -> list[list[list[list[int]]]]:
    """The positions that each layer holds, by row and head."""
    found = []
    for layer in cache.layers:
        keys, _, positions = layer.padded()
        if positions is None:
            positions = torch.arange(keys.shape[2]).expand(keys.shape[:3])
        found.append([[head[head >= 0].tolist() for head in row] for row in positions])
    return found


def listed(keep: list[Tensor]) -> list[list[list[list[int]]]]:
    return [[[head.nonzero().flatten().tolist() for head in row] for row in layer] for layer in keep]


def run(
    model: PreTrainedModel, policy: Policy, pieces: list[Tensor], mask: Tensor | None = None, *, one_prompt: int = 0
) -> tuple[Tensor, DynamicCache]:
    """The logits of the pieces under the policy, the first `one_prompt` of them read as one prompt."""
    cache, found, seen = DynamicCache(config=model.config), [], 0

    def read(piece: Tensor) -> None:
        nonlocal seen
        seen += piece.shape[1]
        found.append(oracle.forward(model, piece, cache, None if mask is None else mask[:, :seen]))

    with policy.on(model) as session:
        if one_prompt:
            with session.prompt():
                for piece in pieces[:one_prompt]:
                    read(piece)
        for piece in pieces[one_prompt:]:
            read(piece)
    return torch.cat(found, dim=1), cache


def same_as_replay(
    model: PreTrainedModel,
    policy: Policy,
    pieces: list[Tensor],
    points: list[Point],
    mask: Tensor | None = None,
    one_prompt: int = 0,
) -> None:
    got, cache = run(model, policy, pieces, mask, one_prompt=one_prompt)
    want, keep = oracle.replay(model, policy, pieces, points, mask)
    full, _ = oracle.replay(model, policy, pieces, [], mask)
    real = torch.ones_like(got[..., 0], dtype=torch.bool) if mask is None else mask.bool()
    if mask is not None:
        keep = [layer & mask[:, None].bool() for layer in keep]
    assert shown(cache) == listed(keep)
    torch.testing.assert_close(got[real], want[real], **EXACT)
    assert not torch.allclose(full[real], want[real], rtol=0, atol=1e-3), "evicting changed nothing"


POLICIES = ["snapkv-w8", "ada-kv", "ecokv-pyramidkv", "key-diff", "ecokv-values-ada-kv"]
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
CHUNKS = [[64], [32, 32], [63, 1], [1, 63], [20, 20, 24], [1, 1, 62], [7] * 9 + [1]]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_prompt_in_chunks_evicts_as_if_it_were_whole(
    model: PreTrainedModel, name: str, side: str, chunks: list[int]
) -> None:
    policy, ids, rest = load(name), tokens(2, 64), tokens(2, 4, 1)
    mask = padded(2, 68) if side == "left" else None
    pieces = [*ids.split(chunks, dim=1), *rest.split(1, dim=1)]
    same_as_replay(model, policy, pieces, [Point(64)], mask, one_prompt=len(chunks))


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", POLICIES)
def test_evicting_at_each_chunk(model: PreTrainedModel, name: str, side: str, chunks: list[int]) -> None:
    policy = load(name, prefill="chunks")
    ids, rest = tokens(2, 64), tokens(2, 4, 1)
    mask = padded(2, 68) if side == "left" else None
    pieces = [*ids.split(chunks, dim=1), *rest.split(1, dim=1)]
    points = [Point(end) for end in itertools.accumulate(chunks)]
    same_as_replay(model, policy, pieces, points, mask, one_prompt=len(chunks))


@pytest.mark.parametrize("mode", ["whole", "chunks"])
@pytest.mark.parametrize("chunk", [16, 31, 32, 63, 64])
@pytest.mark.parametrize("name", ["snapkv-w8", "ecokv-ada-kv"])
def test_prefill_chunk_size_of_generate(model: PreTrainedModel, name: str, chunk: int, mode: str) -> None:
    policy, ids = load(name, prefill=mode), tokens(2, 64)
    with policy.on(model) as session:
        got = generate(model, ids, 1, prefill_chunk_size=chunk, return_dict_in_generate=False)
        kept = [layer["kept"] for layer in session.report.to_dict()["layers"]]
        text = generate(model, ids, prefill_chunk_size=chunk)
        whole = generate(model, ids)
    assert [sum(row) for layer in kept for row in layer] == [48] * 6
    assert torch.equal(got, text[:, :1])
    if mode == "whole":
        # 5.2 gives each chunk the positions of the last one, with a policy and without.
        assert torch.equal(text, whole) == (chunk == 64 or not installed("==5.2.*"))


def test_chunks_bound_what_is_held(model: PreTrainedModel) -> None:
    policy, held = load("snapkv-w8", prefill="chunks"), []
    hook = model.model.layers[1].register_forward_pre_hook(
        lambda _, __, kwargs: held.append(kwargs[cache_name(model)].layers[0].padded()[0].shape[2]), with_kwargs=True
    )
    with policy.on(model):
        generate(model, tokens(1, 200), 1, prefill_chunk_size=16)
    hook.remove()
    assert max(held) == 24


@pytest.mark.parametrize("turn", [2, 3, 30])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_follow_up_turn(model: PreTrainedModel, name: str, side: str, turn: int) -> None:
    policy = load(name)
    pieces = [tokens(2, 64), *tokens(2, 3, 1).split(1, dim=1), tokens(2, turn, 2), tokens(2, 1, 3)]
    mask = padded(2, 68 + turn) if side == "left" else None
    same_as_replay(model, policy, pieces, [Point(64), Point(67 + turn, since=67)], mask)


@pytest.mark.parametrize("grace", [0, 6])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("every", [SLOW(1), 4, 7, SLOW(32)])
@pytest.mark.parametrize("name", POLICIES)
def test_eviction_while_decoding(model: PreTrainedModel, name: str, every: int, side: str, grace: int) -> None:
    policy = load(name, decode={"every": every, "grace": grace})
    pieces = [tokens(2, 64), *tokens(2, 40, 1).split(1, dim=1)]
    points = [Point(64), *(Point(at, grace=grace) for at in range(64 + every, 105, every))]
    same_as_replay(model, policy, pieces, points, padded(2, 104) if side == "left" else None)


@pytest.mark.parametrize("heads", ["uniform", "adaptive"])
def test_decoding_holds_the_budget(model: PreTrainedModel, heads: str) -> None:
    policy = load("snapkv-w8", budget={"tokens": 24, "heads": heads}, decode={"every": 8})
    cache, held = DynamicCache(config=model.config), []
    with policy.on(model):
        oracle.forward(model, tokens(1, 10), cache, None)
        for step in tokens(1, 90, 1).split(1, dim=1):
            oracle.forward(model, step, cache, None)
            held.append(max(sum(layer.kept[0]) / 2 for layer in cache.layers))
    assert held[:14] == list(range(11, 25))
    assert max(held) <= 24 + 8 - 1
    assert held[-40:].count(24) == 5


def test_a_share_is_of_the_tokens_seen(model: PreTrainedModel) -> None:
    policy = load("snapkv-w8", budget=0.5, decode={"every": 10})
    _, cache = run(model, policy, [tokens(1, 60), *tokens(1, 40, 1).split(1, dim=1)])
    assert [layer.kept for layer in cache.layers] == [[[50, 50]]] * 3


def test_new_tokens_enter_the_kept_set(model: PreTrainedModel) -> None:
    policy = load("snapkv-w8", decode={"every": 8, "grace": 12})
    _, cache = run(model, policy, [tokens(1, 60), *tokens(1, 80, 1).split(1, dim=1)])
    middle = [at for layer in shown(cache) for head in layer[0] for at in head if 60 <= at < 128]
    assert len(middle) > 20, "tokens decoded long ago are all gone"
    assert all(list(range(128, 140)) == head[-12:] for layer in shown(cache) for head in layer[0])


@pytest.mark.parametrize("grace", [25, 30])
def test_a_grace_over_the_budget_is_refused(grace: int) -> None:
    with pytest.raises(PolicyError, match=r"decode\.grace: expected at most the budget of 24, got"):
        load("snapkv", decode={"every": 8, "grace": grace})


def repeated(count: int) -> Tensor:
    """A prompt in which there is something to look up."""
    return tokens(1, 20).repeat(1, count)


@pytest.mark.parametrize("drafts", ["prompt lookup", "assistant", "assistant that is right"])
@pytest.mark.parametrize("name", [*POLICIES, "random", "full"])
def test_drafts_change_no_text(model: PreTrainedModel, name: str, drafts: str) -> None:
    policy = kvpolicy.load(name) if name == "full" else load(name)
    other = tiny(dtype=torch.float64)
    if drafts == "assistant":
        torch.manual_seed(1)
        other.lm_head.weight.data += 0.02 * torch.randn_like(other.lm_head.weight)
    how: dict[str, Any] = {"prompt_lookup_num_tokens": 4} if drafts == "prompt lookup" else {"assistant_model": other}
    # No token of the model's: without an end at all, prompt lookup raises before 5.13.
    how["eos_token_id"] = model.config.vocab_size
    passes = []
    hook = model.model.register_forward_pre_hook(
        lambda _, __, kwargs: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with policy.on(model) as session:
        want = generate(model, repeated(4), 40)
        kept = session.report.to_dict()["layers"][0]["kept"]
        passes.clear()
        got = generate(model, repeated(4), 40, **how)
    hook.remove()
    assert torch.equal(got, want)
    assert session.report.to_dict()["layers"][0]["kept"] == kept
    assert passes[0] > 80, "the first pass held no draft"
    if name != "full":
        assert not torch.equal(got, generate(model, repeated(4), 40)), "evicting changed nothing"


def test_drafts_and_eviction_while_decoding_are_refused_at_once(model: PreTrainedModel) -> None:
    policy = load("snapkv", decode={"every": 8})
    with policy.on(model), pytest.raises(UnsupportedModelError, match="got prompt_lookup_num_tokens"):
        generate(model, repeated(4), prompt_lookup_num_tokens=4)


def test_drafts_in_a_follow_up_turn_are_refused_at_once(model: PreTrainedModel) -> None:
    """Stock transformers reads the whole prompt again, into a cache that has it already."""
    cache, ids = DynamicCache(config=model.config), repeated(4)
    with load("snapkv").on(model):
        oracle.forward(model, ids[:, :40], cache, None)
        with pytest.raises(UnsupportedModelError, match="seen 40 tokens"):
            generate(model, ids, prompt_lookup_num_tokens=4, **{cache_name(model): cache})


@pytest.mark.parametrize("setting", [{"assistant_early_exit": 1}, {"use_mtp": True}], ids=str)
def test_drafts_of_the_model_itself_are_refused_at_once(model: PreTrainedModel, setting: dict[str, Any]) -> None:
    with load("snapkv").on(model), pytest.raises(UnsupportedModelError, match="itself"):
        generate(model, repeated(4), **setting)


@pytest.mark.parametrize("name", ["snapkv-w8", "ecokv-ada-kv"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_beams(model: PreTrainedModel, name: str, side: str) -> None:
    """Each beam's score is that of its text, one token after another under the same policy."""
    policy, ids = load(name), tokens(2, 64)
    mask = padded(2, 64) if side == "left" else torch.ones_like(ids)
    how = {"num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    with policy.on(model):
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=8, pad_token_id=0, eos_token_id=None, length_penalty=0.0, **how
        )
    ids, mask = ids.repeat_interleave(3, dim=0), mask.repeat_interleave(3, dim=0)
    new = out.sequences[:, 64:]
    mask = torch.cat([mask, torch.ones_like(new)], dim=1)
    logits, _ = oracle.replay(model, policy, [ids, *new.split(1, dim=1)], [Point(64)], mask)
    chosen = logits[:, 63:-1].log_softmax(-1).gather(-1, new[..., None])[..., 0]
    torch.testing.assert_close(out.sequences_scores.double(), chosen.sum(-1), rtol=1e-5, atol=1e-5)
    assert len({tuple(row.tolist()) for row in new}) == 6


def test_samples_of_one_prompt(model: PreTrainedModel) -> None:
    policy, ids = load("ecokv-ada-kv"), tokens(1, 64)
    with policy.on(model):
        torch.manual_seed(0)
        got = generate(model, ids, do_sample=True, top_k=0, num_return_sequences=4)
    assert len({tuple(row.tolist()) for row in got}) == 4
    logits, _ = oracle.replay(model, policy, [ids.repeat(4, 1), *got.split(1, dim=1)], [Point(64)])
    torch.manual_seed(0)
    for at in range(12):
        drawn = torch.multinomial(logits[:, 63 + at].float().softmax(-1), 1)
        assert torch.equal(drawn[:, 0], got[:, at])


class Words:
    """The tokenizer that a streamer asks for."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(f"{token} " for token in ids)


def test_streaming(model: PreTrainedModel) -> None:
    streamer = TextIteratorStreamer(Words(), skip_prompt=True)  # type: ignore[arg-type]
    with load("ada-kv").on(model):
        got = generate(model, tokens(1, 64), streamer=streamer)
    assert "".join(streamer).split() == [str(token) for token in got[0].tolist()]


def test_continuous_batching_is_refused(model: PreTrainedModel) -> None:
    with load("snapkv").on(model), pytest.raises(UnsupportedModelError, match="paged cache"):
        model.generate_batch([[1, 2, 3]])


def test_a_prompt_that_fails_half_way_leaves_the_session_usable(model: PreTrainedModel) -> None:
    policy, ids = load("snapkv-w8"), tokens(1, 64)
    with policy.on(model) as session:
        with pytest.raises(RuntimeError, match="no more"), session.prompt():
            oracle.forward(model, ids[:, :32], DynamicCache(config=model.config), None)
            raise RuntimeError("no more")
        cache = DynamicCache(config=model.config)
        oracle.forward(model, ids, cache, None)
        assert cache.layers[0].kept == [[24, 24]]
    with pytest.raises(InactiveSessionError, match="inside the session"), session.prompt():
        pass


def test_one_prompt_may_be_read_into_several_caches(model: PreTrainedModel) -> None:
    policy, ids = load("ada-kv"), tokens(1, 64)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with policy.on(model) as session, session.prompt():
        for chunk in ids.split(16, dim=1):
            for cache in caches:
                oracle.forward(model, chunk, cache, None)
        assert all(isinstance(layer, EvictingLayer) and layer.kept == [[64, 64]] for layer in caches[0].layers)
    assert shown(caches[0]) == shown(caches[1])
    assert [sum(layer.kept[0]) for layer in caches[1].layers] == [48] * 3


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["snapkv-w8", "ada-kv"])
def test_a_quantized_store_is_the_numbers_it_gives_back(
    model: PreTrainedModel, name: str, side: str, bits: int
) -> None:
    """Eviction while decoding, beams' rows and a crop: all is as with a plain store of the dequantized numbers."""
    ids, rest = tokens(2, 64), tokens(2, 30, 1)
    mask = padded(2, 94) if side == "left" else None
    kept, found, held = [], [], []
    for store in ({"type": "quantized", "bits": bits, "group": 8, "residual": 8}, "plain"):
        cache, logits = DynamicCache(config=model.config), []
        with load(name, store=store).on(model) as session:
            oracle.forward(model, ids, cache, None if mask is None else mask[:, :64])
            held.append(session.report.bytes)
            for at, layer in enumerate(cache.layers):
                if store == "plain":
                    layer.keys.copy_(kept[at][0])
                    layer.values.copy_(kept[at][1])
                else:
                    kept.append((layer.keys, layer.values))
            for at, step in enumerate(rest[:, :12].split(1, dim=1), start=65):
                logits.append(oracle.forward(model, step, cache, None if mask is None else mask[:, :at]))
            cache.crop(-2)
            cache.reorder_cache(torch.tensor([1, 1]))
            logits.append(oracle.forward(model, rest[:, :1], cache, None if mask is None else mask[[1, 1], :75]))
        found.append(torch.cat(logits, dim=1))
    assert held[0] < 0.7 * held[1]
    torch.testing.assert_close(*found, **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv-w8", "ada-kv"])
def test_compiled_decoding_is_compiled_once(model: PreTrainedModel, name: str) -> None:
    """Graphs end where a cache or our attention begins; none is made anew for a longer cache.

    Until an eviction in decoding, heads may change from lengths of their own to one length: a few graphs more.
    """
    steps, graphs = tokens(1, 16, 1).split(1, dim=1), []

    def decode(compiled: bool) -> Tensor:
        cache, forward = DynamicCache(config=model.config), model.forward
        with load(name, decode={"every": 5}).on(model), torch.no_grad():
            oracle.forward(model, tokens(1, 64), cache, None)
            call = torch.compile(forward, backend="eager") if compiled else forward
            found = []
            for step in steps:
                found.append(call(step, **{cache_name(model): cache}).logits)
                graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return torch.cat(found, dim=1)

    want = decode(compiled=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs.clear()
    torch.testing.assert_close(decode(compiled=True), want, **EXACT)
    assert graphs[6] == graphs[-1] > 0, graphs
