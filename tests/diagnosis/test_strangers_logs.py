"""Shapes of logs that strangers published, each in a small log made by hand: what is read of them, and what is told."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from creditscope.diagnosis.log import Log, Series
from creditscope.diagnosis.read import read, runs_below
from creditscope.diagnosis.readers.printed import PrintedSettings
from creditscope.errors import CreditscopeError
from creditscope.runs import schema
from creditscope.runs.record import Record
from diagnosis.makers_doctor import LOGS

RAY = "\x1b[36m(TaskRunner pid=4222)\x1b[0m "
CONFIG = """{'actor_rollout_ref': {'actor': {'clip_ratio': 0.2,
                                 'optim': {'lr': 1e-05, 'betas': [0.9, 0.999]},
                                 'ppo_epochs': 1,
                                 'ppo_mini_batch_size': 8,
                                 'use_kl_loss': False},
                       'rollout': {'n': 1, 'temperature': 1.0}},
 'algorithm': {'adv_estimator': 'grpo',
               'kl_ctrl': {'kl_coef': 0.001, 'type': 'fixed'}},
 'data': {'max_response_length': 128,
          'train_batch_size': 8,
          'val_files': 'a long '
                       'path'},
 'trainer': {'total_training_steps': 700}}
"""
TRL_ROW = {"loss": 0.1, "grad_norm": 0.2, "learning_rate": 1e-6, "reward": 0.5, "reward_std": 0.25, "kl": 0.01}


def verl(step: int, **more: object) -> str:
    values = {"actor/pg_loss": 0.5, "critic/score/mean": 0.25, "actor/grad_norm": 0.1} | more
    return f"step:{step} - " + " - ".join(f"{name}:{value}" for name, value in values.items()) + "\n"


def log_at(tmp_path: Path, text: str, name: str = "train.log", **options: Any) -> Log:
    (tmp_path / name).write_text(text)
    return read(tmp_path / name, **options)


def trl_lines(steps: Sequence[int], **more: object) -> str:
    return "".join(f"{TRL_ROW | {'reward': k / 100, 'step': k} | more}\n" for k in steps)


def series(log: Log, name: str) -> Series:
    found = log.series(name)
    assert found is not None, name
    return found


# -- settings inside a log ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", RAY], ids=["plain", "Ray"])
def test_the_configuration_that_verl_prints_gives_its_settings(tmp_path: Path, prefix: str) -> None:
    printed = "".join(prefix + line for line in CONFIG.splitlines(keepends=True))
    log = log_at(tmp_path, "ray init kwargs: {'num_cpus': 8}\n" + printed + prefix + "loaded\n" + prefix + verl(1))
    assert (log.fact("group"), log.fact("limit"), log.fact("updates")) == (1, 128, 1)
    assert (log.setting("learning_rate"), log.setting("steps")) == (1e-05, 700)
    assert log.word("limit") == "128"
    assert log.settings.given["data"]["val_files"] == "a long path"
    assert "settings as printed inside the log" in log.notes


def test_lines_of_other_processes_between_those_of_the_configuration_are_passed_over(tmp_path: Path) -> None:
    lines = [RAY + line for line in CONFIG.splitlines(keepends=True)]
    lines.insert(3, "\x1b[36m(WorkerDict pid=7)\x1b[0m {'oops': {\n")
    lines[6] = lines[6].rstrip("\n") + "\x1b[36m(WorkerDict pid=7)\x1b[0m '{[( \n"
    log = log_at(tmp_path, "".join(lines) + verl(1))
    assert (log.fact("limit"), log.setting("learning_rate"), log.fact("group")) == (128, 1e-05, 1)


def test_a_configuration_that_lost_a_line_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    lines = [RAY + line for line in CONFIG.splitlines(keepends=True)][:-1]
    log = log_at(tmp_path, "".join(lines) + RAY + "Size of train dataloader: 14\n" + RAY + verl(1))
    assert (log.fact("limit"), log.fact("group")) == (128, 1)


def test_a_configuration_as_yaml_and_overrides_of_a_command_line_are_settings(tmp_path: Path) -> None:
    yaml = "actor_rollout_ref:\n  rollout:\n    n: 5\ndata:\n  max_response_length: 64\n"
    log = log_at(tmp_path, yaml + "starting\n" + verl(1))
    assert (log.fact("group"), log.fact("limit")) == (5, 64)
    command = ("+ python3 -m verl.trainer.main_ppo data.max_response_length=32 +actor_rollout_ref.rollout.n=4 "
               "'trainer.logger=[console,wandb]' actor_rollout_ref.model.path=$HOME/model\n")
    log = log_at(tmp_path, command + "python -m main_ppo data.train_batch_size=$N algorithm.gamma=1\n" + verl(1))
    assert not log.settings.has("data.train_batch_size")
    assert (log.fact("group"), log.fact("limit")) == (4, 32)


@pytest.mark.parametrize("line", [
    "GRPO: num_generations=4, max_steps=75, lr=3e-06, beta=0.04, temperature=1.0\n",
    "+ swift rlhf --rlhf_type grpo --num_generations 4 --max_steps 75 --beta 0.04\n"])
def test_several_settings_of_trl_in_one_line_are_settings(tmp_path: Path, line: str) -> None:
    log = log_at(tmp_path, line + trl_lines(range(3)))
    assert (log.fact("group"), log.fact("beta"), log.setting("steps")) == (4, 0.04, 75)
    usage = "usage: train.py [--num_generations NUM_GENERATIONS] [--beta BETA] [--loss_type LOSS]\n"
    for other in ("num_generations: 4\n", usage, "num_generations = n, beta = args.beta\n"):
        assert log_at(tmp_path, other + trl_lines(range(3))).settings.given == {}


def test_settings_inside_a_log_are_split_into_tokens_and_never_run(tmp_path: Path) -> None:
    hostile = ("{'data': {'max_response_length': __import__('os').system('exit 1'), 'n': 2 ** 99},\n"
               " 'trainer': {'total_epochs': (lambda: 3)(), 'nnodes': 1}}\n")
    log = log_at(tmp_path, hostile + verl(1))
    assert log.settings.given == {"data": {}, "trainer": {"nnodes": 1}}


@pytest.mark.parametrize("text", [
    "{'data': {" * 30_000, "{'data': {'a': '" + "\\'" * 100_000, "{'data': {'" + "[" * 200_000,
    "data:\n" + " a:\n" * 50_000, "GRPOConfig(" + "a=(" * 60_000], ids=range(5))
def test_settings_without_an_end_take_a_moment(text: str) -> None:
    start = time.process_time()
    printed = PrintedSettings()
    for line in text.splitlines(keepends=True):
        printed.see(line)
    printed.see("end\n")
    printed.end()
    assert time.process_time() - start < 2


# -- few digits, units -------------------------------------------------------------------------------------------------


def test_three_decimals_are_an_interval_and_a_repr_is_exact(tmp_path: Path) -> None:
    rows = "".join(verl(k, **{"actor/lr": "0.000", "critic/score/mean": f"{k / 7:.3f}"}) for k in range(1, 6))
    log = log_at(tmp_path, rows)
    assert series(log, "lr").resolution == series(log, schema.REWARD_MEAN).resolution == 0.0005
    assert series(log, "loss").resolution == 0  # 0.5 is a repr: one decimal
    exact = log_at(tmp_path, "".join(verl(k, **{"actor/lr": "0.0", "actor/entropy": "0.25"}) for k in range(1, 6)))
    assert series(exact, "lr").resolution == series(exact, "entropy").resolution == 0


def test_numbers_of_different_lengths_were_not_rounded_to_decimals(tmp_path: Path) -> None:
    log = log_at(tmp_path, verl(1, **{"actor/lr": "0.010"}) + verl(2, **{"actor/lr": "1e-06"}))
    assert series(log, "lr").resolution == 0


def test_a_unit_in_the_name_scales_the_number_and_its_rounding(tmp_path: Path) -> None:
    log = log_at(tmp_path, "".join(verl(k, **{"actor/lr(1e-4)": "0.010"}) for k in range(3)))
    assert series(log, "lr").values == pytest.approx([1e-6] * 3)
    assert series(log, "lr").resolution == pytest.approx(5e-8)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ours"), [
    ("completion_length", schema.LENGTH_MEAN), ("clip_ratio", "clip"), ("response_clip_ratio", "truncated"),
    ("eval_reward", schema.EVAL_REWARD), ("epoch", "epoch"), ("entropy/mean", "entropy")])
def test_names_of_other_versions_of_trl_of_unsloth_and_of_swift_are_known(tmp_path: Path, name: str, ours: str) -> None:
    log = log_at(tmp_path, f"{TRL_ROW | {name: 0.5}}\n")
    assert log.trainer.name == "TRL"
    assert series(log, ours).values == [0.5]


@pytest.mark.parametrize(("name", "ours"), [
    ("actor/entropy_loss", "entropy"), ("critic/kl", "kl"), ("actor/kl_loss", "kl"), ("actor/reward_kl_penalty", "kl"),
    ("actor/ppo_kl", "kl old"), ("critic/rewards/mean", "score with kl"), ("critic/advantages/mean", "advantage"),
    ("training/epoch", "epoch"), ("val-core/gsm8k/acc/mean@8", schema.EVAL_REWARD),
    ("val/test_score/openai/gsm8k", schema.EVAL_REWARD)])
def test_names_of_other_versions_of_verl_are_known(tmp_path: Path, name: str, ours: str) -> None:
    assert series(log_at(tmp_path, verl(1, **{name: 0.5})), ours).values == [0.5]


def test_held_out_values_of_several_sets_are_one_mean_and_the_note_names_them(tmp_path: Path) -> None:
    log = log_at(tmp_path, verl(1, **{"val-core/a/acc/mean@2": 0.25, "val-core/b/acc/mean@2": 0.75,
                                      "val-core/b/acc/best@2/mean": 1.0}))
    assert series(log, schema.EVAL_REWARD).values == [0.5]
    assert "the held-out reward is the mean of val-core/a/acc/mean@2, val-core/b/acc/mean@2" in log.notes


def test_the_columns_of_each_reward_function_of_trl_are_kept(tmp_path: Path) -> None:
    parts = {"rewards/right/mean": 0.25, "rewards/right/std": 0.5, "rewards/form": 1.0}
    [row] = log_at(tmp_path, f"{TRL_ROW | parts}\n").rows
    assert {name: row.values[name] for name in parts} == parts


def test_a_kl_loss_of_verl_proves_the_kl_term_and_its_printed_weight(tmp_path: Path) -> None:
    assert log_at(tmp_path, verl(1)).fact("beta") == 0
    log = log_at(tmp_path, verl(1, **{"actor/kl_loss": 0.1, "actor/kl_coef": 0.02}))
    assert log.fact("beta") == 0.02
    assert not log.settings.assumed
    log = log_at(tmp_path, verl(1, **{"actor/kl_loss": 0.1, "actor/kl_coef": "0.000"}) * 3)
    assert log.fact("beta") == 0.001  # below 0.0005, so not known: the default, which is named
    assert log.settings.assumed


def test_columns_that_the_file_has_are_listed_known_or_not(tmp_path: Path) -> None:
    log = log_at(tmp_path, f"{TRL_ROW | {'my_metric': 3, 'note': 'text', 'timing/gen': 1.0}}\n")
    assert {"reward", "my_metric"} <= set(log.seen)
    assert not {"note", "timing/gen"} & set(log.seen)
    many = {f"m{k}": 1 for k in range(99)}
    assert len(log_at(tmp_path, f"{TRL_ROW | many}\n").seen) == 40


# -- shapes ------------------------------------------------------------------------------------------------------------

HISTORY = [TRL_ROW | {"step": k, "reward": k / 10} for k in range(1, 13)]


@pytest.mark.parametrize("document", [
    HISTORY, {"total_steps": 12, "steps": HISTORY}, {"history": HISTORY}, {"run": {"logs": HISTORY}},
    {"step": list(range(1, 13)), "reward": [k / 10 for k in range(1, 13)], "reward_std": [0.5] * 12}])
def test_arrays_of_rows_objects_that_hold_one_and_columns_are_read(tmp_path: Path, document: Any) -> None:
    log = log_at(tmp_path, json.dumps(document), "training_metrics.json")
    assert [row.step for row in log.rows] == list(range(1, 13))
    assert series(log, schema.REWARD_MEAN).values == [k / 10 for k in range(1, 13)]
    assert read(tmp_path).source == log.source  # alone in its folder


def test_json_lines_in_a_file_named_json_and_after_a_prefix_are_rows(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in HISTORY)
    assert len(log_at(tmp_path, lines, "log.json").rows) == 12
    assert len(log_at(tmp_path, lines.replace('{"loss', 'INFO {"loss')).rows) == 12


def test_a_table_with_tabs_and_megatrons_bars_are_rows(tmp_path: Path) -> None:
    table = "step\treward\treward_std\n" + "".join(f"{k}\t0.5\t0.25\n" for k in range(3))
    assert len(log_at(tmp_path, table, "t.tsv").rows) == 3
    bars = "".join(f"[date] iteration   {k}/ 20 | learning rate: 5.0E-05 | reward: 7.5E-01 | reward_std: 1.0E-01 | "
                   f"grad norm: 0.016 |\n" for k in range(1, 4))
    log = log_at(tmp_path, bars)
    assert [row.step for row in log.rows] == [1, 2, 3]
    assert (series(log, "lr").values[0], series(log, schema.GRAD_NORM).values[0]) == (5e-05, 0.016)


def test_rows_inside_markdown_are_rows(tmp_path: Path) -> None:
    assert len(log_at(tmp_path, "# Run\n```\n" + trl_lines(range(3)) + "```\n", "notes.md").rows) == 3


def test_a_session_that_starts_again_is_another_run_and_the_last_is_read(tmp_path: Path) -> None:
    text = trl_lines(range(1, 15)) + trl_lines(range(1, 13), reward=0.9) + trl_lines(range(1, 4))
    log = log_at(tmp_path, text)
    assert (log.sessions, len(log.rows), series(log, schema.REWARD_MEAN).values[0]) == (3, 12, 0.9)
    assert any("holds 3 sessions" in note and "with 14, 12, 3 rows; session 2 is read" in note for note in log.notes)
    assert len(read(tmp_path / "train.log", session=1).rows) == 14
    with pytest.raises(CreditscopeError, match="session 4 was asked for; the log holds 3"):
        read(tmp_path / "train.log", session=4)


def test_a_resumed_run_is_one_session_without_the_rows_it_repeats(tmp_path: Path) -> None:
    log = log_at(tmp_path, trl_lines(range(1, 9)) + trl_lines(range(6, 12), reward=0.9))
    assert (log.sessions, [row.step for row in log.rows]) == (1, list(range(1, 12)))
    assert series(log, schema.REWARD_MEAN).values[5] == 0.9
    assert "3 rows that a resumed run repeats were left out" in log.notes


def test_steps_that_count_within_an_epoch_are_no_sessions(tmp_path: Path) -> None:
    log = log_at(tmp_path, trl_lines(range(5), epoch=1) + trl_lines(range(5), epoch=2))
    assert (log.sessions, len(log.rows)) == (1, 10)


def test_rows_of_supervised_training_are_left_out(tmp_path: Path) -> None:
    sft = "{'loss': '1.01', 'grad_norm': '0.7', 'entropy': '1.1', 'mean_token_accuracy': '0.75', 'epoch': '0.8'}\n"
    summary = "{'train_runtime': '9', 'train_loss': '0.5', 'epoch': '2'}\n"
    log = log_at(tmp_path, sft * 4 + summary + trl_lines(range(1, 4)) + summary)
    assert len(log.rows) == 3
    assert "4 rows of supervised training, without a reward, were left out" in log.notes
    plain = "{'loss': '1.01', 'learning_rate': '1e-5', 'epoch': '0.8'}\n"
    assert len(log_at(tmp_path, plain * 4 + trl_lines(range(1, 4))).rows) == 3
    with pytest.raises(CreditscopeError, match="supervised training, which has no reward"):
        log_at(tmp_path, sft * 4)


def notebook(*outputs: Any, source: str = "") -> str:
    return json.dumps({"nbformat": 4, "cells": [{"cell_type": "markdown", "source": trl_lines([1])},
                                                {"cell_type": "code", "source": [source], "outputs": list(outputs)}]})


def test_a_notebooks_printed_rows_and_its_source_are_read(tmp_path: Path) -> None:
    stream = {"output_type": "stream", "text": trl_lines(range(1, 4)).splitlines(keepends=True)}
    source = "args = GRPOConfig(\n    beta = 0.04, # don't\n    num_generations = 6,\n    max_steps = n * 2,\n)\n"
    log = log_at(tmp_path, notebook(stream, source=source), "run.ipynb")
    assert [row.step for row in log.rows] == [1, 2, 3]
    assert log.settings.given == {"beta": 0.04, "num_generations": 6}


def test_the_table_that_transformers_shows_in_a_notebook_is_read(tmp_path: Path) -> None:
    html = ("<p>progress</p><table><thead><tr><th>Step</th><th>Training Loss</th><th>reward</th><th>reward_std</th>"
            "</tr></thead><tbody><tr><td>10</td><td>0.100000</td><td>0.250000</td><td>0.5</td></tr>"
            "<tr><td>20</td><td>0.200000</td><td>0.750000</td><td>No Log</td></tr></tbody></table>")
    log = log_at(tmp_path, notebook({"data": {"text/html": [html]}}), "run.ipynb")
    found = [(row.step, row.values["loss"], row.values["reward"]) for row in log.rows]
    assert found == [(10, 0.1, 0.25), (20, 0.2, 0.75)]


@pytest.mark.parametrize("asked", [".", "wandb", "wandb/run-1", "wandb/run-1/files", "wandb/run-1/files/output.log"])
def test_a_folder_of_wandb_is_read_with_its_settings(tmp_path: Path, asked: str) -> None:
    files = tmp_path / "wandb" / "run-1" / "files"
    files.mkdir(parents=True)
    (tmp_path / "wandb" / "latest-run").symlink_to("run-1")
    (files / "output.log").write_text(verl(1))
    (files / "config.yaml").write_text("wandb_version: 1\ndata:\n  value:\n    max_response_length: 77\n")
    assert read(tmp_path / asked).fact("limit") == 77


# -- programs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "name"), [
    ("python open_instruct/grpo_fast.py\n", "open-instruct"),
    ("[RANK 0] trlx starting\n", "trlx"), ("slime/ray/rollout.py:12\n", "slime"),
    ("fps step: 100 fps step and policy inference: 90\n", "rl_games")])
def test_a_program_that_is_not_read_is_named_with_the_columns_to_write(tmp_path: Path, text: str, name: str) -> None:
    with pytest.raises(CreditscopeError, match=f"a log of {name}, which is not read yet; write one JSON object per "
                                               f"step and line with these columns: step, reward, "):
        log_at(tmp_path, text)


@pytest.mark.parametrize(("text", "name"), [
    ("from skyrl_train.trainer import Trainer\n", "SkyRL"), ("INFO nemo_rl.algorithms.grpo: start\n", "NeMo-RL"),
    ("import openrlhf\n", "OpenRLHF"), ("20:00 orchestrator step 3\n", "prime-rl")])
def test_a_log_of_a_program_that_is_read_without_its_reward_names_the_version(tmp_path: Path, text: str,
                                                                              name: str) -> None:
    with pytest.raises(CreditscopeError, match=rf"a log of {name} without a reward that version [\d.]+ writes; "):
        log_at(tmp_path, text)


def test_the_console_of_an_older_prime_rl_is_read(tmp_path: Path) -> None:
    text = "02:33:26 SUCCESS Step {} | Time: 73.77s | Reward: 0.{} | Seq. Length: 345.6 tokens | Async Level: 1\n"
    log = log_at(tmp_path, "".join(text.format(28 + k, 38 + k) for k in range(4)))
    assert (log.trainer.name, series(log, schema.REWARD_MEAN).values) == ("prime-rl", [0.38, 0.39, 0.4, 0.41])
    assert [row.step for row in log.rows] == [28, 29, 30, 31]


def test_rows_of_another_program_with_a_reward_are_read_and_nothing_is_assumed(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"step": k, "lr": 2e-7, "loss": 0.1, "reward_mean": 0.05, "reward_std": 0.09,
                               "clip_frac": 0.007, "kl_divergence": 0.5, "ndcg_mean": 0.1}) + "\n" for k in range(3))
    log = log_at(tmp_path, rows, "own.jsonl")
    assert log.trainer.name == "another program"
    for ours in (schema.REWARD_MEAN, schema.REWARD_STD, "lr", "clip", "kl", "loss"):
        assert len(series(log, ours)) == 3, ours
    assert (log.fact("method"), log.fact("group"), log.fact("updates"), log.fact("beta")) == (None, None, None, None)
    assert not log.settings.assumed
    assert "ndcg_mean" in log.seen


def test_a_file_of_answers_with_rewards_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(CreditscopeError, match="holds no log"):
        log_at(tmp_path, '{"prompt": "2+2", "response": "4", "reward": 1}\n' * 3, "rollouts.jsonl")


# -- what lengths show, and files beside -------------------------------------------------------------------------------


def lengths(values: Sequence[float], cut: float = 0.5) -> str:
    return "".join(f"{TRL_ROW | {'step': k, 'completions/max_length': value, 'completions/clipped_ratio': cut}}\n"
                   for k, value in enumerate(values))


def test_a_longest_answer_that_comes_again_and_again_is_the_limit(tmp_path: Path) -> None:
    log = log_at(tmp_path, lengths([512, 400, 512, 300, 512, 512, 200, 512]))
    assert log.setting("limit") == 512
    assert any("taken as max_completion_length" in note for note in log.notes)
    assert log_at(tmp_path, lengths([512, 400, 512, 300, 512, 512, 200, 511])).setting("limit") is None  # 4 of 8
    assert log_at(tmp_path, lengths([512] * 5 + list(range(100, 112)))).setting("limit") is None  # 5 of 17
    assert log_at(tmp_path, lengths([17] * 9, cut=0.0)).setting("limit") is None  # nothing was cut
    given = log_at(tmp_path, lengths([512] * 9), sets=["max_completion_length=600"])
    assert given.setting("limit") == 600


@pytest.mark.parametrize("name", ["training_args.json", "args.json", "config.yaml"])
def test_a_state_given_by_its_path_finds_the_settings_beside_it(tmp_path: Path, name: str) -> None:
    for state in (tmp_path / "trainer_state.json", tmp_path / "run" / "checkpoint-3" / "trainer_state.json"):
        state.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(LOGS / "trl-dapo" / "trainer_state.json", state)
    for folder in (tmp_path, tmp_path / "run"):
        (folder / name).write_text('{"beta": 0.125, "max_steps": -1}')
    for state in tmp_path.rglob("trainer_state.json"):
        log = read(state)
        assert log.fact("beta") == 0.125
        assert log.setting("steps") == json.loads(state.read_text())["max_steps"]
    bad = tmp_path / name
    bad.write_text("[")
    assert any("settings were not read" in note for note in read(tmp_path / "trainer_state.json").notes)


@pytest.mark.parametrize("inside", [".", "scope/run"])
def test_a_folder_of_trl_with_a_record_inside_is_read_as_both(tmp_path: Path, inside: str) -> None:
    shutil.copy(LOGS / "trl-dapo" / "trainer_state.json", tmp_path)
    config = {"method": "trl_dapo", "engine": "trl", "trainer": "GRPOTrainer", "trl": {"beta": 0.5, "epsilon": 0.3}}
    with Record.create(tmp_path / "new" / inside, config, {}) as record:
        for step in range(14):
            record.append(step, {"signal/dead_groups": step / 100, "reward/mean": 0.5})
    shutil.move(tmp_path / "trainer_state.json", tmp_path / "new")
    log = read(tmp_path / "new")
    assert log.trainer.name == "TRL"
    dead = series(log, schema.SIGNAL_DEAD_GROUPS)
    # Step k of the record is TRL's k + 1.
    assert [(row.step, row.values[dead.name]) for row in dead.rows][:2] == [(1, 0.0), (2, 0.01)]
    assert "grad_norm" in log.rows[0].values
    assert (len(log.rows), log.setting("clip_low"), log.fact("beta")) == (14, 0.3, 0.5)
    assert any("14 steps are joined" in note for note in log.notes)


def test_runs_below_a_folder_are_those_of_every_shape(tmp_path: Path) -> None:
    Record.create(tmp_path / "ours", {}, {}).close()
    for folder in ("trl/checkpoint-1", "trl/checkpoint-2"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "trainer_state.json").write_text("{}")
    (tmp_path / "wandb" / "run-1" / "files").mkdir(parents=True)
    (tmp_path / "wandb" / "run-1" / "files" / "output.log").write_text("")
    (tmp_path / "verl").mkdir()
    for name in ("a.log", "b.jsonl", "requirements.txt"):
        (tmp_path / "verl" / name).write_text("")
    found = [f"{run.relative_to(tmp_path)}" for run in runs_below(tmp_path)]
    assert found == ["ours", "trl", "verl/a.log", "verl/b.jsonl", "wandb/run-1"]


@pytest.mark.slow
def test_three_megabytes_are_read_in_a_moment(tmp_path: Path) -> None:
    talk = "".join(RAY + f"worker {k} loaded {{'a': {k}}} with a line of some length\n" for k in range(20_000))
    wide = {f"timing/m{k}": k / 7 for k in range(60)}
    text = talk + "".join(verl(k, **wide) for k in range(1000))
    assert len(text) > 3e6
    start = time.process_time()
    assert len(log_at(tmp_path, text).rows) == 1000
    assert time.process_time() - start < 2
