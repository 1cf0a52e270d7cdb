"""A finding, and the windows of a metric that it is taken from.

    level    the last tenth
    drift    the first tenth against the last, for smooth metrics: entropy, length
    trend    the first third against the last, with intervals, for noisy metrics: rewards, dead groups
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from creditscope.diagnosis.log import Log, Series
from creditscope.files.cells import cell
from creditscope.runs import schema
from creditscope.runs.intervals import Interval, mean_interval

State = Literal["broken", "watch", "unknown", "fine"]
STATES: tuple[State, ...] = ("broken", "watch", "unknown", "fine")
"""Most severe first."""
SIGNS: Mapping[State, str] = {"broken": "✗", "watch": "!", "unknown": "?", "fine": "✓"}
"""State -> the sign that tells it without colour."""

FEW = 4
"""Fewest readings for a finding: one odd batch must not make one."""
TREND = 10
"""Fewest readings for a drift: with fewer the two ends would share rows."""
EDGE = 5
"""Fewest readings at each end."""
THIRDS = 3 * FEW
"""Fewest readings for a trend over thirds."""
MORE_STEPS = "more steps"
"""What settles a question whose metric the log has, with too few readings."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one rule on one run."""

    rule: str = ""
    state: State
    sentence: str
    evidence: tuple[str, ...] = ()
    """Lines with file, places, steps and values."""
    why: str = ""
    """One sentence with the formula."""
    remedy: str = ""
    """The entry of `remedies.REMEDIES`; by default that of the rule."""
    change: str = ""
    """The one change to make, as this trainer spells it; `diagnose` writes it."""
    expect: str = ""
    """The number that should move after the change, and when to look; `diagnose` writes it."""
    settles: str = ""
    """What would decide a finding that is unknown, or tell which cause it is."""
    onset: int | None = None
    """The step at which it was first so; None where the log does not say."""
    follows: tuple[str, ...] = ()
    """Rules whose findings can cause this one, the likeliest first; `diagnose` leaves the one that does."""
    assumes: Mapping[str, Any] | None = None
    """Settings that were not given and were taken at the trainer's default."""
    lacks: tuple[int, int] | None = None
    """(readings that the log has, readings that are needed), where an unknown finding lacks these alone."""

    @property
    def bad(self) -> bool:
        return self.state in ("broken", "watch")

    def _repr_html_(self) -> str:
        """For a notebook: the sentence, and what shows it, why, what to change and what to expect."""
        title = f"{SIGNS[self.state]} {self.state}: {self.rule or 'a finding'}: {self.sentence}."
        return cell(title, self.details, word=self.state)

    @property
    def details(self) -> dict[str, object]:
        """Name -> text or lines, as a notebook shows them."""
        assumed = ", ".join(f"{name}={value}" for name, value in (self.assumes or {}).items())
        return {"change": self.change, "expect": self.expect, "evidence": list(self.evidence), "why": self.why,
                "since step": self.onset, "follows from": ", ".join(self.follows), "settled by": self.settles,
                "assumed": assumed}


def finding(state: State, sentence: str, *evidence: Series | str | None, why: str = "", remedy: str = "",
            settles: str = "", onset: int | None = None, follows: Sequence[str] = ()) -> Finding:
    """A finding with the readings that show it."""
    shown = tuple(part if isinstance(part, str) else part.told() for part in evidence if part is not None)
    return Finding(state=state, sentence=sentence, evidence=shown, why=why, remedy=remedy, settles=settles, onset=onset,
                   follows=tuple(follows))


def grade(value: float, watch: float, broken: float = math.inf) -> State:
    """broken, watch or fine: the larger the value the worse."""
    return "broken" if value >= broken else "watch" if value >= watch else "fine"


def unknown(sentence: str, *follows: str, settles: str = "") -> Finding:
    return Finding(state="unknown", sentence=sentence, follows=follows, settles=settles)


class TooFewReadings(Exception):
    """Ends a rule for want of readings; it holds the rule's unknown finding."""

    def __init__(self, found: Finding) -> None:
        super().__init__(found.sentence)
        self.found = found


