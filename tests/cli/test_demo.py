"""`creditscope lab demo` end to end, on few steps and few test problems."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import mini
from creditscope.cli import demo
from creditscope.cli.main import main
from creditscope.runs.config import Config
from creditscope.runs.record import Record


@pytest.fixture
def mini_demo(mini_task: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's settings, with a very small model."""
    monkeypatch.setattr(demo, "Config", partial(Config, model=mini.model(), task=mini.TASK, max_tokens=12))


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


def test_the_demo_does_not_write_into_a_folder_that_holds_something(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        main(["lab", "demo", "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert "is not empty; choose another --out" in capsys.readouterr().err
