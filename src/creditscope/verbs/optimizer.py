"""`creditscope optimizer`: what the optimiser did to the credit in a run, read from its record alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from creditscope.compare import percent
from creditscope.describe import Law, law
from creditscope.dialects import DIALECTS
from creditscope.errors import CreditscopeError, printable
from creditscope.intervals import Interval, mean_interval
from creditscope.method import STOPS
from creditscope.methods import METHODS
from creditscope.microscope.spectrum import spectrum
from creditscope.optimizer.table import BRAKES
from creditscope.progress import ROUNDING, over_training, series
from creditscope.record import Record
from creditscope.verbs.output import Output

OVERSHOOT = ("past", "distance", "after", "kl", "carry", "carry_predicted", "by_momentum", "by_fresh")
BY_UPDATE = ("past", "distance", "overshoot", "after", "kl")
UPDATE = ("cosine", "ratio", "momentum", "zero", "zero_bf16")
CARRY_STEPS, CARRY_LAGS = (2, 10, 50, 1000), range(5)
MOST = 32
"""Reward scales, and characters of a method's name, that a line has room for."""
MEASURE = "creditscope train --inner-steps 4 --probe light"

# Where a verdict turns. Each is said beside the sentence that it decides.
HELD = 0.01
CLOSE = 0.1
BLIND, FOLLOWS = 0.05, 0.5
TURNED = 0.5
LOST = 0.1
SIGNAL = 0.5

LEGEND = {
    "overshoot": """\
k: passes over the batch; steps: batches that were looked at then (after the last pass: every --probe-every-th).
past: share of bounded tokens whose ratio is outside the bound.  distance: how far, in nats, mean of those outside.
after: share of that distance made after the token's own gradient was 0.  KL: from the sampler.
growth by momentum, by fresh gradients: what the two parts of the updates did to tokens that were past, to first order,
  in nats a bounded token; tokens on their way across are not in it, and long steps are not of first order.
carry: share of a full step that a token still makes at the first update without a gradient of its own; predicted:
  C_{T,0} of arXiv:2601.05002, Eq. 36 (creditscope optimizer --carry).""",
    "scale": """\
change: ‖Δ(φ) − Δ(1)‖/‖Δ(1)‖, if all credit since the start had been multiplied by φ.  cosine: of the two updates.
  –: the state does not say, as after a gradient that was clipped to --clip-norm.
  Rewards times φ are credit times φ, except where the method divides by a std: there they change nothing at all.""",
    "progress": "r: Pearson's, of J before the first update with reward/mean.",
}
INTERVALS = """\
[ ]: 95 % t-interval of a mean over the run's steps, Fisher's of r. Steps follow one another, so it says how much they
  differ, not how another run would come out."""


