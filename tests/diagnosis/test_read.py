"""Every shape of a log gives the same numbers, and a hostile one gives a sentence."""

from __future__ import annotations

import csv
import json
import os
import pickle
import resource
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from creditscope.diagnosis.engine import diagnose
from creditscope.diagnosis.read import read
from creditscope.diagnosis.readers import folders
from creditscope.diagnosis.readers import rows as row_limits
from creditscope.diagnosis.readers import text as texts
from creditscope.errors import CreditscopeError
from creditscope.runs.record import Record
from diagnosis.makers_doctor import LOGS, states

TRL_LINE = "{'loss': '0', 'reward': '0.5', 'reward_std': '0.5', 'frac_reward_zero_std': '0.25'}\n"
VERL_LINE = "step:1 - actor/pg_loss:0.5 - critic/score/mean:np.float64(0.25) - actor/grad_norm:nan\n"
PIECES = [TRL_LINE.encode(), VERL_LINE.encode(), b'{"reward_std": NaN, "step": -1}\n', b"1,2,3\n", b'"', b"\r", b"\x00",
          b"{'reward_std': '1e999', 'step': 'x'}\n", b'"frac_reward_zero_std","reward_std"\n']


def history() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((LOGS / "trl-dapo" / "trainer_state.json").read_text())["log_history"]
    return rows


def dead(path: Path) -> list[tuple[int | None, float]]:
    series = read(path).series("dead")
    assert series is not None
    return [(row.step, value) for row, value in zip(series.rows, series.values, strict=True)]


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_state_jsonl_table_and_printed_lines_of_one_run_say_the_same(tmp_path: Path) -> None:
    rows = history()
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (tmp_path / "wandb.csv").open("w", newline="") as out:
        names = sorted({f"train/{name}" for row in rows for name in row if name != "step"})
        table = csv.DictWriter(out, ["Step", *(f"my - run - {name}" for name in names)])
        table.writeheader()
        for row in rows:
            table.writerow({"Step": row["step"]} | {f"my - run - train/{k}": v for k, v in row.items() if k != "step"})
    state = dead(LOGS / "trl-dapo")
    assert len(state) == 12
    assert dead(tmp_path / "run.jsonl") == state
    assert dead(tmp_path / "wandb.csv") == state
    printed = dead(LOGS / "trl-dapo" / "train.log")
    assert [value for _, value in printed] == [value for _, value in state]
    assert {step for step, _ in printed} == {None}  # TRL prints no step


@pytest.mark.parametrize("name", ["trl-dapo", "trl-never", "trl-batch", "trl-batch-dead", "trl-cispo", "trl-short"])
def test_what_trl_printed_leads_to_the_findings_of_its_state(name: str) -> None:
    config = LOGS / name / "training_args.json"
    printed = {f.rule: f.state for f in diagnose(read(LOGS / name / "train.log", config)).findings}
    assert printed == states(name)


def test_verls_console_and_file_loggers_say_the_same(tmp_path: Path) -> None:
    log = read(LOGS / "verl-steady" / "console.log")
    assert [row.step for row in log.rows] == list(range(1, 13))
    file = tmp_path / "file.jsonl"
    file.write_text("".join(json.dumps({"step": row.step, "data": dict(row.values)}) + "\n" for row in log.rows))
    assert [(row.step, row.values) for row in read(file).rows] == [(row.step, row.values) for row in log.rows]


def test_numpy_scalars_and_nan_of_verls_lines_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "verl.log"
    file.write_text(VERL_LINE)
    (row,) = read(file).rows
    assert row.values["critic/score/mean"] == 0.25
    assert row.values["actor/grad_norm"] != row.values["actor/grad_norm"]


def test_a_record_is_read_with_its_settings_and_its_absent_numbers(tmp_path: Path) -> None:
    config = {"method": "grpo", "inner_steps": 2, "minibatches": 1, "group": 4}
    with Record.create(tmp_path / "run", config, {}) as record:
        for step in range(5):
            norm = float("nan") if step == 3 else 0.1
            record.append(step, {"credit/dead_groups": 0.5, "grad/norm": norm, "reward/mean": 0.5})
    log = read(tmp_path / "run")
    assert log.trainer.name == "creditscope"
    assert log.fact("updates") == 2
    found = {finding.rule: finding for finding in diagnose(log).findings}
    assert found["gradient"].state == "broken"
    assert any("steps.jsonl, line 4 (step 3 of the record)" in line for line in found["gradient"].evidence)


