"""Runs beside each other at an equal number of rollouts, read from their records alone. Imports no torch.

A run spends rollouts at its own pace: a step of Monte Carlo credit costs many times a step of outcome credit. So runs
are compared by what they have spent: accuracy is known at the evaluations, (rollouts spent until then, accuracy), and
is a straight line between them. What differs between the runs, credit or brake, is a row of `KINDS`.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from creditscope.credit.table import parse
from creditscope.errors import CreditscopeError
from creditscope.methods.find import find
from creditscope.optimizer.table import BRAKES, parse_brake
from creditscope.runs.intervals import Interval, mean_interval, overlap, paired
from creditscope.runs.record import Record

ENOUGH = 3
"""Seeds below which nothing is said to be better than another."""
MEASURES = ("distance", "overshoot")
"""What a brake is to cut: nats past the bound, mean of the tokens past it, and mean of all bounded tokens."""
HALF = -0.5
"""The relative change below which an interval must lie, for a brake to cut at least by half."""
FREE = frozenset({"log", "checkpoint_every", "keep_every", "keep_most"})
"""Settings that change no result."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What differs between compared runs: how they are named, trained, read and judged."""

    setting: str
    """Of `train`; the runs differ in it and in the seed, and in nothing else."""
    noun: str
    luck: str
    """What two seeds cannot tell from luck."""
    default: tuple[str, ...]
    """Names to compare where none are given."""
    baseline: str
    """Whom every other one is compared with."""
    name: Callable[[Mapping[str, Any]], str]
    """A run's, by its settings; one that could not be is refused."""
    readings: Mapping[str, str]
    """A number of a run -> the metric whose mean over the run's steps it is."""
    more: Callable[[Sequence[Run], Sequence[Run]], dict[str, Any]]
    """(runs of one name, runs of the baseline) -> numbers of a line besides the means of its readings."""
    judge: Callable[[Comparison, Line, Sequence[Line]], list[str]]
    """(comparison, baseline, the others) -> what the numbers say, where there are enough seeds."""
    inner_steps: int
    scope: str
    probe: Mapping[str, Any]
    """Settings of the probe that the runs are trained with."""
    free: frozenset[str] = FREE
    """Settings that change no number of the page."""
    out: str
    """Where the runs go, unless told."""

    @property
    def one(self) -> str:
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"


@dataclass(frozen=True)
class Run:
    """A finished run in the numbers that are compared."""

    path: Path
    name: str
    seed: int
    settings: Mapping[str, Any]
    points: tuple[tuple[int, float], ...]
    """(rollouts spent, accuracy) at each evaluation, in order."""
    steps: int
    spent: int
    sampled: int
    """Rollouts of the batches; the rest of `spent` are continuations that were sampled for values."""
    seconds: float
    """Wall time of the steps, without evaluations and without the readings of microscope and probe."""
    readings: Mapping[str, float]
    """Means over the steps that have the metric; what no step has is absent."""

    @property
    def budget(self) -> int:
        return int(self.settings["rollouts"])

    @property
    def end(self) -> float:
        """Accuracy at the end of the budget."""
        return at(self.points, [self.budget])[0]


def is_finished(steps: Sequence[Mapping[str, Any]]) -> bool:
    """A run that came to its end has a last line that is an evaluation alone."""
    return bool(steps) and "eval/accuracy" in steps[-1] and "rollouts/spent" not in steps[-1]


def read_run(record: Record, kind: Kind) -> Run:
    """The numbers of a finished run."""
    return run_of(record.path, record.config, record.steps(), kind)


def run_of(path: Path, config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], kind: Kind) -> Run:
    """The numbers of a finished run by its settings and steps, wherever they were kept. Evaluations stand on the line
    of the step that follows them."""
    config = _checked(path, config)
    if not config["rollouts"]:
        raise CreditscopeError(f"{path} had no budget, so it cannot be compared at equal rollouts; train it "
                               f"with --rollouts, or take it out of the folder")
    points, spent = [], 0
    for line in lines:
        if "eval/accuracy" in line:
            points.append((spent, float(line["eval/accuracy"])))
        spent += int(line.get("rollouts/spent", 0))
    trained = [line for line in lines if "rollouts/spent" in line]
    seconds = sum(line["time/step"] - sum(line.get(f"time/{part}", 0.0) for part in ("eval", "scope", "probe"))
                  for line in trained)
    means = {name: _mean(trained, metric) for name, metric in kind.readings.items()}
    return Run(path, kind.name(config), config["seed"], config, tuple(points), len(trained), spent,
               int(sum(line["rollouts/sampled"] for line in trained)), seconds,
               {name: mean for name, mean in means.items() if mean is not None})


