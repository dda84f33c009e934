"""Keyformer: accumulated attention with Gumbel noise, so that tokens not seen to matter yet get their chance."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from kvpolicy.blocks import Block, attention_blocks
from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.types import ALL, LayerView, Needs


@settings
class Keyformer:
    """The Gumbel softmax attention that a slot has got from every query so far, mean over the heads of the group.

    Its cost is that of `h2o`, and the noise. That comes from the seed, the layer, the query head, and the places of
    query and slot among the valid slots alone: padding and batch mates change nothing, and a run repeats. The authors'
    code draws from torch's random state and adds up the rows of a batch; and it raises the temperature by `tau_delta`
    at each new token, which a scorer, that keeps no count, cannot.

    Args:
        tau_init: the temperature while the prompt is read. Higher is more even.
        seed: another seed, other noise.

    >>> keys = torch.zeros(1, 1, 3, 2)
    >>> view = LayerView(keys=keys, values=keys, queries=torch.ones(1, 1, 3, 2))
    >>> float(Keyformer()(view).sum().round())  # as much as there are queries
    3.0
    """

    name = "keyformer"
    role = "importance"
    source = "Keyformer, arXiv 2403.09054, and its code, which draws noise for each query anew"
    formula = "mean_g sum_w softmax((q_w . k * scaling + gumbel) / tau_init)"
    cost = "time O(n^2 G D), memory O(n G D)"
    needs = Needs(queries=ALL, keys=True)
    tau_init: Annotated[float, Gt(0)] = 1.0
    seed: Annotated[int, Ge(0), Lt(2**47)] = 0

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, 0 or more, higher means more attended to."""
        device = view.valid.device
        scores = torch.zeros(view.valid.shape, dtype=torch.float32, device=device)
        heads = _mixed(
            torch.arange(view.kv_heads * view.group, dtype=torch.int32, device=device) ^ self._of(view.layer)
        )
        heads = heads.view(1, view.kv_heads, view.group, 1)
        slots = _mixed(view.valid.cumsum(-1).int())[:, :, None, None]
        for block in attention_blocks(view):
            queries = _mixed(heads ^ block.sees.sum(-1).int()[:, :, None])
            noisy = (block.logits + _gumbel(_mixed(queries[..., None] ^ slots))) / self.tau_init
            scores += Block(noisy, block.sees).attention().sum(-2).mean(2)
        return scores

    def _of(self, layer: int) -> int:
        """Return a whole number of 31 bits for the seed and a layer."""
        return (self.seed * 100_003 + layer + 1) % 2**31


def _gumbel(bits: Tensor) -> Tensor:
    """Return Gumbel noise, float32, of random int32."""
    # 23 bits and a half: neither 0 nor 1 in float32.
    uniform = (_shifted(bits, 9).float() + 0.5) * 2.0**-23
    return -(-uniform.log()).log()


def _mixed(numbers: Tensor) -> Tensor:
    """Return int32 that look random, each of one of `numbers`, int32: an integer hash with full avalanche."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, 16)


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """Return int32 shifted to the right, zeros coming in."""
    return (numbers >> by) & (2 ** (32 - by) - 1)


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [Keyformer]
