"""Puts pictures and a question to any vision-language model, the way its processor does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy.eval.pictures.draw import draw
from kvpolicy.eval.pictures.questions import label
from kvpolicy.eval.tasks.example import Pictured
from kvpolicy.eval.tasks.haystack import TaskError


def prompt(processor: Any, asked: Pictured) -> tuple[Any, Tensor]:
    """Return the model's inputs up to the end of the pictures, and the token ids after them, int64 ``[1, Q]``.

    Args:
        processor: of the model, with a chat template.
        asked: the example.

    Raises:
        TaskError: when there is no template, or it does not hold the question as it is behind all pictures.

    >>> from random import Random
    >>> from kvpolicy import models
    >>> from kvpolicy.eval.pictures.scene import random_scene
    >>> asked = Pictured((random_scene(Random(0)),), "What shape is the red object in picture 1?", ("circle",))
    >>> inputs, question = prompt(models.load_processor("tiny-llava"), asked)
    >>> inputs["input_ids"].shape, question.shape
    (torch.Size([1, 68]), torch.Size([1, 11]))
    """
    if not processor.chat_template:
        raise TaskError(f"expected a processor with a chat template, got a {type(processor).__name__} without one")
    parts: list[dict[str, str]] = []
    for number, _ in enumerate(asked.scenes, 1):
        parts += [{"type": "text", "text": label(number)}, {"type": "image"}]
    parts.append({"type": "text", "text": asked.question})
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    end = text.rfind(asked.question)
    if end < 0:
        raise TaskError(f"expected a chat template that holds a question as it is, got {text[:200]!r}...")
    tokenizer = processor.tokenizer
    # A template may have the token that starts a text in it, or leave it to the tokenizer.
    started = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    images = [draw(scene) for scene in asked.scenes]
    # Not every release of transformers counts them itself.
    placed = text[:end].count(processor.image_token)
    if placed != len(images):
        raise TaskError(
            f"expected a chat template that puts {len(images)} pictures before the question, got {placed} in "
            f"{text[:200]!r}..."
        )
    inputs = processor(text=text[:end], images=images, return_tensors="pt", add_special_tokens=not started)
    return inputs, torch.tensor([tokenizer(text[end:], add_special_tokens=False)["input_ids"]])
