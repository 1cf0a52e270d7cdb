"""A file's part of `creditscope inspect`: signal, credit, w, prefix bias and, with a model, gradient geometry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from creditscope.cli.env import environment
from creditscope.cli.interrupt import Interrupt
from creditscope.cli.output import Output
from creditscope.cli.progress import Progress, drive
from creditscope.errors import CreditscopeError, command_line, printable, require_module
from creditscope.offline.settings import Settings
from creditscope.runs import schema

if TYPE_CHECKING:
    from creditscope.offline.batches import Reader
    from creditscope.offline.scope import ScopedBatch

GEOMETRY = ("effective_rank", "w_null", "norm_null", "orthogonal_null", "top1", "conflict")
"""Readings of `gram/group/` that are printed; all others are in the record, and printed by --json."""
SEEN = "prompts seen before"


@dataclass(frozen=True)
class RolloutsView:
    """What is read of a file of rollouts, and where its record goes."""

    file: Path
    settings: Settings
    out: Path | None
    resume: bool
    why: bool
    output: Output

    def run(self) -> int:
        if self.resume and self.out is None:
            raise CreditscopeError("--resume goes on with a record; name its folder with --out")
        require_module("reading rollouts", "torch")
        # Heavy imports wait until there is something to read, so that --help answers at once.
        from creditscope.offline.scope import Summary, scope_file

        summary = Summary()
        reader: Reader | None = None
        keeps = (lambda: False) if self.out is None else (self.out / "run.json").exists
        with Interrupt(keeps) as stop, Progress.beside("inspect", self.output) as bar:

            def tell(read: ScopedBatch) -> None:
                nonlocal reader
                reader = read.reader
                summary.add(read.line)
                bar.tick(read.done, read.size)

            try:
                finished = drive(scope_file(self.file, self.settings, self.out, environment(), self.resume, stop), tell)
            except KeyboardInterrupt:
                if self.out is not None or reader is None:
                    raise
                finished = False  # the batches read so far are printed
        facts: dict[str, Any] = {"file": self.file.name, "method": self.settings.method}
        facts |= {"credit": self.settings.credit} if self.settings.credit else {}
        if reader is not None:
            seen = {"format": reader.shape, "fields not read": ", ".join(reader.ignored or ()),
                    "steps logged again": reader.repeats, SEEN: reader.again}
            facts |= {name: value for name, value in seen.items() if value} | summary.facts()
        if self.output.json:
            self.output.emit(facts | ({} if self.out is None else {"out": str(self.out), "finished": finished}))
        else:
            self._print(facts, finished)
        return 0 if finished else 130

    def _print(self, facts: Mapping[str, Any], finished: bool) -> None:
        console = self.output.console()
        for name, value in shown(facts).items():
            text = f"{value:.4g}" if isinstance(value, float) else printable(str(value))
            if name == "method" and facts.get("format") == "trl" and value == Settings.method:
                text += " (TRL's files do not say the loss; its default is --method trl_dapo)"
            console.print(f"{name:<27}{text}", markup=False)
            if self.why and (known := schema.metric(name)):
                console.print(f"  {known.name}, {known.unit}: {known.sentence} {known.equation}".rstrip(), markup=False)
        if facts.get("batches", 1) > 1:
            console.print("Means over the batches, weighted by their rollouts; counts add up.")
        if SEEN in facts:
            console.print("Prompts seen before were in an earlier batch too, and are groups of their own here. If "
                          "their answers belong together, sort the file by prompt or give more --rows; if they were "
                          "sampled anew, give each row its step.", soft_wrap=True)
        if "batches" not in facts:
            console.print("Nothing was left to read: the record is complete.")
        elif "tokens" not in facts:
            console.print("Answers are text alone, so no credit of tokens: give --model, or tokens in the file.")
        if self.out is not None:
            console.print(f"wrote {self.out}: run.json, steps.jsonl, groups/" + (
                ", scope/" if self.settings.model and self.settings.scope != "off" else ""), markup=False)
        keep = [] if self.out is None else ["--out", self.out, "--resume"]
        console.next(command_line("inspect", self.file, *self.settings.flags(), *keep) if not finished else
                     command_line("list", "methods", self.settings.method) if self.out is None else
                     command_line("report", self.out))


def shown(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that are printed: of the geometry those of GEOMETRY alone.

    >>> shown({"reward/mean": 0.5, "gram/stable_rank": 2.0, "gram/group/top1": 0.9})
    {'reward/mean': 0.5, 'gram/group/top1': 0.9}
    """
    geometry = ("gram/", "scores/", "null/", "matrix/", "tokens/")
    few = {f"gram/group/{name}" for name in GEOMETRY}
    return {name: value for name, value in facts.items() if name in few or not name.startswith(geometry)}
