"""Files of a trainer -> a Log; `folders.SHAPES` lists them. They are untrusted: `readers` has the limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from creditscope.diagnosis.log import Log, LogRow, LogSettings, RecordSource
from creditscope.diagnosis.readers.contents import LogFile, whole_step
from creditscope.diagnosis.readers.folders import (
    SHAPES,
    callback_record,
    log_file,
    logs_in,
    record_in,
    runs_below,
    state_in,
)
from creditscope.diagnosis.readers.refusals import program_with, refusal
from creditscope.diagnosis.readers.rows import RowCollector, chosen, merged, sessions, with_sums
from creditscope.diagnosis.readers.settings import settings_beside, settings_file, settings_set
from creditscope.diagnosis.trainers import ANOTHER, OURS, READ, TRL, TRL_DPO, Trainer, who_wrote
from creditscope.diagnosis.trainers.trainer import parts
from creditscope.errors import CreditscopeError
from creditscope.runs import schema
from creditscope.runs.record import Record

__all__ = ["read", "runs_below"]

HITS, HIT_SHARE = 5, 0.3
"""Readings of the longest answer, and share of them at their maximum, from which that maximum is the limit."""


def read(path: str | Path, config: Path | None = None, sets: Sequence[str] = (), session: int | None = None) -> Log:
    """A run's log with its settings: from inside it, from files beside it or `config`, changed by `sets`
    ("name=value"). Of a file with several sessions `session`, from 1, or the last that is long enough."""
    path = Path(path)
    given = settings_set(sets)
    file, beside = _log_and_record(path)
    record = Record.open(file.parent) if file.name == "run.json" else None
    if record and isinstance(record.config.get("trl"), Mapping):
        file = state_in(file.parent) or file  # ScopeCallback wrote into TRL's own folder
    held = LogFile(file)
    notes = held.notes
    if record and file.name == "run.json":
        held.add_record(record, path)
    else:
        held.add()
    every = sessions(held.rows.rows(), notes)
    rows = chosen(every, session, notes)
    if beside or file.name == "trainer_state.json":
        rows, record = _with_record(rows, file, notes)
    settings = _settings(path, held, config, record) | given
    names = frozenset(name for row in rows for name in row.values)
    trainer = _trainer(path, names, held, settings)
    if sums := {name: terms for name in trainer.metrics.values() if len(terms := parts(name)) > 1}:
        rows = with_sums(rows, sums)
    deduced = _deduced(trainer, rows, names, settings, held)
    named = "the settings" if config is None else config.name
    log = Log(held.source, trainer, rows, LogSettings(settings, deduced, trainer.defaults, named), notes,
              tuple(held.rows.seen), len(every))
    if found := _limit(log):
        path_of_limit, limit = found
        deduced[path_of_limit] = limit
        notes.append(f"the longest answers have {limit:g} tokens again and again: taken as {path_of_limit}")
    return log


def _log_and_record(path: Path) -> tuple[Path, bool]:
    """The log at a path, and whether a record of ScopeCallback lies below it and is of the same run: where a folder was
    named that holds logs of TRL's and one such record. Of several logs that with the most columns is read."""
    record = callback_record(path) if path.is_dir() and not (path / "run.json").exists() else None
    if record is None or state_in(path):
        return log_file(path), False
    columns = {file: _known_columns(file) for file in logs_in(path)}
    most = max(columns, key=lambda file: columns[file], default=None)
    return (most, True) if most is not None and columns[most] else (record / "run.json", False)


def _known_columns(file: Path) -> int:
    """How many columns of TRL's or of ours a file has; 0 where it is no log."""
    held = LogFile(file)
    try:
        held.add()
    except CreditscopeError:
        return 0
    names = {name for row in held.rows.rows() for name in row.values}
    return max(len(names & (_names(trainer) | _names(OURS))) if trainer.marks & names else 0
               for trainer in (TRL, TRL_DPO))


def _with_record(rows: Sequence[LogRow], state: Path, notes: list[str]) -> tuple[list[LogRow], Record | None]:
    """TRL's rows with those of a record that ScopeCallback wrote in the same folder."""
    home = state.parent.parent if state.parent.name.startswith("checkpoint-") else state.parent
    folder = record_in(home)
    if folder is None:
        return list(rows), None
    try:
        record = Record.open(folder)
        steps = record.steps() if (folder / "steps.jsonl").exists() else []
    except CreditscopeError as error:
        notes.append(f"a record was not read: {error}")
        return list(rows), None
    if not isinstance(record.config.get("trl"), Mapping):
        return list(rows), None
    theirs = RowCollector([])
    for place, step in enumerate(steps, start=1):
        theirs.add(place, whole_step(step))
    file = (folder / "steps.jsonl").relative_to(home)
    notes.append(f"the record {file} is read too: its {len(steps)} steps are joined to TRL's rows; step k of the "
                 f"record is step k + 1 of the log")
    return merged(rows, theirs.rows(), RecordSource(f"{file}, line")), record


