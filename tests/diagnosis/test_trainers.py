"""Names, defaults and meanings are the trainers' own: compared with TRL's code and with logs that both really wrote."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from creditscope.diagnosis.engine import diagnose
from creditscope.diagnosis.finding import trend
from creditscope.diagnosis.log import Log, LogSettings
from creditscope.diagnosis.read import read
from creditscope.diagnosis.remedies import REMEDIES
from creditscope.diagnosis.rules import OF_PAIRS, RULES
from creditscope.diagnosis.trainers import (
    FACTS,
    NEMO_RL,
    OPEN_R1,
    OURS,
    SCRIPT,
    SCRIPT_OF_PAIRS,
    SWIFT,
    TRAINERS,
    TRL,
    TRL_DPO,
    UNSLOTH,
    VERL,
)
from creditscope.diagnosis.trainers.trl import trl_updates
from creditscope.diagnosis.trainers.trl_dpo import dpo_method
from creditscope.diagnosis.trainers.verl import verl_method
from creditscope.runs.record import Record
from diagnosis.make_logs import RUNS, make
from diagnosis.make_verl_logs import named
from diagnosis.makers_doctor import LOGS, findings, states
from each import each


def column(name: str, metric: str) -> list[float]:
    rows = json.loads((LOGS / name / "trainer_state.json").read_text())["log_history"]
    return [row[metric] for row in rows if metric in row]


def bad(name: str) -> dict[str, tuple[str, ...]]:
    """The rules that found something in a real log, each with its first cause."""
    return {rule: finding.follows for rule, finding in findings(name).items() if finding.bad}


# -- what the real logs show -------------------------------------------------------------------------------------------


def test_trls_default_cispo_really_has_a_fifth_of_the_gradient() -> None:
    # Same seed, same batch, both token means: at ratio 1 sg[min(ρ, 0.2)]·∇log π = 0.2·∇ρ.
    assert column("trl-cispo", "grad_norm")[0] == pytest.approx(0.2 * column("trl-dapo", "grad_norm")[0], rel=1e-4)
    assert bad("trl-cispo") == {"cispo cap": ()}
    assert "scaled by 0.2" in findings("trl-cispo")["cispo cap"].sentence


def test_trls_batch_scaling_really_logs_0_where_every_group_is_dead() -> None:
    assert set(column("trl-batch-dead", "frac_reward_zero_std")) == {0.0}
    assert set(column("trl-batch-dead", "grad_norm")) == {0.0}
    assert bad("trl-batch-dead") == {"dead groups": (), "gradient": ("dead groups",)}
    found = findings("trl-batch-dead")
    assert "cannot be trusted" in found["dead groups"].sentence
    assert [found[rule].state for rule in ("saturation", "dilution", "KL only")] == ["fine"] * 3


def test_groups_that_are_dead_because_prompts_are_solved_point_to_the_prompts() -> None:
    # 8 of 12 batches have a std of exactly 0, and the mean reward is 0.89 at the end.
    assert bad("trl-batch") == {"gradient": ("too easy",), "too easy": (), "dead groups": ("too easy",)}


@pytest.mark.parametrize("name", ["trl-dapo", "verl-steady"])
def test_a_healthy_run_of_12_steps_has_no_fault_and_is_too_short_to_be_judged(name: str) -> None:
    told = diagnose(read(LOGS / name))
    assert bad(name) == {}
    assert told.headline.startswith("? cannot judge: no gain in 12 steps")


def test_a_reward_that_cannot_be_had_is_found_from_three_sides() -> None:
    cause = ("reward constant",)
    assert bad("trl-never") == {"reward constant": (), "dead groups": cause, "gradient": cause}
    found = findings("trl-never")
    assert "reward function" in found["reward constant"].change
    assert found["loss"].sentence.startswith("The loss is 0, and no measure of progress: with loss_type=grpo it is 0 "
                                             "at ratio 1")


def test_a_limit_that_cuts_every_answer_is_found_and_its_entropy_is_not_believed() -> None:
    found = findings("trl-short")
    assert bad("trl-short") == {"truncation": (), **dict.fromkeys(("reward constant", "dead groups", "gradient"),
                                                                  ("truncation",))}
    assert "max_completion_length" in found["truncation"].change
    assert (found["entropy"].state, found["entropy"].follows) == ("unknown", ("truncation",))


def test_several_updates_per_batch_really_clip_in_trl() -> None:
    assert max(column("trl-twice", "clip_ratio/region_mean")) > 0.05
    found = findings("trl-twice")
    assert "with 3 optimiser steps per batch" in found["updates"].sentence
    assert (found["KL only"].state, "0.04" in found["KL only"].sentence) == ("watch", True)
    # TRL writes rewards once per batch, so a third of the rows have them.
    assert found["saturation"].sentence == "too few readings of frac_reward_zero_std: 4 of the 12 that it needs"


def test_a_run_that_lost_its_reward_at_once_is_told_from_one_that_never_had_any() -> None:
    assert column("trl-twice", "reward") == [0.5, 0.0, 0.0, 0.0]
    found = findings("trl-twice")["reward constant"]
    assert (found.state, "down from 0.5" in found.sentence) == ("watch", True)
    assert "learning_rate" in found.change
    assert "fault of the reward function" in findings("trl-never")["reward constant"].sentence


def test_a_reward_that_really_fell_is_the_first_cause_and_the_learning_rate_is_named() -> None:
    told = diagnose(read(LOGS / "trl-fall"))
    assert {rule for rule, follows in bad("trl-fall").items() if not follows} == {"reward trend"}
    assert told.first is not None
    assert "fell from 0.383 in the first third to 0.203 in the last" in told.first.sentence
    assert told.first.change.startswith("a smaller learning_rate")


def test_answers_that_run_on_to_the_limit_after_a_collapse_are_no_fault_of_the_limit() -> None:
    # At learning rate 1e-3 the reward is gone after three steps, and 98 % of the answers are cut from then on.
    told = diagnose(read(LOGS / "trl-wild"))
    assert told.first is not None
    assert (told.first.rule, "(learning rate 0.001)" in told.first.sentence) == ("step size", True)
    assert {follows for rule, follows in bad("trl-wild").items() if rule != "step size"} == {("step size",)}
    assert findings("trl-short")["truncation"].follows == ()  # there it was cut from the start


@pytest.mark.parametrize("name", ["ours-fell", "ours-fell-early"])
def test_a_run_whose_held_out_accuracy_fell_is_broken_and_its_updates_per_batch_are_named(name: str) -> None:
    told = diagnose(read(LOGS / name))
    assert (told.findings[0].rule, told.findings[0].state) == ("held out", "broken")
    assert told.first is not None
    assert (told.first.rule, "--inner-steps" in told.first.change) == ("updates", True)
    assert {follows for rule, follows in bad(name).items() if rule != "updates"} == {("updates",)}


def test_the_accuracy_tells_a_fall_that_was_over_before_the_first_third_was() -> None:
    # Rewards 0.36 ± 0.05, then 0.29 ± 0.05: not apart. Accuracy 46.6 % before the first step, 26.0 % after the last.
    series = read(LOGS / "ours-fell-early").series("reward/mean")
    assert series is not None
    assert not trend(series).change.excludes_zero
    assert "fell from 46.6% to 26.0%" in findings("ours-fell-early")["held out"].sentence


def test_the_same_run_with_a_brake_learns_and_nothing_is_wrong_with_it() -> None:
    assert bad("ours-braked") == {}
    assert diagnose(read(LOGS / "ours-braked")).headline.startswith("✓ The reward rose from 0.548")
    assert "with 8 optimiser steps per batch" in findings("ours-braked")["updates"].sentence


def test_verls_logs_lead_to_its_own_settings() -> None:
    found = findings("verl-collapse")
    cause = ("truncation",)
    assert bad("verl-collapse") == {"truncation": (), "entropy": (), "reward constant": cause, "dead groups": cause,
                                    "gradient": cause}
    assert found["truncation"].change == "data.max_response_length (raise it)"
    # Every group is dead, though verl counts none: no rule says that it does not know.
    assert [found[rule].state for rule in ("saturation", "dilution", "KL only")] == ["fine"] * 3


def test_verls_clip_ratio_is_above_0_though_no_answer_is_cut() -> None:
    series = read(LOGS / "verl-steady").series("truncated")
    assert series is not None
    assert min(series.values) >= 1 / 64  # the longest of 64 answers equals itself
    assert states("verl-steady")["truncation"] == "fine"


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", [*TRAINERS, SCRIPT, SCRIPT_OF_PAIRS], ids=lambda trainer: trainer.name)
def test_every_trainer_answers_every_fact_from_its_defaults(trainer: Any) -> None:
    assert set(trainer.facts) == set(FACTS)
    defaults = LogSettings({}, {}, trainer.defaults)
    for fact in trainer.facts.values():
        fact(defaults)
    assert set(defaults.assumed) <= set(trainer.defaults)


def written(path: Path, **config: Any) -> Log:
    """A record as TRL's callback writes it: rewards at every step, credit at the first."""
    line = {"reward/mean": 0.5, "reward/std": 0.4, "signal/dead_groups": 0.6, "length/truncated": 0.95}
    given = {"method": "trl_dapo", "inner_steps": 2, "engine": "trl", "trainer": "GRPOTrainer"} | config
    with Record.create(path, given, {}) as record:
        for step in range(12):
            record.append(step, line | ({"credit/dead_groups": 0.1, "overshoot/past": 0.3} if step == 0 else {}))
    return read(path)


