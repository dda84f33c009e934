"""The maths alone, for one layer: three tensors in, one out; no model, no cache, nothing changed.

>>> import torch
>>> from kvpolicy.scorers.value_norm import ValueNorm
>>> queries, keys = torch.zeros(1, 4, 6, 8), torch.zeros(1, 2, 6, 8)
>>> values = torch.arange(6.0)[None, None, :, None].expand(1, 2, 6, 8)
>>> [round(score, 2) for score in score(ValueNorm(), queries, keys, values)[0, 0].tolist()]
[0.0, 2.83, 5.66, 8.49, 11.31, 14.14]

A policy protects first: its sinks and recent tokens score inf.

>>> from kvpolicy.policy import Budget, Policy
>>> from kvpolicy.selectors.top_k import TopK
>>> policy = Policy(name="v", score=ValueNorm(), budget=Budget(tokens=3), select=TopK(sinks=1, recent=1))
>>> [round(score, 2) for score in score(policy, queries, keys, values)[0, 0].tolist()]
[inf, 2.83, 5.66, 8.49, 11.31, inf]
>>> keep(policy, queries, keys, values)[0, 0].tolist()
[True, False, False, False, True, True]
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvpolicy.plugin import Combiner, Scorer
from kvpolicy.policy import Budget, Policy
from kvpolicy.types import Call, LayerView


def score(
    scorer: Scorer | Combiner | Policy,
    queries: Tensor | None,
    keys: Tensor,
    values: Tensor,
    *,
    valid: Tensor | None = None,
    pre_rope_keys: Tensor | None = None,
    modality: Tensor | None = None,
    call: Call | None = None,
    repetition: Tensor | None = None,
) -> Tensor:
    """Return each slot's score, float32 ``[B, Hkv, T]``, higher means keep; -inf where a slot is not valid.

    Args:
        scorer: a scorer, a combiner with its children, or a policy. Slots that a policy protects score inf,
            and the others what they score in the policy: with the protected ones left out of every mean and
            pool.
        queries: ``[B, Hq, W, Dk]`` after RoPE, those of the last W slots; query head ``h`` reads KV head
            ``h // (Hq / Hkv)``. All T may be given: a scorer takes the last it needs. None where none needs
            them.
        keys: ``[B, Hkv, T, Dk]`` after RoPE, any float dtype.
        values: ``[B, Hkv, T, Dv]``, any float dtype.
        valid: bool ``[B, T]`` or ``[B, Hkv, T]``, False for padding, on either side. Default: all valid.
        pre_rope_keys: float32 ``[B, Hkv, T, Dk]``, the keys before RoPE, where something reads them.
        modality: int8 ``[B, Hkv, T]``, 0 text, 1 image, 2 video, 3 audio, where something reads it.
        call: what the attention module was called with for the T tokens, where something reads it.
        repetition: float32 ``[B, Hkv, T]``, the most attention that a repetition paid, where something reads it.

    Raises:
        ViewError: when the shapes do not fit, or queries are needed and not given.
    """
    view = _view(queries, keys, values, valid, pre_rope_keys, modality, call, repetition)
    if isinstance(scorer, Policy):
        view = scorer.protect(view, _budget(scorer, view))
        policy = scorer
    else:
        policy = Policy(name=scorer.name, score=scorer, budget=Budget(keep=1.0))
    scores, _ = policy.scores(view)
    return scores.where(view.candidates, torch.inf).where(view.valid, -torch.inf)


def keep(
    policy: Policy,
    queries: Tensor | None,
    keys: Tensor,
    values: Tensor,
    *,
    valid: Tensor | None = None,
    pre_rope_keys: Tensor | None = None,
    modality: Tensor | None = None,
    call: Call | None = None,
    repetition: Tensor | None = None,
) -> Tensor:
    """Return which slots a policy keeps, bool ``[B, Hkv, T]``, as if the layer were the model's only one.

    Args:
        policy: the policy.
        queries: as in `score`.
        keys: as in `score`.
        values: as in `score`.
        valid: as in `score`.
        pre_rope_keys: as in `score`.
        modality: as in `score`.
        call: as in `score`.
        repetition: as in `score`.

    Raises:
        ViewError: when the shapes do not fit, or queries are needed and not given.
    """
    view = _view(queries, keys, values, valid, pre_rope_keys, modality, call, repetition)
    return policy.plan_layer(view, _budget(policy, view)).to_mask(view.slots)


def _budget(policy: Policy, view: LayerView) -> Tensor:
    return policy.layer_slots(view.seen, layers=1)[:, 0]


def _view(
    queries: Tensor | None,
    keys: Tensor,
    values: Tensor,
    valid: Tensor | None,
    pre_rope_keys: Tensor | None,
    modality: Tensor | None,
    call: Call | None,
    repetition: Tensor | None,
) -> LayerView:
    view = LayerView(
        keys=keys,
        values=values,
        queries=queries,
        valid=valid,  # type: ignore[arg-type]
        pre_rope_keys=pre_rope_keys,
        modality=modality,
        call=call,
        repetition=repetition,
    )
    if queries is None or valid is None:
        return view
    # Queries of padding go first, so that a row's last ones are its own whichever side is padded.
    order = (view.query_positions >= 0).int().argsort(dim=-1, stable=True)
    return replace(
        view,
        queries=queries.gather(2, order[:, None, :, None].expand_as(queries)),
        query_positions=view.query_positions.gather(-1, order),
    )


__all__ = ["keep", "score"]
