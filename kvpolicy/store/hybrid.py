"""`EvictingHybridLayer`: a layer that keeps a recurrent state beside its keys and values, and evicts from those."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kvpolicy.store.layer import EvictingLayer, Owner
from kvpolicy.store.state import State, attributes, give


class EvictingHybridLayer(LinearAttentionLayer, EvictingLayer):  # type: ignore[misc, override]
    """An evicting layer with the convolution and recurrent states of a linear-attention layer, which nothing evicts.

    Args:
        index: the model's layer index.
        owner: is told of each update and attention.
        number_of_states: how many states of each kind it keeps.
    """

    is_compileable = False

    def __init__(self, index: int, owner: Owner, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        EvictingLayer.__init__(self, index, owner)

    def reset(self) -> None:
        """Forget everything; the layer is as new."""
        LinearAttentionLayer.reset(self)
        EvictingLayer.reset(self)

    def state(self) -> State:
        """Return what the layer holds, recurrent states included."""
        return EvictingLayer.state(self) | attributes(self, sorted(self.beside)).inside("recurrent")

    @property
    def beside(self) -> dict[str, Any]:
        """The recurrent states, by attribute."""
        return {
            name: getattr(self, name) for name in vars(LinearAttentionLayer(number_of_states=self.number_of_states))
        }

    def restore(self, state: State) -> None:
        """Take what another layer held, on the tensors of its `state`."""
        EvictingLayer.restore(self, state)
        give(self, state.part("recurrent"))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the batch by its rows `beam_idx`."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        EvictingLayer.reorder_cache(self, beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace the batch by its rows `indices`, which may repeat; a bool mask selects."""
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self.reorder_cache(rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens from both."""
        # First the one that may refuse.
        EvictingLayer.crop(self, tokens_to_remove)
        LinearAttentionLayer.crop(self, tokens_to_remove)