def test_a_record_of_trls_callback_counts_dead_groups_at_every_step_and_names_trls_settings(tmp_path: Path) -> None:
    found = findings(written(tmp_path / "run"))
    assert found["dead groups"].evidence[0].startswith(
        "steps.jsonl, line 8–12 (step 7–11 of the record): signal/dead_groups 0.6")
    assert {rule: found[rule].state for rule in ("saturation", "dilution")} == {"saturation": "fine",
                                                                                "dilution": "watch"}
    assert found["truncation"].change == "max_completion_length (raise it)"
    # The microscope looked at one of the steps.
    assert (found["updates"].lacks, found["updates"].settles) == ((1, 2), "more steps, or readings at more of them")
    assert not [each for each in found.values() if "--" in each.sentence + each.change + each.why]


def test_a_record_of_trls_callback_tells_what_trl_was_set_to(tmp_path: Path) -> None:
    trl = {"loss_type": "cispo", "epsilon": 0.2, "epsilon_high": None, "mask_truncated_completions": True}
    log = written(tmp_path / "run", method="trl_cispo", trl=trl)
    assert (log.fact("ceiling"), log.fact("masked"), log.fact("sampler")) == (0.2, True, False)
    assert "epsilon_high=5.0" in findings(log)["cispo cap"].change
    assert written(tmp_path / "odd", trl="text").fact("ceiling") is None


