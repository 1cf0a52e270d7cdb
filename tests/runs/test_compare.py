"""The comparison: numbers derived by hand from small records, runs that are used again, and runs that fail."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mini
from cli import run
from creditscope import CreditscopeError
from creditscope.claims.evidence import read_evidence, to_json
from creditscope.cli.compare import Compare, folder
from creditscope.cli.processes import Job, run_jobs
from creditscope.cli.sweep import arguments
from creditscope.runs import figures
from creditscope.runs.compare import Comparison, area, at, compare, read_folder
from creditscope.runs.intervals import T975, Interval, mean_interval, overlap, paired, quantile
from creditscope.runs.kinds import KINDS, relative_change, verdicts
from creditscope.runs.record import Record
from jobs import run_here
from makers import edit_config
from records import write_record

BUDGET = 128


def settings(credit: str, seed: int, **changes: Any) -> dict[str, Any]:
    """The settings that `compare` gives a run, as the trainer writes them."""
    verb = Compare("credit", rollouts=BUDGET, group=4, prompts=4, eval_problems=20, points=2)
    return asdict(verb.config(credit, seed)) | {"log": []} | changes


def write_run(out: Path, credit: str, seed: int, accuracy: Sequence[float], *, continuations: int = 0,
              finished: bool = True, **changes: Any) -> None:
    """A run of steps of 64 rollouts and some continuations, evaluated before each step and after the last."""
    lines: list[dict[str, Any]] = [
        {"eval/accuracy": value, "rollouts/sampled": 64, "rollouts/spent": 64 + continuations, "time/step": 4.0,
         "time/eval": 1.0, "time/scope": 0.5, "credit/within": 0.25 * step, "credit/dead_groups": 0.5,
         "signal/dead_groups": 0.75} for step, value in enumerate(accuracy[:-1])]
    lines[0]["gram/group/effective_rank"] = 3.0
    lines += [{"eval/accuracy": accuracy[-1]}] if finished else []
    write_record(out / folder(credit) / f"seed-{seed}", lines, settings(credit, seed, **changes))


def compared(out: Path, what: str = "credit") -> Comparison:
    return compare(read_folder(out, KINDS[what])[0], KINDS[what])


# -- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [*range(1, 31), 31, 60])
def test_two_and_a_half_percent_of_students_t_lie_above_the_quantile(degrees: int) -> None:
    # t = √ν tan φ turns the density c (1 + t²/ν)^(−(ν+1)/2) dt into c √ν cos^(ν−1) φ dφ, which is smooth up to π/2.
    c = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    phi = np.linspace(math.atan(quantile(degrees) / math.sqrt(degrees)), math.pi / 2, 200_001)
    density = c * np.cos(phi) ** (degrees - 1)
    above = ((density[1:] + density[:-1]) / 2 * np.diff(phi)).sum()
    # Four decimals of t are worth at most 5e-5 times the density there, which is below 0.07.
    assert above == pytest.approx(0.025, abs=6e-6)


def test_there_is_a_quantile_for_every_number_of_degrees_up_to_thirty() -> None:
    assert len(T975) == 30
    assert all(a > b for a, b in pairwise(T975))
    assert T975[-1] > quantile(31) > quantile(1000) > 1.96


def test_the_interval_of_three_numbers_is_the_mean_and_t_s_over_root_three() -> None:
    # mean 0.6; s² = (0.01 + 0 + 0.01)/2 = 0.01; half = 4.3027 · 0.1/√3 = 0.24842
    found = mean_interval([0.5, 0.6, 0.7])
    assert found.mean == pytest.approx(0.6)
    assert (found.low, found.high, found.n) == (pytest.approx(0.35158, abs=1e-5), pytest.approx(0.84842, abs=1e-5), 3)


def test_one_number_has_no_interval_and_meets_nothing() -> None:
    one = mean_interval([0.5])
    assert one == Interval(0.5, None, None, 1)
    assert overlap(one, mean_interval([0.4, 0.6])) is None


def test_a_paired_difference_does_not_see_what_the_seed_did_to_both() -> None:
    # The seeds differ by 0.3, the pairs by 0.02 and 0.04 alone: mean 0.03, s = 0.02/√2, half = 12.7062·s/√2 = 0.127062
    found = paired({0: 0.52, 1: 0.84, 7: 0.1}, {0: 0.5, 1: 0.8, 8: 0.9})
    assert found is not None
    assert (found.mean, found.n) == (pytest.approx(0.03), 2)
    assert found.high == pytest.approx(0.03 + 0.127062, abs=1e-6)
    assert paired({0: 0.5}, {1: 0.5}) is None


def test_accuracy_between_two_evaluations_lies_on_the_straight_line() -> None:
    points = [(0, 0.5), (96, 0.8), (192, 0.5)]
    assert at(points, [0, 32, 96, 128]) == pytest.approx([0.5, 0.6, 0.8, 0.7])


def test_accuracy_beyond_the_last_evaluation_is_refused() -> None:
    with pytest.raises(CreditscopeError, match="cover 0 to 96 rollouts, not 128; the run did not spend its budget"):
        at([(0, 0.5), (96, 0.8)], [128])


def test_the_mean_along_the_way_stops_at_the_budget() -> None:
    # 0 .. 96 at 0.65 on average, 96 .. 128 at (0.8 + 0.7)/2: (96·0.65 + 32·0.75)/128
    assert area([(0, 0.5), (96, 0.8), (192, 0.5)], 128) == pytest.approx(0.675)


def test_a_record_becomes_its_numbers(tmp_path: Path) -> None:
    write_run(tmp_path, "monte_carlo", 3, [0.5, 0.6, 0.8], continuations=32)
    (found,), unfinished = read_folder(tmp_path, KINDS["credit"])
    assert unfinished == []
    assert (found.name, found.seed, found.steps, found.spent, found.sampled) == ("monte_carlo", 3, 2, 192, 128)
    assert found.points == ((0, 0.5), (96, 0.6), (192, 0.8))  # an evaluation stands before the rollouts of its line
    assert found.seconds == 2 * (4.0 - 1.0 - 0.5)
    assert found.readings == {"effective_rank": 3.0, "within": 0.125, "dead_credit": 0.5, "dead_signal": 0.75}
    (line,) = compare([found], KINDS["credit"]).lines
    assert line.accuracy.mean == pytest.approx(0.6 + 0.2 * 32 / 96)
    assert line.continuations == pytest.approx(1 / 3)
    assert line.seconds_per_rollout == pytest.approx(5 / 192)


def test_a_reading_that_a_run_does_not_have_is_absent(tmp_path: Path) -> None:
    with Record.create(tmp_path / "outcome" / "seed-0", settings("outcome", 0), {}) as record:
        record.append(0, {"eval/accuracy": 0.5, "rollouts/sampled": 128, "rollouts/spent": 128, "time/step": 1.0})
        record.append(1, {"eval/accuracy": 0.5})
    line = compared(tmp_path).lines[0]
    assert (line.numbers["effective_rank"], line.numbers["within"]) == (None, None)
    assert (line.difference, line.accuracy.low) == (None, None)


# -- verdicts --------------------------------------------------------------------------------------------------------


def seeds_of(out: Path, **ends: Sequence[float]) -> Comparison:
    """A comparison of estimators whose runs end at these accuracies, seed by seed."""
    for credit, values in ends.items():
        for seed, value in enumerate(values):
            write_run(out, credit, seed, [0.4, 0.5, value])
    return compared(out)


def test_an_estimator_whose_interval_lies_above_beats_outcome(tmp_path: Path) -> None:
    found = seeds_of(tmp_path, outcome=[0.62, 0.63, 0.64], step_reward=[0.70, 0.71, 0.72], gae=[0.52, 0.53, 0.54])
    # half of each interval: 4.3027 · 0.01/√3 = 0.0248
    assert (found.lines[1].difference, found.lines[1].overlaps) == (None, None)
    assert [line.name for line in found.lines] == ["step_reward", "outcome", "gae"]
    assert verdicts(found) == [
        f"{start}: {numbers} against 63.0 % [60.5, 65.5]; intervals do not overlap" for start, numbers in (
            ("step_reward beats outcome at 128 rollouts", "71.0 % [68.5, 73.5]"),
            ("gae is below outcome at 128 rollouts", "53.0 % [50.5, 55.5]"))]


def test_overlapping_intervals_are_no_win(tmp_path: Path) -> None:
    found = seeds_of(tmp_path, outcome=[0.60, 0.63, 0.66], salt=[0.62, 0.70, 0.63])
    assert verdicts(found) == ["no estimator's interval lies above outcome's at 128 rollouts: the best of the others "
                               "is salt, 65.0 % [54.2, 75.8] against 63.0 % [55.5, 70.5]"]
    assert found.lines[0].overlaps is True


def test_a_gain_on_every_seed_is_told_beside_overlapping_intervals(tmp_path: Path) -> None:
    found = seeds_of(tmp_path, outcome=[0.50, 0.60, 0.70], salt=[0.52, 0.62, 0.72])
    assert verdicts(found)[1] == ("salt: the intervals of the means overlap, but paired by seed it is above outcome by "
                                  "+2.0 [+2.0, +2.0] points")


@pytest.mark.parametrize(("ends", "message"), [
    ({"outcome": [0.5], "gae": [0.9]}, "undecided: 1 seed of an estimator cannot tell luck"),
    ({"outcome": [0.5, 0.5], "gae": [0.55, 0.55]}, "undecided: 2 seeds of an estimator cannot tell luck"),
    ({"gae": [0.5, 0.6]}, "outcome was not run"),
    ({"outcome": [0.5, 0.6]}, "name another estimator"),
])
def test_what_cannot_be_decided_is_not(ends: dict[str, list[float]], message: str, tmp_path: Path) -> None:
    assert message in verdicts(seeds_of(tmp_path, **ends))[0]


def test_runs_with_other_settings_are_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path, "outcome", 0, [0.5, 0.5, 0.5])
    write_run(tmp_path, "gae", 0, [0.5, 0.5, 0.5], lr=0.5)
    with pytest.raises(CreditscopeError, match=r"cannot be compared: lr is 0\.0001, not 0\.5"):
        compared(tmp_path)


def test_a_run_without_a_budget_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "outcome", 0, [0.5, 0.5, 0.5], rollouts=0)
    with pytest.raises(CreditscopeError, match="had no budget"):
        compared(tmp_path)


# -- the verb --------------------------------------------------------------------------------------------------------

SMALL = ("--rollouts", str(BUDGET), "--group", "4", "--prompts", "4", "--eval-problems", "20", "--points", "2")


def no_child(*_: object) -> None:
    raise AssertionError("a run was started")


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is drawn: runs that are trained, below, have their figure."""
    monkeypatch.setattr("creditscope.cli.sweep.run_jobs", no_child)
    monkeypatch.setattr("creditscope.cli.compare.can_draw", lambda: False)


