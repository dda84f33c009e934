"""`kvpolicy plan`: what is predicted from a config alone is what a run of the model measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typer.testing import CliRunner

import kvpolicy
from kvpolicy.analysis import probe as module
from kvpolicy.analysis.devices import DEVICES, Device, PlanError, find_device
from kvpolicy.analysis.footprint import STORES, footprints, full_footprint, kept_footprint
from kvpolicy.analysis.probe import require_meta
from kvpolicy.analysis.shape import ModelShape, model_shape, read_config
from kvpolicy.cli import app
from kvpolicy.errors import MissingModelError, UnsupportedModelError, UnsupportedVersionError
from kvpolicy.session.decoder import cache_name
from kvpolicy.store.settings import Offloaded, Plain
from kvpolicy.testing.architectures.build import Case, cases, tiny_model

try:
    require_meta()
except UnsupportedVersionError as error:
    pytest.skip(str(error), allow_module_level=True)

CONTEXT, BUDGET = 200, 64
ARCHITECTURES = [
    "llama",  # full, grouped queries
    "gpt2",  # full, a head a query head, absolute positions
    "gemma2",  # sliding and full
    "gpt_oss",  # sliding and full, experts
    "mixtral",  # experts
    "deepseek_v3",  # a latent, experts
    "qwen3_next",  # recurrent and full
    "falcon_h1",  # recurrent states beside keys in one layer
    "kimi_linear",  # recurrent and latent
    "nemotron_h",  # layers without a cache
    "gemma3n_text",  # layers that share keys
    "gemma3",  # a vision tower
    "llava",  # likewise
]
POLICIES: list[dict[str, Any]] = [
    {"store": "plain"},
    {"store": "offloaded"},
    {"store": {"type": "quantized", "bits": 4}},
    {"store": {"type": "quantized", "bits": 8}, "budget": {"layers": "pyramid"}},
    {"store": "plain", "budget": {"heads": "adaptive"}},
    {"store": {"type": "quantized", "bits": 8}, "budget": {"heads": "adaptive"}},
]


def case_of(model_type: str) -> Case:
    return next(case for case in cases() if case.model_type == model_type)


def policy_of(settings: dict[str, Any]) -> kvpolicy.Policy:
    budget = {"tokens": BUDGET, **settings.get("budget", {})}
    return kvpolicy.load({"extends": "snapkv-w8", **settings, "budget": budget})


def read(model: PreTrainedModel, cache: Any, ids: Tensor) -> None:
    with torch.no_grad():
        model(input_ids=ids, **{cache_name(model): cache}, use_cache=True)


def held(layer: Any) -> int:
    """Return the bytes of every storage that one of transformers' own cache layers holds."""
    values = [part for part in vars(layer).values() if isinstance(part, Tensor) and part.ndim]
    values += [part for inner in vars(layer).values() if isinstance(inner, dict) for part in inner.values()]
    return sum(part.untyped_storage().nbytes() for part in values if isinstance(part, Tensor))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_predicted_bytes_are_those_measured(model_type: str) -> None:
    model: Any = tiny_model(case_of(model_type))
    shape = model_shape(model.config, dtype=torch.float32)
    assert shape.name == type(model).__name__
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    decoder = model.config.get_text_config(decoder=True)
    ids = torch.randint(64, 128, (1, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    for settings in POLICIES:
        policy = policy_of(settings)
        cache = DynamicCache(config=decoder)
        with policy.on(model) as run:
            read(model, cache, ids[:, :CONTEXT])
            report = run.report.to_dict()
            # Only the next token frees what a sliding layer no longer needs.
            read(model, cache, ids[:, CONTEXT:])
        planned = kept_footprint(shape, policy, CONTEXT)
        # How short the first group of each head is, is not known where heads differ.
        ragged = "budget" in settings and settings["budget"].get("heads") and settings["store"] != "plain"
        slack = 0.05 if ragged else 0
        reached = [layer for layer in report["layers"] if layer["seen"]]
        assert reached
        for layer in reached:
            ours = planned.layers[layer["layer"]]
            assert ours.bytes == pytest.approx(layer["bytes"], rel=slack, abs=0), settings
            assert ours.slots == pytest.approx(sum(layer["kept"][0]) / len(layer["kept"][0])), settings
            assert ours.offloaded == (settings["store"] == "offloaded")
            states = [state for state in vars(cache.layers[layer["layer"]]).values() if isinstance(state, dict)]
            measured = sum(one.nbytes for state in states for one in state.values() if isinstance(one, Tensor))
            assert ours.state_bytes == measured
        index = sum(planned.layers[layer["layer"]].index_bytes for layer in reached)
        assert index == pytest.approx(report["index_bytes"], rel=slack, abs=0), settings
        assert sum(planned.layers[layer["layer"]].bytes for layer in reached) <= report["bytes"]
        assert (
            sum(full_footprint(shape, CONTEXT).layers[layer["layer"]].bytes for layer in reached)
            == (report["bytes_full"])
        )
        for left in report["left_alone"]:
            assert planned.layers[left].device == held(cache.layers[left]), (left, shape.layers[left].kind)


def test_parameters_of_a_large_model_are_counted_without_weights() -> None:
    config = AutoConfig.for_model(
        "llama",
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    shape = model_shape(config)
    # Llama 3 70B, as it is published: 70.6 B. Of the embedding a token reads one row.
    assert shape.parameters == 70_553_706_496
    assert shape.bytes - shape.read == 2 * 8192 * (128256 - 1)
    # 80 layers, 8 KV heads, keys and values of 128, 2 bytes: 327,680 a token.
    assert full_footprint(shape, 1000).total == 327_680_000


def test_a_token_reads_the_experts_it_chooses() -> None:
    config = AutoConfig.for_model("mixtral", num_hidden_layers=2, vocab_size=1000)
    one, two, many = (model_shape(config, batch=batch) for batch in (1, 2, 64))
    # Three matrices an expert; two of eight chosen, in each of two layers.
    expert = 2 * 3 * config.hidden_size * config.intermediate_size
    row = 2 * config.hidden_size
    assert one.bytes - one.read == 2 * 6 * expert + (1000 - 1) * row
    assert two.read - one.read == 2 * 2 * expert + row
    assert many.bytes - many.read == (1000 - 64) * row


def test_tied_embeddings_are_counted_and_read_once() -> None:
    config = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=500)
    config.tie_word_embeddings = True
    tied = model_shape(config)
    config.tie_word_embeddings = False
    assert model_shape(config).parameters - tied.parameters == 500 * 64
    assert tied.read == tied.bytes


def test_nothing_is_left_behind() -> None:
    config = small()
    before = str(config.to_dict())
    model_shape(config)
    assert str(config.to_dict()) == before
    assert not [name for name in ALL_ATTENTION_FUNCTIONS if name.startswith("kvpolicy_")]


def test_a_transformers_whose_models_do_not_run_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(device_type: str, enabled: bool) -> None:
        raise RuntimeError("unknown device type")

    monkeypatch.setattr(module, "maybe_autocast", old)
    with pytest.raises(UnsupportedVersionError, match="expected a release whose models run on the meta device"):
        model_shape(small())


def small(**settings: Any) -> PreTrainedConfig:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    return AutoConfig.for_model("llama", **(sizes | {"vocab_size": 500, "intermediate_size": 128} | settings))


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return model_shape(small())


def test_layers_share_the_budget_as_the_policy_says(shape: ModelShape) -> None:
    uniform = kept_footprint(shape, policy_of({}), 1000)
    pyramid = kept_footprint(shape, policy_of({"budget": {"layers": "pyramid"}}), 1000)
    assert [layer.slots for layer in uniform.layers] == [64] * 4
    assert [layer.slots for layer in pyramid.layers] == kvpolicy.load("pyramidkv", budget=64).layer_slots(
        torch.tensor([1000]), 4
    )[0].tolist()
    assert len({layer.slots for layer in pyramid.layers}) == 4
    assert uniform.total == pyramid.total


def test_each_store_once_and_the_own_one_first(shape: ModelShape) -> None:
    found = footprints(shape, policy_of({"store": "offloaded"}), 1000)
    assert [one.store for one in found] == [None, Offloaded(), *STORES[:3]]
    full, offloaded, plain, eight, four = (one.total for one in found)
    assert full > plain == offloaded > eight > four


def test_what_fits_and_how_fast(shape: ModelShape) -> None:
    full, offloaded, plain, eight, _ = footprints(shape, policy_of({"store": "offloaded"}), 1000)
    device = Device("", memory=shape.bytes + 10 * plain.total + 1, bandwidth=1e9, link=1e6)
    assert plain.sequences(shape, device) == 10
    assert full.sequences(shape, device) == 10 * plain.total // full.total
    # One layer of four is on the device while it attends.
    assert (offloaded.device, offloaded.host) == (0, plain.total)
    assert offloaded.sequences(shape, device) == 40
    assert eight.sequences(shape, device) == 10 * plain.total // (eight.total + plain.total // 4)
    assert plain.seconds(shape, device, batch=3) == pytest.approx((shape.read + 3 * plain.total) / 1e9)
    assert offloaded.seconds(shape, device, batch=3) == pytest.approx(
        (shape.read + 3 * plain.total) / 1e9 + 3 * plain.total / 1e6
    )
    assert plain.seconds(shape, Device("", memory=1), batch=1) is None
    assert offloaded.seconds(shape, Device("", memory=1, bandwidth=1e9), batch=1) is None
    assert plain.sequences(shape, Device("", memory=1)) == 0


def test_a_policy_that_keeps_all_holds_what_a_full_cache_does(shape: ModelShape) -> None:
    full, kept, *_ = footprints(shape, kvpolicy.load("full"), 1000)
    assert kept.store == Plain()
    assert kept.layers == full.layers


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("bloom", "layer 0 does not attend through transformers' attention interface"),
        ("deepseek_v32", "it has no full-attention layer to evict from"),
        ("mamba", "it has no full-attention layer to evict from"),
        ("t5", "got T5Config"),
    ],
)
def test_a_model_no_policy_can_act_on_is_refused(model_type: str, said: str) -> None:
    if model_type == "t5":
        config: PreTrainedConfig = AutoConfig.for_model("t5")
    else:
        config = tiny_model(case_of(model_type)).config
    with pytest.raises(UnsupportedModelError, match=said):
        kept_footprint(model_shape(config), policy_of({}), 100)


