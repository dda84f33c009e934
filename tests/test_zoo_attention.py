"""The zoo's importances by attention: each keeps what a slow twin in float64, written from the paper, keeps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from twins import blank, heads, slots
from views import make_view

import kvpolicy
from kvpolicy import attention, blocks
from kvpolicy.attention import window_attention
from kvpolicy.combiners.fixed import Fixed
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.policy import Budget, Decode, Policy
from kvpolicy.scorers.expected_attention import ExpectedAttention
from kvpolicy.scorers.finch import Finch
from kvpolicy.scorers.h2o import H2O
from kvpolicy.scorers.keyformer import Keyformer, _gumbel, _mixed
from kvpolicy.scorers.leverage import Leverage
from kvpolicy.scorers.non_causal_attention import NonCausalAttention
from kvpolicy.scorers.scissorhands import Scissorhands
from kvpolicy.scorers.tova import TOVA
from kvpolicy.selectors.top_k import TopK
from kvpolicy.session.decoder import cache_name
from kvpolicy.testing.checks.memory import peak
from kvpolicy.testing.models import tiny
from kvpolicy.types import LayerView


def logits(view: LayerView, b: int, h: int, g: int) -> Tensor:
    """Return what each query of a row gives each valid slot of a head, float64 ``[W, n]``, -inf for what is later."""
    group = view.queries.shape[1] // view.keys.shape[1]
    there = view.query_positions[b] >= 0
    queries = view.queries[b, h * group + g, there].double()
    found = queries @ view.keys[b, h, view.valid[b, h]].double().T * view.scaling
    later = view.positions[b, h, view.valid[b, h]] > view.query_positions[b, there][:, None]
    return found.masked_fill(later, -torch.inf)


def last(view: LayerView, count: int) -> LayerView:
    """Return a view with the last queries alone."""
    queries, places = view.queries[:, :, -count:], view.query_positions[:, -count:]
    return dataclasses.replace(view, queries=queries, query_positions=places)


def by_head(view: LayerView, score: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Return float64 ``[B, Hkv, T]``: `score` of the logits of a group's query heads."""
    scores = blank(view)
    for b, h in heads(view):
        scores[b, h, slots(view.valid[b, h])] = score([logits(view, b, h, g) for g in range(view.group)])
    return scores


def h2o(view: LayerView, accumulate: str) -> Tensor:
    def score(group: list[Tensor]) -> Tensor:
        total = sum(one.softmax(-1).sum(0) for one in group) / len(group)
        return total / group[0].isfinite().sum(0) if accumulate == "mean" else total

    return by_head(view, score)


def tova(view: LayerView) -> Tensor:
    """Written for heads that hold the same tokens, as they do in the paper."""
    each = by_head(view, lambda group: torch.stack([one[-1].softmax(-1) for one in group]).mean(0))
    return each.mean(1, keepdim=True).expand_as(each)


def finch(view: LayerView) -> Tensor:
    """As the press: a query counts as many slots as it sees but for its own."""

    def score(group: list[Tensor]) -> Tensor:
        counts = group[0].isfinite().sum(-1, keepdim=True) - 1
        return sum((counts * one.softmax(-1)).sum(0) for one in group) / len(group) / counts.sum()

    return by_head(view, score)


def scissorhands(view: LayerView) -> Tensor:
    def score(group: list[Tensor]) -> Tensor:
        even = [1 / one.isfinite().sum(-1, keepdim=True) for one in group]
        low = [(one.softmax(-1) < share) & one.isfinite() for one, share in zip(group, even, strict=True)]
        return -sum(one.sum(0) for one in low).double() / len(group)

    return by_head(view, score)


def keyformer(view: LayerView, tau: float, seed: int) -> Tensor:
    scores = blank(view)
    for b, h in heads(view):
        total = torch.zeros(())
        for g in range(view.group):
            found = logits(view, b, h, g)
            noise = gumbel(seed, view.layer, h * view.group + g, found.isfinite().sum(-1), found.shape[1])
            total = total + ((found + noise) / tau).softmax(-1).sum(0)
        scores[b, h, slots(view.valid[b, h])] = total / view.group
    return scores


def gumbel(seed: int, layer: int, head: int, queries: Tensor, count: int) -> Tensor:
    """The noise is no paper's: the scorer's own hash once more, in int64 of 32 bits without a sign."""
    own = mix(torch.tensor(head ^ (seed * 100_003 + layer + 1) % 2**31))
    mixed = mix(mix(own ^ queries)[:, None] ^ mix(torch.arange(1, count + 1)))
    return -(-(((mixed >> 9) + 0.5).double() / 2**23).log()).log()


