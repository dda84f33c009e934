"""A policy as a press: what kvpress's own pipeline makes of it, and what its cache holds once the session is over."""

from __future__ import annotations

import copy
import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kvpolicy_kvpress import PolicyPress
from kvpolicy_kvpress.kept import KeptLayer
from kvpress import AdaKVPress, ComposedPress, KnormPress
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast, pipeline

import kvpolicy
from kvpolicy.errors import InactiveSessionError, KVPolicyError, PolicyError, UnsupportedModelError
from kvpolicy.testing.models import tiny

POLICIES: dict[str, dict[str, Any]] = {
    "alike": {"extends": "ecokv-snapkv", "budget": 24},
    "a share": {"extends": "snapkv", "budget": 0.3},
    "heads differ": {"extends": "ecokv-ada-kv", "budget": 24},
    "layers differ": {"extends": "pyramidkv", "budget": 24},
    "a press": {
        "score": {"type": "kvpress", "press": "SnapKVPress", "settings": {"window_size": 8}},
        "budget": {"tokens": 24, "heads": "adaptive"},
    },
    "all": {"extends": "snapkv", "budget": 1.0},
}


def policy(name: str) -> kvpolicy.Policy:
    return kvpolicy.load({"name": name, "select": {"sinks": 2, "recent": 4}, **POLICIES[name]})


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 128, (1, count), generator=torch.Generator().manual_seed(seed))


def size(cache: DynamicCache) -> int:
    """Bytes that a cache's layers hold, read from storage."""
    found = 0
    for layer in cache.layers:
        parts = layer.packed if isinstance(layer, KeptLayer) else (layer.keys, layer.values)
        found += sum(part.untyped_storage().nbytes() for part in parts)
    return found


