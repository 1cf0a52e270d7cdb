"""Vega-Lite specifications as plain data.

The rows are stored beside the specification, so that several charts can share them: `creditscope.chart(root, spec,
{rows})` adds them under the name `rows`. Every chart has a parameter `chosen`: the chosen step, or null.
`assets/chart.js` keeps it equal in all charts over steps, and tells the page which step was clicked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from creditscope.runs.figures import COLOURS, GRID, INK

Row = Mapping[str, Any]
Spec = dict[str, Any]
Edges = tuple[str, str]

HEIGHT = 150
SOLID, DASHED = [1, 0], [5, 4]
ROUNDS = (SOLID, [8, 2], [2, 2])
"""Dashes of the lines that use the colours for the first, second and third time."""
MOST_POINTS = 60
"""A line of more values is thin and has no points."""
LEGEND_LINE = 36
"""Characters that fit in a row below the narrowest chart."""


def config() -> Spec:
    return {"background": "transparent", "font": "system-ui, sans-serif",
            "axis": {"labelColor": INK, "titleColor": INK, "gridColor": GRID, "domainColor": INK, "tickColor": INK,
                     "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11},
            "legend": {"labelColor": INK, "titleColor": INK, "orient": "bottom", "title": None, "labelLimit": 260,
                       "symbolType": "stroke", "symbolStrokeWidth": 2, "symbolOpacity": 1, "labelFontSize": 11},
            "title": {"color": INK, "anchor": "start", "fontSize": 13}, "view": {"stroke": None}}


def over_steps(rows: Sequence[Row], title: str, lines: Sequence[str], bands: Mapping[str, Edges] | None = None,
               percent: bool = False, description: str = "", zero: bool = False, points: Collection[str] = ()) -> Spec:
    """Numbers over training, one line per column of `lines`; `rows` hold `step`, these columns and the ends of bands.

    A row without a column is bridged: readings follow a schedule. A row that has the column as None leaves a gap. A
    line of `points` is drawn as points with vertical intervals.
    """
    bands = bands or {}
    colours, x = _colours(lines), _x(rows, "step", inset=8 if points else 0)
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
                       "encoding": {"x": x, "y": value} | _key(name, colours)})
    shown = [{"name": name} | dict(zip(("low", "high"), bands.get(name, ()), strict=False)) for name in lines]
    return spec_of(title, [*layers, cursor_layer(x)], description) | {"usermeta": {"lines": shown, "percent": percent}}


def curves(rows: Sequence[Row], title: str, names: Sequence[str], x: str = "step", percent: bool = False,
           description: str = "") -> Spec:
    """One curve per name, from rows in long form: `x`, `name`, `value`, and of an interval `low` and `high`."""
    across, colour = _x(rows, x), _key(None, _colours(names))
    many = max((sum(row["name"] == name for row in rows) for name in names), default=0) > MOST_POINTS
    layers: list[Spec] = [
        {"transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}],
         "mark": {"type": "area", "opacity": 0.15}, "encoding": {
             "x": across, "y": {"field": "low"} | _y(percent), "y2": {"field": "high"},
             "color": colour["color"]}}] if any(row.get("low") is not None for row in rows) else []
    layers.append({"mark": {"type": "line", "strokeWidth": 2, "point": False if many else {"size": 18}},
                   "encoding": {"x": across, "y": {"field": "value"} | _y(percent)} | colour})
    return spec_of(title, [*layers, cursor_layer(across)] if x == "step" else layers, description)


def marked(mark: Spec, x: Spec, y: Spec, name: str, colours: Mapping[str, str], **more: Spec) -> Spec:
    """A layer of the rows that have y, in the colour of `name`."""
    colour = {"datum": name, "type": "nominal", "legend": {"columns": 1, "symbolOpacity": 1},
              "scale": {"domain": list(colours), "range": list(colours.values())}}
    return {"transform": [{"filter": f"isValid(datum.{y['field']})"}], "mark": mark | {"aria": False},
            "encoding": {"x": x, "y": {"type": "quantitative", "title": None} | y, "color": colour, **more}}


def cursor_layer(x: Spec) -> Spec:
    """The vertical line at the chosen step; none where the chart does not reach it."""
    return {"data": {"values": [{}]}, "transform": [{"calculate": "chosen", "as": "step"},
                                                    {"filter": "isValid(datum.step)"}],
            "mark": {"type": "rule", "color": INK, "strokeWidth": 1.5, "clip": True, "aria": False},
            "encoding": {"x": x}}


def spec_of(title: str, layers: Sequence[Spec], description: str = "") -> Spec:
    return {"$schema": SCHEMA, "title": title, "description": description or title, "width": "container",
            "height": HEIGHT, "params": [{"name": "chosen", "value": None}], "data": {"name": "rows"},
            "layer": list(layers), "config": config()}


def _colours(lines: Sequence[str]) -> dict[str, str]:
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(lines)}


def _x(rows: Sequence[Row], name: str, inset: int = 0) -> Spec:
    """The horizontal axis, `inset` pixels off the frame; a single place stands in the middle."""
    low, high = min(row[name] for row in rows), max(row[name] for row in rows)
    ends = [low, high] if low < high else [low - 1, high + 1]
    return {"field": _field(name), "type": "quantitative", "title": name, "axis": {"tickMinStep": 1, "grid": False},
            "scale": {"nice": False, "domain": ends} | ({"padding": inset} if inset else {})}


def _y(percent: bool, zero: bool = False) -> Spec:
    """The vertical axis, without the field's name."""
    axis: Spec = {"tickCount": 4} | ({"format": "~%"} if percent else {})  # as few digits as tell ticks apart
    return {"type": "quantitative", "title": None, "scale": {"zero": zero, "nice": True}, "axis": axis}


def _key(name: str | None, colours: Mapping[str, str]) -> Spec:
    """Colour and dash of the line `name`, or of each row's own name; a legend where there are several."""
    legend = {"columns": max(1, LEGEND_LINE // (4 + max(map(len, colours))))} if len(colours) > 1 else None
    of: Spec = {"field": "name", "type": "nominal"} if name is None else {"datum": name, "type": "nominal"}
    dashes = [ROUNDS[i // len(COLOURS) % len(ROUNDS)] for i in range(len(colours))]
    ranges: dict[str, list[Any]] = {"color": list(colours.values()), "strokeDash": dashes}
    return {channel: of | {"scale": {"domain": list(colours), "range": values}, "legend": legend}
            for channel, values in ranges.items()}


def _field(name: str) -> str:
    """A column's name as Vega-Lite reads it: a dot or a bracket would be a path into an object."""
    return re.sub(r"([.\[\]'])", r"\\\1", name)


def _datum(name: str) -> str:
    return "datum['" + re.sub(r"(['\\])", r"\\\1", name) + "']"


SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""Names the language; nothing is fetched."""