def mix(number: Tensor) -> Tensor:
    number = (number ^ number >> 16) * 0x7FEB352D % 2**32
    number = (number ^ number >> 15) * 0x846CA68B % 2**32
    return number ^ number >> 16


def non_causal_attention(view: LayerView, size: int, among: Tensor) -> Tensor:
    """As the authors' code runs: the row filled up with zeros, chunk by chunk."""
    scores = blank(view)
    for b, h in heads(view):
        there = slots(among[b, h])
        asking = [view.query_positions[b].tolist().index(int(view.positions[b, h, t])) for t in there]
        chunks = -(-len(there) // size)
        total = torch.zeros(chunks * size, dtype=torch.float64)
        keys = torch.zeros(chunks * size, view.keys.shape[-1], dtype=torch.float64)
        keys[: len(there)] = view.keys[b, h, there].double()
        for g in range(view.group):
            queries = torch.zeros_like(keys)
            queries[: len(there)] = view.queries[b, h * view.group + g, asking].double()
            for chunk in range(chunks):
                part = slice(chunk * size, (chunk + 1) * size)
                total[part] += (queries[part] @ keys[part].T).softmax(-1).sum(0) / view.group
        each = [float(total[i] * view.values[b, h, t].double().norm()) for i, t in enumerate(there)]
        for i, t in enumerate(there):
            scores[b, h, t] = math.fsum(each[max(i - 1, 0) : i + 2]) / 3
    return scores


ZOO: dict[str, tuple[Any, Callable[[LayerView], Tensor]]] = {
    "h2o": (H2O(), lambda view: h2o(view, "sum")),
    "h2o, mean": (H2O(accumulate="mean"), lambda view: h2o(view, "mean")),
    "tova": (TOVA(), tova),
    "finch": (Finch(window=8), lambda view: finch(last(view, 8))),
    "scissorhands": (Scissorhands(), scissorhands),
    "non-causal": (NonCausalAttention(), lambda view: non_causal_attention(view, 256, view.valid)),
    "non-causal, 16": (NonCausalAttention(chunk_size=16), lambda view: non_causal_attention(view, 16, view.valid)),
    "keyformer": (Keyformer(), lambda view: keyformer(view, 1.0, 0)),
    "keyformer, warm": (Keyformer(tau_init=2.0, seed=2**40 + 7), lambda view: keyformer(view, 2.0, 2**40 + 7)),
}


def assert_same(kept: list[int], want: Tensor) -> None:
    """Assert that the best of a head are kept, ties aside: scores that float32 need not tell apart."""
    best = want.nan_to_num(nan=-torch.inf).sort(descending=True, stable=True)
    first = best.indices[: len(kept)].sort().values.tolist()
    if kept != first:
        near = best.values[0].abs() * 2**-20
        assert torch.allclose(want[kept].sort().values, want[first].sort().values, rtol=0, atol=float(near)), (
            kept,
            first,
        )


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("length", [24, 61, 150])
@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("shape", [(6, 2), (3, 3)], ids=["gqa", "mha"])
@pytest.mark.parametrize("name", ZOO)
def test_it_keeps_what_its_twin_keeps(
    name: str, shape: tuple[int, int], size: int, length: int, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 8000)  # many blocks, the last one not full
    scorer, twin = ZOO[name]
    view = make_view(length, batch=2, heads=shape, sizes=(size, size), slots=length, window=length, padding=padding)
    policy = Policy(name="test", score=scorer, budget=Budget(tokens=length // 4), select=TopK(sinks=0, recent=0))
    (plan,) = policy.plan([view]).tolist()
    want = twin(view)
    for b, h in heads(view):
        assert len(plan[b][h]) == length // 4
        assert_same(plan[b][h], want[b, h])


@pytest.mark.parametrize("name", [name for name in ZOO if name not in ("tova", "finch")])
def test_no_more_than_a_block_is_held_of_the_attention_of_all_queries(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 2**17)
    scorer = ZOO[name][0]
    views = [make_view(batch=1, heads=(2, 1), sizes=(16, 16), slots=n, window=n) for n in (1024, 2048)]
    small, large = (peak(lambda view=view: scorer(view)) for view in views)
    assert large < 2.2 * small


def test_a_block_of_queries_is_as_large_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_view(batch=2, heads=(6, 2), slots=40, window=25)
    monkeypatch.setattr(blocks, "BLOCK", 2 * 6 * 40 * 10)
    assert [block.logits.shape[3] for block in blocks.attention_blocks(view)] == [10, 10, 5]


def test_tova_gives_heads_that_hold_other_tokens_one_score_a_token() -> None:
    keys = torch.zeros(1, 2, 2, 1)
    positions = torch.tensor([[[0, 2], [1, 2]]], dtype=torch.int32)
    at = torch.tensor([[2]])
    view = LayerView(keys=keys, values=keys, queries=torch.ones(1, 2, 1, 1), positions=positions, query_positions=at)
    assert TOVA()(view).tolist() == [[[0.25, 0.5], [0.25, 0.5]]]


def test_scissorhands_counts_the_last_queries_alone() -> None:
    view = make_view(slots=40, window=40)
    policy = Policy(name="test", score=Scissorhands(w=8), budget=Budget(keep=0.5))
    assert torch.equal(policy.scores(view)[0], Scissorhands(w=8)(last(view, 8)))


def test_keyformers_noise_is_gumbel_noise_for_each_head_query_and_slot() -> None:
    numbers = torch.arange(1, 65, dtype=torch.int32)
    noise = _gumbel(_mixed(_mixed(_mixed(numbers[:, None]) ^ numbers)[..., None] ^ _mixed(numbers))).double()
    count = noise.numel()
    deviation = math.pi / 6**0.5
    assert abs(float(noise.mean()) - 0.5772156649) < 5 * deviation / count**0.5
    # The fourth central moment of the distribution is 5.4 times the square of its variance.
    assert abs(float(noise.var()) - deviation**2) < 5 * deviation**2 * (4.4 / count) ** 0.5
    for axis in range(3):
        one, next_one = noise.narrow(axis, 0, 63), noise.narrow(axis, 1, 63)
        apart = ((one - noise.mean()) * (next_one - noise.mean())).mean() / deviation**2
        assert abs(float(apart)) < 5 / count**0.5


def expected_attention(attention: Any, hidden: Tensor, keys: Tensor, values: Tensor, turn: Tensor) -> Tensor:
    """Return what one row's tokens score, float64 ``[Hkv, n]``; `turn` is the mean rotation ahead, ``[D, D]``."""
    size = attention.head_dim
    queries = attention.q_proj(hidden).view(len(hidden), -1, size)[4:]
    group = queries.shape[1] // len(keys)
    scores = torch.zeros(len(keys), len(hidden) - 4, dtype=torch.float64)
    for head in range(queries.shape[1]):
        own = queries[:, head]
        mean = own.mean(0)
        covariance = sum(torch.outer(query - mean, query - mean) for query in own) / len(own)
        covariance = turn @ covariance @ turn.T
        found = [k @ turn @ mean / size**0.5 + k @ covariance @ k / (2 * size) for k in keys[head // group, 4:]]
        scores[head // group] += torch.stack(found).softmax(0) / group
    scores *= values[:, 4:].norm(dim=-1)
    return torch.cat([torch.full((len(keys), 4), torch.inf, dtype=torch.float64), scores], dim=-1)


def mean_turn(rotary: Any, positions: Tensor, size: int) -> Tensor:
    """Return the mean of the rotation matrices at some positions, float64 ``[D, D]``."""
    cos, sin = (table[0] for table in rotary(torch.zeros(1, dtype=torch.float64), positions[None]))
    turn = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size // 2):
        j = i + size // 2
        turn[i, i] = turn[j, j] = cos[:, i].mean()
        turn[j, i], turn[i, j] = sin[:, i].mean(), -sin[:, i].mean()
    return turn


@torch.no_grad()
@pytest.mark.agreement("expected-attention", "twin")
@pytest.mark.parametrize("length", [24, 70, 150])
@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("shape", ["llama-gqa", "llama-mha"])
def test_expected_attention_keeps_what_its_twin_keeps(shape: str, size: int, length: int) -> None:
    """In a model, which it needs; one row alone and one with padding before it."""
    model = tiny(shape, torch.float64, head_dim=size, vocab_size=256)
    ids = torch.stack([torch.randperm(256, generator=torch.Generator().manual_seed(row))[:length] for row in range(2)])
    mask = torch.stack([torch.ones(length), torch.arange(length) >= length // 3]).long()
    given: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: given.append(kwargs["hidden_states"]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    full, evicted = DynamicCache(), DynamicCache()
    model(ids, attention_mask=mask, **{cache_name(model): full})
    for hook in hooks:
        hook.remove()
    scorer = ExpectedAttention(n_future_positions=48)
    tokens = length // 4
    policy = Policy(name="test", score=scorer, budget=Budget(tokens=tokens), select=TopK(sinks=0, recent=0))
    with policy.on(model):
        model(ids, attention_mask=mask, **{cache_name(model): evicted})
    turn = mean_turn(model.model.rotary_emb, torch.arange(length, length + 48), size)
    for layer, hidden, stored, left in zip(model.model.layers, given, full.layers, evicted.layers, strict=True):
        for row in range(2):
            there = mask[row].bool()
            want = torch.full((len(stored.keys[row]), length), torch.nan, dtype=torch.float64)
            want[:, there] = expected_attention(
                layer.self_attn, hidden[row, there], stored.keys[row, :, there], stored.values[row, :, there], turn
            )
            for head, kept in enumerate(left.held[row]):
                assert len(kept) == tokens
                assert_same(kept, want[head])


@torch.no_grad()
def test_expected_attention_refuses_what_it_cannot_score() -> None:
    ids = torch.arange(1, 33)[None]
    policy = Policy(name="test", score=ExpectedAttention(), budget=Budget(tokens=16))
    gap = torch.arange(32) + 5 * (torch.arange(32) > 20)
    for model, more, says in (
        (tiny("gpt2"), {}, "before RoPE"),
        (tiny(), {"position_ids": gap[None]}, "positions that rise by one"),
    ):
        with pytest.raises(UnsupportedModelError, match=says), policy.on(model):
            model(ids, **{cache_name(model): DynamicCache()}, **more)


def test_published_settings() -> None:
    """Those of the papers and of their authors' code."""
    assert kvpolicy.load("h2o").score == H2O(accumulate="sum")
    assert kvpolicy.load("h2o").select == TopK(sinks=0, recent=0.5)
    assert kvpolicy.load("finch").score == Finch(window=32)
    assert kvpolicy.load("finch").select == TopK(sinks=0, recent=32)
    assert kvpolicy.load("tova").score == TOVA()
    assert kvpolicy.load("tova").select == TopK(sinks=0, recent=0)
    assert kvpolicy.load("tova").decode == Decode(every=1)
    assert kvpolicy.load("scissorhands").score == Scissorhands(w=400)
    assert kvpolicy.load("scissorhands").select == TopK(sinks=0, recent=10)
    assert kvpolicy.load("keyformer").score == Keyformer(tau_init=1.0)
    assert kvpolicy.load("keyformer").select == TopK(sinks=0, recent=0.3)
    assert kvpolicy.load("non-causal-attention").score == NonCausalAttention(chunk_size=256)
    assert kvpolicy.load("compactor").score == Fixed(
        inputs=[Leverage(sketch=48, among="candidates"), NonCausalAttention(chunk_size=256, among="candidates")],
        weights=[0.35, 1.0],
        normalize="z-score",
        over="layer",
    )
    assert kvpolicy.load("compactor").select == TopK(sinks=8, recent=4)
    assert kvpolicy.load("expected-attention").score == ExpectedAttention(n_future_positions=512, n_sink=4)
    assert kvpolicy.load("expected-attention").select == TopK(sinks=4, recent=0)


def test_a_chunk_far_longer_than_the_prompt_takes_no_more_memory() -> None:
    """Slots that are not there have an even share of each query, whatever their number."""
    view = make_view(slots=40, window=40, heads=(4, 2))
    scores = NonCausalAttention(chunk_size=10**9)(view.limit(NonCausalAttention.needs, "test"))
    assert bool(scores[view.valid].isfinite().all())


@pytest.mark.parametrize("padding", ["none", "ragged"])
def test_the_attention_of_a_window_is_found_for_some_heads_at_a_time(
    padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = make_view(heads=(10, 5), slots=200, sizes=(16, 16), window=64, padding=padding)
    whole = window_attention(view)
    before = peak(lambda: window_attention(view))
    # Two of the five, so that one is left over.
    monkeypatch.setattr(attention, "BLOCK", 2 * len(view.keys) * view.group * 64 * view.slots)
    torch.testing.assert_close(window_attention(view), whole)
    assert peak(lambda: window_attention(view)) < before / 2