@dataclass(frozen=True)
class Optimizer:
    """Show what the optimiser did to the credit: overshoot, reward scale, update geometry, and the loss as progress.

    It reads the record of a run; nothing is trained and no model is loaded. Several runs make one table.

    For example:
      creditscope train --inner-steps 4 --probe light --out runs/a       a run that is measured
      creditscope optimizer runs/a                                       one screen
      creditscope optimizer runs/a runs/b                                beside each other
      creditscope optimizer runs/a --json                                everything, for a program
      creditscope optimizer --carry --betas 0.9 0.95                     how long Adam goes on without a gradient
      creditscope optimizer --brakes                                     what can be done about it
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
            return 0
        if self.carry:
            self._carry()
            return 0
        found = [read(path) for path in self.runs]
        if self.output.json:
            self.output.emit({"runs": [as_dict(one) for one in found]})
            return 0
        console = self.output.console()
        if len(found) == 1:
            show(console, found[0])
        else:
            console.print(as_table(found))
        blocks = {block for one in found for block in verdicts(one)}
        legend = [*(text for block, text in LEGEND.items() if block in blocks), INTERVALS]
        console.print("\n".join(legend) + "\n", markup=False)
        after = f"creditscope optimizer {found[0].run}" if len(found) > 1 else "creditscope optimizer --brakes"
        console.print(f"Next: {after if any(one.measured for one in found) else MEASURE}", markup=False)
        return 0

    def _brakes(self) -> None:
        if self.output.json:
            self.output.emit({"brakes": [asdict(row) | {"idle": sorted(row.idle)} for row in BRAKES.values()]})
            return
        console = self.output.console()
        for row in BRAKES.values():
            console.print(f"[bold]{row.name}[/]  {row.title}", highlight=False)
            console.print(f"  {row.equation}\n  cost: {row.cost}", markup=False, highlight=False)
            for name, option in row.options.items():
                console.print(f"  {name}={option.default}: {option.meaning}", markup=False, highlight=False)
            if row.note:
                console.print(f"  {row.note}", markup=False, highlight=False)
        console.print("\nw: what the objective gives a token, ∂J/∂log π; w(1): at its first sight.  c: the token's "
                      "share of the first moment.\nβ, γ: how the optimiser mixes them, β₁ and 1 − β₁ for Adam.  "
                      "Derivations: docs/optimizer.md", markup=False)
        console.print("Next: creditscope train --inner-steps 4 --brake recall", markup=False)

    def _carry(self) -> None:
        # Late: the formula stands beside the replay of torch's optimisers.
        from creditscope.optimizer.replay import carry, carry_limit

        try:
            rows = {step: [carry(step, lag, self.betas) for lag in CARRY_LAGS] for step in CARRY_STEPS}
            limit = [carry_limit(lag, self.betas) for lag in CARRY_LAGS]
        except OverflowError:
            raise CreditscopeError(f"--betas {self.betas[0]} {self.betas[1]}: the carry is too large for a float; give "
                                   f"a larger β₂") from None
        if self.output.json:
            self.output.emit({"betas": self.betas, "lags": list(CARRY_LAGS), "steps": rows, "limit": limit})
            return
        console = self.output.console()
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", title_justify="left",
                      title=f"C_{{T,k}} of Adam, β₁ = {self.betas[0]:g}, β₂ = {self.betas[1]:g}")
        for header in ("T", *(f"k = {lag}" for lag in CARRY_LAGS)):
            table.add_column(header, justify="right")
        for name, row in [*rows.items(), ("∞", limit)]:
            table.add_row(str(name), *(f"{value:.4f}" for value in row))
        console.print(table)
        console.print("A gradient that lasted T − 1 steps is 0 from step T on. C_{T,k} is the share of a full step "
                      "that Adam still makes at step T + k.\narXiv:2601.05002, Eq. 36; ε = 0.", markup=False)
        console.print(f"Next: {MEASURE}   creditscope optimizer RUN", markup=False)


# -- what is read ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """The update under other reward scales at one step. What is not a number was not defined."""

    step: int
    phi: tuple[float | None, ...]
    change: tuple[float | None, ...]
    cosine: tuple[float | None, ...]
    layers: Mapping[str, Mapping[str, tuple[float | None, ...]]]
    """layer -> change (F), cosine (F) and ratio ‖Δ‖/‖θ‖ (1), as far as they were kept."""

    def most(self, part: str) -> tuple[float, str] | None:
        """The largest number that any layer has under `part`, and the layer."""
        found = [(value, name) for name, layer in self.layers.items() for value in layer.get(part, ())
                 if value is not None]
        return max(found, default=None)


@dataclass(frozen=True)
class Findings:
    """A run in the numbers of this page. A mapping that is empty, or None, was not measured."""

    run: str
    method: str | None
    brake: str | None
    stops: str | None
    """What crossing a bound does to a token under the method: "zero", "half", "cap"; None without a bound."""
    steps: int
    overshoot: Mapping[str, Interval]
    """At the last sight of a batch."""
    furthest: float | None
    """The largest overshoot of any token at any step, in nats."""
    by_update: Mapping[int, Mapping[str, Interval]]
    scale_change: Interval | None
    sweep: Sweep | None
    update: Mapping[str, Interval]
    path: tuple[float, int] | None
    """Effective rank of the path of the updates that were read, and how many they are."""
    progress: Mapping[str, Any]
    law: Law | None

    @property
    def measured(self) -> bool:
        """Whether the run was probed; every run has rewards and losses."""
        return bool(self.overshoot or self.by_update or self.scale_change or self.sweep or self.update)


def read(path: Path) -> Findings:
    """The numbers of a run, means over the steps that have them."""
    record = Record.open(path)
    lines, kept = record.steps(), record.optimizer_readings()

    def values(key: str) -> list[float]:
        return [value for value, in series(path, lines, key)]

    def means(keys: Mapping[str, str]) -> dict[str, Interval]:
        found = {name: values(key) for name, key in keys.items()}
        return {name: mean_interval(seen) for name, seen in found.items() if seen}

    numbered = {int(m[1]) for line in lines for key in line if (m := re.fullmatch(r"overshoot/([1-9]\d?)/\w+", key))}
    by_update = {k: means({name: f"overshoot/{k}/{name}" for name in BY_UPDATE}) for k in sorted(numbered)}
    found = Findings(
        run=str(path), method=_method(record), brake=_brake(record), stops=_stops(record),
        steps=sum("reward/mean" in line for line in lines),
        overshoot=means({name: f"overshoot/{name}" for name in OVERSHOOT} | {"overshoot": "optimizer/overshoot"}),
        furthest=max(values("overshoot/max"), default=None),
        by_update={k: row for k, row in by_update.items() if row},
        scale_change=means({"change": "optimizer/scale_change"}).get("change"),
        sweep=read_sweep(record, kept[-1]) if kept else None,
        update=means({name: f"update/{name}" for name in UPDATE}), path=path_rank(record),
        progress=over_training(record), law=_law(record))
    if not (found.measured or found.progress):
        raise CreditscopeError(f"{path} holds no reading of the optimiser; train with --inner-steps 4 --probe light")
    return found


def _method(record: Record) -> str | None:
    name = record.config.get("method")
    return name if isinstance(name, str) else None


def _brake(record: Record) -> str | None:
    name = record.config.get("brake")
    return name if isinstance(name, str) and name != "none" else None


def _stops(record: Record) -> str | None:
    row = {**METHODS, **DIALECTS}.get(_method(record) or "")
    return None if row is None else STOPS[row.trust] or STOPS[row.bound]


def _law(record: Record) -> Law | None:
    """The law of the run's method with the run's β; None for a method that is not in the table."""
    row = {**METHODS, **DIALECTS}.get(_method(record) or "")
    if row is None:
        return None
    beta = record.config.get("beta")
    if beta is not None and row.kl != "none":
        row = row.but(name=row.name, beta=beta)
    if record.config.get("credit") not in (None, "outcome"):  # not the method's own advantage
        row = row.but(name=row.name, baseline="external", scale="none", whiten="none", entropy_cost=0.0)
    return law(row)


def path_rank(record: Record) -> tuple[float, int] | None:
    """(Σσ)²/Σσ² of the matrix of updates (readings × parameters), from their sketches; None for fewer than two.

    A sketch of k² numbers can tell the ranks of k²/4 updates: of more, the last ones are taken.
    """
    found = [row for step in record.optimizer_readings()
             if (row := record.optimizer_reading(step).get("path_update")) is not None]
    if len(found) < 2:
        return None
    if any(row.ndim != 1 or row.dtype.kind != "f" or row.shape != found[0].shape for row in found):
        raise CreditscopeError(f"{record.path}/optimizer: path_update is not the same kind of list at every step; is "
                               f"this a run of creditscope train?")
    rows = np.array(found[-max(2, len(found[0]) // 4):], dtype=np.float64)
    if not np.isfinite(rows).all() or not rows.any():
        return None
    return spectrum(rows @ rows.T, eps=float(np.finfo(np.float32).eps)).effective_rank, len(rows)


def read_sweep(record: Record, step: int) -> Sweep | None:
    """The reading of a step, with every array in the shape that phi gives it; None where the scale was not read."""
    arrays = record.optimizer_reading(step)
    if not arrays.keys() & {"phi", "change", "cosine"}:
        return None
    where = f"{record.path}/optimizer/{step:06d}.npz"

    def numbers(name: str, *shape: int) -> NDArray[Any]:
        value = arrays.get(name)
        if value is None or value.shape != shape or value.dtype.kind not in "fiu":
            raise CreditscopeError(f"{where}: {name} {_shape(value)}, not numbers of shape {shape}; is this a run of "
                                   f"creditscope train?")
        return value

    phi, names = (arrays.get(name, np.empty(0, dtype=str)) for name in ("phi", "layer_names"))
    if phi.ndim != 1 or not 1 <= len(phi) <= MOST or names.ndim != 1 or names.dtype.kind != "U":
        raise CreditscopeError(f"{where}: phi {_shape(arrays.get('phi'))} and layer_names {_shape(names)}, not 1 to "
                               f"{MOST} numbers and a list of names; is this a run of creditscope train?")
    whole = {name: _finite(numbers(name, len(phi))) for name in ("phi", "change", "cosine")}
    shapes = {"change": (len(names), len(phi)), "cosine": (len(names), len(phi)), "ratio": (len(names),)}
    parts = {part: numbers(f"layer_{part}", *shape).reshape(len(names), -1) for part, shape in shapes.items()
             if f"layer_{part}" in arrays}
    layers = {str(name): {part: _finite(rows[i]) for part, rows in parts.items()} for i, name in enumerate(names)}
    return Sweep(step=step, layers=layers, **whole)


def _finite(values: NDArray[Any]) -> tuple[float | None, ...]:
    return tuple(float(value) if np.isfinite(value) else None for value in values)


def _shape(value: NDArray[Any] | None) -> str:
    return "is not there" if value is None else f"is {value.dtype} of shape {value.shape}"


def as_dict(found: Findings) -> dict[str, Any]:
    """Everything as data, with the verdicts and the numbers at which they turn."""
    turns = {"held": HELD, "close": CLOSE, "blind": BLIND, "follows": FOLLOWS, "turned": TURNED, "lost": LOST,
             "signal": SIGNAL}
    return asdict(found) | {"verdicts": verdicts(found), "thresholds": turns}


# -- what is said ----------------------------------------------------------------------------------------------------


def verdicts(found: Findings) -> dict[str, str]:
    """One sentence a block, by rule; a block that was not measured has none."""
    said = {"overshoot": _on_overshoot(found), "scale": _on_scale(found), "update": _on_update(found.update),
            "progress": _on_progress(found)}
    return {block: sentence for block, sentence in said.items() if sentence}


def _share(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def last_update(found: Findings) -> tuple[str, Mapping[str, Interval]]:
    """The overshoot after the last inner update, and what it is called."""
    if not found.by_update:
        return "At the last sight", found.overshoot
    k = max(found.by_update)
    return f"After {k} update{'s' * (k > 1)}", found.by_update[k]


def _on_overshoot(found: Findings) -> str:
    when, row = last_update(found)
    if "past" not in row:
        return ""
    past = row["past"].mean
    if past < HELD:
        said = f"{when} {_share(past, 2)} of tokens are past the bound, less than {_share(HELD)}: the bound holds."
    else:
        said = f"{when} {_share(past, 1)} of tokens are past the bound" + (
            f", by {row['distance'].mean:.2g} nats on average" if "distance" in row else "") + (
            f"; {_after(found, row['after'].mean)}." if "after" in row else ".")
    if "carry" in found.overshoot and "carry_predicted" in found.overshoot:
        seen, told = found.overshoot["carry"].mean, found.overshoot["carry_predicted"].mean
        near = abs(seen - told) <= CLOSE * abs(told)
        said += f" The carry is {seen:.2f} where momentum alone predicts {told:.2f}" + (
            f", under the brake {found.brake:.{MOST}}." if found.brake else
            f": {'within' if near else 'apart by more than'} {_share(CLOSE)}.")
    return said


def _after(found: Findings, share: float) -> str:
    """What became of tokens once they were past, in words that fit the method's bound."""
    since = "their own gradient had stopped" if found.stops in (None, "zero") else "they had crossed"
    if share < 0:
        return f"on the whole they came back after {since}"
    return f"{_share(share)} of that was moved after {since}"


