"""What a scorer or combiner reads, as data, and the names of what a slot can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from kvpolicy.errors import PluginError, nearest

ALL = 2**31
"""So many queries that a scorer which declares them reads all of the prompt's."""


@dataclass(frozen=True)
class Repetition:
    """How a model repeats a prompt that it has read: chunk by chunk, as text that follows it.

    Args:
        chunk: how many tokens are repeated at once.
        instruction: ids that ask for the first chunk.
        continuation: ids that ask for a later one; the last `lead` tokens before it follow.
        lead: how many.
        suffix: ids that stand before each chunk, as where a chat template begins an answer.
        sinks: how many of the prompt's first tokens a chunk is looked for beside.

    >>> Repetition(chunk=2).inputs([5, 6, 7])
    [[5, 6], [5, 6, 7]]
    >>> Repetition(chunk=2, instruction=(1,), continuation=(2,), lead=1, suffix=(3,)).inputs([5, 6, 7])
    [[1, 3, 5, 6], [2, 6, 3, 7]]
    """

    chunk: int = 2000
    instruction: tuple[int, ...] = ()
    continuation: tuple[int, ...] = ()
    lead: int = 8
    suffix: tuple[int, ...] = ()
    sinks: int = 4

    def inputs(self, prompt: Sequence[int]) -> list[list[int]]:
        """Return what the model is given to repeat each chunk of `prompt`; each ends in the chunk."""
        starts = range(0, len(prompt), self.chunk)
        chunks = [list(prompt[start : start + self.chunk]) for start in starts]
        leads = [list(prompt[max(start - self.lead, 0) : start]) for start in starts]
        asked = [self.instruction if not start else self.continuation for start in starts]
        return [[*ask, *lead, *self.suffix, *chunk] for ask, lead, chunk in zip(asked, leads, chunks, strict=True)]


@dataclass(frozen=True)
class Needs:
    """What a scorer or combiner reads, as data; capture records no more than the union.

    Args:
        queries: how many of the last queries of each row (the observation window); 0 for none, `ALL` for all.
        keys: whether it reads the keys.
        values: whether it reads the values.
        pre_rope: whether it reads the keys before RoPE.
        modality: whether it reads what each slot holds (text, image, ...).
        call: whether it reads what the attention module was called with.
        repetition: how the prompt is repeated, where it reads what is attended to meanwhile; None where it does not.
        change: whether it reads how little each layer's attention changes what goes through it.

    Raises:
        PluginError: when one of them is anything else, or there is no such need.

    >>> Needs(queries=8) | Needs(values=True)
    Needs(queries=8, keys=False, values=True, pre_rope=False, modality=False, call=False, repetition=None, change=False)
    """

    queries: int = 0
    keys: bool = False
    values: bool = False
    pre_rope: bool = False
    modality: bool = False
    call: bool = False
    repetition: Repetition | None = None
    change: bool = False

    def __new__(cls, *_: object, **given: object) -> Needs:
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                raise PluginError(f"Needs: unknown need {name!r}.{nearest(name, known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.queries, int) or isinstance(self.queries, bool) or self.queries < 0:
            raise PluginError(f"Needs: queries: expected a whole number from 0, got {self.queries!r}")
        if not isinstance(self.repetition, Repetition | None):
            raise PluginError(f"Needs: repetition: expected a Repetition or None, got {self.repetition!r}")
        for name in (each.name for each in fields(self) if each.name not in ("queries", "repetition")):
            found = getattr(self, name)
            if not isinstance(found, bool):
                raise PluginError(f"Needs: {name}: expected True or False, got {found!r}")

    @property
    def late(self) -> bool:
        """Whether it reads what is there only once all of the prompt has been read, in every layer."""
        return self.repetition is not None or self.change

    @property
    def of_prompts(self) -> Needs:
        """What of it is there for a whole prompt alone."""
        return Needs(call=self.call, repetition=self.repetition, change=self.change)

    @property
    def lasting(self) -> Needs:
        """What of it is there whenever a layer evicts: all but that."""
        return replace(self, call=False, repetition=None, change=False)

    @property
    def words(self) -> str:
        """What is read, in words.

        >>> Needs(queries=8, keys=True, pre_rope=True).words, Needs().words
        ('the last 8 queries, keys, keys before RoPE', 'nothing')
        """
        last = {0: [], 1: ["the last query"], ALL: ["all queries"]}
        queries = last.get(self.queries, [f"the last {self.queries} queries"])
        return ", ".join([*queries, *(words for name, words in _WORDS.items() if getattr(self, name))]) or "nothing"

    def __or__(self, other: Needs) -> Needs:
        if None not in (self.repetition, other.repetition) and self.repetition != other.repetition:
            raise PluginError(
                f"Needs: expected one way to repeat a prompt, got {self.repetition} and {other.repetition}: give both "
                "scorers the same settings"
            )
        return Needs(
            queries=max(self.queries, other.queries),
            keys=self.keys or other.keys,
            values=self.values or other.values,
            pre_rope=self.pre_rope or other.pre_rope,
            modality=self.modality or other.modality,
            call=self.call or other.call,
            repetition=self.repetition or other.repetition,
            change=self.change or other.change,
        )


_WORDS = {
    "keys": "keys",
    "values": "values",
    "pre_rope": "keys before RoPE",
    "modality": "what each slot holds",
    "call": "what the attention module was called with",
    "repetition": "a repetition of the prompt",
    "change": "how little each layer's attention changes what goes through it",
}

Modality = Literal["text", "image", "video", "audio"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)
"""What a slot can hold; `LayerView.modality` counts in this order."""


@dataclass(frozen=True)
class Call:
    """What an attention module was called with, in the one pass that read every token of a view.

    Args:
        module: the attention module, as the model has it: with its weights, `layer_idx` and `config`.
        hidden_states: ``[B, T, d]``, of which it makes queries, keys and values; any float dtype.
        position_embeddings: cos and sin, ``[B, T, r]`` each, by which RoPE turns its queries and keys; None where it is
            given none.

    >>> call = Call(torch.nn.Identity(), torch.arange(4.0).view(1, 4, 1))
    >>> call.part(0, torch.tensor([1, 3])).hidden_states.flatten().tolist()
    [1.0, 3.0]
    """

    module: torch.nn.Module
    hidden_states: Tensor
    position_embeddings: tuple[Tensor, Tensor] | None = None

    def part(self, row: int, slots: Tensor) -> Call:
        """Return what it was called with for the slots `slots` (int64 ``[n]``) of one row."""
        turned = self.position_embeddings
        if turned is not None:
            turned = turned[0][row : row + 1, slots], turned[1][row : row + 1, slots]
        return Call(self.module, self.hidden_states[row : row + 1, slots], turned)
