"""What the models of all harnesses share: their error, and the policy that their arguments name."""

from __future__ import annotations

from typing import Any

from kvpolicy import load
from kvpolicy.errors import KVPolicyError
from kvpolicy.policy import Policy


class HarnessError(KVPolicyError, ValueError):
    """A setting of a harness's model ``kvpolicy``, or what a task asks of it, does not go with eviction."""


def policy_of(source: Any, budget: int | float | None) -> Policy:
    """Return the policy that a harness's arguments name.

    Args:
        source: a policy, or what `kvpolicy.load` takes.
        budget: slots a KV head, or a share, over that of the policy; not beside a policy made in Python.

    Raises:
        HarnessError: for a budget beside a policy made in Python.
        PolicyError: for a policy or a budget that is wrong.
    """
    if not isinstance(source, Policy):
        return load(source, budget=budget)
    if budget is not None:
        raise HarnessError(f"budget: expected none beside a policy made in Python, got {budget!r}")
    return source
