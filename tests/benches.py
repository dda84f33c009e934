"""A tiny model with a tokenizer of letters, for evaluations that take milliseconds."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvpolicy.eval.bench import Bench
from kvpolicy.eval.tasks.haystack import Haystack
from kvpolicy.testing.models import tiny
from kvpolicy.texts import unrepeated

CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@functools.cache
def letters(*, chat: bool = True) -> PreTrainedTokenizerBase:
    """Return a tokenizer with a token for each byte, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={letter: at for at, letter in enumerate([*alphabet, "<end>"])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", chat_template=CHAT if chat else None)


@functools.cache
def haystack() -> Haystack:
    """Return Python's own topics in letters."""
    return Haystack(letters(), tuple(unrepeated()))


@functools.cache
def bench() -> Bench:
    """Return a tiny model that reads letters."""
    model = tiny("llama-gqa", vocab_size=257, eos_token_id=256, bos_token_id=None)
    return Bench("tiny", model, letters(), unrepeated())
