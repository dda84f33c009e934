"""Q-Filters: how far a key points where the queries of its head do, by a vector calibrated once for the model."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from einops import einsum
from torch import Tensor

from kvpolicy import filters
from kvpolicy.attention import LIMIT
from kvpolicy.errors import SettingError, UnsupportedModelError
from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs


@settings
class QFilters:
    """The projection of a slot's key on its head's filter: what queries have in common, known before any is asked.

    Filters are read from a file that ``kvpolicy calibrate q-filters`` makes from a text, or one of those that the
    authors publish (``model.safetensors`` in a repository named ``..._qfilt``). A filter points away from the main
    direction of the queries, as theirs do, so that its projection counts with the sign turned.

    Args:
        file: a safetensors file with one float tensor ``q_filters``, ``[layers, KV heads, head size]``, all layers of
            the model. In a policy file, a path relative to it.

    A filter that points to (0, -1): queries point to (0, 1), and keys that do so score high.

    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "q.safetensors"
    >>> filters.write(path, torch.tensor([[[0.0, -1.0]]]), filters.Made("mine", {}, 1))
    >>> keys = torch.tensor([[[[5.0, 1.0], [0.0, 2.0], [0.0, -2.0]]]])
    >>> QFilters(file=path)(LayerView(keys=keys, values=keys)).tolist()
    [[[1.0, 2.0, -2.0]]]
    """

    name = "q-filters"
    role = "importance"
    source = "Q-Filters, arXiv 2503.02812, and its code"
    formula = "-f_lh . k_i"
    cost = "time O(n D), memory O(n D)"
    needs = Needs(keys=True)
    file: Path

    def __post_init__(self) -> None:
        self._read  # noqa: B018  (what is wrong with the file is said where the policy is declared)

    @cached_property
    def _read(self) -> tuple[Tensor, filters.Made | None]:
        try:
            return filters.read(self.file)
        except ValueError as error:
            raise SettingError(self.name, [(("file",), "value_error", str(error), str(self.file))]) from None

    def check_model(self, config: Any) -> None:
        """Raise where a decoder with this config is not the one that the filters are of.

        Raises:
            UnsupportedModelError: when it is of another kind or size.
        """
        found, made = self._read
        given = filters.kind(config)
        layers = given.get("num_hidden_layers", len(found))
        if layers != len(found):
            raise UnsupportedModelError(f"{self._whose}: expected a model of {len(found)} layers, got {layers}")
        said = {} if made is None else made.config
        unlike = [name for name in said.keys() & given if said[name] != given[name]]
        if unlike:
            pairs = ", ".join(f"{name}={said[name]!r}, got {given[name]!r}" for name in sorted(unlike))
            raise UnsupportedModelError(
                f"{self._whose}: expected {pairs}. Calibrate anew:  kvpolicy calibrate q-filters"
            )

    @property
    def _whose(self) -> str:
        made = self._read[1]
        return f"scorer '{self.name}': {str(self.file)!r}" + (f", filters of {made.model}" if made else "")

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, in the unit of the keys, higher means more along the queries.

        Raises:
            UnsupportedModelError: when the layer, its heads or their size are not those of the file.
        """
        every, _ = self._read
        _, heads, _, size = view.keys.shape
        if view.layer >= len(every) or every.shape[1:] != (heads, size):
            raise UnsupportedModelError(
                f"{self._whose}: expected {every.shape[0]} layers of {every.shape[1]} KV heads of size "
                f"{every.shape[2]}, got layer {view.layer} with {heads} of size {size}: another model, or one whose "
                "heads are on several ranks"
            )
        keys = view.keys.float().clamp(-LIMIT, LIMIT)
        return -einsum(keys, every[view.layer].to(keys.device), "b h t d, h d -> b h t")


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [QFilters]