@pytest.mark.usefixtures("nothing_runs")
def test_finished_runs_are_used_again_and_nothing_is_trained(tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    seeds_of(tmp_path, outcome=[0.62, 0.64], step_reward=[0.70, 0.72])
    assert run("lab", "compare", "credit", "outcome", "step_reward", "--seeds", "2", "--out", tmp_path, *SMALL) == 0
    out = capsys.readouterr().out
    assert "step_reward" in out
    assert f"wrote {tmp_path}: table.md, table.json" in out
    page = (tmp_path / "table.md").read_text()
    assert "| step_reward | 2 | 71.0 % [58.3, 83.7] | +8.0 [+8.0, +8.0] | yes |" in page
    data = json.loads((tmp_path / "table.json").read_text())
    assert data["lines"][0]["accuracy"]["mean"] == pytest.approx(0.71)
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.usefixtures("nothing_runs")
def test_the_command_in_the_page_makes_the_page(tmp_path: Path) -> None:
    seeds_of(tmp_path, outcome=[0.62, 0.64], step_reward=[0.70, 0.72])
    assert run("lab", "compare", "credit", "--no-run", "--out", str(tmp_path), "--json") == 0
    page = (tmp_path / "table.md").read_text()
    words = json.loads((tmp_path / "table.json").read_text())["command"].split()
    assert words[:4] == ["creditscope", "lab", "compare", "credit"]
    assert run(*words[1:], "--out", str(tmp_path), "--json") == 0
    assert (tmp_path / "table.md").read_text() == page


@pytest.mark.usefixtures("nothing_runs")
def test_a_run_with_other_settings_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "outcome", 0, [0.5, 0.5, 0.5], lr=0.5)
    assert run("lab", "compare", "credit", "outcome", "--seeds", "1", "--out", str(tmp_path), *SMALL) == 2
    assert "seed-0 holds a run with other settings: its lr is 0.5, not 0.0001; give the same" in capsys.readouterr().err


