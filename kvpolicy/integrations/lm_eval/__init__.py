"""lm-evaluation-harness on evicted caches: the harness's model ``kvpolicy``, and its command line with it.

``python -m kvpolicy.integrations.lm_eval run --model kvpolicy --model_args policy=ecokv-snapkv,budget=512 --tasks ...``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpolicy.integrations.lm_eval.model import KVPolicyLM

__all__ = ["KVPolicyLM"]


def __getattr__(name: str) -> object:
    # Not before it is asked for: without lm-eval, the command line says in one line what to install.
    if name != "KVPolicyLM":
        raise AttributeError(f"module 'kvpolicy.integrations.lm_eval' has no attribute {name!r}")
    from kvpolicy.integrations.lm_eval.model import KVPolicyLM

    return KVPolicyLM
