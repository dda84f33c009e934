"""`analyze`: the views of a real prompt are those that a session evicts by, and what is made of them adds up."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvpolicy
from kvpolicy.analysis.analyze import AnalysisError, analyze
from kvpolicy.analysis.views import views
from kvpolicy.combiners.redundancy_adaptive import RedundancyAdaptive
from kvpolicy.errors import ContextError, UnsupportedModelError
from kvpolicy.maths import cosine_redundancy
from kvpolicy.policy import Policy
from kvpolicy.session.decoder import cache_name
from kvpolicy.session.layers import evicting_layers
from kvpolicy.testing.architectures.build import Case
from kvpolicy.testing.architectures.build import tiny_model as tiny_of
from kvpolicy.testing.models import tiny
from kvpolicy.testing.vision import prompt, tiny_model
from kvpolicy.types import Needs

IDS = torch.arange(3, 123)
LATENT = Case("text", "deepseek_v3", "DeepseekV3ForCausalLM")


def load(name: str, **settings: Any) -> Policy:
    return kvpolicy.load(name, **{"budget": 40, **settings})


def held(model: PreTrainedModel, policy: Policy, **inputs: Tensor) -> list[list[list[list[int]]]]:
    """Return the positions that a session keeps of a prompt: by layer, row and head."""
    cache: Any = DynamicCache(config=model.config)
    with torch.no_grad(), policy.on(model):
        model(**inputs, **{cache_name(model): cache})
    positions = [layer.padded()[2] for layer in evicting_layers(cache)]
    return [[[head[head >= 0].tolist() for head in row] for row in layer] for layer in positions]


@pytest.mark.parametrize("policy", ["ecokv-ada-kv", "pyramidkv", "ecokv-pre-rope", "mixkv-snapkv"])
@pytest.mark.parametrize("shape", ["llama-gqa", "gemma2", "qwen3"])
def test_a_plan_of_the_views_is_what_a_session_keeps(shape: str, policy: str) -> None:
    model, chosen = tiny(shape), load(policy)
    found = views(model, IDS, chosen.needs)
    assert chosen.plan(found).tolist() == held(model, chosen, input_ids=IDS[None])


def test_a_plan_of_the_views_of_a_padded_batch_is_what_a_session_keeps() -> None:
    model, chosen = tiny(), load("ecokv-ada-kv")
    mask = torch.ones(2, 60, dtype=torch.int64)
    mask[1, :13] = 0
    inputs = {"input_ids": IDS.view(2, 60), "attention_mask": mask}
    places = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    found = views(model, inputs, chosen.needs)
    assert found[0].valid.sum(-1).tolist() == [[60, 60], [47, 47]]
    assert chosen.plan(found).tolist() == held(model, chosen, **inputs, **places)


def test_views_hold_what_was_asked_for_and_no_more() -> None:
    plain, asked = (views(tiny(), IDS, needs)[0] for needs in (Needs(), Needs(queries=5, pre_rope=True, modality=True)))
    assert (plain.queries, plain.pre_rope_keys, plain.modality) == (None, None, None)
    assert asked.queries is not None and asked.queries.shape[2] == 5
    assert asked.pre_rope_keys is not None and asked.pre_rope_keys.shape == asked.keys.shape
    assert asked.modality is not None
    assert plain.slots == len(IDS)


def test_looking_changes_nothing() -> None:
    model = tiny()
    before = model.config._attn_implementation, set(ALL_ATTENTION_FUNCTIONS.valid_keys())
    want = model(IDS[None]).logits
    analyze(model, IDS, [load("snapkv")])
    assert (model.config._attn_implementation, set(ALL_ATTENTION_FUNCTIONS.valid_keys())) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(IDS[None]).logits, want)


@pytest.fixture(scope="module")
def policies() -> list[Policy]:
    return [load("ecokv-snapkv"), load("ecokv-ada-kv"), kvpolicy.load("full")]


def test_what_is_kept_adds_up(policies: list[Policy]) -> None:
    model = tiny()
    found = analyze(model, IDS, policies)
    assert [one.policy for one in found.kept] == ["ecokv-snapkv", "ecokv-ada-kv", "full"]
    for policy, one in zip(policies, found.kept, strict=True):
        if not policy.trivial:
            assert one.slots == [layer[0] for layer in held(model, policy, input_ids=IDS[None])]
        assert one.lengths == [[len(head) for head in layer] for layer in one.slots]
        assert sum(one.votes) == sum(map(sum, one.lengths))
        assert one.votes[60] == sum(60 in head for layer in one.slots for head in layer)
        # Two tokens a stretch, nearly: 64 of 120.
        assert [len(shares) for shares in one.positions] == [64] * 3
        assert one.positions[0][-1] == 1
    assert found.kept[0].lengths == [[40, 40]] * 3
    assert found.kept[1].lengths != [[40, 40]] * 3
    assert set(found.kept[2].votes) == {6}


def test_overlap_is_of_each_pair(policies: list[Policy]) -> None:
    found = analyze(tiny(), IDS, policies)
    assert [pair.policies for pair in found.overlap] == [
        ("ecokv-snapkv", "ecokv-ada-kv"),
        ("ecokv-snapkv", "full"),
        ("ecokv-ada-kv", "full"),
    ]
    assert found.overlap[1].jaccard == [40 / 120] * 3
    assert found.overlap[1].mean == pytest.approx(1 / 3)
    both = [set(found.kept[number].slots[0][0]) for number in (0, 1)]
    other = [set(found.kept[number].slots[0][1]) for number in (0, 1)]
    shared = len(both[0] & both[1]) + len(other[0] & other[1])
    assert found.overlap[0].jaccard[0] == shared / (len(both[0] | both[1]) + len(other[0] | other[1]))


def test_redundancy_is_the_weight_that_ecokv_uses() -> None:
    model, policy = tiny(), load("ecokv-snapkv")
    found = analyze(model, IDS, [policy])
    assert isinstance(policy.score, RedundancyAdaptive)
    keys = found.likeness[0]
    assert (keys.of, keys.slots) == ("keys", "all")
    for view, cosine, euclidean in zip(views(model, IDS, policy.needs), keys.cosine, keys.euclidean, strict=True):
        weight = policy.score.measure(policy.protect(view, torch.tensor([40])))[0]
        assert weight.tolist() == pytest.approx([(a + b) / 2 for a, b in zip(cosine, euclidean, strict=True)])


def test_likeness_is_of_three_kinds_of_vectors() -> None:
    model = tiny("qwen3")
    found = {one.of: one for one in analyze(model, IDS, [load("snapkv")]).likeness}
    assert list(found) == ["keys", "keys before RoPE", "values"]
    view = views(model, IDS, Needs(pre_rope=True))[1]
    decided = view.valid & (torch.arange(view.slots) >= 4) & (torch.arange(view.slots) < view.slots - 8)
    for name, vectors in (("keys", view.keys), ("keys before RoPE", view.pre_rope_keys), ("values", view.values)):
        assert vectors is not None
        assert found[name].cosine[1] == pytest.approx(cosine_redundancy(vectors, decided)[0].tolist())
        assert all(0 < share <= 1 for layer in found[name].anisotropy for share in layer)


def test_balance_is_of_all_slots_that_are_decided() -> None:
    found = analyze(tiny(), IDS, [load("snapkv")]).balance
    assert found.policy == "ecokv-snapkv"
    assert [len(layer) for layer in found.correlation] == [2] * 3
    assert all(-1 <= each <= 1 for layer in found.correlation for each in layer)
    density = torch.tensor(found.density)
    assert density.shape == (20, 20)
    # 108 slots a head: each part has 5 or 6 of them.
    assert density.sum(0).tolist() == pytest.approx([20] * 20, rel=0.12)
    assert density.sum() == pytest.approx(400)


@pytest.mark.parametrize("make", [lambda: tiny("gpt2"), lambda: tiny_of(LATENT)], ids=["no rotation", "a latent"])
def test_a_model_without_keys_before_rope_says_so(make: Callable[[], PreTrainedModel]) -> None:
    model, ids = make(), IDS[:100]
    if isinstance(model.config, DeepseekV3Config) and not views(model, ids)[0].shared:
        pytest.skip("this transformers caches what the latent expands to")
    found = analyze(model, ids, [load("snapkv")])
    assert [one.of for one in found.likeness] == ["keys", "values"]
    assert len(found.notes) == 1 and found.notes[0].startswith("no keys before RoPE: ")
    with pytest.raises(UnsupportedModelError, match=r"^policy 'ecokv-pre-rope' reads keys before RoPE: "):
        analyze(model, ids, [load("snapkv"), load("ecokv-pre-rope")])


def test_a_budget_that_holds_the_prompt_is_noted() -> None:
    found = analyze(tiny(), IDS, [load("snapkv", budget=120), kvpolicy.load("full")])
    assert found.notes == ["policy 'snapkv': its budget holds the whole prompt, nothing is evicted"]


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_a_picture_is_measured_apart(family: str) -> None:
    model = tiny_model(family)
    given = prompt(model, [[20, "image", 30, "image", 30]])
    inputs = {"input_ids": given.ids, "attention_mask": given.mask, **given.pictures}
    found = analyze(model, inputs, [load("ecokv-snapkv")])
    images = int((given.modality == 1).sum())
    assert found.modality is not None and found.modality.count("image") == images > 0
    assert found.modality.count("text") == 80
    assert [one.slots for one in found.likeness if one.of == "keys"] == ["all", "text", "image"]
    view = views(model, inputs, Needs(modality=True))[0]
    own = next(one for one in found.likeness if (one.of, one.slots) == ("values", "image"))
    mask = (given.modality == 1)[:, None].expand(view.valid.shape)
    assert own.cosine[0] == pytest.approx(cosine_redundancy(view.values, mask)[0].tolist())


def test_what_is_of_too_few_slots_is_left_out_and_said() -> None:
    model = tiny_model("llava")
    notes = []
    for words in (11, 10):  # 4 of them sinks, and behind the picture 8 recent ones
        given = prompt(model, [[words, "image", 8]])
        inputs = {"input_ids": given.ids, "attention_mask": given.mask, **given.pictures}
        found = analyze(model, inputs, [load("snapkv")])
        measured = [one.slots for one in found.likeness if one.of == "keys"]
        notes.append((measured, [note for note in found.notes if "slots" in note]))
    assert notes == [
        (["all", "image"], ["text: 7 slots are too few to say how alike they are; 8 would do"]),
        (["all", "image"], ["text: 6 slots are too few to say how alike they are; 8 would do"]),
    ]


def test_the_result_is_plain_data() -> None:
    model = tiny()
    found = analyze(model, IDS, [load("snapkv"), load("random")], tokens=[f"<{each}>" for each in IDS], name="tiny")
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert set(plain) == {
        *("model", "tokens", "layers", "likeness", "balance", "kept", "overlap", "modality", "notes"),
    }
    assert (plain["model"], plain["tokens"][:2], plain["layers"]) == ("tiny", ["<3>", "<4>"], [0, 1, 2])
    assert plain["kept"][0]["budget"] == {"tokens": 40, "layers": "uniform", "heads": "uniform"}
    assert plain["overlap"][0]["policies"] == ["snapkv", "random"]
    assert analyze(model, IDS, [load("snapkv")]).tokens[:2] == ["3", "4"]


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        (IDS.view(2, 60), {}, "inputs: expected one prompt without padding, got 2 rows"),
        ({"input_ids": IDS, "attention_mask": (IDS > 9).long()}, {}, "one prompt without padding, got padding"),
        (IDS[:19], {}, "expected a prompt of 20 tokens or more, got 19"),
        (IDS, {"tokens": ["one"]}, "tokens: expected the text of each of 120 tokens, got 1"),
        (IDS, {"policies": []}, "policies: expected one or more, each with a name of its own, got none"),
        (IDS, {"policies": [load("snapkv")] * 2}, "got 'snapkv' more than once"),
    ],
)
def test_what_cannot_be_analysed(given: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(AnalysisError) as caught:
        analyze(tiny(), given, **{"policies": [load("snapkv")], **settings})
    assert message in str(caught.value)


def test_the_shortest_prompt() -> None:
    assert analyze(tiny(), IDS[:20], [load("snapkv")]).kept[0].votes == [6] * 20


def test_inputs_that_are_none() -> None:
    with pytest.raises(ContextError, match="inputs: expected ids"):
        analyze(tiny(), "text", [load("snapkv")])


def test_a_model_that_no_policy_can_act_on() -> None:
    model = tiny("gemma2", layer_types=["sliding_attention"] * 3)
    with pytest.raises(UnsupportedModelError, match="no full-attention layer"):
        analyze(model, IDS, [load("snapkv")])
