"""What the tiny LLaVA learns from: pictures with what is in each patch, prompts with many questions packed in one."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from build import ANSWER, IMAGE, PATCH, PICTURES, tokenizer
from einops import rearrange, reduce
from torch import Tensor

from kvpolicy.eval.pictures.draw import draw, mask
from kvpolicy.eval.pictures.questions import Asked, label, questions
from kvpolicy.eval.pictures.scene import COLORS, SHAPES, SIDE, Scene, random_scene

NOTHING = -100
"""The label that `cross_entropy` leaves out."""
PATCHES = (SIDE // PATCH) ** 2
QUESTION = 12
"""Tokens of the longest question, its answer included; shorter ones are padded."""
WORDS = tokenizer()
CLUTTER = 6
NUMBERS = [str(number) for number in range(1, PICTURES + 1)]


@dataclass(frozen=True)
class Pictures:
    """Scenes and what is made of them once.

    Args:
        scenes: n of them.
        pixels: float32 ``[n, 3, 64, 64]``, as the processor makes them.
        labels: int64 ``[n, patches, 2]``: color and shape of the thing in a patch, or `NOTHING`.
    """

    scenes: list[Scene]
    pixels: Tensor
    labels: Tensor


def pictures(count: int, random: Random) -> Pictures:
    """Return pictures, each with up to `CLUTTER` pieces of clutter."""
    scenes = [random_scene(random, clutter=random.randint(0, CLUTTER)) for _ in range(count)]
    drawn = torch.from_numpy(np.stack([draw(scene) for scene in scenes]))
    pixels = rearrange(drawn, "n h w c -> n c h w").float() / 127.5 - 1
    return Pictures(scenes, pixels, torch.stack([_labels(scene) for scene in scenes]))


def _labels(scene: Scene) -> Tensor:
    found = torch.full((PATCHES, 2), NOTHING)
    for thing in scene.things:
        covered = torch.from_numpy(mask(thing)).float()
        share = reduce(covered, "(r a) (c b) -> (r c)", "mean", a=PATCH, b=PATCH)
        found[share > 0.15] = torch.tensor([list(COLORS).index(thing.color), SHAPES.index(thing.shape)])
    return found


@dataclass(frozen=True)
class Lesson:
    """Prompts of as many pictures each, with the same number of questions.

    Args:
        chosen: int64 ``[B, P]``, which of the pool's pictures.
        numbers: int64 ``[B, P]``, what each is called, from 0.
        ids: int64 ``[B, T]``: the prompt, then question by question with its answer.
        answers: int64 ``[B, Q, 2]``: the answer's word, and the end.
        at: int64 ``[B, Q]``, where in `ids` the answer comes next.
        about: int64 ``[B, Q, 3]``: color, shape and picture's number of the thing that each question is about.
        kinds: what each question asks for.
    """

    chosen: Tensor
    numbers: Tensor
    ids: Tensor
    answers: Tensor
    at: Tensor
    about: Tensor
    kinds: list[list[str]]


def lesson(pool: Pictures, random: Random, *, prompts: int, many: int, each: int) -> Lesson:
    """Return a lesson of `prompts` prompts with `many` pictures and `each` questions of each kind.

    Fewer than six pictures are called by any of the six numbers: which ones there are is the first thing that a model
    learns to say of a place, and without it learns nothing of places for long.
    """
    chosen, asked = [], []
    while len(asked) < prompts:
        row = random.sample(range(len(pool.scenes)), many)
        possible = questions([pool.scenes[at] for at in row])
        # Seldom is each thing in two pictures, and none in a place of its own.
        if any(one.kind == "place" for one in possible):
            chosen.append(row)
            asked.append(_asked(possible, random, each))
    prompt = _prompt(many)
    packed = [[_packed(one) for one in row] for row in asked]
    ids = torch.tensor([prompt + [token for one, _ in row for token in one] for row in packed])
    answers = torch.tensor([[[_word(one.answer), WORDS.eos_token_id] for one in row] for row in asked])
    numbers = torch.tensor([sorted(random.sample(range(PICTURES), many)) for _ in chosen])
    called = torch.arange(len(WORDS)).repeat(prompts, 1)
    called[:, _word("1") : _word("1") + many] = numbers + _word("1")
    starts = torch.arange(3 * each) * QUESTION + len(prompt)
    ids = called.gather(1, ids)
    blocks = rearrange(ids[:, len(prompt) :], "b (q t) -> b q t", t=QUESTION)
    return Lesson(
        chosen=torch.tensor(chosen),
        numbers=numbers,
        ids=ids,
        answers=called.gather(1, answers.flatten(1)).view_as(answers),
        at=starts + torch.tensor([[at for _, at in row] for row in packed]),
        # With its answer, each names one of each.
        about=torch.stack([_which(blocks, words) for words in (COLORS, SHAPES, NUMBERS)], dim=-1),
        kinds=[[one.kind for one in row] for row in asked],
    )


def _which(blocks: Tensor, words: Iterable[str]) -> Tensor:
    """Return which of some words is in each block of ids, int64 ``[B, Q]``."""
    ids = torch.tensor([_word(word) for word in words])
    return (blocks[..., None] == ids).any(2).int().argmax(-1)


def _asked(possible: Sequence[Asked], random: Random, each: int) -> list[Asked]:
    return [
        random.choice([one for one in possible if one.kind == kind])
        for kind in ("color", "shape", "place")
        for _ in range(each)
    ]


def _packed(asked: Asked) -> tuple[list[int], int]:
    """Return the tokens of a question with its answer, padded, and where its answer comes next."""
    ids = [*_ids(asked.question), *_ids(ANSWER), _word(asked.answer)]
    return ids + [WORDS.pad_token_id] * (QUESTION - len(ids)), len(ids) - 2


@functools.cache
def _prompt(many: int) -> list[int]:
    pictures = [label(number) + IMAGE * PATCHES for number in range(1, many + 1)]
    return _ids(f"{WORDS.bos_token}{''.join(pictures)}")


@functools.cache
def _ids(text: str) -> list[int]:
    return WORDS(text, add_special_tokens=False)["input_ids"]


def _word(text: str) -> int:
    return _ids(text)[0]


@functools.cache
def layout(prompt: int, asked: int) -> tuple[Tensor, Tensor]:
    """Return which tokens each one sees, bool ``[1, 1, T, T]``, and positions ``[1, T]``: no question sees another."""
    block = torch.cat([torch.zeros(prompt, dtype=torch.int64), torch.arange(1, asked + 1).repeat_interleave(QUESTION)])
    sees = torch.ones(len(block), len(block)).tril().bool() & ((block == 0) | (block == block[:, None]))
    positions = torch.cat([torch.arange(prompt), prompt + torch.arange(QUESTION).repeat(asked)])
    return sees[None, None], positions[None]
