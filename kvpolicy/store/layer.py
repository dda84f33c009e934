"""`EvictingLayer`: the layer that stands in a transformers cache and keeps a store instead of everything."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvpolicy.compat import new_tokens, tokens_to_crop
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.plugin import Store
from kvpolicy.step import Attended, Left, Step, mark, tag
from kvpolicy.store import build, restore
from kvpolicy.store.dense import DenseStore
from kvpolicy.store.offloaded import OffloadedStore
from kvpolicy.store.quantized import QuantizedStore
from kvpolicy.store.ragged import RaggedStore
from kvpolicy.store.state import State
from kvpolicy.types import Merged, Selection
from kvpolicy.window import Window

_PLAIN = ("seen", "settled_at", "_settled", "slot_bytes", "scaling", "shared", "is_initialized")
"""What a layer knows besides tensors."""


class Owner(Protocol):
    """Whoever put a layer into a cache. It must not hold the layer, or caches would outlive their last user."""

    plain: bool
    """Whether the mask of this pass is causal order and padding alone, and every stored slot is visible."""

    def updating(self, layer: EvictingLayer, new: int) -> int | None:
        """Return how many of `new` tokens come before the pass evicts, None where it does not evict in its middle."""

    def attended(self, layer: EvictingLayer, attended: Attended) -> Left | None:
        """Take note that attention has run; return what is left, where the pass goes on after it evicts."""

    def took_rows(self, layer: EvictingLayer, rows: Tensor) -> None:
        """Take note that the layer's batch is now its rows `rows`."""

    def cropped(self, layer: EvictingLayer) -> None:
        """Take note that the layer has lost its last tokens."""


