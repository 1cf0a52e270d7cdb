"""`creditscope doctor`: the faults of a run, from its trainer's log and settings alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from creditscope.cli.output import STATE_COLOURS, Output, new_table
from creditscope.cli.positionals import OnePath
from creditscope.diagnosis import confidence
from creditscope.diagnosis import read as readers
from creditscope.diagnosis.engine import SIGNS, Diagnosis, diagnose
from creditscope.diagnosis.finding import Finding
from creditscope.diagnosis.log import Log
from creditscope.diagnosis.of_record import unread
from creditscope.errors import CreditscopeError, command_line, printable
from creditscope.report.diagnosed import chain


@dataclass(frozen=True)
class Doctor:
    """Find the faults of a run of TRL, verl, nine more trainers or creditscope, from its log and settings alone.

    No model is loaded. The first line names the first cause and the setting to change. Each finding is broken (✗),
    watch (!), unknown (?) or fine (✓), with the lines of the log that show it, the formula, and the finding that causes
    it. Settings that were not given are taken at the trainer's defaults; findings that depend on one name it. A folder
    with several runs gives one line per run.

    For example:
      creditscope doctor output/checkpoint-500            # TRL's trainer_state.json
      creditscope doctor train.log --set loss_type=grpo   # what TRL printed
      creditscope doctor verl.log --config outputs/.hydra/config.yaml
      creditscope doctor runs/demo/r8 --strict            # exit code 1 if broken
      creditscope doctor runs                             # every run below, a line each
    """

    path: OnePath
    """A folder of creditscope or TRL, a folder of such folders, a log with one row per line, or a .csv table."""
    config: Path | None = None
    """The run's settings, as JSON or YAML; by default those in the run's folder."""
    sets: Annotated[tuple[str, ...], tyro.conf.arg(name="set"), tyro.conf.UseAppendAction] = ()
    """A setting as NAME=VALUE, such as loss_type=grpo or actor_rollout_ref.actor.ppo_epochs=1; may be repeated."""
    why: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Evidence, reason and setting of every finding, not only of the first cause."""
    strict: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Exit with 1 if something is broken."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        runs = runs_below(self.path)
        if len(runs) > 1:
            return self._every(runs)
        log = readers.read(runs[0] if runs else self.path, self.config, self.sets)
        found = diagnose(log)
        if self.output.json:
            self.output.emit(of_log(log) | as_dict(found))
        else:
            console = self.output.console()
            show(console, log, found, self.why)
            console.next("the same with --config FILE or --set NAME=VALUE, so that less is assumed"
                         if not log.settings.given else "creditscope list methods" if self.why else
                         "the same with --why, for the evidence of every finding")
        return 1 if self.strict and has_broken(found) else 0

    def _every(self, runs: Sequence[Path]) -> int:
        """One line per run. A run that cannot be read is unknown, with the reason."""
        found: dict[str, tuple[Log | None, Diagnosis]] = {}
        for run in runs:
            log = None
            try:
                log = readers.read(run, self.config, self.sets)
                diagnosis = diagnose(log)
            except CreditscopeError as error:
                diagnosis = unread(reason(str(error), run))
            found[str(run.relative_to(self.path))] = log, diagnosis
        if self.output.json:
            self.output.emit({"runs": [{"run": name} | of_log(log) | as_dict(each)
                                       for name, (log, each) in found.items()]})
        else:
            console = self.output.console()
            show_runs(console, {name: diagnosis for name, (_, diagnosis) in found.items()})
            worst = min(found, key=lambda name: list(SIGNS).index(found[name][1].state))
            console.next(command_line("doctor", self.path / worst))
        return 1 if self.strict and any(has_broken(diagnosis) for _, diagnosis in found.values()) else 0


def runs_below(path: Path) -> list[Path]:
    """The runs in a folder that is not a run itself."""
    found = readers.runs_below(path) if path.is_dir() else []
    return [] if path in found or (len(found) == 1 and found[0].parent == path and found[0].is_file()) else found


def reason(error: str, run: Path) -> str:
    """Why a run cannot be read, in one line without its path.

    >>> reason("a/b.log holds no log; expected one of\\n  a folder", Path("a/b.log"))
    'holds no log'
    """
    return error.partition("; expected")[0].partition("\n")[0].replace(str(run), "").lstrip(": ")


def has_broken(found: Diagnosis) -> bool:
    return any(each.state == "broken" for each in found.findings)


def of_log(log: Log | None) -> dict[str, Any]:
    return {"trainer": log and log.trainer.name, "rows": len(log.rows) if log else 0,
            "notes": list(log.notes) if log else []}


