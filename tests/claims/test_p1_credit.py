"""P1's claims about credit and baseline on runs: worlds in which each holds, is refuted, or stays undecided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from claims.makers_claims import ALL_RIGHT, evidence, of, orthogonal, recorded, seeds
from creditscope.claims.evidence import Evidence
from creditscope.claims.p1_credit import baseline, dead_share, multi_turn, sparsity, uniform_credit, zero_sum

# -- P1.1 ------------------------------------------------------------------------------------------------------------


def within(credit: str | None, *values: float, **changes: Any) -> Evidence:
    return evidence(credit=credit, steps=[{"credit/within": value} for value in values], **changes)


@pytest.mark.parametrize("credit", [None, "outcome", "leave_one_out", "salt,rank=2"])
def test_uniform_credit_holds_where_no_token_differs_and_is_refuted_by_one_step_in_which_they_do(credit: str | None
                                                                                               ) -> None:
    verdict, = uniform_credit([within(credit, 0.0, 1e-16), within(credit, 0.0, seed=1)])
    assert (verdict.outcome, verdict.observed, verdict.n, verdict.of) == ("holds", 1e-16, 3, "steps")
    verdict, = uniform_credit([within(credit, 0.0, 0.0, 1e-6)])
    assert (verdict.outcome, verdict.observed) == ("refuted", 1e-6)


@pytest.mark.parametrize("credit", ["monte_carlo,samples=8", "optimal_token", "step_reward", "gae,lam=0.9"])
def test_token_credit_differs_inside_a_rollout_or_it_is_none(credit: str) -> None:
    verdict, = uniform_credit([within(credit, 0.4, 0.2), within(credit, 0.1, seed=1)])
    assert (verdict.outcome, verdict.observed) == ("holds", 0.1)
    verdict, = uniform_credit([within(credit, 0.5), within(credit, 0.0, 0.0, seed=1)])
    assert (verdict.outcome, verdict.observed, verdict.expected) == ("refuted", 0.0, "above 0")


def test_credit_by_a_critic_is_not_taken_for_outcome_credit() -> None:
    verdict, = uniform_credit([within(None, 0.3, method="ppo")])
    assert verdict.outcome == "holds"
    assert "credit gae" in verdict.definition


# -- P1.2 ------------------------------------------------------------------------------------------------------------


def test_advantages_of_a_recorded_group_sum_to_zero(tmp_path: Path) -> None:
    verdict, = zero_sum([recorded(tmp_path, orthogonal, group=8)])
    assert (verdict.outcome, verdict.observed, verdict.n, verdict.of) == ("holds", 0.0, 4, "groups")


@pytest.mark.parametrize(("largest", "outcome"), [(1e-5, "holds"), (1.1e-5, "refuted"), (0.2, "refuted")])
def test_zero_sum_is_refuted_by_one_group_above_rounding(largest: float, outcome: str) -> None:
    verdict, = zero_sum([evidence(groups={"w_sum": [0.0, largest, None, 1e-8]})])
    assert (verdict.outcome, verdict.observed, verdict.n) == (outcome, largest, 3)


def test_a_row_that_divides_by_length_refutes_zero_sum_and_says_so() -> None:
    long, plain = (zero_sum([evidence(groups={"w_sum": [0.3]}, method=name)])[0] for name in ("grpo", "dr_grpo"))
    assert (long.outcome, plain.outcome) == ("refuted", "refuted")
    assert "divides by the length" in long.reason
    assert "length" not in plain.reason


@pytest.mark.parametrize("changes", [{"method": "reinforce"}, {"credit": "step_reward"}])
def test_zero_sum_is_not_asked_of_rows_without_a_group_baseline_nor_of_other_credit(changes: dict[str, str]) -> None:
    verdict, = zero_sum([evidence(groups={"w_sum": [1.0]}, **changes)])
    assert (verdict.outcome, verdict.definition) == ("undecided", "")


# -- P1.4 ------------------------------------------------------------------------------------------------------------


def dead_steps(shares: Sequence[float], p: float = 0.5, groups: int = 100, size: int = 4) -> list[dict[str, float]]:
    """Steps of binary rewards: the std that torch gives for B rewards of mean p is √(p(1−p)·B/(B−1))."""
    count = groups * size
    std = math.sqrt(p * (1 - p) * count / (count - 1))
    return [{"signal/dead_groups": share, "signal/groups": groups, "reward/mean": p, "reward/std": std}
            for share in shares]


def test_a_unanimous_group_gives_exactly_nothing_in_a_record(tmp_path: Path) -> None:
    own = recorded(tmp_path, orthogonal, group=4)
    verdict = of(sparsity([own]), "unanimous group")
    assert (verdict.outcome, verdict.observed, verdict.n) == ("holds", 0.0, 2)  # one of three groups, two readings


@pytest.mark.parametrize("method", ["p1_grpo", "grpo", "rloo"])
def test_a_gradient_of_a_unanimous_group_refutes_it_however_small(method: str) -> None:
    leak = evidence(readings={"step": [0.0, 1.0], "unanimous": [2.0, 1.0], "unanimous_largest": [0.0, 1e-30]},
                    method=method)
    verdict = of(sparsity([leak]), "unanimous group")
    assert (verdict.outcome, verdict.observed, verdict.n) == ("refuted", 1e-30, 3)


def test_readings_without_a_unanimous_group_do_not_show_that_it_gives_nothing() -> None:
    none = evidence(readings={"step": [0.0], "unanimous": [0.0], "unanimous_largest": [0.0]})
    assert [verdict.definition for verdict in sparsity([none])] == [""]


@pytest.mark.parametrize("changes", [{"method": "reinforce"}, {"method": "grpo", "beta": 0.1}, {"method": "dro"}])
def test_rows_with_another_baseline_or_a_KL_term_are_not_asked_for_zero_gradients(changes: dict[str, Any]) -> None:
    leak = evidence(readings={"unanimous": [1.0], "unanimous_largest": [1.0]}, **changes)
    assert [verdict.definition for verdict in sparsity([leak])] == [""]


@pytest.mark.parametrize(("p", "count", "size"), [(0.3, 6, 3), (0.5, 16, 2), (0.9, 12, 4), (0.0, 8, 4), (1.0, 8, 8)])
def test_the_mean_of_the_estimated_dead_share_over_batches_is_the_law(p: float, count: int, size: int) -> None:
    # Σ_K P(K)·estimate(K) over K ~ Binomial(N, p), e.g. 0.3³ + 0.7³ = 0.37.
    expected = math.fsum(math.comb(count, right) * p**right * (1 - p) ** (count - right)
                         * dead_share(right, count, size) for right in range(count + 1))
    assert expected == pytest.approx(p**size + (1 - p) ** size, abs=1e-12)


LAW = 2 * (200 * 199 * 198 * 197) / (400 * 399 * 398 * 397)
"""The law for 100 groups of four with 200 of 400 right: 2·C(200, 4)/C(400, 4) = 0.1231, a little below 2·(½)⁴."""


def test_the_dead_share_follows_the_law_or_exceeds_it() -> None:
    assert dead_share(200, 400, 4) == pytest.approx(LAW, abs=1e-15)
    near = [evidence(group=4, seed=seed, steps=dead_steps([LAW + seed / 20, LAW - seed / 20])) for seed in range(3)]
    verdict = of(sparsity(near), "p^R")
    assert (verdict.outcome, verdict.n, verdict.of) == ("holds", 3, "runs")
    assert verdict.observed == pytest.approx(0.0, abs=1e-15)
    far = [evidence(group=4, seed=seed, steps=dead_steps([LAW + 0.2, LAW + 0.2])) for seed in range(3)]
    verdict = of(sparsity(far), "p^R")
    assert verdict.outcome == "refuted"
    assert verdict.observed == pytest.approx(0.2, abs=1e-15)
    assert "Jensen" in verdict.reason


def test_the_law_below_the_band_is_refuted_too_and_between_it_says_how_many_would_decide() -> None:
    low = [evidence(group=4, seed=seed, steps=dead_steps([0.0])) for seed in range(3)]
    assert of(sparsity(low), "p^R").outcome == "refuted"
    # Excesses 0.02, 0.04, 0.06: half width 4.3027·0.02/√3 = 0.0497, 0.01 from the bound: 3·4.97² = 74.1.
    wide = [evidence(group=4, seed=seed, steps=dead_steps([LAW + 0.02 + 0.02 * seed])) for seed in range(3)]
    verdict = of(sparsity(wide), "p^R")
    assert verdict.outcome == "undecided"
    assert "about 75 runs would decide" in verdict.reason


def test_the_law_is_not_decided_by_two_runs_however_many_steps_they_have() -> None:
    verdict = of(sparsity([evidence(group=4, seed=seed, steps=dead_steps([0.9] * 5)) for seed in range(2)]), "p^R")
    assert (verdict.outcome, verdict.interval, verdict.n, verdict.of) == ("undecided", None, 10, "steps of 2 runs")
    assert "10 steps of 2 runs give no interval over runs, it needs 3 seeds" in verdict.reason


@pytest.mark.parametrize(("groups", "binary"), [(0.0, False), (0.5, False), (1.0, True), (2.0, True)])
def test_a_step_with_fewer_rewards_than_R_is_not_binary(groups: float, binary: bool) -> None:
    step = ALL_RIGHT | {"signal/groups": groups}
    found = sparsity([evidence(group=4, seed=seed, steps=[step]) for seed in range(3)])
    assert [(v.outcome, "p^R" in v.definition) for v in found] == [("holds", True) if binary else ("undecided", False)]


def test_graded_rewards_have_no_law_to_follow() -> None:
    graded = [step | {"reward/std": 0.1} for step in dead_steps([0.125] * 6)]
    assert [v.definition[:20] for v in sparsity([evidence(group=4, steps=graded)])] == ["share of dead groups"]
    assert "p^R" not in sparsity([evidence(group=4, steps=graded)])[0].definition


@pytest.mark.parametrize(("shares", "outcome", "change"),
                         [([.1, .1, .5, .5, .3, .3], "holds", .2), ([.3, .3, .9, .9, .1, .1], "refuted", -.2),
                          ([0, 0, 1, 1, 1, 0.8], "holds", .9)])
def test_sparsity_grows_or_falls_from_the_first_to_the_last_third(shares: list[float], outcome: str, change: float
                                                                  ) -> None:
    runs = [evidence(seed=seed, steps=[{"signal/dead_groups": x + 0.01 * seed * i} for i, x in enumerate(shares)])
            for seed in range(3)]
    verdict = of(sparsity(runs), "last third")
    # 0.01·seed·i adds 0.04·seed between the thirds: 0, 0.04, 0.08.
    assert verdict.observed == pytest.approx(change + 0.04, abs=1e-12)
    assert verdict.outcome == outcome
    verdict = of(sparsity(runs[:2]), "last third")
    assert (verdict.outcome, verdict.interval) == ("undecided", None)
    assert "2 runs give no interval over runs, it needs 3 seeds" in verdict.reason


def test_five_steps_have_no_thirds() -> None:
    verdict, = sparsity([evidence(steps=[{"signal/dead_groups": 0.1}] * 5)])
    assert verdict.definition == ""


# -- P1.8 ------------------------------------------------------------------------------------------------------------


def turning(outcome: Sequence[float], by_turn: float = 0.5, by_state: float = 0.0, largest: float = 1.0, seed: int = 0,
            **changes: Any) -> Evidence:
    """Two kept steps; RMS of outcome by turn, of the others a share of it, with a little that differs by seed."""
    count = len(outcome)
    rms = [value * (1 + 0.01 * seed) for value in outcome]
    return evidence(task="turns", seed=seed, turns={
        "step": [0.0] * count + [1.0] * count, "turn": [float(h) for h in range(count)] * 2, "rms_outcome": rms * 2,
        "rms_turn": [by_turn * value for value in rms] * 2, "rms_state": [by_state * value for value in rms] * 2,
        "largest": [largest] * 2 * count, "bound": [h + 6.0 for h in range(count)] * 2, "n": [32.0] * 2 * count},
        **changes)


def test_the_multi_turn_bias_grows_and_is_reduced() -> None:
    found = multi_turn(seeds(lambda seed: turning([0.0, 1.0, 2.0], seed=seed)))
    assert [verdict.outcome for verdict in found] == ["holds"] * 3
    # The bounds are 6, 7 and 8, the largest bias is 1: the most of its bound is 1/6.
    assert "the largest bias is 0.17 of its bound" in of(found, "slope").reason
    # Half of the RMS is a quarter of the square.
    assert "25%" in of(found, "same turn").reason
    # Squares 0, 1, 4 have the slope 2; times (1 + 0.01·seed)², whose mean over three seeds is 1.0201667.
    assert of(found, "slope").observed == pytest.approx(2 * (1 + 1.01**2 + 1.02**2) / 3, abs=1e-12)


def test_a_bias_that_shrinks_with_the_turn_refutes_growth() -> None:
    found = multi_turn(seeds(lambda seed: turning([0.0, 2.0, 1.0, 0.2, 0.1], seed=seed)))
    assert of(found, "slope").outcome == "refuted"


def test_kept_steps_of_one_turn_have_no_slope() -> None:
    verdict, = multi_turn(seeds(lambda seed: turning([1.0], seed=seed)))
    assert (verdict.outcome, verdict.observed) == ("undecided", None)
    assert verdict.reason.startswith("needs kept steps in which two groups met the same state at several turns")


@pytest.mark.parametrize(("by_turn", "by_state"), [(1.5, 0.5), (0.9, 1.1)])
def test_a_baseline_that_adds_to_the_bias_is_refuted(by_turn: float, by_state: float) -> None:
    found = multi_turn(seeds(lambda seed: turning([0.0, 1.0, 2.0], by_turn=by_turn, by_state=by_state, seed=seed)))
    assert of(found, "same turn").outcome == ("refuted" if by_turn > 1 else "holds")
    assert of(found, "same state").outcome == ("refuted" if by_state > 1 else "holds")


@pytest.mark.parametrize(("outcome", "slope"), [([0.0, -2.0], -4.0), ([0.0, 1.0, -2.0], -2.0), ([-1.0, 1.0], 2.0)])
def test_squares_that_chance_made_negative_count_as_such(outcome: list[float], slope: float) -> None:
    # RMS −2 stands for the square −4. Slopes of (0, −4), (0, 1, −4), (−1, 1).
    assert of(multi_turn([turning(outcome)]), "slope").observed == pytest.approx(slope, abs=1e-12)


def test_the_kept_steps_of_one_run_of_turns_decide_nothing() -> None:
    found = multi_turn([turning([0.0, 1.0])])
    assert len(found) == 3
    for verdict in found:
        assert (verdict.outcome, verdict.interval, verdict.n, verdict.of) == (
            "undecided", None, 2, "kept steps of one run")
        assert "2 kept steps of one run give no interval over runs, it needs 3 seeds" in verdict.reason


# -- P1.11 -----------------------------------------------------------------------------------------------------------


def baselines(lost: float, chance: float, shift: float, seed: int) -> Evidence:
    reading = {"baseline/variance_lost": lost + 0.001 * seed, "baseline/variance_lost_by_chance": chance,
               "baseline/mean": 0.4, "baseline/optimal": 0.4 + shift}
    return evidence(seed=seed, steps=[reading] * 2)


@pytest.mark.parametrize(("lost", "chance", "outcome"), [(0.30, 0.29, "holds"), (0.30, 0.26, "holds"),
                                                         (0.01, 0.30, "holds"), (0.30, 0.24, "refuted")])
def test_the_mean_is_optimal_where_it_loses_little_more_than_chance(lost: float, chance: float, outcome: str) -> None:
    verdict = of(baseline(seeds(lambda seed: baselines(lost, chance, 0.0, seed))), "less what chance gives")
    assert (verdict.outcome, verdict.observed) == (outcome, pytest.approx(lost - chance + 0.001, abs=1e-12))


@pytest.mark.parametrize(("shift", "outcome"), [(0.04, "holds"), (-0.04, "holds"), (0.06, "refuted"),
                                                (-0.1, "refuted")])
def test_the_mean_is_optimal_where_the_optimum_lies_close_to_it(shift: float, outcome: str) -> None:
    verdict = of(baseline(seeds(lambda seed: baselines(0.3, 0.3, shift, seed))), "b* less")
    assert (verdict.outcome, verdict.observed) == (outcome, pytest.approx(shift, abs=1e-12))


def test_a_loss_about_the_threshold_is_undecided() -> None:
    runs = [evidence(seed=seed, steps=[{"baseline/variance_lost": x, "baseline/variance_lost_by_chance": 0.0}])
            for seed, x in enumerate((0.0, 0.05, 0.11))]
    verdict, = baseline(runs)
    assert verdict.outcome == "undecided"
    assert "would decide" in verdict.reason
