"""The optimiser: overshoot past the bound, momentum, the update, and the reward's scale, as the probe recorded them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from creditscope.diagnosis.optimizer_verdicts import BLIND, FOLLOWS
from creditscope.errors import CreditscopeError
from creditscope.optimizer.table import BRAKES, parse_brake
from creditscope.report.chart import DASHED, Spec, marked, over_steps, spec_of
from creditscope.report.directions import Part, fitted, numbers
from creditscope.report.markup import Html, join, shown, table, tag
from creditscope.report.run import Arrays, Run
from creditscope.report.section import Section, lacking, rounded, some_steps, spaced, thinned
from creditscope.runs import schema
from creditscope.runs.figures import COLOURS
from creditscope.runs.intervals import Interval, mean_interval
from creditscope.runs.numbers import spanned

POINTS = 200
LINES = 4
"""Inner updates that have a line each."""
BUDGET = 60_000
LAYERS = 8
TENTH = 0.1


class Fact(NamedTuple):
    key: str
    title: str
    says: str
    percent: bool = False


BY_UPDATE = (
    Fact("past", "past the bound", "share of bounded tokens", percent=True),
    Fact("distance", "distance (nats)", "mean of those past"),
    Fact("after", "moved after", "share of that distance made once its own gradient was 0", percent=True),
    Fact("kl", "KL", "from the sampler, nats per token"))
FACTS = (schema.OVERSHOOT_CARRY, schema.OVERSHOOT_CARRY_PREDICTED, schema.OVERSHOOT_MAX, schema.OVERSHOOT_BY_MOMENTUM,
         schema.OVERSHOOT_BY_FRESH, schema.OVERSHOOT_BY_DECAY, schema.UPDATE_COSINE, schema.UPDATE_MOMENTUM,
         schema.UPDATE_RATIO, schema.UPDATE_ZERO, schema.UPDATE_ZERO_BF16, schema.OPTIMIZER_SCALE_CHANGE,
         schema.OPTIMIZER_SCALE_CHANGE_NOW)
Plan = tuple[str, str, dict[str, str], bool]
"""(name of a chart, title, lines: metric -> name in the legend, whether they are shares)."""
CHARTS: tuple[Plan, ...] = (
    ("carry", "Carry by momentum", {
        schema.OVERSHOOT_CARRY: "measured", schema.OVERSHOOT_CARRY_PREDICTED: "predicted"}, False),
    ("scale", "Change of the update at credit × 0.1", {
        schema.OPTIMIZER_SCALE_CHANGE: "since the start",
        schema.OPTIMIZER_SCALE_CHANGE_NOW: "from this step on"}, True),
    ("update", "The update", {
        schema.UPDATE_COSINE: "cosine with −gradient", schema.UPDATE_MOMENTUM: "from momentum"}, False),
    ("stay", "Weights that stay as they are", {
        schema.UPDATE_ZERO: "as stored", schema.UPDATE_ZERO_BF16: "in bfloat16"}, True))


def section(run: Run) -> Section:
    title, brake = "Optimiser", brake_line(run.config.get("brake"))
    means = {metric: found for metric in FACTS if (found := mean_over(run, metric)) is not None}
    past = by_update(run)
    read = run.record.optimizer_readings()
    sweeps = fitted(run, "optimiser", read, lambda step: sweep(run, step), BUDGET)
    if not (means or past or sweeps):
        why = "What the probe read cannot be used" if read else "The probe was off in this run"
        return Section(id="optimizer", title=title, body=join(brake, lacking(
            f"{why}, so nothing is known of what the optimiser did to the credit.", run.config, "overshoot")))
    no_sweep = None if sweeps else lacking("The update under other reward scales was not read.", run.config, "sweep")
    plans = plans_of(list(past))
    charts = [chart for plan in plans if (chart := chart_of(run, *plan)) is not None]
    most = max(len(run.steps.numbers(metric).at) for _, _, lines, _ in plans for metric in lines)
    data = {"charts": charts, "sweeps": sweeps, "sweep": sweep_chart(sweeps) if sweeps else None}
    return Section(
        id="optimizer", title=title, data=data,
        body=join(scale_sentence(run, means, sweeps), brake, past_table(past), facts_table(means),
                  some_steps(f"at most {POINTS}", most) if most > POINTS else None, no_sweep),
        lead="The objective says what each token deserves, the optimiser decides what happens to it. "
             "Means over the steps that were read, with 95 % intervals over these steps.")


def mean_over(run: Run, metric: str) -> Interval | None:
    values = run.steps.numbers(metric).values.tolist()
    return mean_interval(values) if values else None


def by_update(run: Run) -> dict[int | None, dict[str, Interval]]:
    """k -> readings after k updates on a batch; None stands for `overshoot/…`, after the last update."""
    found = {int(m[1]) for key in run.steps.names if (m := re.fullmatch(r"overshoot/([1-9]\d?)/\w+", key))}
    places: list[int | None] = [*sorted(found)] if found else [None]
    table = {k: {metric.key: value for metric in BY_UPDATE if (value := mean_over(run, past_key(k, metric.key)))}
             for k in places}
    return {k: row for k, row in table.items() if row}


def past_key(k: int | None, name: str) -> str:
    own = schema.OVERSHOOT_UPDATE.readings[name]
    return own if k is None else schema.OVERSHOOT_UPDATE(name, k)


def sweep(run: Run, step: int) -> Part | None:
    """The update Δ(φ) with all credit times φ, beside Δ(1): cosine and change, whole and by layer."""
    arrays = run.probed(step)
    if arrays is None or "phi" not in arrays:
        return None
    phi = arrays["phi"].astype(np.float64)
    whole = {name: arrays[name].astype(np.float64) for name in ("change", "cosine")}
    if phi.ndim != 1 or any(values.shape != phi.shape for values in whole.values()):
        raise ValueError(f"phi has shape {phi.shape}, change {whole['change'].shape}, cosine {whole['cosine'].shape}")
    good = np.isfinite(phi) & (phi > 0)
    each = arrays["layer_change"].astype(np.float64)[:, good] if "layer_change" in arrays else None
    low, high = ([None] * int(good.sum()), [None] * int(good.sum())) if each is None else edges(each)
    return {"step": step, "since": shown(str(arrays.get("since", "")), 20), "phi": numbers(phi[good]),
            "change": numbers(whole["change"][good]), "cosine": numbers(whole["cosine"][good], 6),
            "low": low, "high": high, "layers": layers_of(arrays, phi)}


def edges(each: NDArray[np.float64]) -> tuple[list[float | None], list[float | None]]:
    """(least, most) over layers at each φ."""
    some = [column[np.isfinite(column)] for column in each.T]
    return ([rounded(float(column.min())) if len(column) else None for column in some],
            [rounded(float(column.max())) if len(column) else None for column in some])


def layers_of(arrays: Arrays, phi: NDArray[np.float64]) -> list[list[Any]]:
    """[name, change at φ = 0.1, cosine there, ‖Δ‖/‖θ‖] of the layers that change most."""
    at = np.flatnonzero(np.isclose(phi, TENTH))
    if not len(at) or not {"layer_names", "layer_change", "layer_cosine", "layer_ratio"} <= arrays.keys():
        return []
    change, cosine = arrays["layer_change"][:, at[0]], arrays["layer_cosine"][:, at[0]]
    known = [i for i in np.argsort(-change, kind="stable") if np.isfinite(change[i])][:LAYERS]
    return [[shown(str(arrays["layer_names"][i]), 160), *numbers([change[i]]), *numbers([cosine[i]], 6),
             *numbers([arrays["layer_ratio"][i]])] for i in known]


def scale_sentence(run: Run, means: Mapping[schema.Metric, Interval], sweeps: Sequence[Part]) -> Html:
    name = str(run.config.get("optimizer") or "the optimiser")
    found = means.get(schema.OPTIMIZER_SCALE_CHANGE) or means.get(schema.OPTIMIZER_SCALE_CHANGE_NOW)
    if found is None:
        return lacking("How much of the reward's scale reaches the weights was not read in this run.", run.config,
                       "scale")
    since = "" if schema.OPTIMIZER_SCALE_CHANGE in means else ", from the step itself on,"
    change, steps = found.mean, f"{found.n} step{'s' * (found.n != 1)}"
    blind, follows = f"{100 * BLIND:.3g} %", f"{100 * FOLLOWS:.3g} %"
    if change < BLIND:
        verdict = f"less than {blind}: the size of the credit is all but invisible to it."
    elif change > FOLLOWS:
        verdict = f"more than {follows}: it follows the size of the credit."
    else:
        verdict = f"between {blind} and {follows}: the size of the credit comes through in part."
    return tag("p", f"Credit a tenth as large{since} would have changed the update of {name} by ",
               tag("strong", f"{100 * found.mean:.3g} %"), f" (mean of {steps}), {verdict}{turned(sweeps)}",
               id="optimizer-scale")


def turned(sweeps: Sequence[Part]) -> str:
    if not sweeps:
        return ""
    last = sweeps[-1]
    cosines = dict(zip(last["phi"], last["cosine"], strict=True))
    phi = next((phi for phi in (10.0, TENTH) if cosines.get(phi) is not None), None)
    return "" if phi is None else f" At × {phi:g} the two updates have cosine {cosines[phi]:g} (step {last['step']})."


def brake_line(spec: object) -> Html | None:
    if not isinstance(spec, str) or spec == "none":
        return None
    try:
        name, options = parse_brake(spec)
    except CreditscopeError:
        return tag("p", "Brake: ", tag("code", shown(spec, 80)), ", which this version does not know.", class_="soft")
    row = BRAKES[name]
    given = ", ".join(f"{key} = {value}" for key, value in options.items())
    return tag("p", "Brake ", tag("strong", name), f": {row.title}. ", tag("code", row.equation),
               f" {given}." if given else None, id="optimizer-brake")


def past_table(past: Mapping[int | None, Mapping[str, Interval]]) -> Html | None:
    if not past:
        return None
    rows: list[list[object]] = []
    for k, row in past.items():
        cells = [interval_of(row[metric.key], metric.percent) if metric.key in row else "–" for metric in BY_UPDATE]
        rows.append(["last" if k is None else k, max(value.n for value in row.values()), *cells])
    headers = [join(metric.title, tag("div", metric.says, class_="soft plain")) for metric in BY_UPDATE]
    return join(tag("h3", "Past the bound, after k updates on a batch"),
                table(["k", "steps", *headers], rows, aria_label="Past the bound", id="optimizer-past"))


def facts_table(means: Mapping[schema.Metric, Interval]) -> Html | None:
    rows: list[list[object]] = [
        [metric.name, interval_of(found, metric.unit == "share" or "scale" in metric), found.n,
         tag("span", metric.sentence, class_="soft")] for metric, found in means.items()]
    return join(tag("h3", "Momentum, update and scale"), table(
        ["number", "mean", "steps", "what it is"], rows, aria_label="Momentum, update and scale",
        id="optimizer-facts")) if rows else None


def interval_of(value: Interval, percent: bool) -> str:
    return spanned(value, scale=100, unit=" %") if percent else spanned(value)


def plans_of(updates: Sequence[int | None]) -> tuple[Plan, ...]:
    ks = spaced([k for k in updates if k is not None], LINES)
    words = {None: "at the last sight"} if not ks else {k: f"after {k} update{'s' * (k > 1)}" for k in ks}
    past, distance = ({past_key(k, name): word for k, word in words.items()} for name in ("past", "distance"))
    return (("past", "Tokens past the bound", past, True),
            ("distance", "Distance past the bound (nats)", distance, False), *CHARTS)


def chart_of(run: Run, name: str, title: str, lines: Mapping[str, str], percent: bool) -> Part | None:
    columns = {word: run.steps.numbers(metric) for metric, word in lines.items()}
    kept, steps = thinned(list(columns.values()), POINTS), run.steps.column("step").values
    by_step: dict[int, dict[str, Any]] = {}
    for word, column in columns.items():
        at, values = column.of(kept)
        for step, value in zip(steps[at].tolist(), values.tolist(), strict=True):
            by_step.setdefault(step, {"step": step})[word] = rounded(value)
    if not by_step:
        return None
    rows = [by_step[step] for step in sorted(by_step)]
    seen = [word for word in lines.values() if any(word in row for row in rows)]
    return {"name": name, "rows": rows, "spec": over_steps(rows, title, seen, percent=percent, zero=True)}


def sweep_chart(sweeps: Sequence[Part]) -> Spec:
    """cos(Δ(φ), Δ(1)) and ‖Δ(φ) − Δ(1)‖/‖Δ(1)‖ over φ, with the layers' least and most change.

    The script adds the rows: phi, cosine, change, layers_least, layers_most.
    """
    phis = [phi for one in sweeps for phi in one["phi"]]
    top = max([1.0, *(x for one in sweeps for key in ("change", "high") for x in one[key] if x is not None)])
    low = min([0.0, *(x for one in sweeps for x in one["cosine"] if x is not None)])
    # Under SGD the change grows to 1000; on a linear scale the cosine would be a flat line beside it.
    scale: Spec = {"domain": [low, top], **({"type": "symlog"} if top > 2 else {})}
    colours = {"cosine": COLOURS[0], "relative change": COLOURS[1], "change of single layers": COLOURS[4]}
    cosine, change, single = colours
    x = {"field": "phi", "type": "quantitative", "title": "φ: all credit times φ",
         "axis": {"format": "~e", "labelOverlap": True, "grid": False},
         "scale": {"type": "log", "domain": [min(phis), max(phis)], "nice": False}}

    def y(field: str) -> Spec:
        return {"field": field, "scale": scale}

    return spec_of("The update under other credit scales", [
        marked({"type": "area", "opacity": 0.25}, x, y("layers_least"), single, colours, y2={"field": "layers_most"}),
        marked({"type": "line", "strokeDash": DASHED, "point": {"aria": False}}, x, y("change"), change, colours),
        marked({"type": "line", "strokeWidth": 2, "point": {"aria": False}}, x, y("cosine"), cosine, colours)],
        "Cosine and relative change of the update over the scale of the credit, logarithmic")
