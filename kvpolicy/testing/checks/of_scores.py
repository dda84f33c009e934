"""What scorers are checked for, and combiners with their children: the scores alone, without a model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import ConformanceError, KVPolicyError, UndeclaredReadError
from kvpolicy.plugin import children, needs_of, role_of, walk
from kvpolicy.testing.checks.memory import peak
from kvpolicy.testing.checks.tools import (
    alone,
    expect_any_default_dtype,
    expect_on_device,
    expect_same,
    expect_untouched,
    scores_of,
    tensors_of,
)
from kvpolicy.testing.views import make_view
from kvpolicy.types import LayerView
from kvpolicy.types.view import BY_SLOT

CASES: dict[str, dict[str, Any]] = {
    "grouped queries": {"heads": (6, 2)},
    "a KV head for each query head": {"heads": (3, 3)},
    "one KV head": {"heads": (4, 1)},
    "head size 80": {"sizes": (80, 80)},
    "head size 128": {"sizes": (128, 128)},
    "keys and values of different sizes": {"sizes": (96, 40)},
    "one slot": {"slots": 1},
    "fewer slots than the window": {"slots": 5},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "protected slots": {"sinks": 2, "recent": 3},
}
"""Views that every score meets."""

MOST = 64
"""Queries of a view at most: a scorer may declare all there are."""


def checks_of(plugin: Any) -> dict[str, Callable[[Any], None]]:
    """Return by name the checks that apply to a scorer, or to a combiner with its children."""
    if needs_of(plugin).call:  # Only a model has that: `generate` runs it in one.
        return {}
    return {
        "undeclared_reads": undeclared_reads,
        "shapes": shapes,
        "device": device,
        "default_dtype": default_dtype,
        "evicted": evicted,
        "finite": finite,
        **({"orientation": orientation} if oriented(plugin) else {}),
        "inputs_untouched": inputs_untouched,
        "strided_inputs": strided_inputs,
        "repeatable": repeatable,
        "keeps_nothing": keeps_nothing,
        "batch_mates": batch_mates,
        "padding": padding,
        **({"absent_queries": absent_queries} if needs_of(plugin).queries else {}),
        **({"causal": causal} if observes(plugin) else {}),
        "heads": heads,
        "permutation": permutation,
        "half_precision": half_precision,
        "memory": memory,
    }


def view_for(plugin: Any, seed: int = 0, **options: Any) -> LayerView:
    """Return a random view with as many queries as the plugin reads; what is not valid holds nan."""
    window = max(_window(plugin), 1)
    return make_view(seed, **{"slots": max(24, window + 8), "window": window, **options})


def _window(plugin: Any) -> int:
    return min(needs_of(plugin).queries, MOST)


def undeclared_reads(plugin: Any) -> None:
    """It reads nothing that its `needs` does not declare."""
    for padding in ("none", "left", "ragged"):
        try:
            scores_of(plugin, view_for(plugin, padding=padding))
        except UndeclaredReadError:
            raise
        except Exception:  # Another check's fault, which that one shows.
            continue


def shapes(plugin: Any) -> None:
    """Its scores are float32 ``[B, Hkv, T]`` and finite on every candidate, whatever the shape and dtype of a view."""
    for case, options in CASES.items():
        try:
            scores_of(plugin, view_for(plugin, **options))
        except KVPolicyError as error:
            raise ConformanceError(f"with {case}: {error}") from error
        except Exception as error:
            raise ConformanceError(f"with {case}: raised {type(error).__name__}: {error}") from error


def device(plugin: Any) -> None:
    """It makes no tensor on the default device: it says the device of each, mostly the view's."""
    view = view_for(plugin)
    expect_on_device(lambda: [scores_of(plugin, view)], view.valid.device)


def default_dtype(plugin: Any) -> None:
    """Its scores do not depend on torch's default dtype."""
    view = view_for(plugin)
    expect_any_default_dtype(lambda: scores_of(plugin, view))


