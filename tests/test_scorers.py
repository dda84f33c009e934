"""Every scorer against its slow twin, and where arithmetic breaks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import twins
from torch import Tensor
from views import CASES, assert_close, change, make_view

from kvpolicy.errors import PluginError, SettingError, ViewError
from kvpolicy.plugin import children, settings
from kvpolicy.policy import Budget, Policy
from kvpolicy.registry import registry
from kvpolicy.scorers.cake import Cake
from kvpolicy.scorers.cosine_diversity import CosineDiversity
from kvpolicy.scorers.cur_dkv import CurDKV
from kvpolicy.scorers.euclidean_diversity import EuclideanDiversity
from kvpolicy.scorers.expected_attention import ExpectedAttention
from kvpolicy.scorers.finch import Finch
from kvpolicy.scorers.h2o import H2O
from kvpolicy.scorers.key_diff import KeyDiff
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.scorers.keyformer import Keyformer
from kvpolicy.scorers.kvzip import KVzip
from kvpolicy.scorers.lag_kv import LagKV
from kvpolicy.scorers.leverage import Leverage
from kvpolicy.scorers.manifold_kv import ManifoldKV
from kvpolicy.scorers.non_causal_attention import NonCausalAttention
from kvpolicy.scorers.q_filters import QFilters
from kvpolicy.scorers.random import Random
from kvpolicy.scorers.recency import Recency
from kvpolicy.scorers.scissorhands import Scissorhands
from kvpolicy.scorers.snapkv import SnapKV
from kvpolicy.scorers.tova import TOVA
from kvpolicy.scorers.value_norm import ValueNorm
from kvpolicy.testing.checks.memory import largest
from kvpolicy.types import LayerView, Needs

SCORERS: dict[str, tuple[Any, Callable[[LayerView], Tensor]]] = {
    "snapkv": (SnapKV(window=8), lambda view: twins.snapkv(view, 8, 5, "avg")),
    "snapkv, max": (SnapKV(window=4, kernel=7, pooling="max"), lambda view: twins.snapkv(view, 4, 7, "max")),
    "snapkv, no pool": (SnapKV(kernel=1), lambda view: twins.snapkv(view, 32, 1, "avg")),
    "cosine": (CosineDiversity(), lambda view: twins.cosine_diversity(view, view.keys, view.candidates)),
    "cosine, values": (
        CosineDiversity(on="values"),
        lambda view: twins.cosine_diversity(view, view.values, view.candidates),
    ),
    "euclidean": (EuclideanDiversity(), lambda view: twins.euclidean_diversity(view, view.keys)),
    "euclidean, values": (EuclideanDiversity(on="values"), lambda view: twins.euclidean_diversity(view, view.values)),
    "key-diff": (KeyDiff(), lambda view: twins.cosine_diversity(view, view.keys, view.valid)),
    "key-norm": (KeyNorm(), lambda view: twins.norm(view, view.keys, -1)),
    "value-norm": (ValueNorm(), lambda view: twins.norm(view, view.values, 1)),
    "recency": (Recency(), twins.recency),
}
ONLY = [scorer for scorer, _ in SCORERS.values()] + [Random()]
# Their twins stand in test_zoo_attention.py, test_zoo_keys_values.py and test_zoo_layers.py.
ONLY += [
    Cake(window=8),
    H2O(),
    TOVA(),
    Finch(window=8),
    Scissorhands(w=8),
    Keyformer(),
    NonCausalAttention(chunk_size=16),
]
ONLY += [LagKV(lag=4, sinks=2), Leverage(space="post-rope"), CurDKV(), ManifoldKV(window=5)]


def scores_of(scorer: Any, view: LayerView) -> Tensor:
    """Return what a policy would get, checks and all."""
    return Policy(name="test", score=scorer, budget=Budget(keep=1.0)).scores(view)[0]


def roundings(scorer: Any, view: LayerView) -> float:
    """Return how often float32 rounds on the way to one score, times what cancellation makes of it."""
    most = float(
        view.keys.nan_to_num().float().norm(dim=-1).max() + view.values.nan_to_num().float().norm(dim=-1).max()
    )
    sums = max(view.keys.shape[-1], view.values.shape[-1]) + view.slots + 16
    if isinstance(scorer, SnapKV):
        # exp turns the absolute error of a logit, a sum of Dk products, into a relative one of the attention.
        logits = float(view.queries.nan_to_num().float().norm(dim=-1).max()) * most * view.scaling
        return sums * max(logits, 1.0)
    if isinstance(scorer, (CosineDiversity, KeyDiff)):
        # The mean direction of n vectors can be as short as it happens to be; n**-0.5 is usual for random ones.
        return 2 * sums * view.slots**0.5
    return sums * max(most, 1.0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SCORERS)
def test_scorer_equals_its_twin(name: str, case: str) -> None:
    scorer, twin = SCORERS[name]
    view = make_view(**CASES[case])
    assert_close(scores_of(scorer, view), twin(view), view.candidates, roundings=roundings(scorer, view))


@pytest.mark.parametrize("scale", [1e30, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["cosine", "euclidean", "euclidean, values", "key-diff", "key-norm", "value-norm"])
def test_lengths_far_beyond_the_root_of_float32_still_equal_the_twin(
    name: str, dtype: torch.dtype, scale: float
) -> None:
    scorer, twin = SCORERS[name]
    view = make_view(sinks=1, recent=1)
    near = roundings(scorer, view)
    view = change(view, keys=(view.keys * scale).to(dtype), values=(view.values * scale).to(dtype))
    unit = 1.0 if isinstance(scorer, (CosineDiversity, KeyDiff)) else scale
    assert_close(scores_of(scorer, view), twin(view), view.candidates, roundings=near, size=unit)


@pytest.mark.parametrize("scorer", ONLY, ids=repr)
@pytest.mark.parametrize("fill", [0.0, -3.5, 6e4, "alternating"], ids=["zero", "minus", "large", "largest, both signs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("slots", [1, 40])
def test_scores_stay_finite(scorer: Any, fill: float | str, dtype: torch.dtype, slots: int) -> None:
    view = make_view(slots=slots, padding="left")
    if fill == "alternating":
        largest = torch.finfo(dtype).max
        sign = torch.where(torch.arange(slots) % 2 == 0, largest, -largest)[:, None]
        full = sign.expand_as(view.keys).to(dtype)
    else:
        full = torch.full_like(view.keys, fill).to(dtype)
    queries = full[:, :1, -view.queries.shape[2] :].expand(-1, 6, -1, -1)
    # Finite, or scores_of raises.
    assert scores_of(scorer, change(view, keys=full, values=full, queries=queries)).shape == view.valid.shape


def test_snapkv_without_sinks_is_the_published_code() -> None:
    """The window left out, summed, pooled, per query head; then the mean over the group, which GQA made necessary."""
    window, kernel = 8, 5
    view = make_view(slots=40, window=window, recent=window)
    keys = view.keys.repeat_interleave(3, dim=1)
    logits = view.queries @ keys.mT * view.keys.shape[-1] ** -0.5
    future = torch.full((window, window), -torch.inf).triu(1)
    logits[..., -window:] += future
    attention = logits.softmax(-1)[..., :-window].sum(-2)
    pooled = torch.nn.functional.avg_pool1d(attention, kernel, stride=1, padding=kernel // 2)
    want = pooled.view(3, 2, 3, -1).mean(2) / window
    got = SnapKV(window=window, kernel=kernel)(view)[..., :-window]
    torch.testing.assert_close(got, want)


def test_a_sink_lends_nothing_to_its_neighbours() -> None:
    keys = torch.zeros(1, 1, 12, 4)
    keys[0, 0, 0, 0] = 100  # takes all the attention
    view = LayerView(keys=keys, values=keys, queries=torch.ones(1, 1, 2, 4))
    leaky = SnapKV(window=2)(view)[0, 0]
    assert leaky[1] > 100 * leaky[6]
    tight = SnapKV(window=2)(view.decide(torch.arange(12).expand(1, 1, -1) > 0))[0, 0]
    assert tight[1] <= tight[6]


def test_a_query_that_sees_nothing_does_not_count() -> None:
    view = make_view(batch=1, slots=12, window=4)
    want = SnapKV(window=3, kernel=1)(view.limit(Needs(queries=3, keys=True), "test"))
    lost = view.query_positions.clone()
    lost[:, 0] = -1
    torch.testing.assert_close(SnapKV(window=4, kernel=1)(change(view, query_positions=lost)), want)


def test_scaling_is_the_models() -> None:
    view = dataclasses.replace(make_view(recent=2), scaling=0.5)
    want = twins.snapkv(view, 8, 5, "avg")
    assert_close(SnapKV()(view), want, view.candidates, roundings=roundings(SnapKV(), view))


def test_key_diff_counts_protected_slots_and_cosine_diversity_does_not() -> None:
    view = make_view(sinks=4)
    moved = view.keys.clone()
    moved[:, :, :4] *= -1
    other = change(view, keys=moved)
    assert torch.equal(CosineDiversity()(view)[..., 4:], CosineDiversity()(other)[..., 4:])
    assert not torch.allclose(KeyDiff()(view)[..., 4:], KeyDiff()(other)[..., 4:], atol=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SnapKV(window=0),
        lambda: SnapKV(kernel=4),
        lambda: SnapKV(pooling="median"),  # type: ignore[arg-type]
        lambda: SnapKV(window=True),
        lambda: CosineDiversity(on="queries"),  # type: ignore[arg-type]
        lambda: EuclideanDiversity(On="keys"),  # type: ignore[call-arg]
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(SettingError):
        make()


def test_a_scorer_that_needs_queries_says_so() -> None:
    view = make_view()
    with pytest.raises(ViewError, match="needs queries"):
        scores_of(SnapKV(), LayerView(keys=view.keys, values=view.values))


@settings
class Nosy:
    """Reads what it does not declare."""

    name = "nosy"
    reads: str
    needs = Needs()

    def __call__(self, view: LayerView) -> Tensor:
        return torch.zeros(view.valid.shape) + getattr(view, self.reads).float().mean()


@pytest.mark.parametrize("reads", ["keys", "values", "queries", "query_positions"])
def test_reading_what_is_not_declared_raises(reads: str) -> None:
    with pytest.raises(PluginError, match=f"nosy.*reads '{reads}'"):
        scores_of(Nosy(reads=reads), make_view())


@pytest.mark.parametrize("reads", ["keys", "values", "queries"])
@pytest.mark.parametrize("scorer", ONLY, ids=repr)
def test_what_is_declared_is_what_decides(scorer: Any, reads: str) -> None:
    """Other numbers in what a scorer declares change its scores; in what it does not, they don't."""
    view = make_view(recent=4)
    other = change(
        view, **{reads: getattr(view, reads).flip(2) * torch.linspace(1, 3, getattr(view, reads).shape[2])[:, None]}
    )
    assert torch.equal(scores_of(scorer, view), scores_of(scorer, other)) != bool(getattr(scorer.needs, reads))


