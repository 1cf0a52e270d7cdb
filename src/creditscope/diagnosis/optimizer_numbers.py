"""Overshoot, reward scale, update geometry and the loss as progress, from the steps of a run alone.

    read(path)                 of a record; a value that no run writes is an error
    of_steps(config, steps)    of steps as they are; a value that is no number is left out
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditscope.errors import CreditscopeError
from creditscope.methods.find import row_of
from creditscope.methods.words import Law, law
from creditscope.runs import schema
from creditscope.runs.columns import Steps
from creditscope.runs.correlation import LARGEST, of_pairs, series
from creditscope.runs.intervals import Interval, mean_interval
from creditscope.runs.record import Record
from creditscope.runs.trained import trained

OVERSHOOT: Mapping[str, schema.Metric] = {key.rpartition("/")[2]: key for key in (
    schema.OPTIMIZER_OVERSHOOT, schema.OVERSHOOT_PAST, schema.OVERSHOOT_DISTANCE, schema.OVERSHOOT_AFTER,
    schema.OVERSHOOT_KL, schema.OVERSHOOT_CARRY, schema.OVERSHOOT_CARRY_PREDICTED, schema.OVERSHOOT_BY_MOMENTUM,
    schema.OVERSHOOT_BY_FRESH, schema.OVERSHOOT_BY_DECAY)}
UPDATE: Mapping[str, schema.Metric] = {key.rpartition("/")[2]: key for key in (
    schema.UPDATE_COSINE, schema.UPDATE_RATIO, schema.UPDATE_MOMENTUM, schema.UPDATE_ZERO, schema.UPDATE_ZERO_BF16)}
SCALES = 32
"""Reward scales that a page has room for."""


@dataclass(frozen=True)
class Sweep:
    """The update under other reward scales φ at one step; None where it is not defined."""

    step: int
    phi: tuple[float | None, ...]
    change: tuple[float | None, ...]
    cosine: tuple[float | None, ...]
    layers: Mapping[str, Mapping[str, tuple[float | None, ...]]]
    """layer -> change (F), cosine (F) and ratio ‖Δ‖/‖θ‖ (1), where they were kept."""

    def most(self, part: str) -> tuple[float, str] | None:
        """The largest number that any layer has under `part`, and the layer."""
        found = [(value, name) for name, layer in self.layers.items() for value in layer.get(part, ())
                 if value is not None]
        return max(found, default=None)


@dataclass(frozen=True)
class Findings:
    """A run in numbers. An empty mapping, or None, was not measured."""

    run: str
    method: str | None
    brake: str | None
    stops: str | None
    """Effect of the method's bound on a token past it: "zero", "half", "cap"; None without a bound."""
    steps: int
    overshoot: Mapping[str, Interval]
    """After the last update on a batch."""
    furthest: float | None
    """The largest overshoot of any token at any step, in nats."""
    by_update: Mapping[int, Mapping[str, Interval]]
    scale_change: Interval | None
    """Of the update, had all credit since the start been a tenth."""
    scale_change_now: Interval | None
    """The same from the step itself on, which is known also after a gradient was clipped."""
    sweep: Sweep | None
    update: Mapping[str, Interval]
    path: tuple[float, int] | None
    """(effective rank of the matrix of updates that were read, their number)."""
    progress: Mapping[str, Any]
    law: Law | None

    @property
    def measured(self) -> bool:
        """Whether the run was probed; every run has rewards and losses."""
        return bool(self.overshoot or self.by_update or self.scale_change or self.scale_change_now or self.sweep
                    or self.update)


def read(path: Path) -> Findings:
    """The numbers of a run's record. It is untrusted: text in place of a number, or a setting that no run has, is an
    error."""
    record = Record.open(path)
    steps, kept = record.columns(), record.optimizer_readings()
    for key in steps.names:
        if key in READ or schema.OVERSHOOT_UPDATE.find(key):
            series(path, steps, key)
    _refuse_beta(record)
    found = of_steps(record.config, steps, run=str(path), path=path_rank(record),
                     sweep=read_sweep(record, kept[-1]) if kept else None)
    if not (found.measured or found.progress):
        raise CreditscopeError(f"{path} holds no reading of the optimiser; train with --inner-steps 4 --probe light")
    return found


