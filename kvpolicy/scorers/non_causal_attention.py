"""Non-causal attention: what the queries of a chunk give to the slots of the chunk, whichever comes first."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge
from einops import einsum, rearrange, reduce
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvpolicy.attention import LIMIT
from kvpolicy.hookspecs import hookimpl
from kvpolicy.maths import norms
from kvpolicy.plugin import settings
from kvpolicy.types import ALL, LayerView, Needs
from kvpolicy.wrap import by_row


@settings
class NonCausalAttention:
    """The attention that a slot gets from all queries of its chunk, times the length of its value, pooled over three.

    Chunks are of `chunk_size` slots, padding left out; the query of a slot is that of its token, so slots are best
    scored before any is evicted. Every query of the prompt is recorded, which takes as much memory as the keys of all
    query heads; time grows with the prompt alone. As in the authors' code, logits are not scaled, and the last chunk is
    filled up with queries and keys of zeros that take part. The code's z-scores, of a layer as a whole, are left out:
    they change no order in it, and in a blend `fixed` has them (``normalize: z-score, over: layer``).

    Args:
        chunk_size: slots of a chunk.
        among: which slots are put into chunks: all that are "valid", or the "candidates" alone, as Compactor's blend
            does.

    Keys alike, values of length 1: each of four slots gets 1, and a pool of three counts one zero at either end.

    >>> ones = torch.ones(1, 1, 4, 1)
    >>> view = LayerView(keys=ones, values=ones, queries=ones)
    >>> (NonCausalAttention(chunk_size=2)(view) * 3).round().tolist()
    [[[2.0, 3.0, 3.0, 2.0]]]
    """

    name = "non-causal-attention"
    role = "importance"
    source = "Compactor, arXiv 2507.08143, and NonCausalAttnPress of kvpress, by its authors"
    formula = "pool_3(|v_i| * mean_g sum_j softmax(q_j . k_i)), j over the queries of the chunk, i over its slots"
    cost = "time O(n C G D), memory O(n G D + C^2 G)"
    needs = Needs(queries=ALL, keys=True, values=True)
    chunk_size: Annotated[int, Ge(1)] = 256
    among: Literal["valid", "candidates"] = "valid"

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, 0 or more, in the unit of the values, higher means more attended to."""
        among = view.valid if self.among == "valid" else view.candidates
        return by_row(view, self._score, reader=f"scorer '{self.name}'", among=among)

    def _score(self, row: LayerView) -> Tensor:
        keys = row.keys[0].float().clamp(-LIMIT, LIMIT)
        chunks = zip(keys.split(self.chunk_size, 1), row.positions[0].long().split(self.chunk_size, 1), strict=True)
        attention = torch.cat([self._received(row, *chunk) for chunk in chunks], dim=-1)
        # A slot gets 1 from each query at most: the pool's sum of three stays finite.
        largest = torch.finfo(torch.float32).max / (4 * self.chunk_size)
        return avg_pool1d(attention[None] * norms(row.values).clamp(max=largest), 3, stride=1, padding=1)

    def _received(self, row: LayerView, keys: Tensor, positions: Tensor) -> Tensor:
        """Return what the slots of a chunk get, ``[H, c]``, of keys ``[H, c, D]`` at positions int64 ``[H, c]``."""
        queries, asked = _queries_at(row, positions)
        filled = self.chunk_size - keys.shape[1]
        logits = einsum(queries, keys, "h g q d, h k d -> h g q k")
        # A softmax in which each key of zeros has a logit of 0.
        largest = logits.amax(-1, keepdim=True)
        largest = largest.clamp(min=0) if filled else largest
        weights = (logits - largest).exp()
        of_zeros = filled * (-largest).exp() if filled else 0
        attention = weights / (weights.sum(-1, keepdim=True) + of_zeros) * asked[:, None, :, None]
        # Each query of zeros gives an even share to all.
        return reduce(attention, "h g q k -> h g k", "sum").mean(1) + filled / self.chunk_size


def _queries_at(row: LayerView, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the query at each position, float32 ``[H, G, c, D]``, and where there is one, bool ``[H, c]``."""
    asking = row.query_positions[0]
    index = torch.searchsorted(asking, positions.contiguous()).clamp(max=len(asking) - 1)
    queries = rearrange(row.queries[0], "(h g) w d -> h g w d", h=row.kv_heads)  # type: ignore[index]
    index_of = index[:, None, :, None].expand(-1, row.group, -1, queries.shape[-1])
    return queries.gather(2, index_of).float().clamp(-LIMIT, LIMIT), asking[index] == positions


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [NonCausalAttention]
