"""`creditscope lab demo` end to end, on few steps and few test problems."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

import mini
from cli import run
from creditscope.cli import demo
from creditscope.cli.demo import Demo
from creditscope.cli.main import main
from creditscope.cli.sweep import LOCK
from creditscope.files.writing import lock_folder
from creditscope.runs.config import Config
from creditscope.runs.record import Record
from jobs import run_here


@pytest.fixture
def mini_demo(mini_task: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's settings, with a very small model."""
    monkeypatch.setattr(demo, "Config", partial(Config, model=mini.model(), task=mini.TASK, max_tokens=12))
    monkeypatch.setattr("creditscope.cli.sweep.run_jobs", run_here)  # a process of its own would not know the task


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mini", pytest.param("packaged", marks=pytest.mark.nightly)])
def test_the_demo_trains_three_runs_and_ends_with_their_pages(
        model: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    if model == "mini":
        request.getfixturevalue("mini_demo")
    monkeypatch.setattr(demo, "PROBLEMS", 10)
    out = tmp_path / "demo"
    with pytest.raises(SystemExit) as stop:
        main(["lab", "demo", "--steps", "2", "--out", str(out), "--json"])
    assert stop.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["group"] for run in found["runs"]] == [2, 4, 8]
    # 8 prompts a step, 2 steps.
    assert [run["rollouts"] for run in found["runs"]] == [8 * 2 * 2, 8 * 4 * 2, 8 * 8 * 2]
    assert found["reports"] == [str(out / "report.html"), str(out / "r8" / "report.html")]
    whole = (out / "r8" / "report.html").read_text()
    assert 'data-topic="signal"' in whole
    assert "<title>r8: creditscope report</title>" in whole
    assert "<title>3 runs: creditscope report</title>" in (out / "report.html").read_text()
    assert [Record.open(out / f"r{group}").groups() for group in (2, 4, 8)] == [[0]] * 3


@pytest.mark.slow
def test_a_demo_that_was_stopped_continues_with_its_finished_runs(
        mini_demo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "PROBLEMS", 10)
    monkeypatch.setattr("creditscope.cli.sweep.run_jobs", lambda jobs, *rest: run_here(jobs[:1], *rest)
                        | {job.name: "killed by SIGKILL" for job in jobs[1:]})
    assert run("lab", "demo", "--steps", "2") == 2
    assert "runs/demo/r4 failed: killed by SIGKILL" in capsys.readouterr().err
    first = Path("runs/demo/r8/steps.jsonl").read_bytes()
    monkeypatch.setattr("creditscope.cli.sweep.run_jobs", run_here)
    assert run("lab", "demo", "--steps", "2") == 0
    assert Path("runs/demo/r8/steps.jsonl").read_bytes() == first
    assert Path("runs/demo/report.html").exists()
    assert run("lab", "demo", "--steps", "2") == 0  # that one is finished
    assert Path("runs/demo-2/report.html").exists()
    monkeypatch.setattr("creditscope.cli.sweep.run_jobs", lambda jobs, *rest: run_here(jobs[:1], *rest)
                        | {job.name: "killed by SIGKILL" for job in jobs[1:]})
    assert run("lab", "demo", "--steps", "2") == 2
    assert Demo(steps=2).goes_on(Path("runs/demo-3"))
    assert not Demo(steps=3).goes_on(Path("runs/demo-3"))  # a demo of other settings takes the next free place
    assert not Demo(steps=2, seed=1).goes_on(Path("runs/demo-3"))


def test_a_demo_beside_one_that_is_running_takes_the_next_place(
        mini_demo: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, config = tmp_path / "demo", Demo(steps=2).config(8)
    Record.create(here / "r8", asdict(config), {}).close()
    assert Demo(steps=2).goes_on(here)
    lock = lock_folder(here, LOCK)
    assert not Demo(steps=2).goes_on(here)
    assert run("lab", "demo", "--steps", "2", "--out", str(here)) == 2
    assert f"another process is writing into {here}" in capsys.readouterr().err
    lock.release()
    (here / "r8" / "run.json").write_text("{")
    assert not Demo(steps=2).goes_on(here)  # damaged


def test_the_demo_does_not_write_into_a_folder_that_holds_something(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        main(["lab", "demo", "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert "is not empty; choose another --out" in capsys.readouterr().err