SETTINGS = {"seed": int, "rollouts": int, "group": int, "prompts": int, "inner_steps": int, "eval_problems": int,
            "lr": float, "model": str, "task": str, "method": str}
"""What a page is made of, and its kind."""


def _checked(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The run's settings. A folder may come from anybody: what is not as `train` writes it is refused, not shown."""
    config = {"rollouts": 0} | dict(settings)
    for name, kind in SETTINGS.items():
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float if kind is float else kind):
            raise CreditscopeError(f"{path}: {name} is {value!r:.60}, not a {kind.__name__}; is this a "
                                   f"run of creditscope train?")
    return config


def estimator_of(config: Mapping[str, Any]) -> str:
    """The estimator of a run, by the rule of `Config.estimator`; a name that could not be one is refused."""
    credit = str(config.get("credit") or ("gae" if find(config["method"]).baseline == "external" else "outcome"))
    parse(credit)
    return credit


def brake_of(config: Mapping[str, Any]) -> str:
    """The brake of a run; runs that are older than brakes had none. A name that could not be one is refused."""
    brake = str(config.get("brake", "none"))
    parse_brake(brake)
    return brake


def read_folder(out: Path, kind: Kind) -> tuple[list[Run], list[Path]]:
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
        # A record keeps a tuple as a list.
        before, now = (list(x) if isinstance(x, tuple) else x for x in (old[key], new[key]))
        if before != now:
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


