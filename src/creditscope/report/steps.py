"""The run over its steps: what came in, what was read, and where the paper's value lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from creditscope.report.answers import absent
from creditscope.report.chart import over_steps
from creditscope.report.markup import Html, join, tag
from creditscope.report.run import Run
from creditscope.report.section import Section, lacking, missing, rounded, some_steps, thinned
from creditscope.runs import schema
from creditscope.runs.columns import Column, Steps
from creditscope.runs.intervals import Interval, mean_interval

Row = dict[str, Any]
"""`step`, and by the name it is shown by each number of the step; None where it was recorded as not a number."""
Chart = dict[str, Any]

WINDOW = 10
"""Steps of the running mean. Each step has fresh prompts, so the spread of their means says how sure the mean is; the
spread over one step's rollouts would not, as those of a group are alike."""
P1_RANK = 2.0
"""arXiv:2606.29238, Table 1: the effective rank that P1 prints for every R."""
COLUMNS = {
    schema.REWARD_MEAN: "reward of a step", schema.EVAL_ACCURACY: "accuracy", schema.EVAL_LOW: "low",
    schema.EVAL_HIGH: "high",
    schema.ENTROPY_MEAN: "entropy", schema.LENGTH_MEAN: "mean length", schema.LENGTH_MAX: "longest",
    schema.LENGTH_TRUNCATED: "cut off",
    schema.GRAM_GROUP_EFFECTIVE_RANK: "effective rank", schema.GRAM_GROUP_ORTHOGONAL_NULL: "null (two rewards)",
    schema.GRAM_GROUP_W_NULL: "null (same w)", schema.OVERSHOOT_PAST: "after the last update",
    schema.GRAD_NORM: "gradient norm",
}
"""metric -> the name that it is shown by."""
RUNNING = f"mean of up to {WINDOW} steps"
MOST = 2000
"""Steps in the charts: two for each pixel across them, and 0.3 MB of the page."""


def section(run: Run) -> Section:
    """Charts that share one cursor, over one table of rows."""
    rows = table(run.steps)
    drawn, trained = {row["step"] for row in rows}, run.trained.column("step").values.tolist()
    steps = [step for step in trained if step in drawn]
    charts = [chart for make in CHARTS if (chart := make(rows)) is not None] if steps else []
    none = "No step has a number for these charts." if steps else "No step is recorded yet."
    thin = [some_steps(f"{len(rows):,}", len(run.steps))] if len(rows) < len(run.steps) else []
    notes = [*thin, *_lacks(run, rows), *_left_out(run.steps)] if charts else [missing(none)]
    return Section(id="steps", title="Over training",
                   lead="Move over a chart to read one step in all of them; click to choose it for everything below.",
                   body=join(tag("div", id="steps-charts"), *notes),
                   data={"charts": charts, "steps": steps, "table": packed(rows)} if charts else None)


