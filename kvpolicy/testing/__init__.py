"""Tools to test plugins and policies with: conformance checks, tiny models, the oracle."""

from kvpolicy.testing.conformance import (
    Check,
    check_budget,
    check_combiner,
    check_evicted,
    check_scorer,
    check_selector,
    checks,
    parametrize_with_checks,
)

__all__ = [
    "Check",
    "check_budget",
    "check_combiner",
    "check_evicted",
    "check_scorer",
    "check_selector",
    "checks",
    "parametrize_with_checks",
]
