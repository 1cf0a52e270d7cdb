"""The comparison: numbers derived by hand from small records, runs that are used again, and runs that fail."""

from __future__ import annotations

import json
import math
import os
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

from creditscope import CreditscopeError, figures
from creditscope.cli import main
from creditscope.compare import Comparison, area, at, compare, read_folder, verdicts
from creditscope.intervals import T975, Interval, mean_interval, overlap, paired, quantile
from creditscope.record import Record
from creditscope.verbs.compare import Compare, arguments, folder
from creditscope.verbs.processes import Job, run_jobs

BUDGET = 128


def settings(credit: str, seed: int, **changes: Any) -> dict[str, Any]:
    """The settings that `compare` gives a run, as the trainer writes them."""
    verb = Compare("credit", rollouts=BUDGET, group=4, prompts=4, eval_problems=20, points=2)
    return asdict(verb._config(credit, seed)) | {"log": []} | changes


def write_run(out: Path, credit: str, seed: int, accuracy: Sequence[float], *, continuations: int = 0,
              finished: bool = True, **changes: Any) -> None:
    """A run of steps of 64 rollouts and some continuations, evaluated before each step and after the last."""
    with Record.create(out / folder(credit) / f"seed-{seed}", settings(credit, seed, **changes), {}) as record:
        for step, value in enumerate(accuracy[:-1]):
            line = {"eval/accuracy": value, "rollouts/sampled": 64, "rollouts/spent": 64 + continuations,
                    "time/step": 4.0, "time/eval": 1.0, "time/scope": 0.5, "credit/within": 0.25 * step,
                    "credit/dead_groups": 0.5, "signal/dead_groups": 0.75}
            record.append(step, line | ({"gram/group/effective_rank": 3.0} if step == 0 else {}))
        if finished:
            record.append(len(accuracy) - 1, {"eval/accuracy": accuracy[-1]})


def compared(out: Path) -> Comparison:
    return compare(read_folder(out)[0])


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(args)
    return int(stop.value.code or 0)


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
    (found,), unfinished = read_folder(tmp_path)
    assert unfinished == []
    assert (found.credit, found.seed, found.steps, found.spent, found.sampled) == ("monte_carlo", 3, 2, 192, 128)
    assert found.points == ((0, 0.5), (96, 0.6), (192, 0.8))  # an evaluation stands before the rollouts of its line
    assert found.seconds == 2 * (4.0 - 1.0 - 0.5)
    assert (found.effective_rank, found.within, found.dead_credit, found.dead_signal) == (3.0, 0.125, 0.5, 0.75)
    (line,) = compare([found]).lines
    assert line.accuracy.mean == pytest.approx(0.6 + 0.2 * 32 / 96)
    assert line.continuations == pytest.approx(1 / 3)
    assert line.seconds_per_rollout == pytest.approx(5 / 192)


def test_a_reading_that_a_run_does_not_have_is_absent(tmp_path: Path) -> None:
    with Record.create(tmp_path / "outcome" / "seed-0", settings("outcome", 0), {}) as record:
        record.append(0, {"eval/accuracy": 0.5, "rollouts/sampled": 128, "rollouts/spent": 128, "time/step": 1.0})
        record.append(1, {"eval/accuracy": 0.5})
    line = compared(tmp_path).lines[0]
    assert (line.effective_rank, line.within, line.difference, line.accuracy.low) == (None, None, None, None)


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
    assert [line.credit for line in found.lines] == ["step_reward", "outcome", "gae"]
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
    monkeypatch.setattr("creditscope.verbs.compare.run_jobs", no_child)


