"""What a model attends to while it repeats a prompt, and policies that decide by it once the prompt has been read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from einops import rearrange
from releases import installed
from test_calls import tokens
from torch import Tensor
from transformers.cache_utils import DynamicCache
from watching import SEEN

import kvpolicy
from kvpolicy.errors import (
    ContextError,
    InactiveSessionError,
    PluginError,
    PolicyError,
    UnsupportedModelError,
    ViewError,
)
from kvpolicy.plugin import settings
from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.kvzip import KVzip
from kvpolicy.selectors.top_k import TopK
from kvpolicy.session.layers import evicting_layers
from kvpolicy.testing.architectures.build import cases, tiny_model
from kvpolicy.testing.models import tiny
from kvpolicy.testing.oracle import forward
from kvpolicy.types import LayerView, Needs, Repetition

PLAIN = Repetition(chunk=2000)
ASKED = Repetition(chunk=17, instruction=(7, 8, 9), continuation=(11, 12), lead=5, suffix=(21,), sinks=3)


@settings
class Repeating:
    """Scores as KVzip does, and remembers what it saw."""

    name = "repeating"
    how: Repetition = PLAIN

    @property
    def needs(self) -> Needs:
        return Needs(repetition=self.how)

    def __call__(self, view: LayerView) -> Tensor:
        SEEN.append(view)
        return view.repetition  # type: ignore[return-value]


def repeating(how: Repetition = PLAIN, budget: int = 24, **kwargs: Any) -> Policy:
    SEEN.clear()
    score = Repeating(how=how)
    return Policy(name="repeating", score=score, budget=Budget(tokens=budget), select=TopK(sinks=2, recent=4), **kwargs)


def expected(model: Any, prompt: Tensor, how: Repetition) -> Tensor:
    """One row without padding, ``[layers, Hkv, T]``, from the weights that transformers' own attention gives."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    length, found = len(prompt), []
    for turn, asked in enumerate(how.inputs(prompt.tolist())):
        ids = torch.cat([prompt, torch.tensor(asked)])[None]
        with torch.no_grad():
            weights = torch.stack(model(ids, output_attentions=True, use_cache=False).attentions)[:, 0, :, length:]
        start, end = turn * how.chunk, min((turn + 1) * how.chunk, length)
        sinks = min(how.sinks, start)
        among = torch.zeros(ids.shape[1], dtype=torch.bool)
        among[:sinks] = among[start:end] = among[length:] = True
        weights = weights.where(among, 0)
        shares = (weights / weights.sum(-1, keepdim=True))[..., start:end]
        heads = model.config.num_key_value_heads
        found.append(rearrange(shares, "l (h g) q t -> l h (g q) t", h=heads).amax(2))
    return torch.cat(found, dim=-1)


@pytest.mark.parametrize("how", [PLAIN, ASKED], ids=["plain", "asked"])
@pytest.mark.parametrize("shape", ["llama-gqa", "qwen3", "phi3"])
def test_it_is_what_a_plain_model_attends_to(shape: str, how: Repetition) -> None:
    model, ids = tiny(shape, dtype=torch.float64), tokens(1, 60)
    with repeating(how).on(model):
        forward(model, ids, DynamicCache(), None)
    assert [view.layer for view in SEEN] == [0, 1, 2]
    got = torch.stack([view.repetition[0] for view in SEEN])
    torch.testing.assert_close(got, expected(model, ids[0], how).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", [True, False], ids=["positions given", "counted by the model"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("how", [PLAIN, ASKED], ids=["plain", "asked"])
def test_a_padded_row_is_as_if_it_were_alone(how: Repetition, side: str, given: bool) -> None:
    model, ids = tiny(dtype=torch.float64), tokens(2, 60)
    mask = torch.ones_like(ids)
    pads = slice(0, 21) if side == "left" else slice(39, 60)
    mask[1, pads] = 0
    with repeating(how).on(model):
        if given:
            forward(model, ids, DynamicCache(), mask)
        else:
            model(ids, attention_mask=mask)
    for row, own in ((0, slice(None)), (1, slice(21, 60) if side == "left" else slice(0, 39))):
        got = torch.stack([view.repetition[row][:, own] for view in SEEN])
        if side == "right" and not given and row:
            continue  # Its padding stands between the prompt and the repetition, where the model counts by itself.
        torch.testing.assert_close(got, expected(model, ids[row, own], how).float(), rtol=1e-5, atol=1e-6)
    assert not any(view.repetition[1][:, pads].any() for view in SEEN)


def test_chunks_of_a_prompt_are_repeated_once_it_is_read() -> None:
    model, ids = tiny(), tokens(1, 60)
    with repeating(ASKED).on(model) as run:
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, pad_token_id=0)
        whole, want = [view.repetition for view in SEEN], run.report.to_dict()["layers"]
        SEEN.clear()
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, pad_token_id=0, prefill_chunk_size=25)
        assert len(SEEN) == 3
        # 5.2 reads a prompt in chunks as other text.
        if not installed("==5.2.*"):
            assert run.report.to_dict()["layers"] == want
            torch.testing.assert_close([view.repetition for view in SEEN], whole)
        SEEN.clear()
        cache = DynamicCache()
        with run.prompt():
            for chunk in ids.split(22, dim=1):
                forward(model, chunk, cache, None)
                assert cache.layers[0].kept[0][0] == cache.get_seq_length() and not SEEN
        assert cache.layers[0].kept == [[24, 24]]
        torch.testing.assert_close([view.repetition for view in SEEN], whole)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss", "qwen3_next", "falcon_h1", "gemma3n_text"])
