"""A Log from the steps of a record or of a run in memory, and its diagnosis. No files, no torch.

    log_of_steps(config, steps)     what `read.read` makes of the record's folder
    diagnose_steps(config, steps)   its diagnosis; steps that cannot be read make one that says why
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from creditscope.diagnosis.engine import Diagnosis, diagnose
from creditscope.diagnosis.finding import unknown
from creditscope.diagnosis.log import Log, LogRow, LogSettings, RecordSource
from creditscope.diagnosis.trainers import KNOWN, TRL, Trainer, who_wrote
from creditscope.errors import CreditscopeError
from creditscope.runs.columns import Steps, is_number

SOURCE = RecordSource("steps.jsonl, line")
MAX_ROWS = 100_000
"""Lines that are read, half from the start and half from the end: a few hundred MB."""
ODD = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)
"""Errors of a rule on settings or numbers that no run writes."""


def diagnose_steps(config: Mapping[str, Any], steps: Iterable[Mapping[str, Any]], source: str = SOURCE) -> Diagnosis:
    """The diagnosis of a run's steps. It does not raise on odd settings or numbers."""
    try:
        return diagnose_log(log_of_steps(config, steps, source))
    except (CreditscopeError, *ODD) as error:
        return unread(f"the steps cannot be read ({error})")


def diagnose_log(log: Log) -> Diagnosis:
    """The same of a Log."""
    try:
        return diagnose(log) if log.rows else unread("no step is recorded yet")
    except (CreditscopeError, *ODD) as error:
        return unread(str(error) if isinstance(error, CreditscopeError) else f"{type(error).__name__}: {error}")


def unread(why: str) -> Diagnosis:
    """The diagnosis of a run that no rule can be applied to."""
    return Diagnosis([replace(unknown(why), rule="record")], why.removesuffix("."))


def log_of_steps(config: Mapping[str, Any], steps: Iterable[Mapping[str, Any]], source: str = SOURCE) -> Log:
    """A Log of lines as in steps.jsonl, each a mapping with `step`; NaN under `absent` as a record has it."""
    rows = _by_column(steps) if isinstance(steps, Steps) else [
        row for place, step in enumerate(steps, start=1) if (row := row_of_step(place, step)) is not None]
    return log_of_rows(config, rows, source)


def log_of_rows(config: Mapping[str, Any], rows: Sequence[LogRow], source: str = SOURCE) -> Log:
    trainer = who_wrote(config)
    if any(TRL.marks & row.values.keys() for row in rows):
        trainer = with_trl(trainer)
    return Log(source, trainer, rows, LogSettings(config, {}, trainer.defaults))


def with_trl(trainer: Trainer) -> Trainer:
    """The trainer of a record whose lines also have the metrics that TRL logged, under TRL's names."""
    aliases = {name: (own, *TRL.aliases.get(name, ())) for name, own in TRL.metrics.items()}
    return replace(trainer, metrics={**TRL.metrics, **trainer.metrics}, aliases={**trainer.aliases, **aliases})


def row_of_step(place: int, step: Mapping[str, Any]) -> LogRow | None:
    """The known metrics of one line; None where it has none."""
    values = {name: float(value) for name, value in step.items() if name in KNOWN and is_number(value)}
    absent = step.get("absent")
    values |= {name: math.nan for name in (absent if isinstance(absent, Mapping) else ()) if name in KNOWN}
    return LogRow(place, _step(step.get("step")), values) if values else None


def _by_column(steps: Steps) -> list[LogRow]:
    """The same of a record that is held by column; of more than MAX_ROWS lines the first and the last half."""
    count = len(steps)
    kept = [*range(count)] if count <= MAX_ROWS else [*range(MAX_ROWS // 2), *range(count - MAX_ROWS // 2, count)]
    values: dict[int, dict[str, float]] = {row: {} for row in kept}
    numbers = dict(zip(*(part.tolist() for part in steps.column("step")), strict=True))
    for name in KNOWN.intersection(steps.names):
        for row, value in zip(*(part.tolist() for part in steps.numbers(name)), strict=True):
            if row in values:
                values[row][name] = value
    for row, absent in zip(*(part.tolist() for part in steps.column("absent")), strict=True):
        if row in values and isinstance(absent, Mapping):
            values[row] |= {name: math.nan for name in absent if name in KNOWN}
    return [LogRow(row + 1, _step(numbers.get(row)), found) for row, found in values.items() if found]


def _step(number: object) -> int | None:
    return int(number) if is_number(number) else None
