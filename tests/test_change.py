"""How little each layer's attention changes, as a session sees it: the same as by hand, and each cache its own."""

from __future__ import annotations

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from releases import installed
from test_readings import passes
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from watching import SEEN, Watching

import kvpolicy
from kvpolicy.errors import ContextError, PolicyError, UnsupportedModelError, ViewError
from kvpolicy.eval.readings import Readings
from kvpolicy.policy import Budget, Decode, Policy
from kvpolicy.selectors.top_k import TopK
from kvpolicy.session import Session
from kvpolicy.session import change as changes
from kvpolicy.session.decoder import cache_name
from kvpolicy.testing.architectures.build import cases, tiny_model
from kvpolicy.testing.models import tiny
from kvpolicy.testing.oracle import forward, views
from kvpolicy.types import LayerView, Needs

PROMPT = 60


def watching(**kwargs: Any) -> Policy:
    SEEN.clear()
    select = TopK(sinks=2, recent=4)
    return Policy(name="watching", score=Watching(change=True), budget=Budget(tokens=24), select=select, **kwargs)


def tokens(batch: int, count: int = PROMPT, seed: int = 0) -> Tensor:
    return torch.randint(1, 128, (batch, count), generator=torch.Generator().manual_seed(seed))


def padding(side: str, batch: int = 2) -> Tensor | None:
    if side == "none":
        return None
    mask = torch.ones(batch, PROMPT, dtype=torch.int64)
    mask[0, slice(0, 19) if side == "left" else slice(41, PROMPT)] = 0
    return mask


def attention_of(model: PreTrainedModel, layer: int) -> nn.Module:
    """The attention module of a layer, by the name it has in its class."""
    if hasattr(model, "transformer"):
        return model.transformer.h[layer].attn
    return model.model.layers[layer].self_attn


