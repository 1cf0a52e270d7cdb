"""A run as logged: rows of numbers, each with its place in the file, and settings with their source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from creditscope.errors import CreditscopeError

if TYPE_CHECKING:
    from creditscope.diagnosis.trainers import Trainer

HUGE = 1e150
"""A reading beyond ± HUGE counts as infinite: its square, or a sum of such, does not fit in a float."""


def is_number(value: float) -> bool:
    """Whether a reading can be averaged: neither NaN nor infinite, and not beyond ± HUGE."""
    return abs(value) < HUGE


class RecordSource(str):
    """The source of a record's lines. A record counts its steps from 0, a trainer's log as the trainer does."""

    __slots__ = ()


class JoinedLine(NamedTuple):
    """The line of a record that was joined to a row of a log by step."""

    source: RecordSource
    place: int
    step: int | None
    """As the record counts."""
    names: frozenset[str]
    """The columns that the row has from it."""


@dataclass(frozen=True)
class LogRow:
    """One logged line: names as the trainer writes them."""

    place: int
    """The line, or the entry of log_history, from 1."""
    step: int | None
    values: Mapping[str, float]
    digits: Mapping[str, int] = field(default_factory=dict)
    """Decimals of a number that was printed with few: 0.000 has 3, and means less than 0.0005."""
    joined: JoinedLine | None = None


@dataclass(frozen=True)
class Series:
    """One metric over the rows that have it."""

    name: str
    rows: Sequence[LogRow]
    source: str
    """The file and the unit of its places, such as "train.log, line"."""

    @cached_property
    def values(self) -> list[float]:
        return [row.values[self.name] for row in self.rows]

    @cached_property
    def finite(self) -> Series:
        return Series(self.name, [row for row in self.rows if is_number(row.values[self.name])], self.source)

    @property
    def resolution(self) -> float:
        """Half a unit of the last decimal that was printed; 0 where numbers are printed in full."""
        digits = [row.digits[self.name] for row in self.rows if self.name in row.digits]
        return 0.5 * 10.0 ** -max(digits) if digits else 0.0

    @property
    def mean(self) -> float:
        """Σ x / n; NaN where infinities of both signs meet."""
        finite = all(map(is_number, self.values))
        return (math.fsum(self.values) if finite else sum(self.values)) / len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, start: int, stop: int | None = None) -> Series:
        return Series(self.name, self.rows[start:stop], self.source)

    @property
    def span(self) -> str:
        """The first and the last step; nothing where the log does not number them."""
        first, last = self.rows[0].step, self.rows[-1].step
        return "" if first is None or last is None else _span(first, last)

    def told(self) -> str:
        """The evidence: file, places, steps and who counts them, name, values.

        >>> Series("kl", [LogRow(3, 1, {"kl": 0.5}), LogRow(4, 2, {"kl": 0.25})], "train.log, line").told()
        'train.log, line 3–4 (step 1–2 of the log): kl 0.5, 0.25'
        """
        shown = [f"{value:.4g}" for value in self.values]
        if len(shown) > 6:
            low, high = (f"{edge(self.values):.4g}" for edge in (min, max))
            shown = [*shown[:2], "…", *shown[-2:], f"(n {len(self)}, mean {self.mean:.4g}, from {low} to {high})"]
        text = ", ".join(shown).replace(", …,", " …").replace(", (", " (")
        return f"{self._places()}: {self.name} {text}"

    def _places(self) -> str:
        """Files, places and steps. Columns of a record are cited from its own file, and its own steps are named too."""
        lines = [row.joined for row in self.rows if row.joined and self.name in row.joined.names]
        own = [row.place for row in self.rows if not (row.joined and self.name in row.joined.names)]
        cited = [f"{self.source} {_span(own[0], own[-1])}"] if own else []
        cited += [f"{lines[0].source} {_span(lines[0].place, lines[-1].place)}"] if lines else []
        if not self.span:
            return " and ".join(cited)
        counted = f"step {self.span} of the {'record' if isinstance(self.source, RecordSource) else 'log'}"
        if lines and not own:
            counted += f", {_span(lines[0].step, lines[-1].step)} of the record"
        return f"{' and '.join(cited)} ({counted})"


def _span(first: int | None, last: int | None) -> str:
    return f"{first}" if first == last else f"{first}–{last}"


@dataclass
class LogSettings:
    """The run's settings by path. A setting that was not given has the trainer's default and is listed in `assumed`."""

    given: Mapping[str, Any] = field(default_factory=dict)
    """From files, nested as the trainer has it, and from --set, by dotted path."""
    deduced: Mapping[str, Any] = field(default_factory=dict)
    """Settings that follow from the log, such as a metric that only one loss writes."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    source: str = "the settings"
    assumed: dict[str, Any] = field(default_factory=dict)

    def _found(self, path: str) -> Any:
        """The value that was given at a dotted path, or _MISSING. An unresolved `${...}` counts as not given."""
        found: Any = self.given
        for key in [path] if path in self.given else path.split("."):
            found = found.get(key, _MISSING) if isinstance(found, Mapping) else _MISSING
        return _MISSING if isinstance(found, str) and found.startswith("${") else found

    def has(self, path: str) -> bool:
        return self._found(path) is not _MISSING

    def get(self, path: str) -> Any:
        """The value at a dotted path, or the trainer's default, which is then listed in `assumed`."""
        if self.has(path):
            return self._found(path)
        if path in self.deduced:
            return self.deduced[path]
        self.assumed[path] = self.defaults[path]
        return self.defaults[path]

    def knows(self, path: str) -> bool:
        """Whether the setting was given or follows from the log: it need not be assumed."""
        return self.has(path) or path in self.deduced

    def number(self, path: str) -> float:
        """A finite number, or an error that names the setting. Text such as '1e-6', as YAML reads it, is accepted."""
        value = self.get(path)
        try:
            number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise CreditscopeError(f"{self.source}: {path} is {value!r:.60}, not a number; repair it, or give "
                                   f"--set {path}=NUMBER")
        return number

    def optional(self, path: str) -> float | None:
        """A number, or None where the trainer allows it."""
        return None if self.get(path) is None else self.number(path)

    def switch(self, path: str) -> bool:
        value = self.get(path)
        if value not in (True, False, None):
            raise CreditscopeError(f"{self.source}: {path} is {value!r:.60}, not true or false; repair it, or give "
                                   f"--set {path}=true")
        return bool(value)

    def word(self, path: str) -> str:
        return f"{self.get(path)}"[:80]


