"""`creditscope lab demo`: train the packaged model with R = 2, 4, 8 from the same start, compare, report."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from creditscope.cli.output import Output
from creditscope.cli.train import run_training
from creditscope.errors import CreditscopeError, command_line, require_module
from creditscope.files.writing import write_file
from creditscope.report.build import build
from creditscope.runs import schema
from creditscope.runs.config import Config
from creditscope.runs.numbers import mean_over
from creditscope.runs.record import Record


@dataclass(frozen=True)
class Demo:
    """Train a small language model by GRPO on this machine: R = 2, 4 and 8 from the same start.

    Writes two pages: the three runs side by side, and R = 8 in full, down to the credit of every token.

    For example:
      creditscope lab demo
      creditscope lab demo --steps 20 --out runs/first    # quicker
    """

    steps: int = 60
    """Steps of each run."""
    seed: int = 0
    """Seed of the runs."""
    out: Path | None = None
    """Where the runs go; by default the first free one of runs/demo, runs/demo-2, ..."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        require_module("training", "transformers")
        free = (Path("runs") / f"demo{'' if number == 1 else f'-{number}'}" for number in itertools.count(1))
        out = self.out or next(path for path in free if not path.exists())
        if out.exists() and any(out.iterdir()):
            raise CreditscopeError(f"{out} is not empty; choose another --out")
        console = self.output.console()
        start = time.perf_counter()
        lines: list[dict[str, Any]] = []
        for group in (2, 4, 8):
            config = Config(group=group, steps=self.steps, seed=self.seed, eval_problems=PROBLEMS, lr=LR, scope="light",
                            probe_every=10)
            if not self.output.json:
                console.print(f"[bold]R = {group}[/]: {config.prompts} prompts × {group} rollouts, {self.steps} steps")
            _, finished = run_training(config, out / f"r{group}", console, label=f"R = {group}", quiet=self.output.json)
            if not finished:
                return 130
            lines.append(summary(out / f"r{group}"))
        reports = {"side by side": out / "report.html", "R = 8 in full": out / "r8" / "report.html"}
        for path in reports.values():
            write_file(path, build([path.parent]))
        if self.output.json:
            self.output.emit({"out": str(out), "runs": lines, "reports": [str(path) for path in reports.values()],
                              "seconds": time.perf_counter() - start})
            return 0
        rows = []
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


LEGEND = """\
test: share of 1,000 unseen problems solved by one sample at temperature 1, 95 % interval.
reward and dead groups: mean of the last 10 steps.
rank: effective rank (Σσ)²/Σσ² of a group's R rollout gradients over all parameters, mean over live groups and steps.
null: the same for orthogonal scores of equal norm with the same w. cut to 2: the rank that an SVD truncated to
two values prints; arXiv:2606.29238 reports a rank of about 2 for every R."""

PROBLEMS = 1000
"""Test problems of each evaluation."""
LR = 1e-4
"""The packaged model learns fastest here: 3e-4 breaks it within 60 steps (recipes/README.md)."""


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
