"""Every policy that is shipped keeps what its reference keeps, on random tensors, and docs/agreement.json says so."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import references
import torch
from test_zoo_attention import assert_same
from torch import nn
from views import change, make_view

import kvpolicy
from kvpolicy.loading import built_in
from kvpolicy.policy import Policy
from kvpolicy.registry import Registry
from kvpolicy.selectors.top_k import TopK
from kvpolicy.types import Call, LayerView

DOCS = Path(__file__).parents[1] / "docs"
KEPT = 48

FIT: dict[str, dict[str, Any]] = {
    "compactor": {
        "score": {
            "inputs": [
                {"type": "leverage", "among": "candidates"},
                {"type": "non-causal-attention", "chunk_size": 32, "among": "candidates"},
            ]
        }
    },
    "critical-kv": {"score": {"first": 8}},
    "lag-kv": {"score": {"lag": 16}},
    "manifold-kv-windowed": {"score": {"window": 32}},
    "non-causal-attention": {"score": {"chunk_size": 32}},
    "scissorhands": {"score": {"w": 40}},
}
"""What differs from a policy's own settings, which are made for longer prompts."""

BUDGETS: dict[str, Any] = {"squeeze": {"tokens": KEPT, "layers": {"type": "squeeze", "groups": 2}}}
"""Of two layers there are no three groups."""

WITHOUT = {
    "expected-attention": "reads a model's rotary embedding: compared in a model, by test_zoo_attention.py",
    "random": "its numbers are no paper's",
}
"""Policies without a reference here, and why."""

SHIPPED = [entry.name for entry in Registry(built_in()).entries("policy")]


@dataclass(frozen=True)
class Case:
    """One run: two layers of two rows, the second with padding before it where there is any.

    Args:
        heads: Hq and Hkv.
        size: of a head.
        length: slots.
        padding: "none" or "left".
    """

    heads: tuple[int, int]
    size: int
    length: int
    padding: str

    def __str__(self) -> str:
        return f"{self.heads[0]}/{self.heads[1]} heads of {self.size}, {self.length} slots, padding {self.padding}"


CASES = [
    Case(heads, size, length, padding)
    for heads, size, (length, padding) in itertools.product(
        ((6, 2), (3, 3)), (64, 80, 128), ((90, "none"), (130, "left"))
    )
]


@functools.cache
def views(case: Case) -> list[LayerView]:
    sizes = (case.size, case.size)
    given = {"heads": case.heads, "sizes": sizes, "slots": case.length, "window": case.length, "padding": case.padding}
    return [layer_view(layer, given) for layer in range(2)]


def layer_view(layer: int, given: dict[str, Any]) -> LayerView:
    view = make_view(layer, batch=2, **given)
    module = nn.Module()
    with torch.random.fork_rng():
        torch.manual_seed(layer)
        module.o_proj = nn.Linear(view.queries.shape[1] * view.values.shape[-1], 48)
    call = Call(module, torch.zeros(2, view.slots, 48))
    return dataclasses.replace(change(view, call=call), layer=layer)


def policy(name: str) -> Policy:
    budget = None if name == "full" else BUDGETS.get(name, KEPT)
    return kvpolicy.load(name, budget=budget, **FIT.get(name, {}))


def expect_alike(mine: Policy, reference: Policy, case: Case) -> None:
    """Assert that a policy keeps what the twins of another one's parts keep; equal scores may swap."""
    got = mine.plan(views(case)).tolist()
    want, scores = references.kept(reference, views(case))
    for layer, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        for b, h in itertools.product(range(2), range(case.heads[1])):
            if ours[b][h] != theirs[b][h]:
                # Which of two equal slots of a set comes first changes the others.
                assert isinstance(mine.select, TopK) and len(ours[b][h]) == len(theirs[b][h])
                decided = scores[layer][b, h]
                free = [t for t in ours[b][h] if not decided[t].isnan()]
                assert len(ours[b][h]) - len(free) == sum(bool(decided[t].isnan()) for t in theirs[b][h])
                assert_same(free, decided)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.agreement(name, "twin")) for name in SHIPPED if name not in WITHOUT],
)
def test_a_shipped_policy_keeps_what_its_reference_keeps(name: str, case: Case) -> None:
    expect_alike(policy(name), policy(name), case)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("snapkv", "snapkv-w8"),
        ("cake", "snapkv"),
        ("dynamic-kv", "snapkv"),
        ("squeeze", "h2o"),
        ("h2o", "keyformer"),
        ("compactor", "leverage"),
        ("finch", "snapkv"),
        ("ada-kv", "snapkv"),
        ("pyramidkv", "snapkv-linear"),
        ("ecokv", "ecokv-values"),
        ("snapkv-mmr", "snapkv-k-centre"),
        ("chunkkv", "snapkv-pages"),
    ],
)
def test_the_comparison_sees_another_policy(name: str, other: str) -> None:
    with pytest.raises(AssertionError):
        expect_alike(policy(name), policy(other), CASES[0])


def test_the_record_of_agreement_has_every_policy_and_every_run() -> None:
    """And no run in it disagrees: each of them is a test above, or one of the kvpress plugin's."""
    done = subprocess.run([sys.executable, DOCS / "agreement.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads((DOCS / "agreement.json").read_text())
    assert {name for name, found in record.items() if not found} == {"random"}
    assert all(counts["same"] == counts["runs"] for found in record.values() for counts in found.values())
