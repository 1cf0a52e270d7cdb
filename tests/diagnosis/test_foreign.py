"""Nine more trainers: logs that their own code wrote, told apart, with names and defaults of their own source."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from creditscope.diagnosis.engine import diagnose
from creditscope.diagnosis.read import read
from creditscope.diagnosis.readers.settings import settings_set
from creditscope.diagnosis.trainers import ANOTHER, COMMON, FOREIGN, TRL, Trainer
from creditscope.diagnosis.trainers.trainer import parts
from creditscope.errors import CreditscopeError
from diagnosis.make_trainers.names import names_of, settings_of
from diagnosis.makers_doctor import LOGS
from each import each

STORED = {  # log -> the trainer that wrote it
    "openrlhf": "OpenRLHF", "skyrl": "SkyRL", "areal": "AReaL", "prime_rl": "prime-rl", "nemo_rl": "NeMo-RL",
    "nemo_rl/tensorboard": "NeMo-RL", "swift": "ms-swift", "unsloth": "unsloth", "open_r1": "open-r1",
    "easyr1": "EasyR1", "easyr1-console": "EasyR1", "trl-fall": "TRL", "trl-dapo": "TRL", "trl-twice": "TRL",
    "trl-dpo": "TRL's DPOTrainer",
    "verl-steady": "verl", "verl-collapse": "verl", "ours-fell": "creditscope"}
GOLDEN = json.loads((LOGS / "trainers.json").read_text())
"""Written from the trainers' sources by make_trainers/names.py."""
DRAWN = ("openrlhf", "skyrl", "areal", "prime_rl", "nemo_rl", "nemo_rl/tensorboard", "easyr1")
"""Logs of one and the same drawn batches: make_trainers/draw.py."""


@each("name", STORED)
def test_a_log_is_read_as_that_of_the_trainer_that_wrote_it_and_of_no_other(name: str) -> None:
    log = read(LOGS / name)
    assert log.trainer.name == STORED[name]
    names = frozenset(column for row in log.rows for column in row.values)
    base = {log.trainer.name, log.trainer.through, ANOTHER.name}
    assert {trainer.name for trainer in FOREIGN if trainer.wrote(names)} <= base


def test_every_stored_log_is_listed() -> None:
    assert {folder.name for folder in LOGS.iterdir() if folder.is_dir()} - {name.partition("/")[0] for name in STORED} \
        == {"trl-batch", "trl-batch-dead", "trl-cispo", "trl-never", "trl-short", "trl-wild", "ours-braked",
            "ours-fell-early"}
    assert {trainer.name for trainer in FOREIGN} == set(STORED.values()) - {"creditscope", "TRL's DPOTrainer"}


@each("name", DRAWN)
def test_the_same_batches_are_the_same_numbers_in_every_trainers_log(name: str) -> None:
    log = read(LOGS / name)
    reward, length = log.series("reward/mean"), log.series("length/mean")
    assert reward is not None
    assert length is not None
    # Rewards of 64 answers by step, and their mean length at the first, as draw.py draws them.
    assert reward.values == pytest.approx([26 / 64, 30 / 64, 27 / 64, 24 / 64, 35 / 64, 32 / 64, 33 / 64, 36 / 64,
                                           40 / 64, 37 / 64, 43 / 64, 35 / 64], abs=6e-5)
    assert [row.step for row in reward.rows] == list(range(1, 13))
    assert length.values[0] == pytest.approx(40.6875, abs=6e-4)
    assert diagnose(log).headline.startswith("✓ The reward rose from 0.418")
    held = log.series("eval/reward")
    assert held is None if name in ("areal", "nemo_rl") else held is not None and held.values == pytest.approx(
        [0.46, 0.52])


def test_dead_groups_of_prime_rl_are_those_that_none_and_those_that_all_answers_solve() -> None:
    log = read(LOGS / "prime_rl")
    dead = log.series("dead")
    assert dead is not None
    assert dead.name == "agg/all/solved_none + agg/all/solved_all"
    first = {row.values["agg/all/solved_none"] + row.values["agg/all/solved_all"] for row in log.rows[:1]}
    assert {dead.values[0]} == first


def test_the_answers_length_of_areal_is_the_sequence_less_its_prompt() -> None:
    log = read(LOGS / "areal")
    length = log.series("length/mean")
    assert length is not None
    row = length.rows[0].values
    assert length.values[0] == pytest.approx(row["ppo_actor/seq_len/avg"] - row["ppo_actor/prompt_len/avg"])
    assert row["ppo_actor/prompt_len/avg"] == 20


def test_settings_are_found_where_each_trainer_leaves_them() -> None:
    assert read(LOGS / "openrlhf").fact("updates") == 1  # 16·4/64, from the command line at the top of the log
    assert read(LOGS / "areal").fact("updates") == 1  # config.yaml
    assert read(LOGS / "prime_rl").fact("group") == 4  # configs/orchestrator.json
    assert read(LOGS / "prime_rl").setting("learning_rate") == 1e-6  # configs/trainer.json
    assert read(LOGS / "swift").setting("limit") == 64  # args.json
    for name in ("easyr1", "easyr1-console"):  # experiment_config.json, and YAML at the top of the console
        assert (read(LOGS / name).fact("group"), read(LOGS / name).fact("beta")) == (4, 0.01)
    assert read(LOGS / "open_r1").setting("limit") == 64  # its arguments, printed


