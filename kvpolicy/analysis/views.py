"""The views of a prompt: what every layer of a model cached of it, as a policy would see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvpolicy.policy import Budget, Policy
from kvpolicy.scorers.recency import Recency
from kvpolicy.types import LayerView, Needs, Selection

# More slots than any prompt has.
_ALL = 2**40
_NO_MORE = Needs()


@dataclass(frozen=True)
class _Keeper:
    """A selector that keeps everything and remembers the views it is given."""

    name: ClassVar[str] = "keeper"
    protects: ClassVar[int] = 0
    needs: Needs
    views: list[LayerView] = field(default_factory=list)

    def protect(self, view: LayerView, tokens: Tensor) -> Tensor:
        return torch.zeros_like(view.valid)

    def __call__(self, view: LayerView, scores: Tensor, lengths: Tensor) -> Selection:
        self.views.append(view)
        return Selection.from_mask(view.valid, layer=view.layer)


def views(model: nn.Module, inputs: Any, needs: Needs = _NO_MORE) -> tuple[LayerView, ...]:
    """Return the view of each evictable layer, first layer first, of a prompt that `model` reads in one pass.

    `policy.plan` of them is what ``policy.on(model)`` keeps of that prompt. They hold the keys and values of the whole
    prompt, and are the model's own tensors: do not write into them.

    Args:
        model: any transformers decoder.
        inputs: ids ``[T]`` or ``[B, T]``, or the mapping that a tokenizer or processor returns.
        needs: what they have to hold besides keys and values; of policies, the union of their `needs`.

    Raises:
        ContextError: when the inputs are wrong.
        UnsupportedModelError: when the model has no layer to evict from, or cannot give what is needed.

    >>> from kvpolicy.testing.models import tiny
    >>> found = views(tiny(), torch.arange(20), Needs(queries=8))
    >>> [(view.layer, list(view.keys.shape), list(view.queries.shape)) for view in found][0]
    (0, [1, 2, 20, 8], [1, 6, 8, 8])
    """
    keeper = _Keeper(needs)
    Policy(name="views", score=Recency(), budget=Budget(tokens=_ALL), select=keeper).compress(model, inputs)
    return tuple(keeper.views)
