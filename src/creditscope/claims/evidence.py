"""The evidence of a run: the numbers that claims are tested on, from its record or from a saved file.

    config, versions      of the run; paths are cut to their last part
    steps                 the metrics of each step, by column
    groups                one entry per live group of a reading: every rank of its rollout matrix, by column
    readings              one entry per reading: the step, its unanimous groups and the largest entry of their Grams
    turns                 one entry per kept step and turn of a task with turns: the bias of credit (`claims.turns`)

A column of `groups` is OBJECT/DEFINITION. Objects: `all` (every parameter), `qv` (q_proj and v_proj of all layers
together), `layer` (each q_proj and v_proj by itself, then the mean over them, which is what arXiv:2606.29238 did), and
`credit:NAME` (all parameters, the same rollouts under another credit). No torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from creditscope.claims.turns import bias_by_turn
from creditscope.errors import CreditscopeError
from creditscope.files.arrays import fitting
from creditscope.files.jsonlines import parse_json, read_whole
from creditscope.microscope.geometry import centred_rank, norm_null, ranks, w_null
from creditscope.microscope.spectrum import orthogonal_null, spectrum
from creditscope.runs import schema
from creditscope.runs.arrays import READING, ROLLOUTS
from creditscope.runs.columns import Steps
from creditscope.runs.compare import is_finished
from creditscope.runs.formats import upgraded
from creditscope.runs.intervals import Interval, mean_interval
from creditscope.runs.numbers import mean, mean_over, spanned
from creditscope.runs.record import WRITERS, Record

FORMAT = "creditscope evidence 2"
FORMATS = {"creditscope evidence 1": 1, FORMAT: 2}
"""Formats that can be read -> the format of the records they were made of."""
TRACKED = (".q_proj.weight", ".v_proj.weight")
"""The parameters of arXiv:2606.29238."""
ENOUGH = 3
"""Runs below which there is no interval."""
KEPT = (
    schema.REWARD_MEAN, schema.REWARD_STD, schema.SIGNAL_GROUPS, schema.SIGNAL_LIVE_GROUPS, schema.SIGNAL_DEAD_GROUPS,
    "eval/", schema.ROLLOUTS_SPENT, schema.ROLLOUTS_SAMPLED, schema.CREDIT_WITHIN, schema.CREDIT_DEAD_GROUPS,
    schema.GRAM_GROUP_EFFECTIVE_RANK, "baseline/", "tokens/", "also/", "adapt/", schema.OPTIMIZER_SCALE_CHANGE,
    schema.OPTIMIZER_OVERSHOOT, schema.OPTIMIZER_UPDATES, schema.OVERSHOOT_PAST, schema.OVERSHOOT_DISTANCE,
    schema.OVERSHOOT_AFTER, schema.OVERSHOOT_KL, schema.OVERSHOOT_CARRY, schema.OBJECTIVE_VALUE, schema.ENTROPY_MEAN,
    schema.LENGTH_MEAN, schema.TIME_STEP, schema.TIME_EVAL, schema.TIME_SCOPE, schema.TIME_PROBE, schema.TIME_TRAIN)
"""Metrics that are kept, by the start of their names."""
TURNS = ("step_state", "step_reward", "group")

Columns = dict[str, list[float | None]]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A run in numbers."""

    name: str
    config: Mapping[str, Any]
    versions: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = False
    steps: Sequence[Mapping[str, Any]] = ()
    """One mapping per step; a metric that a step does not have is absent."""
    groups: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    readings: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    turns: Mapping[str, Sequence[float | None]] = field(default_factory=dict)

    def __getitem__(self, setting: str) -> Any:
        """A setting of the run, or None."""
        return self.config.get(setting)

    @property
    def subject(self) -> str:
        """Model, task and method."""
        return " · ".join(str(self.config.get(name, "?")) for name in ("model", "task", "method"))

    @cached_property
    def columns(self) -> Steps:
        return Steps.of(self.steps)

    @cached_property
    def trained(self) -> Steps:
        """The steps that sampled, without a last line that is an evaluation alone."""
        return self.columns.having(schema.ROLLOUTS_SPENT)

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) where the metric was recorded."""
        return [(int(step), float(value)) for step, value in self.columns.together("step", metric)]

    def mean(self, metric: str) -> float | None:
        """Over the steps that have it."""
        return mean_over(self.steps, metric)

    def points(self, by: str = "spent") -> list[tuple[int, float]]:
        """(rollouts spent, or with by="step" steps taken, so far; accuracy) at each evaluation, in order."""
        at, accuracy = self.columns.column(schema.EVAL_ACCURACY)
        trained, spent = self.columns.column(schema.ROLLOUTS_SPENT)
        taken = np.searchsorted(trained, at)
        until = np.append(0, np.cumsum(spent.astype(np.int64)))[taken] if by == "spent" else taken
        return list(zip(until.tolist(), accuracy.astype(np.float64).tolist(), strict=True))

    def column(self, name: str) -> list[float]:
        """A column of `groups`, without the groups that do not have it."""
        return [value for value in self.groups.get(name, ()) if value is not None]

    def by_step(self, name: str) -> dict[int, float]:
        """step -> mean of a column over the reading's live groups that have it."""
        found: dict[int, list[float]] = {}
        for step, value in rows_with(self.groups, "step", name):
            found.setdefault(int(step), []).append(value)
        return {step: mean(values) for step, values in sorted(found.items())}


