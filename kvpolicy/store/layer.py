"""`EvictingLayer`: the layer that stands in a transformers cache and keeps a store instead of everything."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.step import Step, tag
from kvpolicy.store import build
from kvpolicy.store.dense import DenseStore
from kvpolicy.store.ragged import RaggedStore
from kvpolicy.types import Selection


class Owner(Protocol):
    """Whoever put a layer into a cache. It must not hold the layer, or caches would outlive their last user."""

    plain: bool
    """Whether the mask of this pass is causal order and padding alone, and every stored slot is visible."""

    def updating(self, layer: EvictingLayer) -> None:
        """Take note before an update; raise where the layer may not be used."""

    def attended(self, layer: EvictingLayer, query: Tensor, scaling: float | None) -> None:
        """Take note that attention has run on the layer."""


class EvictingLayer(DynamicLayer):
    """One layer of a cache. Its sequence length is tokens *seen*; what it stores is what was kept.

    Args:
        index: the model's layer index.
        owner: is told of each update and attention.
    """

    def __init__(self, index: int, owner: Owner) -> None:
        self.index = index
        self.owner = owner
        self.reset()

    def reset(self) -> None:
        """Forget everything; the layer is as new."""
        self.store: DenseStore | RaggedStore | None = None
        self.seen = 0
        self.is_initialized = False
        # Slots kept and tokens seen at the last eviction; every head gained every token since.
        self._settled: list[list[int]] = []
        self.settled_at = 0

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Dense: ``[B, Hkv, n, Dk]``. Ragged: packed ``[N, Dk]``. None before the first token."""
        return None if self.store is None else self.store.keys

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """Dense: ``[B, Hkv, n, Dv]``. Ragged: packed ``[N, Dv]``. None before the first token."""
        return None if self.store is None else self.store.values

    @property
    def kept(self) -> list[list[int]]:
        """Slots stored, by batch row and KV head."""
        return [[count + self.seen - self.settled_at for count in row] for row in self._settled]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values to attend to; heads of different lengths travel in the keys' step."""
        self.owner.updating(self)
        start = self.seen
        if self.store is None:
            # Held as they are until attention has run: evicting then copies what is kept, and only that.
            self.store = DenseStore(key_states, value_states, None)
            self._settled = [[0] * key_states.shape[1] for _ in range(key_states.shape[0])]
            self.is_initialized = True
        else:
            # Buffers that grow outlive `torch.inference_mode`; nothing is learned through a cache.
            with torch.inference_mode(False), torch.no_grad():
                self.store.append(key_states, value_states, start)
        self.seen += key_states.shape[2]
        store = self.store
        keys, values = (key_states, value_states) if isinstance(store, RaggedStore) else (store.keys, store.values)
        positions = store.positions if isinstance(store, DenseStore) else None
        step = Step(store, values, positions, start, self.owner.plain, partial(self.owner.attended, self))
        return tag(keys, step), values

    def padded(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and positions of what is stored, every head aligned at its last slot."""
        if self.store is None:
            raise UnsupportedModelError(f"layer {self.index}: expected tokens, got none")
        return self.store.padded()

    def evict(self, view: tuple[Tensor, Tensor, Tensor | None], selection: Selection) -> None:
        """Keep the selected slots of `view` (keys, values, positions) and free the rest."""
        self.store, self._settled = build(*view, selection)
        self.settled_at = self.seen

    def own(self) -> None:
        """Copy what is held out of the model's tensors, which may be views of larger ones."""
        if isinstance(self.store, DenseStore):
            with torch.inference_mode(False), torch.no_grad():
                self.store.own()

    def get_seq_length(self) -> int:
        """Return how many tokens the layer has seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return the length and offset of the mask: tokens seen, never slots kept."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.seen + new, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: `-n` removes n, a positive number is the length to return to.

        Raises:
            UnsupportedModelError: when that reaches back to tokens among which some were evicted, or comes right after
                an eviction: only decoding with drafts (assisted, prompt lookup) crops there, by nothing where it
                accepts them all, and its drafts were scored as if they belonged to the prompt.
        """
        count = -tokens_to_remove if tokens_to_remove <= 0 else max(self.seen - tokens_to_remove, 0)
        if self.store is None:
            return
        if self.settled_at and self.seen == self.settled_at:
            raise UnsupportedModelError(
                f"crop: layer {self.index} has just evicted. Assisted and prompt-lookup decoding cannot run under a "
                "policy: their drafts come in one pass with the prompt"
            )
        if self.seen - count < self.settled_at:
            raise UnsupportedModelError(
                f"crop: expected at most the {self.seen - self.settled_at} tokens that layer {self.index} has seen "
                f"since its last eviction, got {count}: slots before that were evicted"
            )
        self.store.drop_last(count)
        self.seen -= count

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the batch by its rows `beam_idx`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace the batch by its rows `indices`, which may repeat; a bool mask selects."""
        if self.store is None:
            return
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self.store.take_rows(rows)
        self._settled = [self._settled[row] for row in rows.tolist()]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self.batch_select_indices(torch.arange(len(self._settled)).repeat_interleave(repeats))

    def offload(self) -> None:
        """Refuse: an evicting layer stays where the model computes."""
        raise UnsupportedModelError("an offloaded cache cannot evict: give the model a plain DynamicCache")
