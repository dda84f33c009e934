"""What is kept of a picture is drawn where the picture's tokens come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from releases import installed
from torch import Tensor
from transformers import PreTrainedModel

import kvpolicy
from kvpolicy.analysis.analyze import AnalysisError, analyze
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.session.decoder import find_decoders
from kvpolicy.testing.vision import prompt, tiny_model

pytest.importorskip("matplotlib")

from kvpolicy.analysis.images import grids, on_images
from kvpolicy.analysis.page import page

ROW = [[20, "image", 30, "image", 30]]
COUNTED = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"]
"""Families whose tokens have rows and columns among their positions."""


def inputs_of(model: PreTrainedModel, rows: Any = ROW) -> dict[str, Tensor]:
    given = prompt(model, rows)
    return {"input_ids": given.ids, "attention_mask": given.mask, **given.pictures}


@pytest.mark.parametrize("family", COUNTED)
def test_a_grid_is_where_the_model_itself_counts_rows_and_columns(family: str) -> None:
    if family == "qwen3_5" and not installed(">=5.6"):
        pytest.skip("before transformers 5.6 it has a cache of its own, and is refused")
    if family.startswith("qwen") and not installed(">=5.3"):
        pytest.skip("before transformers 5.3 it finds pictures by a marker that these prompts have not")
    model: Any = tiny_model(family)
    inputs = inputs_of(model)
    seen: list[Tensor] = []
    hook = find_decoders(model)[0].register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    model.generate(**inputs, max_new_tokens=1, do_sample=False, pad_token_id=0)
    hook.remove()
    found = grids(model.config, inputs)
    assert [(grid.rows, grid.columns) for grid in found] == [(2, 4), (2, 4)]
    rows, columns = seen[0][-2, 0], seen[0][-1, 0]
    for grid in found:
        places = list(grid.slots)
        first = places[0]
        assert (rows[places] - rows[first]).tolist() == [slot // 4 for slot in range(8)]
        assert (columns[places] - columns[first]).tolist() == [slot % 4 for slot in range(8)]


def test_a_grid_of_llava_is_where_its_patches_are() -> None:
    model: Any = tiny_model("llava")
    inputs = inputs_of(model)
    found = grids(model.config, inputs)
    assert [(grid.rows, grid.columns) for grid in found] == [(4, 4), (4, 4)]
    assert found[0].slots == tuple(range(20, 36)) and found[1].slots == tuple(range(66, 82))
    # A token sees its own patch alone once no patch attends to another.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "vision" in name and "out_proj" in name:
                weight.zero_()
    before = features(model, inputs["pixel_values"])
    pixels = inputs["pixel_values"].clone()
    pixels[1, :, 8:16, 24:32] += 1  # of 8 x 8 patches, the second row's last
    changed = (features(model, pixels) != before).any(-1).nonzero().flatten().tolist()
    assert changed == [16 + 1 * 4 + 3]


def features(model: Any, pixels: Tensor) -> Tensor:
    """Return what the decoder reads of the pictures, a row a token."""
    read: list[Tensor] = []
    hook = model.model.multi_modal_projector.register_forward_hook(lambda _, __, out: read.append(out))
    with torch.no_grad():
        model.get_image_features(pixel_values=pixels)
    hook.remove()
    return read[0].flatten(0, -2)


def test_other_layouts_are_refused() -> None:
    model = tiny_model("llava_next")
    with pytest.raises(UnsupportedModelError, match="pictures of llava_next: expected `image_grid_thw`"):
        grids(model.config, inputs_of(model))
    model = tiny_model("qwen2_vl")
    inputs = inputs_of(model)
    inputs["input_ids"] = inputs["input_ids"][:, :60]
    with pytest.raises(AnalysisError, match=r"expected 16 tokens for pictures of \[\(2, 4\), \(2, 4\)\] tokens, got"):
        grids(model.config, inputs)


def test_what_more_heads_keep_is_bluer() -> None:
    model = tiny_model("qwen2_vl")
    inputs = inputs_of(model)
    found = analyze(model, inputs, [kvpolicy.load(name, budget=40) for name in ("ecokv-snapkv", "key-norm")])
    where = grids(model.config, inputs)
    image = np.full((16, 32, 3), 51, dtype=np.uint8)
    drawn = list(on_images(found, [image, image / 255], where))
    assert [picture.title for picture in drawn] == ["What is kept of image 1", "What is kept of image 2"]
    heads = sum(map(len, found.kept[0].lengths))
    for picture, grid in zip(drawn, where, strict=True):
        whole, *policies = picture.figure.axes
        assert [len(axes.get_images()) for axes in picture.figure.axes] == [1, 2, 2]
        for axes, one in zip(policies, found.kept, strict=True):
            below, above = axes.get_images()
            grey, blue = below.get_array(), above.get_array()
            assert grey is not None and np.allclose(grey, 0.2)
            assert blue is not None and blue.shape == (2, 4, 4)
            assert list(below.get_extent()) == list(above.get_extent()) == list(whole.get_images()[0].get_extent())
            want = [0.8 * one.votes[slot] / heads for slot in grid.slots]
            assert blue[..., 3].flatten().tolist() == pytest.approx(want)
    text = page(found, drawn)
    assert text.index("What is kept of image 1") < text.index(
        "Redundancy and anisotropy by layer, slots that hold image"
    )
    with pytest.raises(AnalysisError, match="images: expected 2, one for each picture of the prompt, got 1"):
        list(on_images(found, [image], where))


def test_a_prompt_without_pictures_has_no_grids() -> None:
    model = tiny_model("llava")
    assert (
        grids(model.config, {"input_ids": torch.arange(64, 90)[None], "pixel_values": torch.zeros(0, 3, 32, 32)}) == []
    )