def relative_change(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """The interval of ours/theirs − 1 over the seeds that both have; where theirs is 0 there is no ratio.

    >>> relative_change({0: 0.25, 1: 0.75, 2: 1.0}, {0: 0.5, 1: 1.0, 3: 1.0}).mean  # (0.5 + 0.75)/2 − 1
    -0.375
    """
    seeds = sorted(seed for seed in ours.keys() & theirs.keys() if theirs[seed])
    return mean_interval([ours[seed] / theirs[seed] - 1 for seed in seeds]) if seeds else None


@dataclass(frozen=True)
class Line:
    """One estimator, or one brake, over its seeds. What does not exist is None."""

    name: str
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
    numbers: Mapping[str, Any]
    """What is read of this kind alone: an interval for each of its readings, and `Kind.more`."""


@dataclass(frozen=True)
class Comparison:
    """Estimators, or brakes, at an equal number of rollouts, best mean first."""

    kind: Kind
    settings: Mapping[str, Any]
    budget: int
    grid: tuple[float, ...]
    lines: tuple[Line, ...]

    @property
    def baseline(self) -> Line | None:
        return next((line for line in self.lines if line.name == self.kind.baseline), None)


def compare(runs: Sequence[Run], kind: Kind) -> Comparison:
    """The numbers of a table and a figure. All runs must agree in everything but the kind's setting and the seed."""
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
    by_name: dict[str, list[Run]] = {}
    seen: dict[tuple[str, int], Run] = {}
    for run in runs:
        twin = seen.setdefault((run.name, run.seed), run)
        if twin is not run:
            raise CreditscopeError(f"{run.path} and {twin.path} are both seed {run.seed} of {run.name}, which would "
                                   f"count twice; take one of them out")
        by_name.setdefault(run.name, []).append(run)
    base = by_name.get(kind.baseline, [])
    lines = [_line(kind, own, [] if name == kind.baseline else base, grid) for name, own in by_name.items()]
    return Comparison(kind, first.settings, budget, grid, tuple(sorted(lines, key=lambda line: -line.accuracy.mean)))


def _line(kind: Kind, runs: Sequence[Run], base: Sequence[Run], grid: Sequence[float]) -> Line:
    """The runs of one name beside those of the baseline, of which there are none where it was not run, or is this."""
    curves = [at(run.points, grid) for run in runs]
    ends, against = ({run.seed: run.end for run in some} for some in (runs, base))
    accuracy = mean_interval(list(ends.values()))
    spent = sum(run.spent for run in runs)
    return Line(
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


def held(runs: Sequence[Run], base: Sequence[Run]) -> dict[str, Any]:
    """How a brake changes the overshoot, paired by seed, and how far apart its seeds end: std (n − 1) and the worst."""
    def by_seed(some: Sequence[Run], name: str) -> dict[int, float]:
        return {run.seed: run.readings[name] for run in some if name in run.readings}

    ends = [run.end for run in runs]
    changes = {name: relative_change(by_seed(runs, name), by_seed(base, name)) for name in MEASURES}
    return {f"{name}_change": change for name, change in changes.items()} | {
        "spread": statistics.stdev(ends) if len(ends) > 1 else None, "worst": min(ends)}


def verdicts(found: Comparison) -> list[str]:
    """What the numbers say, by rule.

    Two seeds that agree by chance have an interval of no width: with fewer than three nothing is decided.
    """
    kind, base = found.kind, found.baseline
    if base is None:
        return [f"{kind.baseline} was not run, so nothing is compared with it; name it too"]
    others = [line for line in found.lines if line is not base]
    if not others:
        return [f"{base.name} alone: {percent(base.accuracy)} {_where(found)}; name another {kind.noun} to compare it "
                f"with"]
    decided = [line for line in others if line.overlaps is not None]
    fewest = min(len(line.seeds) for line in found.lines)
    if not decided or fewest < ENOUGH:
        return [f"undecided: {fewest} seed{'s' * (fewest > 1)} of {kind.one} cannot tell luck from {kind.luck}; give "
                f"--seeds {ENOUGH} or more"]
    return kind.judge(found, base, decided)


def judge_estimators(found: Comparison, base: Line, others: Sequence[Line]) -> list[str]:
    """An estimator beats the baseline where its interval lies wholly above."""
    where = _where(found)
    apart = [line for line in others if line.overlaps is False]
    above = [line for line in apart if line.accuracy.mean > base.accuracy.mean]
    out = [f"{line.name} beats {base.name} {where}: {percent(line.accuracy)} against {percent(base.accuracy)}; "
           f"intervals do not overlap" for line in above]
    if not above:
        best = others[0]
        out.append(f"no estimator's interval lies above {base.name}'s {where}: the best of the others is {best.name}, "
                   f"{percent(best.accuracy)} against {percent(base.accuracy)}")
    out += [f"{line.name} is below {base.name} {where}: {percent(line.accuracy)} against {percent(base.accuracy)}; "
            f"intervals do not overlap" for line in apart if line not in above]
    for line in others:
        gap = line.difference
        if line.overlaps and gap is not None and gap.excludes_zero:
            out.append(f"{line.name}: the intervals of the means overlap, but paired by seed it is "
                       f"{'above' if gap.mean > 0 else 'below'} {base.name} by {in_points(gap)} points")
    return out


def judge_brakes(found: Comparison, base: Line, others: Sequence[Line]) -> list[str]:
    """A brake cuts at least by half where the interval of the relative change, paired by seed, lies below −50 %.

    Accuracy is lost where the interval of the paired difference lies below 0, and within intervals where it holds 0.
    """
    out = []
    changes = {line.name: _changes(line) for line in others}
    for line in others:
        gap, own = line.difference, changes[line.name]
        if gap is None or gap.n < ENOUGH:
            out.append(f"{line.name} shares fewer than {ENOUGH} seeds with {base.name}, so the two are not compared")
            continue
        accuracy = "within intervals" if not gap.excludes_zero else "gained" if gap.mean > 0 else "lost"
        halved = [measure for measure, change in own.items() if _halves(change)]
        if halved:
            numbers = ", ".join(f"{measure} {in_percent(change)}" for measure, change in own.items())
            out.append(f"{line.name} cuts the {' and the '.join(halved)} past the bound at least by half: {numbers}; "
                       f"accuracy {accuracy}: {in_points(gap)} points")
        elif gap.excludes_zero:
            out.append(f"{line.name}: accuracy {accuracy} {_where(found)}: {percent(line.accuracy)} against "
                       f"{percent(base.accuracy)}, paired by seed {in_points(gap)} points")
    for measure in MEASURES:
        known = {name: own[measure] for name, own in changes.items() if measure in own}
        if known and not any(map(_halves, known.values())):
            nearest = min(known, key=lambda name: known[name].mean)
            out.append(f"no brake is known to cut the {measure} past the bound by half: nearest comes {nearest}, "
                       f"{in_percent(known[nearest])}")
    if base.numbers["past"] is None:
        out.append("overshoot was not read in these runs; train with --probe light --probe-every 1")
    elif not any(changes.values()):
        out.append(f"overshoot is not judged: in fewer than {ENOUGH} shared seeds a token of {base.name} went past its "
                   f"bound; give more seeds, or raise --inner-steps or --lr")
    return out


def _changes(line: Line) -> dict[str, Interval]:
    """The relative changes that enough seeds speak for."""
    found = {measure: line.numbers[f"{measure}_change"] for measure in MEASURES}
    return {measure: change for measure, change in found.items() if change is not None and change.n >= ENOUGH}


def _halves(change: Interval) -> bool:
    return change.high is not None and change.high < HALF


def _where(found: Comparison) -> str:
    return f"at {found.budget:,} rollouts"


def command(found: Comparison) -> str:
    """The command that makes these runs, from their own settings."""
    seeds = sorted({seed for line in found.lines for seed in line.seeds})
    flags = {"seeds": seeds[-1] - seeds[0] + 1, "first-seed": seeds[0], "rollouts": found.budget,
             "points": len(found.grid) - 1}
    flags |= {name.replace("_", "-"): found.settings[name] for name in
              ("group", "prompts", "lr", "method", "model", "task", "eval_problems", "scope", "every")}
    if found.settings["inner_steps"] != found.kind.inner_steps:
        flags["inner-steps"] = found.settings["inner_steps"]
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return shlex.join(["creditscope", "compare", found.kind.setting, *(line.name for line in found.lines), *words])


def as_dict(line: Line, kind: Kind) -> dict[str, Any]:
    """A line for a program: its name stands under the setting, the kind's own numbers among the others."""
    found = asdict(line)
    name, numbers = found.pop("name"), found.pop("numbers")
    return {kind.setting: name, **found, **numbers}


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


def in_percent(value: Interval) -> str:
    """A relative change with its interval.

    >>> in_percent(Interval(-0.68, -0.74, -0.61, 5))
    '-68 % [-74, -61]'
    """
    ends = "" if value.low is None or value.high is None else f" [{100 * value.low:+.0f}, {100 * value.high:+.0f}]"
    return f"{100 * value.mean:+.0f} %{ends}"


def _mean(lines: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Over the steps that have the reading."""
    found = [float(line[name]) for line in lines if name in line]
    return sum(found) / len(found) if found else None


def _over(values: Iterable[float | None]) -> Interval | None:
    """Over the runs that have the number."""
    found = [value for value in values if value is not None]
    return mean_interval(found) if found else None


KINDS: Mapping[str, Kind] = MappingProxyType({kind.setting: kind for kind in (
    Kind(
        setting="credit", noun="estimator", luck="credit", baseline="outcome", name=estimator_of,
        default=("outcome", "optimal_scalar", "optimal_sequence", "optimal_token", "step_reward", "prefix_tree", "gae",
                 "entropy_mask", "salt", "monte_carlo"),
        readings={"effective_rank": "gram/group/effective_rank", "within": "credit/within",
                  "dead_credit": "credit/dead_groups", "dead_signal": "signal/dead_groups"},
        more=lambda runs, base: {}, judge=judge_estimators,
        inner_steps=1, scope="light", probe={"probe": "off"}, free=FREE | {"probe", "probe_every"}, out="runs/compare"),
    Kind(
        setting="brake", noun="brake", luck="what it does", baseline="none", name=brake_of, default=tuple(BRAKES),
        readings={"past": "overshoot/past", "distance": "overshoot/distance", "overshoot": "optimizer/overshoot",
                  "after": "overshoot/after", "kl": "overshoot/kl", "updates": "optimizer/updates",
                  "train": "time/train"},
        more=held, judge=judge_brakes,
        # Every batch is read after its last update.
        inner_steps=4, scope="off", probe={"probe": "light", "probe_every": 1}, out="runs/brakes"),
)})
