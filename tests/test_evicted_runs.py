"""Merging the evicted in models: with every policy, store, way of reading, and in contexts; and where it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from releases import installed
from test_context import QUESTION, TEXT, generate, held, model_of, policy_of, same, tokens
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

import kvpolicy
from kvpolicy import LayerView, Policy, Selection
from kvpolicy.errors import ContextError, PluginError, PolicyFileError, UnsupportedModelError
from kvpolicy.evicted.d2o import D2O
from kvpolicy.evicted.merge import Merge
from kvpolicy.plugin import settings
from kvpolicy.registry import registry
from kvpolicy.session.decoder import cache_name
from kvpolicy.session.keep import Kept
from kvpolicy.session.layers import evicting_layers
from kvpolicy.session.when import Prompt
from kvpolicy.testing import oracle
from kvpolicy.testing.architectures.build import Case
from kvpolicy.testing.architectures.build import tiny_model as latent
from kvpolicy.testing.vision import prompt, tiny_model
from kvpolicy.types import Merged, Needs

MERGES: dict[str, Any] = {
    "pivotal": {"type": "merge"},
    "weighted": {"type": "merge", "how": "weighted", "only": "alike"},
    "values": {"type": "merge", "how": "averaged", "on": "values"},
    "d2o": {"type": "d2o", "weights": "exponential"},
    "cam": {"type": "cam", "prompt": "merge", "merge_budget": 4},
}
QUANTIZED = {"type": "quantized", "bits": 8, "group": 8, "residual": 8}
WAYS: dict[str, dict[str, Any]] = {
    "dense": {},
    "ragged": {"budget": {"tokens": 24, "heads": "adaptive", "layers": "pyramid"}},
    "decode": {"decode": {"every": 2}},
    "ragged decode": {"decode": {"every": 1, "grace": 2}, "budget": {"tokens": 24, "heads": "adaptive"}},
    "chunks": {"prefill": "chunks"},
    "quantized": {"store": QUANTIZED, "decode": {"every": 3}},
    "offloaded": {"store": "offloaded", "decode": {"every": 3}},
}
EXACT = {"rtol": 0, "atol": 1e-9}
"""A thousand roundings of float64 on logits of size ten."""
NEAR = {"rtol": 0, "atol": 1e-4}
"""The same, where cosines and attention that weigh are float32, a hundred roundings each, in sums of another order."""


def run(model: PreTrainedModel, policy: Policy, new: int = 6, **given: Any) -> tuple[Tensor, Tensor, DynamicCache]:
    """Return the tokens, the logits and the cache that come of two rows, the second with padding before it.

    In float64, the attention of Gemma 2 to nothing but padding is nan: of that model both rows are whole.
    """
    ids, mask = tokens(2, 64), torch.ones(2, 64, dtype=torch.int64)
    mask[1, : 0 if model.config.model_type == "gemma2" else 19] = 0
    cache = DynamicCache(config=model.config)
    with policy.on(model):
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **{cache_name(model): cache},
            **given,
        )
    return out.sequences, torch.stack(out.logits), cache


def stored(cache: DynamicCache) -> list[Tensor]:
    return [part for layer in evicting_layers(cache) for part in layer.padded() if part is not None]


@settings
class Same:
    """Kept slots stay as they are, said in full."""

    name, stage, source, formula = "same", "evicted", "a test", "x"
    needs = Needs(keys=True, values=True)

    def __call__(self, view: LayerView, selection: Selection, memory: Tensor | None) -> Merged:
        return Merged(selection.take(view.keys), selection.take(view.values))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", ["llama-gqa", "gemma2", "hybrid"])
def test_what_says_that_nothing_changes_is_dropping_bit_for_bit(shape: str, way: str) -> None:
    model, given = model_of(shape), {"prefill_chunk_size": 24} if way == "chunks" and shape == "llama-gqa" else {}
    policy = policy_of("snapkv-w8", **WAYS[way])
    with kvpolicy.register(Same):
        same_policy = kvpolicy.load(policy.to_dict(), evicted="same")
    want, got = run(model, policy, **given), run(model, same_policy, **given)
    assert torch.equal(got[1], want[1])
    assert all(map(torch.equal, stored(got[2]), stored(want[2])))


def read_on(model: PreTrainedModel, policy: Policy, pieces: list[Tensor], mask: Tensor) -> tuple[Tensor, DynamicCache]:
    """Return the logits of pieces read one after another in a session, and the cache."""
    cache, found, seen = DynamicCache(config=model.config), [], 0
    with policy.on(model):
        for piece in pieces:
            seen += piece.shape[1]
            found.append(oracle.forward(model, piece, cache, mask[:, :seen]))
    return torch.cat(found, dim=1), cache


def padded(rows: int, total: int, side: str) -> Tensor:
    mask = torch.ones(rows, total, dtype=torch.int64)
    mask[1, : 19 if side == "left" else 0] = 0
    return mask


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("shape", ["llama-gqa", "llama-mha", "qwen3"])
@pytest.mark.parametrize("way", ["dense", "ragged"])
@pytest.mark.parametrize("how", MERGES)
def test_a_prompt_equals_the_oracle(how: str, way: str, shape: str, side: str) -> None:
    model, policy = model_of(shape), policy_of("snapkv-w8", evicted=MERGES[how], **WAYS[way])
    ids, rest, mask = tokens(2, 64), tokens(2, 10, 1), padded(2, 74, side)
    pieces = [*rest[:, :6].split(1, dim=1), rest[:, 6:]]
    got, _ = read_on(model, policy, [ids, *pieces], mask)
    kept = oracle.plan(policy, model, ids, mask[:, :64])
    merged = oracle.merges(policy, model, ids, kept, mask[:, :64])
    want, dropped = (oracle.logits(model, ids, pieces, kept, mask[:, :64], each) for each in (merged, ()))
    real = mask.bool()
    torch.testing.assert_close(got[real], want[real], **NEAR)
    assert (dropped - want)[:, 64:].abs().max() > 1e-2, "merging changed nothing"


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("heads", ["uniform", "adaptive"])
@pytest.mark.parametrize("how", MERGES)
def test_decoding_equals_the_oracle(how: str, heads: str, side: str) -> None:
    budget = {"tokens": 24, "heads": heads}
    policy = policy_of("snapkv-w8", evicted=MERGES[how], budget=budget, decode={"every": 2, "grace": 1})
    model, mask = model_of("llama-gqa"), padded(2, 76, side)
    pieces = [tokens(2, 64), *tokens(2, 12, 1).split(1, dim=1)]
    got, cache = read_on(model, policy, pieces, mask)
    points = [oracle.Point(64), *(oracle.Point(seen, grace=1) for seen in range(66, 77, 2))]
    want, shown = oracle.replay(model, policy, pieces, points, mask)
    real = mask.bool()
    torch.testing.assert_close(got[real], want[real], **NEAR)
    for layer, visible in zip(evicting_layers(cache), shown, strict=True):
        places = [[head.nonzero().flatten().tolist() for head in row] for row in visible & real[:, None]]
        held = [[[at for at in head if real[row, at]] for head in heads] for row, heads in enumerate(layer.held)]
        assert held == places


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", MERGES)
@pytest.mark.parametrize("shape", ["llama-gqa", "gemma2", "hybrid"])
def test_a_merge_changes_what_is_kept_but_not_which(shape: str, how: str, way: str) -> None:
    model, given = model_of(shape), {"prefill_chunk_size": 24} if way == "chunks" and shape == "llama-gqa" else {}
    policy = policy_of("streaming-llm", **WAYS[way])
    dropped, merged = (
        run(model, kvpolicy.load(policy.to_dict(), evicted=evicted), **given) for evicted in ("drop", MERGES[how])
    )
    assert merged[1].isfinite().all()
    assert not torch.equal(merged[1], dropped[1])
    for one, other in zip(evicting_layers(merged[2]), evicting_layers(dropped[2]), strict=True):
        assert one.kept == other.kept
        assert one.held == other.held


@pytest.mark.parametrize("how", ["pivotal", "d2o", "cam"])
@pytest.mark.parametrize("name", [entry.name for entry in registry().entries("policy")])
def test_with_every_shipped_policy(name: str, how: str) -> None:
    model, policy = model_of("llama-gqa"), kvpolicy.load(name, evicted=MERGES[how])
    if not policy.trivial:
        policy = kvpolicy.load(policy.to_dict(), budget=max(24, policy.select.protects))
    text, logits, cache = run(model, policy, 3)
    assert logits.isfinite().all()
    if policy.trivial:
        assert torch.equal(text, run(model, kvpolicy.load("full"), 3)[0])
        return
    whole = kvpolicy.load(policy.to_dict(), evicted="drop")
    kept = [layer.kept for layer in evicting_layers(run(model, whole, 3)[2])]
    assert [sum(map(sum, layer.kept)) for layer in evicting_layers(cache)] == [sum(map(sum, layer)) for layer in kept]


@pytest.mark.parametrize("how", MERGES)
def test_where_nothing_is_evicted_nothing_changes(how: str) -> None:
    model = model_of("llama-gqa")
    roomy = policy_of("snapkv-w8", budget=200, decode={"every": 2})
    dropped, merged = (run(model, kvpolicy.load(roomy.to_dict(), evicted=one)) for one in ("drop", MERGES[how]))
    assert torch.equal(merged[1], dropped[1])
    assert all(map(torch.equal, stored(merged[2]), stored(dropped[2])))


@pytest.mark.parametrize("how", MERGES)
@pytest.mark.parametrize("name", ["snapkv-w8", "ada-kv"])
def test_drafts_in_one_pass_with_the_end_of_the_prompt_see_the_merged_slots(name: str, how: str) -> None:
    model, policy = model_of("llama-gqa"), policy_of(name, evicted=MERGES[how])
    ids, cache = tokens(1, 64), DynamicCache(config=model.config)
    with policy.on(model) as session:
        oracle.forward(model, ids, cache, None)
        want = torch.cat([oracle.forward(model, one, cache, None) for one in QUESTION.split(1, dim=1)], dim=1)
        # As `generate` tells a session: the prompt ends within the pass.
        cache = DynamicCache(config=model.config)
        session._now.prompt = Prompt(end=64)
        got = oracle.forward(model, torch.cat([ids, QUESTION], dim=1), cache, None)[:, 64:]
    torch.testing.assert_close(got, want, **EXACT)


def test_what_is_left_in_the_middle_of_a_pass_are_the_merged_slots() -> None:
    keys, values = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 3)
    kept = Selection(slots=torch.tensor([0, 2, 1]), lengths=torch.tensor([[2, 1]]))
    found = Kept(kept, 2, Merged(torch.ones(3, 4), torch.zeros(3, 3))).of((keys, values, None))
    assert found.kept.tolist() == [[[True, False, True, False, True, True], [False, True, False, False, True, True]]]
    assert found.keys is not None and found.values is not None
    assert (found.keys[0, 0, [0, 2]] == 1).all() and (found.values[0, 1, 1] == 0).all()
    assert torch.equal(found.keys[:, :, 4:], keys[:, :, 4:]) and torch.equal(found.values[:, :, 4:], values[:, :, 4:])


@pytest.mark.parametrize("way", ["dense", "ragged", "ragged decode", "quantized"])
@pytest.mark.parametrize("how", MERGES)
def test_contexts_forks_files_and_readings_agree(how: str, way: str, tmp_path: Path) -> None:
    model, policy = model_of("llama-gqa"), policy_of("snapkv-w8", evicted=MERGES[how], **WAYS[way])
    context = policy.compress(model, TEXT)
    context.save(tmp_path / "context.safetensors")
    loaded = kvpolicy.load_context(tmp_path / "context.safetensors", model)
    reading = kvpolicy.read(model, TEXT, policies=[policy]).compress(policy)
    assert same(held(loaded), held(context)) and same(held(reading), held(context))
    answers = []
    for one in (context, context, loaded, reading):
        with one.fork() as fork:
            answers.append(generate(fork, QUESTION, 6))
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_a_reading_that_recorded_no_queries_does_not_serve_what_merges_by_them() -> None:
    model, policy = model_of("llama-gqa"), policy_of("streaming-llm")
    merging = kvpolicy.load(policy.to_dict(), evicted="cam")
    reading = kvpolicy.read(model, TEXT, policies=[policy])
    assert not reading.serves(merging)
    with pytest.raises(ContextError, match="the last query"):
        reading.compress(merging)


def test_the_threshold_goes_with_the_rows() -> None:
    model = model_of("llama-gqa")
    _, _, cache = run(model, policy_of("snapkv-w8", evicted="d2o"))
    layers = evicting_layers(cache)
    before = [layer.memory.clone() for layer in layers if layer.memory is not None]
    assert len(before) == len(layers)
    cache.reorder_cache(torch.tensor([1, 0, 1]))
    assert all(torch.equal(layer.memory, old[[1, 0, 1]]) for layer, old in zip(layers, before, strict=True))
    layers[0].reset()
    assert layers[0].memory is None


def test_the_policy_says_what_merging_reads() -> None:
    assert policy_of("streaming-llm").needs == Needs()
    assert policy_of("streaming-llm", evicted="merge").needs == Needs(keys=True, values=True)
    cam = policy_of("streaming-llm", evicted={"type": "cam", "window": 3})
    assert cam.needs == Needs(queries=3, keys=True, values=True)


@pytest.mark.parametrize("how", MERGES)
def test_keys_that_are_derived_from_what_is_cached_are_refused(how: str) -> None:
    model = latent(Case("text", "deepseek_v3", "DeepseekV3ForCausalLM"))
    policy = policy_of("snapkv-w8", evicted=MERGES[how])
    if installed("<5.24") and not kvpolicy.read(model, TEXT, policies=[policy]).derived:
        pytest.skip("this transformers caches what the latent expands to")
    with policy.on(model), pytest.raises(UnsupportedModelError, match=r"derived from what it caches.*`evicted: drop`"):
        model(TEXT)
    with kvpolicy.load(policy.to_dict(), evicted="drop").on(model):
        model(TEXT)


def test_what_a_policy_file_says(write: Any) -> None:
    path = write("extends: snapkv\nevicted: {type: merge, how: averaged}\n")
    policy = kvpolicy.load(path)
    assert policy.evicted == Merge(how="averaged") and policy.merges
    assert kvpolicy.load(policy.to_dict()) == policy
    assert kvpolicy.load(write(f"extends: {path}\nevicted: {{only: alike}}\n", "over.yaml")).evicted == Merge(
        how="averaged", only="alike"
    )
    assert kvpolicy.load(write(f"extends: {path}\nevicted: d2o\n", "other.yaml")).evicted == D2O()
    assert not kvpolicy.load("snapkv").merges
    with pytest.raises(
        PolicyFileError, match=r"evicted: unknown treatment of the evicted 'mreg'. Did you mean 'merge'"
    ):
        kvpolicy.load("snapkv", evicted="mreg")
    with pytest.raises(PolicyFileError, match=r"evicted.how: expected 'pivotal', 'averaged' or 'weighted'"):
        kvpolicy.load("snapkv", evicted={"type": "merge", "how": "mean"})


@pytest.mark.parametrize(
    ("missing", "message"), [("stage", "it has no `stage`, as in stage = 'evicted'"), ("needs", "it has no `needs`")]
)
def test_a_class_that_lacks_something_is_refused(missing: str, message: str) -> None:
    parts = {"name": "mine", "stage": "evicted", "needs": Needs(), "__call__": lambda self, *_: None}
    made = settings(type("Mine", (), {key: part for key, part in parts.items() if key != missing}))

    class Offer:
        @staticmethod
        @kvpolicy.hookimpl
        def kvpolicy_evicted() -> list[type]:
            return [made]

    with pytest.raises(PluginError, match=message):
        kvpolicy.register(Offer)


def test_text_goes_before_images_and_images_are_merged() -> None:
    model = tiny_model("llava")
    asked = prompt(model, [[20, "image", 9, "image", 30], [4, "image", 11]])
    policy = policy_of("look-m", budget=40, select={"type": "top-k", "sinks": 0, "recent": 4})
    cache = DynamicCache(config=model.config.get_text_config())
    with policy.on(model), torch.no_grad():
        model(input_ids=asked.ids, attention_mask=asked.mask, **asked.pictures, **{cache_name(model): cache})
    for layer in evicting_layers(cache):
        for row, heads in enumerate(layer.held):
            text = (asked.mask[row].bool() & (asked.modality[row] == 0)).nonzero().flatten().tolist()
            for kept in heads:
                images = [place for place in kept if asked.modality[row, place]]
                # No image is kept where a text token is not.
                assert not images or set(text) <= set(kept)
