"""What a context is asked with: ids and masks, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.errors import ContextError
from kvpolicy.session.decoder import forward_names
from kvpolicy.session.positions import keepers

CROSSED = "cross_attention_mask"
"""What tells each token of Mllama which pictures it may attend to."""
_OWN = ("position_ids", "inputs_embeds", "labels")


@dataclass(frozen=True)
class Tokens:
    """Ids and which of them are padding.

    Args:
        ids: int64 ``[B, T]``.
        mask: int64 ``[B, T]``, 0 for padding.
    """

    ids: Tensor
    mask: Tensor

    @property
    def length(self) -> int:
        """T, how many columns."""
        return self.ids.shape[1]

    @property
    def padded(self) -> bool:
        """Whether any of them is padding."""
        return not bool(self.mask.all())

    @property
    def gaps(self) -> bool:
        """Whether padding stands behind a token."""
        return bool((self.mask.diff(dim=1) < 0).any())

    def join(self, other: Tokens) -> Tokens:
        """Return these tokens and `other` behind them."""
        return Tokens(torch.cat([self.ids, other.ids], dim=1), torch.cat([self.mask, other.mask], dim=1))

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        """Return the tokens before column `at`, which may be negative, and those from there on."""
        return Tokens(self.ids[:, :at], self.mask[:, :at]), Tokens(self.ids[:, at:], self.mask[:, at:])

    def take_rows(self, rows: Tensor) -> Tokens:
        """Return the rows `rows` (int64), which may repeat."""
        rows = rows.to(self.ids.device)
        return Tokens(self.ids[rows], self.mask[rows])


def read(given: Any, what: str, device: torch.device) -> tuple[Tokens, dict[str, Any]]:
    """Return the tokens in `given`, and what else is in it, all on `device`.

    Args:
        given: ids ``[T]`` or ``[B, T]``, or the mapping that a tokenizer or processor returns.
        what: its name in errors.
        device: of the model.

    Raises:
        ContextError: when there are no ids, or things that ids and their mask have to say by themselves.
    """
    given = dict(given) if isinstance(given, Mapping) else {"input_ids": given}
    ids, mask = given.pop("input_ids", None), given.pop("attention_mask", None)
    own = [name for name in _OWN if given.get(name) is not None]
    if own:
        raise ContextError(f"{what}: expected input_ids and what belongs to them, got {', '.join(own)} besides")
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.ndim not in (1, 2) or not ids.numel():
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ContextError(
            f"{what}: expected ids [B, T] as a tensor, or a mapping with input_ids, got {got}. "
            "Of a tokenizer, ask return_tensors='pt'"
        )
    ids = ids.to(device).view(-1, ids.shape[-1])
    mask = torch.ones_like(ids) if mask is None else torch.as_tensor(mask, device=device)
    if mask.shape[-1:] != ids.shape[-1:] or mask.numel() != ids.numel():
        raise ContextError(f"{what}: expected an attention_mask {list(ids.shape)}, got {list(mask.shape)}")
    mask = mask.view(-1, ids.shape[-1])
    rest = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    return Tokens(ids.long(), mask.long()), rest


def read_question(given: Any, device: torch.device, rows: int) -> Tokens:
    """Return the tokens of a question of `rows` rows; one row is put to all of them.

    Raises:
        ContextError: when it is more than ids and a mask, has other rows, or ends in padding.
    """
    tokens, rest = read(given, "question", device)
    extra = sorted(name for name in rest if not name.endswith("token_type_ids"))
    if extra:
        raise ContextError(f"question: expected text (input_ids, attention_mask), got {', '.join(extra)} besides")
    if len(tokens.ids) == 1:
        tokens = tokens.take_rows(torch.zeros(rows, dtype=torch.int64, device=tokens.ids.device))
    if len(tokens.ids) != rows:
        raise ContextError(
            f"question: expected 1 row or {rows}, one for each of the fork, got {len(tokens.ids)}: "
            f"context.fork(rows={len(tokens.ids)}) has as many"
        )
    if not bool(tokens.mask[:, -1].all()):
        raise ContextError("question: expected rows padded on the left, as their last token is what is gone on from")
    return tokens


def forward_arguments(
    model: nn.Module, tokens: Tokens, rest: Mapping[str, Any], *, last: int, seen: int = 0
) -> dict[str, Any]:
    """Return the arguments of a forward pass, as `generate` would call it.

    Args:
        model: whose `forward` it is.
        tokens: all of the sequence.
        rest: what else it is called with: pixels and the like.
        last: of how many of the last tokens logits are computed, where the model can be told.
        seen: how many of the tokens are in the cache already.
    """
    names = forward_names(model)
    given: dict[str, Any] = {"input_ids": tokens.ids[:, seen:], "use_cache": True, **rest}
    if "logits_to_keep" in names:
        # All logits of a prompt of 4,096 tokens are most of a gigabyte, and a fifth of the work.
        given["logits_to_keep"] = last
    if tokens.padded:
        given["attention_mask"] = tokens.mask
        # Only `generate` derives positions from padding; models with positions of their own do, where they see images.
        if "position_ids" in names and not (keepers(model) and rest):
            given["position_ids"] = _positions(tokens.mask)[:, seen:]
    return given


def crossed_behind(rest: Mapping[str, Any], tokens: Tokens) -> Tensor | None:
    """Return the part of the pictures that text behind the tokens may attend to, as their last ones do.

    Of models that reach pictures by cross-attention (Mllama): ``[B, 1, pictures, tiles]``; None of all others.
    """
    mask: Tensor | None = rest.get(CROSSED)
    if mask is None:
        return None
    last = (tokens.mask * torch.arange(tokens.length, device=tokens.mask.device)).argmax(-1)
    return mask[torch.arange(len(mask), device=mask.device), last][:, None]


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
