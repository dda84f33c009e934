"""The zoo's budgets: each shares slots out as a slow twin in exact numbers, written from its formula, does."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from test_zoo_selection import CASES
from torch import Tensor
from twins import slots
from views import make_view

import kvpolicy
from kvpolicy.budgets.adaptive import AdaptiveHeads
from kvpolicy.budgets.head_table import HeadTable, HeadTotals
from kvpolicy.budgets.schedule import ScheduleLayers
from kvpolicy.budgets.threshold import ThresholdHeads
from kvpolicy.errors import SettingError
from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.key_norm import KeyNorm
from kvpolicy.selectors.top_k import TopK
from kvpolicy.types import LayerView


def schedule(shape: str, first: Fraction, mean: int, available: int, layers: int) -> list[int]:
    """Exact but for the cosine, which is taken to a millionth."""
    swing = (1 if first >= 1 else -1) * min(abs(first - 1) * mean, available - mean, mean - 1)
    exact = []
    for layer in range(layers):
        x = Fraction(layer, layers - 1) if layers > 1 else Fraction(1, 2)
        if shape == "linear":
            curve = Fraction(round((1 - 2 * x) * 1_000_000), 1_000_000)
        else:
            curve = Fraction(round(math.cos(math.pi * x) * 1_000_000), 1_000_000)
        exact.append(mean + swing * curve)
    whole = [math.floor(part) for part in exact]
    up = sorted(range(layers), key=lambda layer: (whole[layer] - exact[layer], layer))
    for layer in up[: layers * mean - sum(whole)]:
        whole[layer] += 1
    return whole


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize("first", ["0", "0.7", "1", "1.5", "1.999", "2"])
def test_schedule_equals_its_twin(shape: str, first: str) -> None:
    allocate = ScheduleLayers(shape=shape, first=float(first))
    for layers in (1, 2, 3, 12, 31):
        for tokens in (1, 2, 17, 100, 300):
            available = torch.arange(1, 301, 13)
            got = allocate(torch.full_like(available, tokens), available, layers).tolist()
            for row, there in zip(got, available.tolist(), strict=True):
                assert row == schedule(shape, Fraction(first), min(tokens, there), there, layers)


def test_schedule_is_exact_for_long_prompts() -> None:
    tokens, available = torch.tensor([999_983]), torch.tensor([10_000_019])
    got = ScheduleLayers(shape="cosine", first=1.75)(tokens, available, 127)[0].tolist()
    assert got == schedule("cosine", Fraction("1.75"), 999_983, 10_000_019, 127)


def webster(parts: list[float], least: list[int], most: list[int], total: int) -> list[int]:
    """One slot at a time."""
    got = list(least)
    while sum(got) < total:
        open_ = [i for i in range(len(parts)) if got[i] < most[i]]
        got[max(open_, key=lambda i: (parts[i] / (got[i] + 0.5), -got[i], -i))] += 1
    return got


TABLE = [[0.2, 0.0, 3.0], [1.0, 1.0, 0.5], [0.1, 0.05, 0.0]]


def parts_of(table: list[list[float]], beta: float) -> list[list[float]]:
    """HeadKV: what is not shared, and each head's share of the pool, over the mean budget."""
    total, count = math.fsum(map(math.fsum, table)), sum(map(len, table))
    return [[1 - 1 / beta + score / total * count / beta for score in row] for row in table]


