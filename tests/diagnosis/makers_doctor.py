"""Logs for tests of the doctor: real ones by name, and made ones from columns of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from creditscope.diagnosis.engine import diagnose
from creditscope.diagnosis.finding import Finding
from creditscope.diagnosis.log import Log, LogRow, LogSettings
from creditscope.diagnosis.read import read
from creditscope.diagnosis.trainers import TRL, Trainer

LOGS = Path(__file__).parent / "logs"


def log_of(columns: dict[str, Sequence[float]], trainer: Trainer = TRL, **given: Any) -> Log:
    """A log of `trainer` with these columns, by our names for the metrics; rows are lines 1, 2, …"""
    size = max(map(len, columns.values()))
    rows = [LogRow(k + 1, k + 1, {trainer.metrics[name]: float(values[k]) for name, values in columns.items()
                               if k < len(values)}) for k in range(size)]
    return Log("made.log, line", trainer, rows, LogSettings(given, {}, trainer.defaults))


def findings(log: Log | str, *sets: str) -> dict[str, Finding]:
    """Every rule's finding by its name, of a made log or of a folder under logs/."""
    log = read(LOGS / log, sets=sets) if isinstance(log, str) else log
    return {finding.rule: finding for finding in diagnose(log).findings}


def states(log: Log | str, *sets: str) -> dict[str, str]:
    return {name: finding.state for name, finding in findings(log, *sets).items()}