def rows_with(table: Mapping[str, Sequence[float | None]], *columns: str) -> list[tuple[float, ...]]:
    """The rows of a table that have all of the columns, each as its values.

    >>> rows_with({"step": [0.0, 5.0], "x": [None, 2.0]}, "step", "x"), rows_with({"step": [0.0]}, "step", "x")
    ([(5.0, 2.0)], [])
    """
    if not table.keys() >= set(columns):
        return []
    rows: Iterable[Any] = zip(*(table[name] for name in columns), strict=True)
    return [row for row in rows if None not in row]


APART = frozenset({"seed", "log", "checkpoint_every", "keep_every", "keep_most", "device", "accumulate", "recompute",
                   "probe", "probe_every", "scope", "every", "also", "eval_every", "eval_rollouts"})
"""Settings in which runs of one experiment may differ."""


def families(runs: Sequence[Evidence], over: Sequence[str]) -> list[list[Evidence]]:
    """Runs that differ in `over` and in the settings of `APART` alone.

    A setting that a run does not have is newer than the run, which then had its default: that is no difference.
    """
    found: list[list[Evidence]] = []
    for run in runs:
        home = next((some for some in found if all(_alike(own, run, APART | set(over)) for own in some)), [])
        if not home:
            found.append(home)
        home.append(run)
    return found


def _alike(a: Evidence, b: Evidence, apart: frozenset[str] | set[str]) -> bool:
    if any(a[key] != b[key] for key in ("model", "task", "method", "lr") if key not in apart):
        return False
    return all(a.config[key] == b.config[key] for key in (a.config.keys() & b.config.keys()) - apart)


def cells(runs: Sequence[Evidence], setting: str) -> dict[Any, list[Evidence]]:
    """setting -> the runs that have it, ascending where it can be sorted."""
    out: dict[Any, list[Evidence]] = {}
    for run in runs:
        out.setdefault(run[setting], []).append(run)
    return dict(sorted(out.items(), key=lambda item: (str(type(item[0])), item[0])))


class Measured(NamedTuple):
    """A mean with its interval, and what its n counts."""

    value: Interval
    of: str

    def __str__(self) -> str:
        return spanned(self.value, ".2f")


def mean_of(runs: Sequence[Evidence], column: str) -> Measured | None:
    """The mean of a column of `groups`, None where no run has it."""
    return over_runs([list(run.by_step(column).values()) for run in runs])


def over_runs(by_run: Sequence[Sequence[float]], unit: str = "readings") -> Measured | None:
    """From three runs on: the mean of each run's mean, with its interval over runs. Below: the mean of all values,
    without an interval, because one or two runs do not show how much runs differ. None of no values.
    """
    known = [values for values in by_run if values]
    if not known:
        return None
    if len(known) >= ENOUGH:
        return Measured(mean_interval([mean(values) for values in known]), "runs")
    values = [value for values in known for value in values]
    of = f"{unit} of one run" if len(known) == 1 else f"{unit} of {len(known)} runs"
    return Measured(Interval(mean(values), None, None, len(values)), of)


def read_evidence(record: Record, steps: Steps | None = None) -> Evidence:
    """The evidence of a run, finished or not. What was not recorded is absent; what is damaged is an error. `steps` are
    those of the record, where they were read before."""
    groups, readings = _readings(record)
    turns: Columns = {}
    for step in record.groups():
        arrays = record.group(step)
        with damaged(record, "groups", step):
            by_turn = bias_by_turn(fitting(arrays, {name: ROLLOUTS[name] for name in TURNS}))
        for found in by_turn:
            for name, value in ({"step": float(step)} | found).items():
                turns.setdefault(name, []).append(value)
    steps = record.columns() if steps is None else steps
    return Evidence(name=record.path.name, config=_without_paths(record.config), versions=_plain(record.run),
                    finished=is_finished(steps), groups=groups, readings=readings, turns=turns,
                    steps=steps.numeric(lambda name: name == "step" or name.startswith(KEPT)))


