"""What the score of a press is called with: found in a view, or refused by name."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy import LayerView
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.types import Call
from kvpolicy_kvpress.presses import Read


@dataclass(frozen=True)
class Given:
    """The arguments of a press's `score` besides the keys; None for what it does not read.

    Args:
        module: the attention module, or what stands in for it.
        hidden_states: ``[1, n, d]``.
        values: ``[1, Hkv, n, Dv]``.
        attentions: ``[1, Hq, n, n]``.
        kwargs: what the module was called with by name.
    """

    module: Any = None
    hidden_states: Tensor | None = None
    values: Tensor | None = None
    attentions: Tensor | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, view: LayerView, reads: Collection[Read], press: str) -> Given:
        """Return what `press` reads of a view of one row without padding.

        Raises:
            UnsupportedModelError: when the model has it not, or not as kvpress takes it to be.
        """
        values = view.values if "values" in reads else None
        attentions = _weights(view) if "attention weights" in reads else None
        module: Any = None
        if "attention module" in reads:
            module = view.call.module  # type: ignore[union-attr]
        if "hidden states" not in reads:
            return cls(module, None, values, attentions)
        call: Call = view.call  # type: ignore[assignment]
        _check_projection(call, view.keys, press)
        if "rotary embedding" in reads:
            module = WithRotary(call.module, _rotary(call, press))
        return cls(module, call.hidden_states, values, attentions, {"position_embeddings": call.position_embeddings})


class WithRotary:
    """An attention module with the `rotary_emb` that a press finds there; the module itself stays as it is.

    Args:
        module: whose class and attributes it has.
        rotary: the one more.
    """

    def __init__(self, module: nn.Module, rotary: nn.Module) -> None:
        self._module = module
        self.rotary_emb = rotary

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@dataclass(frozen=True)
class Like:
    """What a press asks a model for before it loads weights that were trained for it.

    Args:
        name: of the model.
        dtype: of its keys.
        device: of its keys.
        config: its config.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    config: Any = field(compare=False)


def like(view: LayerView) -> Like:
    """Return what stands in for the model that a view is of."""
    config: Any = view.call.module.config  # type: ignore[union-attr]
    return Like(config.name_or_path, view.keys.dtype, view.keys.device, config)


def _check_projection(call: Call, keys: Tensor, press: str) -> None:
    """Raise unless kvpress makes the keys of the row's last token as the model does: it knows how some models do."""
    from kvpress.utils import get_prerope_key_states
    from transformers.models.llama.modeling_llama import rotate_half

    kind = type(call.module).__name__
    if call.position_embeddings is None:
        raise UnsupportedModelError(f"scorer 'kvpress': {press} reads position embeddings, and {kind} is given none")
    cos, sin = (part[:, None, -1:] for part in call.position_embeddings)
    try:
        made = get_prerope_key_states(call.module, call.hidden_states[:, -1:])
        made = made * cos + rotate_half(made) * sin
        error = (made - keys[:, :, -1:]).norm()
    except (AttributeError, NotImplementedError, RuntimeError) as wrong:
        raise UnsupportedModelError(
            f"scorer 'kvpress': {press}: kvpress cannot make the queries and keys of {kind} from hidden states: {wrong}"
        ) from wrong
    # Half of the digits: another norm or another rotation leaves none.
    if not bool(error <= torch.finfo(keys.dtype).eps ** 0.5 * keys[:, :, -1:].norm()):
        raise UnsupportedModelError(
            f"scorer 'kvpress': {press}: kvpress makes other queries and keys of hidden states than {kind} does"
        )


def _rotary(call: Call, press: str) -> nn.Module:
    """Return the rotary embedding of the model, made again from the module's config."""
    kind = type(call.module)
    home = vars(sys.modules[kind.__module__])
    found = [one for name, one in home.items() if name.endswith("RotaryEmbedding") and isinstance(one, type)]
    hidden = call.hidden_states
    try:
        (rotary,) = (one(config=call.module.config).to(hidden.device) for one in found)
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        made = torch.stack(rotary(hidden, places))
        given = torch.stack(call.position_embeddings)  # type: ignore[arg-type]
        same = made.shape == given.shape and torch.allclose(made, given)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as wrong:
        raise UnsupportedModelError(
            f"scorer 'kvpress': {press} turns queries to later positions; how {kind.__name__} turns cannot be found "
            f"from its config: {wrong}"
        ) from wrong
    if not same:
        raise UnsupportedModelError(
            f"scorer 'kvpress': {press} turns queries to later positions, counted from the first token of a row: "
            f"expected {kind.__name__} to turn that one by position 0, got other positions"
        )
    return rotary


def _weights(view: LayerView) -> Tensor:
    """Return the attention weights of every query, as eager attention computes them: ``[1, Hq, n, n]``."""
    if view.queries is None or view.queries.shape[2] != view.slots:
        raise UnsupportedModelError("scorer 'kvpress': expected a query for every token: read the prompt in one pass")
    keys = view.keys.repeat_interleave(view.group, dim=1)
    scores = view.queries @ keys.transpose(2, 3) * view.scaling
    ahead = torch.ones(view.slots, view.slots, dtype=torch.bool, device=scores.device).triu(1)
    scores = scores.masked_fill(ahead, torch.finfo(scores.dtype).min)
    return scores.softmax(-1, dtype=torch.float32).to(view.queries.dtype)
