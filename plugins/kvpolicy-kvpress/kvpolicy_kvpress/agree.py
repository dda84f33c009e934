"""Whether a wrapped press keeps what the press itself does: both on the same tiny random models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy import Budget, Policy
from kvpolicy.selectors.top_k import TopK
from kvpolicy.testing.models import tiny
from kvpolicy_kvpress.make import make, reads
from kvpolicy_kvpress.scorer import KVPress, seed_of

SETTINGS: dict[str, dict[str, Any]] = {
    "CapPress": {"n_future_positions": 32},
    "CompactorPress": {"chunk_size": 32},
    "CriticalKVPress": {"press": {"press": "SnapKVPress", "settings": {"window_size": 8}}},
    "ExpectedAttentionPress": {"n_future_positions": 32},
    "ExpectedAttentionStatsPress": {"n_future_positions": 32},
    "LagKVPress": {"lag_size": 16},
    "NonCausalAttnPress": {"chunk_size": 32},
    "SnapKVPress": {"window_size": 8},
}
"""What differs from a press's own defaults, which are made for longer prompts."""


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        shape: of the model, one of `kvpolicy.testing.models.SHAPES`.
        head_dim: its head size.
        length: tokens of the prompt.
        ratio: the share evicted.
    """

    shape: str
    head_dim: int
    length: int
    ratio: float

    @property
    def name(self) -> str:
        """What the model is called."""
        return f"{self.shape}-{self.head_dim}"

    @property
    def kept(self) -> int:
        """How many slots of a head kvpress keeps."""
        return max(1, int(self.length * (1 - self.ratio)))

    def model(self, implementation: str = "sdpa") -> PreTrainedModel:
        """Return the model, in float64, so that both ways to score round alike."""
        settings = {"head_dim": self.head_dim, "vocab_size": 256, "attn_implementation": implementation}
        model = tiny(self.shape, dtype=torch.float64, **settings)
        # By which a press finds the weights that were trained for it.
        model.config.name_or_path = self.name
        return model

    def ids(self) -> Tensor:
        """Return the prompt, int64 ``[1, T]``: every token once, as keys of one token would tie before RoPE."""
        return torch.randperm(256, generator=torch.Generator().manual_seed(self.length))[None, : self.length]


CASES = [
    Case(shape, size, length, ratio)
    for (shape, size), (length, ratio) in itertools.product(
        itertools.product(("llama-gqa", "qwen3"), (64, 80, 128)), ((97, 0.5), (230, 0.75))
    )
]


def agrees(name: str, case: Case) -> bool:
    """Return whether a press and its scorer keep the same slots in every layer and head; equal scores may swap.

    Weights are read from folders below the working directory (see `kvpolicy_kvpress.weights`).
    """
    settings = SETTINGS.get(name, {})
    if name == "ExpectedAttentionStatsPress":
        settings = {**settings, "stats_folder": f"stats-{case.name}"}
    ratio = case.ratio if "compression_ratio" in reads(name, settings) else None
    scorer = KVPress(press=name, settings=settings, compression_ratio=ratio)
    policy = Policy(name=name, score=scorer, budget=Budget(tokens=case.kept), select=TopK(sinks=0, recent=0))
    model = case.model("eager" if "attention weights" in reads(name, settings) else "sdpa")
    press = make(name, settings, ratio)
    press.compression_ratio = case.ratio
    return same_slots(press, policy, model, case, seed=scorer.seed)


def same_slots(press: Any, policy: Policy, model: PreTrainedModel, case: Case, *, seed: int = 0) -> bool:
    """Return whether a press and a policy keep the same slots in every layer and head; equal scores may swap.

    Args:
        press: whose scores are seeded by `seed`, as its scorer's are.
        policy: that keeps as many.
        model: both run on it.
        case: what it reads.
        seed: of the press's random numbers.
    """
    scores = _watched(press, seed)
    full, theirs, ours = DynamicCache(), DynamicCache(), DynamicCache()
    with press(model):
        read(model, case, theirs)
    read(model, case, full)
    with policy.on(model):
        read(model, case, ours)
    layers: Iterator[tuple[Any, ...]] = zip(scores, full.layers, theirs.layers, ours.layers, strict=True)
    return all(_same(score, found(one.keys, two.keys), torch.tensor(three.held)) for score, one, two, three in layers)


def _watched(press: Any, seed: int) -> list[Tensor]:
    """Seed a press's random numbers as those of its scorer are, and return the list that its scores will be in."""
    seen: list[Tensor] = []
    score = press.score

    def watched(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        torch.manual_seed(seed_of(seed, module.layer_idx))
        seen.append(score(module, *args, **kwargs))
        return seen[-1]

    press.score = watched
    return seen


@torch.no_grad()
def read(model: PreTrainedModel, case: Case, cache: DynamicCache) -> None:
    """Have a model read a case's prompt into a cache."""
    model(case.ids(), past_key_values=cache)


def found(keys: Tensor, kept: Tensor) -> Tensor:
    """Return which of `keys` ``[1, H, T, D]`` each of `kept` ``[1, H, K, D]`` is, int64 ``[1, H, K]``, rising."""
    alike = (kept[:, :, :, None] == keys[:, :, None]).all(-1)
    if not bool((alike.sum(-1) == 1).all()):
        raise RuntimeError("expected each kept key to be one of the prompt's")
    return alike.int().argmax(-1).sort(-1).values


def _same(scores: Tensor, own: Tensor, wrapped: Tensor) -> bool:
    """Return whether two selections are one, up to slots that score the same in float32, as all scores are here."""
    if own.shape != wrapped.shape:
        return False
    either = (scores.float().gather(2, kept).sort(-1).values for kept in (own, wrapped))
    return torch.equal(own, wrapped) or torch.equal(*either)
