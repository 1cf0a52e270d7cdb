"""A run's part of `creditscope inspect`: overshoot, reward scale and update geometry, from the record alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape

from creditscope.cli.output import Output, Screen
from creditscope.diagnosis.optimizer_numbers import Findings, read
from creditscope.diagnosis.optimizer_verdicts import NAME, as_dict, last_update, verdicts
from creditscope.errors import command_line, printable
from creditscope.runs.intervals import Interval
from creditscope.runs.numbers import percent, spanned

MEASURE = "creditscope lab train --inner-steps 4 --probe light"

LEGEND = {
    "overshoot": """\
k: passes over the batch; steps: batches that were read then (after the last pass: every --probe-every-th).
past: share of bounded tokens whose ratio is outside the bound.  distance: how far, in nats, mean of those outside.
after: share of that distance made after the token's own gradient was 0.  KL: from the sampler.
growth by momentum, by fresh gradients: effect of the two parts of the updates on tokens that were past, to first order,
  in nats per bounded token; tokens that cross the bound in the update are not in it.
carry: share of a full step that a token still makes at the first update without a gradient of its own; predicted:
  C_{T,0} of arXiv:2601.05002, Eq. 36 (creditscope papers carry).""",
    "scale": """\
change: ‖Δ(φ) − Δ(1)‖/‖Δ(1)‖, if all credit since the start had been multiplied by φ.  cosine: of the two updates.
  –: not known from the optimiser's state, as after a gradient that was clipped to --clip-norm.
  Rewards times φ are credit times φ, except where the method divides by a std: there they change nothing.""",
    "progress": "r: Pearson's, of J before the first update with reward/mean.",
}
INTERVALS = """\
[ ]: 95 % t-interval of a mean over the run's steps, Fisher's of r. Steps are not independent: the interval measures
  how much they differ, not the spread between runs."""


def show_runs(paths: Sequence[Path], output: Output, why: bool = False) -> None:
    """One run block by block, or several beside each other; with `why` the meaning of each number."""
    found = [read(path) for path in paths]
    if (console := output.console_or_json({"runs": [as_dict(one) for one in found]})) is None:
        return
    if len(found) == 1:
        show(console, found[0])
    else:
        show_beside(console, found)
    if why:
        blocks = {block for one in found for block in verdicts(one)}
        legend = [*(text for block, text in LEGEND.items() if block in blocks), INTERVALS]
        console.print("\n".join(legend) + "\n", markup=False)
    after = (command_line("inspect", found[0].run) if len(found) > 1 else "creditscope list brakes" if why else
             "the same with --why, for the meaning of each number")
    console.next(after if any(one.measured for one in found) else MEASURE)


COLUMNS = {"past the bound": "past", "distance (nats)": "distance", "after": "after", "KL": "kl"}


def show(console: Screen, found: Findings) -> None:
    """One run, block by block, each with its verdict."""
    said = verdicts(found)
    method = f"{found.method:.{NAME}}, " if found.method else ""
    method += f"brake {found.brake:.{NAME}}, " if found.brake else ""
    console.print(f"[bold]{_safe(found.run)}[/]  {_safe(method)}{found.steps} steps\n")
    for block, show_block in {"overshoot": _overshoot, "scale": _scale, "update": _update,
                              "progress": _progress}.items():
        show_block(console, found)
        if block in said:
            console.print(f"[bold]{escape(said[block])}[/]\n")


def _overshoot(console: Screen, found: Findings) -> None:
    rows = {str(k): row for k, row in found.by_update.items()} or {"last": found.overshoot}
    if any(name in row for row in rows.values() for name in COLUMNS.values()):
        counts = {k: max((value.n for value in row.values()), default=0) for k, row in rows.items()}
        console.print_columns(("k", "steps", *COLUMNS), [
            [k, str(counts[k]), *(_cell_of(row, name) for name in COLUMNS.values())] for k, row in rows.items()],
            title="overshoot by inner update")
    labels = {"overshoot": "mean of all bounded tokens (nats)", "carry": "carry", "carry_predicted": "predicted",
              "by_momentum": "growth by momentum", "by_fresh": "by fresh gradients"}
    facts = [f"{label} {spanned(found.overshoot[name])}" for name, label in labels.items() if name in found.overshoot]
    facts += [f"furthest token {found.furthest:.3g} nats"] if found.furthest is not None else []
    _facts(console, facts)


def _scale(console: Screen, found: Findings) -> None:
    if found.sweep is None:
        return
    console.print_columns(("φ", *map(_cell, found.sweep.phi)), [
        ["change", *map(_cell, found.sweep.change)], ["cosine", *map(_cell, found.sweep.cosine)]],
        title=f"reward scale, at step {found.sweep.step}")
    most = found.sweep.most("change")
    _facts(console, [f"the largest change, over φ, is in {most[1]:.80}: {most[0]:.3g}"] if most else [])


def _update(console: Screen, found: Findings) -> None:
    labels = {"cosine": "cosine with −gradient", "ratio": "‖Δ‖/‖θ‖", "momentum": "from momentum",
              "zero": "weights that did not move", "zero_bf16": "in bfloat16"}
    facts = [f"{labels[name]} {spanned(value)}" for name, value in found.update.items()]
    facts += [f"effective rank of the path {found.path[0]:.3g} of {found.path[1]} updates"] if found.path else []
    most = found.sweep.most("ratio") if found.sweep else None
    _facts(console, facts + ([f"‖Δ‖/‖θ‖ is largest in {most[1]:.80}: {most[0]:.3g}"] if most else []), "update")


def _progress(console: Screen, found: Findings) -> None:
    facts = [f"at ratio 1 {found.law.formula}"] if found.law else []
    facts += [f"r of J and reward {r}"] if (r := _correlation(found.progress)) else []
    _facts(console, facts, "the loss as progress")


def show_beside(console: Screen, runs: Sequence[Findings]) -> None:
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
    cells = [[label, *(text(one) for one in runs)] for label, text in rows.items()]
    console.print_columns(("", *(one.run for one in runs)), [row for row in cells if any(row[1:])])


def _correlation(seen: Mapping[str, Any]) -> str:
    return "" if seen.get("r") is None else spanned(Interval(seen["r"], seen["low"], seen["high"], seen["steps"]))


def _facts(console: Screen, facts: Sequence[str], title: str = "") -> None:
    """A block's numbers on one line, or below each other where they do not fit, under its title if it has one."""
    line = "   ".join(facts)
    told = line if len(line) + 2 <= console.width else "\n  ".join(facts)
    if facts:
        console.print((f"[italic]{title}[/]\n" if title else "") + "  " + _safe(told))


def _safe(text: str) -> str:
    return escape(printable(text))


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _cell_of(row: Mapping[str, Interval], name: str) -> str:
    """A reading with its interval, shares in percent; "" where there is none."""
    return "" if name not in row else (percent if name in ("past", "after", "momentum") else spanned)(row[name])
