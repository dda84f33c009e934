"""A text read once for many policies: the same slots and the same logits as read under each of them, bit for bit."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
import torch
from releases import installed
from safetensors import safe_open
from test_calls import asking
from test_context import OTHER, POLICIES, QUESTION, generate, held_now, model_of, policy_of, tokens
from torch import Tensor

import kvpolicy
from kvpolicy.errors import ContextError, InactiveSessionError, PolicyError, UnsupportedModelError
from kvpolicy.registry import registry
from kvpolicy.session.context import Context
from kvpolicy.session.layers import evicting_layers
from kvpolicy.testing import oracle
from kvpolicy.testing.architectures.build import Case
from kvpolicy.testing.architectures.build import tiny_model as latent
from kvpolicy.testing.models import tiny
from kvpolicy.testing.vision import prompt, tiny_model

PICTURES = [[20, "image", 9, "image", 30], [4, "image", 11]]
EVERY = [*POLICIES.values(), policy_of("ecokv-pre-rope"), policy_of("ada-kv", prefill="chunks")]
TEXT = tokens(1, 64)


def state(context: Context) -> list[Any]:
    return [(layer.held, layer.kept, layer.seen) for layer in evicting_layers(context._held.cache)]


def logits(context: Context, question: Tensor | None) -> Tensor:
    told = {"return_dict_in_generate": True, "output_logits": True}
    with context.fork() as fork:
        return torch.stack(generate(fork, question, 2, **told).logits)


def assert_same(got: Context, want: Context, question: Tensor | None) -> None:
    assert state(got) == state(want)
    told, wanted = ({**one.report.to_dict(), "seconds": None} for one in (got, want))
    assert told == wanted
    assert torch.equal(logits(got, question), logits(want, question))


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("shape", ["llama-gqa", "gemma2", "hybrid"])
def test_it_is_as_if_read_under_each_policy(shape: str, aware: bool) -> None:
    model = model_of(shape)
    policies = [policy for policy in EVERY if shape == "llama-gqa" or not policy.needs.pre_rope]
    before, after = (OTHER, None) if aware else (None, QUESTION)
    reading = kvpolicy.read(model, TEXT, before, policies=policies)
    # The first one twice, as one must leave nothing behind for the next.
    for policy in [*policies, policies[0]]:
        got, want = reading.compress(policy), policy.compress(model, TEXT, before)
        assert got.aware is aware
        assert_same(got, want, after)


def test_every_shipped_policy() -> None:
    model = model_of("llama-gqa")
    loaded = [kvpolicy.load(entry.name) for entry in registry().entries("policy")]
    lasting = [one for one in loaded if not (one.needs.call or one.late)]
    policies = [one if one.trivial else kvpolicy.load(one.name, budget=48) for one in lasting]
    reading = kvpolicy.read(model, TEXT, policies=policies)
    for policy in policies:
        assert state(reading.compress(policy)) == state(policy.compress(model, TEXT)), policy.name


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows(side: str) -> None:
    model, ids = model_of("llama-gqa"), tokens(2, 64)
    mask = torch.ones_like(ids)
    mask[0, {"left": slice(11), "right": slice(-11, None)}[side]] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    reading = kvpolicy.read(model, inputs, policies=EVERY)
    for policy in EVERY:
        got, want = reading.compress(policy), policy.compress(model, inputs)
        assert state(got) == state(want)
        assert torch.equal(logits(got, tokens(2, 5)), logits(want, tokens(2, 5)))


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_pictures(family: str) -> None:
    model = tiny_model(family)
    asked = prompt(model, PICTURES)
    inputs = {"input_ids": asked.ids, "attention_mask": asked.mask, **asked.pictures}
    inside = {"type": "by-modality", "inside": "cosine-diversity", "outside": {"type": "snapkv", "window": 4}}
    policies = [policy_of("snapkv-w8", score=inside), policy_of("ada-kv")]
    reading = kvpolicy.read(model, inputs, policies=policies)
    question = torch.full((1, 3), 40)
    for policy in policies:
        assert_same(reading.compress(policy), policy.compress(model, inputs), question)


def test_a_policy_that_asks_for_no_modality_is_told_none() -> None:
    model = tiny_model("llava")
    asked = prompt(model, PICTURES[:1])
    inputs, plain = {"input_ids": asked.ids, **asked.pictures}, POLICIES["decode"]
    inside = {"type": "by-modality", "inside": "cosine-diversity", "outside": "key-norm"}
    reading = kvpolicy.read(model, inputs, policies=[plain, policy_of("snapkv-w8", score=inside)])
    assert held_now(reading.compress(plain)).keys() == held_now(plain.compress(model, inputs)).keys()


def test_it_is_kept_in_a_file(tmp_path: Any) -> None:
    model, policy = model_of("llama-gqa"), POLICIES["decode"]
    # The other one reads more queries, of which a file must hold no more than its own policy's.
    reading = kvpolicy.read(model, TEXT, policies=[policy, kvpolicy.load("snapkv", budget=40)])
    saved = []
    for name, context in {"one": reading.compress(policy), "other": policy.compress(model, TEXT)}.items():
        context.save(tmp_path / name)
        with safe_open(tmp_path / name, "pt") as file:
            saved.append((file.metadata(), {key: file.get_tensor(key).tolist() for key in file.keys()}))  # noqa: SIM118
    assert saved[0] == saved[1]


def test_it_pins_nothing() -> None:
    policy = POLICIES["dense"]
    reading = kvpolicy.read(tiny(), TEXT, policies=[policy])
    full = 2 * 3 * 2 * 64 * 8 * 4  # keys and values, layers, heads, tokens, size, float32
    assert reading.bytes == full
    context = reading.compress(policy)
    gone = weakref.ref(evicting_layers(reading._held.cache)[0].store)
    del reading
    gc.collect()
    assert gone() is None
    assert context.report.bytes == full * 24 // 64


def test_what_it_does_not_serve_is_said() -> None:
    model, known = model_of("llama-gqa"), POLICIES["dense"]
    reading = kvpolicy.read(model, TEXT, policies=[known])
    wider = kvpolicy.load("snapkv", budget=40)
    assert reading.serves(known)
    recorded = "recorded was: the last 8 queries, keys. Give it to kvpolicy.read among `policies`, or use"
    for policy, why in (
        (wider, f"the policy reads the last 32 queries, keys; {recorded}"),
        (asking(), "the policy reads what the attention module was called with, which does not outlive the pass."),
        (
            policy_of("ecokv-pre-rope"),
            f"the policy reads the last 8 queries, keys, values, keys before RoPE; {recorded}",
        ),
    ):
        assert not reading.serves(policy)
        says = f"policy '{policy.name}': expected one that this reading serves: {why}"
        with pytest.raises(ContextError, match=re.escape(says)):
            reading.compress(policy)
    with pytest.raises(PolicyError, match="policies: expected at least one"):
        kvpolicy.read(model, TEXT, policies=[])
    assert not kvpolicy.read(model, TEXT, policies=[asking()]).serves(asking())


def test_a_question_goes_to_the_reading() -> None:
    reading = kvpolicy.read(model_of("llama-gqa"), TEXT, policies=[POLICIES["dense"]])
    for given in ({"question": QUESTION}, {"question": [5, 6]}):
        with pytest.raises(ContextError, match=r"question: expected none, .* give it to kvpolicy\.read\(model, inputs"):
            reading.compress(POLICIES["dense"], **given)


def test_derived_keys_are_refused_before_anything_is_evicted() -> None:
    model = latent(Case("text", "deepseek_v3", "DeepseekV3ForCausalLM"))
    reading = kvpolicy.read(model, TEXT, policies=[POLICIES["dense"]])
    if installed("<5.24") and not reading.derived:
        pytest.skip("this release of transformers caches the keys themselves")
    assert not reading.serves(POLICIES["dense"])
    assert reading.serves(POLICIES["full"])
    with pytest.raises(ContextError, match="the model derives its keys"):
        reading.compress(POLICIES["dense"])


def test_a_model_without_layers_to_evict_is_refused() -> None:
    model = tiny("gemma2", layer_types=["sliding_attention"] * 3)
    with pytest.raises(UnsupportedModelError, match="no full-attention layer"):
        kvpolicy.read(model, TEXT, policies=[POLICIES["dense"]])


def test_the_model_is_as_it_was() -> None:
    model = model_of("llama-gqa")
    want = oracle.forward(model, TEXT, None, None)
    context = kvpolicy.read(model, TEXT, policies=[POLICIES["dense"]]).compress(POLICIES["dense"])
    assert torch.equal(oracle.forward(model, TEXT, None, None), want)
    with pytest.raises(InactiveSessionError):
        oracle.forward(model, QUESTION, context._held.cache, None)