def _on_scale(found: Findings) -> str:
    if found.scale_change is None:
        return ""
    change = found.scale_change.mean
    if change < BLIND:
        what = f"less than {_share(BLIND)}: the optimiser is blind to the size of the credit"
    elif change > FOLLOWS:
        what = f"more than {_share(FOLLOWS)}: the update follows the size of the credit"
    else:
        what = f"between {_share(BLIND)} and {_share(FOLLOWS)}: the size of the credit comes through in part"
    return f"Credit a tenth as large would have changed the update by {_share(change, 2)}, {what}."


def _on_update(update: Mapping[str, Interval]) -> str:
    said = []
    if "cosine" in update:
        cosine = update["cosine"].mean
        said.append(f"The update's cosine with the downhill gradient is {cosine:.2f}, "
                    + (f"below {TURNED:g}: the optimiser sets the direction more than this batch does." if
                       cosine < TURNED else f"at least {TURNED:g}: it goes where this batch points."))
    if "momentum" in update:
        said.append(f"{_share(update['momentum'].mean)} of it comes from momentum.")
    if "zero_bf16" in update and update["zero_bf16"].mean > LOST:
        said.append(f"In bfloat16 {_share(update['zero_bf16'].mean)} of the weights would not move, more than "
                    f"{_share(LOST)}.")
    return " ".join(said)