@pytest.mark.usefixtures("nothing_runs")
def test_finished_runs_are_used_again_and_nothing_is_trained(tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    seeds_of(tmp_path, outcome=[0.62, 0.64], step_reward=[0.70, 0.72])
    assert run("compare", "credit", "outcome", "step_reward", "--seeds", "2", "--out", str(tmp_path), *SMALL) == 0
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
    assert run("compare", "credit", "--no-run", "--out", str(tmp_path), "--json") == 0
    page = (tmp_path / "table.md").read_text()
    words = json.loads((tmp_path / "table.json").read_text())["command"].split()
    assert words[:3] == ["creditscope", "compare", "credit"]
    assert run(*words[1:], "--out", str(tmp_path), "--json") == 0
    assert (tmp_path / "table.md").read_text() == page


@pytest.mark.usefixtures("nothing_runs")
def test_a_run_with_other_settings_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "outcome", 0, [0.5, 0.5, 0.5], lr=0.5)
    assert run("compare", "credit", "outcome", "--seeds", "1", "--out", str(tmp_path), *SMALL) == 2
    assert "seed-0 holds a run with other settings: its lr is 0.5, not 0.0001; give the same" in capsys.readouterr().err


def test_an_unfinished_run_goes_on_and_a_new_one_begins(tmp_path: Path) -> None:
    write_run(tmp_path, "outcome", 0, [0.5, 0.5, 0.5], finished=False)
    verb = Compare("credit", ("outcome",), seeds=2, out=tmp_path)
    old, new = (arguments(config, path) for path, config in verb._asked().items())
    assert "--resume" in old
    assert "--resume" not in new
    assert new[:2] == ("train", "tiny")
    assert {"--rollouts", "3840", "--eval-rollouts", "960", "--credit", "outcome"} <= set(new)


@pytest.mark.usefixtures("nothing_runs")
def test_no_run_leaves_out_what_is_not_finished_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeds_of(tmp_path, outcome=[0.62, 0.64], step_reward=[0.70, 0.72])
    write_run(tmp_path, "gae", 0, [0.5, 0.5, 0.5], finished=False)
    assert run("compare", "credit", "--no-run", "--out", str(tmp_path), "--json") == 0
    said = capsys.readouterr()
    assert [line["credit"] for line in json.loads(said.out)["lines"]] == ["step_reward", "outcome"]
    assert "left out: 1 runs that are not finished" in said.err


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
    assert run("compare", "credit", *args, "--out", str(tmp_path / "new")) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "new").exists()