@torch.no_grad()
def pressed(model: PreTrainedModel, press: Any, ids: Tensor) -> DynamicCache:
    cache = DynamicCache()
    with press(model):
        model.model(input_ids=ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", POLICIES)
def test_what_it_leaves_answers_as_a_session_does(name: str, implementation: str) -> None:
    """A question of several tokens, then one more: the logits are those of a fork of the same context."""
    model = tiny(dtype=torch.float64, attn_implementation=implementation)
    ids, question, more = tokens(90), tokens(7, 1), tokens(1, 2)
    with policy(name).compress(model, ids).fork() as fork, torch.no_grad():
        want = [model(part, past_key_values=fork.cache).logits for part in (question, more)]
    cache = pressed(model, PolicyPress(policy(name)), ids)
    places = torch.arange(90, 98)[None]
    with torch.no_grad():
        got = [
            model(part, past_key_values=cache, position_ids=at).logits
            for part, at in ((question, places[:, :7]), (more, places[:, 7:]))
        ]
    # Eager attention is float32 in its softmax, whatever the model is.
    allowed = 1e-5 if implementation == "eager" else 1e-9
    torch.testing.assert_close(got, want, rtol=allowed, atol=allowed)


@torch.no_grad()
@pytest.mark.parametrize("name", ["a share", "heads differ"])
def test_rows_that_are_padded_keep_their_own(name: str) -> None:
    """A row of 60 tokens beside one of 90: of a share, it keeps less, and its question sees none of its padding."""
    model, cache = tiny(dtype=torch.float64), DynamicCache()
    ids, question = tokens(180).view(2, 90), tokens(10, 1).view(2, 5)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with PolicyPress(policy(name))(model):
        model.model(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache)
    after = places[:, -1:] + torch.arange(1, 6)
    got = model(question, past_key_values=cache, position_ids=after).logits
    for row, own in enumerate((ids[:1, 30:], ids[1:])):
        with policy(name).compress(model, own).fork() as fork:
            want = model(question[row : row + 1], past_key_values=fork.cache).logits
        torch.testing.assert_close(got[row : row + 1], want, rtol=1e-9, atol=1e-9)


class Chat:
    """kvpress's own pipeline over a tiny model, with a word for every token."""

    def __init__(self) -> None:
        ids = {"<end>": 0, "<start>": 1} | {f"w{number}": number for number in range(2, 128)}
        words = Tokenizer(WordLevel(ids, unk_token="<end>"))
        words.pre_tokenizer = Whitespace()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<start>", eos_token="<end>")
        self.model = tiny(dtype=torch.float64)
        self.model.generation_config.eos_token_id = 0
        self.pipe = pipeline("kv-press-text-generation", model=self.model, tokenizer=self.tokenizer, device="cpu")

    def ids(self, text: str) -> Tensor:
        return self.tokenizer(text, return_tensors="pt").input_ids


def words(count: int, seed: int) -> str:
    return " ".join(f"w{number}" for number in tokens(count, seed)[0].tolist())


@pytest.mark.parametrize("name", POLICIES)
def test_kvpress_s_pipeline_takes_it(name: str) -> None:
    """Several questions about one context: each answer is the one that a fork gives, as if no other had been asked."""
    chat, press = Chat(), PolicyPress(policy(name))
    context, questions = words(90, 0), [words(5, 1), words(9, 2), words(1, 3)]
    said = chat.pipe(context, questions=questions, press=press, max_new_tokens=6)["answers"]
    read = policy(name).compress(chat.model, chat.ids("<start>" + context))
    for question, answer in zip(questions, said, strict=True):
        with read.fork() as fork:
            own = fork.generate(chat.ids(question + "\n"), max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert answer == chat.tokenizer.decode(own[0], skip_special_tokens=True)
    assert press.report.policy == name


def test_the_evaluation_of_kvpress_sets_and_reads_its_ratio() -> None:
    chat, press = Chat(), PolicyPress("ecokv-snapkv", budget=32)
    assert math.isnan(press.compression_ratio)
    chat.pipe(words(99, 0), questions=[words(3, 1)], press=press, max_new_tokens=2)
    assert press.compression_ratio == pytest.approx(1 - 32 / 100)
    press.compression_ratio = 0.9
    assert press.compression_ratio == pytest.approx(0.9) and press.policy.budget.keep == 0.1
    with torch.inference_mode():
        chat.pipe(words(99, 0), questions=[words(3, 1)], press=press, max_new_tokens=2)
    assert {tuple(row) for layer in press.report.to_dict()["layers"] for row in layer["kept"]} == {(10, 10)}
    press.compression_ratio = 0.0
    assert press.policy.trivial


def test_a_run_that_read_nothing_has_no_ratio() -> None:
    press = PolicyPress("snapkv", budget=40)
    with press(tiny()):
        pass
    assert math.isnan(press.compression_ratio)
    model = tiny()
    with press(model):
        pressed(model, PolicyPress("snapkv", budget=36), tokens(90))
    assert math.isnan(press.compression_ratio)


@pytest.mark.parametrize("ratio", [1.0, -0.5, math.nan, math.inf, True, "0.5", torch.tensor(0.5)], ids=str)
def test_a_ratio_that_is_no_share_is_refused(ratio: Any) -> None:
    with pytest.raises(KVPolicyError, match=r"PolicyPress: compression_ratio: expected a share in \[0, 1\), got"):
        PolicyPress("snapkv", budget=40).compression_ratio = ratio


def test_it_frees_what_heads_of_different_lengths_evict_where_kvpress_does_not() -> None:
    model, ids = tiny(), tokens(200)
    ours = size(pressed(model, PolicyPress("ada-kv", budget=50), ids))
    theirs = size(pressed(model, AdaKVPress(KnormPress(0.75)), ids))
    full = 3 * 2 * 2 * 200 * 8 * 4
    assert (theirs, ours) == (full, full // 4)


def test_a_plain_cache_holds_no_more_than_what_is_kept() -> None:
    cache = pressed(tiny(), PolicyPress("snapkv", budget=50), tokens(200))
    assert size(cache) == 3 * 2 * 2 * 50 * 8 * 4 and cache.get_seq_length() == 50
    assert {type(layer).__name__ for layer in cache.layers} == {"DynamicLayer"}


def test_answers_are_taken_back_and_the_context_is_not() -> None:
    model = tiny(dtype=torch.float64)
    cache = pressed(model, PolicyPress(policy("heads differ")), tokens(90))
    before = [(layer.keys, layer.values) for layer in cache.layers]
    length = cache.get_seq_length()
    with torch.no_grad():
        model(tokens(5, 1), past_key_values=cache, position_ids=torch.arange(90, 95)[None])
    assert cache.get_seq_length() == length + 5
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, :length]
        layer.values = layer.values[:, :, :length]
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    with pytest.raises(InactiveSessionError, match=f"crop: expected at least the {length} slots that were kept"):
        cache.crop(length - 1)
    with pytest.raises(UnsupportedModelError, match="its rows stay as they are"):
        cache.reorder_cache(torch.tensor([0]))


def test_the_model_is_as_it_was_once_the_cache_is_gone() -> None:
    model = tiny()
    names = [name for name, _ in model.named_modules()]
    cache = pressed(model, PolicyPress(policy("heads differ")), tokens(90))
    copied = copy.deepcopy(cache)
    assert any(module._forward_pre_hooks for module in model.modules())
    del cache
    gc.collect()
    with torch.no_grad():
        model(tokens(5, 1), past_key_values=copied, position_ids=torch.arange(90, 95)[None])
    del copied
    gc.collect()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert [name for name, _ in model.named_modules()] == names and model.config._attn_implementation == "sdpa"


def test_two_caches_and_another_one_on_the_same_model() -> None:
    """None of them hides anything of another."""
    model = tiny(dtype=torch.float64)
    contexts = [tokens(90), tokens(70, 5)]
    caches = [pressed(model, PolicyPress(policy("heads differ")), ids) for ids in contexts]
    plain = DynamicCache()
    with torch.no_grad():
        model(tokens(40, 6), past_key_values=plain)
        for cache, ids in zip(caches, contexts, strict=True):
            places = torch.arange(ids.shape[1], ids.shape[1] + 5)[None]
            got = model(tokens(5, 1), past_key_values=cache, position_ids=places).logits
            with policy("heads differ").compress(model, ids).fork() as fork:
                torch.testing.assert_close(got, model(tokens(5, 1), past_key_values=fork.cache).logits)
        got = model(tokens(3, 7), past_key_values=plain).logits
        whole = model(torch.cat([tokens(40, 6), tokens(3, 7)], dim=1)).logits
    torch.testing.assert_close(got, whole[:, -3:])


def test_a_cache_on_another_model_is_refused() -> None:
    cache = pressed(tiny(), PolicyPress(policy("heads differ")), tokens(90))
    with pytest.raises(InactiveSessionError, match="evicted by PolicyPress for another model"):
        tiny()(tokens(1), past_key_values=cache)


def test_rows_or_a_mask_that_are_not_those_of_the_cache_are_refused() -> None:
    """The model would cut a mask as long as the prompt to its first columns, which hide other slots."""
    model, cache = tiny(), DynamicCache()
    ids, new, places = tokens(180).view(2, 90), tokens(6, 1).view(2, 3), torch.arange(90, 93)[None]
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    with torch.no_grad(), PolicyPress(policy("heads differ"))(model):
        model(ids, attention_mask=mask, past_key_values=cache)
    slots = cache.get_seq_length()
    longer = torch.cat([mask, torch.ones_like(new)], dim=1)
    wanted = rf"expected none, or {slots + 3} columns \({slots} slots that PolicyPress left and 3 new tokens\), got 93"
    with pytest.raises(UnsupportedModelError, match=wanted):
        model(new, attention_mask=longer, past_key_values=cache, position_ids=places)
    beams = new.repeat_interleave(2, dim=0)
    with pytest.raises(
        UnsupportedModelError, match=r"its rows stay as they are, expected tokens for 2, got 4: .*beams"
    ):
        model(beams, past_key_values=cache, position_ids=places)
    with pytest.raises(UnsupportedModelError, match="its rows stay as they are"):
        model.generate(torch.cat([ids, new], dim=1), past_key_values=cache, num_beams=2, max_new_tokens=2)
    with torch.no_grad():
        right = torch.ones(2, slots + 3, dtype=torch.int64)
        model(new, attention_mask=right, past_key_values=cache, position_ids=places)
    assert cache.get_seq_length() == slots + 3


@torch.no_grad()
@pytest.mark.parametrize("name", ["alike", "heads differ"])
def test_an_error_after_the_prompt_leaves_a_cache_that_needs_no_session(name: str) -> None:
    model, cache, press = tiny(), DynamicCache(), PolicyPress(policy(name))
    with pytest.raises(RuntimeError, match="on purpose"), press(model):
        model(tokens(90), past_key_values=cache)
        raise RuntimeError("on purpose")
    got = model(tokens(1, 2), past_key_values=cache, position_ids=torch.tensor([[90]])).logits
    again = pressed(model, press, tokens(90))
    assert torch.equal(got, model(tokens(1, 2), past_key_values=again, position_ids=torch.tensor([[90]])).logits)


@torch.no_grad()
def test_a_cache_that_is_half_read_stays_in_its_session() -> None:
    """Its layers do not hold the same tokens: no later pass could make sense of it."""
    model, cache = tiny(), DynamicCache()
    fail = model.model.layers[1].register_forward_pre_hook
    with pytest.raises(RuntimeError, match="on purpose"), PolicyPress(policy("alike"))(model):
        model(tokens(90), past_key_values=cache)
        handle = fail(raises)
        model(tokens(1, 2), past_key_values=cache)
    handle.remove()
    with pytest.raises(InactiveSessionError):
        model(tokens(1, 2), past_key_values=cache, position_ids=torch.tensor([[91]]))


def raises(*_: Any) -> None:
    raise RuntimeError("on purpose")


def test_a_pass_that_fails_leaves_the_model_as_it_was() -> None:
    model = tiny()
    with pytest.raises(RuntimeError, match="on purpose"), PolicyPress("snapkv", budget=40)(model):
        raise RuntimeError("on purpose")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"decode": {"every": 4}}, "expected a policy without `decode`, as a press is over when decoding begins"),
        ({"store": "quantized"}, "expected `store: plain`, .* got 'quantized'"),
        ({"store": "offloaded"}, "expected `store: plain`, .* got 'offloaded'"),
    ],
)
def test_policies_that_go_on_after_the_prompt_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(PolicyError, match=match):
        PolicyPress({"name": "x", "extends": "snapkv", "budget": 64, **given})


