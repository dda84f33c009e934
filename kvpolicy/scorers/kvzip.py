"""KVzip: what a model looks at when it repeats its context."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge
from torch import Tensor

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.hookspecs import hookimpl
from kvpolicy.plugin import settings
from kvpolicy.types import LayerView, Needs, Repetition

Ids = tuple[Annotated[int, Ge(0)], ...]


@settings
class KVzip:
    """The most attention that any query of the group pays a slot while the model repeats the prompt.

    Once the prompt has been read, the model is given it again behind itself, chunk by chunk, and the chunk's slots are
    scored: by a softmax over sinks, chunk and what is repeated. So nothing is evicted before that, and reading costs
    two to three times as much. Needs token ids, so no pictures, and all of the prompt in an empty cache.

    The authors ask for the repetition in words. A policy knows no tokenizer, so give their ids:
    ``tokenizer("\\n\\nRepeat the previous context exactly.", add_special_tokens=False).input_ids`` for `instruction`,
    ``"\\n\\nRepeat the part of the previous context exactly, starting with"`` for `continuation`, and what the chat
    template puts between a question and its answer for `suffix`. Without them the prompt is repeated as it is.

    Args:
        chunk: how many tokens are repeated at once; fewer take less memory.
        instruction: ids before the first chunk.
        continuation: ids before a later chunk; the last `lead` tokens before it follow them.
        lead: how many.
        suffix: ids right before each chunk.
        sinks: how many of the first tokens a later chunk shares its attention with.

    >>> import torch
    >>> keys = torch.zeros(1, 1, 2, 4)
    >>> view = LayerView(keys=keys, values=keys, repetition=torch.tensor([[[0.75, 0.5]]]))
    >>> KVzip()(view).tolist()
    [[[0.75, 0.5]]]
    """

    name = "kvzip"
    role = "importance"
    source = "KVzip, arXiv 2505.23416, equation 2 and its code"
    formula = "max_g max_w softmax(q_w . k * scaling), q_w of the repeated prompt"
    cost = "time O(n C G D), memory O(n + C G D), besides a second pass over the prompt"
    chunk: Annotated[int, Ge(1)] = 2000
    instruction: Ids = ()
    continuation: Ids = ()
    lead: Annotated[int, Ge(0)] = 8
    suffix: Ids = ()
    sinks: Annotated[int, Ge(0)] = 4

    @property
    def needs(self) -> Needs:
        """A repetition of the prompt."""
        how = Repetition(self.chunk, self.instruction, self.continuation, self.lead, self.suffix, self.sinks)
        return Needs(repetition=how)

    def check_model(self, config: Any) -> None:
        """Raise where a decoder with this config does not know the ids.

        Raises:
            UnsupportedModelError: when one is not in its vocabulary.
        """
        size = getattr(config, "vocab_size", None)
        largest = max((*self.instruction, *self.continuation, *self.suffix), default=0)
        if size is not None and largest >= size:
            raise UnsupportedModelError(
                f"scorer 'kvzip': expected ids of a vocabulary of {size}, got {largest}: instruction, continuation and "
                "suffix are ids of the model's own tokenizer"
            )

    def __call__(self, view: LayerView) -> Tensor:
        """Return float32 ``[B, Hkv, T]``, in [0, 1], higher means more attended to."""
        return view.repetition.clone()  # type: ignore[union-attr]


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this module."""
    return [KVzip]