def judge(rule: Callable[[Log], Finding], log: Log) -> Finding:
    """The rule's finding; unknown where the log has too few readings for it."""
    try:
        return rule(log)
    except TooFewReadings as lacking:
        return lacking.found


def series_of(log: Log, metric: str, few: int = FEW) -> Series:
    """At least `few` finite readings of a metric."""
    series = log.series(metric)
    name = series.name if series else log.trainer.metrics.get(metric)
    if name is None:
        raise TooFewReadings(unknown(f"{log.trainer.name} does not log what this needs ({metric})"))
    expect_enough(log, {metric: few})
    if not series or not len(series.finite):
        raise TooFewReadings(unknown(f"needs at least {few} readings of {name}; the log has none"))
    return series.finite


def expect_enough(log: Log, needs: Mapping[str, int], more: str = MORE_STEPS) -> None:
    """Ends the rule where the log has one of these metrics with fewer readings than it needs. A metric that is absent
    ends nothing: the rule says what its absence means.

    Where a metric was read at half of the steps or fewer, readings at more of them settle it too.
    """
    steps = len(log.finite(schema.REWARD_MEAN) or ())
    for metric, few in needs.items():
        found = log.finite(metric)
        if found and len(found) < few:
            sparse = 2 * len(found) <= steps and more == MORE_STEPS
            short = unknown(f"too few readings of {found.name}: {len(found)} of the {few} that it needs",
                            settles=f"{more}, or readings at more of them" if sparse else more)
            raise TooFewReadings(replace(short, lacks=(len(found), few)))


def lacking(log: Log, sentence: str, needs: Mapping[str, int], settles: str = "", more: str = MORE_STEPS) -> Finding:
    """Unknown because none of the metrics could be read: `sentence` and `settles` are of metrics that the log does not
    have; of those that it has with too few readings their number is said, and that more steps settle it."""
    expect_enough(log, needs, more)
    return unknown(sentence, settles=settles)


def has(log: Log, metric: str, few: int = FEW) -> bool:
    """Whether the log has at least `few` finite readings of a metric."""
    series = log.series(metric)
    return series is not None and len(series.finite) >= few


def last(series: Series) -> Series:
    """The last max(EDGE, n/10) readings."""
    return series.part(-max(EDGE, len(series) // 10))


def over(series: Series) -> str:
    """The window of a mean, for a sentence."""
    return f" over steps {series.span}" if series.span else f" over the last {len(series)} readings"


def ends(series: Series) -> tuple[Series, Series]:
    """The first and the last tenth of at least TREND readings."""
    size = max(EDGE, len(series) // 10)
    return series.part(0, size), series.part(-size)


@dataclass(frozen=True)
class Trend:
    """The first and the last third of at least THIRDS readings, and the difference of their means."""

    first: Series
    last: Series
    change: Interval
    """mean of the last − mean of the first"""

    def told(self) -> str:
        """The formula with its numbers."""
        return (f"Last mean − first mean = {self.change.mean:+.2g}, 95 % interval ± √(h₁² + h₂²) from "
                f"{self.change.low:+.2g} to {self.change.high:+.2g}, h = t·s/√n of a third.")


def trend(series: Series) -> Trend:
    """The first third against the last."""
    size = len(series) // 3
    return between(series.part(0, size), series.part(-size))


def between(first: Series, after: Series) -> Trend:
    """m₂ − m₁ ± √(h₁² + h₂²), h the half width of each part's interval."""
    both = [mean_interval(part.values) for part in (first, after)]
    half = math.hypot(*(part.ends[1] - part.mean for part in both if part.ends))
    change = both[1].mean - both[0].mean
    return Trend(first, after, Interval(change, change - half, change + half, len(first) + len(after)))


def level(log: Log, metric: str) -> Series | None:
    """The last readings of a metric; None for fewer than FEW."""
    return last(series_of(log, metric)) if has(log, metric) else None
