"""Logs for tests of the diagnosis: real ones by name, and made ones from columns of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from creditscope.diagnosis.engine import diagnose
from creditscope.diagnosis.finding import Finding
from creditscope.diagnosis.log import Log, LogRow, LogSettings
from creditscope.diagnosis.read import read
from creditscope.diagnosis.trainers import TRL, Trainer

LOGS = Path(__file__).parent / "logs"
N = 40
"""Rows of a made log: more than the steps after which a flat reward is a finding, and 12 in a third."""
FLAT: Mapping[str, Sequence[float]] = {"reward/mean": [0.4, 0.5] * (N // 2), "reward/std": [0.5] * N}
"""Rewards that do not change."""
RISES: Mapping[str, Sequence[float]] = {"reward/mean": [0.2 + 0.01 * k for k in range(N)], "reward/std": [0.5] * N}
FALLS: Mapping[str, Sequence[float]] = {"reward/mean": [0.8] * (N // 2) + [0.2] * (N // 2), "reward/std": [0.4] * N}


def log_of(columns: Mapping[str, Sequence[float]], trainer: Trainer = TRL, **given: Any) -> Log:
    """A log of `trainer` with these columns, by our names for the metrics; rows are lines 1, 2, …"""
    size = max(map(len, columns.values()))
    rows = [LogRow(k + 1, k + 1, {trainer.metrics.get(name, name): float(values[k]) for name, values in columns.items()
                                  if k < len(values)}) for k in range(size)]
    return Log("made.log, line", trainer, rows, LogSettings(given, {}, trainer.defaults))


def findings(log: Log | str, *sets: str) -> dict[str, Finding]:
    """Every rule's finding by its name, of a made log or of a folder under logs/."""
    log = read(LOGS / log, sets=sets) if isinstance(log, str) else log
    return {finding.rule: finding for finding in diagnose(log).findings}


def states(log: Log | str, *sets: str) -> dict[str, str]:
    return {name: finding.state for name, finding in findings(log, *sets).items()}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A log that turns a rule on, and the one value that turns it off."""

    rule: str
    on: Mapping[str, Sequence[float]]
    """Columns of the log in which the rule finds something."""
    off: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Columns that are changed in the log in which it must not."""
    given: Mapping[str, Any] = field(default_factory=dict)
    unless: Mapping[str, Any] = field(default_factory=dict)
    """Settings that are changed in the log in which it must not."""
    state: str = "broken"
    otherwise: str = "fine"
    trainer: Trainer = TRL
    what: str = ""

    def __str__(self) -> str:
        return f"{self.rule} {self.what}".replace(" ", "-").strip("-")

    def check(self) -> None:
        assert bool(self.off) + bool(self.unless) >= 1, "nothing is changed"
        on = findings(log_of(self.on, self.trainer, **self.given))[self.rule]
        off = findings(log_of({**self.on, **self.off}, self.trainer, **{**self.given, **self.unless}))[self.rule]
        assert (on.state, off.state) == (self.state, self.otherwise), f"{on.sentence} / {off.sentence}"


def above(threshold: float, by: float = 0.01) -> float:
    """A number just beyond a threshold."""
    return threshold + abs(threshold) * by


def below(threshold: float, by: float = 0.01) -> float:
    """A number just short of a threshold."""
    return threshold - abs(threshold) * by


def steady(value: float) -> list[float]:
    return [float(value)] * N


def halves(first: float, second: float) -> list[float]:
    return [float(first)] * (N // 2) + [float(second)] * (N // 2)
