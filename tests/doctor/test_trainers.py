"""Names, defaults and meanings are the trainers' own: compared with TRL's code and with logs that both really wrote."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from creditscope.doctor.log import Settings
from creditscope.doctor.read import read
from creditscope.doctor.rules import diagnose
from creditscope.doctor.trainers import FACTS, TRAINERS, TRL, VERL, trl_updates, verl_method
from doctor.make_logs import RUNS, make
from doctor.make_verl_logs import named
from doctor.makers_doctor import LOGS, findings, states


def column(name: str, metric: str) -> list[float]:
    rows = json.loads((LOGS / name / "trainer_state.json").read_text())["log_history"]
    return [row[metric] for row in rows if metric in row]


# -- what the real logs show -------------------------------------------------------------------------------------------


def test_trls_default_cispo_really_has_a_fifth_of_the_gradient() -> None:
    # Same seed, same batch, both token means: at ratio 1 sg[min(ρ, 0.2)]·∇log π = 0.2·∇ρ.
    assert column("trl-cispo", "grad_norm")[0] == pytest.approx(0.2 * column("trl-dapo", "grad_norm")[0], rel=1e-4)
    found = findings("trl-cispo")
    assert found["cispo cap"].state == "broken"
    assert {rule for rule, finding in found.items() if finding.state == "broken"} == {"cispo cap"}


def test_trls_batch_scaling_really_logs_0_where_every_group_is_dead() -> None:
    assert set(column("trl-batch-dead", "frac_reward_zero_std")) == {0.0}
    assert set(column("trl-batch-dead", "grad_norm")) == {0.0}
    found = findings("trl-batch-dead")
    assert found["dead groups"].state == "broken"
    assert "cannot be trusted" in found["dead groups"].sentence
    assert states("trl-batch")["dead groups"] == "watch"


def test_a_healthy_run_has_nothing_broken_and_nothing_to_watch() -> None:
    assert set(states("trl-dapo").values()) == {"fine"}


def test_a_reward_that_cannot_be_had_is_found_from_three_sides() -> None:
    found = states("trl-never")
    assert {rule for rule, state in found.items() if state == "broken"} == {"gradient", "reward", "dead groups"}
    assert findings("trl-never")["loss"].sentence.startswith("The loss is 0, and no measure of progress: with "
                                                             "loss_type=grpo it is 0 at ratio 1")


def test_a_limit_that_cuts_every_answer_is_found_and_its_entropy_is_not_believed() -> None:
    found = findings("trl-short")
    assert found["truncation"].state == "broken"
    assert "max_completion_length" in found["truncation"].change
    assert found["entropy"].state == "unknown"
    assert "max_completion_length" in found["gradient"].change


def test_several_updates_a_batch_really_clip_in_trl() -> None:
    assert max(column("trl-twice", "clip_ratio/region_mean")) > 0.05
    found = findings("trl-twice")
    assert "3 optimiser steps a batch" in found["clip"].sentence
    assert found["KL only"].state == "watch"
    assert "0.04" in found["KL only"].sentence
    # TRL writes rewards once a batch, so a third of the rows have them.
    assert found["saturation"].sentence == "needs at least 10 readings of reward_std; the log has 4"


def test_verls_logs_lead_to_its_own_settings() -> None:
    found = findings("verl-collapse")
    broken = {rule for rule, finding in found.items() if finding.state == "broken"}
    assert broken == {"gradient", "reward", "dead groups", "truncation", "entropy"}
    assert found["truncation"].change == "data.max_response_length (raise it)"
    assert found["clip"].state == "unknown"
    steady = findings("verl-steady")
    assert not [rule for rule, finding in steady.items() if finding.state in ("broken", "watch")]


def test_verls_clip_ratio_is_above_0_though_no_answer_is_cut() -> None:
    series = read(LOGS / "verl-steady").series("truncated")
    assert series is not None
    assert min(series.values) >= 1 / 64  # the longest of 64 answers equals itself
    assert states("verl-steady")["truncation"] == "fine"


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_every_trainer_answers_every_fact_from_its_defaults(trainer: Any) -> None:
    assert set(trainer.facts) == set(FACTS)
    defaults = Settings({}, {}, trainer.defaults)
    for fact in trainer.facts.values():
        fact(defaults)
    assert set(defaults.assumed) <= set(trainer.defaults)


@pytest.mark.parametrize("trainer", [TRL, VERL], ids=lambda trainer: trainer.name)
def test_every_metric_of_a_real_log_that_a_rule_needs_is_found_under_its_name(trainer: Any) -> None:
    logs = [read(folder) for folder in LOGS.iterdir() if folder.is_dir()]
    seen = {name for log in logs if log.trainer is trainer for row in log.rows for name in row.values}
    # A second engine, a KL loss: not in runs on one CPU.
    elsewhere = {"sampler/ratio", "sampler/gap"} | ({"kl"} if trainer is VERL else set())
    assert {metric for metric, name in trainer.metrics.items() if name not in seen} == elsewhere


@pytest.mark.parametrize(("estimator", "mode", "agg", "row", "aggregate"), [
    ("grpo", "vanilla", "token-mean", "verl_grpo", "token_mean"),
    ("grpo", "vanilla", "seq-mean-token-mean", "verl_grpo", "sequence_mean"),
    ("rloo", "vanilla", "token-mean", "verl_rloo", "token_mean"),
    ("gae", "vanilla", "token-mean", "verl_ppo", "token_mean"),
    ("grpo", "gspo", "seq-mean-token-mean", "verl_gspo", "sequence_mean"),
    ("grpo", "geo_mean", "token-mean", "verl_gmpo", "sequence_mean"),
    ("grpo", "cispo", "token-mean", "verl_cispo", "token_mean")])
def test_verls_settings_make_the_row_of_the_table(estimator: str, mode: str, agg: str, row: str,
                                                  aggregate: str) -> None:
    given = {"algorithm": {"adv_estimator": estimator},
             "actor_rollout_ref": {"actor": {"loss_agg_mode": agg, "policy_loss": {"loss_mode": mode}}}}
    found = verl_method(Settings(given, {}, VERL.defaults))
    assert found is not None
    assert (found.name, found.aggregate) == (row, aggregate)


def test_a_verl_loss_without_a_row_has_none() -> None:
    given = {"actor_rollout_ref.actor.policy_loss.loss_mode": "clip_cov", "algorithm.adv_estimator": "grpo"}
    assert verl_method(Settings(given, {}, VERL.defaults)) is None


@pytest.mark.conformance
def test_defaults_and_names_of_settings_are_those_of_verls_configuration() -> None:
    theirs = json.loads((LOGS / "verl-defaults.json").read_text())  # written by verl's own file: make_verl_logs.py
    assert {path: theirs[path] for path in VERL.defaults} == dict(VERL.defaults)
    assert named() <= set(theirs)


# -- TRL's own code ----------------------------------------------------------------------------------------------------


@pytest.mark.conformance
def test_defaults_are_those_of_trls_config() -> None:
    trl = pytest.importorskip("trl")
    theirs = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    assert {name: theirs[name] for name in TRL.defaults} == dict(TRL.defaults)


@pytest.mark.conformance
def test_every_field_that_a_change_of_trl_names_exists() -> None:
    trl = pytest.importorskip("trl")
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    words = {word.strip(",;:.()'") for text in TRL.changes.values() for word in text.split()}
    named = {word.partition("=")[0] for word in words if "=" in word or "_" in word}
    assert named - fields == {"frac_reward_zero_std", "dr_grpo"}  # a metric and a value of loss_type


@pytest.mark.conformance
def test_every_metric_is_written_by_trls_trainer() -> None:
    trl = pytest.importorskip("trl")
    source = inspect.getsource(trl.GRPOTrainer)
    by_transformers = {"loss", "grad_norm", "learning_rate"}
    assert [name for name in TRL.metrics.values() if f'"{name}"' not in source and name not in by_transformers] == []


@pytest.mark.conformance
@pytest.mark.parametrize(("accumulate", "per_generation", "iterations"), [
    (1, None, 1), (4, None, 1), (4, 2, 1), (3, 2, 1), (2, 4, 1), (1, 1, 3), (4, 2, 2)])
def test_one_update_a_batch_is_where_trl_keeps_no_old_log_probs(accumulate: int, per_generation: int | None,
                                                              iterations: int) -> None:
    trl = pytest.importorskip("trl")
    given = {"gradient_accumulation_steps": accumulate, "steps_per_generation": per_generation,
             "num_iterations": iterations, "per_device_train_batch_size": 8}
    args = trl.GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **given)
    # TRL's own condition, in _generate_and_score_completions.
    source = inspect.getsource(trl.GRPOTrainer)
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in source
    assert "if self.args.gradient_accumulation_steps % generate_every != 0" in source
    alone = args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) == 0
    assert (trl_updates(Settings(given, {}, TRL.defaults)) == 1) == alone


@pytest.mark.conformance
def test_settings_that_trl_dumps_as_json_imply_what_was_given(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    given = {"loss_type": "grpo", "num_iterations": 2, "beta": 0.1, "gradient_accumulation_steps": 2,
             "scale_rewards": False}
    args = trl.GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **given)
    shutil.copy(LOGS / "trl-dapo" / "trainer_state.json", tmp_path)
    (tmp_path / "training_args.json").write_text(args.to_json_string())
    log = read(tmp_path)
    for name, fact in TRL.facts.items():
        assert log.fact(name) == fact(Settings(given, {}, TRL.defaults)), name
    assert not log.settings.assumed


@pytest.mark.slow
@pytest.mark.conformance
def test_a_fresh_run_of_trl_is_read_like_the_one_that_was_kept(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    assert set(RUNS) == {folder.name for folder in LOGS.iterdir() if folder.name.startswith("trl-")}
    folder = make("trl-batch-dead", tmp_path, max_steps=5)
    found = {finding.rule: finding for finding in diagnose(read(folder))}
    assert found["dead groups"].state == "broken"
    assert "cannot be trusted" in found["dead groups"].sentence
    assert found["clip"].state == "fine"