class EvictingLayer(DynamicLayer):
    """One layer of a cache. Its sequence length is tokens *seen*; what it stores is what was kept.

    Args:
        index: the model's layer index.
        owner: is told of each update and attention.
    """

    def __init__(self, index: int, owner: Owner) -> None:
        self.index = index
        self.owner = owner
        self._clear()

    def reset(self) -> None:
        """Forget everything; the layer is as new."""
        self._clear()
        self.owner.cropped(self)

    def _clear(self) -> None:
        self.store: DenseStore | RaggedStore | QuantizedStore | OffloadedStore | None = None
        self.window: Window | None = None
        # What the last eviction left for the next one to know, [B, ...].
        self.memory: Tensor | None = None
        self.scaling: float | None = None
        # Whether the model derives what it attends to from what is cached; the first pass shows it.
        self.shared: bool | None = None
        self.seen = 0
        self.slot_bytes = 0
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
    def beside(self) -> dict[str, Any]:
        """What the layer holds besides keys and values, by attribute."""
        return {}

    @property
    def kept(self) -> list[list[int]]:
        """Slots stored, by batch row and KV head."""
        return [[count + self.seen - self.settled_at for count in row] for row in self._settled]

    @property
    def held(self) -> list[list[list[int]]]:
        """The tokens whose slots are stored, as places in the sequence, by batch row and KV head."""
        if self.store is None:
            return []
        keys, _, positions = self.store.padded()
        if positions is None:
            return [[list(range(keys.shape[2]))] * keys.shape[1]] * keys.shape[0]
        return [[[place for place in head if place >= 0] for head in row] for row in positions.tolist()]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values to attend to; heads of different lengths travel in the keys' step."""
        new = key_states.shape[2]
        cut = self.owner.updating(self, new)
        start = self.seen
        if self.store is None:
            # Held as they are until attention has run: evicting then copies what is kept, and only that.
            self.store = DenseStore(key_states, value_states, None)
            self.slot_bytes = sum(part.shape[-1] * part.itemsize for part in (key_states, value_states))
            self._settled = [[0] * key_states.shape[1] for _ in range(key_states.shape[0])]
            self.is_initialized = True
        else:
            # Buffers that grow outlive `torch.inference_mode`; nothing is learned through a cache.
            with torch.inference_mode(False), torch.no_grad():
                self.store.append(key_states, value_states, start)
        self.seen += new
        keys, values, positions = key_states, value_states, None
        # Heads of different lengths travel in the step, unless the model has to derive its own from them.
        if self.shared or not self.store.ragged:
            keys, values, positions = self.store.padded()
        step = Step(
            layer=self.index,
            store=self.store,
            keys=mark(keys),
            values=mark(values),
            positions=positions,
            start=start,
            new=new,
            plain=self.owner.plain,
            shared=self.shared,
            cut=cut,
            attended=partial(self.owner.attended, self),
        )
        return tag(keys, step), values

    def padded(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and positions of what is stored, every head aligned at its last slot."""
        if self.store is None:
            raise UnsupportedModelError(f"layer {self.index}: expected tokens, got none")
        return self.store.padded()

    def evict(
        self,
        stored: tuple[Tensor, Tensor, Tensor | None],
        selection: Selection,
        tail: int,
        hold: Store,
        merged: Merged | None = None,
    ) -> None:
        """Keep the selected slots of `stored` (keys, values, positions), and the last `tail` slots; free the rest.

        Args:
            stored: keys, values and positions of what the layer holds.
            selection: which of them stay, the last `tail` not counted.
            tail: how many of the newest stay besides.
            hold: how they are held.
            merged: what the selected slots hold from now on; None for what they hold.
        """
        keys, values, positions = stored
        end = keys.shape[2] - tail
        old = None if positions is None else positions[:, :, :end]
        kept, self._settled = build(keys[:, :, :end], values[:, :, :end], old, selection, merged)
        if merged is not None:
            self.memory = merged.memory
        self.store = hold(kept)
        self.settled_at = self.seen - tail
        if tail:
            self.store.append(keys[:, :, end:], values[:, :, end:], self.settled_at)

    def own(self) -> None:
        """Copy what is held out of the model's tensors, which may be views of larger ones."""
        if isinstance(self.store, DenseStore):
            with torch.inference_mode(False), torch.no_grad():
                self.store.own()

    def state(self) -> State:
        """Return what the layer holds."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        state = State({}, {"kind": type(self).__name__, **plain})
        if self.store is not None:
            state |= self.store.state().inside("store")
        if self.window is not None:
            state.tensors["queries"], state.tensors["query_positions"] = self.window.queries, self.window.positions
        if self.memory is not None:
            state.tensors["memory"] = self.memory
        return state

    def restore(self, state: State) -> None:
        """Take what another layer held, on the tensors of its `state`."""
        for name in _PLAIN:
            setattr(self, name, state.plain[name])
        if "store" in state.plain:
            self.store = restore(state.part("store"))
        if "queries" in state.tensors:
            self.window = Window(state.tensors["queries"], state.tensors["query_positions"])
        self.memory = state.tensors.get("memory")

    def get_seq_length(self) -> int:
        """Return how many tokens the layer has seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return the length and offset of the mask: tokens seen, never slots kept."""
        return self.seen + new_tokens(query_length), 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: `-n` removes n, a positive number is the length to return to.

        Raises:
            UnsupportedModelError: when that reaches back to tokens among which some were evicted.
        """
        count = tokens_to_crop(tokens_to_remove, self.seen)
        if self.store is None or not count:
            return
        if self.seen - count < self.settled_at:
            raise UnsupportedModelError(
                f"crop: expected at most the {self.seen - self.settled_at} tokens that layer {self.index} has seen "
                f"since its last eviction, got {count}: slots before that were evicted"
            )
        self.store.drop_last(count)
        self.seen -= count
        if self.window is not None:
            self.window = self.window.before(self.seen)
        self.owner.cropped(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the batch by its rows `beam_idx`."""
        self._take_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace the batch by its rows `indices`, which may repeat; a bool mask selects."""
        self._take_rows(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def _take_rows(self, rows: Tensor) -> None:
        if self.store is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.store.take_rows(rows)
        self._settled = [self._settled[row] for row in rows.tolist()]
        if self.window is not None:
            self.window = self.window.take_rows(rows)
        if self.memory is not None:
            self.memory = self.memory[rows.to(self.memory.device)]
        self.owner.took_rows(self, rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self.batch_select_indices(torch.arange(len(self._settled), device="cpu").repeat_interleave(repeats))

    def offload(self) -> None:
        """Refuse: an evicting layer stays where the model computes."""
        raise UnsupportedModelError("an offloaded cache cannot evict: give the model a plain DynamicCache")
