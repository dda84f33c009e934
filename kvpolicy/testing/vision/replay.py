"""A conversation about pictures, and the oracle of it: a full, stock cache whose mask hides what a policy evicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpolicy.policy import Policy
from kvpolicy.session.decoder import cache_name
from kvpolicy.testing.architectures.configs import PLAIN_TOKENS, VOCABULARY
from kvpolicy.testing.architectures.hide import HidingCache, hide
from kvpolicy.testing.vision.families import Prompt
from kvpolicy.types import LayerView

ANSWER, TURN = 5, 6
"""Tokens of each of the two answers, and of the turn between them."""


@dataclass(frozen=True)
class Turns:
    """What a conversation left.

    Args:
        ids: int64 ``[B, all tokens]``.
        logits: of every new token, ``[B, 2 * ANSWER, V]``.
    """

    ids: Tensor
    logits: Tensor


def converse(model: PreTrainedModel, prompt: Prompt, cache: Any) -> Turns:
    """Return what comes of a prompt, an answer, a turn of text and another answer, all through `generate`."""
    rows = len(prompt.ids)
    turn = torch.randint(PLAIN_TOKENS, VOCABULARY, (rows, TURN), generator=torch.Generator().manual_seed(9))
    first = _answer(model, prompt.ids, prompt.mask, cache, **prompt.pictures)
    ids = torch.cat([first.ids, turn], dim=1)
    mask = torch.cat([prompt.mask, prompt.mask.new_ones(rows, ANSWER + TURN)], dim=1)
    more = {}
    if (crossed := prompt.pictures.get("cross_attention_mask")) is not None:
        more["cross_attention_mask"] = crossed[:, -1:].expand(-1, mask.shape[1], -1, -1)
    second = _answer(model, ids, mask, cache, **more)
    return Turns(second.ids, torch.cat([first.logits, second.logits], dim=1))


def _answer(model: Any, ids: Tensor, mask: Tensor, cache: Any, **given: Any) -> Turns:
    # Those that `generate` gives are rounded to float32.
    logits: list[Tensor] = []
    hook = model.register_forward_hook(lambda _, __, output: logits.append(output.logits[:, -1]))
    try:
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            **given,
            **{cache_name(model): cache},
            max_new_tokens=ANSWER,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=list(range(PLAIN_TOKENS)),
        )
    finally:
        hook.remove()
    return Turns(out, torch.stack(logits, dim=1))


class Replay(HidingCache):
    """A stock cache that decides by itself what a policy would evict in a conversation, and hides it from then on.

    Args:
        model: whose layers it holds.
        policy: what decides; None to hide nothing.
        prompt: the first of the conversation.
        layers: the indices of those that evict.
    """

    def __init__(self, model: PreTrainedModel, policy: Policy | None, prompt: Prompt, layers: Sequence[int]) -> None:
        super().__init__(model.config.get_text_config(), {})
        self._model = model
        self._policy = policy
        self._layers = list(layers)
        length = prompt.ids.shape[1]
        new = (0, 2 * ANSWER + TURN)
        self._real = nn.functional.pad(prompt.mask.bool(), new, value=True)
        self._modality = nn.functional.pad(prompt.modality, new)
        # Tokens seen when it evicts, and the first of them whose query may score.
        self._points = {length: 0, length + ANSWER + TURN: length + ANSWER - 1}
        self._queries: dict[int, Tensor] = {}
        self.before_rope: dict[int, Tensor] = {}

    def attend(
        self,
        own: Callable[..., Any],
        additive: bool,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return what the model's `own` attention function gives of what is still to be seen."""
        layer, seen = self.layer_of(key), key.shape[2]
        if layer not in self._layers or self._policy is None:
            return own(module, query, key, value, attention_mask, *args, **kwargs)
        if layer in self.keep:
            attention_mask = hide(attention_mask, self.keep[layer], query, key, additive=additive)
        before = self._queries.get(layer, query[:, :, :0])
        self._queries[layer] = torch.cat([before, query], dim=2)
        if seen in self._points:
            self.keep[layer] = self._evict(self._policy, layer, key, value, kwargs.get("scaling"))
        return own(module, query, key, value, attention_mask, *args, **kwargs)

    def _evict(self, policy: Policy, layer: int, key: Tensor, value: Tensor, scaling: Any) -> Tensor:
        heads, seen = key.shape[1:3]
        real = self._real[:, :seen]
        kept = self.keep.get(layer, real[:, None, :0].expand(-1, heads, -1))
        kept = torch.cat([kept, kept.new_ones(len(kept), heads, seen - kept.shape[2])], dim=-1)
        queries, window = self._queries[layer], policy.needs.queries
        order = torch.arange(seen).expand_as(real)
        last = order.where(real & (order >= self._points[seen]), -1).sort(-1).values[:, seen - window :]
        index = last.clamp(min=0)[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])
        view = LayerView(
            keys=key,
            values=value,
            valid=kept & real[:, None],
            queries=queries.gather(2, index),
            query_positions=last,
            seen=real.sum(-1),
            layer=layer,
            scaling=scaling,
            modality=self._modality[:, None, :seen].repeat(1, heads, 1),
        )
        if policy.needs.pre_rope:
            view = replace(view, pre_rope_keys=self.before_rope[layer].float())
        tokens = policy.layer_slots(view.seen, len(self._layers))[:, self._layers.index(layer)]
        return policy.plan_layer(view, tokens).to_mask(seen)


@contextmanager
def projections(decoder: nn.Module, cache: Replay) -> Iterator[None]:
    """Give a replay the keys before RoPE as a decoder's own projections make them, ``[B, Hkv, seen, Dk]``."""

    def taking(module: Any) -> Callable[..., None]:
        def take(_: Any, __: Any, output: Tensor) -> None:
            layer, heads = module.layer_idx, module.config.num_key_value_heads
            keys = output.unflatten(-1, (heads, -1)) if output.ndim == 3 else output
            # A norm may come before or after the heads are moved forward.
            keys = keys if keys.shape[1] == heads else keys.transpose(1, 2)
            old = cache.before_rope.get(layer, keys[:, :, :0])
            cache.before_rope[layer] = torch.cat([old, keys], dim=2)

        return take

    owners: list[Any] = [module for module in decoder.modules() if hasattr(module, "k_proj")]
    last = [getattr(module, "k_norm", module.k_proj) for module in owners]
    handles = [one.register_forward_hook(taking(owner)) for one, owner in zip(last, owners, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
