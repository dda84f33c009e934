"""Budgets that go by what all layers hold: each as a slow twin, and the layers cut one by one as if all were known."""

from __future__ import annotations

import copy
import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from releases import installed
from test_zoo_attention import assert_same, last, logits
from torch import Tensor
from transformers.cache_utils import DynamicCache
from twins import blank, heads, slots
from views import make_view

import kvpolicy
from kvpolicy.bench.traces import holding
from kvpolicy.budgets.cake import CakeLayers
from kvpolicy.budgets.dynamic_kv import DynamicKVLayers
from kvpolicy.budgets.proportion import proportions, whole_slots
from kvpolicy.budgets.squeeze import SqueezeLayers, highest_cluster
from kvpolicy.errors import PluginError, UnsupportedModelError
from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.cake import Cake
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.selectors.top_k import TopK
from kvpolicy.testing import oracle
from kvpolicy.testing.architectures.build import Case
from kvpolicy.testing.architectures.build import tiny_model as latent
from kvpolicy.testing.models import tiny
from kvpolicy.types import LayerView, Needs

ONE_BY_ONE = ("cake", "dynamic-kv")
NAMES = (*ONE_BY_ONE, "squeeze")
PROMPT, BUDGET, LAYERS = 96, 48, 6


def spread(window: Tensor) -> Tensor:
    """The unbiased variance over queries, ``[n]`` of ``[W, n]``; 0 of one query."""
    return window.var(0) if len(window) > 1 and window.numel() else torch.zeros_like(window[0])


