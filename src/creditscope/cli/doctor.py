"""`creditscope doctor`: the faults of a run, from its trainer's log and settings alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from creditscope.cli.output import Output, new_table
from creditscope.diagnosis.engine import SIGNS as SHAPES
from creditscope.diagnosis.engine import Diagnosis, diagnose
from creditscope.diagnosis.finding import STATES
from creditscope.diagnosis.log import Log
from creditscope.diagnosis.read import read
from creditscope.errors import printable

COLOURS = {"broken": "red", "watch": "yellow", "unknown": "dim", "fine": "green"}


@dataclass(frozen=True)
class Doctor:
    """Find the faults of a run of TRL, verl or creditscope, from its log and settings alone.

    No model is loaded. The first line names the first cause and the setting to change. Each finding is broken (✗),
    watch (!), unknown (?) or fine (✓), with the lines of the log that show it, the formula, and the finding that causes
    it. Settings that were not given are taken at the trainer's defaults; findings that depend on one name it.

    For example:
      creditscope doctor output/checkpoint-500                      # TRL's trainer_state.json
      creditscope doctor train.log --set loss_type=grpo             # what TRL printed
      creditscope doctor verl.log --config outputs/.hydra/config.yaml
      creditscope doctor runs/demo/r8 --strict                      # exit code 1 if something is broken
    """

    run_or_log: Annotated[Path, tyro.conf.Positional]
    """A folder of creditscope or TRL, a log with one row per line, or a .csv table."""
    config: Path | None = None
    """The run's settings, as JSON or YAML; by default those in the run's folder."""
    sets: Annotated[tuple[str, ...], tyro.conf.arg(name="set"), tyro.conf.UseAppendAction] = ()
    """A setting as NAME=VALUE, such as loss_type=grpo or actor_rollout_ref.actor.ppo_epochs=1; may be repeated."""
    why: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Evidence, reason and setting of every finding, not only of those that are broken or to watch and follow from no
    other."""
    strict: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Exit with 1 if something is broken."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        log = read(self.run_or_log, self.config, self.sets)
        found = diagnose(log)
        findings = found.findings
        if self.output.json:
            first = found.first
            self.output.emit({"trainer": log.trainer.name, "rows": len(log.rows), "notes": list(log.notes),
                              "first": first and first.rule, "findings": [asdict(finding) for finding in findings]})
        else:
            console = self.output.console()
            show(console, log, found, self.why)
            console.next("the same with --config FILE or --set NAME=VALUE, so that less is assumed"
                         if not log.settings.given else "creditscope methods" if self.why else
                         "the same with --why, for the evidence of every finding")
        return 1 if self.strict and any(finding.state == "broken" for finding in findings) else 0


def show(console: Console, log: Log, found: Diagnosis, why: bool) -> None:
    """The first cause with its effects; a line per finding; then evidence and reason of the first causes, or of all."""
    findings, count = found.findings, Counter(finding.state for finding in found.findings)
    console.print(Text(printable(found.headline)))
    version = f" (read as {log.trainer.version})" if log.trainer.version else ""
    console.print(f"{log.trainer.name}{version}, {len(log.rows)} rows", markup=False)
    for note in log.notes:
        console.print(f"note: {printable(note)}", markup=False)
    table = new_table("state", "about", "finding", justify="left")
    for finding in findings:
        origin = f" (follows from {finding.follows[0]})" if finding.follows else ""
        table.add_row(Text(f"{SHAPES[finding.state]} {finding.state}", COLOURS[finding.state]), finding.rule,
                      Text(f"{printable(finding.sentence)}{origin}"))
    console.print(table)
    for finding in findings:
        if why or (finding.bad and not finding.follows):
            console.print(Text(f"{SHAPES[finding.state]} {finding.rule}", COLOURS[finding.state]))
            assumed = ", ".join(f"{name}={value}" for name, value in (finding.assumes or {}).items())
            for name, text in (("evidence", "; ".join(finding.evidence)), ("why", finding.why), ("change", finding.change),
                               ("assumes", f"{assumed} (defaults of {log.trainer.name})" if assumed else "")):
                if text:
                    console.print(Text(f"  {name:9}{printable(text)}"))
    console.print(", ".join(f"{count[state]} {state}" for state in STATES if count[state]) + ".", markup=False)
