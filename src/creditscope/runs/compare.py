"""Runs beside each other at an equal number of rollouts, read from their records.

Steps cost different numbers of rollouts: one with Monte Carlo credit many times one with outcome credit. Accuracy is
known at the evaluations, (rollouts spent until then, accuracy), and interpolated linearly between them. What differs
between the runs, a setting of `Config`, is a `Kind`: `kinds.kind_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from creditscope.errors import CreditscopeError
from creditscope.runs import schema
from creditscope.runs.intervals import Interval, mean_interval, overlap, paired
from creditscope.runs.numbers import mean_over
from creditscope.runs.record import Record

FREE = frozenset({"log", "checkpoint_every", "keep_every", "keep_most"})
"""Settings that change no result."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What differs between compared runs: how they are named, trained, read and judged."""

    setting: str
    """The setting of `lab train` that differs, besides the seed."""
    noun: str
    luck: str
    """Completes "cannot tell luck from"."""
    default: tuple[str, ...]
    baseline: str
    name: Callable[[Mapping[str, Any]], str]
    """(settings) -> name; a name that is not allowed is refused."""
    readings: Mapping[str, str]
    """Number of a run -> the metric whose mean over the steps it is."""
    more: Callable[[Sequence[CandidateRun], Sequence[CandidateRun]], dict[str, Any]]
    """(runs of one name, runs of the baseline) -> further numbers of a line."""
    judge: Callable[[Comparison, Candidate, Sequence[Candidate]], list[str]]
    """(comparison, baseline, the others) -> sentences, where there are enough seeds."""
    inner_steps: int
    scope: str
    probe: Mapping[str, Any]
    free: frozenset[str] = FREE
    """Settings that change no number of the page."""
    out: str
    prefix: str = ""
    """Begins every name: values such as 8 say nothing alone."""

    @property
    def one(self) -> str:
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"

    def value(self, name: str) -> str:
        """The value that a name stands for."""
        return name.removeprefix(self.prefix)


@dataclass(frozen=True)
class CandidateRun:
    path: Path
    name: str
    seed: int
    settings: Mapping[str, Any]
    points: tuple[tuple[int, float], ...]
    """(rollouts spent, accuracy) at each evaluation, in order."""
    steps: int
    spent: int
    sampled: int
    """Rollouts of the batches; the rest of `spent` are continuations for values."""
    seconds: float
    """Wall time of the steps, without evaluations, microscope and probe."""
    readings: Mapping[str, float]
    """Means over the steps that have the metric."""

    @property
    def budget(self) -> int:
        return int(self.settings["rollouts"])

    @property
    def end(self) -> float:
        """Accuracy at the end of the budget."""
        return at(self.points, [self.budget])[0]


def is_finished(steps: Sequence[Mapping[str, Any]]) -> bool:
    """A finished run ends with a line that is an evaluation alone."""
    return bool(steps) and schema.EVAL_ACCURACY in steps[-1] and schema.ROLLOUTS_SPENT not in steps[-1]


def read_run(record: Record, kind: Kind) -> CandidateRun:
    return run_of(record.path, record.config, record.steps(), kind)


def run_of(path: Path, config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], kind: Kind) -> CandidateRun:
    """The numbers of a finished run. An evaluation stands on the line of the step that follows it."""
    config = _checked(path, config)
    if not config["rollouts"]:
        raise CreditscopeError(f"{path} had no budget, so it cannot be compared at equal rollouts; train it "
                               f"with --rollouts, or take it out of the folder")
    points, spent = [], 0
    for line in lines:
        if schema.EVAL_ACCURACY in line:
            points.append((spent, float(line[schema.EVAL_ACCURACY])))
        spent += int(line.get(schema.ROLLOUTS_SPENT, 0))
    trained = [line for line in lines if schema.ROLLOUTS_SPENT in line]
    seconds = sum(line[schema.TIME_STEP] - sum(line.get(f"time/{part}", 0.0) for part in ("eval", "scope", "probe"))
                  for line in trained)
    means = {name: mean_over(trained, metric) for name, metric in kind.readings.items()}
    return CandidateRun(path, kind.name(config), config["seed"], config, tuple(points), len(trained), spent,
               int(sum(line[schema.ROLLOUTS_SAMPLED] for line in trained)), seconds,
               {name: mean for name, mean in means.items() if mean is not None})


