"""`creditscope optimizer`: overshoot, reward scale and update geometry of a run, from its record alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from creditscope.cli.output import Output, new_table
from creditscope.diagnosis.optimizer_numbers import Findings, read
from creditscope.diagnosis.optimizer_verdicts import NAME, as_dict, last_update, verdicts
from creditscope.errors import CreditscopeError, command_line, printable
from creditscope.optimizer.carry import carry, carry_limit
from creditscope.optimizer.table import BRAKES
from creditscope.runs.intervals import Interval
from creditscope.runs.numbers import percent, spanned

CARRY_STEPS, CARRY_LAGS = (2, 10, 50, 1000), range(5)
MEASURE = "creditscope train --inner-steps 4 --probe light"

LEGEND = {
    "overshoot": """\
k: passes over the batch; steps: batches that were read then (after the last pass: every --probe-every-th).
past: share of bounded tokens whose ratio is outside the bound.  distance: how far, in nats, mean of those outside.
after: share of that distance made after the token's own gradient was 0.  KL: from the sampler.
growth by momentum, by fresh gradients: effect of the two parts of the updates on tokens that were past, to first order,
  in nats per bounded token; tokens that cross the bound in the update are not in it.
carry: share of a full step that a token still makes at the first update without a gradient of its own; predicted:
  C_{T,0} of arXiv:2601.05002, Eq. 36 (creditscope optimizer --carry).""",
    "scale": """\
