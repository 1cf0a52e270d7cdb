"""Charts over the steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from creditscope.files.markup import Html, join, tag
from creditscope.report.answers import absent
from creditscope.report.chart import Edges, over_steps
from creditscope.report.run import Run
from creditscope.report.section import Section, lacking, missing, rounded, some_steps, thinned
from creditscope.runs import schema
from creditscope.runs.columns import Column, Steps
from creditscope.runs.intervals import Interval, mean_interval

Row = dict[str, Any]
"""`step`, and each number of the step by its name on the page; None where it was recorded as not finite."""
Chart = dict[str, Any]

WINDOW = 10
"""Steps of the running mean. Its interval is over steps, whose prompts are independent; rollouts of a group are not."""
COLUMNS = {
    schema.REWARD_MEAN: "reward of a step", schema.EVAL_ACCURACY: "accuracy", schema.EVAL_LOW: "low",
    schema.EVAL_HIGH: "high",
    schema.ENTROPY_MEAN: "entropy", schema.LENGTH_MEAN: "mean length", schema.LENGTH_MAX: "longest",
    schema.LENGTH_TRUNCATED: "cut off",
    schema.GRAM_GROUP_EFFECTIVE_RANK: "effective rank", schema.GRAM_GROUP_ORTHOGONAL_NULL: "null (two rewards)",
    schema.GRAM_GROUP_W_NULL: "null (same w)", schema.OVERSHOOT_PAST: "after the last update",
    schema.GRAD_NORM: "gradient norm", schema.PAIRS_MARGIN: "margin", schema.PAIRS_ACCURACY: "pairs in order",
    schema.PAIRS_CHOSEN_REWARD: "chosen", schema.PAIRS_REJECTED_REWARD: "rejected",
    schema.REWARD_GOLD_MEAN: "verifier's reward", schema.REWARD_GOLD_CORRELATION: "correlation with the verifier's",
    schema.POLICY_REFERENCE_KL: "KL to the reference",
}
"""Metric -> its name on the page."""
RUNNING = f"mean of up to {WINDOW} steps"
MOST = 2000
"""Steps in the charts: two per pixel, 0.3 MB of the page."""


def section(run: Run) -> Section:
    rows = table(run.steps)
    drawn, trained = {row["step"] for row in rows}, run.trained.column("step").values.tolist()
    steps = [step for step in trained if step in drawn]
    charts = [found for one in CHARTS if (found := chart_of(one, rows))] if steps else []
    none = "No step has a number for these charts." if steps else "No step is recorded yet."
    thin = [some_steps(f"{len(rows):,}", len(run.steps))] if len(rows) < len(run.steps) else []
    notes = [*thin, *_lacks(run, rows), *_left_out(run.steps)] if charts else [missing(none)]
    return Section(id="steps", title="Over training",
                   lead="Move over a chart to read one step in all of them; click to choose it for everything below.",
                   body=join(tag("div", id="steps-charts"), *notes),
                   data={"charts": charts, "steps": steps, "table": packed(rows)} if charts else None)


def table(steps: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per step; of more than `MOST` steps those that `thinned` keeps. A number that was not finite is None, one
    that was not read is absent."""
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
    """The numbers of a metric, NaN where it was recorded as not finite."""
    (at, values), absences = steps.numbers(metric), steps.column("absent")
    told = [isinstance(names, dict) and metric in names for names in absences.values]
    gaps = np.setdiff1d(absences.at[np.array(told, dtype=bool)], at)
    order = np.argsort(rows := np.append(at, gaps))
    return Column(rows[order], np.append(values, np.full(len(gaps), np.nan))[order])


def live_share(steps: Steps) -> Column:
    groups, live = steps.numbers(schema.SIGNAL_GROUPS), steps.numbers(schema.SIGNAL_LIVE_GROUPS)
    at, some, same = np.intersect1d(groups.at, live.at, assume_unique=True, return_indices=True)
    total = groups.values[some]
    return Column(at[total != 0], live.values[same][total != 0] / total[total != 0])


def running(rewards: Sequence[float], share: bool) -> Row:
    """mean ± t·s/√n over the last n steps' mean rewards, from three steps on; cut to [0, 1] where `share`.

    >>> running([0.0, 1.0], True), running([0.0, 0.5, 1.0], True), running([0.0, 1.0, 2.0], False)["mean low"]
    ({}, {'mean of up to 10 steps': 0.5, 'mean low': 0.0, 'mean high': 1.0}, -1.484)
    """
    last = rewards[-WINDOW:]
    if len(last) < 3:
        return {}
    mean = within(mean_interval(last), 0.0, 1.0) if share else mean_interval(last)
    return {RUNNING: rounded(mean.mean), "mean low": rounded(mean.low), "mean high": rounded(mean.high)}


def within(value: Interval, low: float, high: float) -> Interval:
    """An interval cut to [low, high]."""
    ends = value.ends
    return value if ends is None else replace(value, low=max(ends[0], low), high=min(ends[1], high))


def packed(rows: Sequence[Row]) -> dict[str, Any]:
    """The table by columns, each with the rows that have it where not all do: a fifth of the size of objects."""
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row if name != "step"):
        at = [i for i, row in enumerate(rows) if name in row]
        columns[name] = {"values": [rows[i][name] for i in at]} | ({} if len(at) == len(rows) else {"at": at})
    return {"step": [row["step"] for row in rows], "columns": columns}


