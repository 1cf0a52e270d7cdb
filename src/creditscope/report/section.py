"""A part of the page: markup, data for its script, or one sentence on what is missing and how to get it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from creditscope.files.markup import Html, join, tag
from creditscope.report.remedies import CANNOT, command
from creditscope.runs.columns import Column, Rows

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Section:
    id: str
    title: str
    lead: str = ""
    body: Html
    data: Mapping[str, Any] | None = None
    """For the script `assets/<id>.js`: JSON, numbers already rounded, text already `shown`."""

    def html(self) -> Html:
        return tag("section", tag("h2", self.title), tag("p", self.lead, class_="lead") if self.lead else None,
                   self.body, id=self.id, aria_label=self.title)


def missing(what: str, typed: str | None = None) -> Html:
    how = join(" Get it with ", tag("code", typed), ".") if typed else None
    return tag("p", what, how, class_="missing")


def lacking(what: str, config: Mapping[str, Any], part: str) -> Html:
    """A missing part of `remedies.COMMANDS`, with what would record it."""
    typed = command(config, part)
    return missing(what, typed) if typed else missing(f"{what} {CANNOT}.")


def rounded(value: float | None, digits: int = 4) -> float | None:
    """So many significant digits; None for what is not finite.

    >>> rounded(0.123456), rounded(float("nan")), rounded(1234567.0)
    (0.1235, None, 1235000.0)
    """
    if value is None or value != value or value in (float("inf"), float("-inf")):
        return None
    return float(f"{value:.{digits}g}")


def spaced(items: Sequence[T], count: int) -> list[T]:
    """`count` of them, evenly spaced, with the first and the last.

    >>> spaced([0, 1, 2, 3, 4, 5, 6], 3), spaced([0, 1], 5), spaced([0, 1, 2], 1)
    ([0, 3, 6], [0, 1], [2])
    """
    if count >= len(items):
        return list(items)
    return [items[round(k * (len(items) - 1) / (count - 1))] for k in range(count)] if count > 1 else [items[-1]]


def thinned(columns: Sequence[Column], most: int) -> Rows:
    """At most so many of the rows that these columns of numbers have: all where they fit, otherwise the first, the
    last, and of each column the least and the largest value and a NaN, if any, in each of some equal parts.

    >>> thinned([Column(np.arange(8), np.array([5.0, 9, 4, 6, 7, 1, 2, 3]))], 6).tolist()
    [0, 1, 2, 4, 5, 7]
    """
    rows = np.unique(np.concatenate([np.empty(0, np.int64), *(column.at for column in columns)]))
    if len(rows) <= most:
        return rows
    split = [column.only(np.isnan(column.values) == gap) for column in columns for gap in (False, True)]
    lines = [line for line in split if len(line.at)]
    parts = max(1, (most - 2) // (2 * len(lines)))
    kept = [rows[0], rows[-1]]
    for at, values in lines:
        ends = np.unique(np.linspace(0, len(at), parts + 1).astype(int)).tolist()
        for start, stop in pairwise(ends):
            part = values[start:stop]
            kept += [at[start + part.argmin()], at[start + part.argmax()]]
    return np.unique(kept)


def some_steps(kept: str, of: int) -> Html:
    return tag("p", f"The charts, their tables and their CSV files show {kept} of {of:,} steps: the first, the last, "
                    "and the lowest and the highest value of each line in equal parts of the run. Answers and means "
                    "are computed from all steps.", class_="soft")
