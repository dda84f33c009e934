"""Where a prompt of pictures and text is cut: what is read before a policy evicts, and what is asked of the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvpolicy.integrations.harness import HarnessError
from kvpolicy.session.modality import modalities

QUESTION = "question"
"""All that stands behind a prompt's last picture or frame."""


def split_prompt(inputs: Mapping[str, Any], held_back: int | str, config: Any) -> tuple[dict[str, Any], Tensor]:
    """Return what is read of a prompt before the policy evicts, and the ids held back, int64 ``[1, n]``.

    Args:
        inputs: what a processor returns for one prompt: ids ``[1, T]``, a mask, pixels and the like.
        held_back: n, how many of the last tokens; or `QUESTION`.
        config: of the model: names the placeholders of pictures.

    Raises:
        HarnessError: where nothing would be left on one side, or no picture says where the question begins, or one
            is held back.

    >>> import torch
    >>> from transformers import LlavaConfig
    >>> inputs = {"input_ids": torch.tensor([[1, 9, 9, 9, 5, 6]]), "pixel_values": torch.zeros(1, 3, 8, 8)}
    >>> read, asked = split_prompt(inputs, "question", LlavaConfig(image_token_index=9))
    >>> read["input_ids"], asked
    (tensor([[1, 9, 9, 9]]), tensor([[5, 6]]))
    """
    ids = inputs["input_ids"]
    length = ids.shape[1]
    seen = modalities(ids, config)[0].nonzero()
    behind = int(seen.max()) + 1 if len(seen) else 0
    if held_back == QUESTION and not behind:
        raise HarnessError(
            f"held_back={QUESTION!r}: expected prompts with a picture, behind which the question begins, got one "
            f"without of {length} tokens: hold back a number of tokens"
        )
    at = behind if isinstance(held_back, str) else length - held_back
    if not 0 < at < length:
        raise HarnessError(
            f"held_back={held_back!r}: expected prompts with at least 1 token held back and 1 before it, got "
            f"{length - at} held back of {length}: hold back less, or leave the task out"
        )
    if at < behind:
        raise HarnessError(
            f"held_back={held_back!r}: expected text alone to be held back, got a prompt of {length} tokens whose last "
            f"picture ends {length - behind} before its end: hold back that many, or {QUESTION!r}"
        )
    # Masks and types of tokens are cut with them; pixels are all before the cut.
    read = {
        name: value[:, :at] if isinstance(value, Tensor) and value.shape[:2] == ids.shape else value
        for name, value in inputs.items()
    }
    return read, ids[:, at:]
