"""What every plugin is checked for in a model: that a policy with it holds its budget, a row as if it were alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvpolicy.errors import ConformanceError
from kvpolicy.plugin import needs_of
from kvpolicy.policy import Decode, Policy
from kvpolicy.session.decoder import cache_name
from kvpolicy.session.layers import evicting_layers
from kvpolicy.testing.checks.places import policy_with, tokens_for
from kvpolicy.testing.models import tiny

NEW = 4
"""How many tokens `generate` makes."""


def generate(plugin: Any) -> None:
    """A policy with it runs in `model.generate`, holds its budget, and leaves the model as it was.

    With a prompt beside a shorter one, padded; and with eviction at each new token, unless it reads `view.call`, or to
    score or merge what is known of prompts alone (`view.repetition`, `view.similarity`).
    """
    model = _model()
    weights = [parameter.clone() for parameter in model.parameters()]
    tokens = tokens_for(plugin)
    # The last new token is never read.
    _expect(_kept(model, policy_with(plugin), *_prompts(tokens)), tokens + NEW - 1, f"a budget of {tokens}")
    policy = policy_with(plugin)
    if not (policy.needs.call or (needs_of(policy.score) | policy.evicted.needs).late):
        evicting = policy_with(plugin, decode=Decode(every=1))
        _expect(_kept(model, evicting, *_prompts(tokens)), tokens, f"a budget of {tokens} and `decode: {{every: 1}}`")
    if not all(map(torch.equal, weights, model.parameters())):
        raise ConformanceError("in model.generate: it changes the model's weights")


def generate_alone(plugin: Any) -> None:
    """In `model.generate`, as much of a prompt is kept alone as beside a longer one: the same tokens."""
    model, policy = _model(), policy_with(plugin)
    ids, mask = _prompts(tokens_for(plugin))
    length = int(mask[1].sum())
    padding = len(mask[1]) - length
    together = [layer[1] for layer in _kept(model, policy, ids, mask)]
    alone = [layer[0] for layer in _kept(model, policy, ids[1:, padding:], mask[1:, padding:])]
    if [[[slot + padding for slot in head] for head in layer] for layer in alone] != together:
        raise ConformanceError(
            "in model.generate: expected the same tokens kept of a prompt alone as beside a longer one, with padding "
            "before it: leave slots outside view.valid, and other rows, out of every sum"
        )


def _model() -> Any:
    # In float64, where a row alone differs from itself in a batch by less than scores do from each other.
    return tiny(dtype=torch.float64)


def _prompts(tokens: int) -> tuple[Tensor, Tensor]:
    """Return the ids and the mask of two prompts, both longer than the budget; the second has padding before it."""
    long, short = tokens + 24, tokens + 8
    ids = torch.randint(1, 128, (2, long), generator=torch.Generator().manual_seed(0))
    mask = torch.stack([torch.arange(long) >= long - length for length in (long, short)])
    return ids, mask.long()


def _kept(model: Any, policy: Policy, ids: Tensor, mask: Tensor) -> list[list[list[list[int]]]]:
    """Return the tokens that are held in the end, by layer, row and head."""
    cache = DynamicCache(config=model.config)
    with policy.on(model):
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            **{cache_name(model): cache},
        )
    return [layer.held for layer in evicting_layers(cache)]


def _expect(kept: list[list[list[list[int]]]], want: int, case: str) -> None:
    for row in range(len(kept[0])):
        mean = [sum(map(len, layer[row])) / len(layer[row]) for layer in kept]
        if sum(mean) / len(mean) != want:
            raise ConformanceError(
                f"in model.generate: expected {want} slots a KV head, mean of heads and layers, after {NEW} new tokens "
                f"with {case}, got {mean} by layer"
            )


CHECKS = {"generate": generate, "generate_alone": generate_alone}