def evicted(plugin: Any) -> None:
    """It scores what is left after evictions: slots whose positions are not their places, of more tokens seen."""
    view = view_for(plugin)
    gaps = torch.randint(1, 9, view.positions.shape, generator=torch.Generator().manual_seed(0))
    positions = gaps.cumsum(-1)
    positions = positions - positions[..., -1:] + 9 * view.slots
    last = torch.arange(view.query_positions.shape[1]) - view.query_positions.shape[1] + 1 + 9 * view.slots
    left = replace(
        view,
        positions=positions.to(torch.int32),
        query_positions=last.expand_as(view.query_positions),
        seen=torch.full_like(view.seen, 9 * view.slots + 1),
    )
    scores_of(plugin, left)


def finite(plugin: Any) -> None:
    """Its scores are finite when all slots are alike, when they are large, and when no slot is a candidate."""
    for slots in (1, 40):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            view = view_for(plugin, slots=slots, padding="left", dtype=dtype)
            sign = torch.where(torch.arange(slots) % 2 == 0, 1.0, -1.0)[:, None]
            for name, fill in {"all zeros": 0.0, "all alike": -3.5, "large": 6e4 * sign}.items():
                try:
                    scores_of(plugin, _filled(view, torch.as_tensor(fill)))
                except KVPolicyError as error:
                    raise ConformanceError(f"with {slots} slots, {name}, {dtype}: {error}") from error
    scores_of(plugin, view.decide(torch.zeros_like(view.valid)))


def _filled(view: LayerView, fill: Tensor) -> LayerView:
    """Return a view whose vectors hold `fill`, one number or one a slot (``[T, 1]``)."""

    def like(old: Tensor) -> Tensor:
        return (fill if fill.ndim == 0 else fill[-old.shape[2] :]).expand_as(old).to(old.dtype)

    filled: dict[str, Any] = {name: like(old) for name, old in _vectors(view).items()}
    return replace(view, **filled)


def oriented(plugin: Any) -> bool:
    """Return whether it is known which slot has to score highest: of a diversity, and of an importance by queries."""
    roles = _roles(plugin)
    return roles == {"diversity"} or (roles == {"importance"} and needs_of(plugin).queries > 0)


def _roles(plugin: Any) -> set[str]:
    """Return what the scorers of a tree measure."""
    return {role_of(leaf) for leaf in walk(plugin) if not children(leaf)}


def orientation(plugin: Any) -> None:
    """Higher means keep: the slot that is unlike all others (diversity), or that every query looks at (importance)."""
    view = view_for(plugin, batch=1, slots=64 + _window(plugin))
    odd = view.slots // 2

    def with_odd(like: Tensor) -> Tensor:
        others = _axis(like, 1).expand_as(like).clone()
        others[:, :, odd] = 4 * _axis(like, 0)
        return others

    vectors = _vectors(view)
    queries = vectors.pop("queries")
    vectors = {name: with_odd(tensor) for name, tensor in vectors.items()}
    view = replace(view, **vectors, queries=4 * _axis(queries, 0).expand_as(queries))
    scores = scores_of(plugin, view)
    # Where neighbours are pooled, those next to it share its score.
    far = (torch.arange(view.slots) - odd).abs() > 16
    if not bool((scores[..., odd] > scores[..., far].amax(-1)).all()):
        which = "is unlike all others" if _roles(plugin) == {"diversity"} else "every query looks at"
        raise ConformanceError(
            f"higher means keep: expected the slot that {which} to score above the others, got "
            f"{scores[0, 0, odd]:.3g} for it and up to {scores[0, 0, far].max():.3g} for them. Turn the sign, or "
            "say by `role` what it measures"
        )


def _axis(like: Tensor, axis: int) -> Tensor:
    """Return the unit vector along `axis`, of the size and dtype of the vectors of `like` ``[..., D]``."""
    return torch.eye(like.shape[-1], dtype=like.dtype)[axis]


def _vectors(view: LayerView) -> dict[str, Any]:
    """Return what a view holds vectors of, by name."""
    names = ("keys", "values", "queries", "pre_rope_keys")
    return {name: getattr(view, name) for name in names}


def inputs_untouched(plugin: Any) -> None:
    """It writes into no tensor of the view."""
    view = view_for(plugin, sinks=1)
    message = "writes into a tensor of the view, which may be the cache itself: copy it first"
    expect_untouched(tensors_of(view), lambda: scores_of(plugin, view), message)