def test_gpus_by_name_and_by_size() -> None:
    assert find_device(" H100 ") is DEVICES["h100"]
    assert (find_device("24gb").memory, find_device("1.5 GiB").memory) == (24 * 10**9, 3 * 2**29)
    assert find_device("24GB").bandwidth is None
    for wrong in ("h10", "24", "0GB", "-4GB", ""):
        with pytest.raises(PlanError, match=f"got '{wrong}'"):
            find_device(wrong)


def test_context_of_nothing() -> None:
    with pytest.raises(PlanError, match="context: expected at least 1 token, got 0"):
        full_footprint(ModelShape("", torch.float32, 0, 0, 0, ()), 0)


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small().save_pretrained(tmp_path)
    return tmp_path


def test_the_command_prints_what_the_functions_return(folder: Path, shape: ModelShape) -> None:
    asked = ("--budget", "0.25", "--context", "1000", "--gpu", "24GB", "--bandwidth", "500", "--batch", "2")
    code, out, _ = call("--model", str(folder), "--policy", "pyramidkv", *asked, "--json")
    assert code == 0
    found = json.loads(out)
    device = Device("24GB", 24 * 10**9, 5e11)
    expected = footprints(shape, kvpolicy.load("pyramidkv", budget=0.25), 1000)
    assert [one["device_bytes"] for one in found["caches"]] == [one.device for one in expected]
    assert [one["sequences"] for one in found["caches"]] == [one.sequences(shape, device) for one in expected]
    assert found["caches"][1]["seconds"] == expected[1].seconds(model_shape(small(), batch=2), device, 2)
    assert found["caches"][-1]["seconds"] is None
    assert [one["slots"] for one in found["layers"]] == [layer.slots for layer in expected[1].layers]
    assert found["notes"] == []
    code, table, _ = call("--model", str(folder / "config.json"), "--policy", "pyramidkv", *asked)
    assert code == 0
    for one in found["caches"]:
        assert f"{one['device_bytes']:,}" in table


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--budget", "512", "--context", "100"), "the budget holds the whole context: nothing is evicted"),
        (
            ("--policy", "cake", "--budget", "64", "--context", "100"),
            "what 'cake' gives each layer depends on the text",
        ),
        (("--budget", "512", "--context", "4000"), "made for 2,048 positions, fewer than the context has"),
        (("--budget", "32", "--gpu", "0.0001GB"), "are more than 0.0001GB holds"),
    ],
)
def test_notes_say_what_a_reader_would_not_expect(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    code, out, _ = call("--model", str(folder), *arguments)
    assert code == 0
    assert said in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "no/where"), "cannot read the config of 'no/where'"),
        (("--gpu", "h1000"), "expected a size, such as 24GB, or a name, got 'h1000'. Did you mean 'h100'"),
        (("--bandwidth", "100"), "--bandwidth: expected --gpu with it, got none"),
        (("--budget", "3"), "--budget: policy 'ecokv-snapkv': budget.tokens: expected at least the 12 slots"),
        (("--budget", "half"), "--budget: expected whole slots (512) or a share (0.25), got 'half'"),
        (("--policy", "snapkw"), "Did you mean 'snapkv'"),
        (("--context", "0"), "--context"),
        (("--batch", "0"), "--batch"),
    ],
)
def test_wrong_input_ends_with_one_message(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    asked = arguments if "--model" in arguments else ("--model", str(folder), *arguments)
    code, out, err = call(*asked)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_a_config_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MissingModelError, match=r"Expected a folder that holds a config\.json"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(MissingModelError, match="cannot read the config"):
        read_config(str(tmp_path))


@pytest.mark.model
def test_the_default_model() -> None:
    shape = model_shape(read_config())
    assert (shape.parameters, len(shape.layers)) == (134_515_008, 30)
