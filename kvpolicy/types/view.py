"""`LayerView`: one layer's slots as a scorer sees them, and the same with a reader's limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvpolicy.errors import UndeclaredReadError, ViewError, nearest
from kvpolicy.types.needs import MODALITIES, Call, Modality, Needs


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
        call: what the attention module was called with; None unless a policy needs it.
        repetition: float32 ``[B, Hkv, T]``, in [0, 1], the most attention that any query of any query head of the group
            has paid each slot while the model repeated the prompt; None unless a policy needs it.
        similarity: float32 ``[B]``, in [-1, 1], how alike what goes through the layer is before and after its attention
            is added: the cosine similarity, mean over the row's tokens; None unless a policy needs it (`change`).
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
    call: Call | None = None
    repetition: Tensor | None = None
    similarity: Tensor | None = None
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
        if self.repetition is not None:
            _expect("repetition", self.repetition, (batch, heads, slots), torch.float32)
        if self.similarity is not None:
            _expect("similarity", self.similarity, (batch,), torch.float32)
        if self.call is not None:
            _check_call(self.call, batch, slots)

    if not TYPE_CHECKING:  # to a type checker it would mean that every name is there

        def __getattr__(self, name: str) -> Any:
            # Called for what is missing alone.
            known = {each.name for each in fields(LayerView)} | {each for each in dir(LayerView) if each[0] != "_"}
            raise AttributeError(f"LayerView has no {name!r}.{nearest(name, known)}")

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

    def part(self, row: int, heads: slice, slots: Tensor) -> LayerView:
        """Return the view of some slots of one row, with those of its queries that exist.

        Args:
            row: which row of the batch.
            heads: which KV heads; the query heads that read them come along.
            slots: int64 ``[n]``, which slots, rising.

        >>> view = LayerView(keys=torch.arange(6.0).view(1, 1, 6, 1), values=torch.zeros(1, 1, 6, 1))
        >>> view.part(0, slice(None), torch.tensor([1, 4])).keys.flatten().tolist()
        [1.0, 4.0]
        """
        # A reader's limits do not stand in the way here: what it is given has them again.
        whole = {field.name: object.__getattribute__(self, field.name) for field in fields(LayerView)}
        part = {name: whole[name][row : row + 1, heads][:, :, slots] for name in BY_SLOT if whole[name] is not None}
        if whole["queries"] is not None:
            first, end, _ = heads.indices(self.kv_heads)
            group = whole["queries"].shape[1] // self.kv_heads
            exist = whole["query_positions"][row] >= 0
            part["queries"] = whole["queries"][row : row + 1, first * group : end * group, exist]
            part["query_positions"] = whole["query_positions"][row : row + 1, exist]
        if whole["call"] is not None:
            part["call"] = whole["call"].part(row, slots)
        if whole["similarity"] is not None:
            part["similarity"] = whole["similarity"][row : row + 1]
        return LayerView(**{**whole, **part, "seen": whole["seen"][row : row + 1]})

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
                setting = f"{_DECLARED[name]}={_EXAMPLES.get(name, 'True')}"
                raise UndeclaredReadError(
                    f"{reader} reads '{name}' but declares {read(self, 'needs')}. Add {setting} to its `needs`."
                )
            if read(self, _GIVEN[name]) is None:
                raise ViewError(f"{read(self, 'reader')} needs {_GIVEN[name]}, but the view has none")
        return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        return f"LayerView(layer={self.layer}, valid={list(self.valid.shape)}, read by {self.reader})"

    def part(self, row: int, heads: slice, slots: Tensor) -> LayerView:
        return super().part(row, heads, slots).limit(self.needs, self.reader)

    @property
    def slots(self) -> int:
        return object.__getattribute__(self, "valid").shape[2]

    @property
    def kv_heads(self) -> int:
        return object.__getattribute__(self, "valid").shape[1]

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.kv_heads  # type: ignore[union-attr]


BY_SLOT = ("keys", "values", "valid", "positions", "candidates", "pre_rope_keys", "modality", "repetition")
"""What a view holds of each slot of each head, where it holds it at all."""

# What of a view has to be declared -> by which need, and -> the tensor that holds it.
_DECLARED = {
    "keys": "keys",
    "values": "values",
    "queries": "queries",
    "query_positions": "queries",
    "pre_rope_keys": "pre_rope",
    "modality": "modality",
    "call": "call",
    "repetition": "repetition",
    "similarity": "change",
}
_EXAMPLES = {"queries": "N", "query_positions": "N", "repetition": "Repetition(...)"}
_GIVEN = {name: name for name in _DECLARED} | {"query_positions": "queries"}


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


def _check_call(call: Call, batch: int, slots: int) -> None:
    told = {"hidden_states": call.hidden_states}
    if call.position_embeddings is not None:
        told["cos"], told["sin"] = call.position_embeddings
    for name, tensor in told.items():
        if not isinstance(tensor, Tensor) or tensor.ndim != 3 or tensor.shape[:2] != (batch, slots):
            got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ViewError(f"call: expected {name} [B={batch}, T={slots}, size], got {got}")


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape or tensor.dtype != dtype:
        got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ViewError(f"{name}: expected {dtype} {list(shape)}, got {got}")