def test_an_unfinished_run_goes_on_and_a_new_one_begins(tmp_path: Path) -> None:
    write_run(tmp_path, "outcome", 0, [0.5, 0.5, 0.5], finished=False)
    verb = Compare("credit", ("outcome",), seeds=2, out=tmp_path)
    old, new = (arguments(config, tmp_path / name) for name, config in verb._asked().items())
    assert "--resume" in old
    assert "--resume" not in new
    assert new[:3] == ("lab", "train", "tiny")
    assert {"--rollouts", "3840", "--eval-rollouts", "960", "--credit", "outcome"} <= set(new)


@pytest.mark.usefixtures("nothing_runs")
def test_the_evidence_of_runs_gives_the_table_that_the_runs_gave(tmp_path: Path) -> None:
    for credit, accuracies in (("outcome", (0.3, 0.4, 0.5)), ("step_reward", (0.3, 0.5, 0.75))):
        for seed in range(3):
            write_run(tmp_path / "runs", credit, seed, [x + 0.01 * seed for x in accuracies])
    (tmp_path / "kept").mkdir()
    for number, found in enumerate(sorted((tmp_path / "runs").glob("*/*/run.json"))):
        text = to_json(read_evidence(Record.open(found.parent)))
        (tmp_path / "kept" / f"{number}.evidence.json").write_text(text)
    tables = []
    for out in ("runs", "kept"):
        assert run("lab", "compare", "credit", "--no-run", "--out", str(tmp_path / out), "--json") == 0
        tables.append((tmp_path / out / "table.md").read_text())
    assert tables[0] == tables[1]
    assert "75.0" not in tables[0], "the mean over seeds is 76.0"
    assert "76.0 %" in tables[0]


@pytest.mark.slow
def test_no_run_leaves_out_what_is_not_finished_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeds_of(tmp_path, outcome=[0.62, 0.64], step_reward=[0.70, 0.72])
    write_run(tmp_path, "gae", 0, [0.5, 0.5, 0.5], finished=False)
    assert run("lab", "compare", "credit", "--no-run", "--out", str(tmp_path), "--json") == 0
    said = capsys.readouterr()
    assert [line["credit"] for line in json.loads(said.out)["lines"]] == ["step_reward", "outcome"]
    assert "left out: 1 runs that are not finished" in said.err


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("args", "message"), [
    (("outcom",), "unknown credit 'outcom'; did you mean 'outcome'?"),
    (("monte_carlo,sample=2",), "unknown option of credit 'monte_carlo': 'sample'; did you mean 'samples'?"),
    (("monte_carlo,samples=two",), "samples of credit 'monte_carlo' must be a whole number in 1 .. 4096, got 'two'"),
    (("outcome", "outcome"), "credit 'outcome' is named twice"),
    (("state_return",), "credit 'state_return' needs a task that names the state"),
    (("outcome", "--seeds", "0"), "--seeds must be at least 1, got 0"),
    (("outcome", "--jobs", "0"), "--jobs must be at least 1, got 0"),
    (("outcome", "--eval-problems", "0"), "--eval-problems must be at least 1, got 0"),
    (("outcome", "--rollouts", "60"), "--rollouts 60 is less than one step spends: --prompts 8 × --group 8 = 64"),
    (("outcome", "--points", "9000"), "--points 9000 is more than --rollouts 3840"),
    (("outcome", "--group", "1"), "a group of one has advantage 0"),
    (("outcome", "--method", "grop"), "unknown method 'grop'; did you mean 'grpo'?"),
    (("outcome", "--lr", "0"), "--lr must be above 0"),
    (("outcome", "--task", "gsm8k:nowhere.jsonl"), "nowhere.jsonl"),
    (("outcome", "--model", "nowhere"), "no model 'nowhere'"),
    (("--no-run",), "holds no finished run"),
])
def test_bad_input_is_one_sentence_before_any_run_starts(args: tuple[str, ...], message: str, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    assert run("lab", "compare", "credit", *args, "--out", str(tmp_path / "new")) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "new").exists()


def test_without_the_plot_extra_the_table_is_written_and_the_repair_is_named(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("creditscope.cli.compare.can_draw", lambda: False)
    seeds_of(tmp_path, outcome=[0.62, 0.64], step_reward=[0.70, 0.72])
    assert run("lab", "compare", "credit", "--no-run", "--out", str(tmp_path)) == 0
    assert "pip install 'creditscope[plot]'" in capsys.readouterr().out
    assert "figure.svg" not in (tmp_path / "table.md").read_text()
    assert not (tmp_path / "figure.svg").exists()


def test_a_missing_library_is_named_with_its_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(CreditscopeError, match=r"pip install 'creditscope\[plot\]'"):
        figures.accuracy_svg(seeds_of(tmp_path, outcome=[0.5, 0.6]))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 3])
def test_the_figure_names_every_estimator_and_needs_no_network(seeds: int, tmp_path: Path) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    svg = figures.accuracy_svg(seeds_of(tmp_path, outcome=[0.62, 0.64, 0.6][:seeds], salt=[0.70, 0.72, 0.7][:seeds]))
    assert svg.startswith("<svg")
    assert svg.count(">salt<") == 2  # beside its line, and on the axis of the second panel
    assert "http" not in svg.replace("http://www.w3.org/", "")


# -- brakes ----------------------------------------------------------------------------------------------------------

Step = dict[str, float]
STILL: Step = {"overshoot/past": 0.0, "optimizer/overshoot": 0.0, "overshoot/kl": 0.001, "optimizer/updates": 4}
"""A batch after which no token is past its bound: distance and after do not exist."""


def passed(past: float, distance: float) -> Step:
    """A batch after which so many tokens are past their bound, so far on average."""
    return STILL | {"overshoot/past": past, "overshoot/distance": distance, "optimizer/overshoot": past * distance,
                    "overshoot/after": 0.5}


def brake_settings(brake: str, seed: int, **changes: Any) -> dict[str, Any]:
    verb = Compare("brake", rollouts=BUDGET, group=4, prompts=4, eval_problems=20, points=2)
    return asdict(verb.config(brake, seed)) | {"log": []} | changes


