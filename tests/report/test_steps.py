"""Charts over steps: the table behind them, what leaves a gap, and what is said where something was not recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from creditscope.report.answers import progress
from creditscope.report.chart import curves, over_steps
from creditscope.report.run import Run, read_run
from creditscope.report.section import Section, thinned
from creditscope.report.steps import CHARTS, MOST, packed, running, section, table
from creditscope.runs.columns import Column
from creditscope.runs.record import Record
from report.records import sealed

LINE: dict[str, Any] = {
    "rollouts/spent": 64, "reward/mean": 0.5, "signal/groups": 8, "signal/live_groups": 5, "length/truncated": 0.25,
    "entropy/mean": 0.1, "length/mean": 30.5, "length/max": 50, "grad/norm": 1.5}
READ: dict[str, Any] = {
    "gram/group/effective_rank": 3.0, "gram/group/w_null": 6.0, "overshoot/past": 0.02, "overshoot/1/past": 0.01,
    "eval/accuracy": 0.5, "eval/low": 0.4, "eval/high": 0.6}


def made(path: Path, lines: list[dict[str, Any]]) -> Run:
    with Record.create(path, {"steps": len(lines)}, {}) as record:
        for step, line in enumerate(lines):
            record.append(step, line)
    return read_run(path)


def written(path: Path, lines: list[dict[str, Any]]) -> Run:
    """The same without a sync for each step."""
    with Record.create(path, {"steps": len(lines)}, {}):
        (path / "steps.jsonl").write_bytes(b"".join(map(sealed, lines)))
    return read_run(path)


def names(found: Section) -> list[str]:
    assert found.data is not None
    return [chart["name"] for chart in found.data["charts"]]


# -- the table --------------------------------------------------------------------------------------------------------


def test_a_row_has_the_numbers_of_its_step_under_the_names_they_are_shown_by() -> None:
    assert table([LINE | {"step": 7}]) == [{
        "step": 7, "reward of a step": 0.5, "entropy": 0.1, "mean length": 30.5, "longest": 50.0, "cut off": 0.25,
        "gradient norm": 1.5, "live groups": 0.625}]  # 5/8


def test_a_number_that_was_not_finite_is_none_and_one_that_was_not_read_is_not_there(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [LINE, LINE | {"grad/norm": float("nan")}])
    first, second = table(run.steps)
    assert first["gradient norm"] == 1.5
    assert second["gradient norm"] is None
    assert "effective rank" not in second
    assert "grad/norm" in section(run).html()


def test_the_running_mean_has_the_interval_of_the_last_ten_steps() -> None:
    # 1, …, 10 after a 99 that no longer counts: mean 5.5, s² = 82.5/9, t₉ = 2.2622, half = 2.2622·√(82.5/9/10) = 2.166
    assert running([99.0, *map(float, range(1, 11))], False) == {
        "mean of up to 10 steps": 5.5, "mean low": 3.334, "mean high": 7.666}


def test_two_steps_have_no_running_mean() -> None:
    assert running([0.1, 0.2], True) == {}
    assert running([0.1, 0.2, 0.3], True)["mean of up to 10 steps"] == 0.2


def test_a_table_by_columns_is_the_same_table() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 0, "a": 1.0, "b": None}, {"step": 3, "a": 2.0}, {"step": 5, "a": 3.0, "b": 4.0}]
    columns = packed(rows)
    assert columns == {"step": [0, 3, 5], "columns": {
        "a": {"values": [1.0, 2.0, 3.0]}, "b": {"values": [None, 4.0], "at": [0, 2]}}}
    again: list[dict[str, Any]] = [{"step": step} for step in columns["step"]]
    for name, column in columns["columns"].items():
        for at, value in zip(column.get("at", range(len(again))), column["values"], strict=True):
            again[at][name] = value
    assert again == rows


# -- long runs --------------------------------------------------------------------------------------------------------


def test_of_more_steps_the_first_the_last_and_the_extremes_of_each_part_are_kept() -> None:
    # Two lines of 12 rows, 10 rows to keep: (10 − 2) / (2 · 2) = 2 parts a line. Of a the parts are rows 0 … 5 and
    # 6 … 11: least at 3, largest at 1; least at 7, largest at 9. Of b, which has six rows, they are 0, 2, 4 and 6, 8,
    # 10: least at 2, largest at 4; least at 8, largest at 6. With the first and the last row: 0 1 2 3 4 6 7 8 9 11.
    a = Column(np.arange(12), np.array([5.0, 9, 6, 1, 5, 5, 4, 2, 4, 8, 4, 3]))
    b = Column(np.arange(0, 12, 2), np.array([2.0, 1, 3, 6, 4, 5]))
    assert thinned([a, b], 10).tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 11]
    assert thinned([a, b], 12).tolist() == list(range(12))
    assert thinned([], 12).tolist() == []


def test_a_gap_is_kept_and_hides_no_extreme() -> None:
    # Ten rows with gaps at 4 and 5, six to keep: numbers and gaps are two lines, (6 − 2) / (2 · 2) = 1 part each. The
    # least is at 2, the largest at 7, the first gap at 4; the first row and the last.
    values = np.array([3.0, 4, 1, 5, np.nan, np.nan, 6, 9, 2, 3])
    assert thinned([Column(np.arange(10), values)], 6).tolist() == [0, 2, 4, 7, 9]


def test_of_many_columns_no_more_rows_are_kept_than_asked() -> None:
    columns = [Column(np.arange(5000), np.random.default_rng(seed).random(5000)) for seed in range(30)]
    assert 1000 < len(thinned(columns, MOST)) <= MOST


def test_a_long_run_shows_its_peaks_and_says_how_many_steps_it_shows(tmp_path: Path) -> None:
    lines = [LINE | {"step": step, "entropy/mean": 1 / (step + 3)} for step in range(5000)]
    lines[1234]["grad/norm"], lines[4321]["grad/norm"] = 99.0, 0.01
    lines[777] |= {"absent": {"entropy/mean": "nan"}}
    del lines[777]["entropy/mean"]
    run = written(tmp_path / "run", lines)
    found, rows = section(run), table(run.steps)
    assert found.data is not None
    assert found.data["steps"] == found.data["table"]["step"] == [row["step"] for row in rows]
    assert {0, 777, 1234, 4321, 4999} <= {row["step"] for row in rows}
    assert next(row for row in rows if row["step"] == 777)["entropy"] is None
    assert f"show {len(rows)} of 5,000 steps" in found.html()
    # The mean is that of ten steps of the record, not of ten rows.
    assert rows[-1]["mean of up to 10 steps"] == 0.5
    assert len(rows) < MOST


def test_a_run_that_is_shown_whole_says_nothing_of_it(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [LINE | {"step": step} for step in range(MOST)])
    assert len(table(run.steps)) == MOST
    assert " of 2,000 steps" not in section(run).html()


# -- the section ------------------------------------------------------------------------------------------------------


def test_a_run_that_recorded_everything_has_every_chart_and_lacks_nothing(tmp_path: Path) -> None:
    found = section(made(tmp_path / "run", [LINE | READ] * 4))
    assert names(found) == ["reward", "accuracy", "groups", "entropy", "length", "rank", "overshoot", "gradient"]
    assert len(CHARTS) == len(names(found)) + 5  # and those of preference pairs and of a learned reward
    assert 'class="missing"' not in found.html()


def test_a_run_on_pairs_has_charts_of_margins_and_of_pairs_in_order(tmp_path: Path) -> None:
    line = {"pairs/margin": 0.3, "pairs/accuracy": 0.75, "pairs/chosen_reward": -0.1, "pairs/rejected_reward": -0.4}
    found = section(made(tmp_path / "run", [line] * 4))
    assert names(found) == ["margin", "order"]


def test_a_run_on_a_learned_reward_shows_the_verifiers_beside_it(tmp_path: Path) -> None:
    line = {"reward/mean": -1.5, "reward/gold_mean": 0.4, "reward/gold_correlation": -0.1, "policy/reference_kl": 2.0}
    run = made(tmp_path / "run", [line, line, line | {"reward/mean": -0.5, "reward/gold_mean": 0.1}])
    assert names(section(run)) == ["reward", "gold", "agreement", "reference"]
    assert progress(run) == ["mean learned reward -1.5 → -0.5 (thirds)", "verifier's reward 0.4 → 0.1 (thirds)"]


def test_what_was_not_recorded_has_no_chart_but_a_sentence_with_the_flag(tmp_path: Path) -> None:
    found = section(made(tmp_path / "run", [LINE] * 4))
    assert names(found) == ["reward", "groups", "entropy", "length", "gradient"]
    for flag in ("--scope light", "--probe light", "--eval-problems"):
        assert flag in found.html()


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    for run in (made(tmp_path / "none", []), made(tmp_path / "eval", [{"eval/accuracy": 0.5}])):
        assert section(run).data is None
        assert "No step is recorded yet." in section(run).html()


def test_one_step_is_enough_for_charts(tmp_path: Path) -> None:
    found = section(made(tmp_path / "run", [LINE | READ]))
    assert "rank" in names(found)
    assert found.data is not None
    assert found.data["steps"] == [0]


def test_a_step_that_only_evaluates_has_a_row_and_cannot_be_chosen(tmp_path: Path) -> None:
    found = section(made(tmp_path / "run", [LINE, LINE, {"eval/accuracy": 0.7}]))
    assert found.data is not None
    assert found.data["steps"] == [0, 1]
    assert found.data["table"]["step"] == [0, 1, 2]


def test_texts_in_place_of_numbers_are_left_out(tmp_path: Path) -> None:
    found = section(made(tmp_path / "run", [dict.fromkeys(LINE | READ, "</script>")] * 3))
    assert found.data is None
    assert "No step has a number for these charts." in found.html()


def test_the_chart_of_rank_has_the_null_and_no_value_of_a_paper(tmp_path: Path) -> None:
    found = section(made(tmp_path / "run", [LINE | READ] * 4))
    assert found.data is not None
    spec = found.data["charts"][5]["spec"]
    assert [line["name"] for line in spec["usermeta"]["lines"]] == ["effective rank", "null (same w)"]
    assert "P1" not in json.dumps(spec)


def test_overshoot_is_shown_at_the_end_of_the_batch_and_as_often_as_it_was_seen(tmp_path: Path) -> None:
    seen = {"overshoot/1/past": 0.01, "overshoot/2/past": 0.02}
    found = section(made(tmp_path / "run", [LINE | READ, LINE | seen, LINE | seen]))
    assert found.data is not None
    chart = next(chart for chart in found.data["charts"] if chart["name"] == "overshoot")
    # after one update at all three steps, after two at two, at the end once
    assert chart["columns"] == ["after the last update", "after 1 update"]


def test_five_hundred_steps_are_at_most_150_kilobytes(tmp_path: Path) -> None:
    lines = [(LINE | READ if step % 10 == 0 else LINE) | {"step": step, "reward/mean": 0.123456 + step / 1234,
             "entropy/mean": 1 / (step + 3), "grad/norm": 1 / (step + 7), "length/mean": 100 / (step + 11)}
             for step in range(500)]
    with Record.create(tmp_path / "run", {"steps": 500}, {}):
        (tmp_path / "run" / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = section(read_run(tmp_path / "run"))
    assert len(json.dumps(found.data, allow_nan=False, separators=(",", ":"))) <= 150_000


# -- the specifications -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_chart_is_a_specification_that_vega_lite_understands(tmp_path: Path) -> None:
    vl_convert = pytest.importorskip("vl_convert")
    found = section(made(tmp_path / "run", [LINE | READ] * 4))
    assert found.data is not None
    for chart in found.data["charts"]:
        assert vl_convert.vegalite_to_vega(chart["spec"])["marks"]
        json.dumps(chart["spec"], allow_nan=False)


def test_a_gap_breaks_a_line_and_a_step_without_a_reading_does_not() -> None:
    vl_convert = pytest.importorskip("vl_convert")
    rows: list[dict[str, Any]] = [
        {"step": 0, "a": 1.0, "b": 1.0}, {"step": 1, "a": None}, {"step": 2, "a": 3.0, "b": 2.0}]

    def pieces(name: str) -> int:
        """How often the line's path is begun."""
        spec = over_steps(rows, "t", [name]) | {"datasets": {"rows": rows}, "width": 200}
        svg: str = vl_convert.vegalite_to_svg(spec)
        path = next(tag for part in svg.split("<path") if 'description="line mark"' in (tag := part.split(">")[0]))
        return path.split(' d="')[1].split('"')[0].count("M")

    assert pieces("b") == 1
    assert pieces("a") == 2


