"""Log-likelihoods of answers, on what a policy kept of their contexts. It knows tokens, and nothing of the harness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from einops import rearrange
from torch import Tensor

from kvpolicy.integrations.kept import Kept
from kvpolicy.policy import Policy
from kvpolicy.session.context import Context
from kvpolicy.session.decoder import cache_name, forward_names

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """An answer to score, in token ids, none of the three empty.

    Args:
        context: what the policy decides about.
        held_back: what follows it and is read with the evicted cache, before the answer.
        answer: what is scored.
    """

    context: tuple[int, ...]
    held_back: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Scored:
    """What came of a request.

    Args:
        index: which one it is.
        loglikelihood: of its answer, in nats.
        greedy: whether the model would have said the same.
    """

    index: int
    loglikelihood: float
    greedy: bool


def score(
    model: Any,
    policy: Policy,
    requests: Sequence[Request],
    *,
    batch_size: int,
    pad: int,
    kept: Kept,
    softmax_dtype: torch.dtype | None = None,
) -> Iterator[Scored]:
    """Yield the log-likelihood of each answer, given what `policy` keeps of its context and all that is held back.

    A context is read once for all requests that share it; each then has a copy of what was kept.

    Args:
        model: a causal language model.
        policy: what to keep.
        requests: the answers, in any order.
        batch_size: contexts read at once, and answers at once.
        pad: a token id, for padding.
        kept: counts what was kept.
        softmax_dtype: in which probabilities are computed; None for that of the logits.
    """
    sharing: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        sharing.setdefault(request.context, []).append(index)
    # The longest first: batches are of like length, and memory that does not suffice shows at once.
    for contexts in _chunks(sorted(sharing, key=len, reverse=True), batch_size):
        context = policy.compress(model, padded_left(contexts, pad))
        kept.add(context.report, [len(tokens) for tokens in contexts])
        asked = [(row, index) for row, tokens in enumerate(contexts) for index in sharing[tokens]]
        for part in _chunks(asked, batch_size):
            rows = torch.tensor([row for row, _ in part])
            answers = _answer(model, context, rows, [requests[index] for _, index in part], pad, softmax_dtype)
            for (_, index), (loglikelihood, greedy) in zip(part, answers, strict=True):
                yield Scored(index, loglikelihood, greedy)


def _answer(
    model: Any, context: Context, rows: Tensor, requests: Sequence[Request], pad: int, dtype: torch.dtype | None
) -> list[tuple[float, bool]]:
    """Return log-likelihood and greediness of the answers of `requests`, the i-th on row ``rows[i]`` of `context`."""
    read = [request.held_back + request.answer[:-1] for request in requests]
    # Padding on the right needs no mask: no token that counts comes after it.
    width = max(map(len, read))
    ids = torch.tensor([[*tokens, *[pad] * (width - len(tokens))] for tokens in read], device=context.tokens.ids.device)
    # Of what is held back, only the last token predicts a token of the answer.
    first = min(len(request.held_back) for request in requests) - 1
    names = forward_names(model)
    with torch.no_grad(), context.fork() as fork:
        fork.cache.reorder_cache(rows)  # type: ignore[arg-type]
        given: dict[str, Any] = {cache_name(model): fork.cache}
        if context.tokens.padded:
            mask = context.tokens.take_rows(rows).mask
            given["attention_mask"] = torch.cat([mask, torch.ones_like(ids)], dim=1)
            if "position_ids" in names:
                given["position_ids"] = mask.sum(-1, keepdim=True) + torch.arange(width, device=ids.device)
        if "logits_to_keep" in names:
            given["logits_to_keep"] = width - first
        logits = model(ids, **given).logits[:, first - width :]
    found = []
    for request, predicted in zip(requests, logits, strict=True):
        start = len(request.held_back) - 1 - first
        predicted = predicted[start : start + len(request.answer)]
        answer = torch.tensor(request.answer, device=predicted.device)
        each = predicted.log_softmax(-1, dtype=dtype).gather(-1, rearrange(answer, "n -> n 1"))
        found.append((float(each.sum()), bool((predicted.argmax(-1) == answer).all())))
    return found


def padded_left(rows: Sequence[Sequence[int]], pad: int) -> dict[str, Tensor]:
    """Return rows of token ids as the ids and the mask of one batch, with `pad` in front of the shorter ones.

    >>> padded_left([[5, 6, 7], [8]], 0)["input_ids"].tolist()
    [[5, 6, 7], [0, 0, 8]]
    """
    width = max(map(len, rows))
    ids = [[*[pad] * (width - len(row)), *row] for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def _chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
