"""Figures as SVG: accuracy against rollouts spent, overshoot beside accuracy, a number over training or by R; and the
metrics of one run as an Altair chart for a notebook.

Needs the extra `plot`. Colours are readable on white and on black; the background is transparent.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from creditscope.errors import CreditscopeError, install_hint, installed, unknown
from creditscope.runs.columns import Steps
from creditscope.runs.compare import Comparison
from creditscope.runs.intervals import Interval
from creditscope.runs.schema import metric

INK = "#767676"  # the grey whose contrast is 4.5 to 1 against white and against black
GRID = "#76767640"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#a6761d")
"""Okabe and Ito's palette without black and yellow, which are invisible on one background, and two more."""
WIDTH, HEIGHT = 430, 300
GAP = 14
MARKED = 100
"""Readings of a panel up to which each is marked."""


def can_draw() -> bool:
    """Whether the extra `plot` is installed; imports nothing."""
    return installed("altair") and installed("vl_convert")


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The values moved apart to at least `gap`, a crowd around its own middle, nothing above `high` or below `low`.

    Pushing up alone and pushing down alone both keep the gap, so half way between the two keeps it as well.

    >>> spread([1.0, 1.0, 5.0], 1.0, 0.0, 5.0)
    [0.5, 1.5, 5.0]
    >>> spread([5.0, 5.0], 1.0, 0.0, 5.0)
    [4.0, 5.0]
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    sorted_values = [values[i] for i in order]
    up = _pushed(sorted_values, gap)
    down = [-x for x in reversed(_pushed([-x for x in reversed(sorted_values)], gap))]
    inside = _pushed([max(low, (a + b) / 2) for a, b in zip(up, down, strict=True)], gap)
    inside = [-x for x in reversed(_pushed([max(-high, -x) for x in reversed(inside)], gap))]
    placed = dict(zip(order, inside, strict=True))
    return [placed[i] for i in range(len(values))]


def _pushed(ascending: Sequence[float], gap: float) -> list[float]:
    out: list[float] = []
    for x in ascending:
        out.append(max(x, out[-1] + gap) if out else x)
    return out


def accuracy_svg(found: Comparison) -> str:
    """Accuracy against rollouts spent, one line per name with its interval; beside it accuracy at the end."""
    alt = _altair()
    lines = _lines(alt, {line.name: list(zip(found.grid, line.curve, strict=True)) for line in found.lines},
                   _colours(found), "accuracy on unseen problems", "rollouts spent, continuations for values included",
                   percent=True).properties(title=f"Accuracy by rollouts spent ({_seeds(found)})")
    final = _dots(alt, found, {line.name: line.accuracy for line in found.lines}, alt.X(
        "mean:Q", title="accuracy", scale=alt.Scale(zero=False), axis=alt.Axis(format=".0%", tickCount=5)))
    return _svg(alt.hconcat(lines, final.properties(title=f"At {found.budget:,} rollouts"), spacing=95))


def brake_svg(found: Comparison) -> str:
    alt = _altair()
    rows = {line.name: line.numbers["distance"] for line in found.lines}
    distance = _dots(alt, found, {name: value for name, value in rows.items() if value is not None}, alt.X(
        "mean:Q", title="nats, mean of the tokens past it", scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=5)))
    accuracy = _dots(alt, found, {line.name: line.accuracy for line in found.lines}, alt.X(
        "mean:Q", title=f"accuracy on unseen problems at {found.budget:,} rollouts", scale=alt.Scale(zero=False),
        axis=alt.Axis(format=".0%", tickCount=5)))
    panels = (distance.properties(title=f"Distance past the bound, μ = {found.settings['inner_steps']}", width=320),
              accuracy.properties(title=f"Accuracy ({_seeds(found)})", width=320))
    return _svg(alt.hconcat(*(panel.properties(height=40 * len(rows)) for panel in panels), spacing=40))


def curves_svg(curves: Mapping[str, Sequence[tuple[float, Interval]]], words: str, percent: bool = False,
               along: str = "step") -> str:
    """A number over training, or over what `along` names: one line per name with its interval."""
    most = max(p.n for line in curves.values() for _, p in line)
    over = "one run each, no interval" if most == 1 else f"mean of up to {most} runs, 95 % t-interval"
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(curves)}
    return _svg(_lines(_altair(), curves, colours, words, along, percent).properties(
        title=f"{words[0].upper()}{words[1:]} ({over})"))


def steps_chart(steps: Steps, keys: Sequence[str]) -> Any:
    """One panel per metric over the steps, with its name and unit from the schema, as an Altair chart."""
    known = [name for name in steps.names if name != "step" and len(steps.numbers(name).at)]
    has = f"this run has: {', '.join(sorted(known)) or 'none'}"
    for key in keys:
        if key not in known and metric(key) is not None:
            raise CreditscopeError(f"this run has no numbers of {key!r}; choose another metric; {has}")
        if key not in known:
            raise unknown("metric", key, known)
    if not keys:
        raise CreditscopeError(f"chart needs the name of at least one metric, such as reward/mean; {has}")
    alt = _altair()
    panels = [_panel(alt, steps, key, COLOURS[place % len(COLOURS)]) for place, key in enumerate(keys)]
    return _styled(_notebook_chart()(vconcat=panels).resolve_scale(x="shared"))