@dataclass(frozen=True, kw_only=True)
class StepChart:
    """A chart over steps, drawn where the rows have a line for it."""

    name: str
    title: str
    lines: Callable[[Sequence[Row]], list[str]]
    note: str
    line_notes: Mapping[str, str] = field(default_factory=dict)
    """Line -> what is added to the note where the line is drawn."""
    percent: bool = False
    zero: bool = True
    points: tuple[str, ...] = ()
    bands: Mapping[str, Edges] = field(default_factory=dict)


def chart_of(one: StepChart, rows: Sequence[Row]) -> Chart | None:
    """The chart for the script, None where the rows have nothing for it."""
    lines = one.lines(rows)
    if not lines:
        return None
    note = one.note + "".join(f" {one.line_notes[name]}" for name in lines if name in one.line_notes)
    bands = {name: ends for name, ends in one.bands.items() if name in lines and len(_there(rows, *ends)) == 2}
    spec = over_steps(rows, one.title, lines, bands, one.percent, note, one.zero, one.points)
    columns = [column for line in spec["usermeta"]["lines"] for column in line.values()]
    return {"name": one.name, "spec": spec, "columns": columns, "note": note}


def _there(rows: Sequence[Row], *names: str) -> list[str]:
    return [name for name in names if any(row.get(name) is not None for row in rows)]


def _known(*names: str) -> Callable[[Sequence[Row]], list[str]]:
    return lambda rows: _there(rows, *names)


def _groups(rows: Sequence[Row]) -> list[str]:
    return [*_there(rows, "live groups"), *(["cut off"] if any(row.get("cut off") for row in rows) else [])]


def _rank(rows: Sequence[Row]) -> list[str]:
    """The rank beside the first null that was recorded."""
    rank = _there(rows, "effective rank")
    return rank and [*rank, *_there(rows, "null (same w)", "null (two rewards)")[:1]]


def _overshoot(rows: Sequence[Row]) -> list[str]:
    """After the last update, and after the update that most steps were read at."""
    names = [AT_END, *map(_after, range(MOST_UPDATES, 0, -1))]
    most = max(names, key=lambda name: sum(name in row for row in rows))  # of equals the first
    return _there(rows, *dict.fromkeys([AT_END, most]))


def _after(updates: int) -> str:
    return f"after {updates} update{'s' if updates > 1 else ''}"


AT_END = "after the last update"
MOST_UPDATES = 64
"""Updates on one batch after which tokens past their bound are looked for."""
CHARTS = (
    StepChart(name="reward", title="Reward", lines=_known("reward of a step", RUNNING), zero=False,  # the mean on top
              points=("reward of a step",), bands={RUNNING: ("mean low", "mean high")},
              note=f"Band: 95 % interval of the mean of up to {WINDOW} steps, from the spread of their means."),
    StepChart(name="gold", title="Verifier's reward", lines=_known("verifier's reward"), zero=False,
              note="Of the same answers. The policy is trained on the learned reward above."),
    StepChart(name="agreement", title="Learned and verifier's reward", lines=_known("correlation with the verifier's"),
              note="Correlation inside groups: below 0 the advantage pays for wrong answers."),
    StepChart(name="accuracy", title="Accuracy on unseen problems", lines=_known("accuracy"), percent=True, zero=False,
              points=("accuracy",), bands={"accuracy": ("low", "high")},
              note="Vertical lines: 95 % interval over the test problems."),
    StepChart(name="margin", title="Implicit rewards of pairs", lines=_known("margin", "chosen", "rejected"),
              zero=False, note="β log π/π_ref of the answers, and the difference of a pair's two: means over pairs.",
              line_notes={"chosen": "Where chosen lies below 0, preferred answers are less likely than under the "
                                    "reference."}),
    StepChart(name="order", title="Pairs in order", lines=_known("pairs in order"), percent=True,
              note="Pairs whose margin is above 0, before the step."),
    StepChart(name="groups", title="Live groups", lines=_groups, percent=True,
              note="Live: the rewards of the group differ.",
              line_notes={"cut off": "Cut off: answers at the length limit."}),
    StepChart(name="entropy", title="Entropy", lines=_known("entropy"), note="Nats per token."),
    StepChart(name="length", title="Length", lines=_known("mean length", "longest"), note="Tokens per answer."),
    StepChart(name="reference", title="KL to the reference", lines=_known("KL to the reference"),
              note="Nats per answer, estimated on the sampled answers."),
    StepChart(name="rank", title="Effective rank of a group", lines=_rank,
              note="(Σσ)²/Σσ² of the rollouts' gradients, mean over live groups.",
              line_notes={"null (same w)": "Null: orthogonal rollouts of equal norm with the same w.",
                          "null (two rewards)": "Null: orthogonal rollouts, equal norm, two rewards: 4k(R−k)/R."}),
    StepChart(name="overshoot", title="Tokens outside the clip range", lines=_overshoot, percent=True,
              note="Share of the tokens that the method bounds."),
    StepChart(name="gradient", title="Gradient norm", lines=_known("gradient norm"),
              note="Of the whole batch, before the norm is clipped."),
)


def _lacks(run: Run, rows: Sequence[Row]) -> list[Html]:
    said = {"rank": (_rank, "No effective rank: the microscope was off, or no group it read was live."),
            "overshoot": (_overshoot, "No overshoot: the probe was off, or the method has no bound to go past."),
            "accuracy": (_known("accuracy"), "No accuracy: the run was not evaluated.")}
    return [lacking(text, run.config, part) for part, (lines, text) in said.items() if not lines(rows)]


def _left_out(steps: Steps) -> list[Html]:
    names = sorted({name for step in steps.having("absent") for name in absent(step)})
    return [missing(f"Not a finite number at some step, a gap in its chart: {', '.join(names)}.")] if names else []
