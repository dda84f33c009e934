"""What people do to a session, its caches and its model that nobody planned for: right, or refused; never wrong."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from releases import installed
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

import kvpolicy
from kvpolicy.errors import ContextError, InactiveSessionError, UnsupportedModelError
from kvpolicy.policy import Policy
from kvpolicy.session.decoder import cache_name
from kvpolicy.testing import oracle
from kvpolicy.testing.models import tiny
from kvpolicy.testing.oracle import Point

EXACT = {"rtol": 0, "atol": 1e-9}


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny(dtype=torch.float64)


def tokens(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 128, (batch, count), generator=torch.Generator().manual_seed(seed))


def load(name: str = "snapkv-w8", budget: Any = 24, **settings: Any) -> Policy:
    return kvpolicy.load(name, budget=budget, select={"type": "top-k", "sinks": 2, "recent": 4}, **settings)


def generate(model: PreTrainedModel, ids: Tensor, new: int = 12, **kwargs: Any) -> Tensor:
    kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, **kwargs}
    return model.generate(ids, max_new_tokens=new, pad_token_id=0, **kwargs)


def held(cache: DynamicCache) -> list[Any]:
    return [layer.held for layer in cache.layers]


def read(model: PreTrainedModel, *pieces: Tensor, cache: DynamicCache | None = None) -> Tensor:
    cache = DynamicCache(config=model.config) if cache is None else cache
    return torch.cat([oracle.forward(model, piece, cache, None) for piece in pieces], dim=1)


@pytest.mark.parametrize("own", [True, False], ids=["model's", "given"])
def test_settings_of_generate_are_found_where_transformers_finds_them(model: PreTrainedModel, own: bool) -> None:
    ids = tokens(1, 64)
    settings = {"max_new_tokens": 12, "pad_token_id": 0, "do_sample": False, "eos_token_id": None}
    with load().on(model):
        want = generate(model, ids)
        if own:
            model.generation_config.prefill_chunk_size = 16
        given = GenerationConfig(**settings) if own else GenerationConfig(**settings, prefill_chunk_size=16)
        got = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=given)
    # Stock 5.2 reads chunks wrongly, whatever the cache.
    assert torch.equal(got, want) == (not installed("==5.2.*"))


def test_drafts_asked_for_by_the_models_own_config_are_seen(model: PreTrainedModel) -> None:
    model.generation_config.prompt_lookup_num_tokens = 3
    given = GenerationConfig(max_new_tokens=4, pad_token_id=0)
    with load(decode={"every": 8}).on(model), pytest.raises(UnsupportedModelError, match="prompt_lookup_num_tokens"):
        model.generate(tokens(1, 64), generation_config=given)


def test_each_thread_reads_its_own_prompt(model: PreTrainedModel) -> None:
    """One reads a prompt in chunks; between two of them another one's `generate` begins, and ends only after it."""
    ids, second, go_on, ended = tokens(1, 64), threading.Event(), threading.Event(), threading.Event()
    passes, found = [], {}

    class Waiting(BaseStreamer):
        def put(self, _: Any) -> None:
            go_on.set()
            assert ended.wait(60)

        def end(self) -> None:
            pass

    def stop(*_: Any) -> None:
        if threading.current_thread().name == "chunks":
            passes.append(1)
            if len(passes) == 2:
                second.set()
                assert go_on.wait(60)

    def chunks() -> None:
        found["chunks"] = generate(model, ids, prefill_chunk_size=16)
        ended.set()

    with load().on(model):
        want = generate(model, ids, prefill_chunk_size=16)
        hook = model.model.register_forward_pre_hook(stop)
        one = threading.Thread(target=chunks, name="chunks")
        one.start()
        assert second.wait(60)
        generate(model, tokens(1, 40, 3), streamer=Waiting())
        one.join()
        hook.remove()
        pieces = [tokens(1, 100, 5), tokens(1, 3, 9)]
        after = read(model, *pieces)
    assert torch.equal(found["chunks"], want)
    replayed, _ = oracle.replay(model, load(), pieces, [Point(100), Point(103, since=100)])
    torch.testing.assert_close(after, replayed, **EXACT)


@pytest.mark.parametrize("name", ["snapkv-w8", "ecokv-pre-rope"])
def test_threads_share_a_session(model: PreTrainedModel, name: str) -> None:
    found: dict[int, Tensor] = {}

    def ask(seed: int) -> None:
        found[seed] = generate(model, tokens(1, 48 + seed, seed))

    with load(name).on(model):
        want = {seed: generate(model, tokens(1, 48 + seed, seed)) for seed in range(6)}
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert all(torch.equal(found[seed], want[seed]) for seed in want)


def test_a_model_in_a_session_is_not_copied(model: PreTrainedModel) -> None:
    with load().on(model):
        with pytest.raises(UnsupportedModelError, match="copy it outside"):
            copy.deepcopy(model)
        with pytest.raises(UnsupportedModelError, match="pickle it outside"):
            pickle.dumps(model)
    twin = copy.deepcopy(model)
    assert torch.equal(generate(twin, tokens(1, 20)), generate(model, tokens(1, 20)))


