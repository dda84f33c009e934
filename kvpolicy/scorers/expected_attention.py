"""Expected attention: what queries yet to come will give to a slot, if they are as those so far."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Ge
from einops import einsum, rearrange
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import norms
from kvpolicy.plugin import settings
from kvpolicy.types import ALL, LayerView, Needs
from kvpolicy.wrap import by_row


@settings
class ExpectedAttention:
    """The attention that the next queries are expected to pay to a slot, times the length of its value.

    Queries before RoPE are taken for normally distributed, with the mean and covariance of the prompt's, turned by the
    mean rotation of the next positions. Scores one pass over a whole prompt, in models with RoPE over halves of a head,
    whose positions rise by one; others are refused. Every query of the prompt is recorded, which takes as much memory
    as the keys of all query heads; time grows with the prompt alone.

    Args:
        n_future_positions: over how many next positions the rotation is averaged.
        n_sink: the first tokens, whose queries are outliers and left out; they score above all others.
        use_covariance: whether the covariance counts, or the mean alone.
        use_vnorm: whether attention is multiplied by the length of the value.
        epsilon: added to the attention before that.

    >>> ExpectedAttention().needs.call  # it has to know how positions turn, so only a model runs it
    True
    """

    name = "expected-attention"
    role = "importance"
    source = "Expected Attention, arXiv 2510.00636, and ExpectedAttentionPress of kvpress, by its authors"
    formula = "(mean_g softmax(k . R m * scaling + k . R C R^T k * scaling^2 / 2) + epsilon) * |v|, m, C of queries"
    cost = "time O(n G D^2), memory O(n G D + G D^2)"
    needs = Needs(queries=ALL, keys=True, values=True, pre_rope=True, call=True)
    n_future_positions: Annotated[int, Ge(1)] = 512
    n_sink: Annotated[int, Ge(0)] = 4
    use_covariance: bool = True
    use_vnorm: bool = True
    epsilon: Annotated[float, Ge(0)] = 0.0

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, 0 or more, higher means more attention expected."""
        return by_row(view, self._score, reader=f"scorer '{self.name}'")

    def _score(self, row: LayerView) -> Tensor:
        if row.slots <= self.n_sink:
            return torch.zeros(row.valid.shape, dtype=torch.float32, device=row.valid.device)
        cos, sin = _tables(row)
        queries = _unturned(row.queries[0].double(), cos, sin)[:, self.n_sink :]  # type: ignore[index]
        keys = row.keys[0, :, self.n_sink :].double()
        ahead = _mean_ahead(cos, sin, self.n_future_positions)
        mean = queries.mean(1)
        turned = rearrange(_turned(mean, *ahead), "(h g) d -> h g d", g=row.group)
        logits = einsum(turned, keys, "h g d, h t d -> h g t") * row.scaling
        if self.use_covariance:
            centred = queries - mean[:, None]
            covariance = centred.mT @ centred / centred.shape[1]
            covariance = _turned(_turned(covariance, *ahead).mT, *ahead)
            covariance = rearrange(covariance, "(h g) d e -> h g d e", g=row.group)
            logits += _quadratic(keys, covariance) * (row.scaling**2 / 2)
        scores = logits.softmax(-1).mean(1)
        if self.use_vnorm:
            scores = (scores + self.epsilon) * norms(row.values[0, :, self.n_sink :])
        return pad(scores, (self.n_sink, 0), value=float(scores.max()) + 1)[None]


def _quadratic(keys: Tensor, matrices: Tensor) -> Tensor:
    """Return ``k . C k``, ``[H, G, T]``, of keys ``[H, T, D]`` and matrices C ``[H, G, D, D]``, one of G at a time."""
    return torch.stack([((keys @ matrix) * keys).sum(-1) for matrix in matrices.unbind(1)], dim=1)


def _tables(row: LayerView) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of a row's tokens, float64 ``[n, r/2]``, one a pair.

    Raises:
        UnsupportedModelError: when the model does not turn halves of a head by them.
    """
    call = row.call
    kind = type(call.module).__name__  # type: ignore[union-attr]
    if row.queries.shape[2] != row.slots:  # type: ignore[union-attr]
        raise UnsupportedModelError("scorer 'expected-attention': expected a query for every token of the prompt")
    if call.position_embeddings is None:  # type: ignore[union-attr]
        raise UnsupportedModelError(
            f"scorer 'expected-attention' reads position embeddings, and {kind} is given none: use another scorer"
        )
    cos, sin = (each[0, :, : each.shape[-1] // 2].double() for each in call.position_embeddings)  # type: ignore[union-attr]
    made = _turned(row.pre_rope_keys[0].double(), cos, sin)  # type: ignore[index]
    keys = row.keys[0].double()
    # Half of the digits, of float32 at best, as the keys before RoPE are: another rotation leaves none.
    near = max(torch.finfo(call.hidden_states.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5  # type: ignore[union-attr]
    if not bool((made - keys).norm() <= near * keys.norm()):
        raise UnsupportedModelError(
            f"scorer 'expected-attention': expected {kind} to turn the two halves of a head as Llama does, and it "
            "turns keys in another way: use another scorer"
        )
    return cos, sin


def _mean_ahead(cos: Tensor, sin: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the mean cosines and sines, ``[r/2]``, of the `count` positions that follow those of a row.

    Raises:
        UnsupportedModelError: when the angles do not rise evenly.
    """
    angles = torch.atan2(sin, cos)
    steps = torch.remainder(angles.diff(dim=0) + math.pi, 2 * math.pi) - math.pi
    step = steps.sum(0) / max(len(steps), 1)
    # One position more turns the fastest pair by 1; rounding to bfloat16 moves an angle by less than 0.01.
    if bool(((steps - step).abs() > 0.1).any()):
        raise UnsupportedModelError(
            "scorer 'expected-attention': expected positions that rise by one from token to token, as text has them"
        )
    later = angles[-1] + torch.arange(1, count + 1, device=cos.device)[:, None] * step
    size = torch.hypot(cos[-1], sin[-1])
    return later.cos().mean(0) * size, later.sin().mean(0) * size


def _turned(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `vectors` ``[..., D]`` with the pairs of their first r dimensions turned by angles ``[..., r/2]``."""
    half = cos.shape[-1]
    first, second, rest = vectors.split([half, half, vectors.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _unturned(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the vectors that `_turned` made these of."""
    size = cos.square() + sin.square()
    return _turned(vectors, cos / size, -sin / size)


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [ExpectedAttention]
