"""The section on the optimiser: its numbers are those of `creditscope inspect`, and what was not read is said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from creditscope.diagnosis.optimizer_numbers import read
from creditscope.report import optimizer
from creditscope.report.directions import size
from creditscope.report.optimizer import BY_UPDATE, FACTS, by_update, interval_of, mean_over, section
from creditscope.report.run import Run, read_run
from creditscope.report.section import Section
from creditscope.runs.record import Record
from records import write_record
from report import records

Line = dict[str, float]


def recorded(path: Path, lines: list[Line], probes: Mapping[int, Mapping[str, NDArray[Any]]] | None = None,
             **config: Any) -> Run:
    given = [{"rollouts/spent": 8, **line} for line in lines]
    return read_run(write_record(path, given, {"optimizer": "adamw", **config}, probes=probes))


def probe(**other: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Two layers under a tenth of, the same, and ten times the credit."""
    return {"phi": np.array([0.1, 1.0, 10.0]), "change": np.array([0.02, 0.0, 0.01]),
            "cosine": np.array([0.9997, 1.0, 0.9998]), "since": np.array("start"), "layer_names": np.array(["a", "b"]),
            "layer_change": np.array([[0.01, 0.0, np.nan], [0.04, 0.0, 0.3]]),
            "layer_cosine": np.array([[0.999, 1.0, 0.99], [0.9, 1.0, 0.8]]), "layer_ratio": np.array([1e-3, 2e-3]),
            **other}


def shown(found: Section) -> Mapping[str, Any]:
    assert found.data is not None
    return found.data


# -- by hand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "said"), [
    ([0.01, 0.03], "2 %</strong> (mean of 2 steps), less than 5 %"),
    ([0.9], "90 %</strong> (mean of 1 step), more than 50 %"),
    ([0.2], "20 %</strong> (mean of 1 step), between 5 % and 50 %")])
def test_what_the_optimiser_does_not_see_is_one_sentence_with_its_number(
        tmp_path: Path, change: list[float], said: str) -> None:
    run = recorded(tmp_path / "run", [{"optimizer/scale_change": value} for value in change])
    assert said in section(run).body


def test_where_clipping_hides_the_past_the_sentence_is_about_the_step_itself(tmp_path: Path) -> None:
    body = section(recorded(tmp_path / "run", [{"optimizer/scale_change_now": 0.4}])).body
    assert "from the step itself on, would have changed the update of adamw by <strong>40 %" in body


def test_the_sentence_ends_with_the_cosine_at_ten_times_the_credit(tmp_path: Path) -> None:
    lines: list[Line] = [{"optimizer/scale_change": 0.02}]
    body = section(recorded(tmp_path / "ten", lines, {0: probe()})).body
    assert "At × 10 the two updates have cosine 0.9998 (step 0)" in body
    unknown = probe(cosine=np.array([0.9997, 1.0, np.nan]))
    body = section(recorded(tmp_path / "tenth", lines, {0: unknown})).body
    assert "At × 0.1 the two updates have cosine 0.9997 (step 0)" in body


def test_a_sweep_has_the_layers_least_and_most_change_and_the_layer_that_changes_most_first(tmp_path: Path) -> None:
    (found,) = shown(section(recorded(tmp_path / "run", [{}], {0: probe()})))["sweeps"]
    assert found["phi"] == [0.1, 1, 10]
    assert found["change"] == [0.02, 0, 0.01]
    assert found["cosine"] == [0.9997, 1, 0.9998]
    assert (found["low"], found["high"]) == ([0.01, 0, 0.3], [0.04, 0, 0.3])  # at ten one layer is not a number
    assert found["layers"] == [["b", 0.04, 0.9, 0.002], ["a", 0.01, 0.999, 0.001]]


def test_a_table_row_is_the_mean_and_its_interval_over_steps(tmp_path: Path) -> None:
    # 0.1, 0.2, 0.3: mean 0.2, s = 0.1, 4.3027·0.1/√3 = 0.2484: [−4.84 %, 44.8 %].
    run = recorded(tmp_path / "run", [{"overshoot/1/past": value} for value in (0.1, 0.2, 0.3)])
    assert interval_of(by_update(run)[1]["past"], percent=True) == "20 % [-4.84, 44.8]"
    assert "20 % [-4.84, 44.8]" in section(run).body


def test_a_run_that_was_only_looked_at_in_the_end_has_one_row(tmp_path: Path) -> None:
    found = section(recorded(tmp_path / "run", [{"overshoot/past": 0.25}]))
    assert "<td>last</td>" in found.body
    assert [chart["name"] for chart in shown(found)["charts"]] == ["past"]
    assert shown(found)["charts"][0]["rows"] == [{"step": 0, "at the last sight": 0.25}]


@pytest.mark.parametrize(("brake", "said"), [
    ("shorten,share=0.02", "share = 0.02"), ("recall", "cancels its share"), ("vapour", "does not know")])
def test_the_brake_is_told_with_its_options(tmp_path: Path, brake: str, said: str) -> None:
    assert said in section(recorded(tmp_path / "run", [{"overshoot/past": 0.25}], brake=brake)).body


