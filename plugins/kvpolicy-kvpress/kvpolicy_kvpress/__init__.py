"""NVIDIA's kvpress and kvpolicy, each inside the other: the scorer ``kvpress``, and `PolicyPress`.

Loading this package does not import kvpress, which changes transformers' attention functions; the first policy that
names a press, and the first use of `PolicyPress`, do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvpolicy import hookimpl
from kvpolicy_kvpress.scorer import KVPress

if TYPE_CHECKING:
    from kvpolicy_kvpress.policy_press import PolicyPress

kvpolicy_contract = 1


@hookimpl
def kvpolicy_scorers() -> list[type]:
    """Return the scorers of this package."""
    return [KVPress]


def __getattr__(name: str) -> object:
    if name != "PolicyPress":
        raise AttributeError(f"module 'kvpolicy_kvpress' has no attribute {name!r}")
    return importlib.import_module("kvpolicy_kvpress.policy_press").PolicyPress


__all__ = ["KVPress", "PolicyPress", "kvpolicy_contract", "kvpolicy_scorers"]
