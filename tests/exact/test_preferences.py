"""C.4: what DPO shares with GRPO and what it does not, each with a case that holds and one that refutes it."""

from __future__ import annotations

import pytest
import torch

from creditscope.batch.groups import Groups
from creditscope.credit.gae import gae
from creditscope.exact.preferences import PREFIX, GivenValues, contrast, pairs, readings, state_values
from creditscope.methods.table import DPO, DR_GRPO, GRPO, METHODS, RLOO


def test_the_verdicts_on_the_table() -> None:
    outcomes = [verdict.outcome for verdict in contrast()]
    assert outcomes == ["holds", "holds", "holds", "refuted", "holds", "refuted", "holds", "holds", "holds", "refuted"]


def test_a_pair_method_that_moves_all_answers_of_a_group_refutes_the_rank_of_two() -> None:
    # Labels by sign keep all four answers of a group, as KTO does: rank 4 where DPO's best and worst have 2.
    wide = DPO.replace(scale="label", baseline="none", keep="all", keep_threshold=None)
    rank = next(one for one in contrast(methods={**METHODS, "dpo": wide}) if "rank" in one.definition)
    assert rank.outcome == "refuted"


@pytest.mark.parametrize(("field", "wrong"), [
    ("prefix", {"score": "log_ratio_mean"}),  # 1/L_i
    ("scale", {"scale": "none"}), ("baseline", {"scale": "none"}),  # the reward itself in the place of its order
    ("tie", {"scale": "label", "baseline": "none", "keep": "all", "keep_threshold": None}),
    ("beta_start", {"score": "log_prob"}),  # without a reference pairs do not start at one margin
])
def test_another_row_refutes_what_holds_for_dpo(field: str, wrong: dict[str, object]) -> None:
    assert getattr(readings(DPO), field) == 0
    assert getattr(readings(DPO.replace(**wrong)), field) > 1e-3


def test_beside_group_methods() -> None:
    grpo, dr, rloo = readings(GRPO), readings(DR_GRPO), readings(RLOO)
    assert grpo.within == dr.within == rloo.within == 0
    assert min(row.baseline for row in (grpo, dr, rloo)) > 0.1  # they need theirs
    assert grpo.prefix > 0.05
    assert max(dr.prefix, rloo.prefix) < 1e-12
    assert grpo.scale < 1e-12 < dr.scale


def test_adamw_hides_the_rewards_scale_until_a_kl_term_is_beside_it() -> None:
    grpo, dr, rloo, dpo = readings(GRPO), readings(DR_GRPO), readings(RLOO), readings(DPO)
    assert min(dr.scale, rloo.scale) > 0.4  # w follows the rewards: half of them, half of w
    assert max(dr.adamw, rloo.adamw) < 1e-3
    assert min(dr.penalised or 0.0, rloo.penalised or 0.0) > 0.1
    assert grpo.adamw == grpo.penalised == dpo.adamw == 0  # std and order leave no scale to see
    assert dpo.penalised is None


def test_two_answers_of_a_group_bound_the_rank() -> None:
    # Three groups with a pair, four answers each: DPO moves 2·3 of them, GRPO all twelve.
    assert readings(DPO, size=4).rank == 6
    assert readings(GRPO, size=4).rank == 12
    assert {readings(METHODS[name]).rank for name in ("dpo", "ipo", "simpo", "grpo")} == {6}


def test_a_critic_that_is_one_number_gives_ppo_uniform_credit_and_a_real_one_does_not() -> None:
    # GAE at λ = 1 is A_it = r_i − V(s_it): constant over t where V is.
    ppo = METHODS["ppo"]
    real, constant = readings(ppo), readings(ppo, values=torch.full_like(state_values(), 0.4))
    assert constant.within < 1e-12
    assert real.within > 0.1
    assert min(real.tie, constant.tie) > 0.01  # 0.5 − V is not 0: groups without contrast have a gradient
    assert min(real.prefix, real.baseline) > 0.1
    assert real.scale < 1e-6  # WHITEN_EPS


def test_a_value_that_is_the_groups_mean_cancels_on_the_shared_prefix() -> None:
    # Σ_i (r_i − mean r) = 0 at each position. Without whitening, which takes the batch's mean off every token.
    batch, _ = pairs()
    means = Groups(batch.group).mean(batch.reward)[:, None].expand(-1, 8)
    credit = gae(METHODS["ppo"], batch, GivenValues(means), whiten=False)
    assert float(Groups(batch.group).totals(credit[:, :PREFIX]).abs().max()) < 1e-12