@pytest.mark.parametrize("scorer", ONLY, ids=repr)
def test_memory_is_never_at_query_head_width(scorer: Any) -> None:
    query_heads, kv_heads, window, size, slots = 16, 2, 4, 64, 1024
    view = make_view(batch=1, heads=(query_heads, kv_heads), slots=slots, sizes=(size, size), window=window)
    limited = view.limit(Needs(queries=window, keys=True, values=True), "test")
    # One head: the keys, or the logits of the window of its group; keys repeated for the group are 8 times that.
    most = kv_heads * slots * max(size, query_heads // kv_heads * window)
    assert largest(lambda: scorer(limited)) <= most * view.keys.element_size()


def test_every_built_in_says_what_it_is() -> None:
    for entry in registry().entries():
        if entry.kind in ("scorer", "combiner", "layers", "heads", "selector") and entry.origin.startswith("kvpolicy "):
            cls = entry.value
            assert cls.source and cls.formula and ">>>" in cls.__doc__, entry.name
            assert re.match(r"time O\(.+?\), memory O\(.+?\)($|[,;] )", cls.cost), entry.name
            assert entry.kind != "scorer" or cls.role in ("importance", "diversity", "other")
    built = {entry.value for entry in registry().entries("scorer") if entry.origin.startswith("kvpolicy ")}
    # What a model or a file has to be read for: test_zoo_attention, test_zoo_q_filters, test_repetition.
    elsewhere = {ExpectedAttention, QFilters, KVzip}
    assert built == {type(scorer) for scorer in ONLY} | elsewhere, "a scorer without a twin"
    assert not any(children(scorer) for scorer in ONLY)
