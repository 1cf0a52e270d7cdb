"""Thresholds and remedies: the tables are complete, and advice contradicts neither the settings nor itself."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from typing import Any

import pytest

from creditscope.cli import display
from creditscope.diagnosis import optimizer_verdicts, remedies, rules, signs, spelling, thresholds
from creditscope.diagnosis.engine import diagnose
from creditscope.diagnosis.finding import Finding
from creditscope.diagnosis.log import LogSettings
from creditscope.diagnosis.remedies import REMEDIES, change
from creditscope.diagnosis.rules import QUESTIONS, RULES
from creditscope.diagnosis.thresholds import SENTENCES, THRESHOLDS
from creditscope.diagnosis.trainers import FOREIGN, OPENRLHF, OURS, SCRIPT, SWIFT, TRAINERS, TRL, TRL_DPO, VERL, Trainer
from creditscope.diagnosis.trainers.trainer import SETTINGS, WORDS
from creditscope.report import rewards
from diagnosis import (
    test_rules_contrast,
    test_rules_direction,
    test_rules_excess,
    test_rules_movement,
    test_rules_reward,
)
from diagnosis.makers_doctor import FALLS, FLAT, Case, N, above, below, log_of, steady

CASES: list[Case] = [case for module in (test_rules_reward, test_rules_contrast, test_rules_movement, test_rules_excess,
                                         test_rules_direction) for case in module.CASES]
SPEECH = {"trl", "verl", "creditscope"}
ONE_TRAINER = {"cispo cap": "only TRL clamps CISPO's ratio at epsilon_high itself"}
"""Remedies that not every trainer has -> why."""
VALUE = r"([\w.]+)=('[^']*'|[\w.+-]*\w)"
"""name=value in a remedy's text."""


# -- tables -----------------------------------------------------------------------------------------------------------


def test_every_rule_has_a_log_that_turns_it_on_and_one_that_nearly_does() -> None:
    assert {case.rule for case in CASES} | set(test_rules_movement.NEVER_BAD) == set(RULES)
    assert not {case.rule for case in CASES} & set(test_rules_movement.NEVER_BAD)


def test_every_rule_stands_under_one_question() -> None:
    assert sum(map(len, QUESTIONS.values())) == len(RULES)


def test_every_threshold_is_of_a_rule_and_has_a_reason_and_is_read() -> None:
    folder = [inspect.getsource(module) for module in (rules.reward, rules.contrast, rules.movement, rules.excess,
                                                       rules.direction)]
    folder += [inspect.getsource(module) for module in (signs, optimizer_verdicts, display, rewards)]
    assert not set(SENTENCES) & set(RULES)
    for name, threshold in THRESHOLDS.items():
        assert threshold.rule in (*RULES, *SENTENCES), name
        assert threshold.of, name
        assert threshold.reason.endswith("."), name
        assert any(len(re.findall(rf"\b{name}\b", source)) > 1 for source in folder), f"{name} decides nothing"


def test_a_threshold_is_a_plain_number_in_a_pickle() -> None:
    assert type(pickle.loads(pickle.dumps(thresholds.DEAD_WATCH))) is float