@pytest.mark.parametrize("name", ["a.b", "a[0]", "it's", "R = 8, seed 0"])
def test_a_columns_name_may_hold_dots_brackets_and_quotes(name: str) -> None:
    vl_convert = pytest.importorskip("vl_convert")
    rows = [{"step": 0, name: 10.0}, {"step": 1, name: 20.0}]
    svg = vl_convert.vegalite_to_svg(over_steps(rows, "t", [name]) | {"datasets": {"rows": rows}, "width": 200})
    assert ">10<" in svg  # the axis spans the column's numbers
    assert ">20<" in svg


def test_a_band_for_each_line_is_drawn_as_an_area_or_as_upright_lines() -> None:
    rows = [{"step": 0, "a": 1.0, "al": 0.5, "ah": 1.5, "b": 2.0, "bl": 1.5, "bh": 2.5}]
    spec = over_steps(rows, "t", ["a", "b"], bands={"a": ("al", "ah"), "b": ("bl", "bh")}, points=["b"])
    assert [layer["mark"]["type"] for layer in spec["layer"]] == ["area", "line", "rule", "point", "rule"]
    a, b = {"name": "a", "low": "al", "high": "ah"}, {"name": "b", "low": "bl", "high": "bh"}
    assert spec["usermeta"]["lines"] == [a, b]
    assert over_steps(rows, "t", ["a"], bands={"a": ("al", "ah")})["usermeta"]["lines"] == [a]


def test_curves_have_a_colour_each_and_a_band_where_there_is_one() -> None:
    vl_convert = pytest.importorskip("vl_convert")
    rows = [{"step": step, "name": name, "value": 1.0 + step, "low": 0.5 if name == "R = 2" else None, "high": 1.5}
            for name in ("R = 2", "R = 4") for step in (0, 5)]
    spec = curves(rows, "Rank", ["R = 2", "R = 4"])
    assert spec["layer"][1]["encoding"]["color"]["scale"]["domain"] == ["R = 2", "R = 4"]
    svg = vl_convert.vegalite_to_svg(spec | {"datasets": {"rows": rows}, "width": 200})
    assert svg.count("area mark container") == svg.count("line mark container") - 1 == 1


def test_one_step_alone_stands_in_the_middle() -> None:
    spec = over_steps([{"step": 4, "a": 1.0}], "t", ["a"])
    assert spec["layer"][0]["encoding"]["x"]["scale"]["domain"] == [3, 5]
