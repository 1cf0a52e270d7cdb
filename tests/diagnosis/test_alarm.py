"""A diagnosis of the steps so far: each finding once, at a bounded cost; and the same Log from memory as from files."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from creditscope.diagnosis.alarm import SPREAD, Alarm
from creditscope.diagnosis.engine import Diagnosis, diagnose
from creditscope.diagnosis.finding import Finding
from creditscope.diagnosis.of_record import diagnose_steps, log_of_steps
from creditscope.diagnosis.read import read
from creditscope.errors import CreditscopeError
from creditscope.runs.columns import Steps
from creditscope.runs.record import Record
from diagnosis.makers_doctor import LOGS
from records import write_record

GOOD: dict[str, Any] = {"reward/mean": 0.5, "reward/std": 0.5, "signal/dead_groups": 0.0, "credit/dead_groups": 0.0,
                        "grad/norm": 1.0, "length/truncated": 0.0, "rollouts/spent": 8}
DEAD = GOOD | {"reward/mean": 0.0, "reward/std": 0.0, "signal/dead_groups": 1.0, "credit/dead_groups": 1.0,
               "grad/norm": 0.0}
CONFIG = {"method": "grpo"}


def seen(lines: list[dict[str, Any]], **options: Any) -> tuple[Alarm, dict[int, list[str]]]:
    alarm = Alarm(CONFIG, **options)
    return alarm, {step: told for step, line in enumerate(lines) if (told := alarm.see(step, line))}


def test_a_finding_is_told_once_with_its_step_and_change_and_with_the_effects_found_with_it() -> None:
    alarm, told = seen([DEAD] * 30)
    first = diagnose_steps(CONFIG, [line | {"step": step} for step, line in enumerate([DEAD] * 30)]).first
    assert first is not None
    lines = [line for found in told.values() for line in found]
    assert len([line for line in lines if f", {first.rule}: " in line]) == 1
    assert any("This explains: " in line and "Change: " in line for line in lines)
    assert alarm.stop is False


def test_a_cause_is_told_with_its_effects_and_an_effect_that_comes_later_names_it(
        monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*rules: Finding) -> None:
        monkeypatch.setattr("creditscope.diagnosis.alarm.diagnose_log", lambda log: Diagnosis(rules))

    alarm = Alarm(CONFIG)
    cause = Finding(rule="lr", state="watch", sentence="It is high", change="lr=1")
    effects = [Finding(rule=name, state="broken", sentence=f"{name} fell", follows=("lr",)) for name in "abc"]
    found(*effects[:2], cause)
    assert alarm.see(3, GOOD) == ["✗ step 3, lr: It is high. This explains: a, b. Change: lr=1."]
    found(*effects, replace(cause, state="broken"))
    assert alarm.see(4, GOOD) == ["✗ step 4, c: c fell. It follows from lr. Change: lr=1."]
    assert alarm.see(5, GOOD) == []


def test_a_run_that_is_fine_sets_off_nothing_and_stop_is_only_where_it_was_asked_for() -> None:
    assert seen([GOOD] * 20, stop_on="broken")[1] == {}
    assert seen([DEAD] * 20, stop_on="broken")[0].stop
    with pytest.raises(CreditscopeError, match="stop_on='watch'"):
        Alarm({}, stop_on="watch")


def test_diagnoses_are_made_every_few_steps_and_ever_less_often_in_a_long_run() -> None:
    alarm = Alarm({}, every=10)
    due = [step for step in range(10_000) if alarm.due(step)]
    assert due[:3] == [9, 19, 29]
    assert sum(due) < 2 * SPREAD * 10_000  # in units of one diagnosis per step
    assert all(b - a <= max(10, b // SPREAD + 1) for a, b in pairwise(due))


def test_metrics_of_one_step_that_come_in_two_parts_are_one_row() -> None:
    alarm = Alarm(CONFIG)
    alarm.note(0, GOOD)
    alarm.note(0, {"loss": 0.1})
    alarm.note(1, {"no metric": 1})
    (row,) = alarm._rows
    assert row.values == {name: float(value) for name, value in GOOD.items()} | {"loss": 0.1}


@pytest.mark.parametrize("name", ["ours-fell", "ours-braked", "ours-fell-early"])
def test_steps_in_memory_give_the_diagnosis_of_the_folder(name: str) -> None:
    record, whole = Record.open(LOGS / name), diagnose(read(LOGS / name))
    for steps in (record.steps(), record.columns()):
        assert diagnose(log_of_steps(record.config, steps)) == whole


def test_a_number_that_was_not_finite_is_one_in_memory_too(tmp_path: Path) -> None:
    path = write_record(tmp_path / "run", [GOOD, GOOD | {"grad/norm": float("nan")}] * 5, CONFIG)
    for steps in (Record.open(path).steps(), Record.open(path).columns()):
        assert diagnose_steps(CONFIG, steps) == diagnose(read(path))


@pytest.mark.parametrize("config", [{"inner_steps": "many"}, {"group": []}, {"method": 3}, {"trl": 5, "engine": "trl"}])
def test_odd_settings_are_a_diagnosis_and_no_error(config: dict[str, Any]) -> None:
    assert diagnose_steps(CONFIG | config, [DEAD | {"step": step} for step in range(9)]).headline


def test_no_step_cannot_be_judged() -> None:
    for steps in ([], Steps.of([])):
        assert diagnose_steps({}, steps).headline == "? cannot judge: no step is recorded yet."
