"""Vega-Lite specifications as plain data: a chart is what it shows, not how it is drawn.

The rows travel beside the specification: `creditscope.chart(root, spec, {rows})` puts them in under the name `rows`, so
that several charts may share them. Every chart over steps has a parameter `chosen`: the chosen step, or null.
`assets/chart.js` keeps it equal in all of them, and tells the page which step was clicked. Greys and colours are read
on white and on black.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from creditscope.runs.figures import COLOURS, GRID, INK

Row = Mapping[str, Any]
Spec = dict[str, Any]
Edges = tuple[str, str]
"""The columns of a band: low and high."""

HEIGHT = 150
SOLID, DASHED = [1, 0], [5, 4]
ROUNDS = (SOLID, [8, 2], [2, 2])
"""Dashes of the lines that use the colours for the first, the second and the third time."""
MOST_POINTS = 60
"""A line of more values is thin and has no points on it: they would only thicken it."""
LEGEND_LINE = 36
"""Letters that fit beside each other below the narrowest chart."""


def config() -> Spec:
    """What all charts share: a transparent ground and the page's own font."""
    return {"background": "transparent", "font": "system-ui, sans-serif",
            "axis": {"labelColor": INK, "titleColor": INK, "gridColor": GRID, "domainColor": INK, "tickColor": INK,
                     "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11},
            "legend": {"labelColor": INK, "titleColor": INK, "orient": "bottom", "title": None, "labelLimit": 260,
                       "symbolType": "stroke", "symbolStrokeWidth": 2, "symbolOpacity": 1, "labelFontSize": 11},
            "title": {"color": INK, "anchor": "start", "fontSize": 13}, "view": {"stroke": None}}


def over_steps(rows: Sequence[Row], title: str, lines: Sequence[str], band: Edges | Mapping[str, Edges] | None = None,
               percent: bool = False, description: str = "", zero: bool = False,
               reference: Mapping[str, float] | None = None, points: Collection[str] = ()) -> Spec:
    """Numbers over training, a line each: `rows` hold `step` and the columns `lines`, and the edges of bands.

    A row without a column is bridged, as readings are on schedule; a row that has it as None leaves a gap. `band` is
    that of the first line, or a band for each line that has one. A line of `points` is drawn as points with upright
    intervals. `reference` are values that hold at every step, dashed.
    """
    bands = {} if band is None else dict(band) if isinstance(band, Mapping) else {lines[0]: band}
    reference = reference or {}
    colours, x = _colours(lines, reference), _x(rows, "step", inset=8 if points else 0)
    layers: list[Spec] = []
    for name in lines:
        value = {"field": _field(name)} | _y(percent, zero)
        there = [{"filter": f"isDefined({_datum(name)})"}]
        if name in bands:
            low, high = bands[name]
            mark = {"type": "rule", "strokeWidth": 1.5} if name in points else {"type": "area", "opacity": 0.18}
            layers.append({"transform": there, "mark": mark | {"color": colours[name]}, "encoding": {
                "x": x, "y": {"field": _field(low)} | _y(percent, zero), "y2": {"field": _field(high)}}})
        few = sum(row.get(name) is not None for row in rows) <= MOST_POINTS
        drawn = {"type": "point", "filled": True, "size": 36 if few else 10} if name in points else {
            "type": "line", "strokeWidth": 2 if few else 1.2, "point": {"size": 18} if few else False}
        layers.append({"transform": there, "mark": drawn,
                       "encoding": {"x": x, "y": value} | _key(name, colours, lines)})
    layers += [*_references(reference, colours, _y(percent, zero)), cursor_layer(x)]
    shown = [{"name": name, "low": bands[name][0], "high": bands[name][1]} if name in bands else {"name": name}
             for name in lines]
    return _spec(title, description, layers) | {"usermeta": {"lines": shown, "percent": percent}}


def curves(rows: Sequence[Row], title: str, names: Sequence[str], x: str = "step", percent: bool = False,
           description: str = "", zero: bool = False, reference: Mapping[str, float] | None = None) -> Spec:
    """Curves with bands, of rows in long form: `x`, `name`, `value`, and where there is an interval `low` and `high`.

    A curve for each of `names`, in this order; several runs side by side are such curves.
    """
    reference = reference or {}
    colours, across = _colours(names, reference), _x(rows, x)
    colour = _key(None, colours, names)
    many = max((sum(row["name"] == name for row in rows) for name in names), default=0) > MOST_POINTS
    layers: list[Spec] = [
        {"transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}],
         "mark": {"type": "area", "opacity": 0.15}, "encoding": {
             "x": across, "y": {"field": "low"} | _y(percent, zero), "y2": {"field": "high"},
             "color": colour["color"]}}] if any(row.get("low") is not None for row in rows) else []
    layers += [
        {"mark": {"type": "line", "strokeWidth": 2, "point": False if many else {"size": 18}},
         "encoding": {"x": across, "y": {"field": "value"} | _y(percent, zero)} | colour},
        *_references(reference, colours, _y(percent, zero))]
    if x == "step":
        layers.append(cursor_layer(across))
    return _spec(title, description, layers)


def cursor_layer(x: Spec) -> Spec:
    """The upright line at the chosen step, on the axis `x` of the lines; none where the chart does not reach it."""
    return {"data": {"values": [{}]}, "transform": [{"calculate": "chosen", "as": "step"},
                                                    {"filter": "isValid(datum.step)"}],
            "mark": {"type": "rule", "color": INK, "strokeWidth": 1.5, "clip": True, "aria": False},
            "encoding": {"x": x}}


def _spec(title: str, description: str, layers: list[Spec]) -> Spec:
    return {"$schema": SCHEMA, "title": title, "description": description or title, "width": "container",
            "height": HEIGHT, "params": [{"name": "chosen", "value": None}], "data": {"name": "rows"},
            "layer": layers, "config": config()}


def _colours(lines: Sequence[str], reference: Mapping[str, float]) -> dict[str, str]:
    """A colour a line, over again where there are more; references are grey."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(lines)} | dict.fromkeys(reference, INK)


def _references(reference: Mapping[str, float], colours: Mapping[str, str], y: Spec) -> list[Spec]:
    """Level lines."""
    lines = [one for one in colours if one not in reference]
    return [{"data": {"values": [{"value": value}]}, "mark": {"type": "rule", "strokeWidth": 1.5},
             "encoding": {"y": {"field": "value"} | y} | _key(name, colours, lines)}
            for name, value in reference.items()]


def _x(rows: Sequence[Row], name: str, inset: int = 0) -> Spec:
    """The level axis from the first place to the last, so many pixels off the frame; one place alone stands in the
    middle."""
    low, high = min(row[name] for row in rows), max(row[name] for row in rows)
    ends = [low, high] if low < high else [low - 1, high + 1]
    return {"field": _field(name), "type": "quantitative", "title": name, "axis": {"tickMinStep": 1, "grid": False},
            "scale": {"nice": False, "domain": ends} | ({"padding": inset} if inset else {})}


def _y(percent: bool, zero: bool) -> Spec:
    """The upright axis, all of a field but its name."""
    axis: Spec = {"tickCount": 4} | ({"format": ".0%"} if percent else {})
    return {"type": "quantitative", "title": None, "scale": {"zero": zero, "nice": True}, "axis": axis}


def _key(name: str | None, colours: Mapping[str, str], lines: Collection[str]) -> Spec:
    """Colour and dash of a line: of `name`, or of each row's own; a legend where there are several."""
    legend: Spec | None = None
    if len(colours) > 1:
        legend = {"columns": max(1, LEGEND_LINE // (4 + max(map(len, colours))))}
    of: Spec = {"field": "name", "type": "nominal"} if name is None else {"datum": name, "type": "nominal"}
    rounds = {one: ROUNDS[i // len(COLOURS) % len(ROUNDS)] for i, one in enumerate(lines)}
    ranges: dict[str, list[Any]] = {"color": list(colours.values()),
                                    "strokeDash": [rounds.get(one, DASHED) for one in colours]}
    return {channel: of | {"scale": {"domain": list(colours), "range": values}, "legend": legend}
            for channel, values in ranges.items()}


def _field(name: str) -> str:
    """A column's name as Vega-Lite reads it: a dot or a bracket would be a path into an object."""
    return re.sub(r"([.\[\]'])", r"\\\1", name)


def _datum(name: str) -> str:
    """A column in an expression."""
    return "datum['" + re.sub(r"(['\\])", r"\\\1", name) + "']"


SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""The name of the language; nothing is fetched from it."""