def test_the_command_with_trls_loop_has_its_own_flags_and_token_credit_its_own_count(tmp_path: Path) -> None:
    ours = written(tmp_path / "ours", trainer=None)
    assert (ours.trainer.speech, written(tmp_path / "theirs").trainer.speech) == ("creditscope", "trl")
    assert ours.trainer.metrics["dead"] == "signal/dead_groups"
    by_token = written(tmp_path / "token", credit="step_reward")
    assert by_token.trainer.metrics["dead"] == "credit/dead_groups"
    assert written(tmp_path / "plain", engine="lab").trainer is OURS


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_every_metric_of_a_real_log_that_a_rule_needs_is_found_under_its_name(trainer: Any) -> None:
    logs = [read(folder) for folder in LOGS.iterdir() if folder.is_dir()]
    seen = {name for log in logs if log.trainer is trainer for row in log.rows for name in row.values}
    # A second engine, a KL loss: not in runs on one CPU. Those of NeMo-RL are in its TensorBoard file: test_foreign.py.
    sampler = {"sampler/ratio", "sampler/gap"}
    elsewhere = {TRL.name: sampler, VERL.name: {*sampler, "kl"}, SWIFT.name: {"cispo", "kl"},
                 UNSLOTH.name: {*sampler, "cispo"}, OPEN_R1.name: {*sampler, "cispo", "kl"},
                 NEMO_RL.name: set(NEMO_RL.metrics)}  # the console has names of its own
    assert {metric for metric, name in trainer.metrics.items() if name not in seen} == \
        elsewhere.get(trainer.name, set())


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
    found = verl_method(LogSettings(given, {}, VERL.defaults))
    assert found is not None
    assert (found.name, found.aggregate) == (row, aggregate)


def test_a_verl_loss_without_a_row_has_none() -> None:
    given = {"actor_rollout_ref.actor.policy_loss.loss_mode": "clip_cov", "algorithm.adv_estimator": "grpo"}
    assert verl_method(LogSettings(given, {}, VERL.defaults)) is None


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
    words = {word.strip(",;:.()'") for remedy in REMEDIES.values() for word in remedy.trl.split()}
    named = {word.partition("=")[0] for word in words if "=" in word or "_" in word}
    # A metric, a value of loss_type, an argument of the trainer, an attribute of weights, parts of a batch, and our
    # callback's line.
    assert named - fields == {"frac_reward_zero_std", "dr_grpo", "train_dataset", "requires_grad", "out",
                              "completion_mask", "tool_mask",
                              "trainer.add_callback(ScopeCallback(trainer"}


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
    assert (trl_updates(LogSettings(given, {}, TRL.defaults)) == 1) == alone


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
        assert log.fact(name) == fact(LogSettings(given, {}, TRL.defaults)), name
    assert not log.settings.assumed