@pytest.mark.parametrize("beta", [1.0, 1.2, 3.0])
@pytest.mark.parametrize("padding", ["none", "left", "ragged"])
def test_head_table_equals_its_twin(padding: str, beta: float) -> None:
    parts = parts_of(TABLE, beta)
    for layer, tokens in itertools.product(range(3), (7, 12, 13, 21, 22, 30, 41, 200)):
        view = make_view(layer, slots=50, heads=(6, 3), padding=padding)
        budget = torch.tensor([tokens, max(tokens // 2, 6), tokens])
        view = view.decide(view.valid & ~TopK(sinks=2, recent=3).protect(view, budget))
        view = dataclasses.replace(view, layer=layer)
        got = HeadTable(scores=TABLE, beta=beta)(view, torch.zeros(view.valid.shape), budget).tolist()
        for b, row in enumerate(got):
            most = view.valid[b].sum(-1).tolist()
            least = [max(int((view.valid & ~view.candidates)[b, h].sum()), 1) for h in range(3)]
            assert row == webster(parts[layer], least, most, min(3 * int(budget[b]), sum(most)))


@pytest.mark.parametrize("beta", [1.0, 1.2, 3.0])
def test_head_totals_equals_its_twin(beta: float) -> None:
    parts = [math.fsum(row) / 3 for row in parts_of(TABLE, beta)]
    tokens, available = torch.tensor([1, 5, 40, 300, 90]), torch.tensor([9, 9, 100, 200, 100])
    got = HeadTotals(scores=TABLE, beta=beta)(tokens, available, 3).tolist()
    for row, budget, there in zip(got, tokens.tolist(), available.tolist(), strict=True):
        assert row == webster(parts, [1] * 3, [there] * 3, 3 * min(budget, there))


def test_both_together_are_the_allocation_of_headkv() -> None:
    """Each head within a slot of ``K (1 - 1/beta) + S K L H / beta``, which its code rounds head by head."""
    parts = parts_of(TABLE, 1.2)
    tokens, available = torch.tensor([400]), torch.tensor([9000])
    budgets = HeadTotals(scores=TABLE)(tokens, available, 3)
    for layer in range(3):
        nothing = torch.zeros(1, 3, 9000, 1)
        view = LayerView(keys=nothing, values=nothing, layer=layer)
        got = HeadTable(scores=TABLE)(view, nothing[..., 0], budgets[:, layer])[0].tolist()
        assert all(abs(have - 400 * part) < 1 for have, part in zip(got, parts[layer], strict=True))


@pytest.mark.parametrize("spare", [0, 9])
@pytest.mark.parametrize("scores", [[[1, 0], [0, 1]], [[0.9, 0.1], [0.2, 0.7]]])
def test_duo_attention_keeps_all_in_retrieval_heads_and_sinks_and_recent_tokens_in_the_others(
    scores: list[list[float]], spare: int
) -> None:
    """With a budget of exactly that, or of more."""
    views = [dataclasses.replace(make_view(layer, slots=50, heads=(4, 2), batch=1), layer=layer) for layer in range(2)]
    budget = Budget(tokens=(50 + 12) // 2 + spare, heads=HeadTable(scores=scores, streaming=0.5))
    plan = Policy(name="duo", score=KeyNorm(), budget=budget, select=TopK(sinks=4, recent=8)).plan(views)
    ends = [0, 1, 2, 3, *range(42, 50)]
    assert plan.tolist() == [[[list(range(50)), ends]], [[ends, list(range(50))]]]


@pytest.mark.parametrize("streaming", [0.0, 0.2, 0.45, 1.0])
@pytest.mark.parametrize("padding", ["none", "left", "ragged"])
def test_streaming_heads_keep_what_is_protected_and_the_others_share_the_rest(padding: str, streaming: float) -> None:
    parts = parts_of(TABLE, 1.2)
    every = sorted((score, layer, head) for layer, row in enumerate(TABLE) for head, score in enumerate(row))
    streams = {(layer, head) for _, layer, head in every[: round(9 * streaming)]}
    for layer, tokens in itertools.product(range(3), (7, 13, 30, 200)):
        view = make_view(layer, slots=50, heads=(6, 3), padding=padding)
        budget = torch.tensor([tokens, max(tokens // 2, 6), tokens])
        view = view.decide(view.valid & ~TopK(sinks=2, recent=3).protect(view, budget))
        view = dataclasses.replace(view, layer=layer)
        got = HeadTable(scores=TABLE, streaming=streaming)(view, torch.zeros(view.valid.shape), budget).tolist()
        for b, row in enumerate(got):
            least = [max(int((view.valid & ~view.candidates)[b, h].sum()), 1) for h in range(3)]
            held = view.valid[b].sum(-1).tolist()
            most = [least[h] if (layer, h) in streams else held[h] for h in range(3)]
            assert row == webster(parts[layer], least, most, min(3 * int(budget[b]), sum(most)))


def test_query_heads_that_share_a_kv_head_count_their_mean() -> None:
    view, nothing, tokens = make_view(heads=(6, 3)), torch.zeros(3, 3, 24), torch.tensor([9, 9, 9])
    of_queries = [[1.0, 2.0, 0.5, 0.25, 0.0, 1.0]]
    got, want = (HeadTable(scores=table)(view, nothing, tokens) for table in (of_queries, [[1.5, 0.375, 0.5]]))
    assert torch.equal(got, want)


def test_tables_are_read_from_the_files_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers outside [0, 1] in a .tsv are what training left of 0 and 1."""
    (tsv := tmp_path / "heads.tsv").write_text("-9.58e-05\t5.0e-01\n1.000e+00\t1.25e+00\n")
    trials = {"1-1": [1, 0.5], "0-0": [0, 0], "0-1": [0.25], "1-0": [0.5, 0.25]}  # in no order
    (js := tmp_path / "heads.json").write_text(json.dumps(trials))
    for path, scores in ((tsv, [[0, 0.5], [1, 1]]), (js, [[0, 0.25], [0.375, 0.75]])):
        (file := tmp_path / "mine.yaml").write_text(
            f"score: key-norm\nbudget:\n  tokens: 64\n  layers: {{type: head-totals, file: {path.name}}}\n"
            f"  heads: {{type: head-table, file: {path.name}}}\n"
        )
        monkeypatch.chdir("/")
        found = kvpolicy.load(file)
        assert (found.budget.layers._table, found.budget.heads._table) == (as_table(scores),) * 2
        assert kvpolicy.load(found.to_dict()) == found
        view = dataclasses.replace(make_view(heads=(4, 2)), layer=1)
        given = (view, torch.zeros(view.valid.shape), torch.tensor([9, 9, 9]))
        assert torch.equal(found.budget.heads(*given), HeadTable(scores=scores)(*given))


def as_table(scores: list[list[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, scores))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("heads.csv", "1,2", r"each layer, got '.*heads\.csv'"),
        ("heads.tsv", "", "head of each layer, 0 or more"),
        ("heads.tsv", "1\tnan", "0 or more"),
        ("heads.tsv", "1\tmuch", "which cannot be read: ValueError: could not convert"),
        ("heads.tsv", "1\t1\n1", "expected as many scores in each layer"),
        ("heads.json", "[1]", "which cannot be read: AttributeError"),
        ("heads.json", "{}", "which cannot be read: ValueError"),
        ("heads.json", '{"0-0": [-1]}', "0 or more"),
        ("heads.json", '{"0-0": []}', "which cannot be read: StatisticsError"),
        ("heads.json", '{"0-0": [1e308, 1e308]}', "which cannot be read: OverflowError"),
        ("heads.json", "[" * 100_000, "which cannot be read: RecursionError"),
        ("heads.json", '{"0-1": [1]}', "which cannot be read: KeyError: '0-0'"),
    ],
)
@pytest.mark.parametrize("cls", [HeadTable, HeadTotals])
def test_a_file_of_something_else_is_refused(cls: Any, name: str, text: str, says: str, tmp_path: Path) -> None:
    (path := tmp_path / name).write_text(text)
    with pytest.raises(SettingError, match=says):
        cls(file=path)


@pytest.mark.parametrize("cls", [HeadTable, HeadTotals])
def test_a_table_is_given_once(cls: Any, tmp_path: Path) -> None:
    for given in ({}, {"scores": [[1]], "file": tmp_path / "heads.tsv"}):
        with pytest.raises(SettingError, match="expected exactly one of 'scores' and 'file'"):
            cls(**given)
    with pytest.raises(SettingError, match=r"file: expected a \.tsv .*, found none"):
        cls(file=tmp_path / "lost.tsv")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"scores": [[1, 2], [3]]}, "as many scores in each layer"),
        ({"scores": [[0, 0]]}, "a score above 0"),
        ({"scores": [[1, -1]]}, "greater than or equal to 0"),
        ({"scores": []}, "at least 1"),
        ({"scores": [[]]}, "at least 1"),
        ({"scores": [[1]], "beta": 0.5}, "beta"),
    ],
)
@pytest.mark.parametrize("cls", [HeadTable, HeadTotals])
def test_a_wrong_table_is_refused(cls: Any, given: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        cls(**given)


def test_a_table_of_another_model_is_refused() -> None:
    view, scores = make_view(heads=(6, 3)), torch.zeros(3, 3, 24)
    for table, shared in (([[1, 2]], False), (TABLE[:1], True)):
        with pytest.raises(SettingError, match="expected a table for"):
            HeadTable(scores=table)(dataclasses.replace(view, shared=shared), scores, torch.tensor([9, 9, 9]))
    with pytest.raises(SettingError, match="expected a table for layer 3"):
        HeadTable(scores=TABLE)(dataclasses.replace(view, layer=3), scores, torch.tensor([9, 9, 9]))
    with pytest.raises(SettingError, match="the heads of 4 layers"):
        HeadTotals(scores=TABLE)(torch.tensor([9]), torch.tensor([9]), 4)


def threshold(view: LayerView, scores: Tensor, tokens: list[int], least: float, floor: Fraction) -> list[list[int]]:
    lengths = []
    for b, budget in enumerate(tokens):
        won, rest = [], []
        for h in range(view.valid.shape[1]):
            protected = int((view.valid & ~view.candidates)[b, h].sum())
            queue = [math.inf] * protected
            queue += sorted((float(scores[b, h, t]) for t in slots(view.candidates[b, h])), reverse=True)
            have = min(max(protected, math.ceil(floor * budget), 1), len(queue))
            won.append(have)
            rest += [(-score, have + i, h) for i, score in enumerate(queue[have:]) if score >= least]
        for _, _, h in sorted(rest)[: max(len(won) * budget - sum(won), 0)]:
            won[h] += 1
        lengths.append(won)
    return lengths


@pytest.mark.parametrize("floor", ["0", "0.07", "0.5"])
@pytest.mark.parametrize("case", CASES)
def test_threshold_equals_its_twin(case: str, floor: str) -> None:
    view = make_view(**CASES[case])
    scores = (torch.randn(view.valid.shape, generator=torch.Generator().manual_seed(3)) * 4).round() / 4
    for budget in (1, 4, 14, 33, 200):
        tokens = torch.full((len(view.valid),), budget)
        decided = view.decide(view.valid & ~TopK(sinks=1, recent=2).protect(view, tokens))
        given = scores.masked_fill(~decided.candidates, torch.nan)
        for least in (-9.0, 0.25, 1.0, 9.0):
            got = ThresholdHeads(threshold=least, floor=float(floor))(decided, given, tokens).tolist()
            assert got == threshold(decided, given, tokens.tolist(), least, Fraction(floor))


def test_a_threshold_that_all_pass_leaves_the_competition_of_ada_kv() -> None:
    view = make_view(slots=40, sinks=2, recent=3)
    scores, tokens = torch.randn(view.valid.shape), torch.full((3,), 12)
    got = ThresholdHeads(threshold=-99, floor=0.2)(view, scores, tokens)
    assert torch.equal(got, AdaptiveHeads(floor=0.2)(view, scores, tokens))
