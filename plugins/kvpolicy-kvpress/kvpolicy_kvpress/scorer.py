"""The scorer ``kvpress``: the score of a press, a row at a time and without padding."""

from __future__ import annotations

import json
from functools import cached_property, lru_cache
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from pydantic import Field
from torch import Tensor

from kvpolicy import LayerView, Needs, settings
from kvpolicy.errors import PluginError, UnsupportedModelError
from kvpolicy.maths import HUGE
from kvpolicy.wrap import by_row
from kvpolicy_kvpress.given import Given, Like, like
from kvpolicy_kvpress.make import make, reads
from kvpolicy_kvpress.presses import STORED, WRAPPED, Read, fewest

_ALL_QUERIES = 2**31


@settings
class KVPress:
    """The score of a press of NVIDIA's kvpress, for combiners and budgets of kvpolicy.

    A press that reads more than keys and values scores the prompt, in one pass, and nothing else. The ratio of a press
    means nothing here, as the budget says how much is kept, except where its very score depends on it.

    Args:
        press: the class, by the name that kvpress exports it under: KeyDiffPress, SnapKVPress, ...
        settings: what the class is made with; a press inside it is a mapping with `press` and `settings`.
        compression_ratio: the share evicted, for presses whose score depends on it, and for no others.
        seed: of the random numbers that some presses draw: another seed, other numbers.
    """

    name = "kvpress"
    role = "importance"
    source = "NVIDIA kvpress, github.com/NVIDIA/kvpress, and the paper of the press"
    formula = "what the press scores, over a row's valid slots"
    press: str
    settings: dict[str, Any] = Field(default_factory=dict)
    compression_ratio: Annotated[float, Ge(0), Lt(1)] | None = None
    seed: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        # Raises where something given is wrong.
        _ = self._made
        # Of the class, what most presses measure; of a scorer, what its own does.
        object.__setattr__(self, "role", WRAPPED[self.press].role)

    @cached_property
    def _made(self) -> Any:
        return make(self.press, self.settings, self.compression_ratio)

    @cached_property
    def _reads(self) -> frozenset[Read]:
        return reads(self.press, self.settings)

    @cached_property
    def _fewest(self) -> tuple[int, str]:
        return fewest(self._made)

    @property
    def needs(self) -> Needs:
        """Keys, values, and what the attention module was called with: as the press reads them."""
        return Needs(
            keys=True,
            values="values" in self._reads,
            call=bool(self._reads - STORED),
            queries=_ALL_QUERIES if "attention weights" in self._reads else 0,
        )

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, higher means keep."""
        return by_row(view, self._score)

    def _score(self, view: LayerView) -> Tensor:
        needed, who = self._fewest
        if view.slots < needed:
            return _unscored(view, needed, who)
        given = Given.of(view, self._reads, self.press)
        press = self._ready(view)
        devices = [view.keys.device] if view.keys.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                torch.manual_seed(seed_of(self.seed, view.layer))
                scores: Tensor = press.score(
                    given.module, given.hidden_states, view.keys, given.values, given.attentions, given.kwargs
                )
        except Exception as error:
            raise PluginError(
                f"scorer 'kvpress': {self.press} failed in layer {view.layer}, on {view.slots} slots: "
                f"{type(error).__name__}: {error}"
            ) from error
        # The largest number of a dtype marks slots that are kept before all others; in float32 it has to be one too.
        largest = torch.finfo(scores.dtype).max
        return scores.where(scores != largest, min(largest, HUGE))

    def _ready(self, view: LayerView) -> Any:
        """Return the press, with the weights it has loaded where they were trained for the model.

        Raises:
            UnsupportedModelError: when there are none for this model.
        """
        if "weights trained for the model" not in self._reads:
            return self._made
        model = like(view)
        try:
            return _trained(self.press, json.dumps(self.settings), self.compression_ratio, model)
        except Exception as error:
            raise UnsupportedModelError(
                f"scorer 'kvpress': {self.press} has no weights for the model {model.name!r}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _unscored(view: LayerView, needed: int, who: str) -> Tensor:
    """Return 0 for each slot of a row that is too short for a press, where no score decides what it keeps.

    Raises:
        UnsupportedModelError: where one does: some slots are not protected, and there are several.
    """
    if view.slots > 1 and bool(view.candidates.any()):
        raise UnsupportedModelError(
            f"scorer 'kvpress': layer {view.layer}: {who} scores rows of at least {needed} tokens, got one of "
            f"{view.slots}: give the press settings for short rows, protect more in `select`, or read the row apart, "
            "without the policy"
        )
    return torch.zeros(view.valid.shape, device=view.keys.device)


def seed_of(seed: int, layer: int) -> int:
    """Return the seed of the numbers drawn in a layer."""
    return seed << 16 ^ layer


@lru_cache(maxsize=4)
def _trained(name: str, settings: str, ratio: float | None, model: Like) -> Any:
    """Return a press that has loaded its weights, once for a model."""
    press = make(name, json.loads(settings), ratio)
    press.post_init_from_model(model)
    return press
