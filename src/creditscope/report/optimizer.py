"""The optimiser: overshoot past the bound, momentum, the update, and the reward's scale, as the probe recorded them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from creditscope.diagnosis.optimizer_numbers import OVERSHOOT, UPDATE, Findings, of_steps, path_rank
from creditscope.diagnosis.optimizer_verdicts import j_and_reward, verdicts
from creditscope.errors import CreditscopeError
from creditscope.files.markup import Html, join, shown, tag
from creditscope.optimizer.table import BRAKES, parse_brake
from creditscope.report import glossary
from creditscope.report.chart import DASHED, Spec, marked, over_steps, spec_of
from creditscope.report.directions import Part, fitted, numbers
from creditscope.report.markup import table
from creditscope.report.run import Arrays, Run
from creditscope.report.section import Section, lacking, rounded, some_steps, spaced, thinned
from creditscope.runs import schema
from creditscope.runs.figures import COLOURS
from creditscope.runs.intervals import Interval
from creditscope.runs.numbers import spanned

POINTS = 200
LINES = 4
"""Inner updates that have a line each."""
BUDGET = 60_000
LAYERS = 8
TENTH = 0.1


class Heading(NamedTuple):
    key: str
    title: str
    says: str


BY_UPDATE = (
    Heading("past", "past the bound", "share of bounded tokens"),
    Heading("distance", "distance (nats)", "mean of those past"),
    Heading("after", "moved after", "share of that distance made once its own gradient was 0"),
    Heading("kl", "KL", "from the sampler, nats per token"))
Plan = tuple[str, str, Mapping[schema.Metric, str], bool]
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
    """Overshoot, reward scale, update geometry and the loss as progress, each with its sentence, as `inspect` has
    them; then the charts over steps."""
    read = run.record.optimizer_readings()
    found = of_steps(run.config, run.steps, path=rank_of_path(run))
    sweeps = fitted(run, "optimiser", read, lambda step: sweep(run, step), BUDGET)
    probed = found.measured or bool(sweeps)
    plans = plans_of(list(found.by_update) or [None])
    charts = [chart for plan in plans if (chart := chart_of(run, *plan)) is not None]
    most = max(len(run.steps.numbers(metric).at) for _, _, lines, _ in plans for metric in lines)
    off = "What the probe read cannot be used" if read else "The probe was off in this run"
    parts = [overshoot_part(found), scale_part(run, found, sweeps), update_part(found)] if probed else [lacking(
        f"{off}, so nothing is known of overshoot, reward scale and update geometry.", run.config, "overshoot")]
    return Section(
        id="optimizer", title="Optimiser",
        data={"charts": charts, "sweeps": sweeps, "sweep": sweep_chart(sweeps) if sweeps else None} if probed else None,
        body=join(brake_line(run.config.get("brake")), *parts, progress_part(found),
                  tag("div", id="optimizer-charts", class_="charts") if probed else None,
                  tag("div", id="optimizer-layers") if probed else None,
                  some_steps(f"at most {POINTS}", most) if most > POINTS else None),
        lead="What became of the credit in the weights. Numbers are means over the steps that were read; [ ] is their "
             "95 % t-interval over these steps, which follow one another: it is no spread between runs.")


def rank_of_path(run: Run) -> tuple[float, int] | None:
    """`path_rank`, or None and a fault where the sketches are damaged."""
    try:
        return path_rank(run.record)
    except CreditscopeError as error:
        run.faults.append(str(error))
        return None


def overshoot_part(found: Findings) -> Html | None:
    rows: list[tuple[int | None, Mapping[str, Interval]]] = [*found.by_update.items()] or [(None, found.overshoot)]
    cells: list[list[object]] = [
        ["last" if k is None else k, max(value.n for value in row.values()),
         *(cell_of(row[head.key], past_key(k, head.key)) if head.key in row else "–" for head in BY_UPDATE)]
        for k, row in rows if any(head.key in row for head in BY_UPDATE)]
    heads = [join(glossary.link(past_key(None, head.key), head.title), tag("div", head.says, class_="soft plain"))
             for head in BY_UPDATE]
    shown = {head.key for head in BY_UPDATE}
    facts = {OVERSHOOT[name]: value for name, value in found.overshoot.items() if name not in shown}
    furthest = None if found.furthest is None else tag("p", f"The furthest token was {found.furthest:.3g} nats past.")
    if not (cells or facts):
        return None
    return block("Overshoot by inner update", verdicts(found).get("overshoot"),
                 table(["updates", "steps", *heads], cells, aria_label="Overshoot by inner update",
                       id="optimizer-past") if cells else None, furthest, facts_table(facts, "overshoot"))


def scale_part(run: Run, found: Findings, sweeps: Sequence[Part]) -> Html:
    said = verdicts(found).get("scale")
    none = None if said else lacking("How much of the reward's scale reaches the weights was not read in this run.",
                                     run.config, "scale")
    more = None if sweeps else lacking("The update under other reward scales was not read.", run.config, "sweep")
    facts = {metric: value for metric, value in (
        (schema.OPTIMIZER_SCALE_CHANGE, found.scale_change),
        (schema.OPTIMIZER_SCALE_CHANGE_NOW, found.scale_change_now)) if value}
    return block("Reward scale", said and f"{said}{turned(sweeps)}", none, facts_table(facts, "scale"), more)


def update_part(found: Findings) -> Html | None:
    facts = {UPDATE[name]: value for name, value in found.update.items()}
    path = None if found.path is None else tag(
        "p", f"The last {found.path[1]} updates that were kept have effective rank {found.path[0]:.3g}.")
    return block("Update geometry", verdicts(found).get("update"), facts_table(facts, "update"), path) if (
        facts or path) else None


def progress_part(found: Findings) -> Html | None:
    """Whether J went with the reward. What the loss of the method can show at all stands in the section on it."""
    said, seen = j_and_reward(found), found.progress
    r = None if seen.get("r") is None else Interval(seen["r"], seen["low"], seen["high"], seen["steps"])
    law = tag("p", "What the loss can show under this method: ", tag("a", "Method", href="#methods"), ".")
    return block("The loss as progress", said and f"{said}.", law if found.law else None,
                 tag("p", f"r of J, before the first update on a batch, and the mean reward: {spanned(r)}, over "
                          f"{r.n} steps.") if r else None) if said else None


def block(title: str, said: str | None, *parts: Html | None) -> Html:
    return tag("div", tag("h3", title), tag("p", said) if said else None, *parts,
               class_="block", data_block=title.lower())


def facts_table(facts: Mapping[schema.Metric, Interval], name: str) -> Html | None:
    """Name, linked to its definition in the glossary; mean; steps."""
    rows: list[list[object]] = [[glossary.link(metric, metric.name), cell_of(value, metric), value.n]
                                for metric, value in facts.items()]
    return table(["number", "mean", "steps"], rows, aria_label=f"Numbers: {name}",
                 id=f"optimizer-{name}") if rows else None


def cell_of(value: Interval, metric: schema.Metric) -> str:
    """A mean with its interval; shares and relative changes in percent."""
    return spanned(value, scale=100, unit=" %") if metric.unit == "share" or "scale" in metric else spanned(value)


def past_key(k: int | None, name: str) -> schema.Metric:
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


def plans_of(updates: Sequence[int | None]) -> tuple[Plan, ...]:
    ks = spaced([k for k in updates if k is not None], LINES)
    words = {None: "after the last update"} if not ks else {k: f"after {k} update{'s' * (k > 1)}" for k in ks}
    past, distance = ({past_key(k, name): word for k, word in words.items()} for name in ("past", "distance"))
    return (("past", "Tokens past the bound", past, True),
            ("distance", "Distance past the bound (nats)", distance, False), *CHARTS)


def chart_of(run: Run, name: str, title: str, lines: Mapping[schema.Metric, str], percent: bool) -> Part | None:
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
