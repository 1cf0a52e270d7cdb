"""Entries of a log -> LogRows: which columns are kept, under which name, with how many decimals, and of which session.

    actor/lr(1e-4):0.010     actor/lr = 1e-6: the unit stands in the name
    0.000 in every row       decimals 3: below 0.0005, not 0; a Python repr such as 0.0 is exact
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from creditscope.diagnosis.log import JoinedLine, LogRow, RecordSource
from creditscope.diagnosis.readers.text import number_of
from creditscope.diagnosis.trainers import HELD_OUT, KNOWN, PROVING, READ
from creditscope.errors import CreditscopeError
from creditscope.runs import schema

PART = re.compile(r"rewards/(.+?)(?:/(mean|std))?")
"""TRL's columns of each reward function: rewards/NAME/mean and rewards/NAME/std, before 0.17 rewards/NAME."""
MAX_ROWS = 100_000
"""Rows that are kept, half from the start and half from the end: about 20 numbers each, a few hundred MB."""
MAX_SEEN = 40
"""Names of columns that are kept for the message that no reward was found, and parts of a reward."""
MAX_NAMES = 20_000
ENOUGH = 10
"""Rows of a session that is read although a longer one came before."""
STEPS = ("step", "_step", "global_step", "Step", "training/global_step", "iteration", "global_step/max_steps",
         "train/global_step", "trainer/global_step")
SUPERVISED = frozenset({"mean_token_accuracy", "eval_mean_token_accuracy", "token_acc", "eval_token_acc"})
"""Columns that TRL's SFTTrainer and ms-swift's write, and no trainer with a reward."""
PLAIN = frozenset({"loss", "grad_norm", "learning_rate", "lr", "epoch", "num_tokens", "entropy", "eval_loss"})
"""Columns that supervised training has too."""
CLOCKS = frozenset({"epoch", "training/epoch", "num_tokens", "perf/total_num_tokens"})
"""Columns that count time: a row of these alone, such as the summary at the end, is no reading."""
_RENAMES = [(re.compile(pattern), name) for trainer in READ for pattern, name in trainer.renames.items()]
_ELSEWHERE = ("tim", "perf/", "vllm/", "val-aux/", "global_seqlen/", "system/", "memory", "_", "prompt_length")
"""Beginnings of columns that say nothing of the training."""
_UNIT = re.compile(r"(.+)\(1e-(\d{1,2})\)")
_FIXED = re.compile(r"-?\d+\.(\d+)")


def own_name(key: object) -> str:
    """A metric's own name: trackers put the run's name and `train/` before it, ScopeCallback `creditscope/`.

    >>> own_name("my run - train/reward_std"), own_name("actor/pg_loss")
    ('reward_std', 'actor/pg_loss')
    """
    name = str(key)[-200:].rpartition(" - ")[2].removeprefix("train/").removeprefix("creditscope/")
    return next((found.expand(new) for pattern, new in _RENAMES if (found := pattern.fullmatch(name))), name)


def is_read(name: str) -> bool:
    """Whether a column is a known metric, one of the steps, a held-out value, or a part of the reward."""
    known = found[1] if (found := _UNIT.fullmatch(name)) else name
    return known in KNOWN or name in STEPS or bool(HELD_OUT.fullmatch(name) or PART.fullmatch(name))


class _Column(NamedTuple):
    name: str
    kind: str
    """known, held-out, unknown, or seen: an unknown one that was listed."""
    unit: int = 0
    """The value is in units of 10^-unit."""