def test_a_record_whose_absent_numbers_are_no_numbers_is_read_all_the_same(tmp_path: Path) -> None:
    with Record.create(tmp_path / "run", {}, {}) as record:
        record.append(0, {"credit/dead_groups": 0.5})
    with (tmp_path / "run" / "steps.jsonl").open("a") as out:
        out.write('{"step": 1, "absent": 3, "credit/dead_groups": 1}\n')
    assert dead(tmp_path / "run") == [(0, 0.5), (1, 1.0)]


def test_of_several_checkpoints_the_latest_is_read_by_number(tmp_path: Path) -> None:
    for step in (500, 1000):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        rows = [row | {"frac_reward_zero_std": step / 1000} for row in history()]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    assert {value for _, value in dead(tmp_path)} == {1.0}


def test_a_folder_with_one_log_is_read_and_one_with_several_asks(tmp_path: Path) -> None:
    shutil.copy(LOGS / "trl-dapo" / "train.log", tmp_path / "a.log")
    assert len(dead(tmp_path)) == 12
    (tmp_path / "b.log").write_text("")
    with pytest.raises(CreditscopeError, match=r"holds 2 logs: a\.log, b\.log; name one, as in .*/a\.log"):
        read(tmp_path)


def test_a_folder_of_runs_names_them_and_counts_checkpoints_as_their_run(tmp_path: Path) -> None:
    for name in ("r8/seed-0", "r8/seed-1"):
        Record.create(tmp_path / name, {}, {}).close()
    for step in (1, 2):
        (tmp_path / "trl" / f"checkpoint-{step}").mkdir(parents=True)
        shutil.copy(LOGS / "trl-dapo" / "trainer_state.json", tmp_path / "trl" / f"checkpoint-{step}")
    (tmp_path / "sweep.log").write_text("a sweep's own talk\n")
    with pytest.raises(CreditscopeError, match=r"holds 3 runs: r8/seed-0, r8/seed-1, trl; name one, as in creditscope "
                                               r"doctor .*/r8/seed-0$"):
        read(tmp_path)
    with pytest.raises(CreditscopeError, match=r"holds 2 runs: seed-0, seed-1;"):
        read(tmp_path / "r8")


def test_of_many_runs_some_are_named_and_of_many_folders_some_are_looked_into(tmp_path: Path,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    for k in range(folders.NAMED + 2):
        Record.create(tmp_path / f"seed-{k:02}", {}, {}).close()
    with pytest.raises(CreditscopeError, match=r"holds 10 runs: seed-00, .*, seed-07 and 2 more;"):
        read(tmp_path)
    monkeypatch.setattr(folders, "MAX_FOLDERS", 3)  # the folder itself and two of those in it
    with pytest.raises(CreditscopeError, match=r"holds 2 runs: seed-00, seed-01;"):
        read(tmp_path)


def test_a_folder_with_neither_run_nor_log_says_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "table.md").write_text("| a |\n")
    with pytest.raises(CreditscopeError, match=r"holds neither a run nor a log; expected one of"):
        read(tmp_path)


def test_a_run_without_a_step_is_told_so(tmp_path: Path) -> None:
    Record.create(tmp_path / "run", {}, {}).close()
    with pytest.raises(CreditscopeError, match="has no step yet"):
        read(tmp_path / "run")
    (tmp_path / "run" / "steps.jsonl").unlink()
    with pytest.raises(CreditscopeError, match="has no step yet"):
        read(tmp_path / "run")