def test_a_model_with_windows_is_refused() -> None:
    with (
        pytest.raises(UnsupportedModelError, match=r"every token, .* got DynamicSlidingWindowLayer in layers \[0\]"),
        PolicyPress("snapkv", budget=40)(tiny("gemma2")),
    ):
        pass


def test_inside_another_press_it_is_refused() -> None:
    model = tiny()
    with pytest.raises(UnsupportedModelError, match=r"PolicyPress\('snapkv', tokens=40\): .* inside another press"):
        pressed(model, ComposedPress([PolicyPress("snapkv", budget=40)]), tokens(90))


@pytest.mark.parametrize("inner", [True, False])
def test_around_or_inside_another_press_s_block_it_is_refused(inner: bool) -> None:
    model, cache = tiny(), DynamicCache()
    presses = [KnormPress(0.5), PolicyPress("snapkv", budget=40)]
    first, second = presses if inner else presses[::-1]
    wanted = r"PolicyPress\('snapkv', tokens=40\): expected to be the only press .* got KnormPress too"
    with pytest.raises(UnsupportedModelError, match=wanted), first(model), second(model):
        model(tokens(90), past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_presses_of_one_policy_are_equal_and_of_others_not(tmp_path: Path) -> None:
    snapkv = kvpolicy.load("snapkv", budget=40)
    assert PolicyPress(snapkv) == PolicyPress("snapkv", budget=40) != PolicyPress("snapkv", budget=41)
    assert PolicyPress(snapkv, budget=41) == PolicyPress("snapkv", budget=41)
    (tmp_path / "mine.yaml").write_text("extends: snapkv\nbudget: 7\nselect: {sinks: 1, recent: 1}\n")
    assert str(PolicyPress(tmp_path / "mine.yaml")) == "PolicyPress('mine', tokens=7)"
