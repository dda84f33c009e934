"""Each built-in once more, slowly: loops over rows, heads and slots in float64, from the formulas, sharing no code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from kvpolicy.types import LayerView


def heads(view: LayerView) -> list[tuple[int, int]]:
    return [(b, h) for b in range(view.valid.shape[0]) for h in range(view.valid.shape[1])]


def slots(mask: Tensor) -> list[int]:
    return [t for t, there in enumerate(mask.tolist()) if there]


def blank(view: LayerView) -> Tensor:
    return torch.full(view.valid.shape, math.nan, dtype=torch.float64)


def snapkv(view: LayerView, window: int, kernel: int, pooling: str) -> Tensor:
    scores = blank(view)
    queries, keys = view.queries.double(), view.keys.double()
    group = queries.shape[1] // keys.shape[1]
    length = view.valid.shape[2]
    for b, h in heads(view):
        pooled = torch.zeros(group, length, dtype=torch.float64)
        for g in range(group):
            total, count = [0.0] * length, 0
            for w in range(queries.shape[2])[-window:]:
                at = int(view.query_positions[b, w])
                seen = [t for t in slots(view.valid[b, h]) if t <= at]
                if not seen:
                    continue
                count += 1
                logits = [float(queries[b, h * group + g, w] @ keys[b, h, t]) * view.scaling for t in seen]
                top = max(logits)
                exps = [math.exp(logit - top) for logit in logits]
                for t, e in zip(seen, exps, strict=True):
                    total[t] += e / math.fsum(exps)
            mean = [x / max(count, 1) for x in total]
            # Neighbours are valid slots: padding between them does not count.
            valid = slots(view.valid[b, h])
            counted = [mean[t] if view.candidates[b, h, t] else 0.0 for t in valid]
            for place, t in enumerate(valid):
                around = range(place - kernel // 2, place + kernel // 2 + 1)
                pool = [counted[i] if 0 <= i < len(counted) else 0.0 for i in around]
                pooled[g, t] = math.fsum(pool) / kernel if pooling == "avg" else max(pool)
        for t in range(length):
            scores[b, h, t] = math.fsum(pooled[:, t].tolist()) / group
    return scores


def cosine(a: Tensor, b: Tensor) -> float:
    length = float(a @ a) * float(b @ b)
    return float(a @ b) / math.sqrt(length) if length else 0.0


def cosine_diversity(view: LayerView, vectors: Tensor, among: Tensor) -> Tensor:
    scores = blank(view)
    for b, h in heads(view):
        mean = torch.zeros(vectors.shape[-1], dtype=torch.float64)
        counted = slots(among[b, h])
        for t in counted:
            vector = vectors[b, h, t].double()
            if float(vector @ vector):
                mean += vector / math.sqrt(float(vector @ vector)) / len(counted)
        for t in slots(view.valid[b, h]):
            scores[b, h, t] = -cosine(vectors[b, h, t].double(), mean)
    return scores


def euclidean_diversity(view: LayerView, vectors: Tensor) -> Tensor:
    scores = blank(view)
    for b, h in heads(view):
        counted = slots(view.candidates[b, h])
        mean = torch.zeros(vectors.shape[-1], dtype=torch.float64)
        for t in counted:
            mean += vectors[b, h, t].double() / len(counted)
        for t in slots(view.valid[b, h]):
            away = vectors[b, h, t].double() - mean
            scores[b, h, t] = math.sqrt(float(away @ away))
    return scores


def norm(view: LayerView, vectors: Tensor, sign: int) -> Tensor:
    scores = blank(view)
    for b, h in heads(view):
        for t in slots(view.valid[b, h]):
            scores[b, h, t] = sign * math.sqrt(float(vectors[b, h, t].double() @ vectors[b, h, t].double()))
    return scores


def recency(view: LayerView) -> Tensor:
    scores = blank(view)
    for b, h in heads(view):
        counted = slots(view.valid[b, h])
        for place, t in enumerate(counted):
            scores[b, h, t] = place / max(len(counted) - 1, 1)
    return scores


def cosine_redundancy(vectors: Tensor, mask: Tensor) -> float:
    """Of one head: the mean cosine over all pairs, pair by pair."""
    chosen = [vectors[t].double() for t in slots(mask)]
    pairs = [cosine(x, y) for i, x in enumerate(chosen) for j, y in enumerate(chosen) if i != j]
    return min(max(math.fsum(pairs) / len(pairs), 0.0), 1.0) if pairs else 0.0


def euclidean_redundancy(vectors: Tensor, mask: Tensor) -> float:
    """Of one head: one minus the mean squared distance over all pairs, over twice the mean squared length."""
    chosen = [vectors[t].double() for t in slots(mask)]
    pairs = [float((x - y) @ (x - y)) for i, x in enumerate(chosen) for j, y in enumerate(chosen) if i != j]
    square = math.fsum(float(x @ x) for x in chosen)
    if not pairs or not square:
        return 0.0
    return min(max(1 - math.fsum(pairs) / len(pairs) / (2 * square / len(chosen)), 0.0), 1.0)


def min_max(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(x - low) / (high - low) if high > low else 0.0 for x in values]


def matched(values: list[float], reference: list[float]) -> list[float]:
    """Min-max scaled, then with the mean of the reference, which counts from its lowest where that is negative."""
    scaled = min_max(values)
    if not any(scaled):
        return scaled
    mean = math.fsum(x - min(0.0, *reference) for x in reference) / len(reference)
    return [x * mean * len(scaled) / math.fsum(scaled) for x in scaled]


def normalized(values: list[float], how: str) -> list[float]:
    if how == "min-max":
        return min_max(values)
    if how == "rank":
        return [sum(other < x for other in values) / max(len(values) - 1, 1) for x in values]
    if how == "z-score":
        mean = math.fsum(values) / len(values)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / len(values))
        return [(x - mean) / deviation if deviation else 0.0 for x in values]
    return values


def fixed(view: LayerView, inputs: list[Tensor], weights: list[float], how: str, over: str = "head") -> Tensor:
    scores = blank(view)
    parts = [[place] for place in heads(view)]
    if over == "layer":
        parts = [[place for place in heads(view) if place[0] == b] for b in range(len(view.valid))]
    for part in parts:
        counted = [(b, h, t) for b, h in part for t in slots(view.candidates[b, h])]
        if not counted:
            continue
        lists = [[float(one[place]) for place in counted] for one in inputs]
        if how == "match-importance":
            scaled = [lists[0]] + [matched(one, lists[0]) for one in lists[1:]]
        else:
            scaled = [normalized(one, how) for one in lists]
        for i, place in enumerate(counted):
            scores[place] = math.fsum(w * one[i] for w, one in zip(weights, scaled, strict=True))
    return scores


def best_rank(view: LayerView, inputs: list[Tensor], weights: Sequence[float]) -> Tensor:
    scores = blank(view)
    for b, h in heads(view):
        counted = slots(view.candidates[b, h])
        for t in counted:
            places = [sum(float(one[b, h, u]) >= float(one[b, h, t]) for u in counted) for one in inputs]
            scores[b, h, t] = max(w / place for w, place in zip(weights, places, strict=True))
    return scores


def redundancy_adaptive(
    view: LayerView, importance: Tensor, diversity: Tensor, redundancy: list[list[float]]
) -> Tensor:
    scores = blank(view)
    for b, h in heads(view):
        counted = slots(view.candidates[b, h])
        if not counted:
            continue
        first = [float(importance[b, h, t]) for t in counted]
        second = matched([float(diversity[b, h, t]) for t in counted], first)
        r = redundancy[b][h]
        for i, t in enumerate(counted):
            scores[b, h, t] = r * second[i] + (1 - r) * first[i]
    return scores


def pyramid(budget: int, available: int, layers: int, beta: Fraction) -> list[int]:
    mean = Fraction(min(budget, available))
    low = max(mean / beta, Fraction(1))
    high = 2 * mean - low
    if high > available:
        high = Fraction(available)
        low = 2 * mean - high
    exact = [high - (high - low) * depth / (layers - 1) for depth in range(layers)] if layers > 1 else [mean]
    whole = [math.floor(x) for x in exact]
    up = sorted(range(layers), key=lambda depth: (whole[depth] - exact[depth], depth))
    for depth in up[: int(layers * mean) - sum(whole)]:
        whole[depth] += 1
    return whole


def adaptive(view: LayerView, scores: Tensor, tokens: list[int], floor: Fraction) -> list[list[int]]:
    """Slot by slot: everyone's floor first, then the best of what is left, wherever it is."""
    lengths = []
    for b, budget in enumerate(tokens):
        queues = []
        for h in range(view.valid.shape[1]):
            protected = view.valid[b, h] & ~view.candidates[b, h]
            least = max(math.ceil(floor * budget), 1, int(protected.sum()))
            best = sorted(-float(scores[b, h, t]) for t in slots(view.candidates[b, h]))
            queue = [-math.inf] * int(protected.sum()) + best
            queues.append((queue, min(least, len(queue))))
        won = [least for _, least in queues]
        left = min(len(queues) * budget, sum(len(queue) for queue, _ in queues)) - sum(won)
        rest = [(queue[i], i, h) for h, (queue, least) in enumerate(queues) for i in range(least, len(queue))]
        for _, _, h in sorted(rest)[:left]:
            won[h] += 1
        lengths.append(won)
    return lengths