def test_the_cache_goes_on_as_if_nothing_had_been_repeated(name: str) -> None:
    """All of a prompt is kept: so the tokens after it are those of the model alone."""
    if name in ("qwen3_next", "falcon_h1") and not installed(">=5.6"):
        pytest.skip("this release of transformers has no such layers")
    model = tiny_model(next(case for case in cases() if case.model_type == name)).double()
    ids, more = tokens(1, 40) % 32, tokens(1, 6, seed=1) % 32
    alone, repeated = DynamicCache(config=model.config), DynamicCache(config=model.config)
    want = [forward(model, piece, alone, None) for piece in (ids, *more.split(1, dim=1))]
    with repeating(ASKED, budget=40).on(model):
        got = [forward(model, piece, repeated, None) for piece in (ids, *more.split(1, dim=1))]
    assert SEEN and all(view.slots == 40 for view in SEEN)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    assert {layer.kept[0][0] for layer in evicting_layers(repeated)} == {46}


def test_batches_and_beams() -> None:
    model, ids = tiny(dtype=torch.float64), tokens(2, 60)
    given = {"max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0, "do_sample": False}
    with kvpolicy.load("kvzip", budget=24).on(model):
        together = model.generate(ids, **given)
        assert [model.generate(row[None], **given)[0].tolist() for row in ids] == together.tolist()
        assert model.generate(ids, num_beams=2, **given).shape == (2, 65)


def test_a_context_and_its_file(tmp_path: Any) -> None:
    model, ids = tiny(dtype=torch.float64), tokens(1, 60)
    policy = kvpolicy.load("kvzip", budget=24)
    context = policy.compress(model, ids)
    assert sum(sum(layer["kept"][0]) for layer in context.report.to_dict()["layers"]) == 24 * 6
    context.save(tmp_path / "context.safetensors")
    again = kvpolicy.load_context(tmp_path / "context.safetensors", model)
    answers = []
    for one in (context, again):
        with one.fork() as fork:
            answers.append(fork.generate(tokens(1, 5, 1), max_new_tokens=6, min_new_tokens=6).tolist())
    assert answers[0] == answers[1]


def test_two_prompts_at_once() -> None:
    """Each cache is of a prompt of its own, however their passes alternate."""
    model, ids = tiny(dtype=torch.float64), tokens(2, 60)
    caches = [DynamicCache(), DynamicCache()]
    with repeating(ASKED).on(model) as run:
        with run.prompt():
            for piece in ids.split(20, dim=1):
                for row, cache in enumerate(caches):
                    forward(model, piece[row : row + 1], cache, None)
        got = [torch.stack([view.repetition[0] for view in SEEN[row * 3 : row * 3 + 3]]) for row in range(2)]
    for row in range(2):
        torch.testing.assert_close(got[row], expected(model, ids[row], ASKED).float(), rtol=1e-5, atol=1e-6)


def test_a_repetition_that_fails_leaves_what_was_read() -> None:
    model, cache, calls = tiny(), DynamicCache(), []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("on purpose")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with repeating().on(model):
        with pytest.raises(RuntimeError, match="on purpose"):
            forward(model, tokens(1, 60), cache, None)
        assert {layer.seen for layer in evicting_layers(cache)} == {60}
        assert all(layer.padded()[0].shape[2] == 60 for layer in evicting_layers(cache))
        handle.remove()
        with pytest.raises(InactiveSessionError, match="left half-written by a forward pass that failed"):
            forward(model, tokens(1, 1), cache, None)


def test_a_prompt_of_which_a_part_was_decoded_is_refused() -> None:
    """As after a block that an exception has left: what was told of its tokens is not of all that are cached."""
    for policy in (kvpolicy.load("kvzip", budget=24), kvpolicy.load("squeeze", budget=24)):
        model, ids, cache = tiny(), tokens(1, 60), DynamicCache()
        with policy.on(model) as run:
            with pytest.raises(KeyboardInterrupt), run.prompt():
                forward(model, ids[:, :30], cache, None)
                raise KeyboardInterrupt
            forward(model, ids[:, 30:31], cache, None)
            with refused("expected parts of one prompt, got one behind 31 tokens of which some were decoded"):
                forward(model, ids[:, 31:], cache, None)


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next", "falcon_h1"])
def test_gradients_may_be_on(name: str) -> None:
    if name in ("qwen3_next", "falcon_h1") and not installed(">=5.6"):
        pytest.skip("this release of transformers has no such layers")
    model = tiny_model(next(case for case in cases() if case.model_type == name))
    with repeating(ASKED).on(model):
        logits = model(tokens(1, 40) % 32).logits
    logits.sum().backward()
    assert SEEN and all(view.repetition.requires_grad is False for view in SEEN)


def test_it_is_repeated_as_it_was_read_under_autocast() -> None:
    model, cache = tiny(), DynamicCache()
    with repeating(ASKED).on(model) as run, run.prompt(), torch.autocast("cpu", dtype=torch.bfloat16):
        forward(model, tokens(1, 40), cache, None)
        within = torch.is_autocast_enabled("cpu")
    assert within and cache.layers[0].kept == [[24, 24]] and cache.layers[0].values.dtype == torch.bfloat16


def test_rows_of_padding_alone() -> None:
    model, ids = tiny(), tokens(2, 40)
    with repeating().on(model):
        model(ids, attention_mask=torch.zeros_like(ids))
    assert not any(view.repetition.any() for view in SEEN)


ROPE: dict[str, dict[str, Any]] = {
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 64},
    "dynamic": {"original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", ROPE)
def test_rope_that_turns_a_repetition_otherwise_is_refused(kind: str) -> None:
    rope = {"rope_theta": 1e4, "rope_type": kind, "factor": 2.0, **ROPE[kind]}
    model = tiny(dtype=torch.float64, max_position_embeddings=128, rope_parameters=rope)
    with repeating().on(model):
        says = "within the 64 positions .* got up to 40 more" if kind == "longrope" else "dynamic RoPE"
        with refused(f"LlamaModel: expected to repeat a prompt .*{says}"):
            forward(model, tokens(1, 40), DynamicCache(), None)
    for length in (30, 80) if kind == "longrope" else ():
        with repeating().on(model):
            forward(model, tokens(1, length), DynamicCache(), None)
        got = torch.stack([view.repetition[0] for view in SEEN])
        torch.testing.assert_close(got, expected(model, tokens(1, length)[0], PLAIN).float(), rtol=1e-5, atol=1e-6)


def test_positions_that_end_are_refused_and_a_smaller_chunk_fits() -> None:
    model = tiny("gpt2", max_position_embeddings=100)
    says = "60 tokens within the 100 positions .* got up to 60 more: set a smaller `chunk`"
    with repeating().on(model), refused(says):
        forward(model, tokens(1, 60), DynamicCache(), None)
    with repeating(Repetition(chunk=20)).on(model):
        forward(model, tokens(1, 60), DynamicCache(), None)
    assert len(SEEN) == 3


def refused(match: str) -> Any:
    return pytest.raises(UnsupportedModelError, match=match)


def test_what_cannot_be_repeated_is_refused() -> None:
    model, ids = tiny(), tokens(1, 60)
    embedded = model.get_input_embeddings()(ids)
    with repeating().on(model):
        with refused("LlamaModel: to repeat its prompt, expected token ids, got embeddings"):
            model(inputs_embeds=embedded)
        # 5.2 fails by itself before it caches anything.
        with pytest.raises(RuntimeError) if installed("==5.2.*") else refused("one position a token, got position_ids"):
            model.model(ids, position_ids=torch.arange(60).expand(3, 1, -1))
        with refused("needs a repetition of the prompt, .* one that reads 4 tokens more: generate without drafts"):
            repetitive = ids[:, :8].repeat(1, 6)
            model.generate(repetitive, prompt_lookup_num_tokens=4, max_new_tokens=8, pad_token_id=0)
    says = "GPT2Model: to repeat .* and nothing that goes with them, got token_type_ids"
    with repeating().on(model := tiny("gpt2")), refused(says):
        model(ids, token_type_ids=torch.zeros_like(ids))


def test_a_second_turn_is_refused_and_a_fork_takes_it() -> None:
    model, cache = tiny(), DynamicCache()
    with repeating().on(model):
        forward(model, tokens(1, 60), cache, None)
        forward(model, tokens(1, 1), cache, None)
        with refused("expected a prompt in an empty cache, got one behind 60 tokens that have been evicted from"):
            forward(model, tokens(1, 7), cache, None)
        forward(model, tokens(1, 1), cache, None)
    assert cache.layers[0].kept == [[26, 26]] and cache.get_seq_length() == 62
    with kvpolicy.load("kvzip", budget=24).compress(model, tokens(1, 60)).fork() as fork:
        assert fork.generate(tokens(1, 7), max_new_tokens=3, min_new_tokens=3).shape == (1, 3)


@pytest.mark.skipif(installed("<5.24"), reason="releases before 5.24 cache what they attend to")
def test_keys_that_are_derived_are_refused() -> None:
    model = tiny_model(next(case for case in cases() if case.model_type == "deepseek_v3"))
    with repeating().on(model), refused("layer 0: its keys are derived from what it caches"):
        forward(model, tokens(1, 40) % 32, DynamicCache(), None)


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"decode": {"every": 4}}, "decode: expected none with 'kvzip', which needs a repetition of the prompt"),
        ({"prefill": "chunks"}, "prefill: expected 'whole' with 'kvzip'.* got"),
        ({"score": {"chunk": 0}}, "score.chunk: .* got 0"),
        ({"budget": {"tokens": 50, "layers": "squeeze"}, "extends": "critical-kv"}, "gone with the layer, beside one"),
        ({"score": {"instruction": [-1]}}, "score.instruction.* got -1"),
    ],
)
def test_settings_that_never_work_are_refused(setting: dict[str, Any], match: str) -> None:
    with pytest.raises(PolicyError, match=match):
        kvpolicy.load({"name": "x", "extends": "kvzip", **setting})


