"""The file of Q-Filters: one vector for each KV head of a model, as safetensors."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvpolicy.files import whole

TENSOR = "q_filters"
"""What the tensor is called, as in the files that the authors publish."""

_KEY = "kvpolicy"
_TOLD = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class Made:
    """Whose filters they are: of these, another model of the same sizes has others.

    Args:
        model: what the model is called.
        config: what its config says of its kind and sizes.
        tokens: of how many tokens the queries are.
    """

    model: str
    config: dict[str, Any]
    tokens: int


def kind(config: Any) -> dict[str, Any]:
    """Return what a decoder's config says of its kind and sizes.

    >>> from kvpolicy.testing.models import tiny
    >>> kind(tiny().config)["num_hidden_layers"]
    3
    """
    said = {name: getattr(config, name, None) for name in _TOLD}
    return {name: value for name, value in said.items() if value is not None}


def write(path: str | os.PathLike[str], filters: Tensor, made: Made) -> None:
    """Write a file, which appears whole or not at all.

    Args:
        path: of the file.
        filters: ``[layers, Hkv, Dk]``, any float dtype; a key that points along them scores low.
        made: whose they are.

    Raises:
        OSError: when it cannot be written.
    """
    tensor = filters.detach().float().cpu().contiguous()
    with whole(Path(path)) as partial:
        try:
            save_file({TENSOR: tensor}, partial, metadata={_KEY: json.dumps(asdict(made))})
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from error


def read(path: str | os.PathLike[str]) -> tuple[Tensor, Made | None]:
    """Return filters, float32 ``[layers, Hkv, Dk]``, and whose they are; None where the file does not say.

    Raises:
        ValueError: when it is not such a file; says what was expected.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "q.safetensors"
    >>> write(path, torch.zeros(2, 1, 4), Made("mine", {}, 9))
    >>> filters, made = read(path)
    >>> filters.shape, made.model
    (torch.Size([2, 1, 4]), 'mine')
    """
    expected = f"expected a safetensors file with one float tensor '{TENSOR}' [layers, KV heads, head size]"
    try:
        with safe_open(path, framework="pt") as file:
            names, told = list(file.keys()), (file.metadata() or {}).get(_KEY)
            found = file.get_tensor(TENSOR) if names == [TENSOR] else None
    except FileNotFoundError:
        raise ValueError(f"{expected}, found none") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{expected}, which cannot be read: {error}") from None
    if found is None:
        raise ValueError(f"{expected}, one with {', '.join(names) or 'none'}")
    shaped = found.ndim == 3 and found.is_floating_point() and found.numel() > 0
    if not shaped or not bool(found.to(torch.float32).isfinite().all()):
        size = "numbers that are not finite" if shaped else list(found.shape)
        raise ValueError(f"{expected}, one of {str(found.dtype).removeprefix('torch.')} {size}")
    return found.to(torch.float32), None if told is None else _made(told, expected)


def _made(told: str, expected: str) -> Made:
    try:
        made = Made(**json.loads(told))
    except (ValueError, TypeError):
        made = None
    if made is None or not isinstance(made.model, str) or not isinstance(made.config, dict):
        raise ValueError(f"{expected}, one whose '{_KEY}' metadata says whose they are, not {told[:80]!r}") from None
    return made
