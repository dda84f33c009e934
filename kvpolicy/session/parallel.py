"""Tensor parallelism: the ranks among which a model's heads are shared out, and what they tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.compat import shared_out_unseen
from kvpolicy.errors import PluginError, UnsupportedModelError
from kvpolicy.types import LayerView
from kvpolicy.types.view import BY_SLOT


@dataclass(frozen=True)
class HeadGroup:
    """The ranks of a tensor-parallel model; where they share out a layer's heads, each holds as many, in rank order.

    `gather`, `whole` and `collect` are collectives: they wait until every rank has called them.

    Args:
        group: the ranks.
        config: of the decoder, which counts the heads of all ranks together.
    """

    group: dist.ProcessGroup
    config: Any

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size(self.group)

    def shares(self, layer: int, held: int) -> bool:
        """Return whether a layer of which this rank caches `held` KV heads is shared out."""
        return held * self.size == self._kv_heads(layer)

    def of(self, view: LayerView) -> HeadGroup | None:
        """Return the ranks that share out the heads of `view`, None where every rank has them all.

        Raises:
            UnsupportedModelError: when it has neither all heads of the config nor its part of them.
        """
        total = self.config.num_attention_heads if view.shared else self._kv_heads(view.layer)
        if view.kv_heads == total:
            return None
        if view.kv_heads * self.size == total:
            return self
        raise UnsupportedModelError(
            f"layer {view.layer}: expected {total} heads, or an equal part of them on each of {self.size} ranks, got "
            f"{view.kv_heads}: a policy that compares heads has to know whose they are"
        )

    def _kv_heads(self, layer: int) -> int:
        config = self.config
        # Where layers differ, newer releases refuse to say it of the whole model.
        if getattr(config, "is_heterogeneous", False):
            config = config.per_layer_config[layer]
        count: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return count

    def gather(self, tensor: Tensor) -> Tensor:
        """Return ``[B, H, ..., T]`` of all heads from this rank's ``[B, H / size, ..., t]``.

        T is the longest t; slots are aligned at the last, and zeros stand before a shorter rank's first.
        """
        slots = tensor.new_tensor(tensor.shape[-1], dtype=torch.int64)
        longest = int(torch.stack(self._all(slots)).max())
        missing = longest - tensor.shape[-1]
        padded = torch.cat([tensor.new_zeros(*tensor.shape[:-1], missing), tensor], dim=-1)
        return torch.cat(self._all(padded), dim=1)

    def _all(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor, group=self.group)
        return found

    def whole(self, view: LayerView, scores: Tensor) -> tuple[LayerView, Tensor]:
        """Return the view and the scores of all heads, from this rank's; vectors stay where they are."""
        told = torch.stack([scores, view.valid.float(), view.candidates.float()], dim=2)
        scores, valid, candidates = self.gather(told).unbind(2)
        return _Whole(**{**vars(view), "valid": valid.bool(), "candidates": candidates.bool()}), scores

    def own(self, lengths: Tensor) -> Tensor:
        """Return this rank's part of what was decided for all heads, ``[B, H / size]`` of ``[B, H]``."""
        return lengths.chunk(self.size, dim=1)[self.rank]

    def collect(self, value: Any) -> list[Any]:
        """Return what every rank gives, in rank order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found


# What a rank does not tell of its heads.
_APART = (*(name for name in BY_SLOT if name not in ("valid", "candidates")), "queries", "query_positions", "call")


class _Whole(LayerView):
    """What a head budget sees of a layer whose heads are on several ranks: which slots are valid, which candidates."""

    def __post_init__(self) -> None:
        pass

    def __getattribute__(self, name: str) -> object:
        if name in _APART:
            raise PluginError(
                f"a head budget reads '{name}' of a layer whose heads are on several ranks: expected it to read its "
                "scores, 'valid' and 'candidates', which are gathered"
            )
        return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        return f"LayerView(layer={self.layer}, valid={list(self.valid.shape)}, heads of several ranks)"

    @property
    def slots(self) -> int:
        return self.valid.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.valid.shape[1]


def head_group(decoder: PreTrainedModel) -> HeadGroup | None:
    """Return the ranks among which a decoder's heads may be shared out, None without tensor parallelism.

    Raises:
        UnsupportedModelError: when the heads are shared out in a way that does not say whose they are.
    """
    if shared_out_unseen(decoder):
        raise UnsupportedModelError(
            "model: expected the tensor parallelism of transformers 5.18 or newer, whose weights say which rank has "
            f"which heads, got that of {transformers.__version__}"
        )
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor

    # The weights know: of the model's own attributes, only the outermost module has any.
    meshes = (weight.device_mesh for weight in decoder.parameters() if isinstance(weight, DTensor))
    mesh = next((mesh for mesh in meshes if "tp" in (mesh.mesh_dim_names or ())), None)
    if mesh is None or mesh["tp"].size() == 1:
        return None
    return HeadGroup(mesh["tp"].get_group(), decoder.config)