SETTINGS = {"seed": int, "rollouts": int, "group": int, "prompts": int, "inner_steps": int, "eval_problems": int,
            "lr": float, "model": str, "task": str, "method": str}
"""Setting that a page shows -> its type."""


def _checked(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The run's settings; run.json is untrusted, so types are checked."""
    config = {"rollouts": 0} | dict(settings)
    for name, kind in SETTINGS.items():
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float if kind is float else kind):
            raise CreditscopeError(f"{path}: {name} is {value!r:.60}, not a {kind.__name__}; is this a "
                                   f"run of creditscope lab train?")
    return config


def read_folder(out: Path, kind: Kind) -> tuple[list[CandidateRun], list[Path]]:
    """(finished runs, folders of unfinished ones) under out/NAME/seed-S."""
    runs, unfinished = [], []
    for found in sorted(out.glob("*/seed-*/run.json")):
        record = Record.open(found.parent)
        if is_finished(record.steps()):
            runs.append(read_run(record, kind))
        else:
            unfinished.append(found.parent)
    return runs, unfinished


@dataclass(frozen=True)
class Glance:
    steps: int = 0
    spent: int = 0
    accuracy: float | None = None
    """At its latest evaluation."""


def glance(path: Path) -> Glance:
    """Also of a run that is being written; empty without a record."""
    try:
        lines = Record.open(path).steps()
    except CreditscopeError:
        return Glance()
    seen = [line[schema.EVAL_ACCURACY] for line in lines if schema.EVAL_ACCURACY in line]
    trained = [line[schema.ROLLOUTS_SPENT] for line in lines if schema.ROLLOUTS_SPENT in line]
    return Glance(len(trained), sum(trained), seen[-1] if seen else None)


def difference(old: Mapping[str, Any], new: Mapping[str, Any], apart: frozenset[str] = FREE) -> str | None:
    """The first setting in which two runs differ, in words, or None. A setting that one run lacks is no difference.

    >>> difference({"lr": 0.1, "log": []}, {"lr": 0.2, "log": ["wandb"]})
    'lr is 0.1, not 0.2'
    """
    for key in sorted((old.keys() & new.keys()) - apart):
        # A record keeps a tuple as a list.
        before, now = (list(x) if isinstance(x, tuple) else x for x in (old[key], new[key]))
        if before != now:
            return f"{key} is {old[key]!r}, not {new[key]!r}"
    return None


def at(points: Sequence[tuple[int, float]], rollouts: Sequence[float]) -> list[float]:
    """Accuracy after so many rollouts, interpolated linearly between evaluations; an error beyond the last one.

    >>> at([(0, 0.5), (100, 0.75), (300, 1.0)], [50, 200])
    [0.625, 0.875]
    """
    x, y = zip(*points, strict=True)
    if min(rollouts) < x[0] or max(rollouts) > x[-1]:
        raise CreditscopeError(f"the evaluations cover {x[0]:,} to {x[-1]:,} rollouts, not {max(rollouts):,}; the run "
                               f"did not spend its budget")
    return [float(value) for value in np.interp(rollouts, x, y)]


def area(points: Sequence[tuple[int, float]], budget: int) -> float:
    """Mean accuracy along the budget: 1/B ∫_0^B accuracy(x) dx under the straight lines.

    >>> area([(0, 0.5), (100, 0.75), (300, 1.0)], 200)  # (0.625·100 + 0.8125·100) / 200
    0.71875
    """
    x = np.array([spent for spent, _ in points if spent < budget] + [budget], dtype=float)
    y = np.array(at(points, x.tolist()))
    return float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum()) / budget


