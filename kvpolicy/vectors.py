"""What likeness is measured on: keys or values, and keys after or before RoPE."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvpolicy.errors import SettingError
from kvpolicy.types import LayerView, Needs

On = Literal["keys", "values"]
Space = Literal["post-rope", "pre-rope"]


def check(owner: str, on: On, space: Space) -> None:
    """Raise a `SettingError` of `owner` where values are to be taken before RoPE: nothing rotates them."""
    if on == "values" and space == "pre-rope":
        message = "expected 'post-rope' with values, which RoPE does not rotate"
        raise SettingError(owner, [(("space",), "value_error", message, space)])


def needs(on: On, space: Space) -> Needs:
    """Return what has to be declared to read these vectors."""
    pre_rope = on == "keys" and space == "pre-rope"
    return Needs(keys=on == "keys" and not pre_rope, values=on == "values", pre_rope=pre_rope)


def vectors(view: LayerView, on: On, space: Space) -> Tensor:
    """Return ``[B, Hkv, T, D]``: the values, the keys as stored, or float32 keys before RoPE."""
    if on == "values":
        return view.values
    return view.keys if space == "post-rope" else view.pre_rope_keys  # type: ignore[return-value]
