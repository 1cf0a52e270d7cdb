"""Records of preference methods: β is a factor on scores, ties may have a w, and held-out accuracy counts."""

from __future__ import annotations

import pytest

from creditscope.diagnosis.engine import diagnose
from creditscope.diagnosis.trainers import OURS
from creditscope.diagnosis.trainers.own import OURS_OF_PAIRS
from creditscope.methods.table import METHODS
from diagnosis.makers_doctor import FLAT, RISES, Case, findings, halves, log_of, steady

MARGIN = {name: list(values) for name, values in RISES.items() if name == "reward/mean"}
EVALUATED = {"eval": [0.47, 0.14], "eval/low": [0.40, 0.10], "eval/high": [0.54, 0.20]}


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.linked])
def test_the_beta_of_a_preference_method_is_no_weight_of_a_kl_term(name: str) -> None:
    log = log_of({**FLAT, "dead": steady(0.5)}, OURS, method=name, beta=2.0)
    assert log.fact("beta") == 0
    found = findings(log)
    assert (found["KL pull"].state, found["KL only"].state) == ("fine", "fine")
    assert found["KL only"].sentence == "There is no KL term in the loss: dead groups have no gradient"


def test_a_kl_term_beside_it_keeps_its_weight() -> None:
    """The same log of GRPO, whose β is the weight of its KL term: broken at 2, of a reward that stays."""
    log = log_of({**FLAT, "dead": steady(0.5)}, OURS, method="grpo", beta=2.0)
    assert log.fact("beta") == 2
    assert (findings(log)["KL pull"].state, findings(log)["KL only"].state) == ("broken", "watch")


def test_held_out_accuracy_that_falls_while_the_margin_rises_is_broken() -> None:
    Case(rule="held out", what="pairs", trainer=OURS_OF_PAIRS, on={**MARGIN, **EVALUATED},
         off={"eval/high": [0.54, 0.41]}).check()
    found = findings(log_of({**MARGIN, **EVALUATED}, OURS_OF_PAIRS))["held out"]
    assert found.sentence == ("Held-out accuracy fell from 47.0% to 14.0% while the training margin rose: what the "
                              "pairs prefer is not what was meant")
    assert found.change.startswith("the pairs: read some of --pairs")


def test_held_out_accuracy_falls_because_both_answers_of_a_pair_lose_probability() -> None:
    # The reward of the chosen answers falls by 4 in the middle, the margin grows by less than 1.
    evaluated = {name: halves(*values) for name, values in EVALUATED.items()}
    columns = {**MARGIN, **evaluated, "pairs/margin": MARGIN["reward/mean"], "pairs/chosen_reward": halves(0.0, -4.0)}
    said = diagnose(log_of(columns, OURS_OF_PAIRS)).headline
    assert said.startswith("✗ displacement: ")
    assert "This explains: held out" in said


def test_a_margin_is_not_compared_with_a_held_out_reward() -> None:
    """Margins of 4 and held-out rewards of 0 are no gap; without intervals of an accuracy nothing is said."""
    columns = {"reward/mean": halves(0.0, 4.0), "eval/reward": steady(0.0)}
    assert findings(log_of(columns, OURS_OF_PAIRS))["held out"].state == "unknown"


def test_a_tie_is_not_said_to_have_contrast_where_each_answer_has_its_own_label() -> None:
    columns = {**RISES, "dead": steady(0.0)}
    said = {name: findings(log_of(columns, OURS, method=name))["dead groups"].sentence for name in ("kto", "grpo")}
    assert said["kto"] == "No group is dead: an answer has a w by the sign of its own reward, in a tie too"
    assert said["grpo"] == "No group is dead: in each of them some answers got more reward than others"
