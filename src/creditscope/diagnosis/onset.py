"""When a metric left its own beginning, and when it crossed a limit. No torch."""

from __future__ import annotations

from collections.abc import Callable

from creditscope.diagnosis.log import Series

BLOCK = 5
"""Readings on each side. That all of one block lie above all of another happens by chance in 1 of C(10, 5) = 252."""


def left_beginning(series: Series, rising: bool | None = None) -> int | None:
    """The step of the first BLOCK readings in a row that all lie above, or all below, the first BLOCK readings.

    A rank test at each place: it asks for order alone, so it does not depend on units or outliers. None where no block
    does, or where the log does not number its steps.
    """
    values = series.values
    low, high = min(values[:BLOCK], default=0.0), max(values[:BLOCK], default=0.0)
    for at in range(BLOCK, len(values) - BLOCK + 1):
        block = values[at:at + BLOCK]
        if (rising is not False and min(block) > high) or (rising is not True and max(block) < low):
            return series.rows[at].step
    return None


def crossed(series: Series, bad: Callable[[float], bool], block: int = 3) -> int | None:
    """The step of the first `block` readings in a row that are bad; the first bad one where there are no such."""
    flags = [bad(value) for value in series.values]
    for at in range(len(flags) - block + 1):
        if all(flags[at:at + block]):
            return series.rows[at].step
    return next((row.step for row, flag in zip(series.rows, flags, strict=True) if flag), None)