def _on_progress(found: Findings) -> str:
    seen, sentence = found.progress, found.law.sentence if found.law else ""
    if not seen:
        return sentence
    if seen["largest"] <= ROUNDING:
        return f"J stayed within {ROUNDING:g} of 0. {sentence}".rstrip()
    if seen["r"] is None:
        return f"J or the reward did not vary over {seen['steps']} steps. {sentence}".rstrip()
    if seen["low"] is None:
        return f"{seen['steps']} steps are too few to say whether J goes with the reward. {sentence}".rstrip()
    around_zero = seen["low"] * seen["high"] <= 0
    if around_zero or abs(seen["r"]) < SIGNAL:
        why = "its interval holds 0" if around_zero else f"below {SIGNAL:g} in size"
        return f"J says little of the reward: r = {seen['r']:.2f}, {why}. {sentence}".rstrip()
    way = "rose and fell with" if seen["r"] > 0 else "went against"
    return f"In this run J {way} the reward: r = {seen['r']:.2f}, at least {SIGNAL:g} in size. {sentence}".rstrip()


# -- what is shown ---------------------------------------------------------------------------------------------------


def number(value: Interval) -> str:
    """A mean with its interval.

    >>> number(Interval(0.1234, 0.1, 0.15, 5)), number(Interval(2e-5, None, None, 1))
    ('0.123 [0.1, 0.15]', '2e-05')
    """
    ends = "" if value.low is None or value.high is None else f" [{value.low:.3g}, {value.high:.3g}]"
    return f"{value.mean:.3g}{ends}"