def named_remedies() -> set[str]:
    """Keys of REMEDIES that stand as text in the source of the rules."""
    found: set[str] = set()
    for module in (rules.reward, rules.contrast, rules.movement, rules.excess, rules.direction):
        tree = ast.parse(inspect.getsource(module))
        found |= {node.value for node in ast.walk(tree)
                  if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return found & set(REMEDIES)


def test_every_remedy_is_that_of_a_rule_or_is_asked_for_by_one() -> None:
    assert set(REMEDIES) <= set(RULES) | named_remedies()


def test_every_rule_that_can_be_bad_has_a_remedy() -> None:
    for case in CASES:
        found = finding_of(case)
        assert found.remedy in REMEDIES, case
        assert found.change, case


@pytest.mark.parametrize("key", REMEDIES)
def test_every_remedy_is_spelled_for_every_trainer(key: str) -> None:
    spelled = {speech for speech in SPEECH if getattr(REMEDIES[key], speech)}
    assert spelled == SPEECH or key in ONE_TRAINER
    assert all(change(key, speech) == getattr(REMEDIES[key], speech) for speech in spelled)


@pytest.mark.parametrize("trainer", [*TRAINERS, SCRIPT], ids=lambda trainer: trainer.name)
def test_every_trainer_speaks_a_language_of_the_table(trainer: Trainer) -> None:
    assert trainer.speech in {*SPEECH, "other", "own"}
    assert set(TRL.facts) == set(trainer.facts)


@pytest.mark.parametrize("trainer", FOREIGN, ids=lambda trainer: trainer.name)
def test_every_remedy_is_spelled_in_names_of_the_trainer_or_in_plain_words(trainer: Trainer) -> None:
    known = {*trainer.spelled.values(), *trainer.defaults}
    for key in set(REMEDIES) - set(ONE_TRAINER):
        text = change(key, trainer)
        assert text, key
        assert "{" not in text.replace("\\boxed{}", "").replace("{'dtype': 'float32'}", ""), text
        if trainer.speech == "own" and key not in trainer.remedies:
            others = {path for other in FOREIGN if other is not trainer for path in other.paths.values()
                      if "." in path} - {path for path in known if path} - set(trainer.paths.values())
            named = set(re.findall(r"[a-z_]+(?:\.[a-z_]+)+", text))
            assert not named & others, text


def test_a_template_names_roles_of_the_tables_alone() -> None:
    roles = {role for text in spelling.TEMPLATES.values() for role in re.findall(r"\{(\w+)\}", text)}
    assert roles <= {*SETTINGS, *WORDS}
    assert set(spelling.TEMPLATES) <= set(REMEDIES)
    assert set(WORDS) <= roles
    for trainer in FOREIGN:
        assert set(trainer.words) <= set(WORDS), trainer.name
        assert set(trainer.paths) <= set(SETTINGS), trainer.name
        assert set(trainer.remedies) <= set(REMEDIES), trainer.name


def test_a_change_in_own_names_leaves_out_what_is_so_and_what_the_trainer_has_not() -> None:
    given = LogSettings({"rollout": {"temperature": 1.0, "top_p": 0.2}})
    assert change("cold sampler", OPENRLHF) == "--rollout.temperature=1.0, --rollout.top_p=1.0"  # it has no top_k
    assert change("cold sampler", OPENRLHF, given) == "--rollout.top_p=1.0"
    assert change("one rollout", SWIFT) == "--num_generations=8"


def test_dpo_trainers_have_words_of_their_own_or_those_of_trl() -> None:
    assert change("learning rate", TRL_DPO) == "a larger learning_rate: ×10 (the default of DPOConfig is 1e-6)"
    assert change("epsilon", TRL_DPO) == change("epsilon", TRL)


def settings_named(text: str, trainer: Trainer) -> dict[str, Any]:
    """name=value of the trainer's settings in a text."""
    return {name: ast.literal_eval(value) if re.fullmatch(r"'.*'|[-\d.e+]+|True|False", value) else value
            for name, value in re.findall(VALUE, text)}


# -- no contradiction -------------------------------------------------------------------------------------------------


def finding_of(case: Case, **more: Any) -> Finding:
    log = log_of(case.on, case.trainer, **{**case.given, **more})
    return next(each for each in diagnose(log).findings if each.rule == case.rule)


@pytest.mark.parametrize("case", [case for case in CASES if case.trainer is not OURS], ids=str)
def test_no_finding_tells_to_set_what_is_set(case: Case) -> None:
    """Each setting that a change names is set so; where the finding stands all the same, it names another change."""
    for name, value in settings_named(finding_of(case).change, case.trainer).items():
        found = finding_of(case, **{name: value})
        assert not found.bad or settings_named(found.change, case.trainer).get(name) != value, found.change


RAISES, LOWERS = r"larger (learning_rate|\S+\.optim\.lr|--lr)", r"smaller (learning_rate|\S+\.optim\.lr|--lr)"


@pytest.mark.parametrize("trainer", [TRL, VERL, OURS], ids=lambda trainer: trainer.name)
def test_no_diagnosis_asks_for_a_larger_and_for_a_smaller_learning_rate(trainer: Trainer) -> None:
    still = {"overshoot/kl": steady(below(thresholds.MOVED) / N**2)}
    slow = {"lr": steady(below(thresholds.RATE_SUM) / N)}
    far = {"overshoot/kl": steady(above(thresholds.STEP_BROKEN))}
    for columns in ({**FALLS, **still}, {**FALLS, **slow}, {**FLAT, **slow, **far}):
        asked = " ".join(each.change for each in diagnose(log_of(columns, trainer)).findings if each.bad)
        assert asked
        assert not (re.search(RAISES, asked) and re.search(LOWERS, asked)), asked


def test_a_change_that_waits_for_another_says_for_which() -> None:
    columns = {**FALLS, "overshoot/kl": steady(below(thresholds.MOVED) / N**2)}
    found = {each.rule: each for each in diagnose(log_of(columns)).findings}
    assert found["small steps"].change.startswith("a larger learning_rate")
    assert found["reward trend"].change == "none yet: repair small steps first, then look again"


def test_an_unknown_speech_takes_the_other_words() -> None:
    assert change("step size", "other") == REMEDIES["step size"].other
    assert remedies.change("cispo cap", "verl") == ""


def test_a_change_leaves_out_what_follows_from_the_log_to_be_so() -> None:
    proved = LogSettings({}, {"actor_rollout_ref.actor.use_kl_loss": True}, VERL.defaults)
    assert "use_kl_loss" not in change("reward trend", "verl", proved)
    assert "use_kl_loss" in change("reward trend", "verl", LogSettings({}, {}, VERL.defaults))


@pytest.mark.parametrize("beta", [0.04, 0.5])
def test_a_policy_far_from_its_reference_is_not_told_to_lower_beta(beta: float) -> None:
    for key in ("KL level", "reward trend"):
        assert "beta=" not in change(key, "trl", LogSettings({"beta": beta}))