change: ‖Δ(φ) − Δ(1)‖/‖Δ(1)‖, if all credit since the start had been multiplied by φ.  cosine: of the two updates.
  –: not known from the optimiser's state, as after a gradient that was clipped to --clip-norm.
  Rewards times φ are credit times φ, except where the method divides by a std: there they change nothing.""",
    "progress": "r: Pearson's, of J before the first update with reward/mean.",
}
INTERVALS = """\
[ ]: 95 % t-interval of a mean over the run's steps, Fisher's of r. Steps are not independent: the interval measures
  how much they differ, not the spread between runs."""


@dataclass(frozen=True)
class Optimizer:
    """Show overshoot past the bound, the reward scale, update geometry, and whether the loss follows the reward.

    Reads the record of a run; nothing is trained and no model is loaded. Several runs make one table.

    For example:
      creditscope train --inner-steps 4 --probe light --out runs/a       # a run that is measured
      creditscope optimizer runs/a                                       # one screen
      creditscope optimizer runs/a runs/b                                # beside each other
      creditscope optimizer runs/a --json                                # everything, for a program
      creditscope optimizer --carry --betas 0.9 0.95                     # steps of Adam after the gradient is 0
      creditscope optimizer --brakes                                     # the remedies against overshoot
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folders written by creditscope train."""
    carry: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print C_{T,k} of arXiv:2601.05002, Eq. 36, instead of a run."""
    betas: tuple[float, float] = (0.9, 0.999)
    """β₁ and β₂ of Adam, for --carry."""
    brakes: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """List the brakes of creditscope train --brake instead of a run: equation, cost, options."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        if self.carry + self.brakes + bool(self.runs) != 1:
            raise CreditscopeError("give the folder of a run, or --carry, or --brakes, one of them; for example: "
                                   "creditscope optimizer runs/a")
        if self.brakes:
            self._brakes()
        elif self.carry:
            self._carry()
        else:
            self._runs()
        return 0

    def _runs(self) -> None:
        found = [read(path) for path in self.runs]
        if (console := self.output.console_or_json({"runs": [as_dict(one) for one in found]})) is None:
            return
        if len(found) == 1:
            show(console, found[0])
        else:
            console.print(as_table(found))
        blocks = {block for one in found for block in verdicts(one)}
        legend = [*(text for block, text in LEGEND.items() if block in blocks), INTERVALS]
        console.print("\n".join(legend) + "\n", markup=False)
        after = command_line("optimizer", found[0].run) if len(found) > 1 else "creditscope optimizer --brakes"
        console.next(after if any(one.measured for one in found) else MEASURE)

    def _brakes(self) -> None:
        rows = [asdict(row) | {"idle": row.idle_bounds} for row in BRAKES.values()]
        if (console := self.output.console_or_json({"brakes": rows})) is None:
            return
        for row in BRAKES.values():
            console.print(f"[bold]{row.name}[/]  {row.title}")
            options = [f"{name}={option.default}: {option.meaning}" for name, option in row.options.items()]
            for line in filter(None, (row.equation, f"cost: {row.cost}", *options, row.note)):
                console.print(f"  {line}", markup=False)
        console.print("\nw = ∂J/∂log π of a token; w(1): at its first update.  c: the token's share of the first "
                      "moment.\nβ, γ: weights of the old moment and of the new gradient, β₁ and 1 − β₁ for Adam.  "
                      "Derivations: docs/optimizer.md", markup=False)
        console.next("creditscope train --inner-steps 4 --brake recall")

    def _carry(self) -> None:
        try:
            rows = {step: [carry(step, lag, self.betas) for lag in CARRY_LAGS] for step in CARRY_STEPS}
            limit = [carry_limit(lag, self.betas) for lag in CARRY_LAGS]
        except OverflowError:
            raise CreditscopeError(f"--betas {self.betas[0]} {self.betas[1]}: the carry is too large for a float; give "
                                   f"a larger β₂") from None
        data = {"betas": self.betas, "lags": list(CARRY_LAGS), "steps": rows, "limit": limit}
        if (console := self.output.console_or_json(data)) is None:
            return
        table = new_table("T", *(f"k = {lag}" for lag in CARRY_LAGS), left=(),
                          title=f"C_{{T,k}} of Adam, β₁ = {self.betas[0]:g}, β₂ = {self.betas[1]:g}")
        for name, row in [*rows.items(), ("∞", limit)]:
            table.add_row(str(name), *(f"{value:.4f}" for value in row))
        console.print(table)
        console.print("A gradient that lasted T − 1 steps is 0 from step T on. C_{T,k} is the share of a full step "
                      "that Adam still makes at step T + k.\narXiv:2601.05002, Eq. 36; ε = 0.", markup=False)
        console.next(MEASURE, "creditscope optimizer RUN")


COLUMNS = {"past the bound": "past", "distance (nats)": "distance", "after": "after", "KL": "kl"}


def show(console: Console, found: Findings) -> None:
    """One run, block by block, each with its verdict."""
    said = verdicts(found)
    method = f"{found.method:.{NAME}}, " if found.method else ""
    method += f"brake {found.brake:.{NAME}}, " if found.brake else ""
    console.print(f"[bold]{_safe(found.run)}[/]  {_safe(method)}{found.steps} steps\n")
    for block, lines in {"overshoot": _overshoot_lines, "scale": _scale_lines, "update": _update_lines,
                         "progress": _progress_lines}.items():
        for line in lines(found):
            console.print(line)
        if block in said:
            console.print(f"[bold]{escape(said[block])}[/]\n")


def _overshoot_lines(found: Findings) -> Iterator[Table | str]:
    rows = {str(k): row for k, row in found.by_update.items()} or {"last": found.overshoot}
    if any(name in row for row in rows.values() for name in COLUMNS.values()):
        table = new_table("k", "steps", *COLUMNS, title="overshoot by inner update")
        for k, row in rows.items():
            count = max((value.n for value in row.values()), default=0)
            table.add_row(k, str(count), *(_safe(_cell_of(row, name)) for name in COLUMNS.values()))
        yield table
    labels = {"overshoot": "mean of all bounded tokens (nats)", "carry": "carry", "carry_predicted": "predicted",
              "by_momentum": "growth by momentum", "by_fresh": "by fresh gradients"}
    facts = [f"{label} {spanned(found.overshoot[name])}" for name, label in labels.items() if name in found.overshoot]
    facts += [f"furthest token {found.furthest:.3g} nats"] if found.furthest is not None else []
    yield from _facts(facts)


def _scale_lines(found: Findings) -> Iterator[Table | str]:
    if found.sweep is None:
        return
    table = new_table("φ", *map(_cell, found.sweep.phi), title=f"reward scale, at step {found.sweep.step}")
    table.add_row("change", *map(_cell, found.sweep.change))
    table.add_row("cosine", *map(_cell, found.sweep.cosine))
    yield table
    most = found.sweep.most("change")
    yield from _facts([f"the largest change, over φ, is in {most[1]:.80}: {most[0]:.3g}"] if most else [])


def _update_lines(found: Findings) -> Iterator[str]:
    labels = {"cosine": "cosine with −gradient", "ratio": "‖Δ‖/‖θ‖", "momentum": "from momentum",
              "zero": "weights that did not move", "zero_bf16": "in bfloat16"}
    facts = [f"{labels[name]} {spanned(value)}" for name, value in found.update.items()]
    facts += [f"effective rank of the path {found.path[0]:.3g} of {found.path[1]} updates"] if found.path else []
    most = found.sweep.most("ratio") if found.sweep else None
    yield from _facts(facts + ([f"‖Δ‖/‖θ‖ is largest in {most[1]:.80}: {most[0]:.3g}"] if most else []), "update")


def _progress_lines(found: Findings) -> Iterator[str]:
    facts = [f"at ratio 1 {found.law.formula}"] if found.law else []
    facts += [f"r of J and reward {r}"] if (r := _correlation(found.progress)) else []
    yield from _facts(facts, "the loss as progress")


def as_table(runs: Sequence[Findings]) -> Table:
    """Runs beside each other."""
    rows: dict[str, Callable[[Findings], str]] = {
        "method": lambda one: f"{one.method or '':.{NAME}}",
        "brake": lambda one: f"{one.brake or '':.{NAME}}",
        "inner updates": lambda one: str(max(one.by_update, default="")),
        **{label: partial(lambda name, one: _cell_of(last_update(one)[1], name), name)
           for label, name in COLUMNS.items()},
        "carry": lambda one: _cell_of(one.overshoot, "carry"),
        "predicted": lambda one: _cell_of(one.overshoot, "carry_predicted"),
        "change at φ = 0.1": lambda one: percent(one.scale_change) if one.scale_change else "",
        "cosine with −gradient": lambda one: _cell_of(one.update, "cosine"),
        "from momentum": lambda one: _cell_of(one.update, "momentum"),
        "r of J and reward": lambda one: _correlation(one.progress),
    }
    table = new_table("", *(_safe(one.run) for one in runs))
    for label, text in rows.items():
        cells = [text(one) for one in runs]
        if any(cells):
            table.add_row(label, *(_safe(cell) for cell in cells))
    return table


def _correlation(seen: Mapping[str, Any]) -> str:
    return "" if seen.get("r") is None else spanned(Interval(seen["r"], seen["low"], seen["high"], seen["steps"]))


def _facts(facts: Sequence[str], title: str = "") -> Iterator[str]:
    """A block's numbers on one line, under its title where it has no table."""
    if facts:
        yield (f"[italic]{title}[/]\n" if title else "") + "  " + _safe("   ".join(facts))


def _safe(text: str) -> str:
    return escape(printable(text))


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _cell_of(row: Mapping[str, Interval], name: str) -> str:
    """A reading with its interval, shares in percent; "" where there is none."""
    return "" if name not in row else (percent if name in ("past", "after", "momentum") else spanned)(row[name])