def by_hand(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> dict[int, Tensor]:
    """By layer, the mean cosine of each row, float64 ``[B]``: from the hidden states that the model returns."""
    added: dict[int, Tensor] = {}

    def take(layer: int) -> Any:
        return lambda _, __, output: added.update({layer: output[0] if isinstance(output, tuple) else output})

    count = model.config.num_hidden_layers
    hooks = [attention_of(model, layer).register_forward_hook(take(layer)) for layer in range(count)]
    given: dict[str, Any] = {}
    if mask is not None:
        given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with torch.no_grad():
        streams = model(ids, output_hidden_states=True, use_cache=False, **given).hidden_states
    for hook in hooks:
        hook.remove()
    there = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    found = {}
    for layer in range(count):
        before, after = streams[layer].double(), (streams[layer] + added[layer]).double()
        cosines = (before * after).sum(-1) / (before.square().sum(-1) * after.square().sum(-1)).sqrt()
        found[layer] = torch.stack([row[own].mean() for row, own in zip(cosines, there, strict=True)])
    return found


def expect(found: list[LayerView], want: dict[int, Tensor]) -> None:
    assert found
    for view in found:
        assert view.similarity.dtype == torch.float32
        torch.testing.assert_close(view.similarity.double(), want[view.layer], rtol=0, atol=1e-6)
    # Were all layers alike, or all rows, another's would do.
    every = torch.stack([want[view.layer] for view in found])
    assert (every.amax(0) - every.amin(0)).min() > 1e-4
    assert every.shape[1] == 1 or (every[:, 0] - every[:, 1]).abs().max() > 1e-4


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("shape", ["llama-gqa", "qwen3", "phi3", "gemma2", "gpt2"])
def test_it_is_that_of_the_hidden_states(shape: str, side: str) -> None:
    # In float64, Gemma 2's own attention is nan where a row is padded.
    model = tiny(shape, dtype=torch.float32 if shape == "gemma2" else torch.float64)
    ids, mask = tokens(2), padding(side)
    want = by_hand(model, ids, mask)
    with watching().on(model):
        forward(model, ids, DynamicCache(config=model.config), mask)
    assert [view.layer for view in SEEN] == ([1, 2] if shape == "gemma2" else [0, 1, 2])
    expect(SEEN, want)


def made(name: str) -> PreTrainedModel:
    """A tiny model of a model type of transformers."""
    return tiny_model(next(case for case in cases() if (case.task, case.model_type) == ("text", name)))


@pytest.mark.parametrize("name", ["cohere", "gptj", "olmo2", "granite", "gpt_neox"])
def test_other_decoder_layers(name: str) -> None:
    """An MLP beside attention, norms behind it, a factor, another name: what the attention module gives counts."""
    if name == "gptj" and installed("==5.2.*"):
        pytest.skip("this release of transformers has it attend by itself")
    model, ids = made(name).double(), torch.randint(1, 60, (2, PROMPT))
    layers = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    before: dict[int, Tensor] = {}
    added: dict[int, Tensor] = {}
    handles = []
    for index, layer in enumerate(layers):
        inner = next(child for child in layer.children() if getattr(child, "layer_idx", None) == index)
        handles += [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, index=index: before.update({index: (*args, *kwargs.values())[0]}),
                with_kwargs=True,
            ),
            inner.register_forward_hook(lambda _, __, output, index=index: added.update({index: output[0]})),
        ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    want = {
        index: nn.functional.cosine_similarity(before[index], before[index] + added[index], dim=-1).mean(-1)
        for index in before
    }
    with watching().on(model), torch.no_grad():
        model(ids)
    expect(SEEN, want)


def test_low_precision_is_compared_in_float32() -> None:
    model, ids = tiny(dtype=torch.bfloat16), tokens(2)
    want = by_hand(model, ids)
    with watching().on(model), torch.autocast("cpu", dtype=torch.bfloat16):
        forward(model, ids, DynamicCache(), None)
    for view in SEEN:
        # The sum of a stream and what is added is rounded by hand, and not here.
        torch.testing.assert_close(view.similarity.double(), want[view.layer], rtol=0, atol=1e-3)


def test_it_is_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, mask = tiny(dtype=torch.float64), tokens(2), padding("left")
    monkeypatch.setattr(changes, "_NUMBERS", 2 * 48 * 7)
    with watching().on(model), torch.inference_mode():
        forward(model, ids, DynamicCache(), mask)
    expect(SEEN, by_hand(model, ids, mask))


def test_values_beyond_all_numbers() -> None:
    before, added = torch.tensor([[[3e38, 1.0], [torch.inf, 0.0]]]), torch.tensor([[[3e38, 0.0], [0.0, 1.0]]])
    assert changes._similarity(before, added).tolist() == [[1, 1]]


@pytest.mark.parametrize("side", ["none", "left"])
def test_a_prompt_of_several_passes(side: str) -> None:
    model, ids, mask, cache = tiny(dtype=torch.float64), tokens(2), padding(side), DynamicCache()
    with watching().on(model) as run:
        with run.prompt():
            for begin, end in ((0, 25), (25, 26), (26, PROMPT)):
                forward(model, ids[:, begin:end], cache, None if mask is None else mask[:, :end])
                assert not SEEN
        assert [view.layer for view in SEEN] == [0, 1, 2]
    expect(SEEN, by_hand(model, ids, mask))


@pytest.mark.skipif(installed("==5.2.*"), reason="5.2 reads other tokens where it reads a prompt in chunks")
def test_generate_reads_a_prompt_in_chunks() -> None:
    model, ids = tiny(dtype=torch.float64), tokens(1)
    with watching().on(model):
        model.generate(ids, max_new_tokens=3, prefill_chunk_size=25, pad_token_id=0)
    assert [view.slots for view in SEEN] == [PROMPT] * 3
    expect(SEEN, by_hand(model, ids))


def test_two_caches_in_turn() -> None:
    model, ids = tiny(dtype=torch.float64), [tokens(2), tokens(2, seed=1)]
    caches = DynamicCache(), DynamicCache()
    with watching().on(model) as run, run.prompt():
        for begin, end in ((0, 20), (20, 45), (45, PROMPT)):
            for each, cache in zip(ids, caches, strict=True):
                forward(model, each[:, begin:end], cache, None)
    assert len(SEEN) == 6
    expect(SEEN[:3], by_hand(model, ids[0]))
    expect(SEEN[3:], by_hand(model, ids[1]))


def test_two_threads_at_once() -> None:
    """Each waits in each layer for the other, before attention and after it."""
    model, ids = tiny(dtype=torch.float64), [tokens(2), tokens(2, seed=1)]
    want = [by_hand(model, each) for each in ids]
    barrier = threading.Barrier(2, timeout=60)

    def wait(*_: Any) -> None:
        barrier.wait()

    def read(one: Tensor) -> None:
        forward(model, one, DynamicCache(), None)

    with watching().on(model):
        layers = model.model.layers
        hooks = [layer.register_forward_pre_hook(wait) for layer in layers]
        hooks += [layer.self_attn.o_proj.register_forward_hook(wait) for layer in layers]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(read, ids))
        for hook in hooks:
            hook.remove()
    # Whose is first, nobody knows.
    got = sorted(view.similarity.tolist() for view in SEEN)
    both = sorted(each[layer].tolist() for each in want for layer in range(3))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(both), rtol=0, atol=1e-6)


