"""Runs beside each other at an equal number of rollouts, read from their records alone. Imports no torch.

A run spends rollouts at its own pace: a step of Monte Carlo credit costs many times a step of outcome credit. So runs
are compared by what they have spent: accuracy is known at the evaluations, (rollouts spent until then, accuracy), and
is a straight line between them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from creditscope.catalogue import find
from creditscope.credit.choice import parse
from creditscope.errors import CreditscopeError
from creditscope.intervals import Interval, mean_interval, overlap, paired
from creditscope.record import Record

ENOUGH = 3
"""Seeds below which no estimator is said to beat another."""
BASELINE = "outcome"
"""Whom every estimator is compared with."""
OWN = frozenset({"credit", "seed"})
"""Settings in which compared runs differ."""
FREE = frozenset({"log", "checkpoint_every", "keep_every"})
"""Settings that change no result."""


@dataclass(frozen=True)
class Run:
    """A finished run in the numbers that are compared."""

    path: Path
    credit: str
    seed: int
    settings: Mapping[str, Any]
    points: tuple[tuple[int, float], ...]
    """(rollouts spent, accuracy) at each evaluation, in order."""
    steps: int
    spent: int
    sampled: int
    """Rollouts of the batches; the rest of `spent` are continuations that were sampled for values."""
    seconds: float
    """Wall time of the steps, without evaluations and without the microscope's readings."""
    effective_rank: float | None
    within: float | None
    dead_credit: float | None
    dead_signal: float | None

    @property
    def budget(self) -> int:
        return int(self.settings["rollouts"])


def is_finished(record: Record) -> bool:
    """A run that came to its end has a last line that is an evaluation alone."""
    steps = record.steps()
    return bool(steps) and "eval/accuracy" in steps[-1] and "rollouts/spent" not in steps[-1]


def read_run(record: Record) -> Run:
    """The numbers of a finished run. Evaluations stand on the line of the step that follows them."""
    config = _checked(record)
    if not config["rollouts"]:
        raise CreditscopeError(f"{record.path} had no budget, so it cannot be compared at equal rollouts; train it "
                               f"with --rollouts, or take it out of the folder")
    points, spent = [], 0
    lines = record.steps()
    for line in lines:
        if "eval/accuracy" in line:
            points.append((spent, float(line["eval/accuracy"])))
        spent += line.get("rollouts/spent", 0)
    trained = [line for line in lines if "rollouts/spent" in line]
    seconds = sum(line["time/step"] - line.get("time/eval", 0.0) - line.get("time/scope", 0.0) for line in trained)
    return Run(record.path, _estimator(config), config["seed"], config, tuple(points), len(trained),
               spent, sum(line["rollouts/sampled"] for line in trained), seconds,
               _mean(trained, "gram/group/effective_rank"), _mean(trained, "credit/within"),
               _mean(trained, "credit/dead_groups"), _mean(trained, "signal/dead_groups"))


SETTINGS = {"seed": int, "rollouts": int, "group": int, "prompts": int, "eval_problems": int, "lr": float, "model": str,
            "task": str, "method": str}
"""What a page is made of, and its kind."""


def _checked(record: Record) -> dict[str, Any]:
    """The run's settings. A folder may come from anybody: what is not as `train` writes it is refused, not shown."""
    config = {"rollouts": 0} | record.config
    for name, kind in SETTINGS.items():
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float if kind is float else kind):
            raise CreditscopeError(f"{record.path}/run.json: {name} is {value!r:.60}, not a {kind.__name__}; is this a "
                                   f"run of creditscope train?")
    _estimator(config)
    return config


def _estimator(config: dict[str, Any]) -> str:
    """The estimator of a run, by the rule of `Config.estimator`; a name that could not be one is refused."""
    credit = str(config.get("credit") or ("gae" if find(config["method"]).baseline == "external" else BASELINE))
    parse(credit)
    return credit


def read_folder(out: Path) -> tuple[list[Run], list[Path]]:
    """(finished runs, folders of unfinished ones) under out/NAME/seed-S."""
    runs, unfinished = [], []
    for found in sorted(out.glob("*/seed-*/run.json")):
        record = Record.open(found.parent)
        if is_finished(record):
            runs.append(read_run(record))
        else:
            unfinished.append(found.parent)
    return runs, unfinished