def test_without_the_plot_extra_the_table_is_written_and_the_repair_is_named(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("creditscope.verbs.compare.can_draw", lambda: False)
    seeds_of(tmp_path, outcome=[0.62, 0.64], step_reward=[0.70, 0.72])
    assert run("compare", "credit", "--no-run", "--out", str(tmp_path)) == 0
    assert "pip install 'creditscope[plot]'" in capsys.readouterr().out
    assert "figure.svg" not in (tmp_path / "table.md").read_text()
    assert not (tmp_path / "figure.svg").exists()


def test_a_missing_library_is_named_with_its_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(CreditscopeError, match=r"pip install 'creditscope\[plot\]'"):
        figures.accuracy_svg(seeds_of(tmp_path, outcome=[0.5, 0.6]))


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_figure_names_every_estimator_and_needs_no_network(seeds: int, tmp_path: Path) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    svg = figures.accuracy_svg(seeds_of(tmp_path, outcome=[0.62, 0.64, 0.6][:seeds], salt=[0.70, 0.72, 0.7][:seeds]))
    assert svg.startswith("<svg")
    assert svg.count(">salt<") == 2  # beside its line, and on the axis of the second panel
    assert "http" not in svg.replace("http://www.w3.org/", "")


# -- processes -------------------------------------------------------------------------------------------------------


def job(tmp_path: Path, name: str, *args: str) -> Job:
    return Job(name, args, tmp_path / f"{name}.log")


def test_a_failing_run_is_named_with_its_last_words_and_the_others_go_on(tmp_path: Path) -> None:
    jobs = [job(tmp_path, "bad", "methods", "grop"), job(tmp_path, "good", "--version")]
    ended = run_jobs(jobs, 1, lambda: False, lambda running, ended: None)
    assert ended["good"] is None
    assert str(ended["bad"]).startswith("unknown method 'grop'; did you mean 'grpo'?")
    assert not (tmp_path / "good.log").exists()  # it had nothing to say
    assert "grop" in (tmp_path / "bad.log").read_text()


def test_a_killed_run_is_named_by_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    monkeypatch.setattr("creditscope.verbs.processes.start", lambda job: sleeping(job, code))
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

    monkeypatch.setattr("creditscope.verbs.processes.start", begin)
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

    monkeypatch.setattr("creditscope.verbs.processes.start", begin)
    with pytest.raises(KeyboardInterrupt):
        run_jobs([job(tmp_path, name) for name in "ab"], 2, lambda: False, interrupted)
    assert [child.returncode for child in children] == [-signal.SIGKILL] * 2


def test_failed_runs_are_in_the_table_and_exit_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    seeds_of(tmp_path, outcome=[0.62, 0.64], step_reward=[0.70])
    monkeypatch.setattr("creditscope.verbs.compare.run_jobs", lambda *_: {"step_reward/seed-1": "no room on the disk"})
    code = run("compare", "credit", "outcome", "step_reward", "--seeds", "2", "--out", str(tmp_path), *SMALL)
    assert code == 1
    assert "failed: step_reward/seed-1: no room on the disk" in capsys.readouterr().out
    assert "- failed: step_reward/seed-1: no room on the disk" in (tmp_path / "table.md").read_text()
    monkeypatch.setattr("creditscope.verbs.compare.run_jobs", lambda *_: {"gae/seed-0": "no room on the disk"})
    assert run("compare", "credit", "gae", "--seeds", "1", "--out", str(tmp_path), *SMALL) == 2
    assert "all 1 runs failed; gae/seed-0: no room on the disk" in capsys.readouterr().err


# -- in earnest ------------------------------------------------------------------------------------------------------

TINY = ("--rollouts", "64", "--group", "4", "--prompts", "4", "--eval-problems", "20", "--points", "2", "--every", "1")


@pytest.mark.slow
def test_two_estimators_are_trained_compared_and_used_again(tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    args = ("compare", "credit", "outcome", "monte_carlo,samples=1", "--seeds", "1", "--out", str(tmp_path), *TINY)
    assert run(*args, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    lines = {line["credit"]: line for line in first["lines"]}
    assert (lines["outcome"]["spent"], lines["outcome"]["steps"], lines["outcome"]["continuations"]) == (64, 4, 0)
    assert lines["monte_carlo,samples=1"]["spent"] >= 64
    assert lines["monte_carlo,samples=1"]["continuations"] > 0
    assert lines["outcome"]["within"]["mean"] == pytest.approx(0, abs=1e-9)
    assert lines["outcome"]["effective_rank"]["mean"] >= 1
    # The same start: before the first step both solve the same problems.
    assert lines["outcome"]["curve"][0] == lines["monte_carlo,samples=1"]["curve"][0]
    assert first["failed"] == {}
    begin = time.monotonic()
    assert run(*args, "--json") == 0
    assert json.loads(capsys.readouterr().out) == first
    assert time.monotonic() - begin < 20  # no training


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_done_and_the_same_command_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "creditscope", "compare", "credit", "outcome", "--seeds", "1", "--out",
               str(tmp_path), *TINY, "--rollouts", "320"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    steps = tmp_path / "outcome" / "seed-0" / "steps.jsonl"
    while process.poll() is None and not (steps.exists() and steps.read_bytes().count(b"\n") >= 2):
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Next: the same command goes on" in out
    assert "Traceback" not in err
    assert not (tmp_path / "table.md").exists()
    assert not list(tmp_path.rglob("*.part"))
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
    file = next(tmp_path.glob("*/seed-0/run.json"))
    stored = json.loads(file.read_text())
    stored["config"][name] = value
    file.write_text(json.dumps(stored))
    assert run("compare", "credit", "--no-run", "--out", str(tmp_path)) == 2
    assert message in capsys.readouterr().err
