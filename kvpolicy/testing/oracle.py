"""The oracle: a full, stock cache whose mask hides what a policy evicts.

It shares no code with capture, store or attend: a stock `DynamicCache` stores everything, transformers' own sdpa
attends, and a mask hides the evicted slots from every query that comes after the prompt. Where a policy merges them
into kept slots, those hold what its plugin makes of them. An evicted cache is right when it gives the same logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvpolicy.errors import PolicyError
from kvpolicy.policy import Policy
from kvpolicy.session.decoder import cache_name
from kvpolicy.types import LayerView, Merged, Needs, Plan, Selection

_NAME = "kvpolicy_oracle"


@dataclass
class _Prompt:
    """What each layer saw in the prompt, and what is hidden from later queries and changed for them."""

    queries: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    scaling: dict[int, float | None] = field(default_factory=dict)
    keep: list[Tensor] | None = None
    merged: dict[int, tuple[Selection, Merged]] = field(default_factory=dict)
    length: int = 0

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        layer = module.layer_idx
        if not self.length:
            self.queries[layer], self.keys[layer], self.values[layer] = query, key, value
            self.scaling[layer] = kwargs.get("scaling")
        elif self.keep is not None:
            mask = self._hide(mask, layer, query, key)
            if layer in self.merged:
                key, value = put(key, value, *self.merged[layer])
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    def _hide(self, mask: Tensor | None, layer: int, query: Tensor, key: Tensor) -> Tensor:
        batch, query_heads, new, _ = query.shape
        heads, total = key.shape[1:3]
        keep = self.keep[layer]  # type: ignore[index]
        shown = torch.cat([keep, keep.new_ones(batch, heads, total - self.length)], dim=-1)
        shown = shown.repeat_interleave(query_heads // heads, dim=1)[:, :, None]
        causal = torch.ones(new, total, dtype=torch.bool).tril(total - new).to(key.device)
        return shown & causal & (True if mask is None else mask)


@contextmanager
def _listening(model: PreTrainedModel, attend: Callable[..., Any]) -> Iterator[None]:
    own = model.config._attn_implementation
    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.config._attn_implementation = _NAME
    try:
        yield
    finally:
        model.config._attn_implementation = own
        AttentionInterface._global_mapping.pop(_NAME)
        AttentionMaskInterface._global_mapping.pop(_NAME)


def forward(model: PreTrainedModel, ids: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
    """Return the logits ``[B, q, V]`` of one forward pass by hand with a cache.

    Args:
        ids: int64 ``[B, q]``.
        cache: the cache to read and to extend.
        mask: int64 ``[B, tokens seen + q]``, 0 for padding, or None.
    """
    kwargs: dict[str, Any] = {cache_name(model): cache}
    if mask is not None:
        # Only `generate` derives positions from a padded mask; a forward pass by hand has to say them.
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        kwargs |= {"attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        logits: Tensor = model(ids, **kwargs).logits
    return logits


@contextmanager
def _projections(model: PreTrainedModel, wanted: bool) -> Iterator[dict[int, Tensor]]:
    """Give, by layer, the keys before RoPE of a pass in the block, ``[B, T, Hkv * Dk]``; of models like Llama alone."""
    found: dict[int, Tensor] = {}

    def taking(layer: int) -> Callable[..., None]:
        return lambda _, __, output: found.update({layer: output})

    modules = [module for module in model.modules() if hasattr(module, "k_proj") and hasattr(module, "layer_idx")]
    handles = [one.k_proj.register_forward_hook(taking(one.layer_idx)) for one in modules if wanted]  # type: ignore
    yield found
    for handle in handles:
        handle.remove()


@contextmanager
def _changes(model: PreTrainedModel, wanted: bool) -> Iterator[dict[int, Tensor]]:
    """Give, by layer, each token's cosine similarity before and after attention, float64 ``[B, T]``; as above."""
    found: dict[int, Tensor] = {}
    before: dict[Any, Tensor] = {}

    def entering(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before[layer.self_attn] = (args[0] if args else kwargs["hidden_states"]).double()

    def attended(module: Any, _: Any, output: Any) -> None:
        found[module.layer_idx] = cosine_similarity(before[module], before[module] + output[0].double(), dim=-1)

    layers: list[Any] = [module for module in model.modules() if wanted and hasattr(module, "self_attn")]
    handles = [layer.register_forward_pre_hook(entering, with_kwargs=True) for layer in layers]
    handles += [layer.self_attn.register_forward_hook(attended) for layer in layers]
    yield found
    for handle in handles:
        handle.remove()


def views(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, needs: Needs) -> list[LayerView]:
    """Return every layer's view of a prompt of text: all keys and values, and the last queries that `needs` declares.

    Rows padded on the right are not supported: their last queries are padding.
    """
    prompt = _Prompt()
    hooks = _projections(model, needs.pre_rope), _changes(model, needs.change)
    with _listening(model, prompt.attend), hooks[0] as projected, hooks[1] as changes:
        forward(model, ids, DynamicCache(config=model.config), mask)
    window = min(needs.queries, ids.shape[1])
    before = {
        layer: rearrange(keys, "b t (h d) -> b h t d", d=prompt.keys[layer].shape[-1]).float()
        for layer, keys in projected.items()
    }
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    slots = torch.arange(ids.shape[1] - window, ids.shape[1]).expand(len(ids), -1)
    return [
        LayerView(
            keys=prompt.keys[layer],
            values=prompt.values[layer],
            queries=prompt.queries[layer][:, :, -window:] if window else None,
            query_positions=torch.where(valid[:, -window:], slots, -1) if window else None,  # type: ignore[arg-type]
            valid=valid,
            layer=layer,
            scaling=prompt.scaling[layer],  # type: ignore[arg-type]
            pre_rope_keys=before.get(layer),
            modality=torch.zeros(prompt.keys[layer].shape[:3], dtype=torch.int8) if needs.modality else None,
            similarity=((changes[layer] * valid).sum(-1) / valid.sum(-1)).float() if needs.change else None,
        )
        for layer in sorted(prompt.keys)
    ]


def plan(policy: Policy, model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> Plan:
    """Return what `policy` keeps of a prompt, from tensors that no part of a session touched."""
    return policy.plan(views(model, ids, mask, policy.needs))


def merges(
    policy: Policy, model: PreTrainedModel, ids: Tensor, kept: Plan, mask: Tensor | None = None
) -> list[Merged | None]:
    """Return what the slots that stay of a prompt hold from then on, by layer; None where they hold what they held."""
    return [
        policy.merge(view, selection, None)
        for view, selection in zip(views(model, ids, mask, policy.needs), kept, strict=True)
    ]


def put(keys: Tensor, values: Tensor, kept: Selection, merged: Merged) -> tuple[Tensor, Tensor]:
    """Return keys and values ``[B, Hkv, T, D]`` with what the kept slots hold from now on, in copies."""
    at = kept.to_mask(keys.shape[2]).nonzero(as_tuple=True)
    return (
        keys.index_put(at, merged.keys.to(keys.dtype)),
        values.index_put(at, merged.values.to(values.dtype)),
    )


def logits(
    model: PreTrainedModel,
    ids: Tensor,
    pieces: Sequence[Tensor],
    kept: Plan | None,
    mask: Tensor | None = None,
    merged: Sequence[Merged | None] = (),
) -> Tensor:
    """Return the logits of prompt and continuation, ``[B, all tokens, V]``, evicted slots hidden from the continuation.

    Args:
        ids: the prompt, int64 ``[B, T]``.
        pieces: what follows, int64 ``[B, q]`` each, one forward pass a piece.
        kept: what of the prompt stays visible, by layer; None for everything.
        mask: of the prompt, int64 ``[B, T]``, 0 for padding, or None.
        merged: what `merges` returns; without it, what stays is as it was.
    """
    prompt = _Prompt()
    if kept is not None:
        prompt.keep = [selection.to_mask(ids.shape[1]) for selection in kept]
        changed = zip(kept, merged, strict=True) if merged else ()
        prompt.merged = {layer: (one, new) for layer, (one, new) in enumerate(changed) if new is not None}
    cache = DynamicCache(config=model.config)
    found: list[Tensor] = []
    with _listening(model, prompt.attend):
        for piece in (ids, *pieces):
            if mask is not None and found:
                mask = torch.cat([mask, torch.ones_like(piece)], dim=1)
            found.append(forward(model, piece, cache, mask))
            prompt.length = prompt.length or ids.shape[1]
    return torch.cat(found, dim=1)


def continuations(
    model: PreTrainedModel, ids: Tensor, continuation: Tensor, plans: Sequence[Plan | None]
) -> Iterator[Tensor]:
    """Yield the continuation's logits, ``[B, n, V]``, under each plan; the prompt is read once for all of them.

    Args:
        ids: the prompt, int64 ``[B, T]``, without padding.
        continuation: what follows, int64 ``[B, n]``, in one forward pass.
        plans: what of the prompt stays visible, by layer; None for everything.
    """
    prompt, cache = _Prompt(), DynamicCache(config=model.config)
    with _listening(model, prompt.attend):
        forward(model, ids, cache, None)
        prompt.length = ids.shape[1]
        for kept in plans:
            prompt.keep = None if kept is None else [selection.to_mask(prompt.length) for selection in kept]
            yield forward(model, continuation, cache, None)
            cache.crop(-continuation.shape[1])


@dataclass(frozen=True)
class Point:
    """Where an eviction is due.

    Args:
        seen: after how many tokens.
        since: the first token whose query may score.
        grace: the newest tokens it spares.
    """

    seen: int
    since: int = 0
    grace: int = 0


@dataclass
class _Replay:
    """Every query, key and value of each layer so far, and what is visible of them."""

    policy: Policy
    mask: Tensor
    points: dict[int, Point]
    layers: int
    record: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    keep: dict[int, Tensor] = field(default_factory=dict)
    memory: dict[int, Tensor | None] = field(default_factory=dict)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        layer, seen = module.layer_idx, key.shape[2]
        key, value = self._as_merged(layer, key, value)
        batch, query_heads, new, _ = query.shape
        heads = key.shape[1]
        before = self.record[layer][0] if layer in self.record else query[:, :, :0]
        queries = torch.cat([before, query], dim=2)
        start = seen - new
        shown = torch.ones(batch, heads, new, seen, dtype=torch.bool).tril(start).to(key.device)
        shown = shown & self.mask[:, None, None, :seen].bool()
        keep = self.keep.get(layer, torch.ones(batch, heads, 0, dtype=torch.bool))
        keep = torch.cat([keep, keep.new_ones(batch, heads, seen - keep.shape[2])], dim=-1)
        outputs, first = [], start
        # Tokens that come after an eviction in the middle of this pass no longer see what it took.
        for at in sorted({seen, *(at for at in self.points if start < at <= seen)}):
            # A query that sees nothing is padding: any answer will do, but nan.
            seeing = (shown & keep[:, :, None])[:, :, first - start : at - start]
            seeing = (seeing | ~seeing.any(-1, keepdim=True)).repeat_interleave(query_heads // heads, dim=1)
            rows = query[:, :, first - start : at - start]
            outputs.append(sdpa_attention_forward(module, rows, key, value, seeing, **kwargs)[0])
            if at in self.points:
                point = self.points[at]
                view, kept = self._evict(layer, queries, key, value, keep, point, kwargs.get("scaling"))
                keep = torch.cat([kept.to_mask(at), keep[:, :, at:]], dim=-1)
                key, value = self._merge(layer, view, kept, key, value)
            first = at
        self.keep[layer] = keep
        self.record[layer] = queries, key, value
        return torch.cat(outputs, dim=1), None

    def _as_merged(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a stock cache with what was merged in earlier passes."""
        if layer not in self.record:
            return key, value
        _, keys, values = self.record[layer]
        old = keys.shape[2]
        return torch.cat([keys, key[:, :, old:]], dim=2), torch.cat([values, value[:, :, old:]], dim=2)

    def _merge(self, layer: int, view: LayerView, kept: Selection, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        merged = self.policy.merge(view, kept, self.memory.get(layer))
        if merged is None:
            return key, value
        self.memory[layer] = merged.memory
        return put(key, value, kept, merged)

    def _evict(
        self, layer: int, queries: Tensor, key: Tensor, value: Tensor, keep: Tensor, point: Point, scaling: float | None
    ) -> tuple[LayerView, Selection]:
        end, window = point.seen, self.policy.needs.queries
        real = self.mask[:, :end].bool()
        view = LayerView(
            keys=key[:, :, :end],
            values=value[:, :, :end],
            valid=keep[:, :, :end] & real[:, None],
            seen=real.sum(-1),
            layer=layer,
            scaling=scaling,  # type: ignore[arg-type]
        )
        if window:
            order = torch.arange(end).expand_as(real)
            last = order.where(real & (order >= point.since), -1).sort(-1).values[:, -window:]
            index = last.clamp(min=0)[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])
            view = replace(view, queries=queries.gather(2, index), query_positions=last)
        tokens = self.policy.layer_slots(view.seen, self.layers)[:, layer]
        view = self.policy.protect(view, tokens, grace=point.grace)
        return view, self.policy.choose(view, *self.policy.scores(view), tokens)


def replay(
    model: PreTrainedModel,
    policy: Policy,
    pieces: Sequence[Tensor],
    points: Sequence[Point],
    mask: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the logits of all tokens, ``[B, T, V]``, and what each layer still shows, bool ``[B, Hkv, T]``.

    Args:
        model: all of its layers attend to every token.
        policy: what decides.
        pieces: int64 ``[B, q]`` each, one forward pass a piece.
        points: where it evicts.
        mask: int64 ``[B, T]`` over all pieces, 0 for padding, or None.

    Raises:
        PolicyError: when layers share their slots out: here each evicts by itself.
    """
    if policy.across_layers:
        raise PolicyError(f"policy '{policy.name}': expected layers that evict each by itself")
    batch, total = pieces[0].shape[0], sum(piece.shape[1] for piece in pieces)
    whole = torch.ones(batch, total, dtype=torch.int64) if mask is None else mask
    state = _Replay(policy, whole, {point.seen: point for point in points}, model.config.num_hidden_layers)
    cache, found, seen = DynamicCache(config=model.config), [], 0
    with _listening(model, state.attend):
        for piece in pieces:
            seen += piece.shape[1]
            found.append(forward(model, piece, cache, None if mask is None else mask[:, :seen]))
    return torch.cat(found, dim=1), [state.keep[layer] for layer in sorted(state.keep)]
