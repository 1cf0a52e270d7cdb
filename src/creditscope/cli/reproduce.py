"""`creditscope papers reproduce`: the runs that a paper's claims need, the verdicts, its table and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from creditscope.claims.evidence import Evidence, families, read_evidence
from creditscope.claims.page import FIGURES, claims_page, curves, summary, table1, why_low
from creditscope.claims.table import CLAIMS, check
from creditscope.cli.check import save_evidence, show
from creditscope.cli.output import Output
from creditscope.cli.processes import Job, run_jobs
from creditscope.cli.sweep import HERE, check_sweep, is_done, places, refuse_at_once, refuse_none, run_all, show_end
from creditscope.errors import CreditscopeError, command_line
from creditscope.files.writing import write_file
from creditscope.runs.config import Config
from creditscope.runs.figures import can_draw, curves_svg
from creditscope.runs.record import Record
from creditscope.studies.plans import PLANS, WARM, Plan, Size

WARM_UP = ("--steps", "60", "--lr", "2e-3", "--eval-problems", "0")
"""Enough for the packaged model to learn the two moves of `turns`, without a preference."""
CLAIMS_OF = {"p1": [claim for claim in CLAIMS if claim.startswith("P1") or claim in ("C.1", "C.2")],
             "p2": [claim for claim in CLAIMS if claim.startswith("P2")]}
"""C.1 and C.2 are about P1's ranks."""


