"""What each family of vision-language models takes: pictures as tensors, made by hand, without processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.session.decoder import forward_names
from kvpolicy.testing.architectures.build import randomized
from kvpolicy.testing.architectures.configs import PLAIN_TOKENS, VOCABULARY, tiny_config
from kvpolicy.types import MODALITIES

Pixels = Callable[[list[int], Callable[..., Tensor]], dict[str, Tensor]]
"""From how many pictures each row has, and what makes random tensors, to what the model's forward calls them."""


@dataclass(frozen=True)
class Family:
    """What the models of one type take.

    Args:
        name: of the class.
        tokens: placeholders of one picture.
        pixels: makes the pictures.
        kinds: what the model calls the modality of each token, where it wants to know it.
        settings: of the tiny config, by path.
        placed: whether the tokens of a picture stand in the sequence of the text.
    """

    name: str
    tokens: int
    pixels: Pixels
    kinds: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    placed: bool = True


def _flat(*shape: int) -> Pixels:
    return lambda counts, random: {"pixel_values": random(sum(counts), *shape)}


def _sized(*shape: int, size: tuple[int, int]) -> Pixels:
    return lambda counts, random: {
        "pixel_values": random(sum(counts), *shape),
        "image_sizes": torch.tensor([size] * sum(counts)),
    }


def _grid(counts: list[int], random: Callable[..., Tensor]) -> dict[str, Tensor]:
    # Twice as wide as high, so that no two axes of a position are alike.
    count, (rows, columns) = sum(counts), (4, 8)
    grid = torch.tensor([[1, rows, columns]] * count)
    return {"pixel_values": random(count * rows * columns, 3 * 2 * 8 * 8), "image_grid_thw": grid}


def _by_row(counts: list[int], random: Callable[..., Tensor]) -> dict[str, Tensor]:
    pixels = random(len(counts), max(counts), 3, 32, 32)
    for row, count in enumerate(counts):
        # A picture of zeros is padding.
        pixels[row, count:] = 0
    return {"pixel_values": pixels}


def _crossed(counts: list[int], random: Callable[..., Tensor]) -> dict[str, Tensor]:
    there = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    tiles = 4
    return {
        "pixel_values": random(len(counts), max(counts), tiles, 3, 32, 32),
        "aspect_ratio_ids": there.long(),
        "aspect_ratio_mask": there[..., None] & (torch.arange(tiles) == 0),
    }


_PINPOINTS = {"image_grid_pinpoints": [[32, 64], [64, 32]]}

FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family("Qwen2VLForConditionalGeneration", 8, _grid, "mm_token_type_ids"),
    "qwen2_5_vl": Family("Qwen2_5_VLForConditionalGeneration", 8, _grid, "mm_token_type_ids"),
    "qwen3_vl": Family("Qwen3VLForConditionalGeneration", 8, _grid, "mm_token_type_ids"),
    "qwen3_5": Family("Qwen3_5ForConditionalGeneration", 8, _grid, "mm_token_type_ids"),
    "glm4v": Family("Glm4vForConditionalGeneration", 8, _grid, "mm_token_type_ids"),
    "llava": Family("LlavaForConditionalGeneration", 16, _flat(3, 32, 32)),
    # The whole and two halves, with a token at the end of each of four lines.
    "llava_next": Family(
        "LlavaNextForConditionalGeneration", 52, _sized(3, 3, 32, 32, size=(32, 64)), settings=_PINPOINTS
    ),
    "llava_onevision": Family(
        "LlavaOnevisionForConditionalGeneration", 52, _sized(3, 3, 32, 32, size=(32, 64)), settings=_PINPOINTS
    ),
    "internvl": Family("InternVLForConditionalGeneration", 4, _flat(3, 32, 32)),
    "smolvlm": Family("SmolVLMForConditionalGeneration", 4, _by_row),
    "idefics3": Family("Idefics3ForConditionalGeneration", 4, _by_row),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration", 16, _flat(3, 32, 32), "token_type_ids", {"mm_tokens_per_image": 16}
    ),
    "paligemma": Family("PaliGemmaForConditionalGeneration", 16, _flat(3, 32, 32), "token_type_ids"),
    "mistral3": Family("Mistral3ForConditionalGeneration", 4, _sized(3, 32, 32, size=(32, 32))),
    "aya_vision": Family("AyaVisionForConditionalGeneration", 4, _flat(3, 32, 32)),
    "mllama": Family(
        "MllamaForConditionalGeneration",
        1,
        _crossed,
        settings={
            "text_config.cross_attention_layers": [1],
            "vision_config.intermediate_layers_indices": [0, 1],
            "vision_config.vision_output_dim": 3 * 64,
        },
        placed=False,
    ),
}
"""By model type."""


def tiny_model(model_type: str) -> PreTrainedModel:
    """Return a tiny model of a family with random weights in float64, always the same ones."""
    config = tiny_config(model_type)
    for path, value in FAMILIES[model_type].settings.items():
        *parents, name = path.split(".")
        setattr(attrgetter(*parents)(config) if parents else config, name, value)
    model = randomized(getattr(transformers, FAMILIES[model_type].name), config).double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Those of a new Mllama are closed: its text would see no picture.
            if name.endswith(("cross_attn_attn_gate", "cross_attn_mlp_gate")):
                weight.fill_(1)
    return model


@dataclass(frozen=True)
class Prompt:
    """A prompt with pictures, rows padded on the left.

    Args:
        ids: int64 ``[B, T]``.
        mask: int64 ``[B, T]``, 0 for padding.
        pictures: what else the model's forward takes.
        modality: int8 ``[B, T]``, as a view has it.
    """

    ids: Tensor
    mask: Tensor
    pictures: dict[str, Tensor]
    modality: Tensor


def prompt(model: PreTrainedModel, rows: Sequence[Sequence[int | str]]) -> Prompt:
    """Return a prompt whose rows are runs of so many text tokens and pictures ("image"), in order.

    Args:
        model: from `tiny_model`.
        rows: such as ``[[4, "image", 9], [6, "image", 2, "image", 9]]``.
    """
    family = FAMILIES[model.config.model_type]
    generator = torch.Generator().manual_seed(0)
    placeholder = getattr(model.config, "image_token_id", None) or model.config.image_token_index
    ids, kinds = [], []
    for row in rows:
        runs = [family.tokens if run == "image" else int(run) for run in row]
        text = torch.randint(PLAIN_TOKENS, VOCABULARY, (sum(runs),), generator=generator)
        image = torch.tensor([run == "image" for run in row]).repeat_interleave(torch.tensor(runs))
        ids.append(text.masked_fill(image, placeholder))
        kinds.append(image)
    length = max(map(len, ids))
    mask = torch.stack([torch.arange(length) >= length - len(row) for row in ids]).long()
    padded = [
        torch.stack([torch.cat([row.new_zeros(length - len(row)), row]) for row in part]) for part in (ids, kinds)
    ]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    pictures = family.pixels([row.count("image") for row in rows], random)
    # Qwen's models ask for it since transformers 5.3.
    if family.kinds in forward_names(model):
        pictures[family.kinds] = padded[1].long()
    if not family.placed:
        there = pictures["aspect_ratio_mask"].long()
        pictures["cross_attention_mask"] = there[:, None].repeat(1, length, 1, 1)
    modality = padded[1].to(torch.int8) * MODALITIES.index("image") * family.placed
    return Prompt(padded[0], mask, pictures, modality)