def write_brake(out: Path, brake: str, seed: int, end: float, steps: Sequence[Step], **changes: Any) -> None:
    """A run that spends the budget in equal steps with these metrics, and ends at an accuracy of `end`."""
    with Record.create(out / folder(brake) / f"seed-{seed}", brake_settings(brake, seed, **changes), {}) as record:
        for step, metrics in enumerate(steps):
            spent = BUDGET // len(steps)
            record.append(step, {"eval/accuracy": 0.4, "rollouts/sampled": spent, "rollouts/spent": spent,
                                 "time/step": 6.0, "time/train": 4.0, "time/probe": 0.5} | metrics)
        record.append(len(steps), {"eval/accuracy": end})


def brakes_of(out: Path, **runs: Sequence[tuple[float, Step]]) -> Comparison:
    """A comparison of brakes whose runs, seed by seed, end at an accuracy and have the same batch all along."""
    for brake, seeds in runs.items():
        for seed, (end, metrics) in enumerate(seeds):
            write_brake(out, brake, seed, end, [metrics, metrics])
    return compared(out, "brake")


def same(*ends: float, batch: Step) -> list[tuple[float, Step]]:
    """Seeds that end at these accuracies, all with that batch."""
    return [(end, batch) for end in ends]


NONE = same(0.62, 0.63, 0.64, batch=passed(0.5, 0.25))


def test_the_relative_change_is_the_mean_ratio_of_the_pairs_less_one() -> None:
    # ratios 0.5 and 0.75: mean 0.625, s = 0.25/√2, half = 12.7062·s/√2 = 12.7062·0.125
    found = relative_change({0: 0.25, 1: 0.75, 7: 9.0}, {0: 0.5, 1: 1.0, 8: 9.0})
    assert found is not None
    assert (found.mean, found.n) == (pytest.approx(-0.375, abs=1e-12), 2)
    assert found.high == pytest.approx(-0.375 + 12.7062 * 0.125, abs=1e-12)
    assert found.low == pytest.approx(-0.375 - 12.7062 * 0.125, abs=1e-12)


def test_there_is_no_relative_change_to_nothing() -> None:
    assert relative_change({0: 0.25, 1: 0.0}, {0: 0.0, 1: 0.5}) == Interval(-1.0, None, None, 1)
    assert relative_change({0: 0.25}, {0: 0.0}) is None
    assert relative_change({0: 0.25}, {1: 0.25}) is None


def test_the_record_of_a_brake_becomes_its_numbers(tmp_path: Path) -> None:
    write_brake(tmp_path, "recall", 3, 0.6, [passed(0.25, 0.5), STILL | {"optimizer/updates": 2}])
    (found,), _ = read_folder(tmp_path, KINDS["brake"])
    assert (found.name, found.seed, found.end) == ("recall", 3, 0.6)
    # means over the two steps; distance and after over the one that has a token past
    assert found.readings == {"past": 0.125, "distance": 0.5, "overshoot": 0.0625, "after": 0.5, "kl": 0.001,
                              "updates": 3.0, "train": 4.0}
    assert found.seconds == 2 * (6.0 - 0.5)  # the probe's own passes are no cost of the brake


def test_a_run_that_is_older_than_brakes_had_none(tmp_path: Path) -> None:
    write_brake(tmp_path, "none", 0, 0.5, [STILL])
    edit_config(next(tmp_path.glob("*/seed-0")), without=["brake"])
    assert [line.name for line in compared(tmp_path, "brake").lines] == ["none"]


def test_a_brake_is_set_beside_none_seed_by_seed(tmp_path: Path) -> None:
    found = brakes_of(tmp_path, none=[(0.5, passed(0.5, 0.25)), (0.5, passed(0.25, 0.5)), (0.5, passed(0.5, 1.0))],
                      recall=[(0.60, passed(0.25, 0.125)), (0.62, passed(0.25, 0.125)), (0.70, passed(0.25, 0.25))])
    line, base = found.lines
    assert (line.name, base.name) == ("recall", "none")
    # distance: ratios 0.5, 0.25, 0.25; s² = (4 + 1 + 1)/144/2 = 1/48; half = 4.3027·√(1/48)/√3 = 4.3027/12
    assert line.numbers["distance_change"].mean == pytest.approx(-2 / 3, abs=1e-12)
    assert line.numbers["distance_change"].high == pytest.approx(-2 / 3 + 4.3027 / 12, abs=1e-12)
    # overshoot: 0.03125/0.125, 0.03125/0.125, 0.0625/0.5 = 0.25, 0.25, 0.125
    assert line.numbers["overshoot_change"].mean == pytest.approx(0.625 / 3 - 1, abs=1e-12)
    assert line.numbers["past"] == Interval(0.25, 0.25, 0.25, 3)
    assert line.seconds_per_rollout == pytest.approx(3 * 2 * 5.5 / (3 * 128), abs=1e-12)
    assert (base.numbers["distance_change"], base.numbers["overshoot_change"], base.difference) == (None, None, None)


@pytest.mark.parametrize(("ends", "square", "worst"), [
    ((0.60, 0.62, 0.70), 0.0028, 0.60),  # mean 0.64: (0.0016 + 0.0004 + 0.0036)/2
    ((0.7, 0.5), 0.02, 0.5),  # mean 0.6: (0.01 + 0.01)/1
    ((0.5, 0.5, 0.5, 0.9), 0.04, 0.5),  # mean 0.6: (3·0.01 + 0.09)/3
])
def test_the_spread_is_the_std_over_seeds_and_the_worst_is_the_lowest(
        ends: Sequence[float], square: float, worst: float, tmp_path: Path) -> None:
    numbers = brakes_of(tmp_path, none=same(*ends, batch=STILL)).lines[0].numbers
    assert numbers["spread"] == pytest.approx(math.sqrt(square), abs=1e-12)
    assert numbers["worst"] == worst


def test_one_seed_has_no_spread(tmp_path: Path) -> None:
    line = brakes_of(tmp_path, none=[(0.5, STILL)]).lines[0]
    assert (line.numbers["spread"], line.numbers["worst"], line.numbers["distance"]) == (None, 0.5, None)


