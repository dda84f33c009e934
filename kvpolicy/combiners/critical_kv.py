"""CriticalKV: an importance, weighed by how much a slot's value can move the output of the attention module."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge
from einops import rearrange
from torch import Tensor

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import HUGE, ranks
from kvpolicy.plugin import Score, settings
from kvpolicy.types import LayerView, Needs

# Slots projected at once: a projected value is as wide as the model.
_BLOCK = 1024


@settings
class CriticalKV:
    """The importance times the L1 length of the value behind the output projection; the most important come first.

    Stage 1: the `first` candidates of highest importance are kept before all others, in that order. Stage 2: the others
    by ``(importance + epsilon) * |W_o v|_1``, mean over the query heads of the group. In kvpress stage 1
    takes half of the budget, which a score does not know: set `first` to half of what the policy keeps, less recent.

    The weights are those of the attention module, so it scores prompts that are read in one pass, and no others.

    Args:
        importance: the score that is weighed, mostly an attention; 0 or more.
        first: how many slots of a head the importance alone decides; 0 for stage 2 alone.
        epsilon: added to the importance, so that values count where it is 0.

    The projection of one head is the identity, and the values are 1, 5 and 2 long:

    >>> from kvpolicy.scorers.recency import Recency
    >>> from kvpolicy.types import Call
    >>> module = torch.nn.Module()
    >>> module.o_proj = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.ones_(module.o_proj.weight)
    >>> values = torch.tensor([[[[1.0], [-5.0], [2.0]]]])
    >>> view = LayerView(keys=values, values=values, call=Call(module, torch.zeros(1, 3, 1)))
    >>> importance = torch.tensor([[[2.0, 1.0, 3.0]]])
    >>> CriticalKV(importance=Recency(), epsilon=0)(view, importance=importance).tolist()
    [[[2.0, 5.0, 6.0]]]
    """

    name = "critical-kv"
    source = "CriticalKV, arXiv 2502.03805, and its press in kvpress"
    formula = "the first by importance, then (importance + epsilon) * mean_g |W_o v_i|_1"
    cost = "time O(n G D M + n log n), memory O(n + G D M)"
    needs = Needs(values=True, call=True)
    importance: Score
    first: Annotated[int, Ge(0)] = 0
    epsilon: Annotated[float, Ge(0)] = 1e-4

    def __call__(self, view: LayerView, *, importance: Tensor) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, higher means keep.

        Args:
            view: with the values and the module that they are projected by.
            importance: float32 ``[B, Hkv, T]``.

        Raises:
            UnsupportedModelError: when the attention module has no output projection that is known.
        """
        scores = ((importance + self.epsilon) * self._lengths(view)).clamp(max=HUGE / 4)
        if not self.first:
            return scores
        place = ranks(importance.where(view.candidates, -torch.inf))
        highest = scores.where(view.candidates, 0).amax(-1, keepdim=True).clamp(min=1)
        return (highest * (3 - place / self.first)).where(place < self.first, scores)

    def _lengths(self, view: LayerView) -> Tensor:
        """Return the mean over the group of each value's L1 length behind the projection, float32 ``[B, Hkv, T]``."""
        weights = _projection(view)
        lengths = []
        for start in range(0, view.slots, _BLOCK):
            values = view.values[:, :, start : start + _BLOCK].float()
            each = [torch.linalg.vector_norm(values @ head, ord=1, dim=-1) for head in weights]
            lengths.append(torch.stack(each).mean(0))
        return torch.cat(lengths, dim=-1)


def _projection(view: LayerView) -> Tensor:
    """Return the output projection by query head of a group, float32 ``[G, Hkv, Dv, d]``."""
    module, size = view.call.module, view.values.shape[-1]  # type: ignore[union-attr]
    weight = getattr(getattr(module, "o_proj", None), "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[1] % (view.kv_heads * size):
        got = "none" if weight is None else f"{list(weight.shape)}"
        raise UnsupportedModelError(
            f"combiner 'critical-kv': {type(module).__name__}: expected an output projection 'o_proj' with weights "
            f"[hidden size, a multiple of {view.kv_heads} heads * {size}], got {got}: use another policy"
        )
    return rearrange(weight.detach().float(), "o (h g d) -> g h d o", h=view.kv_heads, d=size)


@hookimpl
def kvpolicy_combiners() -> list[type]:
    """Return the combiners of this module."""
    return [CriticalKV]
