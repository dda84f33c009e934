"""The scorer ``kvpress``: settings, what a press is given, and where it scores."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from kvpolicy_kvpress import KVPress
from kvpolicy_kvpress.make import kvpress, setting_types
from kvpolicy_kvpress.presses import LEAST, NOT_WRAPPED, WRAPPED
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import kvpolicy
from kvpolicy import Budget, Needs, Policy, functional
from kvpolicy.errors import PluginError, PolicyError, UnsupportedModelError
from kvpolicy.plugin import importance_of
from kvpolicy.selectors.top_k import TopK
from kvpolicy.testing import check_scorer
from kvpolicy.testing.models import tiny
from kvpolicy.testing.oracle import forward

SNAPKV = {"type": "kvpress", "press": "SnapKVPress", "settings": {"window_size": 8}}


def loaded(score: dict[str, Any], budget: Any = 24, **more: Any) -> Policy:
    given = {"name": "x", "score": score, "budget": budget, "select": {"sinks": 2, "recent": 4}, **more}
    return kvpolicy.load(given)


def press(name: str, **given: Any) -> dict[str, Any]:
    return {"type": "kvpress", "press": name, **given}


def tokens(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 128, (batch, count), generator=torch.Generator().manual_seed(seed))


def held(policy: Policy, ids: Tensor, mask: Tensor | None = None, **model: Any) -> list[list[list[list[int]]]]:
    cache = DynamicCache()
    with policy.on(built := tiny(dtype=torch.float64, **model)):
        forward(built, ids, cache, mask)
    return [layer.held for layer in cache.layers]


def in_a_fresh_process(code: str) -> str:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_loading_the_plugin_does_not_import_kvpress() -> None:
    code = """
import sys, kvpolicy
from kvpolicy.registry import registry
assert "kvpress" in registry().names("score")
kvpolicy.load("ecokv-snapkv", budget=64)
print(sorted({"kvpress", "transformers"} & set(sys.modules)))
kvpolicy.load({"name": "x", "score": {"type": "kvpress", "press": "KnormPress"}, "budget": 64})
print("kvpress" in sys.modules)
"""
    assert in_a_fresh_process(code).splitlines()[-2:] == ["[]", "True"]


def test_kvpress_imported_in_a_session_leaves_no_name_behind() -> None:
    code = """
import kvpolicy
from kvpolicy.testing.models import tiny
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
before = set(ALL_ATTENTION_FUNCTIONS)
with kvpolicy.load("snapkv", budget=64).on(tiny()):
    kvpolicy.load({"name": "x", "score": {"type": "kvpress", "press": "KnormPress"}, "budget": 64})
