"""Judges one class of transformers: does a tiny model of it evict correctly, or is it refused with a reason?"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvpolicy
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.policy import Policy
from kvpolicy.session.layers import KINDS
from kvpolicy.testing.architectures.build import Case, tiny_model
from kvpolicy.testing.architectures.compare import PROMPT, compare, exact_logits, run, stored_bytes, tokens
from kvpolicy.testing.architectures.hide import HidingCache, hiding

Verdict = Literal["correct", "refused", "not built", "wrong"]

BUDGET = 24
_HEADS: list[Any] = ["uniform", {"type": "adaptive", "floor": 0.2}]
_EVICTABLE = ("full", "derived", "linear and full")


@dataclass(frozen=True)
class Row:
    """What came of one case.

    Args:
        case: what was judged.
        verdict: "correct", "refused", "not built" or "wrong".
        reason: why, where it is not "correct".
        kinds: the kinds of its cache layers; from a "derived" one the model makes the keys or values it attends to (a
            latent, say), an "idle" one a prompt of text does not reach.
        evicted: how many layers became shorter.
        left: how many were left alone.
        plan: who said what is kept: the oracle's own "views", or the evicted cache's "store".
        error: largest error of a logit after eviction, against float64.
        rounding: largest error of a logit without kvpolicy, stock or by the oracle.
        effect: largest change of a logit that evicting makes, under the policy that changes least.
    """

    case: Case
    verdict: Verdict
    reason: str = ""
    kinds: str = ""
    evicted: int = 0
    left: int = 0
    plan: str = ""
    error: float = 0.0
    rounding: float = 0.0
    effect: float = 0.0


def judge(case: Case) -> Row:
    """Return what becomes of a case; whatever is raised ends up in the row."""
    prompt, pieces = tokens()
    torch.manual_seed(0)
    try:
        model = tiny_model(case)
    except Exception as error:
        return Row(case, "not built", _say(error))
    try:
        _policies()[0].on(model)
    except UnsupportedModelError as error:
        return Row(case, "refused", str(error))
    try:
        run(model, prompt, [], None)
    except Exception as error:
        return Row(case, "not built", _say(error))
    stock = HidingCache(model.config, {})
    try:
        with hiding(model, stock):
            full = run(model, prompt, pieces, stock)
    except Exception as error:
        return _judge_generating(case, model, error)
    row = Row(case, "correct", kinds=", ".join(dict.fromkeys(_kinds(stock))))
    try:
        found = [compare(model, policy, stock) for policy in _policies()]
        exact = exact_logits(model, prompt, pieces, {})
    except UnsupportedModelError as error:
        return replace(row, verdict="refused", reason=str(error))
    except Exception as error:
        return replace(row, verdict="wrong", reason=_say(error))
    after = slice(PROMPT, None)
    shorter = set.intersection(*(one.shorter for one in found))
    row = replace(
        row,
        evicted=len(shorter),
        left=len(stock.layers) - len(shorter),
        plan=found[0].plan,
        error=max(_largest((one.got - one.exact)[after]) for one in found),
        rounding=max(_largest(full - exact), *(_largest(one.want - one.exact) for one in found)),
        effect=min(_largest((full - one.want)[after]) for one in found),
    )
    missed = [index for index, kind in enumerate(_kinds(stock)) if kind in _EVICTABLE and index not in shorter]
    if missed:
        return replace(row, verdict="wrong", reason=f"layers {missed} kept everything, in silence")
    if not row.error <= 2 * row.rounding:
        return replace(row, verdict="wrong", reason=f"error {row.error:.1e}, where rounding gives {row.rounding:.1e}")
    if not row.effect > 100 * row.error:
        return replace(row, verdict="wrong", reason=f"evicting changes logits by {row.effect:.1e} only: proves nothing")
    return row


def _policies() -> list[Policy]:
    """Return what every class is judged with: heads of one length, and of different ones."""
    return [kvpolicy.load("snapkv-w8", budget={"tokens": BUDGET, "heads": heads}) for heads in _HEADS]


def _judge_generating(case: Case, model: PreTrainedModel, why: Exception) -> Row:
    """Return what becomes of a class that takes no `DynamicCache`: `generate` gives it another, or none."""
    prompt, _ = tokens()
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    try:
        model.generate(prompt, **settings)  # type: ignore[operator]
    except Exception:
        return Row(case, "not built", _say(why))
    try:
        for policy in _policies():
            with policy.on(model):
                model.generate(prompt, **settings)  # type: ignore[operator]
    except UnsupportedModelError as error:
        return Row(case, "refused", str(error))
    except Exception as error:
        return Row(case, "wrong", _say(error))
    return Row(case, "wrong", f"generated in silence, though it takes no DynamicCache: {_say(why)}")


def _kinds(stock: HidingCache) -> list[str]:
    kinds = []
    for index, layer in enumerate(stock.layers):
        kind = KINDS.get(type(layer).__name__, type(layer).__name__)
        seen = stock.prompt.get(index)
        if "full" in kind and not stored_bytes(layer):
            kind = "idle"
        elif kind == "full" and seen is not None and not seen.as_cached:
            kind = "derived"
        kinds.append(kind)
    return kinds


def _largest(difference: Tensor) -> float:
    return difference.abs().max().item()


def _say(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})"