def test_progress_bars_talk_and_evaluations_are_no_rows(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_text("Loading {'weights': 1}\n  8%|█ | 1/12 [00:01<00:11]\r" + TRL_LINE
                    + "{'eval_reward': '0.9', 'eval_frac_reward_zero_std': '1'}\n{'train_runtime': '9.5'}\n")
    assert dead(file) == [(None, 0.25)]


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_come_from_the_folder_from_config_and_from_set_in_that_order(tmp_path: Path) -> None:
    folder = shutil.copytree(LOGS / "trl-dapo", tmp_path / "run")
    assert read(folder).settings.get("loss_type") == "dapo"
    other = tmp_path / "grpo.yaml"
    other.write_text("loss_type: grpo\nbeta: 1e-3\n")
    log = read(folder, other, ["num_iterations=3"])
    assert (log.settings.get("loss_type"), log.settings.number("beta"), log.fact("updates")) == ("grpo", 0.001, 3)
    assert read(folder, other, ["loss_type=bnpo"]).settings.get("loss_type") == "bnpo"


def test_wandbs_wrapped_settings_are_unwrapped(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("wandb_version: 1\nloss_type:\n  desc: null\n  value: grpo\nnum_iterations:\n  value: 2\n")
    log = read(LOGS / "trl-dapo", file)
    assert (log.settings.get("loss_type"), log.fact("updates")) == ("grpo", 2)


def alone(name: str, folder: Path) -> Path:
    """What TRL printed, without the settings beside it."""
    return shutil.copy(LOGS / name / "train.log", folder / f"{name}.log")


def test_settings_beside_a_log_are_read_and_named(tmp_path: Path) -> None:
    file = alone("trl-twice", tmp_path)
    assert read(file).settings.given == {}
    (tmp_path / "config.yaml").write_text("beta: 0.5")  # may be of anything
    assert read(file).settings.given == {}
    (tmp_path / "training_args.json").write_text('{"beta": 0.25}')
    log = read(file)
    assert log.fact("beta") == 0.25
    assert "settings from training_args.json" in log.notes


def test_a_log_gives_away_its_loss_its_kl_and_its_sampler(tmp_path: Path) -> None:
    log = read(alone("trl-cispo", tmp_path))
    assert log.fact("ceiling") == 0.2
    assert "loss_type" not in log.settings.assumed
    assert read(alone("trl-twice", tmp_path)).fact("beta") is None
    file = tmp_path / "vllm.log"
    file.write_text(TRL_LINE.replace("}", ", 'sampling/sampling_logp_difference/mean': '0.01'}"))
    assert read(file).fact("sampler") is True


def test_settings_of_another_run_are_noticed() -> None:
    notes = read(LOGS / "trl-cispo" / "train.log", sets=["loss_type=grpo"]).notes
    assert any("are they of the same run?" in note for note in notes)


def test_hydras_config_is_read_by_path_and_unresolved_values_are_not_values() -> None:
    log = read(LOGS / "verl-collapse")
    assert (log.fact("updates"), log.fact("limit"), log.fact("group")) == (2, 64, 4)
    log.settings.given["data"]["max_response_length"] = "${oc.env:LIMIT}"
    assert log.fact("limit") == 512
    assert log.settings.assumed["data.max_response_length"] == 512


def test_a_setting_that_no_rule_reads_is_refused() -> None:
    with pytest.raises(CreditscopeError, match="no rule reads this setting"):
        read(LOGS / "trl-dapo", sets=["los_type=grpo"])
    with pytest.raises(CreditscopeError, match="is not NAME=VALUE"):
        read(LOGS / "trl-dapo", sets=["loss_type"])


@pytest.mark.parametrize("text", ["beta=many", "num_iterations=[1]", "beta=inf", "mask_truncated_completions=7"])
def test_a_setting_of_the_wrong_kind_is_named(text: str) -> None:
    with pytest.raises(CreditscopeError, match=f"{text.partition('=')[0]} is .*repair it"):
        diagnose(read(LOGS / "trl-short", sets=[text]))


# -- hostile files -----------------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def test_pickled_arguments_are_never_opened(tmp_path: Path) -> None:
    shutil.copy(LOGS / "trl-dapo" / "trainer_state.json", tmp_path)
    (tmp_path / "training_args.bin").write_bytes(pickle.dumps(Bomb()))
    log = read(tmp_path)
    assert any("not opened" in note for note in log.notes)
    assert log.settings.given == {}
    with pytest.raises(CreditscopeError, match="pickles are never loaded"):
        read(tmp_path / "training_args.bin")


def test_what_never_ends_is_not_read() -> None:
    with pytest.raises(CreditscopeError, match="neither a file nor a folder"):
        read("/dev/zero")
    with pytest.raises(CreditscopeError, match="no such file or folder: nowhere"):
        read("nowhere")


@pytest.mark.parametrize("text", [
    b"", b"\n\n", b"hello\n", b"\x00" * 5000, b"\xff\xfe\x00{'reward_std': 1", b"{'", b"{}", b"step:1 - ",
    b"[" * 100_000, b'{"a":' * 20_000 + b"\n", b"{'loss': '0.1'}\n"])
def test_what_is_no_log_ends_in_a_sentence_that_shows_the_three_shapes(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "odd.log"
    file.write_bytes(text)
    with pytest.raises(CreditscopeError, match=r"(?s)expected one of.*a folder.*a log.*a table"):
        read(file)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"log_history": 3}', "[" * 100_000,
                                  '{"log_history": [3, null]}'])