@dataclass(frozen=True)
class Candidate:
    """One value of the setting over its seeds."""

    name: str
    seeds: tuple[int, ...]
    accuracy: Interval
    """At the end of the budget."""
    difference: Interval | None
    """To the baseline, paired by seed."""
    overlaps: bool | None
    """Whether the interval of the mean overlaps the baseline's."""
    area: Interval
    curve: tuple[Interval, ...]
    steps: float
    spent: float
    continuations: float
    """Share of the rollouts that were spent on values."""
    seconds: Interval
    seconds_per_rollout: float
    numbers: Mapping[str, Any]
    """An interval for each of the kind's readings, and `Kind.more`."""


@dataclass(frozen=True)
class Comparison:
    """Best mean first."""

    kind: Kind
    settings: Mapping[str, Any]
    budget: int
    grid: tuple[float, ...]
    lines: tuple[Candidate, ...]

    @property
    def baseline(self) -> Candidate | None:
        return next((line for line in self.lines if line.name == self.kind.baseline), None)


def compare(runs: Sequence[CandidateRun], kind: Kind) -> Comparison:
    """All runs must agree in everything but the kind's setting and the seed."""
    if not runs:
        raise CreditscopeError("there is no finished run to compare")
    first = runs[0]
    for run in runs[1:]:
        found = difference(run.settings, first.settings, kind.free | {kind.setting, "seed"})
        if found:
            raise CreditscopeError(f"{run.path} and {first.path} cannot be compared: {found}; take one of them out")
    budget = first.budget
    count = max(1, budget // (first.settings.get("eval_rollouts") or budget))
    grid = tuple(budget * k / count for k in range(count + 1))
    by_name: dict[str, list[CandidateRun]] = {}
    seen: dict[tuple[str, int], CandidateRun] = {}
    for run in runs:
        twin = seen.setdefault((run.name, run.seed), run)
        if twin is not run:
            raise CreditscopeError(f"{run.path} and {twin.path} are both seed {run.seed} of {run.name}, which would "
                                   f"count twice; take one of them out")
        by_name.setdefault(run.name, []).append(run)
    base = by_name.get(kind.baseline, [])
    lines = [_line(kind, own, [] if name == kind.baseline else base, grid) for name, own in by_name.items()]
    return Comparison(kind, first.settings, budget, grid, tuple(sorted(lines, key=lambda line: -line.accuracy.mean)))


def _line(kind: Kind, runs: Sequence[CandidateRun], base: Sequence[CandidateRun], grid: Sequence[float]) -> Candidate:
    curves = [at(run.points, grid) for run in runs]
    ends, against = ({run.seed: run.end for run in some} for some in (runs, base))
    accuracy = mean_interval(list(ends.values()))
    spent = sum(run.spent for run in runs)
    return Candidate(
        runs[0].name, tuple(sorted(run.seed for run in runs)), accuracy,
        difference=paired(ends, against),
        overlaps=overlap(accuracy, mean_interval(list(against.values()))) if against else None,
        area=mean_interval([area(run.points, run.budget) for run in runs]),
        curve=tuple(mean_interval(column) for column in zip(*curves, strict=True)),
        steps=sum(run.steps for run in runs) / len(runs), spent=spent / len(runs),
        continuations=1 - sum(run.sampled for run in runs) / spent,
        seconds=mean_interval([run.seconds for run in runs]),
        seconds_per_rollout=sum(run.seconds for run in runs) / spent,
        numbers={name: _over(run.readings.get(name) for run in runs) for name in kind.readings} | kind.more(runs, base))


def _over(values: Iterable[float | None]) -> Interval | None:
    found = [value for value in values if value is not None]
    return mean_interval(found) if found else None
