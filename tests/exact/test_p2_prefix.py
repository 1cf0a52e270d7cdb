"""Claims about shared prefixes and even weights: as stated, by hand, and refuted by something wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from creditscope import METHODS, surrogate
from creditscope.claims.verdict import ClaimVerdict
from creditscope.exact import p2_prefix
from creditscope.exact.p2_prefix import BY_LENGTH, CANCELS, STAYS, STEPS, TabularPolicy, tabular_policy
from creditscope.exact.shared_prefix import PrefixBias
from creditscope.exact.shared_prefix import prefix_bias as predict
from creditscope.methods.table import even
from exact.makers_exact import said, swapped


@pytest.fixture(scope="module")
def world() -> TabularPolicy:
    return tabular_policy()


# -- the tabular policy ----------------------------------------------------------------------------------------------


def test_the_worlds_log_probs_are_those_of_its_table(world: TabularPolicy) -> None:
    probabilities = world.logits.softmax(dim=1)
    rollouts = world.rollouts
    for i, t in rollouts.mask.nonzero().tolist():
        p = probabilities[world.context[i, t], rollouts.tokens[i, t]]
        assert float(rollouts.logp[i, t]) == pytest.approx(math.log(p), abs=1e-14)
    # Two tokens have one context exactly where all before them is the same, of the same prompt.
    seen: dict[tuple[int, ...], int] = {}
    for i, t in rollouts.mask.nonzero().tolist():
        key = (int(rollouts.group[i]), *rollouts.tokens[i, :t].tolist())
        assert seen.setdefault(key, int(world.context[i, t])) == int(world.context[i, t])
    assert len(set(seen.values())) == len(seen) == len(world.logits)


def test_no_answer_of_the_world_goes_without_credit_and_every_group_shares_a_prefix(world: TabularPolicy) -> None:
    for g in (0, 1):
        reward = world.rollouts.reward[world.rollouts.group == g]
        assert float((reward - reward.mean()).abs().min()) > 0.01
    assert {int(g) for g in world.tree.group[world.tree.whole]} == {0, 1}


def test_an_inner_step_climbs(world: TabularPolicy) -> None:
    row = METHODS["dr_grpo"]
    before, after = (surrogate(row, logp, world.rollouts) for logp in (world.rollouts.logp, world.step(row, 0.1)))
    assert after > before
    assert torch.allclose(world.step(row, 0.0), world.rollouts.logp, atol=1e-15)


def test_the_small_step_stops_nobody_and_the_large_one_many(world: TabularPolicy) -> None:
    moves = [(world.step(METHODS["grpo"], size) - world.rollouts.logp).exp() - 1 for size in STEPS[1:]]
    assert 0 < float(moves[0].abs().max()) < 0.2
    assert int((moves[1].abs() > 0.2).sum()) > 5


# -- P2.2 -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prefix() -> list[ClaimVerdict]:
    return p2_prefix.prefix_bias()


@pytest.mark.slow
def test_prefix_bias_is_predicted_and_falls_on_whom_p2_says(prefix: list[ClaimVerdict]) -> None:
    for words in ("predicted and by autograd", "who cancels", "after one inner step"):
        assert said(prefix, "tabular policy", words).outcome == "holds", words
    assert said(prefix, "tabular policy", "predicted").n == 3 * len(METHODS)


@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "sapo"])
def test_short_good_answers_are_favoured(name: str, prefix: list[ClaimVerdict]) -> None:
    assert said(prefix, name, "favours short").outcome == "holds"


def test_p2s_claim_says_nothing_of_our_even_weights(prefix: list[ClaimVerdict]) -> None:
    assert [v.subject for v in prefix] == ["tabular policy"] * 3 + list(BY_LENGTH)


def test_the_pair_of_answers_has_the_W_of_a_hand(prefix: list[ClaimVerdict]) -> None:
    # A = ±½/σ = ±1/√2; ω = 1/(2·2) for the good answer of 2 tokens, 1/(2·5) for the bad one of 5: W = (1/4 − 1/10)/√2.
    rollouts, tree = p2_prefix._pair(2, 5)
    assert tree.rows.tolist() == [2, 1, 1, 1, 1, 1]
    total = predict(METHODS["grpo"], rollouts).total[0]
    assert float(total) == pytest.approx(0.15 / math.sqrt(2), abs=1e-15)


@pytest.mark.slow
def test_a_prediction_of_the_wrong_sign_refutes_it() -> None:
    def flipped(*given: Any) -> PrefixBias:
        found = predict(*given)
        return replace(found, w=-found.w)

    assert said(p2_prefix.prefix_bias(predict=flipped), "tabular policy", "predicted").outcome == "refuted"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "aggregate"), [("dr_grpo", "sequence_mean"), ("grpo", "constant")])
def test_a_row_with_the_other_weights_refutes_the_list(name: str, aggregate: str) -> None:
    rows = swapped(**{name: METHODS[name].replace(aggregate=aggregate)})
    found = said(p2_prefix.prefix_bias(methods=rows), "tabular policy", "who cancels")
    assert (found.outcome, found.observed) == ("refuted", 1.0)
    assert found.reason == f"1 of 11 rows are not as listed: {name}"


@pytest.mark.slow
def test_even_weights_refute_that_short_answers_are_favoured() -> None:
    rows = swapped(grpo=METHODS["grpo_even"])
    assert said(p2_prefix.prefix_bias(methods=rows), "grpo", "favours short").outcome == "refuted"


@pytest.mark.slow
def test_a_weight_that_favours_long_answers_refutes_it_too() -> None:
    # OPO's baseline Σ L r / Σ L of two answers: A = L_bad/ΣL and −L_good/ΣL, so W has the sign of L_bad − L_good as
    # well; REINFORCE with r alone has W > 0 whoever is longer.
    rows = swapped(grpo=METHODS["reinforce"])
    found = said(p2_prefix.prefix_bias(methods=rows), "grpo", "favours short")
    assert (found.outcome, found.observed) == ("refuted", 21.0)  # 15 pairs with a longer good answer, 6 equally long


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ratio"), [("gcpo", "token"), ("dr_grpo", "sequence_product")])
def test_the_other_ratio_refutes_what_a_step_does(name: str, ratio: str) -> None:
    rows = swapped(**{name: METHODS[name].replace(ratio=ratio, aggregate="token_mean")})
    assert said(p2_prefix.prefix_bias(methods=rows), "tabular policy", "after one inner").outcome == "refuted"


def test_whoever_is_listed_has_credit_on_the_shared_prefix(world: TabularPolicy) -> None:
    roots = [p2_prefix._root(world, METHODS[name]) for name in (*CANCELS, *STAYS)]
    assert all(0 <= root <= 1 for root in roots)


# -- C.3 --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evened() -> list[ClaimVerdict]:
    return p2_prefix.even_weights()


def test_even_weights_are_judged_on_every_row_that_leaves_something(evened: list[ClaimVerdict]) -> None:
    assert [v.subject for v in evened] == [f"{name}_even" for name in STAYS]


@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "sapo"])
def test_even_weights_end_what_a_weight_by_length_leaves(name: str, evened: list[ClaimVerdict]) -> None:
    assert said(evened, f"{name}_even").outcome == "holds"


@pytest.mark.parametrize("name", ["opo", "reinforce_pp", "cppo", "gtpo"])
def test_even_weights_are_not_enough_where_credit_does_not_sum_to_zero(name: str, evened: list[ClaimVerdict]) -> None:
    assert said(evened, f"{name}_even").outcome == "refuted"


def test_what_even_weights_leave_of_two_answers_by_hand(world: TabularPolicy) -> None:
    # A good answer of 2 tokens and a bad one of 5. GRPO: A = ±a, ω = 1/4 and 1/10, so |W|/Σ|w| = 0.15/0.35, and with
    # one weight for both nothing. OPO's baseline is Σ L r/ΣL = 2/7: A = 5/7 and −2/7, with one weight (5 − 2)/(5 + 2).
    rollouts, tree = p2_prefix._pair(2, 5)
    pair = replace(world, rollouts=rollouts, tree=tree)
    assert p2_prefix._root(pair, METHODS["grpo"]) == pytest.approx(3 / 7, abs=1e-15)
    assert p2_prefix._root(pair, even(METHODS["grpo"])) == pytest.approx(0, abs=1e-15)
    assert p2_prefix._root(pair, even(METHODS["opo"])) == pytest.approx(3 / 7, abs=1e-15)


def test_weights_that_stay_as_they_are_remove_nothing() -> None:
    found = p2_prefix.even_weights(flatten=lambda row: row)
    assert [(v.subject, v.outcome) for v in found] == [(name, "refuted") for name in STAYS]


def test_with_the_groups_mean_for_its_baseline_even_weights_end_what_opo_leaves() -> None:
    rows = swapped(opo=METHODS["opo"].but(name="opo", baseline="group_mean"))
    assert said(p2_prefix.even_weights(methods=rows), "opo_even").outcome == "holds"


@pytest.mark.slow
def test_every_verdict_says_its_number_in_one_sentence(prefix: list[ClaimVerdict]) -> None:
    for verdict in prefix:
        assert any(c.isdigit() for c in verdict.reason)
        assert not verdict.reason.endswith(".")
        assert verdict.threshold
        assert verdict.n
