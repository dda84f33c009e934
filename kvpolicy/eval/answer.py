"""Puts a question to what a policy kept of its context, and looks for the answers in what the model says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpolicy.eval.pictures import prompt as of_pictures
from kvpolicy.eval.readings import Readings
from kvpolicy.eval.tasks.example import Pictured, Question
from kvpolicy.eval.tasks.haystack import TaskError
from kvpolicy.policy import Policy


@dataclass(frozen=True)
class Answer:
    """What came of a question.

    Args:
        text: what the model says.
        bytes: of keys and values kept when it was asked.
        bytes_full: that a full cache would hold.
    """

    text: str
    bytes: int
    bytes_full: int


def answer(
    readings: Readings, reader: Any, policy: Policy, asked: Question | Pictured, *, query_aware: bool, new_tokens: int
) -> Answer:
    """Return the model's greedy answer to a question about what `policy` kept of the context.

    Args:
        readings: of a causal language model, or one of images and text.
        reader: its tokenizer; with a chat template, the question is put as a chat. For pictures, its processor.
        policy: what to keep.
        asked: the example.
        query_aware: whether the question is in view when the policy decides.
        new_tokens: that the answer may have.
    """
    context, question = _prompt(reader, asked)
    held = readings.compress(policy, (asked, query_aware), context, question if query_aware else None)
    with held.fork() as fork:
        # Its last token is with the fork already where it was in view.
        ids = fork.generate(None if query_aware else question, max_new_tokens=new_tokens, do_sample=False)
    text = reader.decode(ids[0], skip_special_tokens=True)
    return Answer(text, held.report.bytes, held.report.bytes_full)


def _prompt(reader: Any, asked: Question | Pictured) -> tuple[Any, Tensor]:
    return of_pictures.prompt(reader, asked) if isinstance(asked, Pictured) else prompt(reader, asked)


def prompt(tokenizer: Any, asked: Question) -> tuple[Tensor, Tensor]:
    """Return the token ids up to the end of the context and those after it, int64 ``[1, T]`` and ``[1, Q]``.

    Raises:
        TaskError: when the tokenizer's chat template does not hold context and question as they are.
    """
    said = f"{asked.context}\n\n{asked.question}"
    # Else the space before the answer would be a token of its own.
    prefix = asked.prefix.rstrip()
    if not tokenizer.chat_template:
        start, rest = asked.context, f"\n\n{asked.question}\n\n{prefix}"
        return _ids(tokenizer, start, special=True), _ids(tokenizer, rest, special=False)
    chat = [{"role": "user", "content": said}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    at = text.rfind(said)
    if at < 0:
        raise TaskError(f"expected a chat template that holds a message as it is, got {text[:200]!r}...")
    end = at + len(asked.context)
    # The template has the special tokens in it.
    return _ids(tokenizer, text[:end], special=False), _ids(tokenizer, text[end:] + prefix, special=False)


def _ids(tokenizer: Any, text: str, *, special: bool) -> Tensor:
    return torch.tensor([tokenizer(text, add_special_tokens=special)["input_ids"]])


def match(text: str, answers: tuple[str, ...]) -> dict[str, float]:
    """Return RULER's two scores of an answer: the share of `answers` that are in it, and whether any is.

    >>> match("It is 12 or 34.", ("12", "56"))
    {'string_match_all': 0.5, 'string_match_part': 1.0}
    """
    found = [expected.lower() in text.lower() for expected in answers]
    return {"string_match_all": sum(found) / len(found), "string_match_part": float(any(found))}
