"""lmms-eval on evicted caches: the model ``kvpolicy`` of that harness, and its command line with it.

``python -m kvpolicy.integrations.lmms_eval --model kvpolicy --model_args pretrained=...,policy=snapkv,budget=64 ...``
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpolicy.integrations.lmms_eval.model import KVPolicyLMM

__all__ = ["KVPolicyLMM", "manifest"]


def manifest() -> Any:
    """Return how the harness finds its model ``kvpolicy``: what the entry-point group ``lmms_eval.models`` holds."""
    from lmms_eval.models.registry_v2 import ModelManifest  # type: ignore[import-not-found]

    return ModelManifest("kvpolicy", chat_class_path="kvpolicy.integrations.lmms_eval.model.KVPolicyLMM")


def __getattr__(name: str) -> object:
    # Not before it is asked for: without lmms-eval, the command line says in one line what to install.
    if name != "KVPolicyLMM":
        raise AttributeError(f"module 'kvpolicy.integrations.lmms_eval' has no attribute {name!r}")
    from kvpolicy.integrations.lmms_eval.model import KVPolicyLMM

    return KVPolicyLMM