@dataclass(frozen=True)
class Glance:
    """How far a run is."""

    steps: int = 0
    spent: int = 0
    accuracy: float | None = None
    """At its latest evaluation."""


def glance(path: Path) -> Glance:
    """How far the run in a folder is, also while it is written; nothing yet where there is no record."""
    try:
        lines = Record.open(path).steps()
    except CreditscopeError:
        return Glance()
    seen = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    trained = [line["rollouts/spent"] for line in lines if "rollouts/spent" in line]
    return Glance(len(trained), sum(trained), seen[-1] if seen else None)


def difference(old: Mapping[str, Any], new: Mapping[str, Any], apart: frozenset[str] = FREE) -> str | None:
    """The first setting in which two runs differ, in words, or None. A setting that one does not know is no difference.

    >>> difference({"lr": 0.1, "log": []}, {"lr": 0.2, "log": ["wandb"]})
    'lr is 0.1, not 0.2'
    """
    for key in sorted((old.keys() & new.keys()) - apart):
        if old[key] != new[key]:
            return f"{key} is {old[key]!r}, not {new[key]!r}"
    return None


def at(points: Sequence[tuple[int, float]], rollouts: Sequence[float]) -> list[float]:
    """Accuracy once so many rollouts were spent: a straight line between two evaluations, nothing beyond the last.

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
class Line:
    """One estimator over its seeds. What does not exist is None."""

    credit: str
    seeds: tuple[int, ...]
    accuracy: Interval
    """At the end of the budget."""
    difference: Interval | None
    """To the baseline, paired by seed."""
    overlaps: bool | None
    """Whether the interval of the mean meets the baseline's."""
    area: Interval
    curve: tuple[Interval, ...]
    """On the comparison's grid."""
    steps: float
    spent: float
    continuations: float
    """Share of the rollouts that were spent on values."""
    seconds: Interval
    """Per run."""
    seconds_per_rollout: float
    effective_rank: Interval | None
    within: Interval | None
    dead_credit: Interval | None
    dead_signal: Interval | None


@dataclass(frozen=True)
class Comparison:
    """Estimators at an equal number of rollouts, best mean first."""

    settings: Mapping[str, Any]
    budget: int
    grid: tuple[float, ...]
    lines: tuple[Line, ...]

    @property
    def baseline(self) -> Line | None:
        return next((line for line in self.lines if line.credit == BASELINE), None)