def test_rows_in_another_order_and_tokens_taken_back() -> None:
    model, ids, cache = tiny(dtype=torch.float64), tokens(2), DynamicCache()
    mask = padding("left")
    with watching().on(model) as run, run.prompt():
        forward(model, ids[:, :30], cache, mask[:, :30])
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-10)
        forward(model, ids.flip(0)[:, 20:], cache, mask.flip(0))
    expect(SEEN, by_hand(model, ids.flip(0), mask.flip(0)))


def test_a_copy_that_is_reset_reads_again() -> None:
    model, ids, cache = tiny(dtype=torch.float64), tokens(2), DynamicCache()
    with watching().on(model):
        forward(model, tokens(2, seed=5), cache, None)
        copied = copy.deepcopy(cache)
        copied.reset()
        SEEN.clear()
        forward(model, ids, copied, None)
    expect(SEEN, by_hand(model, ids))


def test_the_oracles_is_the_same() -> None:
    model, ids, mask = tiny(dtype=torch.float64), tokens(2), padding("left")
    expect(views(model, ids, mask, Needs(change=True)), by_hand(model, ids, mask))


def test_a_cache_that_is_reset_begins_again() -> None:
    model, ids, cache = tiny(dtype=torch.float64), tokens(2), DynamicCache()
    with watching().on(model) as run, run.prompt():
        forward(model, tokens(2, 33, seed=5), cache, None)
        cache.reset()
        forward(model, ids, cache, None)
    expect(SEEN, by_hand(model, ids))


