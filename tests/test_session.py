"""`policy.on(model)`: it acts, it says what it did, it leaves nothing behind, and it refuses loudly."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from releases import installed
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache, StaticCache

import kvpolicy
from kvpolicy.errors import InactiveSessionError, PolicyError, UnsupportedModelError
from kvpolicy.store.layer import EvictingLayer
from kvpolicy.testing.models import tiny
from kvpolicy.testing.oracle import forward


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny()


def tokens(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 128, (batch, count), generator=torch.Generator().manual_seed(seed))


def generate(model: PreTrainedModel, ids: Tensor, new: int = 6, **kwargs: object) -> Tensor:
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    out = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None, **kwargs)
    return out[:, ids.shape[1] :]


def fingerprint(model: PreTrainedModel) -> dict[str, object]:
    """Everything a session could leave behind on a model or in transformers."""
    return {
        "hooks": [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()],
        "hook kinds": [
            (len(m._forward_pre_hooks_with_kwargs), len(m._forward_hooks_with_kwargs)) for m in model.modules()
        ],
        "methods": [{"forward", "generate", "generate_batch"} & set(vars(m)) for m in model.modules()],
        "attention": [m.config._attn_implementation for m in model.modules() if isinstance(m, PreTrainedModel)],
        "config": model.config.to_dict(),
        "functions": sorted(AttentionInterface._global_mapping),
        "masks": sorted(AttentionMaskInterface._global_mapping),
    }


@pytest.mark.parametrize("name", ["snapkv", "ada-kv", "pyramidkv", "ecokv-ada-kv"])
def test_report_counts_what_is_stored(model: PreTrainedModel, name: str) -> None:
    policy = kvpolicy.load(name, budget=64)
    cache = DynamicCache(config=model.config)
    with policy.on(model) as run:
        forward(model, tokens(2, 200), cache, None)
        forward(model, tokens(2, 1), cache, None)
    report = run.report.to_dict()
    assert set(report) >= {"policy", "layers", "bytes", "bytes_full", "seconds"}
    assert report["policy"] == name
    assert set(report["seconds"]) == {"capture", "score", "select", "store"}
    assert sum(sum(map(sum, layer["kept"])) for layer in report["layers"]) == 3 * 2 * 2 * (64 + 1)
    for layer, stored in zip(report["layers"], cache.layers, strict=True):
        assert layer["seen"] == 201 == stored.get_seq_length()
        held = sum(t.untyped_storage().nbytes() for t in (stored.keys, stored.values))
        assert layer["bytes"] == held
        slots = sum(map(sum, layer["kept"])) * (stored.keys.shape[-1] + stored.values.shape[-1]) * 4
        assert slots <= held <= slots * (1.05 if stored.store.ragged else 1.02)
    assert report["bytes"] == sum(layer["bytes"] for layer in report["layers"])
    assert report["bytes_full"] == 3 * 2 * 2 * 201 * 16 * 4 or report["bytes_full"] == 3 * 2 * 2 * 201 * 2 * 8 * 4
    assert name in str(run.report)


@pytest.mark.parametrize(
    ("name", "decode", "recorded"),
    [
        ("snapkv", None, 0),
        ("snapkv", {"every": 1}, 32),
        ("h2o", None, 0),
        ("h2o", {"every": 1}, 203),
        ("cake", None, 0),
    ],
)
def test_report_counts_the_queries_that_are_recorded(
    model: PreTrainedModel, name: str, decode: dict[str, int] | None, recorded: int
) -> None:
    policy = kvpolicy.load(name, budget=64, decode=decode)
    cache = DynamicCache(config=model.config)
    with policy.on(model) as run:
        for count in (200, 1, 1, 1):
            forward(model, tokens(2, count), cache, None)
            if count == 200:
                assert (run.report.query_bytes == 0) == (recorded == 0)
    report = run.report.to_dict()
    assert report["query_bytes"] == sum(
        part.untyped_storage().nbytes()
        for layer in cache.layers
        if layer.window is not None
        for part in (layer.window.queries, layer.window.positions)
    )
    config = model.config
    query = config.num_attention_heads * config.head_dim * 4
    least = config.num_hidden_layers * 2 * recorded * query
    # At most, what was recorded before and the query of the pass: the copy they are in is cut, not copied again.
    assert least <= report["query_bytes"] <= config.num_hidden_layers * 2 * (recorded + 1) * (query + 2 * 8)
    assert ("recorded queries, beside keys and values" in str(run.report)) == (recorded > 0)
    assert str(run.report.query_bytes) in str(run.report).replace(",", "") or recorded == 0


def test_the_first_new_token_sees_the_full_cache(model: PreTrainedModel) -> None:
    ids = tokens(2, 90)
    want = forward(model, ids, DynamicCache(config=model.config), None)
    with kvpolicy.load("random", budget=16).on(model):
        got = forward(model, ids, DynamicCache(config=model.config), None)
    assert torch.equal(got, want)


def test_next_position_comes_from_tokens_seen(model: PreTrainedModel) -> None:
    positions = []
    hook = model.model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: positions.append(kwargs.get("position_ids", args[-1])), with_kwargs=True
    )
    with kvpolicy.load("streaming-llm", budget=16).on(model):
        generate(model, tokens(1, 50), new=4)
    hook.remove()
    assert [p.flatten().tolist() for p in positions[1:]] == [[50], [51], [52]]


@pytest.mark.parametrize("length", [1, 2, 11, 12, 13])
@pytest.mark.parametrize("name", ["snapkv", "ada-kv", "pyramidkv", "ecokv-snapkv", "random"])
def test_short_prompts_stay_whole(model: PreTrainedModel, name: str, length: int) -> None:
    ids = tokens(1, length)
    with kvpolicy.load(name, budget=64).on(model) as run:
        got = generate(model, ids)
    assert torch.equal(got, generate(model, ids))
    assert run.report.layers[0].kept == [[length + 5] * 2]


def test_full_policy_changes_nothing(model: PreTrainedModel) -> None:
    ids = tokens(2, 40)
    with kvpolicy.load("full").on(model) as run:
        got = generate(model, ids)
    assert torch.equal(got, generate(model, ids))
    assert run.report.bytes_full <= run.report.bytes <= 1.02 * run.report.bytes_full


def test_restores_the_model_exactly(model: PreTrainedModel) -> None:
    ids = tokens(1, 60)
    before, logits = fingerprint(model), forward(model, ids, None, None)
    with kvpolicy.load("snapkv", budget=40).on(model):
        assert fingerprint(model) != before
        generate(model, ids)
    assert fingerprint(model) == before
    assert torch.equal(forward(model, ids, None, None), logits)


def test_restores_the_model_after_an_exception(model: PreTrainedModel) -> None:
    before = fingerprint(model)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory, say")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"), kvpolicy.load("snapkv", budget=40).on(model):
        generate(model, tokens(1, 60))
    hook.remove()
    assert fingerprint(model) == before


def test_second_prompt_equals_a_fresh_run(model: PreTrainedModel) -> None:
    policy = kvpolicy.load("ecokv-ada-kv", budget=40)
    with policy.on(model):
        generate(model, tokens(1, 90, seed=1))
        second = generate(model, tokens(1, 70, seed=2))
    with policy.on(model):
        fresh = generate(model, tokens(1, 70, seed=2))
    assert torch.equal(second, fresh)


def test_session_enters_again_and_nests_in_itself(model: PreTrainedModel) -> None:
    before, ids = fingerprint(model), tokens(1, 60)
    session = kvpolicy.load("snapkv", budget=40).on(model)
    with session:
        first = generate(model, ids)
    with session, session:
        second = generate(model, ids)
    assert torch.equal(first, second)
    assert fingerprint(model) == before


def test_innermost_session_takes_a_new_cache(model: PreTrainedModel) -> None:
    outer, inner = kvpolicy.load("snapkv", budget=50), kvpolicy.load("streaming-llm", budget=16)
    ids, step = tokens(1, 60), tokens(1, 1, seed=3)
    with outer.on(model) as one:
        mine = DynamicCache(config=model.config)
        forward(model, ids, mine, None)
        with inner.on(model) as two:
            generate(model, ids, new=1)
            # The outer session is still active, so its cache goes on as its own.
            forward(model, step, mine, None)
        forward(model, step, mine, None)
    assert one.report.layers[0].kept == [[52, 52]]
    assert two.report.layers[0].kept == [[16, 16]]


def test_two_models_that_share_a_config(model: PreTrainedModel) -> None:
    other = type(model)(model.config).eval()
    ids = tokens(1, 60)
    want = generate(other, ids)
    with kvpolicy.load("snapkv", budget=40).on(model):
        assert torch.equal(generate(other, ids), want)
        with kvpolicy.load("random", budget=40).on(other) as run:
            generate(other, ids, new=1)
            assert run.report.layers[0].kept == [[40, 40]]
        generate(model, ids)
    assert model.config._attn_implementation == "sdpa"


def test_two_caches_interleave(model: PreTrainedModel) -> None:
    policy = kvpolicy.load("ada-kv", budget=40)
    prompts, rest = [tokens(1, 70, seed=1), tokens(1, 55, seed=2)], tokens(1, 8, seed=3)

    def run(caches: list[DynamicCache], order: list[int]) -> list[Tensor]:
        found: list[list[Tensor]] = [[], []]
        with policy.on(model):
            for which in order:
                step = len(found[which])
                ids = prompts[which] if not step else rest[:, step - 1 : step]
                found[which].append(forward(model, ids, caches[which], None)[:, -1])
        return [torch.cat(one) for one in found]

    def caches() -> list[DynamicCache]:
        return [DynamicCache(config=model.config) for _ in prompts]

    apart, mixed = run(caches(), [0] * 5 + [1] * 5), run(caches(), [0, 1] * 5)
    assert torch.equal(apart[0], mixed[0]) and torch.equal(apart[1], mixed[1])


def test_a_cache_dies_with_its_last_user(model: PreTrainedModel) -> None:
    cache = DynamicCache(config=model.config)
    gc.collect()
    gc.disable()
    try:
        with kvpolicy.load("ada-kv", budget=40).on(model) as run:
            forward(model, tokens(1, 60), cache, None)
            layer = weakref.ref(cache.layers[0])
            del cache
            assert layer() is None, "a reference cycle keeps the evicted cache alive"
    finally:
        gc.enable()
    assert run.report.bytes > 0


def test_plain_dynamic_cache_without_config(model: PreTrainedModel) -> None:
    cache = DynamicCache()
    with kvpolicy.load("snapkv", budget=40).on(model):
        forward(model, tokens(1, 60), cache, None)
    assert [layer.kept for layer in cache.layers] == [[[40, 40]]] * 3


def test_forward_without_a_cache_makes_one(model: PreTrainedModel) -> None:
    with kvpolicy.load("snapkv", budget=40).on(model) as run, torch.no_grad():
        model(tokens(1, 60))
    assert run.report.layers[0].kept == [[40, 40]]


def test_sliding_layers_are_left_alone() -> None:
    model = tiny("gemma2", attn_implementation="eager")
    with kvpolicy.load("snapkv", budget=40).on(model) as run:
        generate(model, tokens(1, 60), new=1)
    assert run.report.left_alone == [0]
    assert list(run.report.layers) == [1, 2]


@pytest.fixture
def evicted(model: PreTrainedModel) -> Iterator[DynamicCache]:
    cache = DynamicCache(config=model.config)
    with kvpolicy.load("ada-kv", budget=40).on(model):
        forward(model, tokens(2, 60), cache, None)
        yield cache


def test_crop_gives_back_tokens_since_the_eviction(model: PreTrainedModel, evicted: DynamicCache) -> None:
    step = tokens(2, 1, seed=5)
    once = forward(model, step, evicted, None)
    forward(model, step, evicted, None)
    for layer in evicted.layers:
        layer.crop(-2)
    assert evicted.get_seq_length() == 60
    torch.testing.assert_close(forward(model, step, evicted, None), once)
    with pytest.raises(UnsupportedModelError, match="at most the 1 tokens"):
        evicted.layers[0].crop(-2)


def test_rows_follow_reorder_repeat_and_select(model: PreTrainedModel, evicted: DynamicCache) -> None:
    step = tokens(2, 1, seed=5)
    want = forward(model, step, evicted, None)
    evicted.crop(-1)
    evicted.batch_repeat_interleave(2)
    evicted.reorder_cache(torch.tensor([2, 0, 3, 1]))
    evicted.batch_select_indices(torch.tensor([0, 1, 3]))
    got = forward(model, step[[1, 0, 0]], evicted, None)
    torch.testing.assert_close(got, want[[1, 0, 0]], rtol=1e-4, atol=1e-4)
    kept = evicted.layers[0].kept
    assert kept[1] == kept[2] != kept[0]


def test_beams_reorder_the_cache(model: PreTrainedModel) -> None:
    ids = tokens(1, 60)
    with kvpolicy.load("ada-kv", budget=50).on(model):
        beams = generate(model, ids, num_beams=3)
    with kvpolicy.load("ada-kv", budget=50).on(model):
        greedy = generate(model, ids)
    with torch.no_grad(), kvpolicy.load("ada-kv", budget=50).on(model):

        def score(continuation: Tensor) -> float:
            cache = DynamicCache(config=model.config)
            logits = [
                forward(model, piece, cache, None)[:, -1] for piece in (ids, *continuation[:, :-1].split(1, dim=1))
            ]
            return torch.stack(logits, 1).log_softmax(-1).gather(-1, continuation[..., None]).sum().item()

        assert score(beams) >= score(greedy) - 1e-4


def test_an_emptied_cache_knows_nothing_of_the_prompt_before(model: PreTrainedModel) -> None:
    """Neither what was padding, so that the mask of the next prompt is a plain one, nor how layers shared."""
    cache, mask = DynamicCache(), torch.ones(2, 60, dtype=torch.int64)
    mask[0, :9] = 0
    with kvpolicy.load("cake", budget=40).on(model):
        forward(model, tokens(2, 60), cache, mask)
        run = cache.layers[0].owner
        assert run._evictor.hidden is not None and run._evictor.notes is not None
        cache.reset()
        assert run._evictor.hidden is None and run._evictor.notes is None
        forward(model, tokens(2, 60), cache, torch.ones_like(mask))
        assert run.plain


def test_reset_makes_a_cache_new(model: PreTrainedModel, evicted: DynamicCache) -> None:
    evicted.reset()
    assert evicted.get_seq_length() == 0
    forward(model, tokens(2, 50), evicted, None)
    assert evicted.get_seq_length() == 50
    assert sum(evicted.layers[0].kept[0]) == 80


def test_a_new_token_that_is_padding_is_not_attended_to(model: PreTrainedModel, evicted: DynamicCache) -> None:
    """Heads of different lengths, a batch in which one row has already ended."""
    step, more = tokens(2, 1, seed=5), tokens(2, 1, seed=6)
    mask = torch.ones(2, 62, dtype=torch.int64)
    mask[1, 60] = 0
    forward(model, step, evicted, mask[:, :61])
    got = forward(model, more, evicted, mask)
    evicted.crop(-2)
    want = forward(model, more, evicted, None)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(got[0], want[0], rtol=1e-2, atol=1e-2)


def test_a_follow_up_turn_holds_the_budget(model: PreTrainedModel, evicted: DynamicCache) -> None:
    forward(model, tokens(2, 30, seed=7), evicted, None)
    assert evicted.get_seq_length() == 90
    assert [sum(row) for row in evicted.layers[0].kept] == [80, 80]


def test_outside_its_session_a_cache_raises(model: PreTrainedModel) -> None:
    cache = DynamicCache(config=model.config)
    with kvpolicy.load("snapkv", budget=40).on(model):
        forward(model, tokens(1, 60), cache, None)
    with pytest.raises(InactiveSessionError, match="snapkv"):
        forward(model, tokens(1, 1), cache, None)
    with kvpolicy.load("snapkv", budget=40).on(model), pytest.raises(InactiveSessionError, match="not active"):
        forward(model, tokens(1, 1), cache, None)


def test_a_half_written_cache_raises(model: PreTrainedModel) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("interrupted")

    cache = DynamicCache(config=model.config)
    with kvpolicy.load("snapkv", budget=40).on(model):
        forward(model, tokens(1, 60), cache, None)
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="interrupted"):
            forward(model, tokens(1, 1), cache, None)
        hook.remove()
        with pytest.raises(InactiveSessionError, match="half-written"):
            forward(model, tokens(1, 1), cache, None)
        cache.reset()
        forward(model, tokens(1, 60), cache, None)
        assert [layer.seen for layer in cache.layers] == [60] * 3


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda model, ids, _: generate(model, ids, use_cache=False), "use_cache=False"),
        (lambda model, ids, _: generate(model, ids, cache_implementation="static"), "StaticCache"),
        (lambda model, ids, _: forward(model, ids, StaticCache(model.config, max_cache_len=99), None), "StaticCache"),
        (lambda model, ids, full: forward(model, ids, full, None), "already holds 5 tokens"),
    ],
    ids=["no cache", "static by generate", "static by hand", "filled before"],
)
def test_what_cannot_act_raises_or_warns(
    run: Callable[[PreTrainedModel, Tensor, DynamicCache], Tensor], reason: str
) -> None:
    def attempt(policy: str, budget: float, inactive: str) -> None:
        # A new model each time: a static cache that `generate` could not finish stays on the model.
        model = tiny()
        full = DynamicCache(config=model.config)
        forward(model, tokens(1, 5), full, None)
        with kvpolicy.load(policy, budget=budget).on(model, inactive=inactive):
            run(model, tokens(1, 60), full)

    with pytest.raises(UnsupportedModelError, match=f"could not act.*{reason}"):
        attempt("snapkv", 40, "raise")
    with pytest.warns(UserWarning, match=f"could not act.*{reason}"):
        attempt("snapkv", 40, "warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        attempt("full", 1.0, "raise")


def test_refuses_what_is_no_decoder() -> None:
    with pytest.raises(UnsupportedModelError, match="expected a transformers"):
        kvpolicy.load("snapkv").on(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match="got str"):
        kvpolicy.load("snapkv").on("gpt2")
    with pytest.raises(PolicyError, match="'raise' or 'warn'"):
        kvpolicy.load("snapkv").on(tiny(), inactive="ignore")


_TINY = {"vocab_size": 128, "hidden_size": 48, "pad_token_id": 0, "eos_token_id": None}
_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, r"layers \[0, 1\] do not attend through"),
        ("falcon", _LAYERS, r"layers \[0, 1\] do not attend through"),
        ("mamba", {"num_hidden_layers": 2}, "no full-attention layer" if installed(">=5.6") else "a cache of its own"),
    ],
)
def test_models_that_cannot_be_evicted_from_are_refused(kind: str, settings: dict[str, object], reason: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_TINY, **settings)).eval()
    before = fingerprint(model)
    with pytest.raises(UnsupportedModelError, match=reason), kvpolicy.load("snapkv", budget=40).on(model):
        generate(model, tokens(1, 60))
    assert fingerprint(model) == before


def test_a_layer_that_attends_twice_evicts_once(model: PreTrainedModel) -> None:
    """As where modules share keys."""
    attention = model.model.layers[1].self_attn
    cache = DynamicCache(config=model.config)
    with kvpolicy.load("ada-kv", budget=40).on(model):
        function = AttentionInterface._global_mapping["kvpolicy_sdpa"]

        def twice(*args: object, **kwargs: object) -> object:
            function(*args, **kwargs)
            return function(*args, **kwargs)

        AttentionInterface.register("kvpolicy_sdpa", twice)
        forward(model, tokens(1, 60), cache, None)
    assert attention.layer_idx == 1
    assert [sum(layer.kept[0]) for layer in cache.layers] == [80] * 3


def test_a_copied_cache_is_a_fork(model: PreTrainedModel) -> None:
    prompt, step, turn = tokens(2, 60), tokens(2, 1, seed=5), tokens(2, 20, seed=6)
    cache = DynamicCache(config=model.config)
    with kvpolicy.load("ada-kv", budget=0.5).on(model) as run:
        forward(model, prompt, cache, None)
        fork = copy.deepcopy(cache)
        want = [forward(model, piece, cache, None) for piece in (step, turn, step)]
        got = [forward(model, piece, fork, None) for piece in (step, turn, step)]
    assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))
    assert [layer.kept for layer in fork.layers] == [layer.kept for layer in cache.layers]
    assert [layer.held for layer in fork.layers] == [layer.held for layer in cache.layers]
    assert run.report.layers[0].kept == fork.layers[0].kept, "the report is of the copy, which ran last"
    with pytest.raises(InactiveSessionError, match="not active"):
        forward(model, step, fork, None)
    with pytest.raises(InactiveSessionError, match="cannot be pickled"):
        pickle.dumps(cache)


def test_another_model_may_not_use_the_cache(model: PreTrainedModel, evicted: DynamicCache) -> None:
    with pytest.raises(InactiveSessionError, match="another model"):
        forward(tiny(), tokens(2, 1), evicted, None)


def test_a_pass_that_fails_in_the_last_layer_leaves_a_half_written_cache(model: PreTrainedModel) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("interrupted")

    cache = DynamicCache(config=model.config)
    with kvpolicy.load("snapkv", budget=40).on(model):
        hook = model.model.layers[2].mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="interrupted"):
            forward(model, tokens(1, 60), cache, None)
        hook.remove()
        with pytest.raises(InactiveSessionError, match="half-written"):
            forward(model, tokens(1, 1), cache, None)


@pytest.mark.parametrize("name", ["snapkv", "ecokv-ada-kv", "streaming-llm"])
def test_autocast_scores_in_float32(model: PreTrainedModel, name: str) -> None:
    cache = DynamicCache(config=model.config)
    with kvpolicy.load(name, budget=40).on(model), torch.autocast("cpu", dtype=torch.bfloat16):
        forward(model, tokens(1, 60), cache, None)
    assert [sum(layer.kept[0]) for layer in cache.layers] == [80] * 3


@pytest.mark.parametrize("name", ["snapkv", "ecokv-ada-kv"])
def test_autocast_scores_in_float32_at_the_end_of_a_prompt_too(model: PreTrainedModel, name: str) -> None:
    cache = DynamicCache(config=model.config)
    with kvpolicy.load(name, budget=40).on(model) as run, torch.autocast("cpu", dtype=torch.bfloat16), run.prompt():
        for chunk in tokens(1, 60).split(20, dim=1):
            forward(model, chunk, cache, None)
    assert [sum(layer.kept[0]) for layer in cache.layers] == [80] * 3


@pytest.mark.parametrize("name", ["snapkv", "ada-kv"])
def test_a_cache_outlives_inference_mode(model: PreTrainedModel, name: str) -> None:
    cache = DynamicCache(config=model.config)
    with kvpolicy.load(name, budget=60).on(model):
        with torch.inference_mode():
            forward(model, tokens(1, 90), cache, None)
            forward(model, tokens(1, 1), cache, None)
        forward(model, tokens(1, 1), cache, None)
        forward(model, tokens(1, 3), cache, None)
    assert [sum(layer.kept[0]) for layer in cache.layers] == [120] * 3


def test_a_batch_of_nothing_but_padding(model: PreTrainedModel) -> None:
    cache = DynamicCache(config=model.config)
    with kvpolicy.load("snapkv", budget=40).on(model):
        forward(model, tokens(1, 60), cache, torch.zeros(1, 60, dtype=torch.int64))
    assert cache.layers[0].kept == [[0, 0]]


def test_padding_between_turns_changes_nothing(model: PreTrainedModel) -> None:
    model = model.double()
    prompt, turn = tokens(2, 40), tokens(2, 20, seed=3)
    mask = torch.ones(2, 60, dtype=torch.int64)
    mask[1, 40:46] = 0
    both, alone = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with kvpolicy.load("snapkv-w8", budget=24).on(model):
        forward(model, prompt, both, mask[:, :40])
        forward(model, turn, both, mask)
        forward(model, prompt[1:], alone, None)
        forward(model, turn[1:, 6:], alone, None)
    for one, other in zip(both.layers, alone.layers, strict=True):
        kept = one.store.padded()[0][1]
        torch.testing.assert_close(kept, other.store.padded()[0][0], rtol=1e-4, atol=1e-4)


def test_encoder_decoders_are_refused() -> None:
    config = AutoConfig.for_model("t5", vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder T5"):
        kvpolicy.load("snapkv").on(AutoModelForSeq2SeqLM.from_config(config))


def test_refuses_an_unknown_attention_implementation(model: PreTrainedModel) -> None:
    model.config._attn_implementation_internal = "flash_attention_2"
    before = fingerprint(model)
    with pytest.raises(UnsupportedModelError, match="flash_attention_2"), kvpolicy.load("snapkv").on(model):
        pass
    assert fingerprint(model) == before


def test_layers_are_ours_only_inside(model: PreTrainedModel) -> None:
    cache = DynamicCache(config=model.config)
    forward(model, tokens(1, 60), cache, None)
    assert not any(isinstance(layer, EvictingLayer) for layer in cache.layers)


@pytest.mark.parametrize("hidden", [[7, 8, 9, 11, 12], [0, 1, 2, 3, 4, 7, 8]], ids=["others", "more"])
def test_a_later_mask_that_hides_other_slots_than_the_padding_counts(hidden: list[int]) -> None:
    ids, mask = torch.arange(3, 43)[None], torch.ones(1, 40, dtype=torch.int64)
    mask[:, :5] = 0
    later = torch.ones(1, 41, dtype=torch.int64)
    later[:, hidden] = 0
    policy = kvpolicy.load("ada-kv", budget=20, select={"sinks": 1, "recent": 1}, score={"window": 4})
    found = []
    for attention in ("sdpa", "eager"):
        model = tiny("llama-gqa", attn_implementation=attention)
        cache = DynamicCache(config=model.config)
        with policy.on(model):
            forward(model, ids, cache, mask)
            found.append(forward(model, torch.tensor([[50]]), cache, later))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["ecokv", "cake"])
def test_no_eviction_walks_over_the_score_tree_to_know_who_competes(
    model: PreTrainedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes as long as the scores of a small layer."""
    policy, walks = kvpolicy.load(name, budget=40, decode={"every": 1}), []
    cache = DynamicCache(config=model.config)
    with policy.on(model):
        forward(model, tokens(1, 60), cache, None)
        monkeypatch.setattr("kvpolicy.policy.walk", lambda node: walks.append(node) or iter(()))
        forward(model, tokens(1, 1), cache, None)
    assert not walks
