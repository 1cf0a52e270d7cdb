"""The diagnosis while TRL trains: told once, in the log and in the record, and able to end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl", reason="its trainers are read")

from creditscope.diagnosis.engine import diagnose  # noqa: E402
from creditscope.diagnosis.read import read  # noqa: E402
from creditscope.errors import CreditscopeError  # noqa: E402
from creditscope.plugins.trl import ScopeCallback  # noqa: E402
from creditscope.plugins.trl import alarm as live_alarm  # noqa: E402
from creditscope.runs.record import Record  # noqa: E402
from plugins.trl_makers import reward, trainer  # noqa: E402

pytestmark = pytest.mark.conformance


def nothing(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def trained(out: Path | None = None, funcs: Any = nothing, max_steps: int = 12, **options: Any) -> Any:
    live = trainer(funcs=funcs, dtype="float32", max_steps=max_steps, learning_rate=1e-4)
    live.add_callback(ScopeCallback(live, every=1, gram=False, out=out, **options))
    live.train()
    return live


def alarms(live: Any) -> list[int]:
    return [entry["step"] for entry in live.state.log_history if "creditscope/alarm" in entry]


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("✗ step ")]


def test_a_finding_that_turns_broken_is_printed_once_logged_and_recorded(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = trained(tmp_path / "run")
    lines = told(capsys)
    assert live.state.global_step == 12
    kept = [step["run/alarm"] for step in Record.open(tmp_path / "run").steps() if "run/alarm" in step]
    assert "\n".join(kept).splitlines() == lines
    assert len(alarms(live)) == len(kept) > 0
    rules = [line.partition(", ")[2].partition(":")[0] for line in lines]
    assert len(set(rules)) == len(rules)
    assert " Change: " in lines[0]


def test_the_live_findings_are_those_of_the_doctor_on_the_finished_record(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "run")
    first = diagnose(read(tmp_path / "run")).first
    assert first is not None
    assert any(f", {first.rule}: " in line for line in told(capsys))


def test_stop_on_broken_ends_the_training_after_saying_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = trained(tmp_path / "run", stop_on="broken")
    assert live.state.global_step < 12
    assert told(capsys)
    assert "run/alarm" in Record.open(tmp_path / "run").steps()[-1]


def test_a_run_with_differing_rewards_and_one_without_an_alarm_are_left_alone(
        capsys: pytest.CaptureFixture[str]) -> None:
    assert not alarms(trained(alarm=False))
    assert trained(funcs=reward, max_steps=4, stop_on="broken").state.global_step == 4
    assert told(capsys) == []


def test_an_error_in_the_diagnosis_is_a_warning_and_the_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("of the rules")

    monkeypatch.setattr(live_alarm.Alarm, "look", fail)
    with pytest.warns(UserWarning, match="no diagnosis at step 0: RuntimeError: of the rules") as told:
        assert trained(max_steps=2).state.global_step == 2
    assert sum("no diagnosis" in str(one.message) for one in told) == 1


@pytest.mark.parametrize("options", [{"stop_on": "watch"}, {"stop_on": "broken", "alarm": False}])
def test_a_stop_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(CreditscopeError, match="give stop_on='broken'"):
        ScopeCallback(trainer(dtype="float32"), **options)
