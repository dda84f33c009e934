"""Frozen values handed between stages: `Needs`, `LayerView`, `Selection`, `Plan`.

Every stage imports this module and torch, and no other stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args, overload

import torch
from torch import Tensor

from kvpolicy.errors import PluginError, ViewError


@dataclass(frozen=True)
class Needs:
    """What a scorer or combiner reads, as data; capture records no more than the union.

    Args:
        queries: how many of the last queries of each row (the observation window); 0 for none.
        keys: whether it reads the keys.
        values: whether it reads the values.
        pre_rope: whether it reads the keys before RoPE.
        modality: whether it reads what each slot holds (text, image, ...).

    >>> Needs(queries=8) | Needs(values=True)
    Needs(queries=8, keys=False, values=True, pre_rope=False, modality=False)
    """

    queries: int = 0
    keys: bool = False
    values: bool = False
    pre_rope: bool = False
    modality: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            queries=max(self.queries, other.queries),
            keys=self.keys or other.keys,
            values=self.values or other.values,
            pre_rope=self.pre_rope or other.pre_rope,
            modality=self.modality or other.modality,
        )


Modality = Literal["text", "image", "video", "audio"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)
"""What a slot can hold; `LayerView.modality` counts in this order."""


@dataclass(frozen=True)
class LayerView:
    """One layer's slots as a scorer sees them.

    Args:
        keys: ``[B, Hkv, T, Dk]``, any float dtype, after RoPE, as stored.
        values: ``[B, Hkv, T, Dv]``, any float dtype, as stored.
        queries: ``[B, Hq, W, Dk]``, the last W queries of each row, oldest first; query head h reads KV head h // G.
        valid: bool, ``[B, T]`` or ``[B, Hkv, T]``: False for padding and empty slots. Default: all valid.
        positions: int32 ``[B, Hkv, T]``: which token of the sequence each slot holds, padding counted; rising in each
            head, -1 where empty. Default: slot t holds token t.
        query_positions: int64 ``[B, W]``: the token each query belongs to, -1 where a row has fewer than W. A query
            sees the slots at its own position and before. Default: the last W tokens, those of padding excepted.
        candidates: bool ``[B, Hkv, T]``: valid and not protected, the slots a score decides. Default: `valid`.
        seen: int64 ``[B]``: tokens seen by each row, padding excluded. Default: the valid slots.
        layer: the model's own layer index.
        scaling: what the model multiplies ``q @ k`` by. Default: ``Dk ** -0.5``.
        pre_rope_keys: float32 ``[B, Hkv, T, Dk]``, the keys before RoPE; None unless a policy needs them.
        modality: int8 ``[B, Hkv, T]``, 0 text, 1 image, 2 video, 3 audio; None unless a policy needs it.
        shared: whether all heads keep the same slots, because the model derives its heads from what it caches (MLA):
            a policy then decides by the mean score of the heads.

    Raises:
        ViewError: when shapes do not fit together.

    >>> view = LayerView(keys=torch.zeros(1, 2, 5, 4), values=torch.zeros(1, 2, 5, 4), queries=torch.zeros(1, 4, 3, 4))
    >>> (view.slots, view.kv_heads, view.group, view.query_positions.tolist())
    (5, 2, 2, [[2, 3, 4]])
    """

    keys: Tensor
    values: Tensor
    queries: Tensor | None = None
    valid: Tensor = None  # type: ignore[assignment]  # filled in by __post_init__
    positions: Tensor = None  # type: ignore[assignment]
    query_positions: Tensor = None  # type: ignore[assignment]
    candidates: Tensor = None  # type: ignore[assignment]
    seen: Tensor = None  # type: ignore[assignment]
    layer: int = 0
    scaling: float = None  # type: ignore[assignment]
    pre_rope_keys: Tensor | None = None
    modality: Tensor | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        _check_stored(self.keys, self.values)
        batch, heads, slots, size = self.keys.shape
        device = self.keys.device
        put = object.__setattr__
        valid = self.valid
        if valid is None:
            valid = torch.ones(batch, slots, dtype=torch.bool, device=device)
        if valid.ndim == 2:
            valid = valid[:, None].expand(-1, heads, -1)
        _expect("valid", valid, (batch, heads, slots), torch.bool)
        put(self, "valid", valid)
        if self.positions is None:
            order = torch.arange(slots, dtype=torch.int32, device=device)
            put(self, "positions", order.expand(batch, heads, -1))
        _expect("positions", self.positions, (batch, heads, slots), torch.int32)
        if self.candidates is None:
            put(self, "candidates", valid)
        _expect("candidates", self.candidates, (batch, heads, slots), torch.bool)
        if self.seen is None:
            put(self, "seen", valid[:, 0].sum(-1))
        _expect("seen", self.seen, (batch,), torch.int64)
        if self.scaling is None:
            put(self, "scaling", size**-0.5)
        if self.queries is not None:
            self._check_queries(self.queries)
        if self.pre_rope_keys is not None:
            _expect("pre_rope_keys", self.pre_rope_keys, tuple(self.keys.shape), torch.float32)
        if self.modality is not None:
            _expect("modality", self.modality, (batch, heads, slots), torch.int8)

    def _check_queries(self, queries: Tensor) -> None:
        batch, heads, slots, size = self.keys.shape
        if queries.ndim != 4 or queries.shape[0] != batch or queries.shape[-1] != size or queries.shape[1] % heads:
            raise ViewError(
                f"queries: expected [B={batch}, Hq a multiple of {heads}, W, Dk={size}], got {list(queries.shape)}"
            )
        window = queries.shape[2]
        if self.query_positions is None:
            if window > slots:
                raise ViewError(f"queries: expected at most one a slot ({slots}), got {window}")
            last = self.positions.where(self.valid, -1).amax(1)[:, slots - window :]
            object.__setattr__(self, "query_positions", last.long())
        _expect("query_positions", self.query_positions, (batch, window), torch.int64)

    @property
    def slots(self) -> int:
        """T, the number of slots a head."""
        return self.keys.shape[2]

    @property
    def kv_heads(self) -> int:
        """Hkv, the number of KV heads."""
        return self.keys.shape[1]

    @property
    def group(self) -> int:
        """G, the number of query heads a KV head."""
        if self.queries is None:
            raise ViewError("group: expected a view with queries, got one without")
        return self.queries.shape[1] // self.keys.shape[1]

    def decide(self, candidates: Tensor) -> LayerView:
        """Return the view with `candidates` (bool ``[B, Hkv, T]``) as the slots that a score decides."""
        return replace(self, candidates=candidates)

    def holds(self, modalities: Iterable[Modality]) -> Tensor:
        """Return bool ``[B, Hkv, T]``: which slots hold one of `modalities`.

        Raises:
            ViewError: when the view does not say what its slots hold.

        >>> said = torch.tensor([[[0, 1, 2]]], dtype=torch.int8)
        >>> view = LayerView(keys=torch.zeros(1, 1, 3, 2), values=torch.zeros(1, 1, 3, 2), modality=said)
        >>> view.holds(["image", "video"]).tolist()
        [[[False, True, True]]]
        """
        if self.modality is None:
            raise ViewError("holds: expected a view with what each slot holds (modality), got one without")
        wanted = [MODALITIES.index(name) for name in modalities]
        return torch.isin(self.modality, self.modality.new_tensor(wanted))

    def limit(self, needs: Needs, reader: str) -> LayerView:
        """Return a view in which reading what `needs` does not declare raises, naming `reader`."""
        here = {field.name: getattr(self, field.name) for field in fields(LayerView)}
        return _LimitedView(**here, needs=needs, reader=reader)


@dataclass(frozen=True)
class _LimitedView(LayerView):
    needs: Needs = field(default_factory=Needs)
    reader: str = ""

    def __post_init__(self) -> None:
        window = object.__getattribute__(self, "needs").queries
        queries = object.__getattribute__(self, "queries")
        if queries is not None and 0 < window < queries.shape[2]:
            object.__setattr__(self, "queries", queries[:, :, -window:])
            object.__setattr__(self, "query_positions", self.query_positions[:, -window:])

    def __getattribute__(self, name: str) -> object:
        if name in _DECLARED:
            read = object.__getattribute__
            if not getattr(read(self, "needs"), _DECLARED[name]):
                reader = read(self, "reader")
                setting = f"{_DECLARED[name]}={'N' if _DECLARED[name] == 'queries' else True}"
                raise PluginError(
                    f"{reader} reads '{name}' but declares {read(self, 'needs')}. Add {setting} to its `needs`."
                )
            if read(self, _GIVEN[name]) is None:
                raise ViewError(f"{read(self, 'reader')} needs {_GIVEN[name]}, but the view has none")
        return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        return f"LayerView(layer={self.layer}, valid={list(self.valid.shape)}, read by {self.reader})"

    @property
    def slots(self) -> int:
        return object.__getattribute__(self, "valid").shape[2]

    @property
    def kv_heads(self) -> int:
        return object.__getattribute__(self, "valid").shape[1]

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.kv_heads  # type: ignore[union-attr]


# What of a view has to be declared -> by which need, and -> the tensor that holds it.
_DECLARED = {
    "keys": "keys",
    "values": "values",
    "queries": "queries",
    "query_positions": "queries",
    "pre_rope_keys": "pre_rope",
    "modality": "modality",
}
_GIVEN = {name: name for name in _DECLARED} | {"query_positions": "queries"}


@dataclass(frozen=True)
class Selection:
    """Which slots of one layer are kept, packed head after head.

    Args:
        slots: int64 ``[N]``: the kept slots of (row 0, head 0), then of (row 0, head 1), ...; ascending in each.
        lengths: int64 ``[B, Hkv]``: how many of them belong to each row and head; they add up to N.
        layer: the model's own layer index.

    >>> kept = Selection(slots=torch.tensor([0, 3, 1]), lengths=torch.tensor([[2, 1]]))
    >>> kept[0][0].tolist(), kept[0][1].tolist(), kept.tolist()
    ([0, 3], [1], [[[0, 3], [1]]])
    """

    slots: Tensor
    lengths: Tensor
    layer: int = 0

    @classmethod
    def from_mask(cls, keep: Tensor, layer: int = 0) -> Selection:
        """Return the selection of the True slots of `keep`, bool ``[B, Hkv, T]``."""
        return cls(slots=keep.nonzero()[:, 2], lengths=keep.sum(-1), layer=layer)

    def to_mask(self, slots: int) -> Tensor:
        """Return bool ``[B, Hkv, slots]``, True where a slot is kept."""
        batch, heads = self.lengths.shape
        mask = torch.zeros(batch * heads, slots, dtype=torch.bool, device=self.slots.device)
        mask[self.owners(), self.slots] = True
        return mask.view(batch, heads, slots)

    def owners(self) -> Tensor:
        """Return int64 ``[N]``: ``row * Hkv + head`` of each entry of `slots`."""
        lengths = self.lengths.flatten()
        return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)

    def of_heads(self, heads: int) -> Selection:
        """Return the selection of the first `heads` heads of each row alone."""
        mine = self.owners() % self.lengths.shape[1] < heads
        return Selection(slots=self.slots[mine], lengths=self.lengths[:, :heads], layer=self.layer)

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        pieces = self.slots.split(self.lengths.flatten().tolist())
        heads = self.lengths.shape[1]
        row = range(self.lengths.shape[0])[row]
        return pieces[row * heads : (row + 1) * heads]

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def tolist(self) -> list[list[list[int]]]:
        """Return the kept slots as nested lists: row, head, slot."""
        return [[head.tolist() for head in self[row]] for row in range(len(self))]


@dataclass(frozen=True)
class Plan(Sequence[Selection]):
    """What a policy keeps: one `Selection` a layer; ``plan[layer][row][head]`` is a tensor of slots."""

    layers: tuple[Selection, ...]

    @overload
    def __getitem__(self, index: int) -> Selection: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Selection, ...]: ...
    def __getitem__(self, index: int | slice) -> Selection | tuple[Selection, ...]:
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Selection]:
        return iter(self.layers)

    def tolist(self) -> list[list[list[list[int]]]]:
        """Return the kept slots as nested lists: layer, row, head, slot."""
        return [layer.tolist() for layer in self.layers]


def _check_stored(keys: Tensor, values: Tensor) -> None:
    for name, tensor in (("keys", keys), ("values", values)):
        if not isinstance(tensor, Tensor):
            raise ViewError(f"{name}: expected a tensor [B, Hkv, T, D], got {type(tensor).__name__}")
        if tensor.ndim != 4 or not tensor.is_floating_point():
            raise ViewError(f"{name}: expected a float tensor [B, Hkv, T, D], got {tensor.dtype} {list(tensor.shape)}")
    if keys.shape[:3] != values.shape[:3]:
        raise ViewError(
            f"keys and values: expected the same [B, Hkv, T], got {list(keys.shape[:3])} and {list(values.shape[:3])}"
        )
    if not keys.shape[2]:
        raise ViewError("keys: expected at least one slot, got none")


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape or tensor.dtype != dtype:
        got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ViewError(f"{name}: expected {dtype} {list(shape)}, got {got}")
