"""Which tokens of a picture are kept, drawn on the picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from einops import rearrange
from matplotlib.colors import to_rgba

from kvpolicy.analysis.analyze import AnalysisError
from kvpolicy.analysis.plots import COLOURS, Picture, tiles
from kvpolicy.analysis.result import Analysis
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.session.modality import placeholders
from kvpolicy.types import MODALITIES


@dataclass(frozen=True)
class Grid:
    """Where the tokens of one picture are.

    Args:
        slots: their places in the prompt, row by row of the picture, from its top left.
        rows: of tokens.
        columns: of tokens.
    """

    slots: tuple[int, ...]
    rows: int
    columns: int


def grids(config: Any, inputs: Mapping[str, Any]) -> list[Grid]:
    """Return where the tokens of each picture of a prompt are, in the order of the pictures.

    Args:
        config: of the model.
        inputs: of one row, as the processor returned them: with `image_grid_thw`, as Qwen's and GLM's do, or of LLaVA,
            whose pictures are all of one size.

    Raises:
        UnsupportedModelError: when it is not known how the model lays out the tokens of a picture.
        AnalysisError: when the prompt has more or fewer of them.
    """
    ids = inputs["input_ids"].flatten()
    stands = placeholders(config).get(MODALITIES.index("image"))
    slots = [] if stands is None else (ids == stands).nonzero().flatten().tolist()
    if inputs.get("image_grid_thw") is not None:
        merged = config.vision_config.spatial_merge_size
        sizes = [(rows // merged, columns // merged) for _, rows, columns in inputs["image_grid_thw"].tolist()]
    elif config.model_type == "llava":
        side = config.vision_config.image_size // config.vision_config.patch_size
        sizes = [(side, side)] * len(inputs["pixel_values"])
    else:
        raise UnsupportedModelError(
            f"pictures of {config.model_type}: expected `image_grid_thw` among the inputs, or LLaVA, as it is not "
            "known how other models lay out the tokens of a picture"
        )
    wanted = sum(rows * columns for rows, columns in sizes)
    if wanted != len(slots):
        raise AnalysisError(f"inputs: expected {wanted} tokens for pictures of {sizes} tokens, got {len(slots)}")
    found = []
    for rows, columns in sizes:
        own, slots = slots[: rows * columns], slots[rows * columns :]
        found.append(Grid(tuple(own), rows, columns))
    return found


def as_seen(processor: Any, inputs: Mapping[str, Any], images: Sequence[Any]) -> list[Any]:
    """Return the pictures of a prompt as the model saw them, resized and cropped, for `on_images`.

    Args:
        processor: that made the inputs, of a model whose tokens `grids` knows.
        inputs: what it returned.
        images: PIL images, what it was given.
    """
    made = processor.image_processor
    if inputs.get("image_grid_thw") is not None:
        # Cut into patches in an order of its own, but not cropped.
        sizes = [
            (made.patch_size * columns, made.patch_size * rows)
            for _, rows, columns in inputs["image_grid_thw"].tolist()
        ]
        return [image.resize(size) for image, size in zip(images, sizes, strict=True)]
    pixels = rearrange(inputs["pixel_values"], "image colour row column -> image row column colour").float().numpy()
    if made.do_normalize:
        pixels = pixels * np.array(made.image_std) + np.array(made.image_mean)
    whitest = 255 * (made.rescale_factor if made.do_rescale else 1)
    return list((pixels / whitest).clip(0, 1))


def on_images(analysis: Analysis, images: Sequence[Any], where: Sequence[Grid]) -> Iterator[Picture]:
    """Yield each image, then what each policy keeps of it, for `page`: the more heads keep a token, the bluer it is.

    Args:
        analysis: of the prompt that they are in.
        images: as the model saw them, such as `as_seen` returns: PIL images or ``[H, W, 3]``, of bytes or in [0, 1].
        where: what `grids` returns.

    Raises:
        AnalysisError: when there are not as many images as grids.
    """
    if len(images) != len(where):
        raise AnalysisError(f"images: expected {len(where)}, one for each picture of the prompt, got {len(images)}")
    heads = sum(map(len, analysis.kept[0].lengths))
    for number, (image, grid) in enumerate(zip(images, where, strict=True), start=1):
        figure, (first, *panels) = tiles(1 + len(analysis.kept))
        first.imshow(image)
        first.set_title("as the model saw it", fontsize=10)
        first.set_axis_off()
        for axes, one in zip(panels, analysis.kept, strict=True):
            # Light grey, so that blue shows on it wherever the image is dark or white.
            axes.imshow(_grey(image), cmap="gray", vmin=-1, vmax=1)
            extent = (*axes.get_xlim(), *axes.get_ylim())
            axes.imshow(_shares(one.votes, grid, heads), extent=extent, interpolation="nearest")
            axes.set_title(one.policy, fontsize=10)
            axes.set_axis_off()
        text = f"The more of the {heads:,} heads keep a token, the bluer its part of the image; no blue: none does."
        yield Picture(f"What is kept of image {number}", text, figure)


def _grey(image: Any) -> Any:
    """Return how light an image is, ``[H, W]`` in [0, 1]."""
    colours = np.asarray(image)
    whitest = 255 if np.issubdtype(colours.dtype, np.integer) else 1
    return colours.mean(-1) / whitest


def _shares(votes: Sequence[int], grid: Grid, heads: int) -> Any:
    """Return the blue of kept tokens, ``[rows, columns, 4]``, the less transparent the more heads keep one."""
    blue = np.full((grid.rows, grid.columns, 4), to_rgba(COLOURS[0]))
    share = np.array([votes[slot] for slot in grid.slots]).reshape(grid.rows, grid.columns) / heads
    blue[..., 3] = 0.8 * share
    return blue