print(set(ALL_ATTENTION_FUNCTIONS) == before)
"""
    assert in_a_fresh_process(code).splitlines()[-1] == "True"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (press("KeyDifPress"), r"score\.press: unknown press 'KeyDifPress'\. Did you mean 'KeyDiffPress'\?"),
        (press("kvpress.KnormPress"), r"unknown press 'kvpress.KnormPress'\. .*Known: CURPress, .*TOVAPress\.$"),
        (press("AdaKVPress"), r"score\.press: .* AdaKVPress: shares slots out .*heads: adaptive"),
        (press("SnapKVPress", settings={"window": 3}), r"settings\.window: .* Did you mean 'window_size'\?"),
        (press("SnapKVPress", settings={"window_size": "3"}), r"settings\.window_size: expected a valid integer"),
        (
            press("SnapKVPress", settings={"window_size": 0}),
            r"settings\.window_size: expected a number of at least 1, got 0",
        ),
        (press("SnapKVPress", settings={"window_size": -3}), r"window_size: expected a number of at least 1, got -3"),
        (press("SnapKVPress", settings={"kernel_size": 4}), r"settings\.kernel_size: expected an odd number, .*got 4"),
        (press("LagKVPress", settings={"lag_size": 0}), r"settings\.lag_size: expected a number of at least 1, got 0"),
        (
            press("ExpectedAttentionPress", settings={"n_future_positions": 0}),
            r"positions: expected a number of at least 1",
        ),
        (
            press("ExpectedAttentionPress", settings={"epsilon": math.nan}),
            r"settings\.epsilon: expected a finite number",
        ),
        (
            press("StreamingLLMPress", compression_ratio=0.5, settings={"n_sink": -1}),
            r"settings\.n_sink: expected a number of at least 0, got -1",
        ),
        (press("CURPress", settings={"leverage_type": "k"}), r"settings\.leverage_type: expected 'key', 'value'"),
        (press("CompactorPress", settings={"_leverage_press": None}), r"unknown setting of CompactorPress\."),
        (press("KnormPress", settings={"compression_ratio": 0.5}), r"unknown setting of KnormPress: `budget` says"),
        (
            press("KnormPress", compression_ratio=0.5),
            r"score\.compression_ratio: expected none, .* KnormPress does not",
        ),
        (press("StreamingLLMPress"), r"compression_ratio: expected a share in \[0, 1\), as the score of StreamingLLM"),
        (press("StreamingLLMPress", compression_ratio=1.0), r"compression_ratio: expected a number less than 1"),
        (press("CompactorPress"), r"compression_ratio: expected a share .*, or the setting 'blending'"),
        (press("CriticalKVPress", compression_ratio=0.5), r"settings: expected the setting 'press', the press inside"),
        (
            press("CriticalKVPress", compression_ratio=0.5, settings={"press": "KnormPress"}),
            r"settings\.press: expected a mapping with 'press', a name, and 'settings'",
        ),
        (
            press("CriticalKVPress", compression_ratio=0.5, settings={"press": {"press": "KnormPres"}}),
            r"settings\.press\.press: unknown press 'KnormPres'\. Did you mean 'KnormPress'",
        ),
        (
            press("CriticalKVPress", compression_ratio=0.5, settings={"press": {"press": "KnormPress", "settings": 3}}),
            r"settings\.press\.settings: expected a mapping",
        ),
    ],
    ids=lambda given: given["press"] if isinstance(given, dict) else "",
)
def test_a_wrong_press_or_setting_is_refused_when_the_policy_is_made(given: dict[str, Any], match: str) -> None:
    with pytest.raises(PolicyError, match=match):
        loaded(given)


def test_the_least_of_each_setting_that_counts_is_known() -> None:
    counted = {
        name for press in WRAPPED for name, hint in setting_types(getattr(kvpress(), press)).items() if hint is int
    }
    # How many samples and how long a file's name says they were: kvpress looks for that file.
    assert counted - {"num_samples", "sample_seq_len"} == set(LEAST)


@pytest.mark.parametrize("name", NOT_WRAPPED)
def test_a_press_that_is_no_scorer_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(PolicyError) as caught:
        loaded(press(name))
    assert f"{name}: {NOT_WRAPPED[name]}" in str(caught.value)


def test_what_each_declares() -> None:
    assert KVPress(press="KnormPress").needs == Needs(keys=True)
    assert KVPress(press="LagKVPress").needs == Needs(keys=True, values=True)
    assert KVPress(press="SnapKVPress").needs == Needs(keys=True, call=True)
    inner = {"press": {"press": "KnormPress"}}
    critical = KVPress(press="CriticalKVPress", settings=inner, compression_ratio=0.5)
    assert critical.needs == Needs(keys=True, values=True, call=True)
    blended = KVPress(press="CompactorPress", settings={"blending": 0.3})
    assert blended.compression_ratio is None and KVPress(press="KeyDiffPress").role == "diversity"
    assert importance_of(blended) is blended and importance_of(KVPress(press="KeyDiffPress")) is None


def test_a_policy_with_a_press_comes_back_from_its_file_from_pickle_and_from_a_copy() -> None:
    inner = {"press": {"press": "SnapKVPress", "settings": {"window_size": 8}}, "epsilon": 0.001}
    policy = loaded(press("CriticalKVPress", compression_ratio=0.5, settings=inner))
    for again in (kvpolicy.load(policy.to_dict()), pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
        assert again == policy and held(again, tokens(1, 60)) == held(policy, tokens(1, 60))
    assert dataclasses.replace(policy.score, seed=3) != policy.score


CHECKS: dict[str, dict[str, str]] = {
    "KnormPress": {},
    "KeyDiffPress": {
        "finite": "in float16 its smallest length is 0, by which it divides keys that are 0",
        "half_precision": "it sums in the dtype of the keys",
    },
    "RandomPress": {
        "heads": "its numbers follow the places of heads and slots, not what they hold",
        "permutation": "likewise",
        "half_precision": "it draws other numbers in another dtype",
    },
}
"""Press -> what no scorer of kvpolicy may do, and this one does, as the press itself does it."""


@pytest.mark.parametrize("name", CHECKS)
def test_it_passes_the_checks_of_any_scorer(name: str) -> None:
    check_scorer(KVPress(press=name), expected_failures=CHECKS[name])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "given",
    [
        press("KeyDiffPress"),
        SNAPKV,
        press("LeverageScorePress"),
        press("ExpectedAttentionPress", settings={"n_future_positions": 16}),
        press("ObservedAttentionPress"),
    ],
    ids=lambda given: given["press"],
)
def test_padding_and_batch_mates_do_not_matter(given: dict[str, Any], side: str) -> None:
    """A row among others, padded, keeps what it keeps alone."""
    policy, ids = loaded(given), tokens(2, 60)
    mask = torch.ones_like(ids)
    places = slice(0, 13) if side == "left" else slice(47, 60)
    mask[0, places] = 0
    own = slice(13, 60) if side == "left" else slice(0, 47)
    alone = [held(policy, ids[:1, own]), held(policy, ids[1:])]
    together = held(policy, ids, mask)
    shift = own.start
    for layer, both in enumerate(together):
        assert both[0] == [[place + shift for place in head] for head in alone[0][layer][0]]
        assert both[1] == alone[1][layer][0]


def test_it_composes_and_its_heads_free_what_they_evict() -> None:
    """A press as the importance of ECOKV, another as its diversity, heads of different lengths: in one `generate`."""
    score = {"type": "redundancy-adaptive", "importance": SNAPKV, "diversity": press("KeyDiffPress")}
    policy = loaded(score, {"tokens": 24, "heads": {"type": "adaptive", "by": "importance"}})
    model, ids = tiny(), tokens(1, 90)
    with policy.on(model) as run:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, pad_token_id=0)
    for layer in run.report.to_dict()["layers"]:
        assert sum(layer["kept"][0]) == 2 * (24 + 3)
    assert len({tuple(layer["kept"][0]) for layer in run.report.to_dict()["layers"]}) > 1
    assert run.report.bytes == pytest.approx(run.report.bytes_full * 27 / 93, rel=0.35)


@pytest.mark.parametrize("name", ["KeyDiffPress", "KnormPress", "LagKVPress", "CURPress", "RandomPress"])
def test_presses_of_keys_and_values_evict_while_decoding(name: str) -> None:
    policy = loaded(press(name), decode={"every": 4})
    model, ids = tiny(), tokens(1, 60)
    with policy.on(model) as run:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12, pad_token_id=0)
    for layer in run.report.to_dict()["layers"]:
        assert layer["seen"] == 71 and all(24 <= kept < 28 for kept in layer["kept"][0])


@pytest.mark.parametrize("name", ["SnapKVPress", "TOVAPress", "LeverageScorePress", "ObservedAttentionPress"])
def test_others_are_refused_by_name_where_they_would_have_to(name: str) -> None:
    with pytest.raises(PolicyError, match="decode: expected none with 'kvpress', which needs"):
        loaded(press(name), decode={"every": 4})
    model = tiny()
    with (
        loaded(press(name)).on(model),
        pytest.raises(UnsupportedModelError, match="expected the whole prompt in one pass"),
    ):
        model.generate(tokens(1, 60), prefill_chunk_size=20, max_new_tokens=2, pad_token_id=0)


def test_a_seed_makes_other_numbers_and_touches_no_one_else_s() -> None:
    keys = torch.randn(1, 2, 40, 8)

    def scores(seed: int) -> Tensor:
        return functional.score(KVPress(press="RandomPress", seed=seed), None, keys, keys)

    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    first = scores(0)
    assert torch.equal(torch.rand(3), want)
    assert torch.equal(scores(0), first) and not torch.equal(scores(1), first)


def test_a_press_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(*_: Any) -> None:
        raise AssertionError("on purpose")

    monkeypatch.setattr("kvpress.KnormPress.score", score)
    model = tiny()
    wanted = "scorer 'kvpress': KnormPress failed in layer 0, on 60 slots: AssertionError: on purpose"
    with loaded(press("KnormPress")).on(model), pytest.raises(PluginError, match=wanted):
        forward(model, tokens(1, 60), DynamicCache(), None)


NEEDS: dict[str, tuple[dict[str, Any], int]] = {
    "SnapKVPress": (press("SnapKVPress", settings={"window_size": 8}), 9),
    "TOVAPress": (press("TOVAPress"), 2),
    "ExpectedAttentionPress": (press("ExpectedAttentionPress", settings={"n_sink": 5}), 6),
    "CapPress": (press("CapPress"), 5),
    "StreamingLLMPress": (press("StreamingLLMPress", compression_ratio=0.5), 5),
    "CompactorPress": (press("CompactorPress", settings={"sink_size_start": 3, "blending": 0.5}), 8),
    "CriticalKVPress": (
        press("CriticalKVPress", compression_ratio=0.5, settings={"press": {"press": "SnapKVPress"}}),
        65,
    ),
    "CURPress": (press("CURPress"), 1),
    "KeyDiffPress": (press("KeyDiffPress"), 1),
    "KnormPress": (press("KnormPress"), 1),
    "LagKVPress": (press("LagKVPress"), 1),
    "LeverageScorePress": (press("LeverageScorePress"), 1),
    "NonCausalAttnPress": (press("NonCausalAttnPress"), 1),
    "ObservedAttentionPress": (press("ObservedAttentionPress"), 1),
    "RandomPress": (press("RandomPress"), 1),
}
"""Press -> how it is made, and the fewest tokens it scores, as running it shows."""


def test_every_press_is_among_them_but_those_with_trained_weights() -> None:
    trained = {name for name, press in WRAPPED.items() if "weights trained for the model" in press.reads}
    assert NEEDS.keys() == WRAPPED.keys() - trained


@pytest.mark.parametrize("name", NEEDS)
def test_a_row_too_short_for_a_press_is_refused_and_no_longer_one(name: str) -> None:
    given, least = NEEDS[name]
    policy = loaded(given, select={"sinks": 0, "recent": 0})
    assert len(held(policy, tokens(1, least))[0][0][0]) == min(24, least)
    assert held(policy, tokens(1, 1)) == [[[[0], [0]]]] * 3
    if least > 2:
        wanted = rf"layer 0: .* scores rows of at least {least} tokens, got one of {least - 1}: give the press"
        with pytest.raises(UnsupportedModelError, match=wanted):
            held(policy, tokens(1, least - 1))


def test_a_row_too_short_for_a_press_is_kept_where_all_of_it_is_protected() -> None:
    """Sinks and recent tokens are six: a row of six beside one of sixty needs no score, and one of seven does."""
    policy, ids = loaded(SNAPKV), tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[1, :54] = 0
    alone = held(policy, ids[:1])
    for layer, both in enumerate(held(policy, ids, mask)):
        assert both == [alone[layer][0], [list(range(54, 60))] * 2]
    mask[1, 53] = 1
    with pytest.raises(UnsupportedModelError, match=r"SnapKVPress with window_size 8 .* at least 9 .* got one of 7"):
        held(policy, ids, mask)


def test_a_model_whose_keys_kvpress_makes_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those with a norm that kvpress does not know of, or with another rotation."""
    turn = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: turn(q, 1.01 * k, cos, sin))
    model, cache = tiny(), DynamicCache()
    with (
        loaded(SNAPKV).on(model),
        pytest.raises(UnsupportedModelError, match="other queries and keys of hidden states"),
    ):
        forward(model, tokens(1, 60), cache, None)
    assert {type(layer.store).__name__ for layer in cache.layers[1:]} == {"NoneType"}


