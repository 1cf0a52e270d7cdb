"""Shared by the tests of claims on runs: the runs that are compared, their mean, and the verdict on it. No torch.

The number of a group size R is a mean over runs. Fewer than three runs have no interval and decide nothing. Of two runs
that differ only in what was read, the one with more readings counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from creditscope.claims.evidence import ENOUGH, Evidence, Measured, cells, families, mean_of, over_runs
from creditscope.claims.verdict import Band, ClaimVerdict, Outcome, all_of
from creditscope.methods import find
from creditscope.methods.axes import OWN_CREDIT
from creditscope.runs.intervals import Interval, mean_interval

SWEEP = ("group", "rollouts", "steps")
"""Runs of one experiment may differ in these."""
READ = "runs that the microscope read: creditscope lab train --scope light --every 5"
SEEDS = f"{ENOUGH} seeds: creditscope lab train --seed 0, 1, 2"


def credit_of(run: Evidence) -> str:
    """The estimator of a run without its options."""
    return find.credit_of(run.config).split(",")[0]


def rule_of(run: Evidence) -> str:
    """The --adapt rule of a run without its options; runs before --adapt had none."""
    return str(run["adapt"] or "none").split(",")[0]


def fixed(runs: Sequence[Evidence]) -> list[Evidence]:
    """Runs with one R at every step and one update per batch, as P1's, on answers that were sampled: rewards of given
    pairs are labels. A run without R or seed is left out: files are untrusted."""
    return [run for run in runs if isinstance(run["group"], int) and isinstance(run["seed"], int)
            and run["pairs"] is None and rule_of(run) == "none"
            and all(run[name] in (None, 1) for name in ("inner_steps", "minibatches"))]


def with_outcome(runs: Sequence[Evidence]) -> list[Evidence]:
    """Runs as P1's: one R, and outcome credit."""
    return [run for run in fixed(runs) if credit_of(run) == OWN_CREDIT]


def sweeps(runs: Sequence[Evidence], count: Callable[[Evidence], int], over: Sequence[str] = SWEEP
           ) -> Iterator[list[Evidence]]:
    """The families of the runs whose count is not 0. Runs of a family with the same R and seed sampled the same
    rollouts: the one with the highest count is taken.
    """
    for family in families([run for run in runs if count(run)], over):
        best: dict[tuple[int, int], Evidence] = {}
        for run in family:
            twin = best.setdefault((run["group"], run["seed"]), run)
            if count(run) > count(twin):
                best[run["group"], run["seed"]] = run
        yield list(best.values())


def ratio_over_runs(by_run: Sequence[Sequence[tuple[float, ...]]]) -> Measured | None:
    """Σ top / Σ bottom over each run's groups (step, top, bottom), with its interval over runs; below three runs the
    mean over readings, without an interval.
    """
    known = [sorted(rows) for rows in by_run if rows]
    parts = [[rows] if len(known) >= ENOUGH else [list(part) for _, part in groupby(rows, key=lambda row: row[0])]
             for rows in known]
    return over_runs([[math.fsum(top for _, top, _ in rows) / bottom for rows in some
                       if (bottom := math.fsum(low for _, _, low in rows))] for some in parts])


def from_three(value: Interval) -> Interval:
    """An interval over runs or seeds, without its ends below three: two values that agree by chance would decide."""
    return value if value.n >= ENOUGH else Interval(value.mean, None, None, value.n)


def mean_over(unit: str, values: Sequence[float]) -> Measured:
    """The mean over runs, or seeds, that have one value each."""
    return Measured(from_three(mean_interval(values)), unit)


def estimate(definition: str, subject: str, found: Measured, band: Band, reason: str, *, outcome: Outcome | None = None,
             expected: str = "", threshold: str = "") -> ClaimVerdict:
    """The verdict on an estimate, by its band unless an outcome is given. If undecided, the reason says how many values
    would decide."""
    value, of = found
    outcome = band.judge(value) if outcome is None else outcome
    if outcome == "undecided":
        count = band.enough(value)
        if value.low is None:
            reason += f"; {value.n} {of} give no interval over runs, it needs {SEEDS}"
        elif count is not None and count > value.n:
            reason += f"; about {count} {of.split()[0]} would decide"
    return ClaimVerdict(definition=definition, subject=subject, outcome=outcome, reason=reason, observed=value.mean,
                   interval=value.ends, expected=expected or str(band), threshold=threshold or f"interval {band}",
                   n=value.n, of=of)


class BySize(dict[int, Measured]):
    """R -> a mean over the runs of that size."""

    def numbers(self, digits: int = 2) -> str:
        return ", ".join(f"{value.mean:.{digits}f}" for value, _ in self.values())

    def listed(self, digits: int = 2) -> str:
        return f"{self.numbers(digits)} at R = {', '.join(map(str, self))}"

    def verdict(self, definition: str, subject: str, bands: Mapping[int, Band], reason: str, *, expected: str,
                threshold: str, still: str = "") -> ClaimVerdict:
        """The verdict on a statement about every R: each mean lies in its band. The verdict shows the R that decided,
        the one farthest from the middle of its band. `still` is what is needed before the statement can hold.
        """
        outcomes = {size: bands[size].judge(value) for size, (value, _) in self.items()}
        whole = all_of(outcomes.values())
        picked = [size for size, outcome in outcomes.items() if outcome == whole]
        far = max(picked, key=lambda size: abs(self[size].value.mean - bands[size].middle))
        if whole == "holds" and still:
            whole, reason = "undecided", f"{reason}; it needs {still}"
        if len(self) > 1:
            reason += f" (shown: R = {far})"
        return estimate(definition, subject, self[far], bands[far], reason, outcome=whole, expected=expected,
                        threshold=threshold)


def by_size(runs: Sequence[Evidence], column: str) -> BySize:
    return BySize({size: value for size, cell in cells(runs, "group").items()
                   if (value := mean_of(cell, column)) is not None})