def test_a_crop_that_one_layer_refuses_leaves_a_half_written_cache() -> None:
    """Sliding layers come first, and have given back their tokens by then."""
    model = tiny("gemma2", dtype=torch.float64, attn_implementation="eager")
    policy = kvpolicy.load("snapkv-w8", budget=6, select={"type": "top-k", "sinks": 1, "recent": 2})
    cache = DynamicCache(config=model.config)
    with policy.on(model):
        read(model, tokens(1, 12), tokens(1, 1, 1), cache=cache)
        with pytest.raises(UnsupportedModelError, match="at most the 1 tokens"):
            cache.crop(-3)
        with pytest.raises(InactiveSessionError, match="half-written"):
            read(model, tokens(1, 1, 2), cache=cache)


@pytest.mark.parametrize("rows", [[1, 0], [1]], ids=str)
def test_rows_that_change_within_a_prompt(model: PreTrainedModel, rows: list[int]) -> None:
    mask = torch.ones(2, 48, dtype=torch.int64)
    mask[0, :20] = 0

    def kept(inside: bool) -> list[Any]:
        cache, select = DynamicCache(config=model.config), torch.tensor(rows)
        with load().on(model) as run:
            with run.prompt():
                for at in range(0, 48, 16):
                    oracle.forward(model, tokens(2, 48)[:, at : at + 16], cache, mask[:, : at + 16])
                if inside:
                    cache.batch_select_indices(select)
            if not inside:
                cache.batch_select_indices(select)
            return held(cache)

    assert kept(inside=True) == kept(inside=False)


def test_a_prompt_within_a_prompt(model: PreTrainedModel) -> None:
    ids = tokens(1, 64)
    outer, inner, whole = (DynamicCache(config=model.config) for _ in range(3))
    with load().on(model) as run:
        with run.prompt():
            read(model, ids[:, :40], cache=outer)
            with run.prompt():
                read(model, tokens(1, 48, 3), cache=inner)
                read(model, ids[:, 40:50], cache=outer)
            assert outer.layers[0].kept == [[50, 50]] and inner.layers[0].kept == [[24, 24]]
            with pytest.raises(RuntimeError, match="elsewhere"), run.prompt():
                raise RuntimeError("elsewhere")
            read(model, ids[:, 50:], cache=outer)
        read(model, ids, cache=whole)
    assert held(outer) == held(whole)


def test_a_cache_in_the_midst_of_a_prompt_is_not_copied(model: PreTrainedModel) -> None:
    cache = DynamicCache(config=model.config)
    with load().on(model) as run, run.prompt():
        read(model, tokens(1, 40), cache=cache)
        with pytest.raises(InactiveSessionError, match="midst of a prompt"):
            copy.deepcopy(cache)


@pytest.mark.parametrize("name", ["snapkv-w8", "ada-kv"])
def test_a_mask_that_hides_older_tokens_is_minded(model: PreTrainedModel, name: str) -> None:
    """Also by heads of lengths of their own, which decode one by one where a mask hides nothing."""
    ids, cache = tokens(1, 64), DynamicCache(config=model.config)
    mask = torch.ones(1, 65, dtype=torch.int64)
    with load(name).on(model), torch.no_grad():
        oracle.forward(model, ids, cache, mask[:, :64])
        other = copy.deepcopy(cache)
        given = {"position_ids": torch.tensor([[64]]), cache_name(model): cache}
        seen = model(ids[:, :1], attention_mask=mask, **given).logits
        mask[:, 2:64] = 0
        hidden = model(ids[:, :1], attention_mask=mask, **{**given, cache_name(model): other}).logits
    assert (seen - hidden).abs().max() > 0.1


def test_sessions_may_end_in_any_order(model: PreTrainedModel) -> None:
    before, ids = dict(vars(model)), tokens(1, 64)
    one, two = load().on(model), load("ada-kv").on(model)
    with two:
        want = generate(model, ids, prefill_chunk_size=16)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert torch.equal(generate(model, ids, prefill_chunk_size=16), want)
    two.__exit__(None, None, None)
    assert vars(model).keys() == before.keys()


def test_the_innermost_session_says_what_generate_may_do(model: PreTrainedModel) -> None:
    ids = tokens(1, 20).repeat(1, 3)
    with load().on(model):
        want = generate(model, ids)
    # Before 5.13, looking up needs an end: one that no token is.
    how = {"prompt_lookup_num_tokens": 3, "eos_token_id": model.config.vocab_size}
    with load(decode={"every": 4}).on(model), load().on(model):
        assert torch.equal(generate(model, ids, **how), want)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"assistant_model": "itself"}, "in a session itself"),
        ({"prompt_lookup_num_tokens": 3, "output_attentions": True}, "expected one of the two"),
    ],
    ids=["assistant", "weights"],
)
def test_drafts_that_cannot_be_are_refused_at_once(
    model: PreTrainedModel, settings: dict[str, Any], reason: str
) -> None:
    given = {name: model if value == "itself" else value for name, value in settings.items()}
    with load().on(model), pytest.raises(UnsupportedModelError, match=reason):
        generate(model, tokens(1, 64), **given)


