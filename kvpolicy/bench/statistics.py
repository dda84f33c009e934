"""Medians of paired ratios, and exponents of growth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """A median and where that of all such runs lies.

    Args:
        median: of the runs.
        low: end of its interval of 95%.
        high: likewise.
    """

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median of `values` with its 95% interval by order statistics: Conover 1999, section 3.2.

    The interval goes from the kth lowest to the kth highest value, k as large as
    ``P(Binomial(n, 1/2) < k) <= 0.025`` allows. No shape of the distribution is assumed, nothing is drawn by chance. Of
    fewer than six values all of them lie between its ends, which then hold less than 95%.

    >>> spread([1.0, 3.0, 2.0])
    Spread(median=2.0, low=1.0, high=3.0)
    >>> spread([float(n) for n in range(1, 10)])
    Spread(median=5.0, low=2.0, high=8.0)
    """
    ordered, count = sorted(values), len(values)
    outside, below, rank = (1 - CONFIDENCE) / 2, 0.0, 0
    while (below := below + math.comb(count, rank) / 2**count) <= outside:
        rank += 1
    rank = max(rank - 1, 0)
    return Spread(statistics.median(ordered), ordered[rank], ordered[-1 - rank])


def ratios(over: Sequence[float], under: Sequence[float], *, block: int = 1) -> Spread:
    """Return the spread of ``over / under``, run by run: each pair was measured side by side.

    Args:
        over: what is compared.
        under: with what.
        block: how many runs make one ratio, of their sums; those left over do not count.

    >>> ratios([2.0, 4.0, 2.0], [1.0, 2.0, 1.0])
    Spread(median=2.0, low=2.0, high=2.0)
    >>> ratios([1.0, 5.0, 9.0], [1.0, 2.0, 1.0], block=2).median
    2.0
    """
    starts = range(0, len(over) - block + 1, block)
    return spread([sum(over[at : at + block]) / sum(under[at : at + block]) for at in starts])


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return k of the power law ``cost = c * size**k`` that fits best: least squares on logarithms.

    >>> round(exponent([1.0, 2.0, 4.0], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    slope, _ = statistics.linear_regression([math.log(size) for size in sizes], [math.log(cost) for cost in costs])
    return slope