def cake(view: LayerView, window: int, kernel: int, gamma: float) -> Tensor:
    scores, view = blank(view), last(view, window)
    for b, h in heads(view):
        own, pools = view.valid[b, h], []
        for g in range(view.group):
            found = logits(view, b, h, g).softmax(-1)
            indicator = (found.mean(0) + gamma * spread(found)).where(view.candidates[b, h, own], 0.0).tolist()
            ends = [0.0] * (kernel // 2)
            padded = [*ends, *indicator, *ends]
            pools.append([math.fsum(padded[t : t + kernel]) / kernel for t in range(len(indicator))])
        scores[b, h, own] = torch.tensor(pools, dtype=torch.float64).mean(0)
    return scores


def preference(view: LayerView, row: int, own: CakeLayers) -> float:
    """CAKE's, of one layer and row: over all query heads and what is not protected, before the window if it can be."""
    view, entropy, shift = last(view, own.window), [], []
    begins = min(place for place in view.query_positions[row].tolist() if place >= 0)
    for h, g in itertools.product(range(view.kv_heads), range(view.group)):
        before = [t for t in slots(view.candidates[row, h]) if int(view.positions[row, h, t]) < begins]
        counted = view.candidates[row, h].clone()
        if len(before) >= own.window:
            counted = torch.zeros_like(counted).index_fill(0, torch.tensor(before), True)
        counted = counted[view.valid[row, h]]
        found = logits(view, row, h, g).softmax(-1)[:, counted]
        entropy += [-a * math.log(a + 1e-10) for a in found.flatten().tolist()]
        shift += spread(found).tolist()
    return math.fsum(entropy) ** (1 / own.tau1) * math.fsum(shift) ** (1 / own.tau2)


def shared(weights: list[Fraction], total: int, most: int) -> list[int]:
    """The heaviest layer first takes its part of what is left, or its most; what rounding leaves, the first ones."""
    parts, left, rest = [Fraction(0)] * len(weights), Fraction(total), sum(weights)
    for done, layer in enumerate(sorted(range(len(weights)), key=lambda layer: -weights[layer])):
        alike = left / (len(weights) - done)
        parts[layer] = min(Fraction(most), left * weights[layer] / rest if rest else alike)
        left, rest = left - parts[layer], rest - weights[layer]
    whole = [math.floor(part) for part in parts]
    for layer in range(len(weights)):
        whole[layer] += whole[layer] < most and sum(whole) < total
    return whole


def cake_layers(own: CakeLayers, views: list[LayerView], scores: list[Tensor], row: int, mean: int) -> list[int]:
    kept = int((views[0].valid & ~views[0].candidates)[row].sum(-1).max())
    seen = int(views[0].seen[row])
    weights = [Fraction(preference(view, row, own)) for view in views]
    return [kept + part for part in shared(weights, len(views) * (mean - kept), seen - kept)]


def dynamic_kv_layers(
    own: DynamicKVLayers, views: list[LayerView], scores: list[Tensor], row: int, mean: int
) -> list[int]:
    kept = int((views[0].valid & ~views[0].candidates)[row].sum(-1).max())
    most = min(int(views[0].seen[row]), math.ceil(Fraction(str(own.most)) * mean)) - kept
    every = []
    for depth, (view, scored) in enumerate(zip(views, scores, strict=True)):
        for h in range(view.kv_heads):
            own_best = sorted(-float(scored[row, h, t]) for t in slots(view.candidates[row, h]))[:most]
            every += [(score, depth, h) for score in own_best]
    total = len(views) * (mean - kept)
    best = [depth for _, depth, _ in sorted(every)[: total * views[0].kv_heads]]
    return [kept + part for part in shared([Fraction(best.count(d)) for d in range(len(views))], total, most)]


def squares(values: list[Fraction]) -> Fraction:
    mean = sum(values) / Fraction(len(values))
    return sum(((value - mean) ** 2 for value in values), Fraction(0))


def most_alike(values: list[Fraction], groups: int) -> set[int]:
    """The layers of G3: every way to cut them, the least sum of squares, then the fewest layers."""
    ordered = sorted(values)
    rises = [place for place in range(1, len(ordered)) if ordered[place] > ordered[place - 1]]
    found = []
    for cuts in itertools.combinations(rises, groups - 1):
        parts = [ordered[begin:end] for begin, end in itertools.pairwise((0, *cuts, len(ordered)))]
        found.append((sum(map(squares, parts)), len(parts[-1]), parts[-1][0]))
    return {layer for layer, value in enumerate(values) if found and value >= min(found)[2]}


def squeeze_layers(own: SqueezeLayers, views: list[LayerView], scores: list[Tensor], row: int, mean: int) -> list[int]:
    """G3 keeps ``p b``, the others what is left, slot by slot in turn as far as there are any."""
    least = int((views[0].valid & ~views[0].candidates)[row].sum(-1).max())
    seen, left = int(views[0].seen[row]), len(views) * mean
    squeezed = most_alike([Fraction(float(view.similarity[row])) for view in views], own.groups)
    kept = [0] * len(views)
    for layer in squeezed:
        kept[layer] = max(math.floor(Fraction(str(own.p)) * mean), least)
    left -= sum(kept)
    for turn in (set(range(len(views))) - squeezed, squeezed):
        while left and any(kept[layer] < seen for layer in turn):
            for layer in sorted(turn):
                more = int(left > 0 and kept[layer] < seen)
                kept[layer], left = kept[layer] + more, left - more
    return kept


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("shape", [(6, 2), (3, 3)], ids=["gqa", "mha"])
@pytest.mark.parametrize("window", [1, 8])
def test_cakes_indicator_keeps_what_its_twin_keeps(window: int, shape: tuple[int, int], padding: str) -> None:
    view = make_view(batch=2, heads=shape, slots=61, window=61, padding=padding, sinks=2, recent=8)
    scorer = Cake(window=window, kernel=5, gamma=200)
    policy = Policy(name="test", score=scorer, budget=Budget(tokens=16), select=TopK(sinks=0, recent=0))
    scores = policy.scores(view)[0]
    want = cake(view, window, 5, 200)
    for b, h in heads(view):
        chosen = view.candidates[b, h]
        kept = scores[b, h].where(chosen, -torch.inf).topk(16).indices.sort().values.tolist()
        assert_same(kept, want[b, h].where(chosen, math.nan))


def test_proportions_are_those_of_the_heaviest_first() -> None:
    generator = torch.Generator().manual_seed(0)
    for layers, most, share in itertools.product((1, 2, 5, 30), (1, 7, 100), (0.0, 0.3, 1.0)):
        total = round(share * layers * most)
        weights = torch.randn(8, layers, generator=generator, dtype=torch.float64).exp() ** 3
        weights[0, 0] = 0
        limit, sums = torch.full((8,), most), torch.full((8,), total)
        got = whole_slots(proportions(sums, weights, limit), sums, limit).tolist()
        assert got == [shared([Fraction(each) for each in row], total, most) for row in weights.tolist()]


def views_of(padding: str, seeds: range = range(LAYERS)) -> list[LayerView]:
    return [make_view(seed, batch=2, slots=PROMPT, window=PROMPT, padding=padding) for seed in seeds]


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("mean", [40, 60, 90])
@pytest.mark.parametrize("recent", [32, 2])
@pytest.mark.parametrize("name", NAMES)
def test_shares_are_those_of_a_twin(name: str, recent: int, mean: int, padding: str) -> None:
    policy = kvpolicy.load({"extends": name, "name": "twin", "select": {"recent": recent}}, budget=mean)
    views = views_of(padding)
    got = [selection.lengths[:, 0] for selection in policy.plan(views)]
    tokens = torch.full((2,), mean)
    views = [policy.protect(view, tokens) for view in views]
    scores = [policy.scores(view)[0] for view in views]
    twin: Any = {"cake": cake_layers, "dynamic-kv": dynamic_kv_layers, "squeeze": squeeze_layers}[name]
    for row, seen in enumerate(views[0].seen.tolist()):
        want = twin(policy.budget.layers, views, scores, row, min(mean, seen))
        assert [int(layer[row]) for layer in got] == want
        assert sum(want) == LAYERS * min(mean, seen)
    assert len({int(layer[0]) for layer in got}) > 1


def deep(**settings: Any) -> Any:
    return tiny(num_hidden_layers=LAYERS, **settings)


def ids(batch: int = 1, length: int = PROMPT, seed: int = 0) -> Tensor:
    return torch.randint(1, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("heads_", ["uniform", {"type": "adaptive", "floor": 0.2}], ids=["dense", "ragged"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_layers_cut_one_by_one_keep_what_is_kept_with_all_in_view(name: str, padding: str, heads_: Any) -> None:
    """Of two rows and six layers, with as few slots as make most layers give some up again."""
    model, prompt = deep(dtype=torch.float64), ids(2)
    mask = torch.ones_like(prompt)
    if padding == "left":
        mask[0, :20] = 0
    policy = kvpolicy.load(name, budget={"tokens": BUDGET, "heads": heads_})
    want = oracle.plan(policy, model, prompt, mask)
    cache = DynamicCache(config=model.config)
    with policy.on(model) as run:
        oracle.forward(model, prompt, cache, mask)
    assert [layer.held for layer in cache.layers] == want.tolist()
    assert len({str(layer.kept) for layer in run.report.layers.values()}) > 1


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_each_layer_is_cut_more_than_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing above would be seen of it; and never do the layers hold more than the budget and one layer."""
    model, policy = deep(), kvpolicy.load(name, budget=BUDGET)
    cache, cuts = DynamicCache(config=model.config), []
    evict = kvpolicy.store.layer.EvictingLayer.evict

    def counted(layer: Any, *given: Any) -> None:
        evict(layer, *given)
        held = [sum(one.kept[0]) for one in cache.layers if getattr(one, "store", None) is not None]
        cuts.append((layer.index, sum(held) - max(held)))

    monkeypatch.setattr("kvpolicy.store.layer.EvictingLayer.evict", counted)
    with policy.on(model):
        oracle.forward(model, ids(), cache, None)
    count = [index for index, _ in cuts]
    assert count.count(0) > 2 and set(count) == set(range(LAYERS))
    budget = 2 * BUDGET * LAYERS
    assert max(held for _, held in cuts) <= budget * 9 / 8 + 2 * LAYERS


@pytest.mark.parametrize("name", NAMES)
def test_decoding_goes_on_with_the_shares_of_the_prompt(name: str, tmp_path: Path) -> None:
    model = deep(dtype=torch.float64)
    policy = kvpolicy.load(name, budget=BUDGET, decode={"every": 4})
    context = policy.compress(model, ids())
    after = [layer.kept[0][0] for layer in context.report.layers.values()]
    assert sum(after) == LAYERS * BUDGET and len(set(after)) > 1
    context.save(tmp_path / "context")
    found = []
    for one in (context, kvpolicy.load_context(tmp_path / "context", model)):
        with one.fork() as fork:
            found.append(fork.generate(ids(length=3, seed=1), max_new_tokens=9, min_new_tokens=9, do_sample=False))
            # Eleven tokens read, the last eviction after eight of them.
            assert [layer.kept[0][0] for layer in fork.report.layers.values()] == [count + 3 for count in after]
    assert found[0].tolist() == found[1].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_rows_keep_their_own_shares_in_another_order(name: str) -> None:
    model, policy = deep(dtype=torch.float64), kvpolicy.load(name, budget=BUDGET, decode={"every": 2})
    prompt = ids(2)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with policy.on(model):
        for cache, order in zip(caches, ([0, 1], [1, 0]), strict=True):
            oracle.forward(model, prompt[order], cache, None)
        caches[0].reorder_cache(torch.tensor([1, 0]))
        copied = copy.deepcopy(caches[0])
        for cache in (*caches, copied):
            for token in ids(1, 4, seed=2).expand(2, -1).split(1, dim=1):
                oracle.forward(model, token, cache, None)
    first, second, third = ([layer.held for layer in cache.layers] for cache in (*caches, copied))
    assert first == second == third


@pytest.mark.parametrize("name", NAMES)
def test_what_waits_is_stored_as_declared_only_once_it_stays(name: str) -> None:
    """Each cut of a quantized store would round what the one before rounded."""
    model = deep()
    store = {"type": "quantized", "bits": 4, "group": 8, "residual": 0}
    plain, quantized = (kvpolicy.load(name, budget=BUDGET, store=one) for one in ("plain", store))
    kept = [DynamicCache(config=model.config) for _ in range(2)]
    for policy, cache in zip((plain, quantized), kept, strict=True):
        with policy.on(model):
            oracle.forward(model, ids(), cache, None)
    assert [layer.held for layer in kept[0].layers] == [layer.held for layer in kept[1].layers]
    for one, other in zip(kept[0].layers, kept[1].layers, strict=True):
        (keys, values, _), (near, close, _) = one.padded(), other.padded()
        assert 0 < (keys - near).abs().max() <= (keys.amax(2) - keys.amin(2)).max() / 30 * 1.01
        assert 0 < (values - close).abs().max() <= (values.amax(-1) - values.amin(-1)).max() / 30 * 1.01
    assert holding(kept[1]).bytes < holding(kept[0]).bytes / 2


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_prompt_in_chunks_and_a_reading_come_to_the_same(name: str) -> None:
    model, policy, prompt = deep(dtype=torch.float64), kvpolicy.load(name, budget=BUDGET), ids()
    want = [layer.kept for layer in policy.compress(model, prompt).report.layers.values()]
    reading = kvpolicy.read(model, prompt, policies=[policy, kvpolicy.load("snapkv")])
    assert [layer.kept for layer in reading.compress(policy).report.layers.values()] == want
    assert [layer.kept for layer in reading.compress(policy).report.layers.values()] == want
    with policy.on(model) as run:
        cache = DynamicCache(config=model.config)
        with run.prompt():
            for piece in prompt.split(40, dim=1):
                oracle.forward(model, piece, cache, None)
        assert [layer.kept for layer in run.report.layers.values()] == want


def turn(name: str) -> int:
    """How many tokens follow a prompt at once: several would be a prompt, of which some evict only a first one."""
    return 1 if kvpolicy.load(name).late else 5


WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"select": {"type": "chunks", "length": 4, "sinks": 2, "recent": 4}},
    "mmr": {"select": {"type": "mmr", "sinks": 2, "recent": 4}},
    "merge": {"evicted": {"type": "merge", "how": "averaged"}},
    "d2o": {"evicted": "d2o"},
    "cam": {"evicted": "cam"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_cut_and_merged_as_if_it_were_alone(name: str, way: str) -> None:
    """The second row is shorter, and so its layers are cut at other times."""
    model, prompt, more = deep(dtype=torch.float64), ids(2, 90), ids(1, 5, seed=3)
    policy = kvpolicy.load(name, budget={"keep": 0.4}, **WAYS[way])
    mask = torch.ones(2, 95, dtype=torch.int64)
    mask[1, :40] = 0
    answers, held = [], []
    for rows in ([0, 1], [0], [1]):
        cache = DynamicCache(config=model.config)
        with policy.on(model):
            oracle.forward(model, prompt[rows], cache, mask[rows, :90])
            held.append([layer.held for layer in cache.layers])
            pieces = more.expand(len(rows), -1).split(turn(name), dim=1)
            masks = (mask[rows, : 90 + turn(name) * count] for count in range(1, len(pieces) + 1))
            found = [oracle.forward(model, piece, cache, each) for piece, each in zip(pieces, masks, strict=True)]
            answers.append(torch.cat(found, dim=1))
    assert held[0] == [[first[0], second[0]] for first, second in zip(*held[1:], strict=True)]
    # D2O's weights are cosines in float32. A late policy has them of all slots of both rows, one longer than the other.
    atol = 2e-6 if way == "d2o" and policy.late else 1e-9
    torch.testing.assert_close(answers[0], torch.cat(answers[1:]), rtol=0, atol=atol)


@pytest.mark.parametrize("way", ["merge", "d2o", "cam"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_evicted_is_merged_once_into_what_stays(name: str, way: str) -> None:
    model, prompt, more = deep(dtype=torch.float64), ids(2), ids(2, 5, seed=3)
    policy = kvpolicy.load(name, budget=BUDGET, **WAYS[way])
    kept = oracle.plan(policy, model, prompt)
    merged = oracle.merges(policy, model, prompt, kept)
    pieces = more.split(turn(name), dim=1)
    want = oracle.logits(model, prompt, pieces, kept, None, merged)
    cache = DynamicCache(config=model.config)
    with policy.on(model):
        got = torch.cat([oracle.forward(model, piece, cache, None) for piece in (prompt, *pieces)], dim=1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_layer_keeps_something(name: str, tokens: int) -> None:
    policy = kvpolicy.load(name, budget=tokens, select={"sinks": 0, "recent": 0})
    model, cache = deep(), DynamicCache(config=deep().config)
    with policy.on(model) as run:
        oracle.forward(model, ids(2), cache, None)
    counts = [layer.kept for layer in run.report.layers.values()]
    assert all(min(map(min, layer)) >= 1 for layer in counts)
    assert [sum(sum(layer[row]) for layer in counts) for row in range(2)] == [2 * LAYERS * tokens] * 2


def test_a_preference_beyond_all_numbers_is_one() -> None:
    notes = torch.tensor([[[[900.0, 3.0]], [[901.0, 3.0]], [[0.0, 0.0]]]])
    budget = CakeLayers(tau1=0.0001, tau2=0.0001)
    given = torch.tensor([10]), torch.tensor([99]), torch.tensor([2])
    # e^(10,000 / 901) is what the second is more than the first.
    assert budget.share(notes, *given, layers=3).tolist() == [[3, 25, 2]]
    assert budget.share(notes * 0, *given, layers=3).tolist() == [[10, 10, 10]]


def test_whole_weights_that_add_up_are_their_own_parts() -> None:
    for seed in range(200):
        counts = torch.randint(0, 300, (1, 30), generator=torch.Generator().manual_seed(seed))
        total, most = counts.sum(-1), torch.tensor([300])
        assert whole_slots(proportions(total, counts.double(), most), total, most).tolist() == counts.tolist()


def test_layers_of_other_head_counts_are_refused() -> None:
    policy, view = kvpolicy.load("cake", budget=64), make_view(batch=1)
    with pytest.raises(UnsupportedModelError, match=r"the same number of KV heads, got \[1, 2\]"):
        policy.shared_slots([torch.zeros(1, 2, 2), torch.zeros(1, 1, 2)], view, 2)


def test_drafts_in_the_pass_of_the_prompt_are_refused() -> None:
    """They would see what is evicted only once all layers are read."""
    model, policy = deep(), kvpolicy.load("cake", budget=BUDGET)
    given = {"max_new_tokens": 4, "do_sample": False}
    with policy.on(model) as run:
        with pytest.raises(
            UnsupportedModelError, match=r"layer budget 'cake' shares slots out among layers; tokens that"
        ):
            model.generate(ids().repeat(1, 2), prompt_lookup_num_tokens=3, **given)
        assert run.report.layers


def test_a_model_that_derives_its_keys_is_refused() -> None:
    model = latent(Case("text", "deepseek_v3", "DeepseekV3ForCausalLM"))
    text, policy = torch.randint(1, 60, (1, 64)), kvpolicy.load("cake", budget=BUDGET)
    if installed("<5.24") and not kvpolicy.read(model, text, policies=[policy]).derived:
        pytest.skip("this transformers caches what the latent expands to")
    with policy.on(model), pytest.raises(UnsupportedModelError, match="are derived from"):
        model(text)


def of(note: Any, share: Any) -> Any:
    """Return a layer budget that notes and shares so."""

    @kvpolicy.settings
    class Odd:
        name = "odd"
        stage = "layers"
        needs = Needs()

        def __call__(self, tokens: Tensor, available: Tensor, layers: int) -> Tensor:
            return torch.minimum(tokens, available)[:, None].expand(-1, layers)

        def note(self, view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
            return note(view)

        def share(self, notes: Tensor, tokens: Tensor, available: Tensor, protected: Tensor, layers: int) -> Tensor:
            return share(notes, tokens)

    return Odd()


def fine(view: LayerView) -> Tensor:
    return torch.zeros(*view.valid.shape[:2], 1)


@pytest.mark.parametrize(
    ("note", "share", "match"),
    [
        (lambda view: torch.zeros(2), None, "note of layer budget 'odd'"),
        (lambda view: view.keys, None, "layer budget 'odd' reads 'keys' but declares"),
        (fine, lambda notes, tokens: tokens, "shares of layer budget 'odd'"),
        (fine, lambda notes, tokens: tokens[:, None].expand(-1, notes.shape[1]) - 1, "all layers together"),
        (fine, lambda notes, tokens: tokens[:, None].expand(-1, notes.shape[1]) * 0, r"expected from \[4\]"),
    ],
    ids=["note of another shape", "undeclared", "share of another shape", "less than the budget", "below protected"],
)
def test_wrong_shares_are_refused(note: Any, share: Any, match: str) -> None:
    select = TopK(sinks=2, recent=2)
    policy = Policy(name="odd", score=KeyNorm(), budget=Budget(tokens=8, layers=of(note, share)), select=select)
    view = make_view(batch=1)
    with pytest.raises(kvpolicy.errors.KVPolicyError, match=match):
        policy.plan([view, view])


def test_a_budget_that_shares_by_halves_is_no_plugin() -> None:
    @kvpolicy.settings
    class Half:
        """Half of one."""

        name = "half"
        stage = "layers"
        needs = Needs()

        def __call__(self, tokens: Tensor, available: Tensor, layers: int) -> Tensor:
            return tokens

        def note(self, view: LayerView, scores: Tensor, tokens: Tensor) -> Tensor:
            return scores

    with pytest.raises(PluginError, match="shares slots out but has no `share`"), kvpolicy.register(Half):
        pass


@pytest.mark.parametrize("seed", [0, 1])
def test_chunks_starve_no_layer(seed: int) -> None:
    policy = kvpolicy.load({"extends": "near-and-far", "name": "chunks", "prefill": "chunks"}, budget=24)
    model, cache = deep(), DynamicCache()
    with policy.on(model) as run, run.prompt():
        for chunk in ids(length=640, seed=seed).split(32, dim=1):
            oracle.forward(model, chunk, cache, None)
    kept = [layer["kept"][0][0] for layer in run.report.to_dict()["layers"]]
    # As many as are protected, and a layer would never be given any again.
    assert min(kept) > policy.select.protects
    assert sum(kept) == LAYERS * 24


@pytest.mark.parametrize("groups", [2, 3, 4])
@pytest.mark.parametrize("steps", [2, 8, 10**6])
def test_the_highest_cluster_is_that_of_every_way_to_cut(steps: int, groups: int) -> None:
    """Of few steps many values are equal, and many ways to cut are equally good."""
    generator = torch.Generator().manual_seed(groups * steps)
    for layers in range(1, 10):
        values = torch.randint(0, steps, (40, layers), generator=generator).double() / 8
        got = highest_cluster(values, groups)
        want = [most_alike([Fraction(value) for value in row], groups) for row in values.tolist()]
        assert [set(slots(row)) for row in got] == want
        assert [set(slots(highest_cluster(row[None], groups)[0])) for row in values] == want


def test_clusters_far_from_zero_and_close_to_each_other() -> None:
    """Differences of squares would lose them."""
    values = torch.tensor([[0.0, 2**-40, 3 * 2**-40, 1.0, 1 + 2**-40, 1 + 6 * 2**-40]], dtype=torch.float64)
    assert highest_cluster(values, 3).tolist() == [[False] * 5 + [True]]


def test_clusters_of_many_layers() -> None:
    many = torch.rand(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = [most_alike([Fraction(value) for value in row], 3) for row in many.tolist()]
    assert [set(slots(row)) for row in highest_cluster(many, 3)] == want


def squeezed(p: float, similarity: list[float], tokens: int, available: int, protected: int = 1) -> list[int]:
    given = torch.tensor([tokens]), torch.tensor([available]), torch.tensor([protected])
    notes = torch.tensor(similarity).view(1, -1, 1, 1).expand(-1, -1, 2, -1)
    return SqueezeLayers(p=p).share(notes, *given, layers=len(similarity))[0].tolist()


def test_squeezed_layers_keep_p_times_the_mean() -> None:
    """``b_other = (L b - |G3| b p) / (L - |G3|)``."""
    similarity = [0.2, 0.99, 0.5, 0.98, 0.25]
    assert squeezed(0.5, similarity, 40, 999) == [54, 20, 53, 20, 53]
    # 0.29 * 100 is less than 29 in float64, and float32 has no 29,000,001.
    assert squeezed(0.29, similarity, 100_000_004, 10**9)[1] == 29_000_001
    assert squeezed(0.29, similarity, 100, 999) == [148, 29, 147, 29, 147]
    assert squeezed(0.29, similarity, 100, 999, protected=60) == [127, 60, 127, 60, 126]
    assert squeezed(0.29, similarity, 100, 120, protected=1) == [120, 70, 120, 70, 120]
    assert squeezed(0.29, similarity, 100, 50) == [50] * 5
    assert squeezed(1, similarity, 100, 999) == [100] * 5


@pytest.mark.parametrize("similarity", [[0.5], [0.1, 0.9], [0.7] * 6, [0.1, 0.9, 0.1, 0.9]], ids=str)
def test_layers_of_too_few_kinds_keep_the_mean(similarity: list[float]) -> None:
    assert squeezed(0.35, similarity, 40, 99) == [40] * len(similarity)


def test_until_all_layers_are_read_each_may_hold_all() -> None:
    given = torch.tensor([40, 40]), torch.tensor([99, 20]), torch.tensor([2, 2])
    assert SqueezeLayers().share(torch.rand(2, 2, 3, 1), *given, layers=3).tolist() == [[99, 99], [20, 20]]