COLUMNS: Mapping[str, tuple[str, Callable[[Interval], str]]] = {
    "past the bound": ("past", percent), "distance (nats)": ("distance", number), "after": ("after", percent),
    "KL": ("kl", number)}


def show(console: Console, found: Findings) -> None:
    """One run, block by block, each with its verdict."""
    said = verdicts(found)
    method = f"{found.method:.{MOST}}, " if found.method else ""
    method += f"brake {found.brake:.{MOST}}, " if found.brake else ""
    console.print(f"[bold]{_safe(found.run)}[/]  {_safe(method)}{found.steps} steps\n")
    for block, lines in {"overshoot": _overshoot_lines, "scale": _scale_lines, "update": _update_lines,
                         "progress": _progress_lines}.items():
        for line in lines(found):
            console.print(line)
        if block in said:
            console.print(f"[bold]{escape(said[block])}[/]\n")


def _overshoot_lines(found: Findings) -> Iterator[Table | str]:
    rows = {str(k): row for k, row in found.by_update.items()} or {"last": found.overshoot}
    if any(name in row for row in rows.values() for name, _ in COLUMNS.values()):
        table = _table("overshoot by inner update", ("k", "steps", *COLUMNS))
        for k, row in rows.items():
            count = max((value.n for value in row.values()), default=0)
            table.add_row(k, str(count), *(_safe(_optional(row.get(name), text)) for name, text in COLUMNS.values()))
        yield table
    labels = {"overshoot": "mean of all bounded tokens (nats)", "carry": "carry", "carry_predicted": "predicted",
              "by_momentum": "growth by momentum", "by_fresh": "by fresh gradients"}
    facts = [f"{label} {number(found.overshoot[name])}" for name, label in labels.items() if name in found.overshoot]
    facts += [f"furthest token {found.furthest:.3g} nats"] if found.furthest is not None else []
    yield from _facts(facts)


