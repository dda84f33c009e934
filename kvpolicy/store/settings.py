"""Ways to store what is kept, as a policy file names them."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge

from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.store.dense import DenseStore
from kvpolicy.store.offloaded import OffloadedStore
from kvpolicy.store.quantized import QuantizedStore
from kvpolicy.store.ragged import RaggedStore


@settings
class Plain:
    """Kept slots are stored as the model computed them.

    >>> Plain().name
    'plain'
    """

    name = "plain"
    source = "kvpolicy"
    formula = "k, v as they are"

    def __call__(self, kept: DenseStore | RaggedStore) -> DenseStore | RaggedStore:
        """Return the store of the kept slots, `kept` itself."""
        return kept


@settings
class Quantized:
    """Kept slots are stored in `bits` a number: keys per channel, values per token.

    A group's smallest and largest number are stored with it, in the model's dtype, and come back exactly.

    Args:
        bits: of a number.
        group: how many numbers share their smallest and largest: slots of a channel of the keys, channels of a
            slot's values.
        residual: the newest tokens since the last eviction that are never quantized; up to `group` more wait until
            their group is whole.

    >>> Quantized(bits=8)
    Quantized(bits=8, group=32, residual=32)
    """

    name = "quantized"
    source = "KIVI, arXiv 2402.02750, algorithm 1; 4 and 8 bits, and what eviction keeps is quantized at once"
    formula = "round((x - low) / (high - low) * (2^bits - 1)), low and high of x's group"
    bits: Literal[4, 8] = 4
    group: Annotated[int, Ge(8)] = 32
    residual: Annotated[int, Ge(0)] = 32

    def __call__(self, kept: DenseStore | RaggedStore) -> QuantizedStore:
        """Return a quantized store of the kept slots, which holds nothing of `kept`."""
        return QuantizedStore(kept, bits=self.bits, group=self.group, residual=self.residual)


@settings
class Offloaded:
    """Kept slots are stored in the CPU's memory; each layer's come to the model's device while it attends.

    >>> Offloaded().name
    'offloaded'
    """

    name = "offloaded"
    source = "as offloaded caches of transformers, without their prefetching"
    formula = "k, v as they are, on the CPU"

    def __call__(self, kept: DenseStore | RaggedStore) -> OffloadedStore:
        """Return a store in the CPU's memory, which holds nothing of `kept`."""
        return OffloadedStore(kept)


@hookimpl
def kvpolicy_stores() -> list[type]:
    """Return the stores of this module."""
    return [Plain, Quantized, Offloaded]