def test_a_brake_that_halves_is_said_to_with_what_it_does_to_accuracy(tmp_path: Path) -> None:
    found = brakes_of(tmp_path, none=NONE, recall=same(0.63, 0.62, 0.64, batch=passed(0.25, 0.0625)),
                      shorten=same(0.59, 0.60, 0.61, batch=passed(0.125, 0.25)),
                      restart=same(0.64, 0.65, 0.66, batch=passed(0.25, 0.0625)))
    # recall less none: 0.01, −0.01, 0: half = 4.3027·0.01/√3 = 0.0248
    assert verdicts(found) == [
        "restart cuts the distance and the overshoot past the bound at least by half: distance -75 % [-75, -75], "
        "overshoot -88 % [-88, -88]; accuracy gained: +2.0 [+2.0, +2.0] points",
        "recall cuts the distance and the overshoot past the bound at least by half: distance -75 % [-75, -75], "
        "overshoot -88 % [-88, -88]; accuracy within intervals: +0.0 [-2.5, +2.5] points",
        "shorten cuts the overshoot past the bound at least by half: distance +0 % [+0, +0], overshoot -75 % "
        "[-75, -75]; accuracy lost: -3.0 [-3.0, -3.0] points"]


@pytest.mark.parametrize(("ratios", "said", "halves"), [
    # half of each interval: 4.3027·0.1/√3 = 0.248
    ((0.1, 0.2, 0.3), "-80 % [-105, -55]", True),
    ((0.2, 0.3, 0.4), "-70 % [-95, -45]", False),
    ((0.25, 0.35, 0.45), "-65 % [-90, -40]", False),
    ((0.3, 0.4, 0.5), "-60 % [-85, -35]", False),
    ((0.5, 0.6, 0.7), "-40 % [-65, -15]", False),
    ((0.5, 0.5, 0.5), "-50 % [-50, -50]", False),
])
def test_a_brake_halves_only_where_its_whole_interval_lies_below_half(ratios: Sequence[float], said: str, halves: bool,
                                                                      tmp_path: Path) -> None:
    found = brakes_of(tmp_path, none=NONE, recall=[(0.62 + 0.01 * i, passed(0.5, 0.25 * ratio))
                                                   for i, ratio in enumerate(ratios)])
    assert verdicts(found) == ([
        f"recall cuts the distance and the overshoot past the bound at least by half: distance {said}, overshoot "
        f"{said}; accuracy within intervals: +0.0 [+0.0, +0.0] points"] if halves else [
        f"no brake is known to cut the {measure} past the bound by half: nearest comes recall, {said}"
        for measure in ("distance", "overshoot")])


@pytest.mark.parametrize(("ends", "accuracy"), [
    ((0.52, 0.53, 0.54), "lost at 128 rollouts: 53.0 % [50.5, 55.5] against 63.0 % [60.5, 65.5], paired by seed -10.0 "
                         "[-10.0, -10.0] points"),
    # The intervals of the means overlap; the pairs differ by 0.01 all.
    ((0.61, 0.62, 0.63), "lost at 128 rollouts: 62.0 % [59.5, 64.5] against 63.0 % [60.5, 65.5], paired by seed -1.0 "
                         "[-1.0, -1.0] points"),
    ((0.72, 0.73, 0.74), "gained at 128 rollouts: 73.0 % [70.5, 75.5] against 63.0 % [60.5, 65.5], paired by seed "
                         "+10.0 [+10.0, +10.0] points"),
    # less none: −0.02, 0, 0.01
    ((0.60, 0.63, 0.65), None),
])
def test_accuracy_is_lost_or_gained_where_the_paired_interval_leaves_zero_out(
        ends: Sequence[float], accuracy: str | None, tmp_path: Path) -> None:
    found = brakes_of(tmp_path, none=NONE, kl_stop=same(*ends, batch=passed(0.4, 0.2)))
    said = [f"kl_stop: accuracy {accuracy}"] if accuracy else []
    assert verdicts(found)[:-2] == said


@pytest.mark.parametrize(("recall", "kl_stop", "nearest"), [
    (0.15, 0.2, "recall, -40 % [-40, -40]"), (0.25, 0.2, "kl_stop, -20 % [-20, -20]"),
    (0.3, 0.4, "recall, +20 % [+20, +20]"),
])
def test_the_nearest_of_those_that_do_not_halve_is_named(recall: float, kl_stop: float, nearest: str,
                                                         tmp_path: Path) -> None:
    found = brakes_of(tmp_path, none=NONE, recall=same(0.62, 0.63, 0.64, batch=passed(0.5, recall)),
                      kl_stop=same(0.62, 0.63, 0.64, batch=passed(0.5, kl_stop)))
    assert verdicts(found) == [f"no brake is known to cut the {measure} past the bound by half: nearest comes {nearest}"
                               for measure in ("distance", "overshoot")]


def test_a_brake_that_leaves_nothing_past_the_bound_has_no_distance_and_cuts_all_of_the_overshoot(
        tmp_path: Path) -> None:
    found = brakes_of(tmp_path, none=NONE, shorten=same(0.62, 0.63, 0.64, batch=STILL))
    assert verdicts(found) == ["shorten cuts the overshoot past the bound at least by half: overshoot -100 % [-100, "
                               "-100]; accuracy within intervals: +0.0 [+0.0, +0.0] points"]


NOT_JUDGED = ("overshoot is not judged: in fewer than 3 shared seeds a token of none went past its bound; give more "
              "seeds, or raise --inner-steps or --lr")


@pytest.mark.parametrize(("batch", "message"), [
    ({}, "overshoot was not read in these runs; train with --probe light --probe-every 1"),
    (STILL, NOT_JUDGED),
])
def test_where_there_is_no_overshoot_the_verdict_says_why(batch: Step, message: str, tmp_path: Path) -> None:
    found = brakes_of(tmp_path, none=same(0.6, 0.6, 0.6, batch=batch), recall=same(0.6, 0.6, 0.6, batch=batch))
    assert verdicts(found) == [message]


@pytest.mark.parametrize("seeds", [0, 1, 2])
def test_fewer_than_three_seeds_past_the_bound_do_not_judge_a_brake(seeds: int, tmp_path: Path) -> None:
    none = [*NONE[:seeds], *same(0.62, 0.63, 0.64, batch=STILL)[seeds:]]
    found = brakes_of(tmp_path, none=none, recall=same(0.62, 0.63, 0.64, batch=passed(0.1, 0.01)))
    assert verdicts(found) == [NOT_JUDGED]


