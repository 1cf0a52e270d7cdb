"""`creditscope lab compare`: train with each value of a setting at equal rollouts, then a table and a figure."""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.markup import escape

from creditscope.claims.evidence import from_json
from creditscope.cli.output import Output
from creditscope.cli.sweep import HERE, check_sweep, is_done, places, refuse_at_once, refuse_none, run_all, show_end
from creditscope.errors import CreditscopeError, command_line, printable
from creditscope.files.writing import write_file
from creditscope.runs.compare import Candidate, CandidateRun, Comparison, Kind, compare, read_folder, read_run, run_of
from creditscope.runs.config import Config
from creditscope.runs.figures import accuracy_svg, brake_svg, can_draw
from creditscope.runs.intervals import Interval
from creditscope.runs.kinds import as_dict, command, kind_of, read_value, verdicts, with_baseline
from creditscope.runs.numbers import in_percent, in_points, percent
from creditscope.runs.record import Record
from creditscope.runs.settings import flag

SHARED = ("model", "task", "method", "group", "prompts", "inner_steps", "lr")
"""Settings with a flag: alike in all runs, unless they are compared."""
REPAIR = "the runs are kept: repair it, then use --no-run"


@dataclass(frozen=True)
class Compare:
    """Train with each value of a setting from the same start, some seeds each; compare at EQUAL rollouts.

    Any setting of creditscope lab train that changes what is learnt: credit, brake, group, lr, method, ... The others
    are alike in all runs. A rollout that was sampled to estimate a value counts like one that is trained on. Runs that
    are finished are used again and runs that were stopped go on, so the same command continues after Ctrl-C; with
    --no-run it only compares.

    For example:
      creditscope lab compare credit                                        # ten estimators, five seeds each
      creditscope lab compare credit outcome step_reward monte_carlo,samples=2 --seeds 3
      creditscope lab compare credit outcome gae --rollouts 1000 --seeds 2  # a first look in minutes
      creditscope lab compare credit --no-run                               # table and figure of what is there
      creditscope lab compare group 4 8 16 --seeds 3                        # R, at equal rollouts
      creditscope lab compare lr 1e-4 5e-5                                  # compared with the first
      creditscope lab compare method grpo dr_grpo dapo
      creditscope lab compare brake                                         # brakes on overshoot, at μ = 4
      creditscope lab compare brake none recall shorten,share=0.02 --inner-steps 8 --seeds 3
      creditscope lab compare credit --on ray://head:10001                  # on the machines of a Ray cluster
    """

    setting: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SETTING")]
    """The setting that differs between the runs, as in creditscope lab train, such as credit, brake, group or lr."""
    values: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="VALUE")] = ()
    """Its values; the others are compared with the first. For credit (creditscope list credits) and brake (creditscope
    list brakes), which may have options after commas, the others are compared with outcome and none, and by default
    ten estimators, or all brakes, are trained. With --no-run: those to compare, by default all in --out."""
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
    """μ, passes over each batch; by default 4 for brake, else 1."""
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
    """off, or light: read the effective rank of the rollouts' gradients; by default off for brake, else light."""
    every: int = 5
    """Steps between readings of the microscope."""
    jobs: int | None = None
    """Runs at once, each a process with one thread; by default one per CPU, or as many as a cluster has room for."""
    on: str = HERE
    """Where the runs go: here, ray (a Ray cluster on this machine), or ray://HOST:PORT (one that is there). What a run
    takes of a node follows: ray,cpus=1,gpus=0.5,memory=8 (GiB). docs/howto/cluster.md."""
    out: Path | None = None
    """Where the runs (NAME/seed-S), table.md, table.json and figure.svg go; by default runs/compare for credit,
    runs/brakes for brake, else runs/compare-SETTING."""
    no_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Train nothing: compare the finished runs in --out, or their evidence (creditscope papers check --save)."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    @property
    def kind(self) -> Kind:
        return kind_of(self.setting, self.values)

    @property
    def place(self) -> Path:
        return self.out or Path(self.kind.out)

    def run(self) -> int:
        if self.no_run:
            return self._write(self._found(), {})
        plan, free = self._asked(), self.kind.free
        failed = run_all(self.place, plan, self.jobs or places(self.on), self.output, partial(is_done, free=free),
                         lambda todo: refuse_at_once(list(todo.values())), self.on)
        if failed is None:
            return 130
        runs = [read_run(Record.open(self.place / name), self.kind) for name, config in plan.items()
                if is_done(self.place / name, config, free)]
        return self._write(runs, failed)

    def _asked(self) -> dict[str, Config]:
        """Folder -> settings of every run, the flags checked. Seed by seed, so that all names are there early."""
        check_sweep(self.place, seeds=self.seeds, points=self.points, eval_problems=self.eval_problems,
                    rollouts=self.rollouts, jobs=self.jobs)
        if self.points > self.rollouts:
            raise CreditscopeError(f"--points {self.points} is more than --rollouts {self.rollouts}; give fewer")
        own = {f.name: f.default for f in fields(self)}
        if self.setting in SHARED and getattr(self, self.setting) != own[self.setting]:
            raise CreditscopeError(f"{flag(self.setting)} {getattr(self, self.setting)}: {self.setting} is what is "
                                   f"compared; name its values behind it: creditscope lab compare {self.setting} ...")
        kind, values = self.kind, self.values or self.kind.default
        if not values:
            raise CreditscopeError(f"no value of {self.setting} to train with; name two or more: "
                                   f"creditscope lab compare {self.setting} VALUE VALUE")
        configs = [self.config(value) for value in values]
        names = [kind.name(asdict(config)) for config in configs]
        for name in names:
            if names.count(name) > 1:
                raise CreditscopeError(f"{self.setting} {kind.value(name)!r} is named twice; name each {kind.noun} "
                                       f"once")
        for config in configs:
            if self.rollouts < (least := config.group * config.prompts):
                raise CreditscopeError(f"--rollouts {self.rollouts} is less than one step spends: --prompts "
                                       f"{config.prompts} × --group {config.group} = {least}")
        return {f"{folder(name)}/seed-{seed}": replace(config, seed=seed)
                for seed in range(self.first_seed, self.first_seed + self.seeds)
                for name, config in zip(names, configs, strict=True)}

    def config(self, value: str, seed: int = 0) -> Config:
        """Settings of one run: all alike but for the value that is compared, and the seed."""
        kind = self.kind
        given: dict[str, Any] = {name: getattr(self, name) for name in (*SHARED, "rollouts", "every", "eval_problems")}
        given |= {"inner_steps": kind.inner_steps if self.inner_steps is None else self.inner_steps,
                  "scope": self.scope or kind.scope, "eval_rollouts": self.rollouts // self.points, "seed": seed}
        given |= {**kind.probe, self.setting: read_value(self.setting, value) if kind.prefix else value}
        # A step spends at least P·R rollouts, so these are enough; the budget ends the run.
        return Config(**given | {"steps": -(-self.rollouts // max(1, given["group"] * given["prompts"]))})

    def _found(self) -> list[CandidateRun]:
        kind = self.kind
        runs, unfinished = read_folder(self.place, kind)
        kept = [(path, from_json(path)) for path in sorted(self.place.glob("*.evidence.json"))]
        runs += [run_of(path, run.config, run.steps, kind) for path, run in kept if run.finished]
        asked = [str(read_value(self.setting, value)) if kind.prefix else value for value in self.values]
        runs = [run for run in runs if not asked or kind.value(run.name) in asked]
        if not runs:
            which = f" of {self.setting} {', '.join(asked)}" if asked else ""
            raise CreditscopeError(f"{self.place} holds no finished run{which}; leave out --no-run to train, or give "
                                   f"the --out that has some")
        if unfinished:
            print(f"left out: {len(unfinished)} runs that are not finished, such as {unfinished[0]}", file=sys.stderr)
        return runs

    def _write(self, runs: Sequence[CandidateRun], failed: dict[str, str]) -> int:
        if not runs:
            refuse_none(failed)
        kind, out = with_baseline(self.kind, [run.name for run in runs]), self.place
        page, found = page_for(kind), compare(runs, kind)
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
            console.print_columns(list(columns), [[cell(line) for cell in columns.values()] for line in found.lines],
                                  dim=[n for n, line in enumerate(found.lines) if line.name == kind.baseline])
        console.print(f"{page.legend}\n", markup=False)
        for sentence in said:
            console.print(f"[bold]{escape(sentence)}[/]")
        show_end(console, out, failed, files, can_draw(),
                 command_line("lab", "compare", self.setting, "--no-run", "--out", out))
        return 1 if failed else 0


def folder(name: str) -> str:
    """The folder of a value: its name, where characters that are unsafe in a path become _.

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


def _result(setting: str, baseline: str) -> dict[str, Callable[[Candidate], str]]:
    return {
        setting: lambda line: line.name,
        "seeds": lambda line: str(len(line.seeds)),
        "accuracy": lambda line: percent(line.accuracy),
        f"minus {baseline}, paired": lambda line: in_points(line.difference) if line.difference else "",
        "overlap": lambda line: {True: "yes", False: "no", None: ""}[line.overlaps],
    }


TableColumns = Mapping[str, Callable[[Candidate], str]]
COST: TableColumns = {
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
  uncertainty from the number of problems is not in them; lab train prints it beside each accuracy."""


@dataclass(frozen=True)
class Page:
    title: str
    tables: tuple[TableColumns, ...]
    legend: str
    figure: Callable[[Comparison], str]
    shows: str


BRAKES = Page("Brakes", (BRAKE_RESULT, BRAKE_OVERSHOOT), ACCURACY.format(baseline="none") + BRAKE + INTERVALS,
              brake_svg, "distance past the bound, and accuracy")


def page_for(kind: Kind) -> Page:
    """Brakes have their own tables and figure; credit and every other setting have accuracy and cost."""
    if kind.setting == "brake":
        return BRAKES
    result = {**_result(kind.setting, kind.baseline), "mean along the way": lambda line: percent(line.area)}
    cost = {kind.setting: lambda line: line.name, **COST}
    return Page("Credit" if kind.setting == "credit" else f"`{kind.setting}`", (result, cost),
                ACCURACY.format(baseline=kind.baseline) + CREDIT + INTERVALS, accuracy_svg,
                "accuracy against rollouts spent")


def markdown(found: Comparison, said: Sequence[str], failed: dict[str, str], figure: bool) -> str:
    """The comparison as a page."""
    s, page = found.settings, page_for(found.kind)
    counts = sorted({len(line.seeds) for line in found.lines})
    out = [f"# {page.title} at {found.budget:,} rollouts", "", *(f"**{sentence}.**\n" for sentence in said)]
    model, task = (html.escape(printable(s[name])).replace("|", "\\|") for name in ("model", "task"))
    alike = {"model": f"model {model}", "task": f"task {task}", "method": f"method {s['method']}",
             "group": f"R = {s['group']}", "prompts": f"P = {s['prompts']}", "inner_steps": f"μ = {s['inner_steps']}",
             "lr": f"learning rate {s['lr']:g}"}
    told = [text for name, text in alike.items() if name != found.kind.setting and (
        name != "inner_steps" or max(s["inner_steps"], found.kind.inner_steps) > 1)]
    sentence = ", ".join([*told, f"{'–'.join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))} seeds",
                          f"{s['eval_problems']:,} test problems"])
    out.append(f"{sentence[0].upper()}{sentence[1:]}.\n")
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