@pytest.mark.parametrize("brake", ["none", None, 3])
def test_a_run_without_a_brake_says_nothing_of_it(tmp_path: Path, brake: object) -> None:
    assert "rake" not in section(recorded(tmp_path / "run", [{"overshoot/past": 0.25}], brake=brake)).body


# -- identities --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_means_are_those_of_the_verb(rich_run: Path) -> None:
    run, found = read_run(rich_run), read(rich_run)
    assert by_update(run) == {k: {name: row[name] for name in row if name in {m.key for m in BY_UPDATE}}
                              for k, row in found.by_update.items()}
    for metric in FACTS:
        area, name = metric.split("/")
        theirs = {"overshoot": found.overshoot, "update": found.update}.get(area, {}).get(name)
        if theirs is not None:
            assert mean_over(run, metric) == theirs
    assert mean_over(run, "optimizer/scale_change") == found.scale_change
    assert found.by_update
    assert found.update


@pytest.mark.slow
def test_the_sweep_is_that_of_the_verb(rich_run: Path) -> None:
    run = read_run(rich_run)
    sweeps = shown(section(run))["sweeps"]
    assert [one["step"] for one in sweeps] == run.record.optimizer_readings()
    theirs = read(rich_run).sweep
    assert theirs is not None
    mine = sweeps[-1]
    for name in ("phi", "change", "cosine"):
        for value, expected in zip(mine[name], getattr(theirs, name), strict=True):
            assert value == (None if expected is None else pytest.approx(expected, rel=5.1e-4))
    most = max((values["change"][theirs.phi.index(0.1)], name) for name, values in theirs.layers.items())
    assert mine["layers"][0][0] == most[1]


@pytest.mark.slow
def test_charts_hold_the_steps_of_the_record(rich_run: Path) -> None:
    run = read_run(rich_run)
    charts = {chart["name"]: chart for chart in shown(section(run))["charts"]}
    assert set(charts) == {"past", "distance", "carry", "scale", "update", "stay"}
    rows = [(row["step"], row["cosine with −gradient"]) for row in charts["update"]["rows"]]
    assert rows == [(step, pytest.approx(value, rel=5.1e-4)) for step, value in run.series("update/cosine")]


# -- what is not there -------------------------------------------------------------------------------------------------


def test_a_run_without_a_probe_says_so_and_how_to_get_one(tmp_path: Path) -> None:
    found = section(read_run(records.bare(tmp_path / "run")))
    assert found.data is None
    assert "--probe light" in found.body


def test_a_light_probe_says_what_the_full_one_would_add(tmp_path: Path) -> None:
    found = section(recorded(tmp_path / "run", [{"overshoot/1/past": 0.1}]))
    assert "--probe full" in found.body
    assert shown(found)["sweep"] is None


@pytest.mark.parametrize("damage", [
    {"phi": np.ones((2, 2))}, {"cosine": np.ones(2)}, {"change": np.array("text")}, {"layer_change": np.ones(3)}])
def test_a_damaged_sweep_is_left_out_and_named(tmp_path: Path, damage: dict[str, NDArray[Any]]) -> None:
    run = recorded(tmp_path / "run", [{"overshoot/past": 0.1}] * 2, {0: probe(), 1: probe(**damage)})
    assert [one["step"] for one in shown(section(run))["sweeps"]] == [0]
    assert any("optimiser of step 1" in fault for fault in run.faults)


def test_a_probe_of_which_nothing_can_be_read_is_not_called_off(tmp_path: Path) -> None:
    found = section(recorded(tmp_path / "run", [{}], {0: {"phi": np.array("text")}}))
    assert found.data is None
    assert "cannot be used" in found.body


def test_scales_that_no_logarithm_has_are_left_out(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", [{}], {0: probe(phi=np.array([0.0, 1.0, np.inf]))})
    assert shown(section(run))["sweeps"][0]["phi"] == [1]


def test_a_metric_that_is_text_is_no_number(tmp_path: Path) -> None:
    with Record.create(tmp_path / "run", {}, {}) as record:
        record.append(0, {"overshoot/past": "much", "overshoot/1/past": "more", "update/cosine": 0.5})
    found = section(read_run(tmp_path / "run"))
    assert [chart["name"] for chart in shown(found)["charts"]] == ["update"]


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.deep
def test_a_long_run_stays_within_its_bytes(long_run: Path) -> None:
    data = shown(section(read_run(long_run)))
    assert size(data) <= 250_000
    assert all(len(chart["rows"]) <= optimizer.POINTS for chart in data["charts"])


@pytest.mark.slow
def test_hostile_names_are_text_in_which_nothing_is_hidden(tmp_path: Path) -> None:
    found = section(read_run(records.hostile(tmp_path / "run")))
    names = [row[0] for one in shown(found)["sweeps"] for row in one["layers"]]
    assert any("script" in name for name in names)
    assert "<script" not in found.body
    assert not any(c in name for name in names for c in "\x00\x1b\u202e\ud800")