@contextmanager
def damaged(record: Record, shelf: str, step: int) -> Iterator[None]:
    """Name the damaged file in the error."""
    try:
        yield
    except (KeyError, IndexError, ValueError, TypeError, ArithmeticError) as error:
        what = f"{error}" if isinstance(error, CreditscopeError) else f"{type(error).__name__}: {error}"
        raise CreditscopeError(f"{record.path / shelf / f'{step:06d}.npz'} is damaged ({what}); delete the file to "
                               f"leave it out") from None


def _readings(record: Record) -> tuple[Columns, Columns]:
    """(groups, readings) of the microscope."""
    rows: list[dict[str, float | None]] = []
    looks: Columns = {"step": [], "unanimous": [], "unanimous_largest": []}
    for step in record.readings():
        look = _look(record, step)
        rows += [{"step": float(step), **row} for row in look.rows]
        for name, value in zip(looks, (step, look.unanimous, look.largest), strict=True):
            looks[name].append(float(value))
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}, looks if looks["step"] else {}


class ReadingNumbers(NamedTuple):
    """One reading: the numbers of its live groups, how many are unanimous, and the largest |K_ij| of those."""

    rows: Sequence[Mapping[str, float | None]]
    unanimous: int
    largest: float


LOOKS = 2048
"""Readings whose numbers are remembered, some 50 KB each."""
remembered: ContextVar[dict[tuple[Any, ...], ReadingNumbers] | None] = ContextVar("remembered", default=None)
"""A cache of readings, for a caller that reads a growing record repeatedly; by default there is none."""


def _look(record: Record, step: int) -> ReadingNumbers:
    """The numbers of a reading, remembered as long as its file does not change."""
    known, seen = remembered.get(), record.reading_version(step)
    if known is not None and seen in known:
        return known[seen]
    arrays = record.reading(step)
    with damaged(record, "scope", step):
        groups = list(_groups_of(fitting(arrays, READING, ("group", "reward", "gram", "eps"))))
    dead = [largest for row, largest in groups if row is None]
    look = ReadingNumbers([row for row, _ in groups if row is not None], len(dead), max(dead, default=0.0))
    if known is not None and len(known) < LOOKS:
        known[seen] = look
    return look


def _groups_of(arrays: Mapping[str, NDArray[Any]]) -> Iterator[tuple[dict[str, float | None] | None, float]]:
    """For each group of a reading: (its numbers, 0), or (None, largest |K_ij|) where its rewards are unanimous."""
    group, reward, gram = arrays["group"], arrays["reward"], arrays["gram"]
    eps = float(arrays["eps"])
    row_w, scores = arrays.get("row_w"), arrays.get("scores")
    tracked = [i for i, name in enumerate(arrays.get("layer_names", ())) if str(name).endswith(TRACKED)]
    place = {int(g): i for i, g in enumerate(arrays.get("layer_groups", ()))}
    for g in np.unique(group):
        rows = np.flatnonzero(group == g)
        block, mine = gram[np.ix_(rows, rows)], reward[rows]
        if np.ptp(mine) == 0:
            yield None, float(np.abs(block).max())
            continue
        if not np.isfinite(block).all() or not block.any():
            continue
        row: dict[str, float | None] = {"size": float(len(rows)), "reward_mean": float(mine.mean()),
                                        "reward_std": float(mine.std())}
        if np.isin(mine, (0, 1)).all():
            row |= {"right": float(mine.sum()), "orthogonal_null": orthogonal_null(int(mine.sum()), len(rows))}
        row |= _ranks(block, eps, "all") | {"all/norm_null": norm_null(block)}
        if row_w is not None and (c := row_w[rows]).any():
            row |= {"w_null": w_null(c), "w_sum": float(abs(c.sum()) / np.abs(c).sum())}
            norms = np.sqrt(np.clip(np.diag(block), 0.0, None))
            even = np.divide(np.abs(c), norms, out=np.zeros(len(rows)), where=norms > 0)
            if even.any():
                row["all/equal_norm_rank"] = spectrum(block * np.outer(even, even), eps).effective_rank
            row["all/centred_effective_rank"] = centred_rank(
                block, c, eps, None if scores is None else scores[np.ix_(rows, rows)])
        for name, other in zip(arrays.get("other_names", ()), arrays.get("other_grams", ()), strict=True):
            inner = other[np.ix_(rows, rows)]
            if np.isfinite(inner).all() and inner.any():
                row |= _ranks(inner, eps, f"credit:{name}") | {f"credit:{name}/norm_null": norm_null(inner)}
        if tracked and int(g) in place:
            each = arrays["layers"][tracked, place[int(g)]].astype(np.float64)
            row |= _of_layers(each, max(eps, 1e-6))
        yield row, 0.0


def _of_layers(each: NDArray[np.float64], eps: float) -> dict[str, float]:
    """The ranks of the tracked layers together, and the mean over the layers of the ranks of each."""
    single = [_ranks(block, eps, "layer") for block in each if block.any()]
    means = {name: mean([found[name] for found in single]) for name in (single[0] if single else ())}
    return _ranks(each.sum(axis=0), eps, "qv") | means