@dataclass(frozen=True, kw_only=True)
class Choices(Size):
    """The sizes as flags; the model is positional."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = "tiny"
    """tiny (packaged), a folder in Hugging Face format, a .gguf file, or owner/name on the hub."""


@dataclass(frozen=True)
class Reproduce:
    """Run what a paper's claims need, check them, and write its table and figures with ours beside them.

    p1 is arXiv:2606.29238: R = 2, 4, 8, 16, 32 with three seeds each, read on a schedule; with the packaged model also
    several turns, other credits and, with --budget full, schedules that watch the rank. p2 is arXiv:2601.05002: brakes
    against plain AdamW over several updates per batch. Runs that are finished are used again and runs that were stopped
    go on, so the same command continues after Ctrl-C. On two cores p1 --budget small is 18 runs of 50,000 rollouts
    together, 15 ms per rollout and 10 s per start: about 20 minutes; p2 about 15; full takes hours, or a GPU.

    For example:
      creditscope papers reproduce p1  # the packaged model
      creditscope papers reproduce p2 --budget full --jobs 16
      creditscope papers reproduce p1 --budget full --on ray://head:10001  # on the machines of a Ray cluster
      creditscope papers reproduce p1 nvidia/Nemotron-Mini-4B-Instruct --task gsm8k:openai/gsm8k --groups 2 4 8 \\
        --steps 300 --lr 1e-6 --max-tokens 320 --accumulate 8  # P1's own, with a GPU that holds the model
    """

    what: Annotated[Literal["p1", "p2"], tyro.conf.Positional]
    """The paper."""
    size: Annotated[Choices, tyro.conf.arg(name="")] = field(default_factory=Choices)
    jobs: int | None = None
    """Runs at once, each a process with one thread and its own copy of the model: several may share a GPU that holds
    them. By default one per CPU for the packaged model, else 1; on a cluster as many as it has room for."""
    on: str = HERE
    """Where the runs go: here, ray (a Ray cluster on this machine), or ray://HOST:PORT (one that is there). What a run
    takes of a node follows: ray,cpus=1,gpus=0.5,memory=8 (GiB). docs/howto/cluster.md."""
    out: Path | None = None
    """Where the runs, evidence/, claims.md, table1.md and the figures go; by default runs/PAPER-MODEL-BUDGET."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    @property
    def place(self) -> Path:
        name = "".join(c if c.isalnum() or c in "._" else "_" for c in Path(self.size.model).name)
        return self.out or Path("runs") / f"{self.what}-{name}-{self.size.budget}"

    def run(self) -> int:
        check_sweep(self.place, jobs=self.jobs)
        plan = placed(PLANS[self.what](self.size), self.place)
        at_once = self.jobs or (1 if self.on == HERE and self.size.model != "tiny" else places(self.on))
        done = partial(is_done, beside=WARM)
        failed = run_all(self.place, plan, at_once, self.output, done, self._prepare, self.on)
        if failed is None:
            return 130
        evidence = [replace(read_evidence(Record.open(self.place / name)), name=name.replace("/", "-"))
                    for name, config in plan.items() if done(self.place / name, config)]
        if not evidence:
            refuse_none(failed)
        return self._report(evidence, failed)

    def _prepare(self, todo: Mapping[str, Config]) -> None:
        """Warm the packaged model up on the moves of `turns` before any run is started."""
        given = [config for config in todo.values() if config.model == self.size.model]
        if given:
            refuse_at_once(given)
        warm = self.place / WARM
        if warm.exists() or not any(config.model == str(warm) for config in todo.values()):
            return
        if not self.output.json:
            self.output.console().print("first a short warm-up, so that the packaged model knows the words up and down")
        job = Job(WARM, ("lab", "warmup", self.size.model, "--task", "turns", "--out", str(warm), *WARM_UP, "--json"),
                  warm.with_suffix(".log"))
        why = run_jobs([job], 1, lambda: False, lambda running, ended: None).get(WARM)
        if why is not None:
            raise CreditscopeError(f"the warm-up on turns failed: {why}")

    def _report(self, evidence: Sequence[Evidence], failed: Mapping[str, str]) -> int:
        ids = CLAIMS_OF[self.what]
        verdicts = check(evidence, ids)
        save_evidence(self.place / "evidence", evidence)
        pages = {"claims.md": claims_page(verdicts, ids, f"Made by `{self.command()}`, {len(evidence)} runs.")}
        if self.what == "p1":
            pages["table1.md"] = table1(evidence)
            pages |= figures(evidence) if can_draw() else {}
        for name, text in pages.items():
            write_file(self.place / name, text)
        files = ["evidence/", *pages]
        if self.output.json:
            self.output.emit({"out": str(self.place), "finished": not failed, "runs": len(evidence),
                              "failed": dict(failed), "summary": summary(verdicts),
                              "verdicts": [asdict(verdict) for verdict in verdicts], "files": files})
        else:
            console = self.output.console()
            show(console, verdicts)
            show_end(console, self.place, failed, files, self.what != "p1" or can_draw(),
                     command_line("papers", "check", self.place, "--all"))
        return 1 if failed else 0

    def command(self) -> str:
        """The command that makes these runs, without flags that change no result."""
        flags = {name: value for name, value in asdict(self.size).items()
                 if name != "model" and value != getattr(Size(), name)}
        words = [word for name, value in flags.items() for word in (
            f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,)))]
        model = [] if self.size.model == "tiny" else [Path(self.size.model).name]
        return command_line("papers", "reproduce", self.what, *model, *words)


def placed(plan: Plan, out: Path) -> dict[str, Config]:
    """Folder -> settings; the warmed-up model lies beside its runs."""
    return {name: replace(config, model=str(out / WARM)) if config.model == WARM else config for name, config in plan}


def figures(evidence: Sequence[Evidence]) -> dict[str, str]:
    """P1's Figures 1 to 3 of the largest family that differs in R alone, and ours of why its rank is low, as files."""
    sweep = max(families(evidence, ["group"]), key=lambda family: len({run["group"] for run in family}))
    out = {f"{name}.svg": curves_svg(found, words, percent=name == "accuracy")
           for name, (words, values) in FIGURES.items() if (found := curves(sweep, values))}
    if why := why_low(sweep):
        out["why.svg"] = curves_svg(why, "effective rank, all parameters", along="R")
    return out
