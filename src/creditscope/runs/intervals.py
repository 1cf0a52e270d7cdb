"""Intervals of a mean over few runs: Student's t, because five seeds are not fifty.

    mean ± t · s/√n,   s² = Σ (x_i − mean)² / (n − 1),   t = the 97.5 % quantile of Student's t with n − 1 degrees
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

T975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
        2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
        2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423)
"""97.5 % quantiles of Student's t for 1 to 30 degrees of freedom."""
Z975 = 1.959964


@dataclass(frozen=True)
class Interval:
    """A mean over n values with its 95 % interval; one value has no interval."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def ends(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def excludes_zero(self) -> bool:
        return self.ends is not None and math.prod(self.ends) > 0


def quantile(degrees: int) -> float:
    """t_{0.975} with so many degrees of freedom; above 30: z + (z³+z)/4ν + (5z⁵+16z³+3z)/96ν², off by less than 1e-4.

    >>> quantile(4), round(quantile(100), 3)
    (2.7764, 1.984)
    """
    if degrees <= len(T975):
        return T975[degrees - 1]
    z, v = Z975, degrees
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v * v)


def mean_interval(values: Sequence[float]) -> Interval:
    """mean ± t s/√n of at least one value.

    >>> round(mean_interval([1.0, 2.0, 3.0]).low, 4)  # 2 − 4.3027·1/√3
    -0.4842
    """
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return Interval(mean, None, None, n)
    s = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1))
    half = quantile(n - 1) * s / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """The interval of ours − theirs over the seeds that both have: what the seed did to both drops out."""
    seeds = sorted(ours.keys() & theirs.keys())
    return mean_interval([ours[seed] - theirs[seed] for seed in seeds]) if seeds else None


def overlap(a: Interval, b: Interval) -> bool | None:
    """Whether two intervals have a point in common; None where one of them does not exist."""
    if a.ends is None or b.ends is None:
        return None
    return a.ends[0] <= b.ends[1] and b.ends[0] <= a.ends[1]