_MISSING = object()


@dataclass
class Log:
    """The input of a rule."""

    source: str
    trainer: Trainer
    rows: Sequence[LogRow]
    settings: LogSettings
    notes: Sequence[str] = ()
    """Sentences on what was left out in reading."""
    seen: Sequence[str] = ()
    """Names of the columns with a number that the file has, known or not: the first 40."""
    sessions: int = 1
    """Runs that the file holds one after another; the rows are of one of them."""
    _series: dict[str, Series | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `series` found; the rows of a log do not change."""

    def finite(self, metric: str) -> Series | None:
        """The readings of a metric that can be averaged; None where there is none."""
        found = self.series(metric)
        return found.finite if found and len(found.finite) else None

    def series(self, metric: str) -> Series | None:
        """A metric by our name; None where the trainer or the log has none."""
        if metric not in self._series:
            own = self.trainer.metrics.get(metric)
            names = dict.fromkeys((*([own] if own else []), *self.trainer.aliases.get(metric, ()), metric))
            found = [Series(name, rows, self.source) for name in names
                     if (rows := [row for row in self.rows if name in row.values])]
            self._series[metric] = max(found, key=len, default=None)  # of equals the first
        return self._series[metric]

    def setting(self, name: str) -> float | None:
        """A number of `trainers.SETTINGS`; None where it was not given or deduced: defaults are not assumed."""
        path = self.trainer.paths.get(name)
        return self.settings.optional(path) if path is not None and self.settings.knows(path) else None

    def word(self, name: str) -> str:
        """A setting of `trainers.SETTINGS` as text; empty where it was not given or deduced."""
        path = self.trainer.paths.get(name)
        return self.settings.word(path) if path is not None and self.settings.knows(path) else ""

    def spelled(self, name: str) -> str:
        """A setting of `trainers.SETTINGS` as the trainer spells it."""
        return self.trainer.paths.get(name, name).removeprefix("trl.")  # where a record keeps TRL's settings

    def fact(self, name: str) -> Any:
        """A fact that the settings imply: see `trainers.FACTS`."""
        return self.trainer.facts[name](self.settings)