def _panel(alt: Any, steps: Steps, key: str, colour: str) -> Any:
    at, values = steps.numbers(key)
    own = metric(key)
    rows = [{"step": step, "value": value}
            for step, value in zip(steps.column("step").values[at].tolist(), values.tolist(), strict=True)]
    percent = own is not None and own.unit == "share"
    return alt.Chart(alt.Data(values=rows)).mark_line(
        color=colour, strokeWidth=2, point={"color": colour, "size": 18} if len(rows) <= MARKED else False,
    ).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1)),
        y=alt.Y("value:Q", title=own.unit if own else None, scale=alt.Scale(zero=False),
                axis=alt.Axis(format=".0%") if percent else alt.Axis()),
        tooltip=[alt.Tooltip("step:Q"), alt.Tooltip("value:Q", format=".4g")],
    ).properties(width=WIDTH, height=HEIGHT // 2, title=f"{own.name} ({key})" if own else key)


@functools.cache
def _notebook_chart() -> Any:
    alt = _altair()
    base: Any = alt.VConcatChart

    class NotebookChart(base):  # type: ignore[misc]
        """Drawn as SVG in a notebook: Altair's default renderer would fetch scripts from a network."""

        def _repr_mimebundle_(self, *args: Any, **kwargs: Any) -> Any:
            chosen = alt.renderers.active != "default"
            with nullcontext() if chosen else alt.renderers.enable("svg"):
                return super()._repr_mimebundle_(*args, **kwargs)

    return NotebookChart


def _lines(alt: Any, curves: Mapping[str, Sequence[tuple[float, Interval]]], colours: Mapping[str, str], words: str,
           along: str, percent: bool) -> Any:
    """One line per name with its interval, and its name at the end."""
    seen = [x for line in curves.values() for _, p in line for x in (p.mean, p.low, p.high) if x is not None]
    room = 0.04 * (max(seen) - min(seen)) or 0.01
    low, high = min(seen) - room, max(seen) + room
    last = max(place for line in curves.values() for place, _ in line)
    rows = [{"name": name, "x": place, "mean": p.mean, "low": p.low, "high": p.high}
            for name, line in curves.items() for place, p in line]
    ends = spread([line[-1][1].mean for line in curves.values()], GAP * (high - low) / HEIGHT, low, high)
    labels = [{"name": name, "x": last, "end": end} for name, end in zip(curves, ends, strict=True)]
    scale = alt.Scale(domain=[low, high], nice=False, zero=False)
    colour = _colour(alt, "name", colours)
    up = alt.Y("mean:Q", title=words, scale=scale, axis=alt.Axis(format=".0%") if percent else alt.Axis())
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("x:Q", title=along, scale=alt.Scale(domain=[0, max(last, 1)], nice=False),
                axis=alt.Axis(tickMinStep=1)), color=colour)
    return alt.layer(
        base.transform_filter("isValid(datum.low)").mark_area(opacity=0.13).encode(y=alt.Y("low:Q", scale=scale),
                                                                                  y2="high:Q"),
        base.mark_line(strokeWidth=2).encode(y=up),
        base.mark_circle(size=22, opacity=1).encode(y=up),
        alt.Chart(alt.Data(values=labels)).mark_text(align="left", dx=8, fontSize=11).encode(
            x="x:Q", y=alt.Y("end:Q", scale=scale), text="name:N", color=colour),
    ).properties(width=WIDTH, height=HEIGHT)


def _altair() -> Any:
    with install_hint("a figure"):
        import altair
        import vl_convert  # noqa: F401
    return altair


def _dots(alt: Any, found: Comparison, values: Mapping[str, Interval], along: Any) -> Any:
    """One row per name: mean and interval; the baseline's interval as a strip across all rows."""
    what, names = found.kind.setting, [line.name for line in found.lines]
    rows = [{what: name, "mean": value.mean, "low": value.low, "high": value.high} for name, value in values.items()]
    up = alt.Y(f"{what}:N", sort=names, title=None, scale=alt.Scale(domain=names))
    base = alt.Chart(alt.Data(values=rows)).encode(y=up, color=_colour(alt, what, _colours(found)))
    panel = [base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q"),
             base.mark_circle(size=50, opacity=1).encode(x=along)]
    level = values.get(found.kind.baseline)
    if level is not None and level.low is not None:
        strip = alt.Chart(alt.Data(values=[{"low": level.low, "high": level.high}]))
        panel.insert(0, strip.mark_rect(color=INK, opacity=0.15).encode(x="low:Q", x2="high:Q"))
    return alt.layer(*panel).properties(width=210, height=HEIGHT)


def _svg(chart: Any) -> str:
    import vl_convert

    svg: str = vl_convert.vegalite_to_svg(_styled(chart).to_dict())
    return svg


def _styled(chart: Any) -> Any:
    return chart.configure(background="transparent", font="sans-serif").configure_axis(
        labelColor=INK, titleColor=INK, gridColor=GRID, domainColor=INK, tickColor=INK, titleFontWeight="normal",
    ).configure_title(color=INK, fontSize=13, anchor="start").configure_view(stroke=None)


def _colours(found: Comparison) -> dict[str, str]:
    """The baseline grey, the others by the alphabet, so that colours do not depend on the order."""
    names, baseline = {line.name for line in found.lines}, found.kind.baseline
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(sorted(names - {baseline}))}
    return colours | ({baseline: INK} if baseline in names else {})


def _colour(alt: Any, field: str, colours: Mapping[str, str]) -> Any:
    return alt.Color(f"{field}:N", scale=alt.Scale(domain=list(colours), range=list(colours.values())), legend=None)


def _seeds(found: Comparison) -> str:
    counts = sorted({len(line.seeds) for line in found.lines})
    if counts == [1]:
        return "one seed, no interval"
    return f"mean of {'–'.join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))} seeds, 95 % t-interval"