def test_ids_of_another_vocabulary_are_refused_when_the_session_is_made() -> None:
    policy = kvpolicy.load("kvzip", score={"suffix": [3, 128]})
    with refused("scorer 'kvzip': expected ids of a vocabulary of 128, got 128"):
        policy.on(tiny())


def test_two_ways_to_repeat_are_refused_when_the_policy_is_made() -> None:
    score = {"type": "fixed", "inputs": [{"type": "kvzip"}, {"type": "kvzip", "chunk": 5}]}
    with pytest.raises(PolicyError, match=r"score: expected one way to repeat the prompt: .* got 2"):
        kvpolicy.load("kvzip", score=score)
    with pytest.raises(PluginError, match=r"expected one way to repeat a prompt, got Repetition.* and Repetition"):
        _ = KVzip().needs | KVzip(chunk=5).needs
    assert kvpolicy.load("kvzip", score={"type": "fixed", "inputs": [{"type": "kvzip"}] * 2}).needs.late


def test_a_reading_does_not_serve_it() -> None:
    policy, model = kvpolicy.load("kvzip", budget=24), tiny()
    reading = kvpolicy.read(model, tokens(1, 60), policies=[policy, kvpolicy.load("snapkv-w8", budget=24)])
    assert not reading.serves(policy)
    with pytest.raises(ContextError, match="reads a repetition of the prompt, which a reading does not hold"):
        reading.compress(policy)


