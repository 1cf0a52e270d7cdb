"""Numbers as text for the first screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def mean_of(steps: Sequence[Mapping[str, Any]], what: str = "steps") -> str:
    """Which steps a number is a mean of."""
    if not steps:
        return f"No {what} to average."
    if len(steps) == 1:
        return f"One {what.removesuffix('s')}, step {steps[0]['step']}."
    return f"Mean over the last {len(steps)} {what}, {steps[0]['step']} to {steps[-1]['step']}."


def short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def percent(value: float) -> str:
    """Percent with two digits below ten, none that would read as 0 or 100 where it is not.

    >>> percent(0.714), percent(0.0163), percent(0.99962), percent(1.0)
    ('71 %', '1.6 %', '99.96 %', '100 %')
    """
    parts = 100 * value
    if 99.5 <= parts < 100:
        return f"{near(parts, 100)} %"
    return f"{parts:.0f} %" if parts >= 9.95 or parts == 0 else f"{parts:.2g} %"


def near(value: float, limit: float, least: int = 1) -> str:
    """As many decimals as are needed not to print a value below the limit as the limit; at most eight."""
    for digits in range(least, 9):
        text = f"{value:.{digits}f}"
        if float(text) != limit:
            return text
    return f"{limit:g}"
