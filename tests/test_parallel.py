"""More than one device: two ranks keep, generate and report what one process does; nothing assumes a device."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parallel_worker
import pytest
import torch
from parallel_worker import CASES, MODELS
from releases import installed
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV2Config, PreTrainedModel
from transformers.cache_utils import DynamicCache

import kvpolicy
from kvpolicy.budgets.uniform import UniformHeads
from kvpolicy.errors import PluginError, UnsupportedModelError
from kvpolicy.plugin import settings
from kvpolicy.policy import Budget, Policy
from kvpolicy.report import LayerRecord, Report
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.selectors.top_k import TopK
from kvpolicy.session.decoder import cache_name
from kvpolicy.session.parallel import HeadGroup
from kvpolicy.testing.models import tiny
from kvpolicy.types import LayerView, Selection

RANKS = 2


def build(name: str, **settings: Any) -> PreTrainedModel:
    if name != "deepseek":
        return tiny(name, torch.float64, **settings)
    config = DeepseekV2Config(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=2,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each case gave: in one process, then on each of two."""
    folder = tmp_path_factory.mktemp("parallel")
    models = {name: build(**settings) for name, settings in MODELS.items()}
    for name, model in models.items():
        model.save_pretrained(folder / name)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    done = subprocess.run(
        [*launch, parallel_worker.__file__, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if not installed(">=5.18"):
        assert "UnsupportedModelError: model: expected the tensor parallelism of transformers 5.18" in done.stderr
        pytest.skip("before transformers 5.18, no weight says which rank has which heads: refused")
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [torch.load(folder / f"rank-{rank}.pt") for rank in range(RANKS)]
    return {
        case: [parallel_worker.run(models[model], case), *(rank[case] for rank in ranks)]
        for case, (model, _, _) in CASES.items()
    }


def side_by_side(layers: list[Any]) -> list[Any]:
    """Return, of what each rank says of a layer's rows and heads, the heads of all ranks."""
    return [[head for part in row for head in part] for row in zip(*layers, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_do_what_one_process_does(found: dict[str, list[dict[str, Any]]], case: str) -> None:
    alone, *ranks = found[case]
    whole = CASES[case][0] in ("phi3", "deepseek")  # each rank caches all there is
    kept = [side_by_side(layers) for layers in zip(*(rank["positions"] for rank in ranks), strict=True)]
    for rank in ranks:
        assert torch.equal(rank["tokens"], alone["tokens"])
        torch.testing.assert_close(rank["logits"], alone["logits"], rtol=0, atol=1e-6)  # generate gives float32
        assert (rank["positions"] if whole else kept) == alone["positions"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_the_sum_over_ranks(found: dict[str, list[dict[str, Any]]], case: str) -> None:
    alone, *ranks = found[case]
    whole = CASES[case][0] in ("phi3", "deepseek")
    for rank in ranks:
        assert [one["kept"] for one in rank["report"]["layers"]] == [one["kept"] for one in alone["report"]["layers"]]
        for key in ("bytes", "bytes_full", "index_bytes", "query_bytes"):
            assert rank["report"][key] == sum(other["local"][key] for other in ranks)
        assert rank["report"]["bytes_full"] == alone["report"]["bytes_full"] * (RANKS if whole else 1)
        if not whole and case.startswith("snapkv"):
            assert rank["report"]["bytes"] == alone["report"]["bytes"]
    assert "rank 1 of 2 alone" in ranks[1]["printed"]
    assert "rank" not in alone["printed"]


@dataclass
class Room:
    """Where two threads meet that stand for two ranks."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(RANKS, timeout=30))
    said: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Thread(HeadGroup):
    """A rank that is a thread."""

    place: int = 0
    size: int = RANKS  # type: ignore[misc]

    @property
    def rank(self) -> int:
        return self.place

    def _all(self, value: Any) -> list[Any]:
        self.group.said[self.place] = value  # type: ignore[attr-defined]
        self.group.barrier.wait()  # type: ignore[attr-defined]
        everything = [self.group.said[rank] for rank in range(RANKS)]  # type: ignore[attr-defined]
        self.group.barrier.wait()  # type: ignore[attr-defined]
        return everything

    collect = _all


def a_view(heads: int = 4, slots: int = 12, **parts: Any) -> LayerView:
    keys = torch.randn(2, heads, slots, 8, generator=torch.Generator().manual_seed(1))
    # The norm of keys decides: later heads have the larger ones.
    keys *= torch.arange(1, heads + 1).view(-1, 1, 1)
    return LayerView(keys=keys, values=keys, **parts)


def part_of(view: LayerView, rank: int) -> LayerView:
    """Return the half of a view's heads that a rank has, without the slots that none of them holds."""
    heads = slice(rank * 2, rank * 2 + 2)
    first = int(view.valid[:, heads].any(1).any(0).int().argmax())
    cut = (slice(None), heads, slice(first, None))
    names = ("keys", "values", "valid", "positions", "candidates")
    return replace(view, **{name: getattr(view, name)[cut] for name in names})


def decide(policy: Policy, view: LayerView, peers: HeadGroup | None) -> Selection:
    tokens = torch.tensor([5, 5])
    view = policy.protect(view, tokens)
    return policy.choose(view, *policy.scores(view, peers=peers), tokens, peers=peers)


def on_two_ranks(policy: Policy, view: LayerView) -> list[Selection]:
    room, config = Room(), SimpleNamespace(num_attention_heads=8, num_key_value_heads=4)

    def run(rank: int) -> Selection:
        return decide(policy, part_of(view, rank), Thread(room, config, rank))

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


def by_norm(heads: str | dict[str, Any]) -> Policy:
    return kvpolicy.load("key-norm", budget={"tokens": 5, "heads": heads}, select={"sinks": 1, "recent": 1})


def test_heads_on_two_ranks_compete() -> None:
    policy, view = by_norm("adaptive"), a_view()
    parts = on_two_ranks(policy, view)
    whole = decide(policy, view, None)
    assert torch.cat([part.lengths for part in parts], dim=1).equal(whole.lengths)
    assert side_by_side([part.tolist() for part in parts]) == whole.tolist()
    alone = [decide(policy, part_of(view, rank), None) for rank in range(RANKS)]
    assert not torch.cat([part.lengths for part in alone], dim=1).equal(whole.lengths)


def test_ranks_that_hold_different_numbers_of_slots_compete() -> None:
    valid = torch.ones(2, 4, 12, dtype=torch.bool)
    valid[:, 2:, :4] = False  # the second rank's longest head has 8
    valid[:, 3, :6] = False
    policy, view = by_norm("adaptive"), a_view(valid=valid)
    parts = on_two_ranks(policy, view)
    whole = decide(policy, view, None)
    assert torch.cat([part.lengths for part in parts], dim=1).equal(whole.lengths)


def test_heads_that_are_derived_keep_the_same_on_every_rank() -> None:
    policy, view = by_norm("uniform"), a_view(shared=True)
    parts = on_two_ranks(policy, view)
    whole = decide(policy, view, None)
    assert side_by_side([part.tolist() for part in parts]) == whole.tolist()
    alone = [decide(policy, part_of(view, rank), None).tolist() for rank in range(RANKS)]
    assert side_by_side(alone) != whole.tolist()


def test_scores_normalised_over_a_layer_are_over_the_heads_of_all_ranks() -> None:
    valid = torch.ones(2, 4, 12, dtype=torch.bool)
    valid[:, 2:, :4] = False
    values = torch.randn(2, 4, 12, 8, generator=torch.Generator().manual_seed(2))
    values[:, 0, 5] *= 50  # next to which no value of the other rank counts
    view = replace(a_view(valid=valid), values=values)
    score = {"type": "fixed", "inputs": ["key-norm", "value-norm"], "over": "layer"}
    policy = kvpolicy.load("key-norm", score=score, budget=5, select={"sinks": 1, "recent": 1})
    whole = [row[:2] + [[slot - 4 for slot in head] for head in row[2:]] for row in decide(policy, view, None).tolist()]
    assert side_by_side([part.tolist() for part in on_two_ranks(policy, view)]) == whole
    alone = [decide(policy, part_of(view, rank), None).tolist() for rank in range(RANKS)]
    assert side_by_side(alone) != whole


def test_a_scorer_that_compares_heads_is_refused_where_they_are_on_several_ranks() -> None:
    policy = kvpolicy.load("tova", budget=5)
    view = replace(a_view(), queries=torch.ones(2, 8, 1, 8), query_positions=torch.full((2, 1), 11))
    assert decide(policy, view, None).lengths.tolist() == [[5] * 4] * 2
    with pytest.raises(UnsupportedModelError, match=r"scorer 'tova' .* compares the heads of a layer, which are on"):
        decide(policy, view, Thread(Room(), SimpleNamespace(), 0))


def test_heads_that_do_not_compete_need_no_other_rank() -> None:
    peers = Thread(Room(threading.Barrier(RANKS, timeout=0.01)), SimpleNamespace(), 0)
    view = a_view(2)
    assert decide(by_norm("uniform"), view, peers).tolist() == decide(by_norm("uniform"), view, None).tolist()
    with pytest.raises(threading.BrokenBarrierError):
        decide(by_norm("adaptive"), view, peers)


@settings
class ByKeys:
    """A head budget that reads keys."""

    name = "by-keys"
    stage = "heads"
    source = "these tests"
    formula = "K"

    def __call__(self, view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
        return UniformHeads()(view, view.keys.sum(-1), tokens)


def test_a_head_budget_sees_what_is_gathered_and_no_more() -> None:
    budget = Budget(tokens=5, heads=ByKeys())
    policy = Policy(name="mine", score=KeyNorm(), budget=budget, select=TopK(sinks=1, recent=1))
    with pytest.raises(PluginError, match=r"reads 'keys' of a layer whose heads are on several ranks"):
        on_two_ranks(policy, a_view())


@pytest.mark.parametrize(
    ("heads", "shared", "apart"), [(4, False, False), (2, False, True), (8, True, False), (4, True, True)]
)
def test_what_a_rank_holds_says_whether_heads_are_shared_out(heads: int, shared: bool, apart: bool) -> None:
    peers = Thread(Room(), SimpleNamespace(num_attention_heads=8, num_key_value_heads=4), 0)
    assert (peers.of(a_view(heads, shared=shared)) is peers) == apart


def test_heads_that_fit_no_config_are_refused() -> None:
    peers = Thread(Room(), SimpleNamespace(num_attention_heads=8, num_key_value_heads=4), 0)
    with pytest.raises(UnsupportedModelError, match=r"layer 0: expected 4 heads, or an equal part .* got 3"):
        peers.of(a_view(3))


def test_a_report_without_other_ranks_is_whole() -> None:
    report = Report("snapkv")
    assert report.over_ranks() is report


@pytest.mark.parametrize(("derived", "kept"), [(False, [[3, 3]]), (True, [[3]])])
def test_a_report_joins_heads_that_are_not_the_same_on_every_rank(derived: bool, kept: list[list[int]]) -> None:
    room, config = Room(), SimpleNamespace(num_attention_heads=2, num_key_value_heads=2)

    def run(rank: int) -> Report:
        layers = {7: LayerRecord(7, 10, [[3]], 100 + rank, 10, 1000, 7, derived=derived)}
        return Report("mine", layers, peers=Thread(room, config, rank)).over_ranks()

    with ThreadPoolExecutor(RANKS) as pool:
        for report in pool.map(run, range(RANKS)):
            assert report.layers == {7: LayerRecord(7, 10, kept, 201, 20, 2000, 14, derived=derived)}
            assert (report.bytes, report.bytes_full, report.over_ranks()) == (201, 2000, report)


@pytest.fixture
def nowhere() -> Iterator[None]:
    """Tensors that are made without a device have no data: whoever mixes one with the model's fails."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def answer(model: PreTrainedModel, policy: Policy, *, padded: bool) -> Tensor:
    """Return new tokens."""
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(1, 128, (2, 60), generator=generator, device="cpu")
    mask = torch.ones_like(ids)
    mask[1, : 21 * padded] = 0
    with policy.on(model):
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
        )


EVERY_KIND = ["snapkv", "ada-kv", "pyramidkv", "ecokv-ada-kv", "ecokv-pre-rope", "streaming-llm", "key-diff", "random"]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", EVERY_KIND)
def test_every_tensor_is_where_the_keys_are(
    name: str, padded: bool, implementation: str, request: pytest.FixtureRequest
) -> None:
    model = tiny()
    model.set_attn_implementation(implementation)
    policy = kvpolicy.load(name, budget=16, select={"sinks": 2, "recent": 4}, decode={"every": 4})
    want = answer(model, policy, padded=padded)
    request.getfixturevalue("nowhere")
    assert torch.equal(answer(model, policy, padded=padded), want)


def test_rows_are_repeated_where_the_keys_are(nowhere: None) -> None:
    model, cache = tiny_on_cpu(), DynamicCache()
    with kvpolicy.load("ada-kv", budget=16, select={"sinks": 2, "recent": 4}).on(model) as run, torch.no_grad():
        model(torch.arange(1, 61, device="cpu").view(2, 30), **{cache_name(model): cache})
        cache.batch_repeat_interleave(2)
        first, second = run.report.layers[0].kept[::2]
        assert run.report.layers[0].kept == [first, first, second, second]


def tiny_on_cpu() -> PreTrainedModel:
    with torch.device("cpu"):
        return tiny()


PLACES = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
LAYERS = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}


@pytest.mark.parametrize("name", ["snapkv", "ada-kv", "ecokv-ada-kv"])
def test_a_model_whose_weights_come_from_several_places(tmp_path: Path, name: str) -> None:
    model = tiny()
    model.save_pretrained(tmp_path / "model")
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=PLACES | LAYERS, offload_folder=tmp_path / "offloaded"
    )
    policy = kvpolicy.load(name, budget=16, select={"sinks": 2, "recent": 4}, decode={"every": 4})
    assert spread.model.layers[1].self_attn.k_proj.weight.device.type == "meta"
    assert torch.equal(answer(spread, policy, padded=True), answer(model, policy, padded=True))
