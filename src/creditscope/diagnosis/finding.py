"""What a finding is, and which readings of a metric it rests on.

    level    the last tenth
    drift    the first tenth against the last, for what is smooth: entropy, length
    trend    the first third against the last, with intervals, for what is noisy: rewards, dead groups
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from creditscope.diagnosis.log import Log, Series
from creditscope.runs.intervals import Interval, mean_interval

State = Literal["broken", "watch", "unknown", "fine"]
STATES: tuple[State, ...] = ("broken", "watch", "unknown", "fine")
"""Most severe first."""

FEW = 4
"""Readings below which a metric decides nothing: one odd batch must not make a finding."""
TREND = 10
"""Readings below which there is no trend: the two ends would share rows."""
EDGE = 5
"""Readings at each end, at least, so that one batch does not make a trend."""
THIRDS = 3 * FEW
"""Readings below which a third decides nothing either."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one rule says of one run."""

    rule: str = ""
    state: State
    sentence: str
    evidence: str = ""
    """File, lines, steps and values."""
    why: str = ""
    """One sentence with the formula."""
    change: str = ""
    """The setting to change, as this trainer spells it."""
    follows: str = ""
    """The rule whose finding brings this one about, to be mended first. A rule names the next cause, and `diagnose`
    puts the first in its place."""
    assumes: Mapping[str, Any] | None = None
    """Settings that were not given and were taken at the trainer's default."""

    @property
    def bad(self) -> bool:
        return self.state in ("broken", "watch")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def finding(state: State, sentence: str, *evidence: Series | None, why: str = "", change: str = "",
            follows: str = "") -> Finding:
    """A finding with the readings that show it. What is fine needs no change."""
    shown = "; ".join(series.told() for series in evidence if series is not None)
    return Finding(state=state, sentence=sentence, evidence=shown, why=why, change="" if state == "fine" else change,
                   follows=follows)


def grade(value: float, watch: float, broken: float = math.inf) -> State:
    """The state of a value that is worse the larger it is, by its thresholds."""
    return "broken" if value >= broken else "watch" if value >= watch else "fine"


def unknown(sentence: str, follows: str = "") -> Finding:
    return Finding(state="unknown", sentence=sentence, follows=follows)


def lacks(log: Log, metric: str, few: int = FEW) -> Finding | None:
    """Unknown, where the log has too little of a metric; it names what is missing."""
    series, name = log.series(metric), log.trainer.metrics.get(metric)
    if name is None:
        return unknown(f"{log.trainer.name} does not log what this needs ({metric})")
    found = len(series.finite) if series else 0
    return None if found >= few else unknown(f"needs at least {few} readings of {name}; the log has {found}")


def last(series: Series) -> Series:
    """The last tenth, and at least EDGE readings where there are so many."""
    return series.part(-max(EDGE, len(series) // 10))


def over(series: Series) -> str:
    """The window of a mean, for a sentence."""
    steps = series.span
    return f" over steps {steps}" if steps else f" over the last {len(series)} readings"


def ends(series: Series) -> tuple[Series, Series]:
    """The first and the last tenth of at least TREND readings."""
    size = max(EDGE, len(series) // 10)
    return series.part(0, size), series.part(-size)


@dataclass(frozen=True)
class Trend:
    """The first and the last third of at least THIRDS readings, and how far their means are apart."""

    first: Series
    last: Series
    change: Interval
    """mean of the last − mean of the first"""

    def told(self) -> str:
        """The formula with its numbers."""
        return (f"Last mean − first mean = {self.change.mean:+.2g}, 95 % interval ± √(h₁² + h₂²) from "
                f"{self.change.low:+.2g} to {self.change.high:+.2g}, h = t·s/√n of a third.")


def trend(series: Series) -> Trend:
    """m₂ − m₁ ± √(h₁² + h₂²), h the half width of each third's interval."""
    size = len(series) // 3
    first, after = series.part(0, size), series.part(-size)
    halves, means = [], []
    for part in (first, after):
        found = mean_interval(part.values)
        assert found.high is not None
        halves.append(found.high - found.mean)
        means.append(found.mean)
    change, half = means[1] - means[0], math.hypot(*halves)
    return Trend(first, after, Interval(change, change - half, change + half, 2 * size))


def level(log: Log, metric: str) -> Series | None:
    """The last readings of a metric, where there are enough."""
    series = log.series(metric)
    return last(series.finite) if series and len(series.finite) >= FEW else None