def test_a_policy_that_keeps_everything_repeats_nothing() -> None:
    model = tiny()
    passes: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    policy = Policy(name="all", score=KVzip(), budget=Budget(keep=1))
    with policy.on(model):
        forward(model, tokens(1, 60), DynamicCache(), None)
    assert len(passes) == 1


def test_needs_say_what_is_wrong() -> None:
    with pytest.raises(PluginError, match="Needs: repetition: expected a Repetition or None, got True"):
        Needs(repetition=True)  # type: ignore[arg-type]
    keys = torch.zeros(1, 1, 3, 2)
    view = LayerView(keys=keys, values=keys, repetition=torch.zeros(1, 1, 3))
    with pytest.raises(PluginError, match=r"scorer 'x' reads 'repetition' .* Add repetition=Repetition\(...\)"):
        view.limit(Needs(), "scorer 'x'").repetition  # noqa: B018
    with pytest.raises(ViewError, match=r"repetition: expected torch.float32 \[1, 1, 3\], got torch.float32 \[1, 3\]"):
        LayerView(keys=keys, values=keys, repetition=torch.zeros(1, 3))
    with pytest.raises(ViewError, match=r"scorer 'kvzip' .* needs repetition, but the view has none"):
        kvpolicy.load("kvzip").plan([LayerView(keys=keys, values=keys)])