def test_a_model_that_kvpress_does_not_know_is_refused() -> None:
    model = tiny("gpt2")
    with loaded(SNAPKV).on(model), pytest.raises(UnsupportedModelError, match="GPT2Attention is given none"):
        forward(model, tokens(1, 60), DynamicCache(), None)


def test_positions_from_elsewhere_are_refused_by_presses_that_look_ahead() -> None:
    model, ids = tiny(), tokens(1, 60)
    given = {"past_key_values": DynamicCache(), "position_ids": torch.arange(5, 65)[None]}
    with loaded(press("CapPress")).on(model), pytest.raises(UnsupportedModelError, match="got other positions"):
        model(ids, **given)


def test_weights_that_nobody_trained_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = tiny()
    with (
        loaded(press("QFilterPress")).on(model),
        pytest.raises(UnsupportedModelError, match="QFilterPress has no weights for the model ''"),
    ):
        forward(model, tokens(1, 60), DynamicCache(), None)


def test_the_attention_module_stays_as_it_is() -> None:
    model = tiny()
    before = dict(model.named_modules())
    with loaded(press("ExpectedAttentionPress", settings={"n_future_positions": 16})).on(model):
        forward(model, tokens(1, 60), DynamicCache(), None)
    assert dict(model.named_modules()) == before
    assert not [name for name in ALL_ATTENTION_FUNCTIONS if name.startswith("kvpolicy_")]


def test_a_budget_of_everything_asks_no_press() -> None:
    policy = Policy(name="all", score=KVPress(press="SnapKVPress"), budget=Budget(keep=1.0), select=TopK())
    assert held(policy, tokens(1, 20)) == [[[list(range(20))] * 2]] * 3