class RowCollector:
    """The known metrics of the entries that have one; of more than MAX_ROWS the first and the last half."""

    def __init__(self, notes: list[str]) -> None:
        self.seen: dict[str, None] = {}
        """Names of the first columns with a number, known or not."""
        self.held_out: set[str] = set()
        self._notes = notes
        self._columns: dict[object, _Column] = {}
        self._parts: set[str] = set()
        self._decimals: dict[str, int] = {}
        self._places: set[int] = set()
        self._digits: dict[str, int] = {}
        self._units: dict[str, int] = {}
        self._first: list[LogRow] = []
        self._last: deque[LogRow] = deque(maxlen=MAX_ROWS // 2)
        self._left_out = self._supervised = 0

    def add(self, place: int, entry: Mapping[str, Any]) -> bool:
        """Whether the entry is a row. The summary that transformers prints at the end of a training is none."""
        if "train_runtime" in entry:
            return False
        values: dict[str, float] = {}
        held: list[float] = []
        for key, raw in entry.items():
            column = self._columns.get(key) or self._column(key)
            if column.kind == "seen" or (number := number_of(raw)) is None:
                continue
            if len(self.seen) < MAX_SEEN and not column.name.startswith(_ELSEWHERE):
                self.seen.setdefault(column.name[:80])
            if column.kind == "unknown":
                self._columns[key] = column._replace(kind="seen")
            elif column.kind == "held-out":
                held.append(number)
                self.held_out.add(column.name.removeprefix("val/"))
            else:
                values[column.name] = number * 10.0 ** -column.unit
                if math.isfinite(number):
                    self._count_decimals(column, raw)
        if held:
            values[schema.EVAL_REWARD] = math.fsum(held) / len(held) if all(map(math.isfinite, held)) else math.nan
        if not SUPERVISED.isdisjoint(entry) and values.keys() <= PLAIN:
            self._supervised += 1
            return True
        if not values.keys() - PROVING - CLOCKS:
            return False
        self._left_out += len(self._last) == self._last.maxlen
        (self._first if len(self._first) < MAX_ROWS - MAX_ROWS // 2 else self._last).append(
            LogRow(place, _step(entry), values, self._digits))
        return True

    def rows(self) -> list[LogRow]:
        """The rows, without the leading ones of supervised training."""
        if self._left_out:
            self._notes.append(f"{self._left_out:,} rows in the middle were left out: the first and the last "
                               f"{MAX_ROWS // 2:,} were read")
        self._digits.update({name: places + self._units.get(name, 0) for name, places in self._decimals.items()
                             if places in self._places})
        rows = [*self._first, *self._last]
        leading = next((at for at, row in enumerate(rows) if not row.values.keys() <= PLAIN), 0)
        if supervised := self._supervised + leading:
            self._notes.append(f"{supervised} rows of supervised training, without a reward, were left out")
        if self.held_out:
            names = sorted(self.held_out)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            mean = "the mean of " if len(names) > 1 else ""
            self._notes.append(f"the held-out reward is {mean}{', '.join(names[:3])}{more}")
        return rows[leading:]

    def _column(self, key: object) -> _Column:
        name, unit = own_name(key), 0
        if found := _UNIT.fullmatch(name):
            name, unit = found[1], int(found[2])
        kind = "known" if name in KNOWN else "held-out" if HELD_OUT.fullmatch(name) else "unknown"
        if kind == "unknown" and PART.fullmatch(name) and (name in self._parts or len(self._parts) < MAX_SEEN):
            self._parts.add(name)
            kind = "known"
        if len(self._columns) >= MAX_NAMES:
            self._columns.clear()
        if unit and kind == "known":
            self._units[name] = unit
        self._columns[key] = column = _Column(name, kind, unit)
        return column

    def _count_decimals(self, column: _Column, raw: object) -> None:
        """Decimals are fixed where each row has as many, and some text of so many ends in 0, which no repr does."""
        found = _FIXED.fullmatch(raw.strip()) if isinstance(raw, str) and len(raw) <= 40 else None
        places = len(found[1]) if found and 2 <= len(found[1]) <= 4 else -1
        if places > 0 and found and found[1].endswith("0"):
            self._places.add(places)
        if self._decimals.setdefault(column.name, places) != places:
            self._decimals[column.name] = -1


def _step(entry: Mapping[str, Any]) -> int | None:
    raw = next((entry[key] for key in STEPS if key in entry), None)
    step = number_of(raw.partition("/")[0] if isinstance(raw, str) else raw)
    return int(step) if step is not None and abs(step) < 1e15 else None


def sessions(rows: Sequence[LogRow], notes: list[str]) -> list[list[LogRow]]:
    """The rows split where the step, or without steps the epoch, starts again.

    Where it falls back to a step after the first, the run was resumed: of rows that repeat a step the later ones stay.
    """
    by_step = any(row.step is not None for row in rows)
    found: list[list[LogRow]] = [[]]
    times: list[tuple[float, float]] = []
    """(step or epoch, epoch) of the rows of the session."""
    repeated = 0
    for row in rows:
        epoch = row.values.get("epoch", row.values.get("training/epoch", math.nan))
        time = math.nan if by_step and row.step is None else float(row.step or 0) if by_step else epoch
        if times and _trains(row) and time < times[-1][0] and not epoch > times[-1][1]:
            if time <= times[0][0]:
                found.append([])
                times = []
            else:
                while len(times) > 1 and not times[-1][0] < time:
                    times.pop()
                    found[-1].pop()
                    repeated += 1
        if math.isnan(time):
            time, epoch = times[-1] if times else (-math.inf, epoch)
        elif not _trains(row) and times:
            time = max(time, times[-1][0])
        found[-1].append(row)
        times.append((time, epoch))
    if repeated:
        notes.append(f"{repeated} rows that a resumed run repeats were left out")
    return found


def _trains(row: LogRow) -> bool:
    """Whether a row is of a training step, and not of an evaluation, which may come late."""
    return any(not name.startswith("eval") for name in row.values if name not in CLOCKS)


def chosen(found: Sequence[list[LogRow]], session: int | None, notes: list[str]) -> list[LogRow]:
    """Session number `session`, from 1; by default the last that has ENOUGH rows, else the longest."""
    if session is not None:
        if not 1 <= session <= len(found):
            raise CreditscopeError(f"session {session} was asked for; the log holds {len(found)}, numbered from 1")
        at = session - 1
    else:
        long = [at for at, rows in enumerate(found) if len(rows) >= ENOUGH]
        at = long[-1] if long else max(range(len(found)), key=lambda at: len(found[at]))
    if len(found) > 1:
        sizes = ", ".join(f"{len(rows)}" for rows in found[:8]) + (", …" if len(found) > 8 else "")
        notes.append(f"the log holds {len(found)} sessions, split where the step starts again, with {sizes} rows; "
                     f"session {at + 1} is read")
    return found[at]


def with_sums(rows: Sequence[LogRow], sums: Mapping[str, Sequence[tuple[int, str]]]) -> list[LogRow]:
    """Rows with columns that are sums of others, name -> (sign, column) of each; where one is missing there is none."""
    found = []
    for row in rows:
        more = {name: math.fsum(sign * row.values[column] for sign, column in terms) for name, terms in sums.items()
                if all(math.isfinite(row.values.get(column, math.nan)) for _, column in terms)}
        found.append(replace(row, values={**row.values, **more}) if more else row)
    return found


def merged(rows: Sequence[LogRow], lines: Sequence[LogRow], source: RecordSource) -> list[LogRow]:
    """Rows of TRL with the values of a record's lines, whose step k is TRL's k + 1; their own values stay. Lines of
    other steps are rows of their own. Each row knows which columns it has from the record."""
    by_step = {line.step + 1: line for line in lines if line.step is not None}
    found = []
    for row in rows:
        line = by_step.pop(row.step, None) if row.step is not None else None
        found.append(row if line is None else _joined(row, line, source))
    found += [_joined(LogRow(line.place, step, {}), line, source) for step, line in by_step.items()]
    return sorted(found, key=lambda row: math.inf if row.step is None else row.step)


def _joined(row: LogRow, line: LogRow, source: RecordSource) -> LogRow:
    names = frozenset(line.values.keys() - row.values.keys())
    return LogRow(row.place, row.step, {**line.values, **row.values}, row.digits,
                  JoinedLine(source, line.place, line.step, names))
