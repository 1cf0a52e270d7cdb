"""A log of TRL's and the record that ScopeCallback wrote below it: one run, each column cited from its own file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from creditscope.cli.doctor import Doctor
from creditscope.diagnosis.log import JoinedLine, LogRow, RecordSource, Series
from creditscope.diagnosis.of_record import diagnose_steps
from creditscope.diagnosis.read import read, runs_below
from creditscope.runs.record import Record
from records import write_record

STEPS = 12


def trl_row(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "reward": 0.25 + 0.01 * step, "reward_std": 0.5, "frac_reward_zero_std": 0.0,
            "grad_norm": 0.1, **more}


def write_log(file: Path, steps: range = range(1, STEPS + 1), **more: float) -> Path:
    """One line of settings that are not read, then a line per step: step k is on line k + 1."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [trl_row(step, **more) for step in steps]
    file.write_text("starting\n" + "".join(json.dumps(row) + "\n" for row in rows))
    return file


def home(path: Path, **config: Any) -> Path:
    """As the callback leaves it: TRL's log, the log with the callback's metrics, and the record."""
    write_log(path / "log.jsonl")
    write_log(path / "log-callback.jsonl", **{"creditscope/w/zero": 0.5})
    write_record(path / "record", [{"reward/mean": 0.26 + 0.01 * step, "signal/distinct_texts": 0.75, "w/zero": 0.5,
                                    "signal/dead_groups": 0.0}
                                   for step in range(STEPS)],
                 {"engine": "trl", "trainer": "GRPOTrainer", "trl": {"learning_rate": 1e-6}, **config})
    return path


# -- places -----------------------------------------------------------------------------------------------------------


def test_a_column_of_the_record_is_cited_from_its_file_with_the_steps_of_both(tmp_path: Path) -> None:
    log = read(home(tmp_path / "run"))
    own, theirs = log.series("reward/mean"), log.series("signal/distinct_texts")
    assert own is not None
    assert theirs is not None
    assert own.part(0, 2).told() == "log-callback.jsonl, line 2–3 (step 1–2 of the log): reward 0.26, 0.27"
    assert theirs.part(0, 2).told() == ("record/steps.jsonl, line 1–2 (step 1–2 of the log, 0–1 of the record): "
                                        "signal/distinct_texts 0.75, 0.75")
    assert any("step k of the record is step k + 1 of the log" in note for note in log.notes)


def test_a_log_of_trl_s_state_and_a_record_in_its_folder_are_cited_apart_too(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [trl_row(k) for k in range(1, 13)]}))
    write_record(tmp_path / "scope", [{"w/zero": 0.5, "reward/mean": 0.3}] * STEPS, {"trl": {}})
    log = read(tmp_path)
    reward, zero = log.series("reward/mean"), log.series("w/zero")
    assert reward is not None
    assert zero is not None
    assert reward.part(-1).told() == "trainer_state.json, log_history entry 12 (step 12 of the log): reward 0.37"
    assert zero.part(-1).told() == ("scope/steps.jsonl, line 12 (step 12 of the log, 11 of the record): w/zero 0.5")


def test_a_column_that_both_have_is_cited_from_both(tmp_path: Path) -> None:
    write_log(tmp_path / "log.jsonl", range(4, STEPS + 1, 4), kl=0.5)
    write_record(tmp_path / "record", [{"kl": 0.25, "reward/mean": 0.3}] * STEPS, {"trl": {}})
    series = read(tmp_path).series("kl")
    assert series is not None
    assert [row.values["kl"] for row in series.rows[:4]] == [0.25, 0.25, 0.25, 0.5]  # its own value stays
    assert series.told().startswith("log.jsonl, line 2–4 and record/steps.jsonl, line 1–11 (step 1–12 of the log): kl ")


def test_steps_of_a_record_alone_are_counted_by_it() -> None:
    finding = next(each for each in diagnose_steps({}, [
        {"step": step, "reward/mean": 0.0, "reward/std": 0.0} for step in range(STEPS)]).findings if each.evidence)
    assert finding.evidence[0].startswith("steps.jsonl, line ")
    assert "of the record): " in finding.evidence[0]
    assert "of the log" not in finding.evidence[0]


def test_rows_without_a_step_are_cited_by_their_places_alone() -> None:
    line = JoinedLine(RecordSource("record/steps.jsonl, line"), 7, None, frozenset({"kl"}))
    rows = [LogRow(3, None, {"kl": 0.5}), LogRow(4, None, {"kl": 0.25}, joined=line)]
    assert Series("kl", rows, "a.log, line").told() == "a.log, line 3 and record/steps.jsonl, line 7: kl 0.5, 0.25"


# -- one run ----------------------------------------------------------------------------------------------------------


def test_a_run_with_two_logs_and_a_record_is_listed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        home(tmp_path / name)
    assert runs_below(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert Doctor(tmp_path).run() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]] == ["a", "b"]
    assert Doctor(tmp_path / "a").run() == 0
    assert "12 rows" in capsys.readouterr().out


def test_a_run_with_checkpoints_a_log_and_a_record_is_listed_once(tmp_path: Path) -> None:
    home(tmp_path / "run")
    for step in (5, 10):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir()
        (tmp_path / "run" / f"checkpoint-{step}" / "trainer_state.json").write_text(
            json.dumps({"log_history": [trl_row(k) for k in range(1, step + 1)]}))
    write_log(tmp_path / "notes.log")
    assert runs_below(tmp_path) == [tmp_path / "notes.log", tmp_path / "run"]


def test_the_log_with_the_most_columns_is_read_and_a_file_that_is_no_log_is_not(tmp_path: Path) -> None:
    path = home(tmp_path / "run")
    (path / "completions.jsonl").write_text((json.dumps({"prompt": "x", "reward": 1.0}) + "\n") * 1000)
    assert read(path).source == "log-callback.jsonl, line"
    assert read(path / "log.jsonl").series("signal/distinct_texts") is None  # a file that was named is read alone
    for file in ("log.jsonl", "log-callback.jsonl"):
        (path / file).unlink()
    assert read(path).source == "steps.jsonl, line"


@pytest.mark.parametrize("config", [{"trl": None}, {"trl": "text"}])
def test_a_record_that_trl_s_callback_did_not_write_is_a_run_of_its_own(tmp_path: Path, config: dict[str, Any]) -> None:
    home(tmp_path / "run", **config)
    assert len(runs_below(tmp_path)) == 3


def test_logs_beside_two_records_are_runs_of_their_own(tmp_path: Path) -> None:
    home(tmp_path)
    write_record(tmp_path / "second", [{"reward/mean": 0.5}], {"trl": {}})
    assert sorted(path.name for path in runs_below(tmp_path)) == ["log-callback.jsonl", "log.jsonl", "record", "second"]


def test_a_damaged_record_leaves_the_logs_to_be_listed(tmp_path: Path) -> None:
    home(tmp_path / "run")
    (tmp_path / "run" / "record" / "run.json").write_text("no json")
    assert len(runs_below(tmp_path)) == 3
    assert Record.open(home(tmp_path / "other") / "record").config["engine"] == "trl"
    assert len(runs_below(tmp_path)) == 4
