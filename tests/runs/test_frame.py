"""The steps of a run as a dataframe and as a chart: what is absent is null, and a wrong name is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cli import loaded
from creditscope import CreditscopeError, Record
from creditscope.runs import schema
from each import each
from records import write_record

pytestmark = pytest.mark.slow  # polars, pandas and Altair take a quarter of a second each to load

LINES = [{"reward/mean": 0.25, "reward/errors": 0, "eval/accuracy": 0.5},
         {"reward/mean": 0.5, "reward/errors": 2, "reward/first_error": "boom"},
         {"reward/mean": float("nan"), "reward/errors": 0, "signal/groups": 8}]
ROWS = {"step": [0, 1, 2], "reward/mean": [0.25, 0.5, None], "reward/errors": [0, 2, 0],
        "eval/accuracy": [0.5, None, None], "reward/first_error": [None, "boom", None],
        "signal/groups": [None, None, 8]}
"""The same by column: step 2's reward was not finite, so a record has none."""


def record(folder: Path, lines: Any = LINES) -> Record:
    return Record.open(write_record(folder / "run", lines))


def plain(frame: Any) -> dict[str, list[Any]]:
    """Column -> values, None where the frame has null."""
    if hasattr(frame, "to_pandas"):
        return frame.to_dict(as_series=False)
    missing = frame.isna()
    return {name: [None if missing[name][row] else value for row, value in enumerate(frame[name].tolist())]
            for name in frame.columns}


@each("library", ["polars", "pandas"])
def test_a_frame_has_one_row_per_step_and_null_where_a_metric_is_absent(library: str, tmp_path: Path) -> None:
    frame = record(tmp_path).frame(library)
    assert type(frame).__module__.startswith(library)
    found = plain(frame)
    assert found == ROWS
    assert list(found) == list(ROWS)  # step first, then as they first appear
    assert [type(value) for value in found["signal/groups"]][-1] is int  # not a float for the sake of the missing ones


@each("library", ["polars", "pandas"])
def test_a_run_without_steps_is_an_empty_frame(library: str, tmp_path: Path) -> None:
    assert plain(record(tmp_path, []).frame(library)) == {"step": []}


@each("library", ["polars", "pandas"])
def test_columns_that_no_run_writes_make_a_frame_all_the_same(library: str, tmp_path: Path) -> None:
    lines = [{"mixed": 1, "list": [1, 2], "flag": True, "text": "<script>", "numbers": 1},
             {"mixed": "one", "list": [], "flag": False, "text": "\ud800", "numbers": 0.5, "\ud800": 1.0}]
    assert plain(record(tmp_path, lines).frame(library)) == {
        "step": [0, 1], "mixed": ["1", "one"], "list": ["[1, 2]", "[]"], "flag": [True, False],
        "text": ["<script>", "\\ud800"], "numbers": [1.0, 0.5]}


def test_polars_is_taken_where_both_are_installed_and_pandas_where_it_is_alone(tmp_path: Path,
                                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(tmp_path)
    assert type(run.frame()).__module__.startswith("polars")
    monkeypatch.setattr("creditscope.runs.frame.installed", lambda name: name != "polars")
    assert type(run.frame()).__module__.startswith("pandas")


def test_without_a_library_the_error_has_the_command_that_installs_one(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(tmp_path)
    with pytest.raises(CreditscopeError, match=r"unknown dataframe library 'panda'; did you mean 'pandas'\?"):
        run.frame("panda")
    monkeypatch.setattr("creditscope.runs.frame.installed", lambda name: False)
    with pytest.raises(CreditscopeError, match=r"^a dataframe needs polars or pandas, which are not installed: pip "
                                               r"install polars$"):
        run.frame()
    with pytest.raises(CreditscopeError, match="a dataframe needs pandas, which is not installed: pip install pandas"):
        run.frame("pandas")


def test_reading_a_record_loads_no_library_of_frames_or_charts(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", LINES)
    found = loaded(f"from creditscope import Record; Record.open({str(folder)!r}).steps()")
    assert not found & {"polars", "pandas", "altair", "torch"}


# -- charts ----------------------------------------------------------------------------------------------------------


def test_a_chart_has_a_panel_per_metric_with_name_and_unit_of_the_schema_and_the_readings_alone(tmp_path: Path) -> None:
    found = record(tmp_path).chart("reward/mean", "eval/accuracy").to_dict()
    reward, accuracy = found["vconcat"]
    assert reward["title"] == f"{schema.REWARD_MEAN.name} (reward/mean)"
    assert (reward["encoding"]["y"]["title"], accuracy["encoding"]["y"]["title"]) == ("reward", "share")
    assert accuracy["encoding"]["y"]["axis"]["format"] == ".0%"
    # Two steps have a finite reward, one an evaluation: nothing is drawn for the others.
    assert reward["data"]["values"] == [{"step": 0, "value": 0.25}, {"step": 1, "value": 0.5}]
    assert accuracy["data"]["values"] == [{"step": 0, "value": 0.5}]


def test_a_notebook_gets_a_drawing_that_needs_no_network_and_a_renderer_of_the_user_s_choice(tmp_path: Path) -> None:
    import altair

    chart = record(tmp_path).chart("reward/mean").properties(title="mine")
    found = chart._repr_mimebundle_()
    assert list(found) == ["image/svg+xml"]
    assert "mean reward" in found["image/svg+xml"]
    assert not [word for word in ("<script", "href", "url(", "<image") if word in found["image/svg+xml"]]
    assert altair.renderers.active == "default"  # the user's settings are as they were
    with altair.renderers.enable("mimetype"):
        assert "image/svg+xml" not in chart._repr_mimebundle_()


def test_a_hostile_name_of_a_metric_is_text_in_the_drawing(tmp_path: Path) -> None:
    hostile = "reward/<script>alert(1)</script>"
    drawn = record(tmp_path, [{hostile: 1.0}] * 2).chart(hostile)._repr_mimebundle_()["image/svg+xml"]
    assert "<script" not in drawn
    assert "&lt;script&gt;alert(1)" in drawn


@each("names, message", [
    (("reward/men",), r"^unknown metric 'reward/men'; did you mean 'reward/mean'\? Choices: eval/accuracy, "
                      r"reward/errors, reward/mean, signal/groups\.$"),
    (("reward/mean", "kl/mean"), r"^unknown metric 'kl/mean'"),
    (("reward/mean", "grad/norm"), r"^this run has no numbers of 'grad/norm'; choose another metric; this run has: "
                                   r"eval/accuracy, reward/errors, reward/mean, "),
    (("reward/first_error",), "^this run has no numbers of 'reward/first_error'"),  # it is text
    ((), "^chart needs the name of at least one metric, such as reward/mean; this run has: eval/accuracy, "),
])
def test_a_metric_that_the_run_lacks_is_told_with_those_that_it_has(names: tuple[str, ...], message: str,
                                                                    tmp_path: Path) -> None:
    with pytest.raises(CreditscopeError, match=message):
        record(tmp_path).chart(*names)


def test_without_altair_the_error_has_the_command_that_installs_it(tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(CreditscopeError, match=r"pip install 'creditscope\[plot\]'"):
        record(tmp_path).chart("reward/mean")
