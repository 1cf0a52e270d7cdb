"""`creditscope lab demo`: train the packaged model with R = 2, 4, 8 from the same start, compare, report."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from creditscope.cli.output import Output
from creditscope.cli.processes import cores
from creditscope.cli.sweep import LOCK, check_sweep, is_done, run_all
from creditscope.errors import CreditscopeError, command_line, printable
from creditscope.files.writing import lock_folder, write_file
from creditscope.report.build import build
from creditscope.runs import schema
from creditscope.runs.compare import difference
from creditscope.runs.config import Config
from creditscope.runs.numbers import mean_over
from creditscope.runs.record import Record


@dataclass(frozen=True)
class Demo:
    """Train a small language model by GRPO on this machine: R = 2, 4 and 8 from the same start.

    Writes two pages: the three runs side by side, and R = 8 in full, down to the credit of every token. After Ctrl-C
    the same command continues.

    For example:
      creditscope lab demo
      creditscope lab demo --steps 20 --out runs/first    # quicker
    """

    steps: int = 50
    """Steps of each run."""
    seed: int = 0
    """Seed of the runs."""
    out: Path | None = None
    """Where the runs go; by default the first of runs/demo, runs/demo-2, ... without a finished demo or one with other
    settings."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        out = self.out or next(path for path in _places() if _usable(path) and self.goes_on(path))
        if not _usable(out):
            raise CreditscopeError(f"{out} is not empty; choose another --out")
        check_sweep(out, steps=self.steps)
        start = time.perf_counter()
        failed = run_all(out, {f"r{group}": self.config(group) for group in GROUPS}, cores(), self.output, is_done,
                         lambda todo: None)
        if failed is None:
            return 130
        if failed:
            name, why = next(iter(failed.items()))
            raise CreditscopeError(f"{out / name} failed: {printable(why)} (all it said: {out / name}.log)")
        lines = [summary(out / f"r{group}") for group in sorted(GROUPS)]
        reports = {"side by side": out / PAGE, "R = 8 in full": out / "r8" / PAGE}
        for path in reports.values():
            write_file(path, build([path.parent]))
        if self.output.json:
            self.output.emit({"out": str(out), "runs": lines, "reports": [str(path) for path in reports.values()],
                              "seconds": time.perf_counter() - start})
            return 0
        console, rows = self.output.console(), []
        for line in lines:
            before, after = line["before"], line["after"]
            ranks = (line[name] for name in ("effective_rank", "null", "effective_rank_truncated_2"))
            rows.append([str(line["group"]), f"{line['rollouts']:,}", _accuracy(*before), _accuracy(*after),
                         f"{after[0] - before[0]:+.1%}", f"{line['reward']:.2f}", f"{line['dead_groups']:.0%}",
                         *("" if rank is None else f"{rank:.1f}" for rank in ranks), f"{line['seconds']:.0f} s"])
        console.print_columns(("R", "rollouts", "test before", "test after", "gain", "reward", "dead", "rank", "null",
                               "cut to 2", "time"), rows, left=())
        console.print(LEGEND)
        console.print(f"wrote {out}/r2, r4, r8 in {time.perf_counter() - start:.0f} s", markup=False)
        for what, path in reports.items():
            console.print(f"open {path}: {what}", markup=False)
        console.next(command_line("report", out / "r8", "--open"), "creditscope list methods")
        return 0

    def goes_on(self, path: Path) -> bool:
        """Whether the stopped runs that are there have the settings of this demo, and nobody is writing them."""
        there = {group: path / f"r{group}" for group in GROUPS if (path / f"r{group}" / "run.json").exists()}
        try:
            if path.is_dir():
                lock_folder(path, LOCK).release()
            return not any(difference(Record.open(run).config, asdict(self.config(group)))
                           for group, run in there.items())
        except CreditscopeError:  # another process's, or damaged
            return False

    def config(self, group: int) -> Config:
        return Config(group=group, steps=self.steps, seed=self.seed, eval_problems=PROBLEMS, lr=LR, scope="light",
                      every=READ_EVERY, probe_every=10)


LEGEND = """\
test: share of 1,000 unseen problems solved by one sample at temperature 1, 95 % interval.
reward and dead groups: mean of the last 10 steps.
rank: effective rank (Σσ)²/Σσ² of a group's R rollout gradients over all parameters, mean over live groups and readings.
null: the same for orthogonal scores of equal norm with the same w. cut to 2: the rank that an SVD truncated to
two values prints; arXiv:2606.29238 reports a rank of about 2 for every R."""

GROUPS = (8, 4, 2)
"""R of the runs, the longest first: each is a process with one thread, as many at once as there are CPUs."""
PAGE = "report.html"
READ_EVERY = 4
"""Steps between readings of the microscope; a reading of every step would be a sixth of the time."""
PROBLEMS = 1000
"""Test problems of each evaluation."""
LR = 1e-4
"""The packaged model learns fastest here: 3e-4 breaks it within 60 steps (recipes/README.md)."""


def _places() -> Iterator[Path]:
    return (Path("runs") / f"demo{'' if number == 1 else f'-{number}'}" for number in itertools.count(1))


def _usable(path: Path) -> bool:
    """Whether nothing is there but runs of a demo that was stopped, which the same command continues."""
    own = {f"r{group}{end}" for group in GROUPS for end in ("", ".log")} | {LOCK}
    return not path.is_dir() or all(each.name in own for each in path.iterdir())


def summary(path: Path) -> dict[str, Any]:
    """A finished run in a few numbers, read from its record."""
    record = Record.open(path)
    steps = record.steps()
    trained = [s for s in steps if schema.REWARD_MEAN in s]
    before, after = steps[0], steps[-1]
    tail = trained[-10:]
    return {"group": record.config["group"], "steps": len(trained),
            "rollouts": sum(s[schema.ROLLOUTS_SAMPLED] for s in trained),
            "before": [before[f"eval/{k}"] for k in ("accuracy", "low", "high")],
            "after": [after[f"eval/{k}"] for k in ("accuracy", "low", "high")],
            "reward": mean_over(tail, schema.REWARD_MEAN),
            "dead_groups": mean_over(tail, schema.SIGNAL_DEAD_GROUPS),
            "effective_rank": mean_over(trained, schema.GRAM_GROUP_EFFECTIVE_RANK),
            "effective_rank_truncated_2": mean_over(trained, schema.GRAM_GROUP_EFFECTIVE_RANK_TRUNCATED_2),
            "null": mean_over(trained, schema.GRAM_GROUP_W_NULL),
            "scope_ratio": trained[-1].get(schema.SCOPE_RATIO),
            "seconds": sum(s[schema.TIME_STEP] for s in trained), "path": str(path)}


def _accuracy(share: float, low: float, high: float) -> str:
    return f"{share:.1%} [{100 * low:.0f}, {100 * high:.0f}]"
