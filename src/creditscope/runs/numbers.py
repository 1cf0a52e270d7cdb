"""Means, and numbers with their intervals as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from creditscope.runs.columns import is_number
from creditscope.runs.intervals import Interval


def mean(values: Sequence[float]) -> float:
    """Σ x / n, without rounding errors."""
    return math.fsum(values) / len(values)


def mean_over(lines: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """The mean of a metric over the lines that have it; None where none has.

    >>> mean_over([{"kl": 1.0}, {}, {"kl": 2.0}], "kl"), mean_over([{}], "kl")
    (1.5, None)
    """
    found = [float(line[name]) for line in lines if is_number(line.get(name))]
    return mean(found) if found else None


def spanned(value: Interval, form: str = ".3g", scale: float = 1, unit: str = "") -> str:
    """A mean with its unit, and its interval in brackets where there is one.

    >>> spanned(Interval(0.1234, 0.1, 0.15, 5)), spanned(Interval(2e-5, None, None, 1))
    ('0.123 [0.1, 0.15]', '2e-05')
    >>> percent(Interval(0.712, 0.69, 0.734, 5)), in_points(Interval(0.082, 0.05, 0.114, 5))
    ('71.2 % [69.0, 73.4]', '+8.2 [+5.0, +11.4]')
    >>> percent(Interval(0.5, None, None, 1)), in_percent(Interval(-0.68, -0.74, -0.61, 5))
    ('50.0 %', '-68 % [-74, -61]')
    """
    ends = value.ends
    span = "" if ends is None else f" [{', '.join(format(scale * end, form) for end in ends)}]"
    return f"{scale * value.mean:{form}}{unit}{span}"


percent = partial(spanned, form=".1f", scale=100, unit=" %")
in_points = partial(spanned, form="+.1f", scale=100)
in_percent = partial(spanned, form="+.0f", scale=100, unit=" %")
"""Of a share, of a difference of shares in points, of a relative change."""
