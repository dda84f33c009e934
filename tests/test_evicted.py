"""What becomes of the evicted: each method against a slow twin in float64, from the formulas, sharing no code."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from views import make_view

from kvpolicy import LayerView, Selection
from kvpolicy.errors import ConformanceError, PluginError
from kvpolicy.evicted import nearest as blocked
from kvpolicy.evicted.cam import CaM
from kvpolicy.evicted.d2o import D2O
from kvpolicy.evicted.drop import Drop
from kvpolicy.evicted.merge import Merge
from kvpolicy.evicted.nearest import nearest
from kvpolicy.merging import merged
from kvpolicy.plugin import settings
from kvpolicy.selectors.top_k import TopK
from kvpolicy.testing import check_evicted, check_selector
from kvpolicy.testing.checks.memory import largest
from kvpolicy.types import Merged, Needs

CASES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"heads": (3, 3), "sizes": (128, 128)},
    "size 80": {"sizes": (80, 80)},
    "sizes differ": {"sizes": (96, 40)},
    "left padding": {"padding": "left"},
    "right padding": {"padding": "right"},
    "ragged heads": {"padding": "ragged", "slots": 40},
    "few": {"slots": 3},
    "long": {"slots": 90, "batch": 1},
}


def case(
    name: str, seed: int = 0, share: float = 0.4, dtype: torch.dtype = torch.float32
) -> tuple[LayerView, Selection]:
    """Return a view of which three tokens a row have gone before, and kept slots by chance, one a head at least."""
    view = make_view(seed, dtype=dtype, **CASES[name])
    noise = torch.rand(view.valid.shape, generator=torch.Generator().manual_seed(seed))
    keep = view.valid & ((noise < share) | (view.valid.cumsum(-1) == 1))
    return replace(view, seen=view.seen + 3), Selection.from_mask(keep)


def matched(view: LayerView, kept: Selection) -> dict[tuple[int, int, int], list[tuple[int, float]]]:
    """Return by row, head and kept slot the evicted slots whose key it is nearest to, with the cosines."""
    keys, keep = view.keys.double(), kept.to_mask(view.slots)
    found: dict[tuple[int, int, int], list[tuple[int, float]]] = {}
    for b, h in [(b, h) for b in range(len(keep)) for h in range(view.kv_heads)]:
        survivors = keep[b, h].nonzero().flatten().tolist()
        for i in (view.valid & ~keep)[b, h].nonzero().flatten().tolist():
            cosines = [float(torch.cosine_similarity(keys[b, h, i], keys[b, h, j], dim=0)) for j in survivors]
            best = max(cosines)
            found.setdefault((b, h, survivors[cosines.index(best)]), []).append((i, best))
    return found


def thresholds(view: LayerView, kept: Selection) -> dict[tuple[int, int], float]:
    """Return the mean cosine of each head that evicts."""
    cosines: dict[tuple[int, int], list[float]] = {}
    for (b, h, _), those in matched(view, kept).items():
        cosines.setdefault((b, h), []).extend(cosine for _, cosine in those)
    return {head: math.fsum(each) / len(each) for head, each in cosines.items()}


def packed(view: LayerView, kept: Selection, vectors: Tensor, of: Any) -> Tensor:
    """Return for every kept slot what `of` makes of its vector and those of the slots that are nearest to it."""
    rows, those = [], matched(view, kept)
    for b, h in [(b, h) for b in range(len(kept)) for h in range(view.kv_heads)]:
        for j in kept[b][h].tolist():
            near = those.get((b, h, j), [])
            rows.append(of(vectors[b, h, j], [(vectors[b, h, i], cosine) for i, cosine in near], (b, h)))
    return torch.stack(rows)


def assert_near(got: Tensor, want: Tensor, roundings: int) -> None:
    """Assert that float32 `got` is what float64 `want` says; each rounding errs by 2**-24 of the largest number."""
    assert got.dtype == torch.float32
    allowed = roundings * 2**-24 * float(want.abs().max())
    assert float((got.double() - want).abs().max()) <= allowed


def assert_twin(got: Merged, view: LayerView, kept: Selection, of: Any) -> None:
    # A sum of as many as there are slots, each with a weight and a cosine, itself a sum over the channels.
    roundings = 2 * view.slots + view.keys.shape[-1]
    for vectors, mixed in ((view.keys, got.keys), (view.values, got.values)):
        assert_near(mixed, packed(view, kept, vectors.double(), of), roundings)


def look_m(how: str, least: dict[tuple[int, int], float]) -> Any:
    def of(own: Tensor, near: list[tuple[Tensor, float]], head: tuple[int, int]) -> Tensor:
        near = [(vector, cosine) for vector, cosine in near if cosine >= least.get(head, -2)]
        parts = {
            "averaged": [vector for vector, _ in near],
            "pivotal": [(vector + own) / 2 for vector, _ in near],
            "weighted": [cosine * vector for vector, cosine in near],
        }[how]
        return sum(parts, own) / (len(near) + 1)

    return of


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", ["pivotal", "averaged", "weighted"])
def test_merge_is_its_formula(name: str, how: Any) -> None:
    view, kept = case(name)
    assert_twin(Merge(how=how)(view, kept, None), view, kept, look_m(how, {}))
    alike = Merge(how=how, only="alike")(view, kept, None)
    assert_twin(alike, view, kept, look_m(how, thresholds(view, kept)))
    values = Merge(how=how, on="values")(view, kept, None)
    assert torch.equal(values.keys, kept.take(view.keys))
    assert torch.equal(values.values, Merge(how=how)(view, kept, None).values)


def d2o(weights: str, e: float, least: dict[tuple[int, int], float]) -> Any:
    def of(own: Tensor, near: list[tuple[Tensor, float]], head: tuple[int, int]) -> Tensor:
        near = [(vector, cosine) for vector, cosine in near if cosine >= least[head]]
        if weights == "similarity":
            return sum((cosine * vector for vector, cosine in near), own) / (len(near) + 1)
        exps = [(math.exp(cosine), vector) for vector, cosine in near]
        total = e + math.fsum(weight for weight, _ in exps)
        return own if not near else sum((weight / total * vector for weight, vector in exps), e / total * own)

    return of


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weights", ["similarity", "exponential"])
def test_d2o_is_its_formula_and_its_threshold_follows(name: str, weights: Any) -> None:
    plugin, memory = D2O(weights=weights, beta=0.3, e=0.7), None
    least: dict[tuple[int, int], float] = {}
    for seed in range(3):
        view, kept = case(name, seed)
        now = thresholds(view, kept)
        least |= {head: mean if head not in least else 0.7 * least[head] + 0.3 * mean for head, mean in now.items()}
        found = plugin(view, kept, memory)
        assert_twin(found, view, kept, d2o(weights, 0.7, least))
        memory = found.memory
        for head in [(b, h) for b in range(len(kept)) for h in range(view.kv_heads)]:
            assert memory[head].isnan() if head not in least else abs(float(memory[head]) - least[head]) < 2**-18


def chances(view: LayerView, kept: Selection, plugin: CaM) -> dict[tuple[int, int, int], float]:
    """Return with what chance the value of each evicted slot goes in."""
    queries, keys, keep = view.queries.double(), view.keys.double(), kept.to_mask(view.slots)
    group, found = queries.shape[1] // view.kv_heads, {}
    for b, h in [(b, h) for b in range(len(keep)) for h in range(view.kv_heads)]:
        attention = torch.zeros(view.slots, dtype=torch.float64)
        asked = [w for w in range(queries.shape[2])[-plugin.window :] if view.query_positions[b, w] >= 0]
        for w in asked:
            seen = view.valid[b, h] & (view.positions[b, h] <= view.query_positions[b, w])
            for g in range(group):
                logits = keys[b, h, seen] @ queries[b, h * group + g, w] * view.scaling
                attention[seen] += logits.softmax(0) / group / len(asked)
        for i in (view.valid & ~keep)[b, h].nonzero().flatten().tolist():
            later = [j for j in kept[b][h].tolist() if j > i]
            against = later[: plugin.merge_budget] if plugin.among == "next" else later
            mean = math.fsum(float(attention[j]) for j in against) / max(len(against), 1)
            found[b, h, i] = min(float(attention[i]) / mean, 1.0) if mean else 0.0
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "plugin", [CaM(merge_budget=3), CaM(merge_budget=50), CaM(merge_budget=2, among="next", window=4)], ids=repr
)
def test_cam_is_its_formula(name: str, plugin: CaM) -> None:
    view, kept = case(name)
    noise, want = plugin._uniform(view), view.values.double().clone()
    for (b, h, i), chance in chances(view, kept, plugin).items():
        # No number that decides is as near to its chance as float32 errs.
        assert abs(float(noise[b, h, i]) - chance) > 1e-5
        if noise[b, h, i] < chance:
            for j in [j for j in kept[b][h].tolist() if j > i][: plugin.merge_budget]:
                want[b, h, j] += view.values[b, h, i].double() / plugin.merge_budget
    found = merged(plugin, view, kept, None)
    keys, values = (kept.take(view.keys), kept.take(view.values)) if found is None else (found.keys, found.values)
    assert torch.equal(keys, kept.take(view.keys))
    assert_near(values, kept.take(want), view.slots + 2)


def test_cam_merges_as_often_as_its_chance_says() -> None:
    view, kept = case("long")
    expected = chances(view, kept, CaM())
    noise = torch.stack([CaM(seed=seed)._uniform(view) for seed in range(400)])
    for at, chance in list(expected.items())[:60]:
        share = float((noise[:, *at] < chance).double().mean())
        # Five standard deviations.
        assert abs(share - chance) <= 5 * math.sqrt(chance * (1 - chance) / 400) + 1e-9


def test_cam_drops_what_is_evicted_of_a_prompt_unless_told_otherwise() -> None:
    view, kept = case("gqa")
    prompt = replace(view, seen=view.seen - 3)
    assert CaM()(prompt, kept, None) is None
    assert CaM(prompt="merge")(prompt, kept, None) is not None
    assert CaM()(view, kept, None) is not None


@pytest.mark.parametrize("plugin", [Merge(), D2O(), CaM(prompt="merge")], ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_those_of_the_same_numbers_in_float64(plugin: Any, dtype: torch.dtype) -> None:
    view, kept = case("ragged heads", dtype=dtype)
    wide = replace(view, keys=view.keys.double(), values=view.values.double(), queries=view.queries.double())
    got, want = plugin(view, kept, None), plugin(wide, kept, None)
    for one, other in ((got.keys, want.keys), (got.values, want.values)):
        assert one.dtype == dtype
        # One rounding to the dtype, besides those of float32.
        allowed = (torch.finfo(dtype).eps + 2**-18) * float(other.abs().max())
        assert float((one.double() - other).abs().max()) <= allowed


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    view, kept = case("ragged heads", dtype=torch.float64)
    plugins = [Merge(how="weighted"), D2O(weights="exponential"), CaM(prompt="merge", merge_budget=4)]
    whole = [plugin(view, kept, None) for plugin in plugins]
    monkeypatch.setattr(blocked, "NUMBERS", 300)
    for plugin, want in zip(plugins, whole, strict=True):
        got = plugin(view, kept, None)
        assert torch.allclose(got.keys, want.keys, rtol=0, atol=1e-6)
        assert torch.equal(got.values.isfinite(), want.values.isfinite())
        assert torch.allclose(got.values, want.values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("plugin", [Merge(), D2O(), CaM(prompt="merge")], ids=lambda one: one.name)
def test_nothing_of_evicted_times_kept_is_held(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "NUMBERS", 2**16)
    view = make_view(batch=1, heads=(1, 1), slots=4096, sizes=(8, 8))
    kept = Selection(slots=torch.arange(0, 4096, 4), lengths=torch.tensor([[1024]]))
    # Of every slot its eight channels in float64, or an index of each; evicted times kept would be 3 M numbers.
    assert largest(lambda: plugin(view, kept, None)) <= 4 * max(2**16, 4096 * 8 * 2)


def test_the_nearest_of_equal_directions_whatever_their_length() -> None:
    keys = torch.tensor([[[[1.0, 0.0], [0.0, 1e-30], [0.0, 1e30], [0.0, 0.0]]]])
    kept = Selection(slots=torch.tensor([0, 1]), lengths=torch.tensor([[2]]))
    found = nearest(LayerView(keys=keys, values=keys), kept)
    assert (found.slots.tolist(), found.into.tolist()[0]) == ([2, 3], 1)
    assert found.cosines.tolist() == [1.0, 0.0]


def test_a_head_that_keeps_less_than_its_neighbour_is_matched_with_its_own() -> None:
    keys = torch.tensor([[[[1.0], [-1.0], [-2.0]], [[1.0], [1.0], [1.0]]]])
    kept = Selection(slots=torch.tensor([0, 0, 1, 2]), lengths=torch.tensor([[1, 3]]))
    found = nearest(LayerView(keys=keys, values=keys), kept)
    assert (found.owners.tolist(), found.slots.tolist()) == ([0, 0], [1, 2])
    assert (found.into.tolist(), found.cosines.tolist()) == ([0, 0], [-1.0, -1.0])


@pytest.mark.parametrize(
    "plugin",
    [Drop(), Merge(), Merge(how="weighted", only="alike"), D2O(), D2O(weights="exponential"), CaM(prompt="merge")],
    ids=repr,
)
def test_each_keeps_its_contract(plugin: Any) -> None:
    check_evicted(plugin)


@settings
class Odd:
    """Breaks the contract in the way that it is told."""

    name, stage, source, formula = "odd", "evicted", "a test", "x"
    needs = Needs(keys=True, values=True)
    how: str = ""

    def __call__(self, view: LayerView, selection: Selection, memory: Tensor | None) -> Any:
        keys, values = selection.take(view.keys), selection.take(view.values)
        if self.how == "none there":
            return keys, values
        if self.how == "float":
            return Merged(keys.float(), values)
        if self.how == "all":
            return Merged(view.keys.flatten(0, 2), values)
        if self.how == "nan":
            return Merged(keys + view.keys[:, :, :1].sum(), values)
        if self.how == "memory":
            return Merged(keys, values, torch.zeros(len(view.valid) + 1))
        if self.how == "queries":
            return Merged(keys * view.queries.shape[2], values)
        if self.how == "scales":
            return Merged(keys * 1.5, values)
        if self.how == "noise":
            return Merged(keys + torch.rand_like(keys) * (len(keys) < int(view.valid.sum())), values)
        if self.how == "mates":
            return Merged(keys + view.keys.where(view.valid[..., None], 0).mean((0, 1, 2)), values)
        if self.how == "writes":
            view.values.where(view.valid[..., None], 0)
            view.values[view.valid] = 0
        if self.how == "writes seen":
            view.seen.add_(1)
        if self.how == "writes first" and memory is None:
            view.values.add_(1)
        if self.how == "writes memory" and memory is not None:
            memory.add_(1)
        if self.how in ("writes first", "writes memory") and len(keys) < int(view.valid.sum()):
            return Merged(keys, values, torch.zeros(len(view.valid)))
        return None


@pytest.mark.parametrize(
    ("how", "check", "message"),
    [
        ("none there", "shapes", r"expected a kvpolicy.Merged or None, got tuple"),
        ("float", "shapes", r"keys: expected torch.bfloat16 .* got torch.float32"),
        ("all", "shapes", r"keys: expected torch.float32 \[.*, one for each kept slot"),
        ("nan", "shapes", r"keys: expected finite numbers"),
        ("memory", "shapes", r"memory: expected a tensor \[3, ...\]"),
        ("queries", "undeclared_reads", r"reads 'queries' but declares"),
        ("scales", "nothing_evicted", r"expected slots as they were, as none is evicted"),
        ("noise", "repeatable", r"expected equal keys and values when it is called again"),
        ("mates", "batch_mates", r"expected that a row becomes the same alone and beside others"),
        ("writes", "inputs_untouched", r"writes into what it is given"),
        ("writes seen", "inputs_untouched", r"writes into what it is given"),
        ("writes first", "inputs_untouched", r"writes into what it is given"),
        ("writes memory", "inputs_untouched", r"writes into what it is given"),
    ],
)
def test_a_breach_of_contract_is_found(how: str, check: str, message: str) -> None:
    with pytest.raises(ConformanceError, match=message) as raised:
        check_evicted(Odd(how=how))
    assert check in str(raised.value)


def test_a_check_for_another_kind_says_so() -> None:
    with pytest.raises(ConformanceError, match=r"expected a selector, got Drop.*, which is a treatment of the evicted"):
        check_selector(Drop())
    with pytest.raises(ConformanceError, match="expected a treatment of the evicted, got TopK"):
        check_evicted(TopK())


def test_a_plugin_that_returns_nonsense_is_named() -> None:
    view, kept = case("gqa")
    with pytest.raises(PluginError, match=r"'odd' of the evicted \(test_evicted\): keys: expected finite"):
        merged(Odd(how="nan"), replace(view, keys=view.keys * math.inf), kept, None)
