"""Our attention function's names, in transformers' registries while a session is active and not a moment longer."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvpolicy.attend.function import attention
from kvpolicy.errors import UnsupportedModelError

PREFIX = "kvpolicy_"
SUPPORTED = ("sdpa", "eager", "flex_attention")

_lock = threading.Lock()
_switched: dict[int, list[Any]] = {}
"""Configs switched to our names: id -> [config, its own implementation, sessions that need it]."""


def switch(config: Any) -> None:
    """Make the models that read `config` attend through kvpolicy; undone by as many calls of `restore`.

    Raises:
        UnsupportedModelError: when the config's attention implementation cannot be taken over.
    """
    with _lock:
        if id(config) in _switched:
            _switched[id(config)][2] += 1
            return
        own = config._attn_implementation
        if own not in SUPPORTED:
            raise UnsupportedModelError(
                f"attention implementation {own!r}: expected one of {', '.join(SUPPORTED)}. "
                "Load the model with attn_implementation='sdpa'."
            )
        AttentionInterface.register(PREFIX + own, partial(attention, own))
        AttentionMaskInterface.register(PREFIX + own, ALL_MASK_ATTENTION_FUNCTIONS[own])
        # The mapping form leaves sub-configs (a vision tower's) as they are.
        config._attn_implementation = {"": PREFIX + own}
        _switched[id(config)] = [config, own, 1]


def restore(config: Any) -> None:
    """Undo one `switch`; the last one gives `config` its own implementation back and leaves no name registered."""
    with _lock:
        entry = _switched[id(config)]
        entry[2] -= 1
        if entry[2]:
            return
        del _switched[id(config)]
        config._attn_implementation = {"": entry[1]}
        if all(entry[1] != other for _, other, _ in _switched.values()):
            # transformers offers `register` and no way back.
            AttentionInterface._global_mapping.pop(PREFIX + entry[1])
            AttentionMaskInterface._global_mapping.pop(PREFIX + entry[1])