def as_dict(found: Diagnosis) -> dict[str, Any]:
    """A diagnosis as data: what is printed, and what `creditscope report --json` has."""
    return {"headline": found.headline, "state": found.state, "first": found.first and found.first.rule,
            "effects": [each.rule for each in found.effects], "unread": found.unread,
            "findings": [asdict(each) for each in found.findings]}


def show(console: Console, log: Log, found: Diagnosis, why: bool) -> None:
    """The headline; the first cause with its evidence and effects; the other findings; what is fine in one line."""
    first = found.first
    console.print(Text(printable(found.headline), "bold"))
    version = f" (read as {log.trainer.version})" if log.trainer.version else ""
    console.print(Text(f"{log.trainer.name}{version}, {len(log.rows)} rows", "dim"))
    for note in log.notes:
        console.print(Text(f"note: {printable(note)}"))
    if first is not None:
        console.print(details(first, log, found.effects, why))
    # Open questions matter where no cause was found; otherwise, and where steps alone are lacking, one line names them.
    others = [each for each in found.findings if each is not first
              and (each.bad or (each.settles and each.lacks is None and first is None))]
    if others:
        console.print(table_of(others))
    if why:
        for each in found.findings:
            if each is not first:
                console.print(Text(f"{SIGNS[each.state]} {each.rule}: {printable(each.sentence)}",
                                   STATE_COLOURS[each.state]))
                console.print(details(each, log, why=why))
        return
    for state in ("unknown", "fine"):
        folded = [each for each in found.findings if each.state == state and each not in others]
        if folded:
            also = "also " if any(each.state == state for each in others) else ""
            count = f"{len(folded)} question{'s' * (len(folded) > 1)}"
            short = "; (k of n): k readings are logged and n are needed, which more steps or evaluations bring" \
                if any(each.lacks for each in folded) else ""
            named = ", named by --why" if state == "fine" else f": {', '.join(map(_open_question, folded))}{short}"
            console.print(Text(f"{also}{state}: {count}{named}", STATE_COLOURS[state]))


def _open_question(found: Finding) -> str:
    """The rule, with the readings that the log has and that are needed, where these alone are lacking."""
    return found.rule if found.lacks is None else f"{found.rule} ({found.lacks[0]} of {found.lacks[1]})"


def details(found: Finding, log: Log, effects: Sequence[Finding] = (), why: bool = False) -> Table:
    """What shows a finding, why, what to change, what to expect, and what followed, each beside its name; with `why`
    also how often the rule was right."""
    grid = Table.grid(padding=(0, 1, 0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    assumed = ", ".join(f"{name}={value}" for name, value in (found.assumes or {}).items())
    for name, text in (*(("evidence", line) for line in found.evidence), ("why", found.why), ("change", found.change),
                       ("expect", found.expect), ("settles", found.settles), ("then", chain(effects)),
                       ("seen", confidence.told(found.rule) if why and found.bad else ""),
                       ("assumes", f"{assumed} (defaults of {log.trainer.name})" if assumed else "")):
        if text:
            grid.add_row(Text(name, "dim"), Text(printable(text)))
    return grid


def table_of(findings: Sequence[Finding]) -> Table:
    """State, rule and sentence; with the cause, or the change, or what would settle it."""
    table = new_table("state", "about", "finding", justify="left")
    for each in findings:
        more = (f" Follows from {each.follows[0]}." if each.follows else f" Change: {each.change}." if each.change else
                f" Settled by: {each.settles}." if each.settles else "")
        table.add_row(Text(f"{SIGNS[each.state]} {each.state}", STATE_COLOURS[each.state]), each.rule,
                      Text(f"{printable(each.sentence)}.{printable(more)}"))
    return table


def show_runs(console: Console, found: dict[str, Diagnosis]) -> None:
    """One line per run: name, state, first cause, its sentence as far as it fits."""
    lines = []
    for name, each in found.items():
        first = each.first
        lines.append((printable(name), f"{SIGNS[each.state]} {each.state}", first.rule if first else "–",
                      printable(first.sentence if first else each.unread or each.progress)))
    widths = [min(console.width // 4, max(map(len, cells))) for cells in list(zip(*lines, strict=True))[:3]]
    for line, each in zip(lines, found.values(), strict=True):
        text = Text()
        for cell, width, style in zip(line, widths, ("", STATE_COLOURS[each.state], "bold"), strict=False):
            part = Text(cell, style)
            part.truncate(width, overflow="ellipsis", pad=True)
            text += part + Text("  ")
        text += Text(line[-1])
        text.truncate(console.width, overflow="ellipsis")
        console.print(text)