READ = frozenset({*OVERSHOOT.values(), *UPDATE.values(), schema.OVERSHOOT_MAX, schema.OPTIMIZER_SCALE_CHANGE,
                  schema.OPTIMIZER_SCALE_CHANGE_NOW, schema.OBJECTIVE_VALUE, schema.REWARD_MEAN})
"""Metrics that are read, besides those after each inner update."""


def of_steps(config: Mapping[str, Any], steps: Steps, *, run: str = "", sweep: Sweep | None = None,
             path: tuple[float, int] | None = None) -> Findings:
    """The numbers of a run, means over the steps that have them, with Student's interval over these steps."""
    def values(key: str) -> list[float]:
        return [value for value in steps.numbers(key).values.tolist() if abs(value) <= LARGEST]

    def means(keys: Mapping[str, str]) -> dict[str, Interval]:
        found = {name: values(key) for name, key in keys.items()}
        return {name: mean_interval(seen) for name, seen in found.items() if seen}

    each, row, brake = schema.OVERSHOOT_UPDATE, row_of(config), _name(config, "brake")
    by_update = {k: means({name: each(name, k) for name in each.readings}) for k in updates_read(steps)}
    scale = means({"start": schema.OPTIMIZER_SCALE_CHANGE, "now": schema.OPTIMIZER_SCALE_CHANGE_NOW})
    return Findings(
        run=run, method=_name(config, "method"), brake=None if brake == "none" else brake,
        stops=row.stops if row else None, law=law(row.under(config.get("credit"))) if row else None,
        steps=len(trained(steps)), overshoot=means(OVERSHOOT),
        furthest=max(values(schema.OVERSHOOT_MAX), default=None),
        by_update={k: seen for k, seen in by_update.items() if seen},
        scale_change=scale.get("start"), scale_change_now=scale.get("now"),
        sweep=sweep, update=means(UPDATE), path=path, progress=of_pairs(_progress(steps)))


def updates_read(steps: Steps) -> list[int]:
    """Inner updates k that have a reading of their own, `overshoot/k/…`."""
    return sorted({int(m[1]) for key in steps.names if (m := re.fullmatch(r"overshoot/([1-9]\d?)/\w+", key))})


def _progress(steps: Steps) -> list[tuple[float, ...]]:
    """(J, mean reward) of the steps that have both."""
    value, reward = (steps.numbers(key) for key in (schema.OBJECTIVE_VALUE, schema.REWARD_MEAN))
    _, mine, theirs = np.intersect1d(value.at, reward.at, assume_unique=True, return_indices=True)
    pairs = zip(value.values[mine].tolist(), reward.values[theirs].tolist(), strict=True)
    return [pair for pair in pairs if max(map(abs, pair)) <= LARGEST]


def _name(config: Mapping[str, Any], setting: str) -> str | None:
    name = config.get(setting)
    return name if isinstance(name, str) else None


def _refuse_beta(record: Record) -> None:
    """A method of the table with a β that it cannot have is no run of creditscope's."""
    if row_of(record.config) is None and row_of({"method": record.config.get("method")}):
        raise CreditscopeError(f"{record.path}: beta is {record.config.get('beta')!r:.60}, which method "
                               f"{_name(record.config, 'method')} cannot have; is this a run of creditscope lab train?")


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
                               f"this a run of creditscope lab train?")
    rows = np.array(found[-max(2, len(found[0]) // 4):], dtype=np.float64)
    if not np.isfinite(rows).all() or not rows.any():
        return None
    sizes = np.linalg.svd(rows, compute_uv=False)
    sizes = sizes[sizes > sizes[0] * np.sqrt(len(rows) * np.finfo(np.float32).eps)]  # the rest is rounding
    return float(sizes.sum() ** 2 / (sizes**2).sum()), len(rows)


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
                                   f"creditscope lab train?")
        return value

    phi, names = (arrays.get(name, np.empty(0, dtype=str)) for name in ("phi", "layer_names"))
    if phi.ndim != 1 or not 1 <= len(phi) <= SCALES or names.ndim != 1 or names.dtype.kind != "U":
        raise CreditscopeError(f"{where}: phi {_shape(arrays.get('phi'))} and layer_names {_shape(names)}, not 1 to "
                               f"{SCALES} numbers and a list of names; is this a run of creditscope lab train?")
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
