"""Draws a scene: numbers alone, so that every machine and every release of any library draws the same pixels."""

from __future__ import annotations

from random import Random

import numpy as np
from numpy.typing import NDArray

from kvpolicy.eval.pictures.scene import COLORS, SIDE, Mark, Scene, Thing

Pixels = NDArray[np.uint8]
Mask = NDArray[np.bool_]

_NOISE = 5
"""How far noise takes a pixel at most: 2% of the range."""
_DOWN, _ACROSS = np.indices((SIDE, SIDE))


def draw(scene: Scene) -> Pixels:
    """Return the picture of a scene, uint8 ``[64, 64, 3]``: rows, columns, RGB.

    >>> from random import Random
    >>> from kvpolicy.eval.pictures.scene import random_scene
    >>> draw(random_scene(Random(0))).shape
    (64, 64, 3)
    """
    first, second = (np.array(tone) for tone in scene.tones)
    picture = np.where(_pattern(scene)[..., None], second, first)
    grain = Random(scene.grain)
    for mark in scene.marks:
        picture[_mark(mark, grain)] = mark.color
    for thing in scene.things:
        picture[mask(thing)] = COLORS[thing.color]
    noise = np.frombuffer(grain.randbytes(picture.size), np.uint8).reshape(picture.shape) % (2 * _NOISE + 1)
    return (picture + noise.astype(np.int64) - _NOISE).clip(0, 255).astype(np.uint8)


def mask(thing: Thing) -> Mask:
    """Return which pixels a thing covers, bool ``[64, 64]``."""
    # Twice the distance of a pixel's middle from the thing's, so that all is whole numbers.
    x, y, inside = _around(thing)
    size = thing.size
    distance = x**2 + y**2
    shapes = {
        "circle": distance <= size**2,
        "square": np.ones_like(inside),
        "triangle": 2 * abs(x) <= y + size + 1,
        "cross": (abs(x) <= size // 3) | (abs(y) <= size // 3),
        "diamond": abs(x) + abs(y) <= size,
        "ring": (distance <= size**2) & (4 * distance >= size**2),
    }
    return inside & shapes[thing.shape]


def _pattern(scene: Scene) -> Mask:
    """Return where the background has its second tone."""
    half = scene.period // 2
    row, column = _DOWN // half % 2 == 1, _ACROSS // half % 2 == 1
    patterns = {
        "flat": np.zeros_like(row),
        "rows": row,
        "columns": column,
        "checks": row ^ column,
        "dots": row & column,
    }
    return patterns[scene.pattern]


def _mark(mark: Mark, grain: Random) -> Mask:
    x, y, inside = _around(mark)
    if mark.kind == "speckle":
        chosen = np.frombuffer(grain.randbytes(SIDE * SIDE), np.uint8).reshape(SIDE, SIDE)
        return inside & (chosen < 128)
    return inside & (x**2 + y**2 <= mark.size**2 if mark.kind == "disc" else abs(x - y) <= 4)


def _around(thing: Thing | Mark) -> tuple[NDArray[np.int64], NDArray[np.int64], Mask]:
    """Return twice the distance of each pixel from the middle, rightwards and downwards, and what is in the square."""
    x = 2 * (_ACROSS - thing.left) + 1 - thing.size
    y = 2 * (_DOWN - thing.top) + 1 - thing.size
    return x, y, (abs(x) < thing.size) & (abs(y) < thing.size)