def strided_inputs(plugin: Any) -> None:
    """Tensors that are not contiguous give the same scores."""
    view = view_for(plugin)

    def strided(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    vectors: dict[str, Any] = {name: strided(tensor) for name, tensor in _vectors(view).items()}
    other = replace(view, **vectors)
    message = "expected the same scores for tensors that are not contiguous: use reshape, not view"
    try:
        got = scores_of(plugin, other)
    except RuntimeError as error:
        raise ConformanceError(f"{message} ({error})") from error
    expect_same(got, scores_of(plugin, view), view.candidates, message)


def repeatable(plugin: Any) -> None:
    """The same view gives the same scores, whatever was scored before and whatever torch's random state is."""
    view, other = replace(view_for(plugin), layer=3), replace(view_for(plugin, 1), layer=2)
    state = torch.get_rng_state()
    try:
        torch.manual_seed(1)
        first = scores_of(plugin, view)
        drawn = not torch.equal(torch.get_rng_state(), torch.manual_seed(1).get_state())
        torch.manual_seed(2)
        scores_of(plugin, other)
        again = scores_of(plugin, view)
    finally:
        torch.set_rng_state(state)
    if not torch.equal(first, again):
        raise ConformanceError("expected equal scores when it is called again: it keeps something, or draws numbers")
    if drawn:
        raise ConformanceError("draws from torch's own random state: use a torch.Generator with a seed, a setting")


def keeps_nothing(plugin: Any) -> None:
    """It keeps nothing of a view: what is evicted is freed, and other numbers in the same place score anew."""
    view, other = view_for(plugin), view_for(plugin, 1)
    want = scores_of(plugin, other)
    scores_of(plugin, view)
    for name, tensor in _vectors(other).items():
        _vectors(view)[name].copy_(tensor)
    for name in ("modality", "repetition", "similarity"):
        getattr(view, name).copy_(getattr(other, name))
    if not torch.equal(scores_of(plugin, view), want):
        raise ConformanceError("expected new scores for other numbers in the same tensors: it keeps what it has seen")
    held = [weakref.ref(tensor) for tensor in _vectors(view).values()]
    del view
    gc.collect()
    if any(reference() is not None for reference in held):
        raise ConformanceError("keeps a tensor of the view after it has scored it, so that eviction frees nothing")


def batch_mates(plugin: Any) -> None:
    """A row scores the same alone and in a batch."""
    view = view_for(plugin)
    _expect_alone(plugin, view, "expected that a row scores the same alone and beside others in a batch")


def padding(plugin: Any) -> None:
    """Padding on either side, and slots that are empty in one head alone, change no score."""
    hint = (
        "leave slots outside view.valid out of every sum. They hold nan here, for which a weight of 0 is no help: put "
        "0 in their place with .where(view.valid[..., None], 0)"
    )
    for side in ("left", "right"):
        # Half of the second row: it has all its queries.
        view = view_for(plugin, batch=2, slots=24 + 2 * _window(plugin), padding=side)
        _expect_alone(plugin, view, f"padding on the {side} changes scores: {hint}")
    holes = view_for(plugin, padding="ragged")
    vectors: dict[str, Any] = {name: tensor.nan_to_num(nan=1e4) for name, tensor in _vectors(holes).items()}
    filled = replace(holes, **vectors)
    message = f"slots that are empty in some heads change scores: {hint}"
    expect_same(scores_of(plugin, holes), scores_of(plugin, filled), holes.candidates, message)


def absent_queries(plugin: Any) -> None:
    """Queries that a row does not have, as it is shorter than the window, change no score."""
    view = view_for(plugin, slots=max(24, _window(plugin)), padding="left")
    message = (
        "queries that a row does not have change its scores: leave those where view.query_positions is -1 out of every "
        "sum. They hold nan here: put 0 in their place with .where"
    )
    _expect_alone(plugin, view, message)


def observes(plugin: Any) -> bool:
    """Return whether scores are the attention of several queries, each of which may see its past alone."""
    return _roles(plugin) == {"importance"} and needs_of(plugin).queries > 1


def causal(plugin: Any) -> None:
    """A query sees the slots at its own position and before: what stands after all queries, changes nothing there."""
    view = view_for(plugin, slots=32 + _window(plugin))
    view = replace(view, query_positions=view.query_positions - 16)
    later = torch.arange(view.slots) >= view.slots - 16
    other = replace(view, keys=view.keys + 8 * later[:, None], values=view.values + 8 * later[:, None])
    # Neighbours may be pooled with what comes after them.
    before = view.candidates & ~later.roll(-8)
    message = (
        "keys after a query change what it gives to slots before: mask its logits where view.positions is greater than "
        "its view.query_positions, or use kvpolicy.attention.window_attention"
    )
    expect_same(scores_of(plugin, other), scores_of(plugin, view), before, message)


def _expect_alone(plugin: Any, view: LayerView, message: str) -> None:
    try:
        together = scores_of(plugin, view)
    except KVPolicyError as error:
        raise ConformanceError(f"{message} ({error})") from error
    for row in range(len(view.valid)):
        single, slots = alone(view, row)
        scores = scores_of(plugin, single)
        expect_same(together[row : row + 1, :, slots], scores, torch.ones_like(single.valid), message)


def heads(plugin: Any) -> None:
    """Heads and rows in another order give the same scores in that order."""
    view = view_for(plugin, heads=(6, 3))
    order, queries = torch.tensor([2, 0, 1]), torch.tensor([4, 5, 0, 1, 2, 3])
    rows = torch.tensor([1, 2, 0])
    ordered: dict[str, Any] = {name: getattr(view, name)[rows][:, order] for name in BY_SLOT}
    moved = replace(
        view,
        **ordered,
        queries=_vectors(view)["queries"][rows][:, queries],
        query_positions=view.query_positions[rows],
        similarity=view.similarity[rows],  # type: ignore[index]
        seen=view.seen[rows],
    )
    message = "expected that heads and rows in another order give the same scores in that order"
    expect_same(scores_of(plugin, moved), scores_of(plugin, view)[rows][:, order], moved.candidates, message)


def permutation(plugin: Any) -> None:
    """Slots in another order give the same scores in that order, where every query sees all of them."""
    view = view_for(plugin, sinks=1, recent=2)
    view = replace(view, query_positions=torch.full_like(view.query_positions, view.slots - 1))
    order = torch.randperm(view.slots, generator=torch.Generator().manual_seed(0))
    # Those stay: they rise in each head, whatever its slots hold.
    moving = (name for name in BY_SLOT if name != "positions")
    ordered: dict[str, Any] = {name: getattr(view, name)[:, :, order] for name in moving}
    moved = replace(view, **ordered)
    message = (
        "expected that slots in another order give the same scores in that order; where a slot's place is meant to "
        "count, say so in expected_failures"
    )
    expect_same(scores_of(plugin, moved), scores_of(plugin, view)[..., order], moved.candidates, message)


def half_precision(plugin: Any) -> None:
    """Scores of a bfloat16 view are those of the same numbers in float64."""
    view = view_for(plugin, dtype=torch.bfloat16, slots=64)
    vectors: dict[str, Any] = {name: _vectors(view)[name].double() for name in ("keys", "values", "queries")}
    exact = replace(view, **vectors)
    # A combiner's children have to return float32 all the same.
    want = scores_of(plugin, exact) if children(plugin) else plugin(exact.limit(plugin.needs, plugin.name))
    message = "expected that scores of bfloat16 tensors are summed in float32: take view.keys.float() first"
    expect_same(scores_of(plugin, view), want, view.candidates, message)


def memory(plugin: Any) -> None:
    """What it allocates grows no faster than the number of slots."""
    views = [view_for(plugin, slots=slots, batch=1, heads=(2, 1), sizes=(16, 16)) for slots in (4096, 8192)]
    small, large = (peak(partial(scores_of, plugin, view)) for view in views)
    if large > 2.5 * small:
        raise ConformanceError(
            f"expected memory linear in the number of slots T, got {large / small:.1f} times as much for twice the "
            "slots: make no T x T matrix"
        )
