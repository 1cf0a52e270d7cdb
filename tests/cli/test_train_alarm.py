"""`creditscope lab train --alarm` and `--stop-on broken`: told once, in the record, and at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

import mini
from cli import run
from creditscope.cli.display import Display
from creditscope.cli.output import Screen
from creditscope.diagnosis.engine import diagnose
from creditscope.diagnosis.read import read
from creditscope.runs.record import Record

pytestmark = pytest.mark.usefixtures("mini_task")


def train(out: Path, *flags: object) -> int:
    """A run that learns nothing: every answer is cut after one token."""
    return run("lab", "train", mini.model(), "--task", mini.TASK, "--group", 2, "--prompts", 2, "--steps", 12,
               "--max-tokens", 1, "--eval-problems", 0, "--out", out, *flags)


def test_a_broken_run_is_told_once_while_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run") == 0
    told = " ".join(capsys.readouterr().err.split())
    first = diagnose(read(tmp_path / "run")).first
    assert first is not None
    assert told.count(f", {first.rule}: ") == 1
    kept = [step["run/alarm"] for step in Record.open(tmp_path / "run").steps() if "run/alarm" in step]
    assert " ".join("\n".join(kept).split()) in told


def test_stop_on_broken_ends_with_1_and_can_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "--stop-on", "broken") == 1
    steps = len(Record.open(tmp_path / "run").steps())
    assert steps < 12
    assert f"creditscope doctor {tmp_path / 'run'}" in capsys.readouterr().out
    assert run("lab", "train", "--out", tmp_path / "run", "--resume", "--no-alarm") == 0
    lines = Record.open(tmp_path / "run").steps()
    assert len(lines) == 12
    assert [line["step"] for line in lines if "run/alarm" in line] == [steps - 1]
    assert "has taken its" not in capsys.readouterr().out
    assert run("lab", "train", "--out", tmp_path / "run", "--resume", "--no-alarm") == 0
    assert "has taken its 12 steps" in " ".join(capsys.readouterr().out.split())


def test_no_alarm_says_nothing_and_cannot_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "--no-alarm") == 0
    assert "✗" not in capsys.readouterr().err
    assert train(tmp_path / "other", "--no-alarm", "--stop-on", "broken") == 2
    assert "leave out --no-alarm" in capsys.readouterr().err


def test_control_characters_of_an_alarm_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(Screen(), "x", 3, quiet=True) as display:
        display.step({"step": 0, "run/alarm": "✗ one\x1b[2J\n✗ two"})
    assert capsys.readouterr().err == "✗ one\\x1b[2J\n✗ two\n"