def _scale_lines(found: Findings) -> Iterator[Table | str]:
    if found.sweep is None:
        return
    table = _table(f"reward scale, at step {found.sweep.step}", ("φ", *map(_cell, found.sweep.phi)))
    table.add_row("change", *map(_cell, found.sweep.change))
    table.add_row("cosine", *map(_cell, found.sweep.cosine))
    yield table
    most = found.sweep.most("change")
    yield from _facts([f"the largest change, over φ, is in {most[1]:.80}: {most[0]:.3g}"] if most else [])


def _update_lines(found: Findings) -> Iterator[str]:
    labels = {"cosine": "cosine with −gradient", "ratio": "‖Δ‖/‖θ‖", "momentum": "from momentum",
              "zero": "weights that did not move", "zero_bf16": "in bfloat16"}
    facts = [f"{labels[name]} {number(value)}" for name, value in found.update.items()]
    facts += [f"effective rank of the path {found.path[0]:.3g} of {found.path[1]} updates"] if found.path else []
    most = found.sweep.most("ratio") if found.sweep else None
    yield from _facts(facts + ([f"‖Δ‖/‖θ‖ is largest in {most[1]:.80}: {most[0]:.3g}"] if most else []), "update")


def _progress_lines(found: Findings) -> Iterator[str]:
    facts = [f"at ratio 1 {found.law.formula}"] if found.law else []
    r = _correlation(found.progress)
    yield from _facts(facts + ([f"r of J and reward {r}"] if r else []), "the loss as progress")


def as_table(runs: Sequence[Findings]) -> Table:
    """Runs beside each other: the last inner update, the reward scale, the update, the loss."""
    rows: dict[str, Callable[[Findings], str]] = {
        "method": lambda one: f"{one.method or '':.{MOST}}",
        "brake": lambda one: f"{one.brake or '':.{MOST}}",
        "inner updates": lambda one: str(max(one.by_update, default="")),
        **{label: partial(_at_last, name, text) for label, (name, text) in COLUMNS.items()},
        "carry": lambda one: _optional(one.overshoot.get("carry"), number),
        "predicted": lambda one: _optional(one.overshoot.get("carry_predicted"), number),
        "change at φ = 0.1": lambda one: _optional(one.scale_change, percent),
        "cosine with −gradient": lambda one: _optional(one.update.get("cosine"), number),
        "from momentum": lambda one: _optional(one.update.get("momentum"), percent),
        "r of J and reward": lambda one: _correlation(one.progress),
    }
    table = _table("", ("", *(_safe(one.run) for one in runs)))
    for label, text in rows.items():
        cells = [text(one) for one in runs]
        if any(cells):
            table.add_row(label, *(_safe(cell) for cell in cells))
    return table


def _correlation(seen: Mapping[str, Any]) -> str:
    if seen.get("r") is None:
        return ""
    return number(Interval(seen["r"], seen["low"], seen["high"], seen["steps"]))


def _at_last(name: str, text: Callable[[Interval], str], one: Findings) -> str:
    return _optional(last_update(one)[1].get(name), text)


def _table(title: str, headers: Sequence[str]) -> Table:
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left", overflow="fold")
    return table


def _facts(facts: Sequence[str], title: str = "") -> Iterator[str]:
    """A block's numbers on one line, under its title where it has no table."""
    if facts:
        yield (f"[italic]{title}[/]\n" if title else "") + "  " + _safe("   ".join(facts))


def _safe(text: str) -> str:
    return escape(printable(text))


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _optional(value: Interval | None, text: Callable[[Interval], str]) -> str:
    return "" if value is None else text(value)
