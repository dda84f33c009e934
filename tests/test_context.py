"""One context, many questions: forks, files, and what is refused.

A fork is compared with the oracle, or with the same cache read on in its own session token by token, which evicts
nothing; in float64, where nothing but the order of sums is left between them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    cache_utils,
)
from transformers.cache_utils import DynamicCache
from transformers.tokenization_utils_base import BatchEncoding

import kvpolicy
from kvpolicy.errors import ContextError, InactiveSessionError, KVPolicyError, UnsupportedModelError
from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.random import Random
from kvpolicy.session.cache_state import cache_state
from kvpolicy.session.context import Context
from kvpolicy.session.decoder import cache_name, forward_names
from kvpolicy.session.saved import versions
from kvpolicy.store import build, restore
from kvpolicy.store.settings import Plain, Quantized
from kvpolicy.testing import oracle
from kvpolicy.testing.models import tiny
from kvpolicy.testing.vision import prompt
from kvpolicy.testing.vision import tiny_model as tiny_vision
from kvpolicy.types import Selection

EXACT = {"rtol": 0, "atol": 1e-9}
"""A thousand roundings of float64 on logits of size ten."""

HYBRID = {
    "model_type": "falcon_h1",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 4,
    "mamba_d_head": 12,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "pad_token_id": 0,
}


def tokens(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 128, (rows, count), generator=torch.Generator().manual_seed(seed))


TEXT, QUESTION, OTHER = tokens(1, 64), tokens(1, 5, 1), tokens(1, 9, 2)


def policy_of(name: str, **settings: Any) -> Policy:
    return kvpolicy.load(name, **{"budget": 24, "select": {"type": "top-k", "sinks": 2, "recent": 4}, **settings})


QUANTIZED = {"type": "quantized", "bits": 8, "group": 8, "residual": 8}
POLICIES = {
    "dense": policy_of("snapkv-w8"),
    "ragged": policy_of("ada-kv"),
    "quantized": policy_of("snapkv-w8", store=QUANTIZED),
    "quantized ragged": policy_of("ada-kv", store=QUANTIZED),
    "decode": policy_of("ecokv-ada-kv", decode={"every": 8}),
    "full": kvpolicy.load("full"),
}

_models: dict[str, PreTrainedModel] = {}


def model_of(name: str) -> PreTrainedModel:
    """A tiny model in float64, made once."""
    if name == "hybrid" and not hasattr(cache_utils, "LinearAttentionAndFullAttentionLayer"):
        pytest.skip("this release of transformers has no such layers")
    if name not in _models:
        _models[name] = tiny("llama-gqa", torch.float64, **HYBRID) if name == "hybrid" else tiny(name, torch.float64)
    return _models[name]


@pytest.fixture
def model() -> PreTrainedModel:
    return model_of("llama-gqa")


def generate(fork: Any, question: Tensor | None, new: int = 6, **settings: Any) -> Tensor:
    return fork.generate(question, **{"max_new_tokens": new, "do_sample": False, "eos_token_id": None, **settings})


def one_by_one(model: PreTrainedModel, policy: Policy, text: Tensor, rest: Tensor, new: int = 0) -> Tensor:
    """The logits of `rest` and of `new` more tokens, read after `text` in a session, one token a pass."""
    cache, found = DynamicCache(config=model.config), []
    with policy.on(model):
        oracle.forward(model, text, cache, None)
        pieces = list(rest.split(1, dim=1))
        while pieces:
            found.append(oracle.forward(model, pieces.pop(0), cache, None))
            if not pieces and len(found) < rest.shape[1] + new:
                pieces.append(found[-1].argmax(-1))
    return torch.cat(found, dim=1)


def held_now(context: Context) -> dict[str, Tensor]:
    """All the tensors that a context holds."""
    return cache_state(context._held.cache, context._held.run).tensors


def held(context: Context) -> dict[str, Tensor]:
    """Copies of them."""
    return {name: tensor.clone() for name, tensor in held_now(context).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["dense", "ragged", "full"])
def test_a_fork_continues_as_the_oracle(model: PreTrainedModel, name: str, side: str) -> None:
    policy, ids = POLICIES[name], tokens(2, 64)
    mask = torch.ones_like(ids)
    mask[0, {"none": slice(0), "left": slice(11), "right": slice(-11, None)}[side]] = 0
    pieces = [tokens(2, 5, 1), tokens(2, 1, 2)]
    context = policy.compress(model, {"input_ids": ids, "attention_mask": mask})
    found, seen = [], mask
    with context.fork() as fork:
        for piece in pieces:
            seen = torch.cat([seen, torch.ones_like(piece)], dim=1)
            found.append(oracle.forward(model, piece, fork.cache, seen))
        kept = fork.report.layers[0].kept
    if side == "right":
        # The oracle wants the last queries last: the same row with its pads on the left.
        ids, mask = ids.clone(), mask.flip(-1)
        ids[0] = ids[0].roll(11)
    plan = None if policy.trivial else oracle.plan(policy, model, ids, mask)
    want = oracle.logits(model, ids, pieces, plan, mask)[:, 64:]
    torch.testing.assert_close(torch.cat(found, dim=1), want, **EXACT)
    assert kept == [[one + 6 for one in row] for row in context.report.layers[0].kept]


@pytest.mark.parametrize("shape", ["llama-gqa", "gemma2", "gpt2", "hybrid"])
@pytest.mark.parametrize("name", POLICIES)
def test_generate_goes_on_from_the_context(shape: str, name: str) -> None:
    model, policy = model_of(shape), POLICIES[name]
    context = policy.compress(model, TEXT)
    with context.fork() as fork:
        got = generate(fork, QUESTION)
    if name != "decode":
        assert torch.equal(got, one_by_one(model, policy, TEXT, QUESTION, 5)[:, 4:].argmax(-1))
    # Without `decode`, the 5 of the question and 5 new ones stay; with it, those after the eviction at 8.
    more = 2 if name == "decode" else 10
    before, after = (one.layers[2].kept for one in (context.report, fork.report))
    assert sum(after[0]) == sum(before[0]) + more * len(before[0])


def test_a_fork_of_a_policy_before_rope_evicts_while_decoding(model: PreTrainedModel) -> None:
    policy = policy_of("ecokv-pre-rope", decode={"every": 4})
    with policy.compress(model, TEXT).fork() as fork:
        got = [oracle.forward(model, piece, fork.cache, None) for piece in OTHER.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(got, dim=1), one_by_one(model, policy, TEXT, OTHER), **EXACT)


@pytest.mark.parametrize("shape", ["llama-gqa", "gemma2", "hybrid"])
@pytest.mark.parametrize("name", POLICIES)
def test_forks_share_nothing(shape: str, name: str) -> None:
    model, policy = model_of(shape), POLICIES[name]
    fresh = []
    for question in (QUESTION, OTHER):
        with policy.compress(model, TEXT).fork() as fork:
            fresh.append([oracle.forward(model, piece, fork.cache, None) for piece in question.chunk(3, dim=1)])
    context = policy.compress(model, TEXT)
    before = held(context)
    with context.fork() as one, context.fork() as other:
        got: list[list[Tensor]] = [[], []]
        for pieces in zip(QUESTION.chunk(3, dim=1), OTHER.chunk(3, dim=1), strict=True):
            for found, fork, piece in zip(got, (one, other), pieces, strict=True):
                found.append(oracle.forward(model, piece, fork.cache, None))
        parts = [cache_state(cache, context._held.run).tensors.values() for cache in (one.cache, other.cache)]
        places = [{part.data_ptr() for part in each if part.numel()} for each in parts]
        assert not places[0] & places[1]
    for mine, want in zip(got, fresh, strict=True):
        assert all(torch.equal(*pair) for pair in zip(mine, want, strict=True))
    assert same(held(context), before)
    with context.fork() as again:
        assert torch.equal(oracle.forward(model, QUESTION.chunk(3, dim=1)[0], again.cache, None), fresh[0][0])


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "decode"])
def test_many_questions_at_once(model: PreTrainedModel, name: str) -> None:
    context = POLICIES[name].compress(model, TEXT)
    ids, mask = torch.zeros(2, 9, dtype=torch.int64), torch.ones(2, 9, dtype=torch.int64)
    ids[0, 4:], ids[1], mask[0, :4] = QUESTION, OTHER, 0
    logits = {"output_logits": True, "return_dict_in_generate": True}
    with context.fork(rows=2) as both:
        got = generate(both, {"input_ids": ids, "attention_mask": mask}, **logits)
    for row, question in enumerate((QUESTION, OTHER)):
        with context.fork() as fork:
            want = generate(fork, question, **logits)
        assert torch.equal(got.sequences[row], want.sequences[0])
        torch.testing.assert_close(got.logits[-1][row], want.logits[-1][0], **EXACT)


@pytest.mark.parametrize("shape", ["gemma2", "hybrid"])
def test_layers_of_other_kinds(shape: str) -> None:
    model, policy = model_of(shape), POLICIES["ragged"]
    context = policy.compress(model, TEXT)
    questions = torch.cat([QUESTION, OTHER[:, :5]])
    with context.fork(rows=2) as both:
        got = generate(both, questions)
    for row, question in zip(got, questions, strict=True):
        with context.fork() as fork:
            assert torch.equal(generate(fork, question)[0], row)
    mask = torch.ones_like(questions)
    mask[0, 0] = 0
    with context.fork(rows=2) as fork, pytest.raises(ContextError, match="question: expected no padding behind"):
        generate(fork, {"input_ids": questions, "attention_mask": mask})
    with pytest.raises(ContextError, match="inputs: expected no padding behind"):
        policy.compress(model, {"input_ids": questions, "attention_mask": mask.flip(-1)})


def test_a_batch_of_contexts_each_with_its_question(model: PreTrainedModel) -> None:
    policy = POLICIES["ragged"]
    texts, questions = tokens(2, 64), tokens(2, 5, 1)
    with policy.compress(model, texts).fork(rows=2) as fork:
        got = generate(fork, questions.repeat_interleave(2, dim=0))
    for row in range(2):
        with policy.compress(model, texts[row]).fork() as fork:
            want = generate(fork, questions[row])
        assert torch.equal(got[2 * row : 2 * row + 2], want.expand(2, -1))


def test_with_the_question_in_view(model: PreTrainedModel) -> None:
    policy = POLICIES["ragged"]
    blind, aware = policy.compress(model, TEXT), policy.compress(model, TEXT, question=OTHER)
    assert (blind.aware, aware.aware) == (False, True)
    assert "query-agnostic" in repr(blind) and "query-aware" in repr(aware)
    assert [one.report.to_dict()["query_aware"] for one in (blind, aware)] == [False, True]
    assert "query-aware: no" in str(blind.report) and "query-aware: yes" in str(aware.report)
    # The question's last token is the first that a fork reads, so that it too sees no more than what was kept.
    read, last = torch.cat([TEXT, OTHER], dim=1).split([72, 1], dim=1)
    assert aware.seen == 72
    want = oracle.logits(model, read, [last], oracle.plan(policy, model, read))[:, 72:]
    with aware.fork() as fork:
        assert fork.report.query_aware
        torch.testing.assert_close(oracle.forward(model, last, fork.cache, None), want, **EXACT)
    with aware.fork() as fork:
        got = generate(fork, None)
    assert torch.equal(got, one_by_one(model, policy, read, last, 5).argmax(-1))
    with pytest.raises(ContextError, match="expected a question, as this context was compressed without one"):  # noqa: SIM117
        with blind.fork() as fork:
            generate(fork, None)


def test_outside_of_compress_nobody_knows(model: PreTrainedModel) -> None:
    with POLICIES["dense"].on(model) as run:
        oracle.forward(model, TEXT, DynamicCache(config=model.config), None)
    assert run.report.to_dict()["query_aware"] is None
    assert "query-aware" not in str(run.report)


@pytest.mark.parametrize("name", POLICIES)
def test_turns_of_a_conversation(model: PreTrainedModel, name: str) -> None:
    context = POLICIES[name].compress(model, TEXT)
    with context.fork() as fork:
        answer = generate(fork, QUESTION)
        got = generate(fork, OTHER)
        whole = torch.cat([TEXT, QUESTION, answer, OTHER, got], dim=1)
        assert torch.equal(fork.tokens.ids, whole)
    if name == "decode":
        return
    rest = torch.cat([QUESTION, answer, OTHER], dim=1)
    assert torch.equal(got, one_by_one(model, POLICIES[name], TEXT, rest, 5)[:, -6:].argmax(-1))


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"prefill_chunk_size": 2}])
@pytest.mark.parametrize("name", ["full", "ragged"])
def test_ways_of_generating(model: PreTrainedModel, name: str, settings: dict[str, Any]) -> None:
    ids = torch.cat([TEXT, OTHER], dim=1)
    stock = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    want = model.generate(ids, **stock, **settings)[:, 73:]
    if "num_beams" not in settings and not torch.equal(want, model.generate(ids, **stock)[:, 73:]):
        pytest.skip("this release of transformers by itself reads a prompt in chunks wrongly")
    context = POLICIES[name].compress(model, TEXT)
    with context.fork() as fork:
        got = generate(fork, OTHER, **settings)
        assert sum(fork.report.layers[0].kept[0]) >= sum(context.report.layers[0].kept[0]) + 2 * 14
    assert got.shape == (1, 6)
    assert name != "full" or torch.equal(got, want)


def test_reading_the_context_again_is_noticed(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    own = model.generate

    def twice(ids: Tensor, **given: Any) -> Tensor:
        oracle.forward(model, ids, given[cache_name(model)], None)
        return own(torch.cat([ids, ids], 1), **given | {"attention_mask": given["attention_mask"].repeat(1, 2)})[:, 69:]

    context = POLICIES["ragged"].compress(model, TEXT)
    monkeypatch.setattr(model, "generate", twice)
    with context.fork() as fork, pytest.raises(UnsupportedModelError, match="reads the context again"):
        generate(fork, QUESTION)


def test_drafts_are_refused(model: PreTrainedModel) -> None:
    # transformers reads all ids again into a cache that holds some of them.
    with POLICIES["full"].compress(model, TEXT).fork() as fork, pytest.raises(UnsupportedModelError, match="drafts"):
        generate(fork, QUESTION, prompt_lookup_num_tokens=3)


def test_several_samples_of_one_question(model: PreTrainedModel) -> None:
    with POLICIES["ragged"].compress(model, TEXT).fork() as fork:
        got = generate(fork, QUESTION, do_sample=True, num_return_sequences=4)
        assert got.shape == (4, 6) and len(got.unique(dim=0)) > 1
        with pytest.raises(ContextError, match="expected one row to go on from"):
            generate(fork, QUESTION)


def test_what_was_read_by_hand_is_gone_on_from_by_hand(model: PreTrainedModel) -> None:
    with POLICIES["dense"].compress(model, TEXT).fork() as fork:
        oracle.forward(model, QUESTION, fork.cache, None)
        with pytest.raises(ContextError, match="expected the 64 tokens that it knows of, got 69"):
            generate(fork, OTHER)


def test_a_fork_ends_with_its_block(model: PreTrainedModel) -> None:
    context = POLICIES["ragged"].compress(model, TEXT)
    fork = context.fork()
    for use in (lambda: fork.cache, lambda: fork.tokens, lambda: generate(fork, QUESTION)):
        with pytest.raises(InactiveSessionError, match="inside its block"):
            use()
    with fork:
        cache = fork.cache
        with pytest.raises(InactiveSessionError, match="it is in use"):
            fork.__enter__()
    with pytest.raises(InactiveSessionError, match="not active"):
        oracle.forward(model, QUESTION, cache, None)
    for gone in (cache, context._held.cache):
        with POLICIES["ragged"].on(model), pytest.raises(InactiveSessionError, match="not active"):
            oracle.forward(model, QUESTION, gone, None)
    assert model.config._attn_implementation == "sdpa"
    with fork:
        assert generate(fork, QUESTION).shape == (1, 6)


def test_a_prompt_within_the_budget_stays_whole(model: PreTrainedModel) -> None:
    context = POLICIES["ragged"].compress(model, TEXT[:, :7])
    assert context.report.layers[0].kept == [[7, 7]]
    with context.fork() as fork:
        got = generate(fork, QUESTION)
    assert torch.equal(got, one_by_one(model, POLICIES["full"], TEXT[:, :7], QUESTION, 5)[:, 4:].argmax(-1))


def test_compressing_computes_the_logits_of_one_token() -> None:
    model, shapes = model_of("gemma2"), []
    hook = model.lm_head.register_forward_hook(lambda _, __, out: shapes.append(out.shape[1]))
    with torch.inference_mode():
        context = POLICIES["dense"].compress(model, TEXT)
    hook.remove()
    assert shapes == [1]
    # What is held outlives the block, and can be written to after it.
    assert not any(tensor.is_inference() for tensor in held_now(context).values())


def test_sliding_layers_hold_their_window_alone() -> None:
    context = POLICIES["dense"].compress(model_of("gemma2"), TEXT)
    keys = context._held.cache.layers[0].keys
    assert keys.untyped_storage().nbytes() == keys.numel() * keys.itemsize


def test_what_a_tokenizer_returns(model: PreTrainedModel) -> None:
    given = BatchEncoding({"input_ids": TEXT, "attention_mask": torch.ones_like(TEXT)})
    for inputs in (given, dict(given), TEXT, TEXT[0], {"input_ids": TEXT.int()}):
        context = POLICIES["dense"].compress(model, inputs)
        assert torch.equal(context.tokens.ids, TEXT)
        for question in (QUESTION, QUESTION[0], BatchEncoding({"input_ids": QUESTION})):
            with context.fork() as fork:
                assert generate(fork, question).shape == (1, 6)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("some text", "inputs: expected ids .* got str"),
        ([1, 2], "inputs: expected ids .* got list"),
        (torch.zeros(1, 4), "got torch.float32"),
        (torch.zeros(1, 0, dtype=torch.int64), "got torch.int64 \\[1, 0\\]"),
        ({"attention_mask": TEXT}, "got NoneType"),
        ({"input_ids": TEXT, "inputs_embeds": torch.zeros(1, 64, 48)}, "got inputs_embeds besides"),
    ],
)
def test_wrong_inputs(model: PreTrainedModel, inputs: Any, message: str) -> None:
    with pytest.raises(ContextError, match=message):
        POLICIES["dense"].compress(model, inputs)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (tokens(3, 5), "question: expected 1 row or 2, one for each of the fork, got 3: context.fork"),
        ({"input_ids": QUESTION, "pixel_values": torch.zeros(1)}, "got pixel_values besides"),
        ({"input_ids": OTHER, "attention_mask": torch.ones_like(OTHER).tril(7)}, "padded on the left"),
        ("why?", "question: expected ids"),
    ],
)
def test_wrong_questions(model: PreTrainedModel, question: Any, message: str) -> None:
    context = POLICIES["dense"].compress(model, tokens(2, 64))
    with context.fork() as fork, pytest.raises(ContextError, match=message):
        generate(fork, question)
    with pytest.raises(ContextError, match=message):
        POLICIES["dense"].compress(model, tokens(2, 64), question)
    with pytest.raises(ContextError, match="at least 2 tokens"):
        POLICIES["dense"].compress(model, TEXT, TEXT[:, :1])
    with pytest.raises(ContextError, match="rows: expected a whole number from 1, got 0"):
        context.fork(rows=0)


def test_a_policy_that_cannot_act_raises() -> None:
    bloom = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", hidden_size=32, n_head=2, n_layer=1))
    with pytest.raises(UnsupportedModelError, match="could not act"):
        POLICIES["dense"].compress(bloom, TEXT)
    windows = tiny("gemma2", layer_types=["sliding_attention"] * 3)
    with pytest.raises(UnsupportedModelError, match="no full-attention layer to compress"):
        POLICIES["full"].compress(windows, TEXT)
    bare = AutoModel.from_config(AutoConfig.for_model("llama", hidden_size=16, num_attention_heads=2, vocab_size=128))
    with (
        POLICIES["dense"].compress(bare, TEXT).fork() as fork,
        pytest.raises(UnsupportedModelError, match="expected a model with generate, got LlamaModel"),
    ):
        fork.generate(QUESTION)


KINDS = [
    *((name, shape) for name in POLICIES for shape in ("llama-gqa", "gemma2", "hybrid")),
    ("padded", "llama-gqa"),
    ("aware", "llama-gqa"),
    ("modality", "llama-gqa"),
]


def made(name: str, shape: str) -> Context:
    model = model_of(shape)
    if name == "padded":
        mask = torch.ones(2, 64, dtype=torch.int64)
        mask[0, :11] = 0
        return POLICIES["ragged"].compress(model, {"input_ids": tokens(2, 64), "attention_mask": mask})
    if name == "aware":
        return POLICIES["dense"].compress(model, TEXT, OTHER)
    if name == "modality":
        select = {"type": "by-modality", "shares": {"text": 0.5, "image": 0.5}}
        return kvpolicy.load("ada-kv", budget=24, select=select, decode={"every": 4}).compress(model, TEXT)
    return POLICIES[name].compress(model, TEXT)


@pytest.mark.parametrize(("name", "shape"), KINDS)
def test_a_saved_context_is_the_same(name: str, shape: str, tmp_path: Path) -> None:
    context, path = made(name, shape), tmp_path / "context.safetensors"
    context.save(path)
    loaded = kvpolicy.load_context(path, model_of(shape))
    assert same(held(loaded), held(context))
    assert (loaded.policy, loaded.aware, repr(loaded)) == (context.policy, context.aware, repr(context))
    reports = [one.report.to_dict() | {"seconds": None} for one in (loaded, context)]
    assert reports[0] == reports[1]
    for part in ("ids", "mask"):
        assert torch.equal(getattr(loaded.tokens, part), getattr(context.tokens, part))
    logits = []
    for one in (context, loaded):
        with one.fork() as fork:
            found = generate(fork, OTHER, 12, output_logits=True, return_dict_in_generate=True)
            logits.append(torch.stack(found.logits))
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["dense", "ragged", "quantized", "quantized ragged"])
def test_a_store_that_has_grown_comes_back(name: str) -> None:
    ragged, hold = "ragged" in name, Quantized(bits=8, group=8, residual=8) if "quantized" in name else Plain()
    lengths = torch.tensor([[5, 5], [5, 9 if ragged else 5]])
    keys, values = torch.randn(2, 2, 2, 40, 16).unbind(0)
    kept, _ = build(
        keys[:, :, :10],
        values[:, :, :10],
        None,
        Selection(torch.cat([torch.arange(n) for n in lengths.flatten()]), lengths),
    )
    store = hold(kept)
    for start in range(10, 40):
        store.append(keys[:, :, start : start + 1], values[:, :, start : start + 1], start)
    store.drop_last(3)
    again = restore(store.state())
    for step in range(2):
        assert all(torch.equal(*pair) for pair in zip(store.padded(), again.padded(), strict=True)), step
        for one in (store, again):
            one.append(keys[:, :, :9], values[:, :, :9], 37)


@pytest.mark.parametrize("name", ["dense", "ragged", "quantized"])
def test_a_file_is_as_large_as_the_cache(name: str, tmp_path: Path) -> None:
    model, text = model_of("llama-gqa"), tokens(1, 800)
    policy = kvpolicy.load(POLICIES[name].to_dict(), budget=400)
    context, path = policy.compress(model, text), tmp_path / "context.safetensors"
    context.save(path)
    report = context.report.to_dict()
    tensors = report["bytes"] + report["index_bytes"] + 2 * 800 * 8
    assert tensors <= path.stat().st_size < tensors + 20_000
    assert report["bytes"] > 100_000


def test_what_a_file_says(model: PreTrainedModel, tmp_path: Path) -> None:
    context, path = POLICIES["ragged"].compress(model, TEXT, QUESTION), tmp_path / "context.safetensors"
    context.save(path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["kvpolicy"])
    assert kvpolicy.load(header["policy"]) == context.policy
    assert header["versions"] == versions()
    assert header["aware"] is True
    assert header["model"]["architecture"] == "LlamaModel" and header["model"]["dtype"] == "float64"
    layer = header["cache"]["layer.0"]
    assert (layer["seen"], layer["settled_at"]) == (68, 68)
    assert layer["_settled"] == context.report.layers[0].kept


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: tiny("qwen3", torch.float64), "expected a LlamaModel, got a Qwen3Model"),
        (lambda: tiny(dtype=torch.float64, num_hidden_layers=2), "num_hidden_layers=3, got 2"),
        (lambda: tiny(dtype=torch.float64, rms_norm_eps=0.1), "rms_norm_eps=1e-06, got 0.1"),
        (lambda: tiny(dtype=torch.float32), "expected weights of float64, got float32"),
        (lambda: changed(tiny(dtype=torch.float64)), "expected the same weights"),
    ],
)
def test_the_cache_of_another_model_is_refused(
    model: PreTrainedModel, other: Callable[[], PreTrainedModel], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "context.safetensors"
    POLICIES["dense"].compress(model, TEXT).save(path)
    with pytest.raises(ContextError, match=message) as caught:
        kvpolicy.load_context(path, other())
    assert str(path) in str(caught.value)
    # Generation settings, names and how it attends are not of the model.
    twin = tiny(dtype=torch.float64, use_cache=False, name_or_path="elsewhere")
    twin.set_attn_implementation("eager")
    assert kvpolicy.load_context(path, twin).seen == 64


def test_weights_that_are_elsewhere(tmp_path: Path) -> None:
    model = tiny()
    context = POLICIES["dense"].compress(model, TEXT)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.device_mesh = "of two ranks"
    with pytest.raises(ContextError, match=r"'layers.1.mlp.up_proj.weight' spread over several ranks"):
        context.save(tmp_path / "context.safetensors")
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(ContextError, match="on the meta device"):
        context.save(tmp_path / "context.safetensors")


def changed(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight += 1e-6
    return model


def test_a_file_that_is_not_as_written_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    path, bad = tmp_path / "context.safetensors", tmp_path / "bad.safetensors"
    POLICIES["ragged"].compress(model, TEXT).save(path)
    whole = path.read_bytes()
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()

    def refused(message: str) -> None:
        with pytest.raises(ContextError, match=message) as caught:
            kvpolicy.load_context(bad, model)
        assert str(bad) in str(caught.value)

    refused("no such file")
    for length in (0, 5, 8, 300, len(whole) // 2, len(whole) - 1):
        bad.write_bytes(whole[:length])
        refused("cut off, damaged or of another kind")
    bad.write_bytes(b"name: not a context\n" * 50)
    refused("cut off, damaged or of another kind")
    bad.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    refused("it is damaged: not what was written")
    save_file(load_file(path), bad)
    refused("got other safetensors")
    save_file(load_file(path), bad, metadata={**metadata, "kvpolicy.format": "2"})
    refused("expected format 1 or older, got '2': upgrade kvpolicy")
    save_file(load_file(path), bad, metadata={**metadata, "kvpolicy": "{}"})
    refused("it is damaged")
    bad.unlink()
    bad.mkdir()
    refused("cut off, damaged or of another kind")


def test_a_save_that_fails_leaves_what_was_there(model: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "context.safetensors"
    POLICIES["dense"].compress(model, TEXT).save(path)
    before = path.read_bytes()

    rotating = policy_of("ecokv-pre-rope", decode={"every": 8}).compress(model, TEXT)
    odd = POLICIES["dense"].compress(model_of("gemma2"), TEXT)
    odd._held.cache.layers[0].helper = object()
    nowhere = POLICIES["dense"].compress(model, TEXT)
    for context, message in ((rotating, "keys before RoPE"), (odd, "DynamicSlidingWindowLayer.* 'helper', a object")):
        with pytest.raises(ContextError, match=message):
            context.save(path)
    with pytest.raises(ContextError, match="cannot be written"):
        nowhere.save(tmp_path / "missing" / "context.safetensors")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(KVPolicyError):
        nowhere.save(tmp_path)


def test_saving_over_a_file_does_not_touch_what_was_loaded_from_it(model: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "context.safetensors"
    context = POLICIES["dense"].compress(model, TEXT)
    context.save(path)
    loaded = kvpolicy.load_context(path, model)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert same(held(loaded), held(context))


def test_a_plugin_that_no_name_leads_to_is_not_saved(model: PreTrainedModel, tmp_path: Path) -> None:
    class Unknown(Random):
        name = "nobody-registered-this"

    policy = Policy(name="mine", score=Unknown(), budget=Budget(tokens=24))
    with pytest.raises(ContextError, match=r"policy 'mine' could not be loaded from a file: .*nobody-registered-this"):
        policy.compress(model, TEXT).save(tmp_path / "context.safetensors")
    assert not list(tmp_path.iterdir())


def test_an_image_moves_the_text_behind_it(tmp_path: Path) -> None:
    text = {
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0},
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 48,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [0],
    }
    marks = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision, **marks)
    config.text_config.initializer_range = 0.2
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64).eval()

    def text_of(ids: Tensor) -> dict[str, Tensor]:
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == 120).long()}
        # Older releases of transformers find images by their ids.
        return {name: part for name, part in given.items() if name in forward_names(model)}

    def prompt(side: int) -> dict[str, Tensor]:
        """A picture of side x side patches of 4 tokens, between words."""
        ids = torch.cat(
            [TEXT[:, :10] % 100, torch.tensor([[122]]), torch.full((1, side * side), 120), torch.tensor([[123]])], dim=1
        )
        return text_of(ids) | {
            "pixel_values": torch.randn(4 * side * side, 96, dtype=torch.float64),
            "image_grid_thw": torch.tensor([[1, 2 * side, 2 * side]]),
        }

    def asked(context: Context) -> Tensor:
        with context.fork() as fork:
            return generate(fork, OTHER % 100, pad_token_id=0)

    given = prompt(4)
    whole = text_of(torch.cat([given["input_ids"], OTHER % 100], dim=1))
    want = model.generate(**given | whole, max_new_tokens=6, do_sample=False, pad_token_id=0)[:, -6:]
    context = POLICIES["full"].compress(model, given)
    asked(POLICIES["full"].compress(model, prompt(6)))
    assert torch.equal(asked(context), want)
    context.save(tmp_path / "context.safetensors")
    assert torch.equal(asked(kvpolicy.load_context(tmp_path / "context.safetensors", model)), want)
    model.generate(**prompt(5), max_new_tokens=1, pad_token_id=0)
    before = copy.deepcopy(model.model.rope_deltas)
    aware = POLICIES["full"].compress(model, given, OTHER % 100)
    assert torch.equal(model.model.rope_deltas, before)
    with aware.fork() as fork:
        assert torch.equal(generate(fork, None, pad_token_id=0), want)
        with pytest.raises(UnsupportedModelError, match="'model' keeps the positions of the prompt it read last"):
            fork.cache  # noqa: B018


def test_the_logits_of_a_fork_go_on(model: PreTrainedModel) -> None:
    policy = POLICIES["ragged"]
    with policy.compress(model, TEXT).fork() as fork:
        got = torch.cat([fork.logits(QUESTION), fork.logits(OTHER)], dim=1)
        assert torch.equal(fork.tokens.ids, torch.cat([TEXT, QUESTION, OTHER], dim=1))
    want = one_by_one(model, policy, TEXT, torch.cat([QUESTION, OTHER], dim=1))
    torch.testing.assert_close(got, want, **EXACT)


def test_the_logits_after_an_answer_and_with_the_question_in_view(model: PreTrainedModel) -> None:
    with POLICIES["ragged"].compress(model, TEXT).fork() as fork:
        answer = generate(fork, QUESTION)
        got = fork.logits(OTHER)
    with POLICIES["ragged"].compress(model, TEXT).fork() as fork:
        # The answer's last token has not been read yet.
        want = fork.logits(torch.cat([QUESTION, answer, OTHER], dim=1))[:, -1 - OTHER.shape[1] :]
    torch.testing.assert_close(got, want, **EXACT)
    aware = POLICIES["ragged"].compress(model, TEXT, OTHER)
    with aware.fork() as fork, aware.fork() as other:
        want = oracle.forward(model, OTHER[:, -1:], other.cache, None)
        torch.testing.assert_close(fork.logits(), want, **EXACT)
        with pytest.raises(ContextError, match=r"fork\.logits: expected a question"):
            fork.logits()


def test_the_logits_of_padded_rows(model: PreTrainedModel) -> None:
    ids, mask = tokens(2, 64), torch.ones(2, 64, dtype=torch.int64)
    mask[0, :11] = 0
    with POLICIES["ragged"].compress(model, {"input_ids": ids, "attention_mask": mask}).fork() as fork:
        got = fork.logits(tokens(2, 5, 1))
    for row, text in enumerate((ids[:1, 11:], ids[1:])):
        with POLICIES["ragged"].compress(model, text).fork() as fork:
            want = fork.logits(tokens(2, 5, 1)[row])
        torch.testing.assert_close(got[row], want[0], **EXACT)


def test_the_logits_of_a_model_that_keeps_positions_elsewhere() -> None:
    model = tiny_vision("qwen2_vl")
    asked = prompt(model, [[6, "image", 9, "image", 30]])
    context = policy_of("ada-kv").compress(model, {"input_ids": asked.ids, **asked.pictures})
    question = torch.tensor([[40, 41, 42]])
    with context.fork() as fork:
        want = generate(fork, question, 2, return_dict_in_generate=True, output_logits=True)
    # Another prompt, whose positions the model now keeps.
    model(input_ids=asked.ids[:, :4])
    with context.fork() as fork:
        got = [fork.logits(question)[:, -1], fork.logits(want.sequences[:, :1])[:, -1]]
    # `generate` rounds its logits to float32.
    torch.testing.assert_close(torch.stack(got).float(), torch.stack(want.logits), rtol=1e-6, atol=1e-6)


def test_a_loaded_context_of_padded_rows_answers_bit_for_bit(model: PreTrainedModel, tmp_path: Path) -> None:
    """Heads of different length: the mask of what was padding has to be known, or they are attended to another way."""
    ids = torch.randint(3, 120, (2, 50), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    policy = kvpolicy.load("ada-kv", budget=12, select={"sinks": 1, "recent": 1})
    context = policy.compress(model, {"input_ids": ids, "attention_mask": mask})
    context.save(tmp_path / "padded.safetensors")
    answers, states = [], []
    asked = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for one in (context, kvpolicy.load_context(tmp_path / "padded.safetensors", model)):
        states.append(cache_state(one._held.cache, one._held.run).tensors)
        with one.fork() as fork:
            said = fork.generate(torch.tensor([5]), **asked, output_logits=True, return_dict_in_generate=True)
        answers.append(torch.stack(said.logits))
    assert torch.equal(*answers)
    saved, loaded = states
    assert saved.keys() == loaded.keys() and all(torch.equal(part, loaded[name]) for name, part in saved.items())
