"""A learned reward that is optimised too far: the verifier's reward and the learned one over the KL to the reference.

    python benchmarks/learned_reward.py NAME RUN ... --out results/learned-reward     runs of one setting, several seeds

Writes NAME.json (four numbers per step of each run) and NAME.svg there, and prints the table of docs/results.md. A
window is a fifth of a run's steps; its mean over the steps is one value per run, and the interval is over the runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from creditscope.files.writing import write_file
from creditscope.runs import schema
from creditscope.runs.figures import curves_svg
from creditscope.runs.intervals import Interval, mean_interval
from creditscope.runs.record import Record

COLUMNS = {"kl": schema.POLICY_REFERENCE_KL, "learned": schema.REWARD_MEAN, "gold": schema.REWARD_GOLD_MEAN,
           "correlation": schema.REWARD_GOLD_CORRELATION}
WINDOWS = 5

Run = list[dict[str, float | None]]


def steps_of(folder: Path) -> Run:
    """The four numbers of each step; None where a correlation does not exist."""
    lines = [line for line in Record.open(folder).steps() if schema.REWARD_GOLD_MEAN in line]
    return [{name: round(line[key], 6) if key in line else None for name, key in COLUMNS.items()} for line in lines]


def window(run: Run, at: int, name: str) -> float:
    """Mean of a number over the at-th fifth of a run."""
    part = run[at * len(run) // WINDOWS:(at + 1) * len(run) // WINDOWS]
    return fmean(value for step in part if (value := step[name]) is not None)


def over_runs(runs: Sequence[Run], name: str) -> list[Interval]:
    return [mean_interval([window(run, at, name) for run in runs]) for at in range(WINDOWS)]


def told(value: Interval) -> str:
    return f"{value.mean:.2f}" + (f" [{value.low:.2f}, {value.high:.2f}]" if value.ends else "")


def main() -> None:
    given = argparse.ArgumentParser(description="Learned and gold reward over the KL to the reference.")
    given.add_argument("name")
    given.add_argument("runs", nargs="+", type=Path)
    given.add_argument("--out", type=Path, required=True)
    args = given.parse_args()
    runs = [steps_of(folder) for folder in args.runs]
    found = {name: over_runs(runs, name) for name in COLUMNS}
    write_file(args.out / f"{args.name}.json", json.dumps({folder.name: run for folder, run in zip(args.runs, runs,
                                                                                                strict=True)}) + "\n")
    curves = {name: [(kl.mean, value) for kl, value in zip(found["kl"], found[key], strict=True)]
              for name, key in (("learned reward", "learned"), ("verifier's reward", "gold"))}
    along = "KL to the reference, nats per answer"
    write_file(args.out / f"{args.name}.svg", curves_svg(curves, "reward", along=along))
    print(f"| steps | {along} | learned reward | verifier's reward | correlation inside groups |")
    print("|---|---|---|---|---|")
    for at in range(WINDOWS):
        first, last = (len(runs[0]) * (at + side) // WINDOWS for side in (0, 1))
        print(f"| {first}–{last - 1} | " + " | ".join(told(found[name][at]) for name in COLUMNS) + " |")


if __name__ == "__main__":
    main()
