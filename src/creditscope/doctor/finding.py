"""What a finding is, and which readings of a metric it rests on: the last tenth for a level, both ends for a trend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from creditscope.doctor.log import Log, Series

State = Literal["broken", "watch", "unknown", "fine"]
STATES: tuple[State, ...] = ("broken", "watch", "unknown", "fine")
"""Most severe first."""

FEW = 4
"""Readings below which a metric decides nothing: one odd batch must not make a finding."""
TREND = 10
"""Readings below which there is no trend: the two ends would share rows."""
EDGE = 5
"""Readings at each end, at least, so that one batch does not make a trend."""


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
    assumes: Mapping[str, Any] | None = None
    """Settings that were not given and were taken at the trainer's default."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def finding(state: State, sentence: str, *evidence: Series | None, why: str = "", change: str = "") -> Finding:
    """A finding with the readings that show it. What is fine needs no change."""
    shown = "; ".join(series.told() for series in evidence if series is not None)
    return Finding(state=state, sentence=sentence, evidence=shown, why=why, change="" if state == "fine" else change)


def unknown(sentence: str) -> Finding:
    return Finding(state="unknown", sentence=sentence)


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


def ends(series: Series) -> tuple[Series, Series]:
    """The first and the last tenth of at least TREND readings."""
    size = max(EDGE, len(series) // 10)
    return series.part(0, size), series.part(-size)


def level(log: Log, metric: str) -> Series | None:
    """The last readings of a metric, where there are enough."""
    series = log.series(metric)
    return last(series.finite) if series and len(series.finite) >= FEW else None