@pytest.mark.parametrize(("runs", "message"), [
    ({"none": NONE[:2], "recall": NONE[:2]}, "undecided: 2 seeds of a brake cannot tell luck from what it does; give"),
    ({"recall": NONE}, "none was not run, so nothing is compared with it; name it too"),
    ({"none": NONE}, "none alone: 63.0 % [60.5, 65.5] at 128 rollouts; name another brake to compare it with"),
])
def test_what_cannot_be_said_of_brakes_is_not(runs: dict[str, Any], message: str, tmp_path: Path) -> None:
    (said,) = verdicts(brakes_of(tmp_path, **runs))
    assert said.startswith(message)


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_brakes_that_share_fewer_than_three_seeds_are_not_compared(shared: int, tmp_path: Path) -> None:
    for seed in range(3):
        write_brake(tmp_path, "none", seed, 0.6, [passed(0.5, 0.25)])
        write_brake(tmp_path, "recall", seed + 3 - shared, 0.5, [passed(0.5, 0.01)])
    assert verdicts(compared(tmp_path, "brake")) == ["recall shares fewer than 3 seeds with none, so the two are not "
                                                     "compared", NOT_JUDGED]


def test_a_seed_does_not_count_twice(tmp_path: Path) -> None:
    write_brake(tmp_path, "none", 0, 0.6, [STILL])
    shutil.copytree(tmp_path / "none", tmp_path / "copy")
    with pytest.raises(CreditscopeError, match="are both seed 0 of none, which would count twice; take one of them"):
        compared(tmp_path, "brake")


@pytest.mark.parametrize(("what", "other", "message"), [
    ("brake", {"credit": "salt"}, "credit is 'salt', not None"), ("brake", {"inner_steps": 2}, "inner_steps is 2"),
    ("brake", {"probe_every": 10}, "probe_every is 10"), ("credit", {}, "brake is 'recall', not 'none'"),
])
def test_runs_that_differ_in_more_than_the_brake_are_not_compared(what: str, other: dict[str, Any], message: str,
                                                                  tmp_path: Path) -> None:
    write_brake(tmp_path, "none", 0, 0.6, [STILL])
    write_brake(tmp_path, "recall", 1, 0.6, [STILL], **other)
    with pytest.raises(CreditscopeError, match=f"cannot be compared: {message}"):
        compared(tmp_path, what)


def test_a_run_is_trained_as_its_kind_asks() -> None:
    brake, credit = Compare("brake").config("shorten,share=0.02", 1), Compare("credit").config("salt", 1)
    assert (brake.brake, brake.credit, brake.inner_steps, brake.scope) == ("shorten,share=0.02", None, 4, "off")
    assert (brake.probe, brake.probe_every) == ("light", 1)  # the account of every batch is closed
    assert (credit.brake, credit.credit, credit.inner_steps, credit.scope) == ("none", "salt", 1, "light")
    assert credit.probe == "off"
    assert Compare("credit", inner_steps=2).config("salt", 1).inner_steps == 2
    words = arguments(brake, Path("here"))
    assert words[words.index("--brake") + 1] == "shorten,share=0.02"
    assert {"--inner-steps", "--probe-every"} <= set(words)


@pytest.mark.usefixtures("nothing_runs")
def test_credit_runs_may_have_been_probed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "outcome", 0, [0.5, 0.5, 0.5], probe="light", probe_every=10)
    assert run("lab", "compare", "credit", "outcome", "--seeds", "1", "--out", str(tmp_path), "--json", *SMALL) == 0
    assert json.loads(capsys.readouterr().out)["lines"][0]["credit"] == "outcome"