def table(steps: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row a step, a column a number; of more than `MOST` steps those that `thinned` keeps. A number that was not
    finite is None; one that was not read is not there."""
    found = Steps.of(steps)
    columns = {name: with_gaps(found, metric) for metric, name in COLUMNS.items()} | {"live groups": live_share(found)}
    columns |= {_after(k): found.numbers(metric) for k in range(1, MOST_UPDATES + 1)
                if (metric := schema.OVERSHOOT_UPDATE("past", k)) in found.names}
    kept = np.arange(len(found)) if len(found) <= MOST else thinned(list(columns.values()), MOST)
    rows: dict[int, Row] = {row: {"step": found[row]["step"]} for row in kept.tolist()}
    for name, column in columns.items():
        for row, value in zip(*(part.tolist() for part in column.of(kept)), strict=True):
            rows[row][name] = rounded(value)
    at, rewards = found.numbers(schema.REWARD_MEAN)
    share = (np.minimum.accumulate(rewards) >= 0) & (np.maximum.accumulate(rewards) <= 1)
    for place in np.flatnonzero(np.isin(at, kept)).tolist():
        rows[int(at[place])] |= running(rewards[max(0, place + 1 - WINDOW):place + 1].tolist(), bool(share[place]))
    return list(rows.values())


def with_gaps(steps: Steps, metric: str) -> Column:
    """The numbers of a metric, and NaN where it was recorded as not finite."""
    (at, values), absences = steps.numbers(metric), steps.column("absent")
    told = [isinstance(names, dict) and metric in names for names in absences.values]
    gaps = np.setdiff1d(absences.at[np.array(told, dtype=bool)], at)
    order = np.argsort(rows := np.append(at, gaps))
    return Column(rows[order], np.append(values, np.full(len(gaps), np.nan))[order])


def live_share(steps: Steps) -> Column:
    """live groups / groups, of the steps that have both and any group."""
    groups, live = steps.numbers(schema.SIGNAL_GROUPS), steps.numbers(schema.SIGNAL_LIVE_GROUPS)
    at, some, same = np.intersect1d(groups.at, live.at, assume_unique=True, return_indices=True)
    total = groups.values[some]
    return Column(at[total != 0], live.values[same][total != 0] / total[total != 0])


def running(rewards: Sequence[float], share: bool) -> Row:
    """The mean over the last steps with its 95 % interval, mean ± t·s/√n over their n means; from three steps on.

    The interval keeps within 0 and 1 where all rewards until then do (`share`): it is not drawn where no mean can lie.

    >>> running([0.0, 1.0], True), running([0.0, 0.5, 1.0], True), running([0.0, 1.0, 2.0], False)["mean low"]
    ({}, {'mean of up to 10 steps': 0.5, 'mean low': 0.0, 'mean high': 1.0}, -1.484)
    """
    last = rewards[-WINDOW:]
    if len(last) < 3:
        return {}
    mean = mean_interval(last)
    if share:
        mean = within(mean, 0.0, 1.0)
    return {RUNNING: rounded(mean.mean), "mean low": rounded(mean.low), "mean high": rounded(mean.high)}


def within(value: Interval, low: float, high: float) -> Interval:
    """An interval without what its mean cannot be."""
    if value.low is None or value.high is None:
        return value
    return replace(value, low=max(value.low, low), high=min(value.high, high))


def packed(rows: Sequence[Row]) -> dict[str, Any]:
    """The table by columns, each with the rows that have it where not all do: a fifth of the same as objects."""
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row if name != "step"):
        at = [i for i, row in enumerate(rows) if name in row]
        columns[name] = {"values": [rows[i][name] for i in at]} | ({} if len(at) == len(rows) else {"at": at})
    return {"step": [row["step"] for row in rows], "columns": columns}


# -- the charts: each from the rows, or None where they have nothing for it -------------------------------------------


def _reward(rows: Sequence[Row]) -> Chart | None:
    lines = _there(rows, "reward of a step", RUNNING)  # the mean is drawn over the points
    return _chart("reward", over_steps(
        rows, "Reward", lines, band={RUNNING: ("mean low", "mean high")} if RUNNING in lines else None,
        points=["reward of a step"], description="Mean reward of each step and over the last steps."),
        f"Band: 95 % interval of the mean of up to {WINDOW} steps, from the spread of their means.") if lines else None


def _accuracy(rows: Sequence[Row]) -> Chart | None:
    lines = _there(rows, "accuracy")
    bands = {"accuracy": ("low", "high")} if _there(rows, "low") and _there(rows, "high") else None
    return _chart("accuracy", over_steps(
        rows, "Accuracy on unseen problems", lines, band=bands, percent=True, points=lines,
        description="Share of test problems solved, with its interval."),
        "Upright lines: 95 % interval over the test problems.") if lines else None


def _groups(rows: Sequence[Row]) -> Chart | None:
    cut = ["cut off"] if any(row.get("cut off") for row in rows) else []
    lines = [*_there(rows, "live groups"), *cut]
    note = "Live: the rewards of the group differ." + (" Cut off: answers at the length limit." if cut else "")
    return _chart("groups", over_steps(rows, "Live groups", lines, percent=True, zero=True,
                                       description="Share of groups whose rewards differ."), note) if lines else None


def _entropy(rows: Sequence[Row]) -> Chart | None:
    lines = _there(rows, "entropy")
    return _chart("entropy", over_steps(rows, "Entropy", lines, zero=True, description="Mean entropy of a token."),
                  "Nats a token.") if lines else None


def _length(rows: Sequence[Row]) -> Chart | None:
    lines = _there(rows, "mean length", "longest")
    return _chart("length", over_steps(rows, "Length", lines, zero=True, description="Tokens of an answer."),
                  "Tokens an answer.") if lines else None


def _rank(rows: Sequence[Row]) -> Chart | None:
    if not _there(rows, "effective rank"):
        return None
    null = _there(rows, "null (same w)", "null (two rewards)")[:1]
    said = {"null (same w)": " Null: orthogonal rollouts of equal norm with the same w.",
            "null (two rewards)": " Null: orthogonal rollouts of equal norm with two rewards, 4k(R−k)/R."}
    return _chart("rank", over_steps(
        rows, "Effective rank of a group", ["effective rank", *null], zero=True, reference={"P1: 2 at any R": P1_RANK},
        description="(Σσ)²/Σσ² of the rollouts' gradients, mean over groups, with its null and P1's value."),
        "(Σσ)²/Σσ² of the rollouts' gradients, mean over live groups." + (said[null[0]] if null else ""))


def _overshoot(rows: Sequence[Row]) -> Chart | None:
    end = "after the last update"
    names = [end, *map(_after, range(MOST_UPDATES, 0, -1))]
    most = max(names, key=lambda name: sum(name in row for row in rows))  # of equals the first: the end, the latest
    lines = _there(rows, *dict.fromkeys([end, most]))
    return _chart("overshoot", over_steps(rows, "Tokens outside the clip range", lines, percent=True, zero=True,
                                          description="Share of bounded tokens outside it."),
                  "Share of the tokens that the method bounds.") if lines else None


def _gradient(rows: Sequence[Row]) -> Chart | None:
    lines = _there(rows, "gradient norm")
    return _chart("gradient", over_steps(rows, "Gradient norm", lines, zero=True, description="Norm before clipping."),
                  "Of the whole batch, before the norm is clipped.") if lines else None


MOST_UPDATES = 64
"""Updates on one batch after which tokens past their bound are looked for."""
CHARTS: tuple[Callable[[Sequence[Row]], Chart | None], ...] = (
    _reward, _accuracy, _groups, _entropy, _length, _rank, _overshoot, _gradient)


def _lacks(run: Run, rows: Sequence[Row]) -> list[Html]:
    """What has no chart because it was not recorded, and how to get it."""
    out = []
    if not _there(rows, "effective rank"):
        out.append(lacking("No effective rank: the microscope was off, or no group it read was live.",
                           run.config, "rank"))
    if _overshoot(rows) is None:
        out.append(lacking("No overshoot: the probe was off, or the method has no bound to go past.",
                           run.config, "overshoot"))
    if not _there(rows, "accuracy"):
        out.append(lacking("No accuracy: the run was not evaluated.", run.config, "accuracy"))
    return out


def _left_out(steps: Steps) -> list[Html]:
    names = sorted({name for step in steps.having("absent") for name in absent(step)})
    return [missing(f"Not a finite number at some step, a gap in its chart: {', '.join(names)}.")] if names else []


def _chart(name: str, spec: Mapping[str, Any], note: str) -> Chart:
    columns = [column for line in spec["usermeta"]["lines"] for column in line.values()]
    return {"name": name, "spec": spec, "columns": columns, "note": note}


def _there(rows: Sequence[Row], *names: str) -> list[str]:
    return [name for name in names if any(row.get(name) is not None for row in rows)]


def _after(updates: int) -> str:
    return f"after {updates} update{'s' if updates > 1 else ''}"

