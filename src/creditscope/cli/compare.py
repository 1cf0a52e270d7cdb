"""`creditscope lab compare`: train with each value of a setting at equal rollouts, then a table and a figure."""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import tyro
from rich.markup import escape

from creditscope.claims.evidence import from_json
from creditscope.cli.output import Output, new_table
from creditscope.cli.processes import cores
from creditscope.cli.sweep import check_sweep, is_done, refuse_at_once, refuse_none, run_all, show_end
from creditscope.errors import CreditscopeError, command_line, printable
from creditscope.files.writing import write_file
from creditscope.runs.compare import Candidate, CandidateRun, Comparison, Kind, compare, read_folder, read_run, run_of
from creditscope.runs.config import Config
from creditscope.runs.figures import accuracy_svg, brake_svg, can_draw
from creditscope.runs.intervals import Interval
from creditscope.runs.kinds import KINDS, as_dict, command, verdicts
from creditscope.runs.numbers import in_percent, in_points, percent
from creditscope.runs.record import Record

REPAIR = "the runs are kept: repair it, then use --no-run"


@dataclass(frozen=True)
class Compare:
    """Train with each credit estimator, or brake, from the same start, some seeds each; compare at EQUAL rollouts.

    A rollout that was sampled to estimate a value counts like one that is trained on. Runs that are finished are used
    again and runs that were stopped go on, so the same command continues after Ctrl-C; with --no-run it only compares.

    For example:
      creditscope lab compare credit                                        # ten estimators, five seeds each
      creditscope lab compare credit outcome step_reward monte_carlo,samples=2 --seeds 3
      creditscope lab compare credit outcome gae --rollouts 1000 --seeds 2  # a first look in minutes
      creditscope lab compare credit --no-run                               # table and figure of what is there
      creditscope lab compare brake                                         # brakes on overshoot, at μ = 4
      creditscope lab compare brake none recall shorten,share=0.02 --inner-steps 8 --seeds 3
    """

    what: Annotated[Literal["credit", "brake"], tyro.conf.Positional]
    """The setting that differs between the runs: credit, or brake (against overshoot past the bound at μ > 1)."""
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Estimators (creditscope list credits) or brakes (creditscope list brakes), with options after commas. By
    default outcome, optimal_scalar, optimal_sequence, optimal_token, step_reward, prefix_tree, gae, entropy_mask, salt
    and monte_carlo; or none, recall, shorten, restart and kl_stop; with --no-run all in --out."""
    seeds: int = 5
    """Runs of each, with seeds that follow one another."""
    first_seed: int = 0
    """The first seed."""
    rollouts: int = 3840
    """Budget of each run: it stops once so many rollouts were spent, continuations for values included."""
    group: int = 8
    """R, rollouts per prompt."""
    prompts: int = 8
    """P, prompts per step."""
    inner_steps: int | None = None
    """μ, passes over each batch; by default 1 for credit, 4 for brake."""
    lr: float = 1e-4
    """Learning rate."""
    method: str = "grpo"
    """The method that uses the credit: creditscope list methods."""
    model: str = "tiny"
    """tiny (packaged), a folder in Hugging Face format, a .gguf file, or owner/name on the hub."""
    task: str = "arithmetic"
    """As of creditscope lab train."""
    eval_problems: int = 1000
    """Test problems per evaluation."""
    points: int = 4
    """Evaluations along the budget, besides the one at the start."""
    scope: str | None = None
    """off, or light: read the effective rank of the rollouts' gradients; by default light for credit, off for brake."""
    every: int = 5
    """Steps between readings of the microscope."""
    jobs: int | None = None
    """Runs at once, each a process with one thread; by default one per CPU."""
    out: Path | None = None
    """Where the runs (NAME/seed-S), table.md, table.json and figure.svg go; by default runs/compare for credit,
    runs/brakes for brake."""
    no_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Train nothing: compare the finished runs in --out, or their evidence (creditscope papers check --save)."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    @property
    def kind(self) -> Kind:
        return KINDS[self.what]

    @property
    def place(self) -> Path:
        return self.out or Path(self.kind.out)

    def run(self) -> int:
        if self.no_run:
            return self._write(self._found(), {})
        plan, free = self._asked(), self.kind.free
        failed = run_all(self.place, plan, self.jobs or cores(), self.output, partial(is_done, free=free),
                         lambda todo: refuse_at_once(list(todo.values())))
        if failed is None:
            return 130
        runs = [read_run(Record.open(self.place / name), self.kind) for name, config in plan.items()
                if is_done(self.place / name, config, free)]
        return self._write(runs, failed)

    def _asked(self) -> dict[str, Config]:
        """Folder -> settings of every run, the flags checked. Seed by seed, so that all names are there early."""
        check_sweep(self.place, seeds=self.seeds, points=self.points, eval_problems=self.eval_problems,
                    rollouts=self.rollouts, jobs=self.jobs)
        names = self.names or self.kind.default
        for name in names:
            if names.count(name) > 1:
                raise CreditscopeError(f"{self.what} {name!r} is named twice; name each {self.kind.noun} once")
        if self.rollouts < self.group * self.prompts:
            raise CreditscopeError(f"--rollouts {self.rollouts} is less than one step spends: --prompts {self.prompts} "
                                   f"× --group {self.group} = {self.group * self.prompts}")
        if self.points > self.rollouts:
            raise CreditscopeError(f"--points {self.points} is more than --rollouts {self.rollouts}; give fewer")
        return {f"{folder(name)}/seed-{seed}": self.config(name, seed)
                for seed in range(self.first_seed, self.first_seed + self.seeds) for name in names}

    def config(self, name: str, seed: int) -> Config:
        """Settings of one run: all alike but for the name that is compared, and the seed."""
        shared: dict[str, Any] = {flag: getattr(self, flag) for flag in (
            "model", "task", "method", "group", "prompts", "rollouts", "lr", "every", "eval_problems")}
        shared |= {"inner_steps": self.kind.inner_steps if self.inner_steps is None else self.inner_steps,
                   # A step spends at least P·R rollouts, so these are enough; the budget ends the run.
                   "steps": -(-self.rollouts // max(1, self.group * self.prompts)),
                   "scope": self.scope or self.kind.scope, "eval_rollouts": self.rollouts // self.points}
        shared |= self.kind.probe
        return Config(**shared | {self.kind.setting: name, "seed": seed})

    def _found(self) -> list[CandidateRun]:
        runs, unfinished = read_folder(self.place, self.kind)
        kept = [(path, from_json(path)) for path in sorted(self.place.glob("*.evidence.json"))]
        runs += [run_of(path, run.config, run.steps, self.kind) for path, run in kept if run.finished]
        runs = [run for run in runs if not self.names or run.name in self.names]
        if not runs:
            which = f" of {', '.join(self.names)}" if self.names else ""
            raise CreditscopeError(f"{self.place} holds no finished run{which}; leave out --no-run to train, or give "
                                   f"the --out that has some")
        if unfinished:
            print(f"left out: {len(unfinished)} runs that are not finished, such as {unfinished[0]}", file=sys.stderr)
        return runs

    def _write(self, runs: Sequence[CandidateRun], failed: dict[str, str]) -> int:
        if not runs:
            refuse_none(failed)
        kind, page, out = self.kind, PAGES[self.what], self.place
        found = compare(runs, kind)
        said = verdicts(found)
        files = ["table.md", "table.json"] + ["figure.svg"] * can_draw()
        data = {"settings": dict(found.settings), "budget": found.budget, "grid": found.grid, "verdict": said,
                "lines": [as_dict(line, kind) for line in found.lines], "failed": failed, "command": command(found)}
        if can_draw():
            write_file(out / "figure.svg", page.figure(found), REPAIR)
        write_file(out / "table.json", json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n", REPAIR)
        write_file(out / "table.md", markdown(found, said, failed, figure=can_draw()), REPAIR)
        if (console := self.output.console_or_json(data | {"out": str(out), "files": files})) is None:
            return 1 if failed else 0
        for columns in page.tables:
            table = new_table(*columns)
            for line in found.lines:
                table.add_row(*(escape(cell(line)) for cell in columns.values()),
                              style="dim" if line.name == kind.baseline else "")
            console.print(table)
        console.print(f"{page.legend}\n", markup=False)
        for sentence in said:
            console.print(f"[bold]{escape(sentence)}[/]")
        show_end(console, out, failed, files, can_draw(),
                 command_line("lab", "compare", self.what, "--no-run", "--out", out))
        return 1 if failed else 0


def folder(name: str) -> str:
    """The folder of an estimator or a brake: its name, where characters that are unsafe in a path become _.

    >>> folder("monte_carlo,samples=2"), folder("mine.credit:halves")
    ('monte_carlo,samples=2', 'mine.credit+halves')
    """
    return "".join(c if c.isalnum() or c in "._-+,=" else "_" for c in name.replace(":", "+"))


def _number(value: Interval | None, digits: int, share: bool = False) -> str:
    """mean ± half of the interval; nothing where the number does not exist."""
    if value is None:
        return ""
    scale, unit = (100, " %") if share else (1, "")
    half = "" if value.high is None else f" ± {scale * (value.high - value.mean):.{digits}f}"
    return f"{scale * value.mean:.{digits}f}{half}{unit}"


def _column(name: str, digits: int, share: bool = False) -> Callable[[Candidate], str]:
    return lambda line: _number(line.numbers[name], digits, share)


def _change(name: str) -> Callable[[Candidate], str]:
    return lambda line: in_percent(change) if (change := line.numbers[f"{name}_change"]) else ""


def _result(setting: str, baseline: str) -> TableColumns:
    return {
        setting: lambda line: line.name,
        "seeds": lambda line: str(len(line.seeds)),
        "accuracy": lambda line: percent(line.accuracy),
        f"minus {baseline}, paired": lambda line: in_points(line.difference) if line.difference else "",
        "overlap": lambda line: {True: "yes", False: "no", None: ""}[line.overlaps],
    }


TableColumns = Mapping[str, Callable[[Candidate], str]]
CREDIT_RESULT = {**_result("credit", "outcome"), "mean along the way": lambda line: percent(line.area)}
CREDIT_COST: TableColumns = {
    "credit": lambda line: line.name,
    "steps": lambda line: f"{line.steps:.0f}",
    "rollouts": lambda line: f"{line.spent:,.0f}",
    "continuations": lambda line: f"{line.continuations:.0%}",
    "time per run": lambda line: f"{_number(line.seconds, 0)} s",
    "time per rollout": lambda line: f"{1000 * line.seconds_per_rollout:.1f} ms",
    "rank": _column("effective_rank", 2),
    "within": _column("within", 2),
    "dead credit": _column("dead_credit", 0, share=True),
    "dead signal": _column("dead_signal", 0, share=True),
}
BRAKE_RESULT: TableColumns = {
    **_result("brake", "none"),
    "std": lambda line: "" if line.numbers["spread"] is None else f"{100 * line.numbers['spread']:.1f}",
    "worst seed": lambda line: f"{100 * line.numbers['worst']:.1f} %",
    "updates": _column("updates", 1),
    "train, s": _column("train", 2),
}
BRAKE_OVERSHOOT: TableColumns = {
    "brake": lambda line: line.name,
    "past": _column("past", 1, share=True),
    "distance": _column("distance", 3),
    "distance vs none": _change("distance"),
    "overshoot": _column("overshoot", 4),
    "overshoot vs none": _change("overshoot"),
    "after": _column("after", 0, share=True),
    "KL": _column("kl", 4),
}
ACCURACY = """\
accuracy: test problems solved by one sample at temperature 1 once the budget is spent, on the straight line between two
  evaluations; mean over seeds with its 95 % interval mean ± t·s/√n (Student's t, n − 1 degrees).
minus {baseline}: percentage points, paired by seed. overlap: whether the intervals of the two means meet.
"""
CREDIT = """\
mean along the way: accuracy averaged over the budget, 1/B ∫ accuracy(x) dx.
continuations: share of the rollouts that was spent on values.
time: of the steps, without evaluation and microscope; runs side by side slow each other down.
rank: effective rank (Σσ)²/Σσ² of a group's rollout gradients, mean over readings.
within: share of the credit's square that differs inside a rollout, Σ(A_it − Ā_i)²/ΣA_it².
dead credit: groups without any credit. dead signal: groups whose rewards are all equal.
"""
BRAKE = """\
std: of the seeds' accuracies (n − 1), in points. worst seed: the lowest of them.
updates: of the optimiser, per batch. train: seconds per step, of passes, updates and brake; runs side by side slow
  each other down.
past: share of bounded tokens that stand past their bound after the batch's last update.
distance: how far past, in nats, mean of those past. overshoot: the same over all bounded tokens.
vs none: relative change, paired by seed, mean over seeds of x/none − 1. A seed where none has 0 is left out.
after: share of the distance that was moved after the token's own gradient was stopped.
KL: from the sampler, nats per token, mean of ρ − 1 − log ρ.
A run's number is the mean over all its steps, from the first; distance and after: over those with a token past.
"""
INTERVALS = """\
±: half of the 95 % interval over seeds. Of twenty paired intervals one excludes 0 by chance.
Intervals are over training seeds alone: all runs answer the same test problems with the same random numbers. The
  uncertainty from the number of problems is not in them; train prints it beside each accuracy."""


@dataclass(frozen=True)
class Page:
    title: str
    tables: tuple[TableColumns, ...]
    legend: str
    figure: Callable[[Comparison], str]
    shows: str


PAGES: Mapping[str, Page] = MappingProxyType({
    "credit": Page("Credit", (CREDIT_RESULT, CREDIT_COST), ACCURACY.format(baseline="outcome") + CREDIT + INTERVALS,
                   accuracy_svg, "accuracy against rollouts spent"),
    "brake": Page("Brakes", (BRAKE_RESULT, BRAKE_OVERSHOOT), ACCURACY.format(baseline="none") + BRAKE + INTERVALS,
                  brake_svg, "distance past the bound, and accuracy"),
})


def markdown(found: Comparison, said: Sequence[str], failed: dict[str, str], figure: bool) -> str:
    """The comparison as a page."""
    s, page = found.settings, PAGES[found.kind.setting]
    counts = sorted({len(line.seeds) for line in found.lines})
    out = [f"# {page.title} at {found.budget:,} rollouts", "", *(f"**{sentence}.**\n" for sentence in said)]
    model, task = (html.escape(printable(s[name])).replace("|", "\\|") for name in ("model", "task"))
    passes = f"μ = {s['inner_steps']}, " if max(s["inner_steps"], found.kind.inner_steps) > 1 else ""
    out.append(f"Model {model}, task {task}, method {s['method']}, R = {s['group']}, P = {s['prompts']}, {passes}"
               f"learning rate {s['lr']:g}, {'–'.join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))} seeds, "
               f"{s['eval_problems']:,} test problems.\n")
    if figure:
        out.append(f"![{page.shows}](figure.svg)\n")
    for columns in page.tables:
        out.append("| " + " | ".join(columns) + " |")
        out.append("| --- |" + " ---: |" * (len(columns) - 1))
        out += ["| " + " | ".join(cell(line) for cell in columns.values()) + " |" for line in found.lines]
        out.append("")
    out += [*(f"- {line}" for line in page.legend.replace("\n  ", " ").splitlines()), ""]
    out += [f"- failed: {name}: {printable(why)}" for name, why in failed.items()] + [""] * bool(failed)
    out += ["Made by:", "", "```", command(found), "```", ""]
    return "\n".join(out)
