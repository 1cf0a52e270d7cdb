"""P1's claims without a run: each holds in one world and is refuted in another."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from creditscope import METHODS, surrogate
from creditscope.claims.table import CLAIMS
from creditscope.claims.verdict import ClaimVerdict
from creditscope.exact import p1 as p1_exact
from creditscope.exact.enumeration import World, best_constant, constant_variance, ladder_world, measure, tree_world
from creditscope.exact.p1 import (
    CHANCES,
    GROUP,
    LAWS,
    P1_GRPO,
    PRINTED,
    RLOO,
    Law,
    answers,
    binary,
    chebyshev,
    constant_spread,
    credited,
    dead_groups,
    dead_law,
    group_gradients,
    group_mean_factor,
    hoeffding,
    hoeffding_bound,
    independent,
    least_spread,
    leave_one_out_rank,
    moments,
    optimal_baseline,
    random_scores,
    token_range,
    two_tokens,
    uniform_credit,
    variance,
)
from creditscope.exact.p1_turns import LADDER, START, constant_policy, credit_bias, multi_turn, rms
from creditscope.methods.axes import Method
from creditscope.microscope.geometry import ranks, weighted
from creditscope.microscope.spectrum import spectrum
from creditscope.tasks.turns import Ladder
from each import each
from makers import walk_probability
from makers_tree import Tree

REINFORCE = METHODS["reinforce"]
BY_STD = P1_GRPO.but(name="by_std", scale="group_std")
TINY = {"rtol": 0.0, "atol": 1e-12}


# -- worlds in which claims fail -------------------------------------------------------------------------------------


def copied(law: Law, size: int) -> tuple[Tensor, Tensor]:
    """Siblings that all say the same: one draw for the whole group."""
    values, chances = (torch.tensor(part, dtype=torch.float64) for part in law)
    return values[:, None].expand(-1, size).contiguous(), chances


def opposed(law: Law, size: int) -> tuple[Tensor, Tensor]:
    """Two siblings of whom exactly one is right."""
    assert size == 2
    return torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)


class Tight(Ladder):
    """A ladder that promises a hundredth of the bound."""

    def bound(self) -> list[float]:
        return [bound / 100 for bound in super().bound()]


def tree(depth: int, reward: list[float]) -> World:
    """Fair coins."""
    found = Tree(tokens=2, depth=depth)
    return tree_world(found, torch.zeros(len(found.states), 2, dtype=torch.float64),
                      torch.tensor(reward, dtype=torch.float64))


CONSTANT, GRADED = tree(2, [0.5] * 4), tree(2, [0.0, 0.2, 0.3, 1.0])
FIRST = Ladder(top=1, turns=2)
# Scores of one policy, sequences drawn by another: E ψ is not 0.
OFF_POLICY = replace(GRADED, rollouts=replace(GRADED.rollouts, logp=two_tokens(0).rollouts.logp))
RIGHT = {(size, 0.3): round(hoeffding_bound(size, 0.3), 2) for size in (2, 4, 8, 16)}

Test = Callable[..., list[ClaimVerdict]]
CASES: list[tuple[Test, dict[str, Any], str, str]] = [
    (uniform_credit, {}, "group-mean baseline", "holds"),
    (uniform_credit, {"credit": "prefix_tree"}, "group-mean baseline", "refuted"),
    (uniform_credit, {}, "baseline v(s_t)", "refuted"),
    (uniform_credit, {"world": CONSTANT}, "baseline v(s_t)", "holds"),
    (uniform_credit, {}, "every estimator", "refuted"),
    (uniform_credit, {"world": CONSTANT}, "every estimator", "holds"),
    (uniform_credit, {"estimators": ["outcome", "leave_one_out"]}, "every estimator", "holds"),
    (moments, {}, "Σ_i A_i", "holds"),
    (moments, {"method": REINFORCE}, "Σ_i A_i", "refuted"),
    (moments, {}, "Var(A_i) over all", "holds"),
    (moments, {"groups": copied}, "Var(A_i) over all", "refuted"),
    (moments, {"method": BY_STD}, "Var(A_i) over all", "refuted"),
    (moments, {}, "Cov(A_i, A_j)", "holds"),
    (moments, {"groups": copied}, "Cov(A_i, A_j)", "refuted"),
    (moments, {"method": RLOO}, "Cov(A_i, A_j)", "refuted"),
    (moments, {}, "drawn at random", "holds"),
    (moments, {"groups": copied}, "drawn at random", "refuted"),
    (moments, {"method": RLOO}, "drawn at random", "refuted"),
    (moments, {"samples": 30}, "drawn at random", "undecided"),
    (moments, {"samples": 1}, "drawn at random", "undecided"),
    (chebyshev, {}, "", "holds"),
    (chebyshev, {"groups": opposed, "sizes": (2,), "chances": (0.5,)}, "", "refuted"),
    (chebyshev, {"method": BY_STD}, "", "refuted"),
    (dead_groups, {}, "every advantage is 0", "holds"),
    (dead_groups, {"groups": copied}, "every advantage is 0", "refuted"),
    (dead_groups, {"method": REINFORCE}, "every advantage is 0", "refuted"),
    (dead_groups, {}, "different p", "holds"),
    (dead_groups, {"groups": opposed, "sizes": (2,)}, "different p", "refuted"),
    (dead_groups, {}, "gradient of a unanimous group", "holds"),
    (dead_groups, {"method": REINFORCE}, "gradient of a unanimous group", "refuted"),
    (dead_groups, {}, "every row", "refuted"),
    (dead_groups, {"methods": {"p1_grpo": P1_GRPO, "rloo": RLOO}}, "every row", "holds"),
    (multi_turn, {}, "less G_h − v(s_h)", "holds"),
    (multi_turn, {"credit": "turn_return", "size": 4}, "less G_h − v(s_h)", "refuted"),
    (multi_turn, {}, "largest |Bias_h|", "holds"),
    (multi_turn, {"game": Tight(), "size": 4}, "largest |Bias_h|", "refuted"),
    (multi_turn, {}, "first turn", "holds"),
    (multi_turn, {"method": REINFORCE, "size": 4}, "first turn", "refuted"),
    (multi_turn, {}, "has a direction", "refuted"),
    (multi_turn, {"method": REINFORCE, "size": 4}, "has a direction", "holds"),
    (multi_turn, {}, "v(s_h) itself", "holds"),
    (multi_turn, {"state_baseline": "gae,lam=0,whiten=false", "size": 4}, "v(s_h) itself", "refuted"),
    (multi_turn, {}, "turn_return", "refuted"),
    (multi_turn, {"game": FIRST, "start": 0, "size": 4}, "turn_return", "holds"),
    (multi_turn, {}, "(state_return)", "refuted"),
    (multi_turn, {"game": FIRST, "start": 0, "size": 4}, "(state_return)", "holds"),
    (multi_turn, {}, "biases the gradient", "refuted"),
    (multi_turn, {"credit": "state_return", "size": 4}, "biases the gradient", "holds"),
    (multi_turn, {}, "costs variance", "holds"),
    (multi_turn, {"credit": "state_return", "method": RLOO, "size": 4}, "costs variance", "refuted"),
    (hoeffding, {}, "P(|v̂_R − v| > ε)", "holds"),
    (hoeffding, {"groups": copied}, "P(|v̂_R − v| > ε)", "refuted"),
    (hoeffding, {}, "printed table", "refuted"),
    (hoeffding, {"printed": RIGHT}, "printed table", "holds"),
    (hoeffding, {"printed": RIGHT | {(4, 0.3): 0.98}}, "printed table", "refuted"),
    (group_mean_factor, {}, "the group's mean", "holds"),
    (group_mean_factor, {"method": RLOO}, "the group's mean", "refuted"),
    (group_mean_factor, {"method": BY_STD}, "the group's mean", "refuted"),
    (group_mean_factor, {}, "E ĝ with leave-one-out", "holds"),
    (group_mean_factor, {"others": BY_STD}, "E ĝ with leave-one-out", "refuted"),
    (group_mean_factor, {}, "cosine", "holds"),
    (group_mean_factor, {"method": BY_STD, "world": GRADED}, "cosine", "refuted"),
    (optimal_baseline, {"worlds": {"even": two_tokens(1)}}, "the mean reward", "holds"),
    (optimal_baseline, {"worlds": {"uneven": two_tokens(0)}}, "the mean reward", "refuted"),
    (optimal_baseline, {}, "iff", "holds"),
    (optimal_baseline, {"worlds": {"off policy": OFF_POLICY}}, "iff", "refuted"),
    (leave_one_out_rank, {}, "A_i with leave-one-out", "holds"),
    (leave_one_out_rank, {"others": BY_STD}, "A_i with leave-one-out", "refuted"),
    (leave_one_out_rank, {}, "changes a rank", "refuted"),
    (leave_one_out_rank, {"others": REINFORCE}, "changes a rank", "holds"),
]
TESTS: tuple[Test, ...] = (uniform_credit, moments, chebyshev, dead_groups, multi_turn, hoeffding, group_mean_factor,
                           optimal_baseline, leave_one_out_rank)


@cache
def as_it_is(test: Test) -> list[ClaimVerdict]:
    return test()


def the(found: list[ClaimVerdict], part: str) -> ClaimVerdict:
    return next(verdict for verdict in found if part in verdict.definition)


def named(case: tuple[Test, dict[str, Any], str, str]) -> str:
    return f"{case[0].__name__}-{'-'.join(case[1]) or 'as it is'}-{case[2]}-{case[3]}"


@pytest.mark.slow
@each("case", CASES)
def test_a_claim_holds_here_and_is_refuted_there(case: tuple[Test, dict[str, Any], str, str]) -> None:
    test, planted, part, outcome = case
    verdict = the(test(**planted) if planted else as_it_is(test), part)
    assert verdict.outcome == outcome
    if outcome == "undecided":
        assert verdict.reason.startswith("needs ")


@each("test", TESTS)
def test_every_definition_has_a_world_for_it_and_one_against_it(test: Test) -> None:
    for part in {case[2] for case in CASES if case[0] is test} - {""}:
        assert {case[3] for case in CASES if case[0] is test and case[2] == part} >= {"holds", "refuted"}


@each("test", TESTS)
def test_a_verdict_says_what_was_expected_what_decided_and_why_in_one_sentence(test: Test) -> None:
    for verdict in as_it_is(test):
        assert verdict.definition
        assert verdict.subject
        assert verdict.expected
        assert verdict.threshold
        assert verdict.n
        assert verdict.of
        assert verdict.observed is not None
        assert math.isfinite(verdict.observed)
        assert re.search(r"\d", verdict.reason)
        assert ". " not in verdict.reason
        assert verdict.reason[-1] != "."


def test_every_claim_of_p1_that_needs_no_run_is_here_and_in_the_table() -> None:
    named = {id: claim.exact.split(":")[1] for id, claim in CLAIMS.items() if claim.exact and id.startswith("P1.")}
    assert named == dict(zip([f"P1.{n}" for n in (1, 2, 3, 4, 8, 9, 10, 11, 12)], [test.__name__ for test in TESTS],
                             strict=True))


# -- P1.1 ------------------------------------------------------------------------------------------------------------


def test_a_state_baseline_tells_the_tokens_of_two_fair_coins_apart_by_a_quarter() -> None:
    # Reward where both are 1: v = 1/4 at the start, 1/2 after a 1, 0 after a 0. r − v of the two tokens:
    # 11: 3/4, 1/2    10: −1/4, −1/2    0x: −1/4, 0    so every rollout has a range of 1/4.
    verdict = the(uniform_credit(world=tree(2, [0.0, 0.0, 0.0, 1.0])), "baseline v(s_t)")
    assert verdict.observed == pytest.approx(0.25, abs=1e-15)
    assert "60 of 60 rollouts" in verdict.reason  # C(4+2, 3) = 20 multisets of 3


def test_padding_has_no_part_in_the_range_of_a_rollout() -> None:
    credit = torch.tensor([[1.0, -2.0, 50.0], [0.5, 0.5, -50.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, False]])
    assert token_range(credit, mask).tolist() == [3.0, 0.0]


def test_eight_estimators_tell_tokens_apart_and_the_scalar_baselines_do_not() -> None:
    verdict = the(uniform_credit(), "every estimator")
    assert (verdict.observed, verdict.n) == (8, 13)
    for name in ("leave_one_out", "optimal_scalar", "optimal_sequence", "salt"):
        assert name not in verdict.reason


# -- P1.2 ------------------------------------------------------------------------------------------------------------


def test_two_fair_coins_have_variance_an_eighth_and_covariance_minus_an_eighth() -> None:
    # A = ±½ when the two differ, which they do half of the time: E A² = ½·¼, E A₁A₂ = −½·¼; σ² = ¼.
    reward, chance = independent(binary(0.5), 2)
    a = credited(P1_GRPO, reward)
    assert float((chance * a[:, 0] ** 2).sum()) == 0.125
    assert float((chance * a[:, 0] * a[:, 1]).sum()) == -0.125


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_moments_of_a_three_valued_reward_are_the_law_s_in_fractions(size: int) -> None:
    values, chances = (Fraction(-1), Fraction(0), Fraction(2)), (Fraction(1, 2), Fraction(3, 10), Fraction(1, 5))
    mean = sum(p * x for x, p in zip(values, chances, strict=True))
    spread = sum(p * (x - mean) ** 2 for x, p in zip(values, chances, strict=True))
    own = cross = Fraction(0)
    for group in itertools.product(range(3), repeat=size):
        weight = math.prod(chances[i] for i in group)
        centre = Fraction(sum(values[i] for i in group)) / size
        own += weight * (values[group[0]] - centre) ** 2
        cross += weight * (values[group[0]] - centre) * (values[group[1]] - centre)
    assert own == spread * (size - 1) / size
    assert cross == -spread / size
    assert variance(LAWS[4]) == pytest.approx(float(spread), abs=1e-15)


def test_leave_one_out_misses_the_law_by_its_factor_squared() -> None:
    # R²/(R−1)² · (R−1)/R σ² = R/(R−1) σ²: at R = 2 and p = ½, ½ in place of ⅛.
    found = moments(method=RLOO, laws=[binary(0.5)], sizes=(2,))
    assert the(found, "Var(A_i) over all").observed == pytest.approx(0.375, abs=1e-15)
    assert the(found, "Cov").observed == pytest.approx(0.375, abs=1e-15)
    assert the(found, "drawn at random").observed == pytest.approx(4.0, abs=0.2)


def test_an_undecided_sample_says_how_many_groups_would_do() -> None:
    few = the(moments(samples=30), "drawn at random")
    (wanted,) = re.findall(r"needs about ([\d,]+) groups", few.reason)
    assert 100 < int(wanted.replace(",", "")) < 4000
    many = the(moments(), "drawn at random")
    assert many.interval is not None
    assert many.interval[0] < 1 < many.interval[1]


# -- P1.3 ------------------------------------------------------------------------------------------------------------


def test_chebyshev_is_loose_by_what_two_fair_coins_say() -> None:
    # |A| is ½ half of the time. ε = .4: share ½, bound ⅛/.16 = .78125, truth/bound .64. ε = .2: bound 3.125, idle.
    (verdict,) = chebyshev(sizes=(2,), chances=(0.5,), epsilons=(0.2, 0.4))
    assert verdict.observed == pytest.approx(0.64, abs=1e-15)
    assert "1.6 times the truth" in verdict.reason
    assert "1 of 2 bounds say nothing" in verdict.reason


def test_siblings_that_oppose_each_other_break_chebyshev_s_bound() -> None:
    # |A| is always ½: at ε = .4 the share is 1 where the bound says .78125.
    (verdict,) = chebyshev(groups=opposed, sizes=(2,), chances=(0.5,), epsilons=(0.4,))
    assert verdict.observed == pytest.approx(1.28, abs=1e-15)


def test_an_advantage_of_epsilon_is_not_beyond_it() -> None:
    (verdict,) = chebyshev(sizes=(2,), chances=(0.5,), epsilons=(0.5,))
    assert verdict.observed == 0


# -- P1.4 ------------------------------------------------------------------------------------------------------------


def test_prompts_of_unlike_difficulty_have_an_eighth_more_dead_pairs_than_their_mean_says() -> None:
    # R = 2: ¼² + ¾² = ⅝ at p = ¼ and at ¾, ½ at their mean ½.
    assert dead_law(0.25, 2) == 0.625
    verdict = the(dead_groups(sizes=(2,), chances=(0.25, 0.75)), "different p")
    assert verdict.observed == pytest.approx(0.125, abs=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("chances", [(0.1, 0.1), (0.1, 0.9), (0.02, 0.3)])
def test_a_mixture_of_prompts_has_as_many_dead_groups_as_its_mean_or_more(chances: tuple[float, float]) -> None:
    verdict = the(dead_groups(chances=chances), "different p")
    gap = min(sum(dead_law(p, size) for p in chances) / 2 - dead_law(sum(chances) / 2, size) for size in (2, 4, 8))
    assert verdict.observed == pytest.approx(gap, abs=1e-12)
    assert verdict.outcome == "holds"


def test_the_gradients_of_the_groups_are_A_times_the_scores_and_sum_to_the_batch_s() -> None:
    world = answers()
    groups, _ = world.groups(GROUP)
    found = group_gradients(P1_GRPO, world, groups).flatten(1)
    a = credited(P1_GRPO, world.rollouts.reward[groups])
    expected = (a[:, :, None] * world.scores[groups]).sum(dim=1) / groups.numel()
    torch.testing.assert_close(found, expected, **TINY)
    table = world.policy.log().requires_grad_()
    rows = groups.reshape(-1)
    logp = table.log_softmax(dim=1)[world.state[rows].clamp(min=0), world.rollouts.tokens[rows]]
    (whole,) = torch.autograd.grad(surrogate(P1_GRPO, logp, world.batch(groups)), table)
    torch.testing.assert_close(found.sum(dim=0), whole.flatten(), **TINY)


def test_the_rows_that_move_unanimous_groups_follow_from_the_axes() -> None:
    # No baseline of the group; or the batch's mean is subtracted afterwards; or a price is put on entropy.
    expected = [name for name, row in METHODS.items() if row.baseline != "external"
                and (not row.centred or row.whiten != "none" or row.entropy_cost)]
    verdict = the(dead_groups(), "every row")
    assert f"({', '.join(expected)}), of those" in verdict.reason
    assert verdict.reason.endswith("2 (reinforce_pp_baseline, gtpo)")
    assert (verdict.observed, verdict.n) == (len(expected), len(METHODS) - 1)


@pytest.mark.parametrize("name", ["kimi", "dro", "dapo", "opo", "cispo"])
def test_a_penalty_that_is_0_on_policy_and_a_clip_leave_a_unanimous_group_at_exactly_0(name: str) -> None:
    world = answers()
    groups, _ = world.groups(GROUP)
    reward = world.rollouts.reward[groups]
    dead = (reward == reward[:, :1]).all(dim=1)
    found = group_gradients(METHODS[name], world, groups).abs().amax(dim=(1, 2))
    assert float(found[dead].max()) == 0
    assert float(found[~dead].max()) > 1e-6


@pytest.mark.parametrize("size", [2, 4, 8])
def test_reinforce_calls_a_group_dead_only_where_nobody_earned_anything(size: int) -> None:
    # p^R + (1−p)^R less (1−p)^R: the worst miss is .95^R.
    verdict = the(dead_groups(method=REINFORCE, sizes=(size,)), "every advantage")
    assert verdict.observed == pytest.approx(max(CHANCES) ** size, abs=1e-12)


# -- P1.8 ------------------------------------------------------------------------------------------------------------


def left(credit: str, world: World | None = None, size: int = 8) -> Tensor:
    """(H,) RMS of the bias over all walks, by turn."""
    world = ladder_world(LADDER, constant_policy(LADDER), START) if world is None else world
    return rms(world, credit_bias(measure(credit, RLOO, world, size)))


def test_on_two_rungs_the_bias_is_a_half_and_a_baseline_of_the_turn_is_enough() -> None:
    # Fair moves: each turn is worth ½ from anywhere. Bias_1 = r_0 + ½ − 1 = ±½. What is left to earn does not depend on
    # the state, so the turn's mean is the state's. Bounds: 0 + 2·2 and 1 + 2·2.
    world = ladder_world(FIRST, torch.full((2, 2, 2), 0.5, dtype=torch.float64), 0)
    assert FIRST.bound() == [4.0, 5.0]
    assert left("outcome", world, 3).tolist() == pytest.approx([0.0, 0.5], abs=1e-12)
    for name in ("turn_return", "state_return"):
        assert float(left(name, world, 3)[1]) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("method", "size", "factor"), [(P1_GRPO, 2, 0.5), (P1_GRPO, 4, 0.75), (RLOO, 3, 1.0)],
                         ids=["pairs", "fours", "leave-one-out"])
def test_a_rung_earned_is_credited_again_at_the_next_turn(method: Method, size: int, factor: float) -> None:
    # As above: who went down at first lacks ½ at the second turn, who went up has ½ too much.
    world = ladder_world(FIRST, torch.full((2, 2, 2), 0.5, dtype=torch.float64), 0)
    bias = credit_bias(measure("outcome", method, world, size), factor)
    expected = torch.tensor([[0.0, -0.5], [0.0, -0.5], [0.0, 0.5], [0.0, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(bias, expected, **TINY)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_bias_and_its_cost_in_variance_are_there_and_the_gradient_s_is_not_for_every_group_size(size: int) -> None:
    found = multi_turn(size=size)
    assert the(found, "biases the gradient").outcome == "refuted"
    assert the(found, "less G_h − v(s_h)").outcome == the(found, "first turn").outcome == "holds"
    assert the(found, "costs variance").outcome == "holds"


@pytest.mark.slow
def test_the_rms_bias_of_outcome_credit_is_that_of_p1_s_formula_walk_by_walk() -> None:
    policy = constant_policy(LADDER)
    squares = sum(walk_probability(LADDER, policy, START, moves) * LADDER.bias(policy, START, moves) ** 2
                  for moves in LADDER.walks())
    assert isinstance(squares, Tensor)
    torch.testing.assert_close(left("outcome"), squares.sqrt(), **TINY)


@pytest.mark.slow
def test_two_siblings_know_no_more_by_state_than_by_turn_and_eight_do() -> None:
    torch.testing.assert_close(left("state_return", size=2), left("turn_return", size=2), **TINY)
    by_state, by_turn, outcome = (left(name)[1:] for name in ("state_return", "turn_return", "outcome"))
    assert bool((by_state < 0.5 * by_turn).all())
    assert bool((by_turn < outcome).all())


def test_the_gradient_of_biased_credit_is_the_true_one_times_R_minus_1_over_R() -> None:
    verdict = the(multi_turn(size=4), "biases the gradient")
    assert verdict.observed is not None
    assert verdict.observed < 1e-12
    assert "0.75 ∇J" in verdict.reason


def test_without_a_baseline_the_first_turn_misses_by_the_start_s_value() -> None:
    # E[G] − 0 in place of E[G] − v(s_0).
    value = float(LADDER.values(constant_policy(LADDER))[0, START])
    found = multi_turn(method=REINFORCE, size=4)
    assert the(found, "first turn").observed == pytest.approx(value, abs=1e-12)
    assert the(found, "has a direction").observed == pytest.approx(value, abs=1e-12)


# -- P1.9 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "p", "eps", "beyond"), [
    (2, 0.2, 0.3, 0.04),  # means 0, ½, 1 miss by .2, .3, .8: two right answers alone
    (2, 0.3, 0.2, 0.58),  # .3, .2, .7: none right or both, .49 + .09
    (4, 0.05, 0.2, 1 - 0.95**4 - 4 * 0.05 * 0.95**3),  # 1 of 4 misses by .2: two right or more
])
def test_a_miss_of_epsilon_is_not_beyond_it_however_it_is_rounded(size: int, p: float, eps: float, beyond: float
                                                                  ) -> None:
    verdict = the(hoeffding(sizes=(size,), chances=(p,), epsilons=(eps,)), "P(")
    assert verdict.observed == pytest.approx(beyond / (2 * math.exp(-2 * size * eps**2)), rel=1e-12)


def test_siblings_that_copy_each_other_break_hoeffding_s_bound() -> None:
    # All eight right or all wrong: the mean always misses ½ by ½. 2exp(−2·8·.16) = 2e^−2.56.
    verdict = the(hoeffding(groups=copied, sizes=(8,), chances=(0.5,), epsilons=(0.4,)), "P(")
    assert verdict.observed == pytest.approx(math.exp(2.56) / 2, rel=1e-12)


def test_all_four_printed_values_are_off_and_the_first_by_most() -> None:
    # 2e^−.36 = 1.39535, 2e^−.72 = .97350, 2e^−1.44 = .47386, 2e^−2.88 = .11227.
    assert [round(hoeffding_bound(*at), 3) for at in PRINTED] == [1.395, 0.974, 0.474, 0.112]
    verdict = the(hoeffding(), "printed")
    assert verdict.observed == pytest.approx(0.0553526521, abs=1e-9)
    assert verdict.reason.startswith("4 of 4 printed values")
    assert "R = 2 and ε = 0.3" in verdict.reason


# -- P1.10 -----------------------------------------------------------------------------------------------------------


def test_the_mean_over_all_ordered_groups_of_autograd_s_gradient_is_half_of_the_true_one_in_pairs() -> None:
    found = Tree(tokens=2, depth=2)
    reward = GRADED.rollouts.reward
    table = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    total = torch.zeros_like(table)
    for group in found.groups(2):
        batch = found.rollouts(table, group[None], reward)
        (gradient,) = torch.autograd.grad(surrogate(P1_GRPO, found.logp(table)[group], batch), table)
        total += found.chance(table, group[None]).detach() * gradient
    torch.testing.assert_close(total.detach(), 0.5 * found.gradient(table, reward).detach(), **TINY)
    assert the(group_mean_factor(world=GRADED, sizes=(2,)), "the group's mean").outcome == "holds"


def test_the_group_mean_taken_for_leave_one_out_misses_by_one_over_R() -> None:
    for size in (2, 3):
        verdict = group_mean_factor(others=P1_GRPO, sizes=(size,))[1]
        assert verdict.observed == pytest.approx(1 / size, abs=1e-12)


def test_dividing_by_the_std_turns_the_gradient_only_where_rewards_are_more_than_right_and_wrong() -> None:
    # Right or wrong: E ψ = 0 makes the mean scores of right and of wrong answers opposite, whatever weight a group has.
    assert the(group_mean_factor(method=BY_STD), "cosine").outcome == "holds"
    assert the(group_mean_factor(method=BY_STD, world=GRADED), "cosine").outcome == "refuted"


# -- P1.11 -----------------------------------------------------------------------------------------------------------


def test_the_mean_loses_what_two_tokens_by_hand_say() -> None:
    # π = (.9, .1), then even. ‖ψ‖² = 2(1−π)² + ½: .52 after a 0, 2.12 after a 1, so E‖ψ‖² = .68. Reward for the 1:
    # mean .1, b* = .1·2.12/.68, Cov = .1·(2.12 − .68) = .144. E(r−b)²‖ψ‖²: .1764 at .1. ‖∇J‖² = 2·.09² = .0162.
    best = 0.212 / 0.68
    least = 0.9 * best**2 * 0.52 + 0.1 * (1 - best) ** 2 * 2.12 - 0.0162
    verdict = the(optimal_baseline(worlds={"uneven": two_tokens(0)}), "the mean reward")
    assert verdict.observed == pytest.approx(best - 0.1, abs=1e-12)
    assert constant_spread(two_tokens(0), 0.1) == pytest.approx(0.1764 - 0.0162, abs=1e-12)
    assert f"{0.1602 / least - 1:.1%} more variance" in verdict.reason
    assert "r) = 0.14 " in verdict.reason


@pytest.mark.parametrize("world", [GRADED, two_tokens(0), two_tokens(1), answers()],
                         ids=["graded", "uneven", "even", "answers"])
def test_the_variance_with_nothing_assumed_is_the_closed_form_on_policy_and_least_at_b_star(world: World) -> None:
    for b in (-0.3, 0.0, 0.4):
        closed = constant_variance(world, torch.tensor(b, dtype=torch.float64), 1)
        assert constant_spread(world, b) == pytest.approx(closed, abs=1e-12)
    assert least_spread(world) == pytest.approx(float(best_constant(world)), abs=1e-12)
    assert all(constant_spread(world, least_spread(world)) < constant_spread(world, least_spread(world) + d)
               for d in (-0.01, 0.01))
    assert the(optimal_baseline(worlds={"this": world}), "iff").outcome == "holds"


# -- P1.12 -----------------------------------------------------------------------------------------------------------


def test_ranks_of_the_rows_themselves_are_the_same_under_both_baselines() -> None:
    draw = np.random.default_rng(3)
    scores = draw.standard_normal((4, 9))
    reward = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    both = [credited(row, reward)[0].numpy() for row in (P1_GRPO, RLOO)]
    assert [a.tolist()[:2] for a in both] == [[0.75, -0.25], [1.0, -1 / 3]]
    sigma = [np.linalg.svd(a[:, None] * scores, compute_uv=False) for a in both]
    np.testing.assert_allclose(sigma[1], 4 / 3 * sigma[0], rtol=1e-12)
    found = [ranks(spectrum(weighted(scores @ scores.T, a))) for a in both]
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert found[0]["effective_rank"] == pytest.approx(sigma[0].sum() ** 2 / (sigma[0] ** 2).sum(), rel=1e-12)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_leave_one_out_is_the_group_mean_s_advantage_times_R_over_R_minus_1(size: int) -> None:
    assert the(leave_one_out_rank(sizes=(size,)), "A_i with").outcome == "holds"
    # The other way round, the group's mean in leave-one-out's place: at one right of R, A = 1 − 1/R misses by
    # (1 − 1/R)(R/(R−1) − 1) = 1/R; more right answers miss by less, for one wrong answer it is the same.
    assert the(leave_one_out_rank(others=P1_GRPO, sizes=(size,)), "A_i with").observed == pytest.approx(1 / size)


def test_the_scores_have_full_rank_and_norms_that_differ() -> None:
    gram = random_scores(8, 0)
    assert np.linalg.matrix_rank(gram) == 8
    assert np.diag(gram).max() > 4 * np.diag(gram).min()


def test_without_a_baseline_the_rank_is_that_of_the_right_answers_alone() -> None:
    # Of two answers one is right: P1's rows are ±½ψ, REINFORCE's are ψ and 0. The numerical rank falls from 2 to 1.
    verdict = the(leave_one_out_rank(others=REINFORCE, sizes=(2,)), "changes a rank")
    assert verdict.observed is not None
    assert verdict.observed > 0.1


def test_all_definitions_of_rank_are_named() -> None:
    verdict = the(leave_one_out_rank(), "changes a rank")
    assert verdict.reason.startswith("by 9 definitions")
    assert all(name in verdict.definition for name in ranks(spectrum(np.eye(3))))
    assert verdict.n == sum(2**size - 2 for size in p1_exact.SIZES)
