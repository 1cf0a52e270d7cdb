"""A claim, and the verdict of a test of it: holds, refuted, or undecided and why.

A test compares a number with a threshold that is fixed in the code. The 95 % interval of an estimate decides: it lies
wholly on one side of the threshold, or the verdict is undecided. One run has no interval over runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from creditscope.claims.evidence import Evidence
from creditscope.files.cells import cell
from creditscope.runs.intervals import Interval

Outcome = Literal["holds", "refuted", "undecided"]
SHAPES: Mapping[Outcome, str] = {"holds": "✓", "refuted": "✗", "undecided": "?"}
"""Symbols that tell the outcomes apart without colours."""
NOTHING = "no run"
"""The subject of a verdict that found nothing to test."""


@dataclass(frozen=True, kw_only=True)
class ClaimVerdict:
    """The outcome of one test of one claim, on one subject, under one definition."""

    claim: str = ""
    """Its id, such as P1.5; the table of claims sets it."""
    definition: str
    """What was measured."""
    subject: str
    """A closed form, an enumerated world, or a model and a task."""
    outcome: Outcome
    reason: str
    observed: float | None = None
    interval: tuple[float, float] | None = None
    """95 %, where the observed value is an estimate."""
    expected: str = ""
    """The value that the claim states."""
    threshold: str = ""
    """The rule that decided, with its number."""
    n: int | None = None
    of: str = ""
    """What n counts: runs, groups, readings, cases."""

    def _repr_html_(self) -> str:
        ends = "" if self.interval is None else f" [{self.interval[0]:.4g}, {self.interval[1]:.4g}]"
        return cell(f"{SHAPES[self.outcome]} {self.outcome}: {self.claim or 'a claim'}, {self.definition}", {
            "subject": self.subject, "observed": None if self.observed is None else f"{self.observed:.4g}{ends}",
            "claimed": self.expected, "rule": self.threshold, "n": None if self.n is None else f"{self.n} {self.of}",
            "reason": self.reason}, word=self.outcome)


RunsTest = Callable[[Sequence[Evidence]], list[ClaimVerdict]]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement that can be wrong, and its tests."""

    id: str
    title: str
    statement: str
    """The paper's, in our words."""
    where: str
    """Its place in the paper; `ours` for a claim of our own."""
    rule: str
    """The thresholds, and the reasons for them."""
    exact: str | None = None
    """`module:function` under creditscope that tests it without any run. Imported on use, because it loads torch."""
    runs: RunsTest | None = None
    """Tests it on the evidence of runs."""
    ask: str = ""
    """What a record must hold for `runs`, and the flags that record it."""


@dataclass(frozen=True)
class Band:
    """Where an estimate must lie: above `low`, below `high`, or, with both, inside [low, high].

    >>> Band(1.5, 2.5).judge(Interval(2.1, 1.9, 2.3, 3)), Band(1.5, 2.5).judge(Interval(3.1, 2.9, 3.3, 3))
    ('holds', 'refuted')
    >>> Band(low=0.0).judge(Interval(0.3, 0.1, 0.5, 5)), Band(low=0.0).judge(Interval(0.3, -0.1, 0.7, 5))
    ('holds', 'undecided')
    """

    low: float | None = None
    high: float | None = None

    def judge(self, value: Interval) -> Outcome:
        if value.ends is None:
            return "undecided"
        (below, above), low, high = value.ends, self.low, self.high
        if low is None or high is None:  # one end, which is not part of the band
            holds = (low is None or below > low) and (high is None or above < high)
            refuted = (low is not None and above <= low) or (high is not None and below >= high)
        else:
            holds = low <= below and above <= high
            refuted = above < low or below > high
        return "holds" if holds else "refuted" if refuted else "undecided"

    @property
    def middle(self) -> float:
        return ((self.low or 0.0) + (self.high or 0.0)) / 2

    def enough(self, value: Interval) -> int | None:
        """About how many values would decide: the half width falls as 1/√n, and has to be less than the distance d from
        the mean to the nearest end: n · (half/d)². None where the mean is at an end, or there is no interval.

        >>> Band(low=0.5).enough(Interval(1.0, 0.0, 2.0, 4))  # half width 1, distance ½: four times as many
        16
        """
        if value.ends is None:
            return None
        distance = min(abs(value.mean - end) for end in (self.low, self.high) if end is not None)
        half = (value.ends[1] - value.ends[0]) / 2
        return math.ceil(value.n * (half / distance) ** 2) if distance > 0 else None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"above {self.low:g}" if self.high is None else f"below {self.high:g}"
        return f"within ±{self.high:g}" if self.low == -self.high else f"inside [{self.low:g}, {self.high:g}]"


POSITIVE = Band(low=0.0)


def all_of(outcomes: Iterable[Outcome]) -> Outcome:
    """A statement about several cases: one refuted case refutes it, and it holds only if every case does.

    >>> all_of(["holds", "undecided"]), all_of(["holds", "refuted", "undecided"]), all_of([])
    ('undecided', 'refuted', 'undecided')
    """
    found = list(outcomes)
    if "refuted" in found:
        return "refuted"
    return "holds" if found and all(outcome == "holds" for outcome in found) else "undecided"


def exact(definition: str, subject: str, true: bool, observed: float, reason: str, *, expected: str = "0",
          threshold: str, n: int, of: str = "cases") -> ClaimVerdict:
    """The verdict on a statement that was checked up to rounding."""
    return ClaimVerdict(definition=definition, subject=subject, outcome="holds" if true else "refuted", reason=reason,
                   observed=float(observed), expected=expected, threshold=threshold, n=n, of=of)


def at_most(limit: float, definition: str, subject: str, observed: float, reason: str, *, expected: str = "0",
            threshold: str = "≤ {:g}", n: int, of: str = "cases") -> ClaimVerdict:
    """The verdict on the largest of some differences: holds where `observed` ≤ `limit`, which `threshold` prints."""
    return exact(definition, subject, observed <= limit, observed, reason, expected=expected,
                 threshold=threshold.format(limit), n=n, of=of)


def missing(subject: str, needs: str, definition: str = "") -> ClaimVerdict:
    """Undecided, because something was not recorded."""
    return ClaimVerdict(definition=definition, subject=subject, outcome="undecided", reason=f"needs {needs}")


def needing(needs: str, subject: str = "runs", definition: str = ""
            ) -> Callable[[Callable[[Sequence[Evidence]], Iterable[ClaimVerdict]]], RunsTest]:
    """A decorator for a test on runs: where it has no verdict, the one verdict says what is needed."""
    def decorate(test: Callable[[Sequence[Evidence]], Iterable[ClaimVerdict]]) -> RunsTest:
        @functools.wraps(test)
        def whole(runs: Sequence[Evidence]) -> list[ClaimVerdict]:
            return list(test(runs)) or [missing(subject, needs, definition)]

        return whole

    return decorate