@pytest.mark.usefixtures("nothing_runs")
def test_the_page_of_brakes_has_its_columns_and_says_mu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    brakes_of(tmp_path, none=NONE, recall=same(0.63, 0.62, 0.64, batch=passed(0.25, 0.0625)))
    assert run("lab", "compare", "brake", "--no-run", "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert f"wrote {tmp_path}: table.md, table.json" in shown
    assert f"Next: creditscope lab compare brake --no-run --out {tmp_path}" in shown
    page = (tmp_path / "table.md").read_text()
    assert page.startswith("# Brakes at 128 rollouts\n\n**recall cuts the distance and the overshoot past")
    assert "method grpo, R = 4, P = 4, μ = 4, learning rate 0.0001, 3 seeds, 20 test problems" in page
    assert "| recall | 3 | 63.0 % [60.5, 65.5] | +0.0 [-2.5, +2.5] | yes | 1.0 | 62.0 % | 4.0 ± 0.0 | 4.00 ± 0.00 |" \
        in page
    assert ("| recall | 25.0 ± 0.0 % | 0.062 ± 0.000 | -75 % [-75, -75] | 0.0156 ± 0.0000 | -88 % [-88, -88] | "
            "50 ± 0 % | 0.0010 ± 0.0000 |") in page
    lines = {line["brake"]: line for line in json.loads((tmp_path / "table.json").read_text())["lines"]}
    assert lines["recall"]["distance_change"]["mean"] == pytest.approx(-0.75, abs=1e-12)
    assert lines["recall"]["worst"] == 0.62
    assert lines["recall"]["seconds"]["mean"] == 11.0
    assert lines["none"]["distance_change"] is None
    assert "| none | 3 | 63.0 % [60.5, 65.5] |  |  | 1.0 |" in page


@pytest.mark.usefixtures("nothing_runs")
def test_a_page_of_credit_says_mu_where_it_is_not_one(tmp_path: Path) -> None:
    write_run(tmp_path / "one", "outcome", 0, [0.5, 0.5, 0.5])
    write_run(tmp_path / "two", "outcome", 0, [0.5, 0.5, 0.5], inner_steps=2)
    pages = []
    for name in ("one", "two"):
        assert run("lab", "compare", "credit", "--no-run", "--out", str(tmp_path / name), "--json") == 0
        pages.append((tmp_path / name / "table.md").read_text())
    assert "P = 4, learning rate" in pages[0]
    assert "--inner-steps" not in pages[0]
    assert "P = 4, μ = 2, learning rate" in pages[1]
    assert "--inner-steps 2" in pages[1]


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("inner_steps", [4, 8])
def test_the_command_in_a_page_of_brakes_makes_the_page_wherever_the_folder_is(
        inner_steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for seed in range(2):
        for brake in ("none", "shorten,share=0.02"):
            write_brake(old, brake, seed, 0.6 + 0.01 * seed, [passed(0.5, 0.25)], inner_steps=inner_steps)
    assert run("lab", "compare", "brake", "--no-run", "--out", str(old), "--json") == 0
    page = (old / "table.md").read_text()
    words = shlex.split(json.loads(capsys.readouterr().out)["command"])
    assert words[:4] == ["creditscope", "lab", "compare", "brake"]
    shutil.move(old, new)
    assert run("lab", "compare", "brake", "--no-run", "--out", str(new), "--json") == 0
    assert (new / "table.md").read_text() == page
    (new / "table.md").unlink()
    assert run(*words[1:], "--out", str(new), "--json") == 0
    assert (new / "table.md").read_text() == page


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("args", "message"), [
    (("recal",), "unknown brake 'recal'; did you mean 'recall'?"),
    (("shorten,shares=0.1",), "unknown option of brake 'shorten': 'shares'; did you mean 'share'?"),
    (("shorten,share=2",), "option share of brake 'shorten' must be a finite number in 0 .. 1, got 2"),
    (("none", "none"), "brake 'none' is named twice; name each brake once"),
    (("recall", "--method", "reinforce"), "--brake recall: method 'reinforce' has no bound"),
    (("none", "--inner-steps", "0"), "--inner-steps must be at least 1, got 0"),
    (("--no-run",), "holds no finished run"),
])
def test_a_bad_brake_is_one_sentence_before_any_run_starts(args: tuple[str, ...], message: str, tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    assert run("lab", "compare", "brake", *args, "--out", str(tmp_path / "new")) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "new").exists()


def test_without_names_every_brake_is_asked_for_in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch,
                                                                       tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    verb = Compare("brake", seeds=1)
    asked = verb._asked()
    assert verb.place == Path("runs/brakes")
    assert list(asked) == [f"{name}/seed-0" for name in ("none", "recall", "shorten", "restart", "kl_stop")]
    assert next(iter(Compare("credit")._asked())) == "outcome/seed-0"
    assert Compare("credit").place == Path("runs/compare")


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 3])
def test_the_figure_of_brakes_names_each_in_both_panels_and_what_they_measure(seeds: int, tmp_path: Path) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    svg = figures.brake_svg(brakes_of(tmp_path, none=NONE[:seeds], shorten=same(*[0.6] * seeds, batch=STILL)))
    assert svg.startswith("<svg")
    assert svg.count(">shorten<") == svg.count(">none<") == 2  # also where it has no distance
    assert "Distance past the bound, μ = 4" in svg
    assert "nats, mean of the tokens past it" in svg
    assert "accuracy on unseen problems at 128 rollouts" in svg
    assert "http" not in svg.replace("http://www.w3.org/", "")


# -- processes -------------------------------------------------------------------------------------------------------


def job(tmp_path: Path, name: str, *args: str) -> Job:
    return Job(name, args, tmp_path / f"{name}.log")


@pytest.mark.slow
def test_a_failing_run_is_named_with_its_last_words_and_the_others_go_on(tmp_path: Path) -> None:
    jobs = [job(tmp_path, "bad", "list", "methods", "grop"), job(tmp_path, "good", "--version")]
    ended = run_jobs(jobs, 1, lambda: False, lambda running, ended: None)
    assert ended["good"] is None
    assert str(ended["bad"]).startswith("unknown method 'grop'; did you mean 'grpo'?")
    assert not (tmp_path / "good.log").exists()  # it had nothing to say
    assert "grop" in (tmp_path / "bad.log").read_text()


def test_a_killed_run_is_named_by_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    monkeypatch.setattr("creditscope.cli.processes.start", lambda job: sleeping(job, code))
    ended = run_jobs([job(tmp_path, "a")], 1, lambda: False, lambda running, ended: None)
    assert ended == {"a": "killed by SIGKILL; was there enough memory?"}


def sleeping(job: Job, code: str = "import time; time.sleep(60)") -> subprocess.Popen[bytes]:
    job.log.touch()
    return subprocess.Popen([sys.executable, "-c", code])


def test_a_stop_ends_the_children_and_starts_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def begin(job: Job) -> subprocess.Popen[bytes]:
        children.append(sleeping(job))
        return children[-1]

    monkeypatch.setattr("creditscope.cli.processes.start", begin)
    ended = run_jobs([job(tmp_path, name) for name in "abc"], 2, lambda: len(children) == 2, lambda *_: None)
    assert ended == {}
    assert [child.returncode for child in children] == [-signal.SIGTERM] * 2


def test_an_error_leaves_no_child_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def begin(job: Job) -> subprocess.Popen[bytes]:
        children.append(sleeping(job))
        return children[-1]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("creditscope.cli.processes.start", begin)
    with pytest.raises(KeyboardInterrupt):
        run_jobs([job(tmp_path, name) for name in "ab"], 2, lambda: False, interrupted)
    assert [child.returncode for child in children] == [-signal.SIGKILL] * 2


@pytest.mark.slow
def test_failed_runs_are_in_the_table_and_exit_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    seeds_of(tmp_path, outcome=[0.62, 0.64], step_reward=[0.70])
    monkeypatch.setattr("creditscope.cli.sweep.run_jobs", lambda *_: {"step_reward/seed-1": "no room on the disk"})
    code = run("lab", "compare", "credit", "outcome", "step_reward", "--seeds", "2", "--out", str(tmp_path), *SMALL)
    assert code == 1
    assert "failed: step_reward/seed-1: no room on the disk" in capsys.readouterr().out
    assert "- failed: step_reward/seed-1: no room on the disk" in (tmp_path / "table.md").read_text()
    monkeypatch.setattr("creditscope.cli.sweep.run_jobs", lambda *_: {"gae/seed-0": "no room on the disk"})
    assert run("lab", "compare", "credit", "gae", "--seeds", "1", "--out", str(tmp_path), *SMALL) == 2
    assert "all 1 runs failed; gae/seed-0: no room on the disk" in capsys.readouterr().err


# -- in earnest ------------------------------------------------------------------------------------------------------