def test_a_broken_state_ends_in_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(CreditscopeError):
        read(tmp_path)


def test_a_line_that_was_torn_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    file = tmp_path / "verl.log"
    file.write_text(VERL_LINE + "step:2 - actor/pg_loss:0.123")
    log = read(file)
    assert len(log.rows) == 1
    assert "line 2, the last, has no end and was left out" in log.notes


def test_a_closed_last_line_without_a_newline_is_a_row(tmp_path: Path) -> None:
    file = tmp_path / "trl.log"
    file.write_text(TRL_LINE.rstrip("\n"))
    assert len(read(file).rows) == 1


@pytest.mark.slow
def test_a_line_without_end_is_passed_over_in_bounded_memory(tmp_path: Path) -> None:
    file = tmp_path / "huge.log"
    with file.open("wb") as out:
        out.write(TRL_LINE.encode())
        for _ in range(300):
            out.write(b"{'" + b"x" * (2**20 - 2))
        out.write(b"\n" + TRL_LINE.encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    log = read(file)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert [row.place for row in log.rows] == [1, 3]
    assert any("1 lines longer than" in note for note in log.notes)
    assert grown < 50, f"{grown:.0f} MB for a line of 300 MB"


def test_of_too_many_rows_the_start_and_the_end_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with a long run shows at its end: a log cut after its first rows would not tell."""
    monkeypatch.setattr(row_limits, "MAX_ROWS", 4)
    file = tmp_path / "long.log"
    file.write_text(TRL_LINE * 4)
    assert [row.place for row in read(file).rows] == [1, 2, 3, 4]
    assert not any("left out" in note for note in read(file).notes)
    file.write_text(TRL_LINE * 9)
    log = read(file)
    assert [row.place for row in log.rows] == [1, 2, 8, 9]
    assert "5 rows in the middle were left out: the first and the last 2 were read" in log.notes


def test_a_document_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_DOCUMENT", 100)
    shutil.copy(LOGS / "trl-dapo" / "trainer_state.json", tmp_path)
    with pytest.raises(CreditscopeError, match=r"larger than the 100 bytes.*; give a log with one row per line"):
        read(tmp_path)


@pytest.mark.parametrize(("text", "why"), [
    ("a: &a [1]\nb: *a\n", "uses aliases"), ("!!python/object/apply:os.system ['exit 1']", "tags"),
    ("- 1", "no settings"), ("a: [", "not YAML"), ("[" * 50_000, "nested too deep"), ("", "no settings"),
    ("a: \x00", "not YAML"), ("a: 2020-99-99", "not YAML"),
    ("a: " + "1:" * 30 + "1", "many parts between colons")])
def test_hostile_yaml_is_refused_in_a_sentence(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(CreditscopeError, match=why):
        read(LOGS / "trl-dapo", file)


def test_numbers_beyond_all_bounds_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text('{"step": 1e400, "reward_std": 1, "loss": ' + "9" * 400 + ', "grad_norm": [1], "kl": true}\n'
                    + '{"reward_std": ' + "9" * 10_000 + "}\n")
    log = read(file)
    assert [(row.step, row.values) for row in log.rows] == [(None, {"reward_std": 1.0})]
    diagnose(log)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.lists(st.one_of(st.binary(max_size=80), st.sampled_from(PIECES)), max_size=12),
       suffix=st.sampled_from([".log", ".csv", ".tsv", ".jsonl", ".json", ".ipynb"]))
def test_no_file_makes_the_doctor_fall(tmp_path: Path, data: list[bytes], suffix: str) -> None:
    file = tmp_path / f"any{suffix}"
    file.write_bytes(b"".join(data))
    try:
        found = diagnose(read(file)).findings
    except CreditscopeError:
        return
    json.dumps([asdict(finding) for finding in found], allow_nan=False)
