"""What a claim is, and what a test of it may say: it holds, it is refuted, or it is undecided and why.

A test compares a number with a threshold that stands in the code and is not moved to fit a run. Where the number is
an estimate it comes with its 95 % interval, and the interval decides: wholly on one side, or undecided. One run has no
interval over runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from creditscope.runs.intervals import Interval

if TYPE_CHECKING:
    from creditscope.claims.evidence import Evidence

Outcome = Literal["holds", "refuted", "undecided"]
Needs = Literal["nothing", "record", "sweep"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one test of one claim said, of one subject, under one definition."""

    claim: str
    """Its id, such as P1.5."""
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
    """What the claim says it should be."""
    threshold: str = ""
    """The rule that decided, with its number."""
    n: int | None = None
    of: str = ""
    """What n counts: runs, groups, readings, cases."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement that can be wrong, and its tests."""

    id: str
    title: str
    statement: str
    """The paper's, in our words."""
    where: str
    """Where it stands in the paper; `ours` for a claim of our own."""
    rule: str
    """The thresholds, and why they are what they are."""
    exact: str | None = None
    """`module:function` under creditscope.claims that tests it without any run. It loads torch, so it waits."""
    runs: Callable[[Sequence[Evidence]], list[Verdict]] | None = None
    """Tests it on what runs left behind."""
    needs: tuple[Needs, ...]
    ask: str = ""
    """What a record must hold for `runs`, and the flags that make it so."""


# -- from an interval to an outcome ----------------------------------------------------------------------------------


def inside(value: Interval, low: float, high: float) -> Outcome:
    """Whether a value lies in a band.

    >>> inside(Interval(2.1, 1.9, 2.3, 3), 1.5, 2.5), inside(Interval(3.1, 2.9, 3.3, 3), 1.5, 2.5)
    ('holds', 'refuted')
    """
    if value.low is None or value.high is None:
        return "undecided"
    if low <= value.low and value.high <= high:
        return "holds"
    return "refuted" if value.high < low or value.low > high else "undecided"


def above(value: Interval, bound: float) -> Outcome:
    """Whether a value exceeds a bound.

    >>> above(Interval(0.3, 0.1, 0.5, 5), 0.0), above(Interval(0.3, -0.1, 0.7, 5), 0.0)
    ('holds', 'undecided')
    """
    if value.low is None or value.high is None:
        return "undecided"
    return "holds" if value.low > bound else "refuted" if value.high <= bound else "undecided"


def below(value: Interval, bound: float) -> Outcome:
    """Whether a value stays under a bound."""
    if value.low is None or value.high is None:
        return "undecided"
    return "holds" if value.high < bound else "refuted" if value.low >= bound else "undecided"


def all_of(outcomes: Iterable[Outcome]) -> Outcome:
    """A statement about several cases: one refuted case refutes it, and it holds only if every case does.

    >>> all_of(["holds", "undecided"]), all_of(["holds", "refuted", "undecided"]), all_of([])
    ('undecided', 'refuted', 'undecided')
    """
    found = list(outcomes)
    if "refuted" in found:
        return "refuted"
    return "holds" if found and all(outcome == "holds" for outcome in found) else "undecided"


def decided(true: bool) -> Outcome:
    """Of a statement that was checked exactly."""
    return "holds" if true else "refuted"


def ends(value: Interval) -> tuple[float, float] | None:
    return None if value.low is None or value.high is None else (value.low, value.high)


def enough(value: Interval, *bounds: float) -> int | None:
    """About how many values would decide: the half width falls as 1/√n, and has to be less than the distance d from
    the mean to the nearest bound: n · (half/d)². None where the mean sits on the bound, or nothing is known.

    >>> enough(Interval(1.0, 0.0, 2.0, 4), 0.5)  # half width 1, distance ½: four times as many
    16
    """
    if value.low is None or value.high is None:
        return None
    distance = min(abs(value.mean - bound) for bound in bounds)
    half = (value.high - value.low) / 2
    return math.ceil(value.n * (half / distance) ** 2) if distance > 0 else None


def missing(claim: str, subject: str, needs: str, definition: str = "") -> Verdict:
    """Undecided, because something was not recorded."""
    return Verdict(claim=claim, definition=definition, subject=subject, outcome="undecided", reason=f"needs {needs}")