def test_a_decoder_with_cross_attention_is_refused() -> None:
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = AutoConfig.for_model("gpt2", **sizes, add_cross_attention=True)
    with pytest.raises(UnsupportedModelError, match="cross-attention"):
        load().on(AutoModelForCausalLM.from_config(config))


def test_a_fork_begins_anew_after_reset(model: PreTrainedModel) -> None:
    pieces = [tokens(1, 100, 5), tokens(1, 3, 9)]
    with load().compress(model, tokens(1, 64)).fork() as fork:
        fork.cache.reset()
        got = read(model, *pieces, cache=fork.cache)
    want, _ = oracle.replay(model, load(), pieces, [Point(100), Point(103, since=100)])
    torch.testing.assert_close(got, want, **EXACT)


def test_a_fork_survives_a_call_that_fails(model: PreTrainedModel) -> None:
    context, question = load().compress(model, tokens(1, 64)), tokens(1, 4, 1)
    how = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
    with context.fork() as fork:
        want = fork.generate(question, **how)
    with context.fork() as fork:
        with pytest.raises(ValueError, match="bogus"):
            fork.generate(question, num_beams=2, bogus=1)
        with pytest.raises(ContextError, match="use_cache=True"):
            fork.generate(question, use_cache=False, **how)
        with pytest.raises(ContextError, match=r"not as \*\*keywords"):
            fork.generate(input_ids=question, **how)
        assert torch.equal(fork.generate(question, **how), want)


@pytest.mark.parametrize("shape", [(1, 32), (1, 64), (3, 64)])
def test_a_mask_of_another_shape_is_refused(model: PreTrainedModel, shape: tuple[int, int]) -> None:
    given = {"input_ids": tokens(2, 64), "attention_mask": torch.ones(shape, dtype=torch.int64)}
    with pytest.raises(ContextError, match=r"expected an attention_mask \[2, 64\]"):
        load().compress(model, given)


def test_a_generate_bound_in_a_session_goes_on_after_it(model: PreTrainedModel) -> None:
    ids = tokens(1, 64)
    with load().on(model):
        bound = model.generate
        want = generate(model, ids)
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(bound(ids, **how), generate(model, ids))
    with load().on(model):
        assert torch.equal(bound(ids, prefill_chunk_size=64, **how), want)


def test_finding_rotations_minds_no_other_thread(model: PreTrainedModel) -> None:
    ids, stop, failed = tokens(1, 64), threading.Event(), []
    want = generate(model, ids, 40)

    def plain() -> None:
        while not stop.is_set():
            if not torch.equal(generate(model, ids, 40), want):
                failed.append("other text")

    one = threading.Thread(target=plain)
    one.start()
    try:
        for _ in range(12):
            with load("ecokv-pre-rope", budget=1000).on(model):
                pass
    finally:
        stop.set()
        one.join()
    assert not failed


def test_a_context_is_of_its_own_policy(model: PreTrainedModel) -> None:
    """Another thread's session, entered meanwhile, takes new caches."""
    mine, other, waits, go_on = load(budget=24), load(budget=40), threading.Event(), threading.Event()
    found: list[Exception] = []

    def wait(*_: Any) -> None:
        if threading.current_thread().name == "mine" and not waits.is_set():
            waits.set()
            assert go_on.wait(60)

    def compress() -> None:
        try:
            mine.compress(model, tokens(1, 64))
        except InactiveSessionError as error:
            found.append(error)

    hook = model.register_forward_pre_hook(wait)
    thread = threading.Thread(target=compress, name="mine")
    thread.start()
    assert waits.wait(60)
    with other.on(model):
        go_on.set()
        thread.join()
    hook.remove()
    assert "by another thread, took it" in str(found[0])


@pytest.mark.skipif(not installed(">=5.6"), reason="gemma4 came with 5.6")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["snapkv-w8", "ada-kv"])
def test_layers_that_share_keys_may_ask_with_the_last_queries_alone(name: str, attention: str) -> None:
    """As those of Gemma 4, by `logits_to_keep`."""
    config = AutoConfig.for_model(
        "gemma4_text",
        vocab_size=128,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=8,
        initializer_range=0.2,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    policy = kvpolicy.load(name, budget=24, select={"type": "top-k", "sinks": 1, "recent": 3})
    ids, logits = tokens(1, 64).repeat(1, 3), []
    with policy.on(model), torch.no_grad():
        want = generate(model, ids)
        assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3, eos_token_id=128), want)
        assert torch.equal(generate(model, ids, prefill_chunk_size=7), want)
        for keep in (0, 1, 2, 8):
            cache = DynamicCache(config=model.config)
            model(ids[:, :40], **{cache_name(model): cache})
            logits.append(model(ids[:, 40:48], logits_to_keep=keep, **{cache_name(model): cache}).logits[:, -1])
    assert not torch.equal(want, generate(model, ids)), "evicting changed nothing"
    for one in logits[1:]:
        torch.testing.assert_close(one, logits[0], **EXACT)