def _ranks(block: NDArray[np.float64], eps: float, of: str) -> dict[str, float]:
    return {f"{of}/{name}": value for name, value in ranks(spectrum(block, eps)).items()} if block.any() else {}


def _without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Paths are cut to their last part, because evidence is published. A hub name stays whole."""
    out = dict(config)
    for name in ("model", "task"):
        kind, colon, place = str(out.get(name, "")).rpartition(":")
        if place.count("/") > 1 or place.startswith((".", "~", "/")) or os.path.exists(place):
            out[name] = f"{kind}{colon}{Path(place).name}"
    return out


def _plain(run: Mapping[str, Any]) -> dict[str, Any]:
    """The versions that are text or numbers; the file is untrusted."""
    found = run.get("versions")
    return {str(k): v for k, v in found.items() if isinstance(v, str | int | float)} if isinstance(found, dict) else {}


def to_json(run: Evidence) -> str:
    """One line per column, numbers to five digits: a file to commit and to read again."""
    steps = {name: [None] * len(run.steps) for name in sorted(run.columns.names)}
    for name, column in steps.items():
        for row, value in zip(*(part.tolist() for part in run.columns.column(name)), strict=True):
            column[row] = value
    lines = [f'"{key}": {json.dumps(value, allow_nan=False)}' for key, value in {
        "format": FORMAT, "name": run.name, "finished": run.finished, "config": dict(run.config),
        "versions": dict(run.versions)}.items()]
    tables: dict[str, Mapping[str, Any]] = {"steps": steps, "groups": run.groups, "readings": run.readings,
                                            "turns": run.turns}
    for key, table in tables.items():
        inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps([_short(x) for x in values], allow_nan=False)}"
                           for name, values in table.items())
        lines.append(f'"{key}": {{\n{inner}}}')
    return "{" + ",\n".join(lines) + "}\n"


def _short(value: Any) -> Any:
    """A float to five digits, as an integer where it is one."""
    if not isinstance(value, float):
        return value
    value = value if value.is_integer() else float(f"{value:.5g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def from_json(path: Path) -> Evidence:
    """A file that `to_json` wrote; it is untrusted, so anything that does not fit the format is refused."""
    try:
        found = parse_json(read_whole(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise CreditscopeError(f"cannot read {path}: {error}") from None
    if not isinstance(found, dict) or found.get("format") not in FORMATS:
        raise CreditscopeError(f"{path} holds no evidence of a run (format {FORMAT!r}); give a run's folder, or a file "
                               f"of creditscope papers check --save")
    try:
        form = FORMATS[found["format"]]
        tables = {name: _numbers(found[name]) for name in ("steps", "groups", "readings", "turns")}
        tables |= {name: upgraded(tables[name], part, form) for name, part in
                   (("steps", "steps"), ("groups", "evidence"))}
        if any(len({len(values) for values in table.values()}) > 1 for table in tables.values()):
            raise ValueError("columns of different lengths")
        steps = tables.pop("steps")
        rows = tuple({name: value for name, value in zip(steps, row, strict=True) if value is not None}
                     for row in zip(*steps.values(), strict=True))
        if tables["groups"] and "step" not in tables["groups"]:
            raise ValueError("groups without their steps")
        json.dumps(found["config"], allow_nan=False)
        if not isinstance(found["config"], dict) or any("step" not in row for row in rows):
            raise ValueError("no config, or a step without its number")
        return Evidence(name=str(found["name"]), config=found["config"], versions=_plain(found),
                        finished=bool(found["finished"]), steps=rows, **tables)
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise CreditscopeError(f"{path} is damaged: {type(error).__name__}: {error}; make it again with creditscope "
                               f"papers check RUN --save") from None


def _numbers(columns: Any) -> Columns:
    return {str(name): [None if x is None else float(x) for x in values] for name, values in columns.items()}


def places(paths: Iterable[Path]) -> list[Path]:
    """Runs' folders and files of evidence, each once. In a folder that holds runs, files of evidence are skipped."""
    found: list[Path] = []
    for path in paths:
        try:
            runs = sorted({place.parent for place in path.glob("**/run.json")}) if path.is_dir() else []
            found += runs or sorted(path.glob("**/*.evidence.json")) or [path]
        except OSError as error:
            raise CreditscopeError(f"cannot look into {path}: {error.strerror}") from None
    return list(dict.fromkeys(found))


def read_place(place: Path) -> Evidence:
    if place.is_file():
        return from_json(place)
    if not (place / "run.json").exists():
        raise CreditscopeError(f"{place} holds no run (no run.json) and no *.evidence.json; give a folder written by "
                               f"{WRITERS}, or a file of creditscope papers check --save")
    return read_evidence(Record.open(place))