def watches(run: Session) -> list[changes.ChangeWatch]:
    return [each.change for each in run._listening.values() if each.change is not None]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the tokens of each comparison."""
    found: list[int] = []
    compare = changes._similarity

    def count(before: Tensor, added: Tensor) -> Tensor:
        found.append(before.shape[1])
        return compare(before, added)

    monkeypatch.setattr(changes, "_similarity", count)
    return found


def test_decoding_compares_nothing_and_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, found = tiny(), DynamicCache(), counted(monkeypatch)
    policy = kvpolicy.load("squeeze", budget=24, decode={"every": 2})
    with policy.on(model) as run:
        forward(model, tokens(1), cache, None)
        for _ in range(5):
            forward(model, tokens(1, 1), cache, None)
        assert found == [PROMPT] * 3
        owner = cache.layers[0].owner
        assert owner._evictor.facts.change == {}
        assert all(watch._now.found is None and not watch._now.entered for watch in watches(run))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_pass_that_fails_leaves_nothing() -> None:
    model, ids = tiny(dtype=torch.float64), tokens(1)

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    with watching().on(model) as run:
        handle = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            forward(model, tokens(1, seed=3), DynamicCache(), None)
        handle.remove()
        assert not any(watch._now.entered or watch._now.attended or watch._now.found for watch in watches(run))
        forward(model, ids, DynamicCache(), None)
    expect(SEEN, by_hand(model, ids))


def test_a_session_inside_another_takes_the_cache_and_the_other_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, found = tiny(dtype=torch.float64), tokens(2), counted(monkeypatch)
    with kvpolicy.load("squeeze", budget=24).on(model), watching().on(model):
        forward(model, ids, DynamicCache(), None)
    assert found == [PROMPT] * 3
    expect(SEEN, by_hand(model, ids))


def test_who_does_not_need_it_hooks_no_layer() -> None:
    model = tiny()
    with kvpolicy.load("snapkv", budget=64).on(model):
        assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.model.layers)


@pytest.mark.parametrize("tokens_", [1, 16, 41])
@pytest.mark.parametrize("p", [0.1, 0.35, 1])
def test_generate_holds_the_budget(p: float, tokens_: int) -> None:
    model, ids, cache = tiny(num_hidden_layers=6), tokens(2), DynamicCache()
    layers = {"type": "squeeze", "p": p}
    policy = kvpolicy.load("squeeze", budget={"tokens": tokens_, "layers": layers})
    with policy.on(model) as run:
        given = {"attention_mask": padding("left"), "max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}
        model.generate(ids, **given, **{cache_name(model): cache})
    kept = [layer["kept"] for layer in run.report.to_dict()["layers"]]
    for row, seen in enumerate((41, 60)):
        own = [layer[row][0] - 3 for layer in kept]
        assert all(layer[row] == [size + 3] * 2 for layer, size in zip(kept, own, strict=True))
        assert sum(own) == 6 * min(tokens_, seen)
        assert (len(set(own)) > 1) == (p < 1 and 1 < tokens_ < seen)
        least = max(math.floor(p * tokens_), math.floor(0.175 * tokens_), 1)
        # As far as the others have room for what it frees.
        assert min(own) == least or max(own) == seen


def refused(match: str) -> Any:
    return pytest.raises(UnsupportedModelError, match=match)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"decode": Decode(every=4)},
            r"decode: expected none with 'watching', which needs how little each layer's",
        ),
        ({"prefill": "chunks"}, r"prefill: expected 'whole' with 'watching', which needs how little each layer's"),
    ],
    ids=["decode", "prefill"],
)
def test_a_score_that_reads_it_is_of_a_whole_prompt(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(PolicyError, match=match):
        watching(**settings)


def test_a_budget_that_reads_it_may_decode_but_not_evict_by_chunks() -> None:
    kvpolicy.load("squeeze", decode={"every": 4})
    with pytest.raises(PolicyError, match=r"prefill: expected 'whole' with 'squeeze', .*there for a whole prompt"):
        kvpolicy.load("squeeze", prefill="chunks")


def test_a_second_prompt_is_refused_before_it_reads() -> None:
    model, cache = tiny(), DynamicCache()
    with kvpolicy.load("squeeze", budget=24).on(model):
        forward(model, tokens(1), cache, None)
        with refused("expected a prompt in an empty cache, got one behind 60 tokens"):
            forward(model, tokens(1, 7), cache, None)
        forward(model, tokens(1, 1), cache, None)
    assert cache.get_seq_length() == PROMPT + 1


def test_drafts_are_refused() -> None:
    model = tiny()
    with kvpolicy.load("squeeze", budget=24).on(model), refused("generate without drafts"):
        model.generate(tokens(1, 20).repeat(1, 3), max_new_tokens=4, prompt_lookup_num_tokens=3, pad_token_id=0)


def test_a_reading_does_not_serve() -> None:
    model, ids, policy = tiny(), tokens(1), kvpolicy.load("squeeze", budget=24)
    reading = kvpolicy.read(model, ids, policies=[policy])
    assert not reading.serves(policy)
    with pytest.raises(
        ContextError, match=r"the policy reads how little each layer's attention changes .* Use policy\."
    ):
        reading.compress(policy)
    assert reading.compress(kvpolicy.load("streaming-llm", budget=24)).report.bytes
    want = policy.compress(model, ids).report.to_dict()["layers"]
    with passes(model) as found:
        assert Readings(model).compress(policy, "text", ids).report.to_dict()["layers"] == want
    assert found == [PROMPT]


@pytest.mark.parametrize(
    ("model_type", "match"),
    [
        ("bert", r"BertModel: expected an attention module .* got none"),
        ("dbrx", r"DbrxAttention: expected an attention module .* got one that stands elsewhere, in layer 0"),
        (
            "gemma3n_text",
            r"Gemma3nTextAttention: .* got \[4, 1, 60, \d+\] and \[1, 60, \d+\] of 60 tokens",
        ),
    ],
)
def test_decoder_layers_of_another_kind_are_refused(model_type: str, match: str) -> None:
    model = made(model_type)
    with refused(match), watching().on(model), torch.no_grad():
        model(torch.randint(1, 60, (1, PROMPT)))
    assert not SEEN


@pytest.mark.parametrize(
    ("spoil", "got"),
    [
        (lambda output: (output[0][:, 1:], None), r"\[1, 60, 48\] and \[1, 59, 48\] of 60"),
        (lambda output: (output[0][..., :8], None), r"\[1, 60, 48\] and \[1, 60, 8\] of 60"),
        (lambda output: {"hidden_states": output[0]}, r"\[1, 60, 48\] and dict of 60"),
    ],
    ids=["tokens", "size", "no tensor"],
)
def test_an_attention_module_that_gives_something_else_is_refused(spoil: Any, got: str) -> None:
    model = tiny()
    hook = model.model.layers[1].self_attn.register_forward_hook(lambda _, __, output: spoil(output))
    with watching().on(model), refused(f"LlamaAttention: expected an attention module .* got {got} tokens"):
        forward(model, tokens(1), DynamicCache(), None)
    hook.remove()


def test_nothing_of_a_layer_is_held_in_the_next_nor_a_graph_of_it() -> None:
    model, cache, held = tiny(), DynamicCache(), []
    with watching().on(model) as run, run.prompt():
        watch = watches(run)[0]
        for layer in model.model.layers:
            layer.register_forward_hook(lambda *_: held.append(len(watch._now.entered)))
        model(tokens(1), **{cache_name(model): cache})
        change = cache.layers[0].owner._evictor.facts.change
        assert [each.requires_grad for each in change.values()] == [False] * 3
        assert watch._now.found is None
        watch.begin()
        assert watch.end() == {} and watch._now.found is None
    assert held == [0, 0, 0]


def test_with_another_need_of_a_whole_prompt() -> None:
    """The pass that repeats the prompt is none of it."""
    model, ids, cache = tiny(num_hidden_layers=6), tokens(2), DynamicCache()
    policy = kvpolicy.load("squeeze", budget=24, score={"type": "kvzip", "chunk": 16})
    assert policy.needs.repetition is not None and policy.needs.change
    with policy.on(model) as run:
        forward(model, ids, cache, None)
    kept = [[layer.kept[row][0] for layer in cache.layers] for row in range(2)]
    assert [sum(row) for row in kept] == [6 * 24] * 2 and all(len(set(row)) > 1 for row in kept)
    similar = torch.stack(list(by_hand(model, ids).values()))
    for row, own in enumerate(kept):
        assert int(similar[:, row].argmax()) in [layer for layer, size in enumerate(own) if size == min(own)]
    assert run.report.bytes


def test_a_view_without_it() -> None:
    keys = torch.zeros(2, 1, 3, 4)
    with pytest.raises(ViewError, match=r"similarity: expected torch.float32 \[2\], got torch.float32 \[3\]"):
        LayerView(keys=keys, values=keys, similarity=torch.zeros(3))
    view = LayerView(keys=keys, values=keys, similarity=torch.tensor([0.5, 0.25]))
    assert view.part(1, slice(None), torch.tensor([2])).similarity.tolist() == [0.25]
    with pytest.raises(kvpolicy.errors.UndeclaredReadError, match="Add change=True to its `needs`"):
        _ = view.limit(Needs(), "it").similarity
    with pytest.raises(ViewError, match="it needs similarity, but the view has none"):
        _ = LayerView(keys=keys, values=keys).limit(Needs(change=True), "it").similarity
    assert (Needs(change=True) | Needs(keys=True)) == Needs(keys=True, change=True)
    assert Needs(change=True).late and Needs(change=True).words.startswith("how little each layer's attention")