def top_k(view: LayerView, scores: Tensor, lengths: Tensor) -> list[list[list[int]]]:
    chosen: list[list[list[int]]] = [[] for _ in range(view.valid.shape[0])]
    for b, h in heads(view):
        protected = slots(view.valid[b, h] & ~view.candidates[b, h])
        ranked = sorted(slots(view.candidates[b, h]), key=lambda t: (-float(scores[b, h, t]), t))
        chosen[b].append(sorted((protected + ranked)[: int(lengths[b, h])]))
    return chosen


def by_modality(view: LayerView, scores: Tensor, lengths: Tensor, shares: dict[int, Fraction]) -> list[list[list[int]]]:
    """Slot by slot: protected ones, then the best of each modality's share, then the best of the rest."""
    chosen: list[list[list[int]]] = [[] for _ in range(view.valid.shape[0])]
    for b, h in heads(view):
        length = int(lengths[b, h])
        kinds = view.modality[b, h].tolist()
        protected = slots(view.valid[b, h] & ~view.candidates[b, h])
        ranked = sorted(slots(view.candidates[b, h]), key=lambda t: (-float(scores[b, h, t]), t))
        due = {kind: int(share * length) for kind, share in shares.items()}
        while shares and sum(due.values()) < length:
            # The one that is furthest below its share; of several, the first.
            behind = max(due, key=lambda kind: shares[kind] * length - due[kind])
            due[behind] += 1
        first = []
        for kind in due:
            taken = sum(kinds[t] == kind for t in protected)
            first += [t for t in ranked if kinds[t] == kind][: max(due[kind] - taken, 0)]
        first.sort(key=ranked.index)
        rest = [t for t in ranked if t not in first]
        chosen[b].append(sorted((protected + first + rest)[:length]))
    return chosen