def test_settings_of_every_trainer_are_accepted_by_set() -> None:
    for trainer in FOREIGN:
        for path in (*trainer.defaults, *trainer.paths.values()):
            assert settings_set([f"{path}=1"]) == {path: 1}
    assert read(LOGS / "skyrl", sets=["generator.n_samples_per_prompt=4"]).fact("group") == 4


def test_unsloth_and_swift_write_trls_rows_and_more() -> None:
    theirs = read(LOGS / "trl-fall")
    for name in ("swift", "unsloth", "open_r1"):
        log = read(LOGS / name)
        for metric in ("reward/mean", "reward/std", "dead", "entropy", "grad/norm", "truncated"):
            mine, trls = log.series(metric), theirs.series(metric)
            assert mine is not None
            assert trls is not None
            assert mine.values == pytest.approx(trls.values, rel=1e-3, abs=1e-7), (name, metric)
    assert read(LOGS / "unsloth").fact("beta") == 0.0  # its kl is logged at any beta, and proves no term


# -- names and defaults against the sources ----------------------------------------------------------------------------

LOOKED_UP = [trainer for trainer in FOREIGN if trainer.name in GOLDEN]


@pytest.mark.conformance
def test_every_new_trainer_was_looked_up_but_open_r1_whose_names_are_trls() -> None:
    assert {trainer.name for trainer in FOREIGN} - set(GOLDEN) == {"TRL", "verl", "open-r1"}


@pytest.mark.conformance
@pytest.mark.parametrize("trainer", LOOKED_UP, ids=lambda trainer: trainer.name)
def test_every_name_and_setting_of_a_row_is_in_the_trainers_source(trainer: Trainer) -> None:
    held = GOLDEN[trainer.name]
    assert held["version"] == trainer.version
    pieces = {piece for text in names_of(trainer) for _, name in parts(text) for piece in name.split("/")}
    assert pieces - set(held["words"]) == set()
    assert settings_of(trainer) - set(held["settings"]) == set()


@pytest.mark.conformance
@pytest.mark.parametrize("trainer", LOOKED_UP, ids=lambda trainer: trainer.name)
def test_defaults_are_those_of_the_trainers_source(trainer: Trainer) -> None:
    theirs = GOLDEN[trainer.name]["settings"]
    shared: dict[str, Any] = dict(TRL.defaults) if trainer.through == "TRL" else {}
    mine = {path: value for path, value in trainer.defaults.items() if shared.get(path, ...) != value}
    if trainer.name == "ms-swift":
        assert mine.pop("beta") == 0.04  # set after parsing: arguments/rlhf_args.py, _init_grpo
    assert mine == {path: theirs[path] for path in mine}


@pytest.mark.parametrize("trainer", FOREIGN, ids=lambda trainer: trainer.name)
def test_a_trainer_names_each_common_metric_or_says_why_it_has_none(trainer: Trainer) -> None:
    named = {*trainer.metrics, *trainer.aliases, *(["eval/reward"] if trainer.held_out else [])}
    assert set(COMMON) - named == set(trainer.absent), trainer.name
    assert not named & set(trainer.absent)
    assert trainer.rollouts


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_a_block_that_is_cut_off_is_a_shorter_row_and_other_lines_are_no_part_of_it(tmp_path: Path) -> None:
    lines = (LOGS / "skyrl" / "console.log").read_text().splitlines(keepends=True)
    (tmp_path / "a.log").write_text("".join([*lines[:40], "something else\n", *lines[40:-8]]))
    rows = read(tmp_path / "a.log").rows
    assert len(rows) == 12
    assert len(rows[-1].values) < len(rows[0].values)


def test_tensorboards_events_are_read_without_it_and_a_cut_file_keeps_its_whole_records(tmp_path: Path) -> None:
    file = next((LOGS / "nemo_rl" / "tensorboard").iterdir())
    log = read(LOGS / "nemo_rl" / "tensorboard")
    assert {metric for metric in log.trainer.metrics if log.series(metric) is None} == set()
    cut = tmp_path / file.name
    cut.write_bytes(file.read_bytes()[:-7])
    assert "the last record has no end and was left out" in read(cut).notes


@pytest.mark.parametrize("content", [
    b"", b"\0" * 5, b"\xff" * 100, struct.pack("<QI", 2**50, 0) + b"x" * 50, struct.pack("<QI", 30, 0) + b"\x80" * 40,
    struct.pack("<QI", 4, 0) + b"\x2a\xff\xff\xff" + b"0000"])
def test_bytes_that_are_no_events_end_in_a_sentence(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "events.out.tfevents.1.host"
    file.write_bytes(content)
    with pytest.raises(CreditscopeError) as error:
        read(file)
    assert "\n\n" not in str(error.value)


def test_a_nested_row_is_read_to_a_depth_that_is_bounded(tmp_path: Path) -> None:
    row: dict[str, Any] = {"mean": 0.5}
    for _ in range(40):
        row = {"a": row}
    (tmp_path / "a.jsonl").write_text(json.dumps({"step": 1, "actor": {"pg_loss": 0.1, "pg_clipfrac_higher": 0.0},
                                                  "critic": {"score": {"mean": 0.5}}, **row}) + "\n")
    log = read(tmp_path / "a.jsonl")
    assert (log.trainer.name, log.rows[0].values["critic/score/mean"]) == ("EasyR1", 0.5)


def test_a_console_with_reward_in_bars_of_another_program_is_not_taken_for_prime_rls(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("Step 1 | Reward: 0.5 | Loss: 0.1 | LR: 1e-6\n" * 3)
    with pytest.raises(CreditscopeError, match="holds no log of a trainer that is read"):
        read(tmp_path / "a.log")
