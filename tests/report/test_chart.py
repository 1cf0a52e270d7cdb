"""Specifications of charts, drawn."""

from __future__ import annotations

import re

import pytest

from creditscope.report.chart import over_steps


@pytest.mark.parametrize("top", [1.0, 0.3, 0.02, 0.005, 0.0004])
def test_no_two_labels_of_an_axis_in_percent_are_equal(top: float) -> None:
    draw = pytest.importorskip("vl_convert")
    rows = [{"step": step, "share": top * step / 9} for step in range(10)]
    spec = over_steps(rows, "shares", ["share"], percent=True) | {"data": {"values": rows}, "width": 300}
    labels = re.findall(r">([\d.]+%)<", draw.vegalite_to_svg(spec))
    assert len(labels) >= 3
    assert len(set(labels)) == len(labels)
