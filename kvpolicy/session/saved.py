"""The file of a context: safetensors, with all that is no tensor as JSON in its header."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvpolicy.errors import ContextError
from kvpolicy.files import whole
from kvpolicy.session.fingerprint import Fingerprint

FORMAT = 1
"""Of the files written; files of a higher one are refused."""

_KEY, _FORMAT, _CHECK = "kvpolicy", "kvpolicy.format", "kvpolicy.sha256"


@dataclass(frozen=True)
class Header:
    """What a file holds besides tensors.

    Args:
        versions: of kvpolicy, torch and transformers that wrote it.
        policy: in full, as a policy file holds it.
        model: whose cache it is.
        aware: whether the question was in view.
        cache: the plain data of the cache's state.
    """

    versions: dict[str, str]
    policy: dict[str, Any]
    model: Fingerprint
    aware: bool
    cache: dict[str, Any]


def machine(device: torch.device) -> dict[str, Any]:
    """Return what a machine is called that computes on `device`."""
    return {
        "platform": platform.platform(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
    }


def versions() -> dict[str, str]:
    """Return the versions that run now."""
    return {name: importlib.metadata.version(name) for name in ("kvpolicy", "torch", "transformers")}


def write_file(path: str | os.PathLike[str], header: Header, tensors: dict[str, Tensor]) -> None:
    """Write a file, which appears whole or not at all.

    Raises:
        ContextError: when the folder is not there or cannot be written to.
    """
    # A slice of a buffer would be written with the buffer, and two of one are refused.
    tensors = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    text = json.dumps(asdict(header))
    metadata = {_FORMAT: str(FORMAT), _KEY: text, _CHECK: _digest(text, tensors)}
    try:
        with whole(Path(path)) as partial:
            save_file(tensors, partial, metadata=metadata)
    except OSError as error:
        raise ContextError(
            f"{path}: cannot be written: {error}. Give a file in a folder that you can write to"
        ) from error


def read_file(path: str | os.PathLike[str]) -> tuple[Header, dict[str, Tensor]]:
    """Return what a file holds, its tensors on the CPU.

    Raises:
        ContextError: when it is not there, not ours, of a newer format, or not as it was written.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Tensors of their own: those of the file are views of it, wherever it may change.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ContextError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise ContextError(
            f"{path}: expected a file that `context.save` wrote, got one that is cut off, damaged or of another kind "
            f"({error}). Save the context again"
        ) from None
    if _KEY not in metadata:
        raise ContextError(f"{path}: expected a file that `context.save` wrote, got other safetensors")
    if not metadata.get(_FORMAT, "").isdecimal() or int(metadata[_FORMAT]) > FORMAT:
        raise ContextError(
            f"{path}: expected format {FORMAT} or older, got {metadata.get(_FORMAT)!r}: upgrade kvpolicy, "
            f"this is {importlib.metadata.version('kvpolicy')}"
        )
    text = metadata[_KEY]
    if metadata.get(_CHECK) != _digest(text, tensors):
        raise ContextError(f"{path}: it is damaged: not what was written. Save the context again")
    try:
        return TypeAdapter(Header).validate_json(text), tensors
    except ValidationError as error:
        raise ContextError(f"{path}: its header is not one that `context.save` writes: {error}") from None


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