def _settings(path: Path, held: LogFile, config: Path | None, record: Record | None) -> dict[str, Any]:
    """From `config`; or from the record and the files beside the log; or as printed inside it."""
    if config is not None:
        return dict(settings_file(config))
    if held.file.name == "run.json":
        return dict(record.config) if record else {}
    trl = record.config.get("trl") if record else None
    own = dict(trl) if isinstance(trl, Mapping) else {}
    given = own | settings_beside(path, held.file, [] if own else held.notes)
    printed = held.printed.end()
    if printed and not given:
        held.notes.append("settings as printed inside the log")
        return printed
    return given


def _names(trainer: Trainer, metric: str = "") -> set[str]:
    """The trainer's names of a metric, or of all."""
    wanted = [metric] if metric else [*trainer.metrics, *trainer.aliases]
    return {name for each in wanted for _, name in parts(trainer.metrics.get(each, each))}.union(
        *(trainer.aliases.get(each, ()) for each in wanted))


def _trainer(path: Path, names: frozenset[str], held: LogFile, settings: Mapping[str, Any]) -> Trainer:
    """The trainer that wrote these columns. Another program's need a reward and a number of the optimiser's."""
    program = held.program or program_with(held.rows.seen)
    found = [trainer for trainer in READ if trainer.wrote(names) or (
        trainer.name == program and trainer.console and names & _names(trainer, schema.REWARD_MEAN))]
    through = {trainer.through for trainer in found}
    found = [trainer for trainer in found if trainer.name not in through]
    beyond = _names(ANOTHER) - ANOTHER.marks - _names(ANOTHER, schema.LENGTH_MEAN) - {"epoch"}
    if ANOTHER in found:
        rewarded = [trainer for trainer in found if trainer is not ANOTHER
                    and names & _names(trainer, schema.REWARD_MEAN)]
        found = rewarded or ([ANOTHER] if names & beyond else [each for each in found if each is not ANOTHER])
    if len(found) > 1:
        found = [trainer for trainer in found if trainer is not OURS]  # ScopeCallback's metrics in TRL's log
    if not found:
        if program:
            raise CreditscopeError(f"{path}: {refusal(program)}")
        shown = ", ".join(sorted(names or held.rows.seen))
        seen = f"it has {shown}, which other programs write too" if shown else "no such line"
        raise CreditscopeError(f"{path} holds no log of a trainer that is read: {seen}; {SHAPES}")
    trainer = max(found, key=lambda trainer: len(names & _names(trainer)))
    if trainer is ANOTHER and program:
        held.notes.append(f"this looks like a log of {program}: its columns are read by their common names")
    return who_wrote(settings) if trainer is OURS else trainer


def _deduced(trainer: Trainer, rows: Sequence[LogRow], names: frozenset[str], settings: dict[str, Any],
             held: LogFile) -> dict[str, Any]:
    """Settings that the log proves or prints, and the planned steps of TRL's state."""
    found = dict(setting for name, setting in trainer.proofs.items() if name in names)
    for name, path in trainer.logged.items():
        values = [row.values[name] for row in rows if math.isfinite(row.values.get(name, math.nan))]
        if values and (values[-1] or name not in rows[-1].digits):  # 0.000 is not 0
            found[path] = values[-1]
    if trainer.paths.get("steps") == "max_steps" and isinstance(held.planned, int) and held.planned > 0:
        if settings.get("max_steps") == -1:  # by epochs
            del settings["max_steps"]
        found["max_steps"] = held.planned
    given, proved = settings.get("loss_type"), found.get("loss_type")
    if given and proved and given != proved:
        held.notes.append(f"the settings say loss_type={given}, but the log is of loss_type={proved}: are they of the "
                          f"same run?")
    return found


def _limit(log: Log) -> tuple[str, float] | None:
    """(setting, tokens): the longest answer of many readings, where no limit is known and none of them says that
    nothing was cut. Without the longest answer the mean, which is at the limit where all are cut."""
    path = log.trainer.paths.get("limit")
    series = log.series(schema.LENGTH_MAX) or log.series(schema.LENGTH_MEAN)
    if path is None or log.settings.knows(path) or series is None:
        return None
    values = [value for value in series.values if math.isfinite(value)]
    most = max(values, default=0.0)
    hits = [row for row in series.rows if row.values[series.name] == most]
    cut = log.series("truncated")
    uncut = [row for row in hits if cut is not None and row.values.get(cut.name) == 0]
    enough = len(hits) >= HITS and len(hits) >= HIT_SHARE * len(values) and not uncut
    return (path, most) if enough and most == int(most) > 1 else None