def compare(runs: Sequence[Run]) -> Comparison:
    """The numbers of a table and a figure. All runs must agree in everything but credit and seed."""
    if not runs:
        raise CreditscopeError("there is no finished run to compare")
    first = runs[0]
    for run in runs[1:]:
        found = difference(run.settings, first.settings, FREE | OWN)
        if found:
            raise CreditscopeError(f"{run.path} and {first.path} cannot be compared: {found}; take one of them out")
    budget = first.budget
    count = max(1, budget // (first.settings.get("eval_rollouts") or budget))
    grid = tuple(budget * k / count for k in range(count + 1))
    by_credit: dict[str, list[Run]] = {}
    for run in runs:
        by_credit.setdefault(run.credit, []).append(run)
    ends = {credit: {run.seed: at(run.points, [budget])[0] for run in own} for credit, own in by_credit.items()}
    lines = [_line(credit, own, ends, grid) for credit, own in by_credit.items()]
    return Comparison(first.settings, budget, grid, tuple(sorted(lines, key=lambda line: -line.accuracy.mean)))


def _line(credit: str, runs: Sequence[Run], ends: Mapping[str, Mapping[int, float]], grid: Sequence[float]) -> Line:
    budget = runs[0].budget
    curves = [at(run.points, grid) for run in runs]
    accuracy = mean_interval(list(ends[credit].values()))
    against = ends.get(BASELINE) if credit != BASELINE else None
    spent = sum(run.spent for run in runs)
    return Line(
        credit, tuple(sorted(run.seed for run in runs)), accuracy,
        difference=paired(ends[credit], against) if against else None,
        overlaps=overlap(accuracy, mean_interval(list(against.values()))) if against else None,
        area=mean_interval([area(run.points, budget) for run in runs]),
        curve=tuple(mean_interval(column) for column in zip(*curves, strict=True)),
        steps=sum(run.steps for run in runs) / len(runs), spent=spent / len(runs),
        continuations=1 - sum(run.sampled for run in runs) / spent,
        seconds=mean_interval([run.seconds for run in runs]),
        seconds_per_rollout=sum(run.seconds for run in runs) / spent,
        effective_rank=_over(run.effective_rank for run in runs), within=_over(run.within for run in runs),
        dead_credit=_over(run.dead_credit for run in runs), dead_signal=_over(run.dead_signal for run in runs))


def verdicts(found: Comparison) -> list[str]:
    """What the numbers say, by rule. An estimator beats the baseline where its interval lies wholly above.

    Two seeds that agree by chance have an interval of no width: with fewer than three nothing is decided.
    """
    base, where = found.baseline, f"at {found.budget:,} rollouts"
    if base is None:
        return [f"{BASELINE} was not run, so nothing is compared with it; name it too"]
    others = [line for line in found.lines if line is not base]
    if not others:
        return [f"{BASELINE} alone: {percent(base.accuracy)} {where}; name another estimator to compare it with"]
    decided = [line for line in others if line.overlaps is not None]
    fewest = min(len(line.seeds) for line in found.lines)
    if not decided or fewest < ENOUGH:
        return [f"undecided: {fewest} seed{'s' * (fewest > 1)} of an estimator cannot tell luck from credit; give "
                f"--seeds {ENOUGH} or more"]
    apart = [line for line in decided if line.overlaps is False]
    above = [line for line in apart if line.accuracy.mean > base.accuracy.mean]
    out = [f"{line.credit} beats {BASELINE} {where}: {percent(line.accuracy)} against {percent(base.accuracy)}; "
           f"intervals do not overlap" for line in above]
    if not above:
        best = decided[0]
        out.append(f"no estimator's interval lies above {BASELINE}'s {where}: the best of the others is {best.credit}, "
                   f"{percent(best.accuracy)} against {percent(base.accuracy)}")
    out += [f"{line.credit} is below {BASELINE} {where}: {percent(line.accuracy)} against {percent(base.accuracy)}; "
            f"intervals do not overlap" for line in apart if line not in above]
    for line in decided:
        gap = line.difference
        if line.overlaps and gap is not None and gap.excludes_zero:
            out.append(f"{line.credit}: the intervals of the means overlap, but paired by seed it is "
                       f"{'above' if gap.mean > 0 else 'below'} {BASELINE} by {in_points(gap)} points")
    return out


def command(found: Comparison) -> str:
    """The command that makes these runs, from their own settings."""
    seeds = sorted({seed for line in found.lines for seed in line.seeds})
    flags = {"seeds": seeds[-1] - seeds[0] + 1, "first-seed": seeds[0], "rollouts": found.budget,
             "points": len(found.grid) - 1}
    flags |= {name.replace("_", "-"): found.settings[name] for name in
              ("group", "prompts", "lr", "method", "model", "task", "eval_problems", "scope", "every")}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return shlex.join(["creditscope", "compare", "credit", *(line.credit for line in found.lines), *words])


def percent(value: Interval) -> str:
    """A share with its interval.

    >>> percent(Interval(0.712, 0.69, 0.734, 5)), percent(Interval(0.5, None, None, 1))
    ('71.2 % [69.0, 73.4]', '50.0 %')
    """
    ends = "" if value.low is None or value.high is None else f" [{100 * value.low:.1f}, {100 * value.high:.1f}]"
    return f"{100 * value.mean:.1f} %{ends}"


def in_points(value: Interval) -> str:
    """A difference of shares in percentage points, with its interval.

    >>> in_points(Interval(0.082, 0.05, 0.114, 5))
    '+8.2 [+5.0, +11.4]'
    """
    ends = "" if value.low is None or value.high is None else f" [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"
    return f"{100 * value.mean:+.1f}{ends}"


def _mean(lines: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Over the steps that have the reading."""
    found = [float(line[name]) for line in lines if name in line]
    return sum(found) / len(found) if found else None


def _over(values: Iterable[float | None]) -> Interval | None:
    """Over the runs that have the number."""
    found = [value for value in values if value is not None]
    return mean_interval(found) if found else None
