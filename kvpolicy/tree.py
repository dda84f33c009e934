"""The score tree at work: children before parents, each with the slots it decides and what it declares, all checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import PluginError
from kvpolicy.plugin import Node, children, importance_of
from kvpolicy.types import LayerView


def evaluate(node: Node, view: LayerView) -> tuple[Tensor, Tensor | None]:
    """Return what a node scores, and its importance part, if it has one: float32 ``[B, Hkv, T]`` each.

    Args:
        node: a scorer, or a combiner with its children.
        view: the layer's slots.

    Raises:
        PluginError: when something in the tree returns or reads what it must not; names it.

    >>> from kvpolicy.scorers.key_norm import KeyNorm
    >>> view = LayerView(keys=torch.tensor([[[[3.0], [-1.0]]]]), values=torch.zeros(1, 1, 2, 1))
    >>> scores, importance = evaluate(KeyNorm(), view)
    >>> scores.tolist(), importance is scores
    ([[[-3.0, -1.0]]], True)
    """
    below: dict[str, Any] = {}
    important: dict[str, Any] = {}
    decided = _decided(node, view)
    for field, child in children(node).items():
        own = view.decide(view.candidates & decided[field]) if field in decided else view
        if isinstance(child, tuple):
            found = [evaluate(one, own) for one in child]
            below[field], important[field] = ([pair[part] for pair in found] for part in (0, 1))
        else:
            below[field], important[field] = evaluate(child, own)
    scores = _call(node, view, below)
    part = importance_of(node)
    if part is None or part is node:
        return scores, None if part is None else scores
    # A child, or this node over the importance of each child.
    return scores, below["importance"] if "importance" in below else _call(node, view, important)


def _decided(node: Node, view: LayerView) -> dict[str, Tensor]:
    """Return by child field, bool ``[B, Hkv, T]``, which slots it decides; of fields not named, it is all."""
    decides = getattr(node, "decides", None)
    if decides is None:
        return {}
    found: dict[str, Tensor] = decides(view.limit(node.needs, _who(node)))
    if not isinstance(found, dict) or not found.keys() <= children(node).keys():
        raise PluginError(f"{_who(node)}: expected masks by child, {sorted(children(node))}, from decides")
    for field, mask in found.items():
        check(mask, tuple(view.valid.shape), torch.bool, f"{_who(node)}, decides['{field}']")
    return found


def _call(node: Node, view: LayerView, below: dict[str, Any]) -> Tensor:
    reader = _who(node)
    scores: Tensor = node(view.limit(node.needs, reader), **below)  # type: ignore[operator]
    check(scores, tuple(view.valid.shape), torch.float32, reader)
    if not torch.isfinite(scores.where(view.candidates, 0)).all():
        raise PluginError(f"{reader}: expected finite scores on the candidate slots, got nan or inf")
    return scores


def _who(node: Node) -> str:
    return f"{'combiner' if children(node) else 'scorer'} '{node.name}' ({type(node).__module__})"


def check(tensor: object, shape: tuple[int, ...], dtype: torch.dtype, who: str) -> None:
    """Raise where what a plugin returns is not a tensor of this shape and dtype; `who` is the plugin, in words."""
    if not isinstance(tensor, Tensor):
        raise PluginError(f"{who}: expected a tensor {list(shape)}, got {type(tensor).__name__}")
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        hint = ": take .float()" if dtype == torch.float32 and tuple(tensor.shape) == shape else ""
        raise PluginError(f"{who}: expected {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}{hint}")
