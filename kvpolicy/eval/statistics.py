"""Bootstrap confidence intervals of means, and of paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 10_000
CONFIDENCE = 0.95
SEED = 0
LEAST = 8
"""Examples from which on an interval says something: of two, it is no more than both of them."""


@dataclass(frozen=True)
class Interval:
    """A mean and where that of all such examples lies, with a confidence of 95%.

    Args:
        mean: of the examples.
        low: end of the interval; None for a single example.
        high: likewise.
    """

    mean: float
    low: float | None
    high: float | None


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of `values` with its percentile bootstrap interval: Efron and Tibshirani 1993, chapter 13.

    Examples are drawn with replacement, as many as there are, 10,000 times; the interval holds the middle 95% of the
    means. Equal values give equal intervals. For a paired comparison, give the differences.

    >>> interval([0.5])
    Interval(mean=0.5, low=None, high=None)
    >>> interval([0.25, 0.25, 0.25])
    Interval(mean=0.25, low=0.25, high=0.25)
    """
    found = np.asarray(values, dtype=np.float64)
    mean = float(found.mean())
    if len(found) == 1:
        return Interval(mean, None, None)
    draws = np.random.default_rng(SEED).integers(len(found), size=(DRAWS, len(found)))
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(found[draws].mean(axis=1), [outside, 1 - outside])
    return Interval(mean, float(low), float(high))
