"""Which tokens of a picture are kept, drawn on the picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpolicy.analysis.analyze import AnalysisError
from kvpolicy.analysis.plots import Picture, by_policy
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


def on_images(analysis: Analysis, images: Sequence[Any], where: Sequence[Grid]) -> Iterator[Picture]:
    """Yield each image with what policies keep of it, for `page`: the fewer heads keep a token, the paler it is.

    Args:
        analysis: of the prompt that they are in.
        images: as the model saw them, resized and cropped: what matplotlib shows, such as a PIL image or ``[H, W, 3]``.
        where: what `grids` returns.

    Raises:
        AnalysisError: when there are not as many images as grids.
    """
    if len(images) != len(where):
        raise AnalysisError(f"images: expected {len(where)}, one for each picture of the prompt, got {len(images)}")
    heads = sum(map(len, analysis.kept[0].lengths))
    for number, (image, grid) in enumerate(zip(images, where, strict=True), start=1):
        figure, panels = by_policy(analysis)
        for axes, one in zip(panels, analysis.kept, strict=True):
            axes.imshow(image)
            extent = (*axes.get_xlim(), *axes.get_ylim())
            axes.imshow(_veil(one.votes, grid, heads), extent=extent, interpolation="nearest")
            axes.set_title(one.policy, fontsize=10)
            axes.set_axis_off()
        text = f"The fewer of the {heads:,} heads keep a token, the paler its part of the image."
        yield Picture(f"What is kept of image {number}", text, figure)


def _veil(votes: Sequence[int], grid: Grid, heads: int) -> Any:
    """Return white, ``[rows, columns, 4]``, the less transparent the fewer heads keep a token."""
    veil = np.ones((grid.rows, grid.columns, 4))
    share = np.array([votes[slot] for slot in grid.slots]).reshape(grid.rows, grid.columns) / heads
    veil[..., 3] = 0.9 * (1 - share)
    return veil
