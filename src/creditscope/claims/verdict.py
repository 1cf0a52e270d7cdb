"""What a claim is, and what a test of it may say: holds, refuted, or undecided and why.

A test compares a number with a threshold that is fixed in the code. An estimate comes with its 95 % interval, and the
interval decides: wholly on one side of the threshold, or undecided. One run has no interval over runs.

Tests build verdicts with `exact`, `at_most`, `missing` and `claims.reading.estimate`, without the claim's id: the
table of claims adds it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from creditscope.runs.intervals import Interval

if TYPE_CHECKING:
    from creditscope.claims.evidence import Evidence

Outcome = Literal["holds", "refuted", "undecided"]
Needs = Literal["nothing", "record", "sweep"]
NOTHING = "no run"
"""The subject of a verdict that found nothing to test."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one test of one claim said, of one subject, under one definition."""

    claim: str = ""
    """Its id, such as P1.5; the table of claims sets it."""
    definition: str
    """What was measured, in words that leave no choice."""
    subject: str
    """On what: a closed form, an enumerated world, or a model and a task."""
    outcome: Outcome
    reason: str
    """One sentence."""
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


RunsTest = Callable[[Sequence["Evidence"]], list[Verdict]]


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
    needs: tuple[Needs, ...]
    ask: str = ""
    """What a record must hold for `runs`, and the flags that record it."""


# -- from a number to an outcome -------------------------------------------------------------------------------------


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
        if value.low is None or value.high is None:
            return "undecided"
        low, high = self.low, self.high
        if low is None or high is None:  # one end, and it is outside
            holds = (low is None or value.low > low) and (high is None or value.high < high)
            refuted = (low is not None and value.high <= low) or (high is not None and value.low >= high)
        else:
            holds = low <= value.low and value.high <= high
            refuted = value.high < low or value.low > high
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
        if value.low is None or value.high is None:
            return None
        distance = min(abs(value.mean - end) for end in (self.low, self.high) if end is not None)
        half = (value.high - value.low) / 2
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


def ends(value: Interval) -> tuple[float, float] | None:
    return None if value.low is None or value.high is None else (value.low, value.high)


# -- verdicts of one kind --------------------------------------------------------------------------------------------


def exact(definition: str, subject: str, true: bool, observed: float, reason: str, *, expected: str = "0",
          threshold: str, n: int, of: str = "cases") -> Verdict:
    """On a statement that was checked without error but rounding."""
    return Verdict(definition=definition, subject=subject, outcome="holds" if true else "refuted", reason=reason,
                   observed=float(observed), expected=expected, threshold=threshold, n=n, of=of)


def at_most(limit: float, definition: str, subject: str, observed: float, reason: str, *, expected: str = "0",
            threshold: str = "≤ {:g}", n: int, of: str = "cases") -> Verdict:
    """On the largest of some differences: holds where `observed` ≤ `limit`, which `threshold` prints."""
    return exact(definition, subject, observed <= limit, observed, reason, expected=expected,
                 threshold=threshold.format(limit), n=n, of=of)


def missing(subject: str, needs: str, definition: str = "") -> Verdict:
    """Undecided, because something was not recorded."""
    return Verdict(definition=definition, subject=subject, outcome="undecided", reason=f"needs {needs}")


def needing(needs: str, subject: str = "runs", definition: str = ""
            ) -> Callable[[Callable[[Sequence[Evidence]], Iterable[Verdict]]], RunsTest]:
    """A decorator for a test on runs: where none of them has anything to say, the one verdict names what is needed."""
    def decorate(test: Callable[[Sequence[Evidence]], Iterable[Verdict]]) -> RunsTest:
        @functools.wraps(test)
        def whole(runs: Sequence[Evidence]) -> list[Verdict]:
            return list(test(runs)) or [missing(subject, needs, definition)]

        return whole

    return decorate