LITTLE = ("--group", "4", "--prompts", "4", "--eval-problems", "20", "--points", "2", "--every", "1")


@pytest.fixture
def mini_runs(mini_task: None, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Flags for runs of a very small model, which are made in this process."""
    monkeypatch.setattr("creditscope.cli.sweep.run_jobs", run_here)
    return (*LITTLE, "--model", mini.model(), "--task", mini.TASK)


@pytest.mark.slow
def test_two_estimators_are_trained_compared_and_used_again(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], mini_runs: tuple[str, ...],
        monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("lab", "compare", "credit", "outcome", "monte_carlo,samples=1", "--seeds", "1", "--out", str(tmp_path),
            *mini_runs, "--rollouts", "64")
    assert run(*args, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    lines = {line["credit"]: line for line in first["lines"]}
    assert (lines["outcome"]["spent"], lines["outcome"]["steps"], lines["outcome"]["continuations"]) == (64, 4, 0)
    assert lines["monte_carlo,samples=1"]["spent"] >= 64
    assert lines["monte_carlo,samples=1"]["continuations"] > 0
    assert lines["outcome"]["within"]["mean"] == pytest.approx(0, abs=1e-9)
    assert lines["monte_carlo,samples=1"]["within"]["mean"] > 0.01
    assert lines["outcome"]["effective_rank"]["mean"] >= 1
    # The same start: before the first step both solve the same problems.
    assert lines["outcome"]["curve"][0] == lines["monte_carlo,samples=1"]["curve"][0]
    assert first["failed"] == {}
    if figures.can_draw():
        assert first["files"] == ["table.md", "table.json", "figure.svg"]
        assert (tmp_path / "figure.svg").read_text().count(">outcome<") == 2
        assert "figure.svg" in (tmp_path / "table.md").read_text()
    monkeypatch.setattr("creditscope.cli.sweep.run_jobs", no_child)
    assert run(*args, "--json") == 0
    assert json.loads(capsys.readouterr().out) == first


@pytest.mark.slow
def test_two_brakes_are_trained_compared_and_used_again(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], mini_runs: tuple[str, ...],
        monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("lab", "compare", "brake", "none", "shorten,share=0", "--seeds", "1", "--out", str(tmp_path), *mini_runs,
            "--rollouts", "32", "--inner-steps", "2", "--lr", "3e-2")
    assert run(*args, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    none, shorten = ({line["brake"]: line for line in first["lines"]}[name] for name in ("none", "shorten,share=0"))
    assert first["failed"] == {}
    assert none["steps"] == shorten["steps"] == 2
    assert none["updates"]["mean"] == 2
    assert none["overshoot"]["mean"] > 0
    assert none["past"]["mean"] > 0
    # No token may stand past its bound: nothing is left of the overshoot, and there is no distance.
    assert shorten["overshoot"]["mean"] == 0
    assert (shorten["overshoot_change"]["mean"], shorten["distance"]) == (-1, None)
    assert shorten["kl"]["mean"] < none["kl"]["mean"]
    assert none["curve"][0] == shorten["curve"][0]  # the same start
    monkeypatch.setattr("creditscope.cli.sweep.run_jobs", no_child)
    assert run(*args, "--json") == 0
    assert json.loads(capsys.readouterr().out) == first


STOPPED = ("lab", "compare", "credit", "outcome", "--seeds", "1", "--rollouts", "160", *LITTLE)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_done_and_the_same_command_goes_on(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], mini_runs: tuple[str, ...],
        monkeypatch: pytest.MonkeyPatch) -> None:
    """The run and the whole are stopped by one signal each, as `run_jobs` stops them; below, by one in a terminal."""
    steps = tmp_path / "outcome" / "seed-0" / "steps.jsonl"
    args = (*STOPPED, *mini_runs, "--out", str(tmp_path))
    append = Record.append

    def press(record: Record, step: int, *rest: Any) -> None:
        append(record, step, *rest)
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    def stopped_here(*given: Any) -> dict[str, str | None]:
        with monkeypatch.context() as patch:
            patch.setattr(Record, "append", press)
            assert run_here(*given) == {"outcome/seed-0": "exit code 130"}
        signal.raise_signal(signal.SIGINT)
        return {}

    monkeypatch.setattr("creditscope.cli.sweep.run_jobs", stopped_here)
    assert run(*args) == 130
    said = capsys.readouterr()
    assert "Next: the same command goes on" in said.out
    assert "Traceback" not in said.err
    assert not (tmp_path / "table.md").exists()
    assert not list(tmp_path.rglob("*.part"))
    kept = steps.read_text().splitlines()
    assert 2 <= len(kept) < 11  # ten steps and the evaluation after them
    monkeypatch.setattr("creditscope.cli.sweep.run_jobs", run_here)
    assert run(*args) == 0
    assert steps.read_text().splitlines()[: len(kept)] == kept
    assert (tmp_path / "table.md").exists()


@pytest.mark.nightly
def test_ctrl_c_in_a_terminal_does_too(tmp_path: Path) -> None:
    """All in processes of their own, in one group, as a terminal has them: the signal reaches the parent alone."""
    command = [sys.executable, "-m", "creditscope", *STOPPED, "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    steps = tmp_path / "outcome" / "seed-0" / "steps.jsonl"
    while process.poll() is None and not (steps.exists() and steps.read_bytes().count(b"\n") >= 2):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert "Next: the same command goes on" in out
    assert "Traceback" not in err
    assert not (tmp_path / "table.md").exists()
    kept = steps.read_text().splitlines()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert steps.read_text().splitlines()[: len(kept)] == kept
    assert (tmp_path / "table.md").exists()


@pytest.mark.parametrize(("name", "value", "message"), [
    ("rollouts", "many", "rollouts is 'many', not a int"),
    ("seed", None, "seed is None, not a int"),
    ("credit", "outcome\x01<script>", "unknown credit"),
    ("model", 3, "model is 3, not a str"),
])
def test_settings_that_train_would_not_write_are_refused_not_shown(
        tmp_path: Path, name: str, value: object, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "outcome", 0, [0.5, 0.5, 0.5])
    edit_config(next(tmp_path.glob("*/seed-0")), **{name: value})
    assert run("lab", "compare", "credit", "--no-run", "--out", str(tmp_path)) == 2
    assert message in capsys.readouterr().err
