"""Every press of kvpress: what its score reads and asks for, so that it can be given; or why it is no scorer here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Read = Literal[
    "keys",
    "values",
    "attention module",
    "hidden states",
    "position embeddings",
    "rotary embedding",
    "attention weights",
    "weights trained for the model",
    "compression_ratio",
    "another press",
]
"""What a score may read. All but the first two are there only while the attention module runs; of the last two, the
policy file has to say what they are."""

STORED: frozenset[Read] = frozenset({"keys", "values", "compression_ratio", "another press"})
"""What is there at any time: a cache holds it, or the policy says it."""


@dataclass(frozen=True)
class Press:
    """A press whose score is a scorer.

    Args:
        role: what it measures, as of any scorer.
        reads: what its `score` reads.
        instead_of_ratio: the setting that makes its score independent of the compression ratio, if there is one.
        fewest: slots that it needs to score any.
        besides: settings that say how many more.
    """

    role: Literal["importance", "diversity", "other"]
    reads: tuple[Read, ...]
    instead_of_ratio: str = ""
    fewest: int = 1
    besides: tuple[str, ...] = ()


_TURNED: tuple[Read, ...] = ("attention module", "hidden states", "position embeddings")
_AHEAD: tuple[Read, ...] = ("keys", "values", "attention module", "hidden states", "rotary embedding")

WRAPPED: dict[str, Press] = {
    "CURPress": Press("importance", ("keys", "values")),
    "CapPress": Press("importance", _AHEAD, besides=("n_sink",)),
    "CompactorPress": Press(
        "importance",
        ("keys", "values", *_TURNED, "compression_ratio"),
        instead_of_ratio="blending",
        besides=("sink_size_start", "sink_size_end"),
    ),
    "CriticalKVPress": Press("importance", ("values", "attention module", "compression_ratio", "another press")),
    "ExpectedAttentionPress": Press("importance", _AHEAD, besides=("n_sink",)),
    "ExpectedAttentionStatsPress": Press("importance", (*_AHEAD, "weights trained for the model"), besides=("n_sink",)),
    "KVzapPress": Press("importance", ("attention module", "hidden states", "weights trained for the model")),
    "KeyDiffPress": Press("diversity", ("keys",)),
    "KnormPress": Press("importance", ("keys",)),
    "LagKVPress": Press("importance", ("keys", "values")),
    "LeverageScorePress": Press("diversity", ("keys", "attention module", "hidden states")),
    "NonCausalAttnPress": Press("importance", ("keys", "values", *_TURNED)),
    "ObservedAttentionPress": Press("importance", ("keys", "attention weights")),
    "QFilterPress": Press("importance", ("keys", "attention module", "weights trained for the model")),
    "RandomPress": Press("other", ("keys",)),
    "SnapKVPress": Press("importance", ("keys", *_TURNED), besides=("window_size",)),
    "StreamingLLMPress": Press("other", ("keys", "compression_ratio"), besides=("n_sink",)),
    "TOVAPress": Press("importance", ("keys", *_TURNED), fewest=2),
}
"""By class name. Those that read only what is stored also score while decoding."""

LEAST: dict[str, int] = {
    "chunk_size": 1,
    "kernel_size": 1,
    "lag_size": 1,
    "local_window_size": 1,
    "n_future_positions": 1,
    "n_sink": 0,
    "num_sinks": 0,
    "sink_size_end": 0,
    "sink_size_start": 0,
    "sketch_dimension": 1,
    "window_size": 1,
}
"""Setting -> the least that the presses that have it can score with."""


def fewest(press: Any) -> tuple[int, str]:
    """Return how many slots a press needs to score any, with those inside it, and whose need that is.

    Args:
        press: of one of the classes in `WRAPPED`.
    """
    name = type(press).__name__
    own = WRAPPED[name]
    settings = {each: getattr(press, each) for each in own.besides}
    said = " and ".join(f"{each} {value}" for each, value in settings.items())
    needed = own.fewest + sum(settings.values()), f"{name} with {said}" if said else name
    return max(needed, fewest(press.press)) if "another press" in own.reads else needed


_HEADS = "shares slots out among heads: any press with `budget: {heads: adaptive}`, which frees them"
_DECODES = "says when to evict while decoding: `decode: {every: ...}` with any press that reads keys and values alone"

NOT_WRAPPED: dict[str, str] = {
    "AdaKVPress": _HEADS,
    "BasePress": "the base class of all presses",
    "BlockPress": "evicts block after block of a prompt that was read whole: it selects, it has no score",
    "CAMPress": "merges values of evicted tokens into kept ones; a policy keeps or evicts, and changes nothing",
    "ChunkKVPress": "keeps or evicts whole chunks by the sum of another press's scores: it selects, it has no score",
    "ChunkPress": "evicts the same share of each chunk of the prompt: it selects, it has no score",
    "ComposedPress": "applies presses one after the other; here scores are joined by a combiner, such as `fixed`",
    "CompressionRatioDecodingPress": _DECODES,
    "CriticalAdaKVPress": "CriticalKVPress with `budget: {heads: adaptive}`, which frees what it evicts",
    "DMSPress": "evicts whatever scores under a threshold; here a budget says how much is kept",
    "DecodingPress": _DECODES,
    "DuoAttentionPress": "sets some heads to sinks and recent tokens by patterns of the model, not by a score of slots",
    "EntropyGatedChunkKVPress": "keeps or evicts parts of chunks by another press's scores: it has no score",
    "FastKVzipPress": "keeps the best of all layers together, once the prompt is read, by gates trained for the model",
    "FinchPress": "takes the question for the window by a token that marks it in the prompt; "
    "`policy.compress(model, context, question)` has the question in view without one",
    "KVComposePress": "scores by the attention of questions that are read after the context, all layers together",
    "KVgradPress": "repeats the context as KVzipPress does, and scores by gradients of it",
    "KVzipPress": "repeats the context once it is read: policy `kvzip`, which frees what it evicts",
    "KeyRerotationPress": "turns kept keys to new positions; here every token keeps its own",
    "LUKVPress": "shares slots out among layers and heads by a curve measured for one model, which it downloads",
    "MergingPress": "merges values of evicted tokens into kept ones; a policy keeps or evicts, and changes nothing",
    "PerLayerCompressionPress": "gives each layer a ratio of its own: it is a layer budget, such as `layers: pyramid`",
    "PrefillDecodingPress": "one press for prompts and another while decoding; a policy has one score for both",
    "PyramidKVPress": "its score is SnapKVPress's: that one with `budget: {layers: pyramid}`",
    "RestoreKVPress": "adds tokens that were trained for the model to the cache, and evicts as KVzipPress does",
    "ScorerPress": "the base class of presses that score",
    "SimLayerKVPress": "keeps sinks and recent tokens in layers that it finds lazy, everything in others: no score",
    "ThinKPress": "sets channels of keys to zero, and evicts no token",
}
"""By class name: why not, or which part of kvpolicy does the same."""