@pytest.mark.nightly
@pytest.mark.conformance
def test_a_fresh_run_of_trl_is_read_like_the_one_that_was_kept(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    assert set(RUNS) == {folder.name for folder in LOGS.iterdir() if folder.name.startswith("trl-")}
    folder = make("trl-batch-dead", tmp_path, max_steps=5)
    found = findings(read(folder))
    assert found["dead groups"].state == "broken"
    assert "cannot be trusted" in found["dead groups"].sentence
    assert found["clip"].state == "fine"


# -- DPOTrainer --------------------------------------------------------------------------------------------------------


def test_a_log_of_dpo_is_judged_by_its_margin_and_rules_on_sampled_answers_are_not_in_play() -> None:
    log, found = read(LOGS / "trl-dpo"), findings("trl-dpo")
    assert log.trainer is TRL_DPO
    assert bad("trl-dpo") == {}
    assert diagnose(log).headline.startswith("✓ The margin rose from ")
    assert {rule for rule, each in found.items() if "preference pairs are given" in each.sentence} == \
        set(RULES) - OF_PAIRS
    row = log.fact("method")
    assert (row.name, row.beta, row.linked) == ("trl_dpo", 0.1, True)


def test_the_record_of_a_dpo_trainer_is_judged_alike_and_a_margin_that_fell_is_a_fault(tmp_path: Path) -> None:
    given = {"engine": "trl", "trainer": "Mine", "data": "pairs", "method": "trl_dpo",
             "trl": {"loss_type": ["robust"], "label_smoothing": 0.2, "beta": 0.5}}
    with Record.create(tmp_path / "run", given, {}) as record:
        for step in range(30):
            record.append(step, {"pairs/margin": 1.0 - step / 30, "grad/norm": 1.0, "optimizer/lr": 1e-6})
    log = read(tmp_path / "run")
    assert {each.rule: each.state for each in diagnose(log).findings if each.bad} == {"reward trend": "watch"}
    assert "The margin fell" in findings(log)["reward trend"].sentence
    assert findings(log)["reward trend"].change == \
        "a smaller learning_rate, or a larger beta; if only the pairs got harder, nothing"
    row = log.fact("method")
    assert (row.name, row.beta, row.flip) == ("trl_dpo_robust", 0.5, 0.2)


@each(("given", "name"), [
    ({}, "trl_dpo"), ({"loss_type": "ipo"}, "trl_ipo"), ({"loss_type": ["sft", "hinge"]}, "trl_dpo_hinge"),
    ({"loss_type": ["exo_pair"]}, None), ({"ld_alpha": 0.5}, None), ({"f_divergence_type": "js_divergence"}, None),
    ({"use_weighting": True}, None), ({"loss_type": ["sigmoid"], "loss_weights": "many"}, None)])
def test_dpos_settings_make_the_row_of_the_table(given: dict[str, Any], name: str | None) -> None:
    row = dpo_method(LogSettings(given, {}, TRL_DPO.defaults))
    assert (row and row.name) == name


@pytest.mark.conformance
def test_names_and_defaults_of_dpo_are_trls() -> None:
    trl = pytest.importorskip("trl")
    args = trl.DPOConfig(output_dir="unused", use_cpu=True, bf16=False)
    assert {name: getattr(args, name) for name in TRL_DPO.defaults} == dict(TRL_DPO.defaults)
    source = inspect.getsource(trl.DPOTrainer)
    unwritten = {name for name in TRL_DPO.metrics.values() if f'"{name}"' not in source}
    assert unwritten == {"loss", "grad_norm", "learning_rate"}  # by transformers
    fields = {field.name for field in dataclasses.fields(trl.DPOConfig)}
    words = {word.strip(",;:.()'") for rule in OF_PAIRS if rule in REMEDIES
             for word in TRL_DPO.remedies.get(rule, REMEDIES[rule].trl).split()}
    named = {word.partition("=")[0] for word in words if "=" in word or "_" in word}
    assert named - fields == {"requires_grad", "out", "trainer.add_callback(ScopeCallback(trainer"}
