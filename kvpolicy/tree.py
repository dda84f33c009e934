"""The score tree at work: children before parents, each with the slots it decides and what it declares, all checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvpolicy.errors import PluginError, UnsupportedModelError
from kvpolicy.plugin import Node, children, importance_of
from kvpolicy.types import LayerView

if TYPE_CHECKING:
    from kvpolicy.session.parallel import HeadGroup


def compares_heads(node: Node) -> bool:
    """Return whether what a node scores in one head depends on the other heads of the layer: its `across_heads`."""
    return bool(getattr(node, "across_heads", False))


def evaluate(node: Node, view: LayerView, peers: HeadGroup | None = None) -> tuple[Tensor, Tensor | None]:
    """Return what a node scores, and its importance part, if it has one: float32 ``[B, Hkv, T]`` each.

    Args:
        node: a scorer, or a combiner with its children.
        view: the layer's slots.
        peers: the ranks that hold the layer's other heads.

    Raises:
        PluginError: when something in the tree returns or reads what it must not; names it.
        UnsupportedModelError: when a scorer compares heads, and they are on several ranks.

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
            found = [evaluate(one, own, peers) for one in child]
            below[field], important[field] = ([pair[part] for pair in found] for part in (0, 1))
        else:
            below[field], important[field] = evaluate(child, own, peers)
    scores = _call(node, view, below, peers)
    part = importance_of(node)
    if part is None or part is node:
        return scores, None if part is None else scores
    # A child, or this node over the importance of each child.
    return scores, below["importance"] if "importance" in below else _call(node, view, important, peers)


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


def _call(node: Node, view: LayerView, below: dict[str, Any], peers: HeadGroup | None) -> Tensor:
    reader = _who(node)
    if peers is not None and compares_heads(node):
        scores = _of_all_heads(node, view, below, peers)
    else:
        scores = node(view.limit(node.needs, reader), **below)  # type: ignore[operator]
    check(scores, tuple(view.valid.shape), torch.float32, reader)
    if not torch.isfinite(scores.where(view.candidates, 0)).all():
        raise PluginError(f"{reader}: expected finite scores on the candidate slots, got nan or inf")
    return scores


def _of_all_heads(node: Node, view: LayerView, below: dict[str, Any], peers: HeadGroup) -> Tensor:
    """Return this rank's part of what a combiner makes of the scores of all heads of the layer."""
    if not below:
        raise UnsupportedModelError(
            f"{_who(node)} compares the heads of a layer, which are on several ranks here: expected scores of each "
            "head alone, which a combiner may compare, or a model on one rank"
        )
    whole = view
    told: dict[str, Any] = {}
    for field, scores in below.items():
        pairs = [peers.whole(view, one) for one in (scores if isinstance(scores, list) else [scores])]
        whole = pairs[0][0]
        told[field] = [one for _, one in pairs] if isinstance(scores, list) else pairs[0][1]
    found: Tensor = node(whole, **told)  # type: ignore[operator]
    check(found, tuple(whole.valid.shape), torch.float32, _who(node))
    # Slots are aligned at the last; a rank with fewer has none before its own first.
    return peers.own(found)[..., whole.slots - view.slots :]


def _who(node: Node) -> str:
    return f"{'combiner' if children(node) else 'scorer'} '{node.name}' ({type(node).__module__})"


def check(tensor: object, shape: tuple[int, ...], dtype: torch.dtype, who: str) -> None:
    """Raise where what a plugin returns is not a tensor of this shape and dtype; `who` is the plugin, in words."""
    if not isinstance(tensor, Tensor):
        raise PluginError(f"{who}: expected a tensor {list(shape)}, got {type(tensor).__name__}")
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        hint = ": take .float()" if dtype == torch.float32 and tuple(tensor.shape) == shape else ""
        raise PluginError(f"{who}: expected {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}{hint}")
