"""Scenes: what is in a picture, as plain data that says everything that `draw` needs."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

Color = tuple[int, int, int]

SIDE = 64
"""Pixels of a picture's side."""
COLORS: dict[str, Color] = {
    "red": (220, 30, 30),
    "green": (30, 170, 50),
    "blue": (40, 70, 220),
    "yellow": (235, 215, 40),
    "purple": (150, 40, 180),
    "cyan": (50, 205, 215),
}
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "ring")
PATTERNS = ("flat", "rows", "columns", "checks", "dots")
MARKS = ("disc", "bar", "speckle")
DULL: tuple[Color, ...] = (
    (15, 15, 15),
    (245, 245, 245),
    (125, 80, 45),
    (110, 110, 110),
    (240, 175, 190),
    (100, 105, 40),
)
"""Colors of clutter, which no question names."""


@dataclass(frozen=True)
class Thing:
    """What is asked about.

    Args:
        color: one of `COLORS`.
        shape: one of `SHAPES`.
        left: pixels from the picture's left side to it.
        top: pixels from the upper side to it.
        size: pixels of its width and height.
    """

    color: str
    shape: str
    left: int
    top: int
    size: int


@dataclass(frozen=True)
class Mark:
    """A piece of clutter.

    Args:
        kind: one of `MARKS`.
        color: one of `DULL`.
        left: pixels from the picture's left side to it.
        top: pixels from the upper side to it.
        size: pixels of its width and height.
    """

    kind: str
    color: Color
    left: int
    top: int
    size: int


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn: things over clutter over a background.

    Args:
        pattern: of the background, one of `PATTERNS`.
        period: of the pattern, in pixels.
        tones: its two colors.
        marks: the clutter.
        things: none over another; no two of one color or one shape.
        grain: seed of the noise.
    """

    pattern: str
    period: int
    tones: tuple[Color, Color]
    marks: tuple[Mark, ...]
    things: tuple[Thing, ...]
    grain: int


def random_scene(random: Random, *, things: int = 2, clutter: int = 4) -> Scene:
    """Return a scene, the same one for a `Random` in the same state.

    Args:
        random: what decides.
        things: how many things to ask about, at most four.
        clutter: how many pieces of clutter.

    >>> scene = random_scene(Random(0), clutter=1)
    >>> len(scene.things), len(scene.marks)
    (2, 1)
    """
    first = random.randint(140, 215)
    second = first - random.randint(20, 60)
    return Scene(
        pattern=random.choice(PATTERNS),
        period=random.choice((4, 8)),
        tones=(_tinted(first, random), _tinted(second, random)),
        marks=tuple(_mark(random) for _ in range(clutter)),
        things=_things(things, random),
        grain=random.getrandbits(32),
    )


def _tinted(level: int, random: Random) -> Color:
    red, green, blue = (level + random.randint(-12, 12) for _ in range(3))
    return red, green, blue


def _mark(random: Random) -> Mark:
    size = random.randint(7, 14)
    left, top = (random.randint(0, SIDE - size) for _ in range(2))
    return Mark(random.choice(MARKS), random.choice(DULL), left, top, size)


def _things(count: int, random: Random) -> tuple[Thing, ...]:
    colors, shapes = random.sample(list(COLORS), count), random.sample(SHAPES, count)
    found: list[Thing] = []
    while len(found) < count:
        size = random.randint(10, 14)
        left, top = (random.randint(0, SIDE - size) for _ in range(2))
        thing = Thing(colors[len(found)], shapes[len(found)], left, top, size)
        if not any(_touch(thing, other) for other in found):
            found.append(thing)
    return tuple(found)


def _touch(one: Thing, other: Thing) -> bool:
    """Return whether less than two pixels are between the squares around two things."""
    room = 2
    across = one.left < other.left + other.size + room and other.left < one.left + one.size + room
    down = one.top < other.top + other.size + room and other.top < one.top + one.size + room
    return across and down
