"""Prompts with pictures: read from files, and put as a model's processor puts them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpolicy.analysis.analyze import AnalysisError


def read_image(path: Path) -> Any:
    """Return a picture as a PIL image in RGB, turned the way it is meant to be seen.

    Raises:
        AnalysisError: when the file cannot be read, or is no picture.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            turned = ImageOps.exif_transpose(image)
            turned.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        # An error of the system says what it is of; Pillow's own do not all say it in words of a user.
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is none that Pillow can read"
        raise AnalysisError(
            f"image {str(path)!r}: expected the file of a picture, such as PNG or JPEG: {why}"
        ) from error
    if turned.mode in ("I", "F"):
        raise AnalysisError(
            f"image {str(path)!r}: expected 8 or 16 bits a number, got {turned.mode!r}, whole or floating-point "
            "numbers of any size: save it with 8 bits"
        )
    if turned.mode.startswith("I;16"):
        # Pillow would make all above 255 white.
        turned = turned.point(lambda number: number * (1 / 256), "L")
    return turned.convert("RGB")


def ask(processor: Any, text: str, images: Sequence[Any]) -> Any:
    """Return the inputs of a prompt with pictures, of one row, as the model's processor makes them.

    With a chat template, as the first message of a user. Pictures come before the text, or where its placeholders
    stand, such as ``<image>``; without a chat template placeholders are needed.

    Args:
        processor: of transformers, of a vision-language model.
        text: the prompt.
        images: PIL images, in the order of their placeholders.

    Raises:
        AnalysisError: when the text has not one placeholder for each picture.
    """
    placeholder = getattr(processor, "image_token", None) or "<image>"
    parts = text.split(placeholder)
    chat = processor.chat_template is not None
    if len(parts) == 1 and chat:
        parts = [""] * len(images) + parts
    if len(parts) - 1 != len(images):
        or_none = ", or none at all" if chat else ""
        raise AnalysisError(
            f"prompt: expected {len(images)} x {placeholder}, one for each image{or_none}, got {len(parts) - 1}"
        )
    if not chat:
        return processor(text=text, images=list(images), return_tensors="pt")
    content = [{"type": "text", "text": parts[0]}]
    for image, part in zip(images, parts[1:], strict=True):
        content += [{"type": "image", "image": image}, {"type": "text", "text": part}]
    message = {"role": "user", "content": [one for one in content if one.get("text") != ""]}
    return processor.apply_chat_template(
        [message], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
