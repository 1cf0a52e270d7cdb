"""P1's claims on runs: for each a world in which it holds, one in which it is refuted, and one that cannot tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from claims.makers_claims import (
    evidence,
    learner,
    one_direction,
    orthogonal,
    recorded,
    seeds,
    sweep,
    two_directions,
    unequal,
)
from creditscope.claims import p1_runs
from creditscope.claims.evidence import Evidence, from_json, over_runs, to_json
from creditscope.claims.p1_runs import (
    DEFINITIONS,
    FLAT,
    baseline,
    correlation,
    dead_share,
    is_binary,
    larger_groups_learn_faster,
    multi_turn,
    other_credit,
    rank_about_two,
    rank_and_spread,
    rank_aware,
    slopes,
    sparsity,
    top_share,
    uniform_credit,
    zero_sum,
)
from creditscope.claims.reading import ratio_over_runs, sweeps
from creditscope.claims.verdict import Verdict
from each import each

TESTS = (uniform_credit, zero_sum, sparsity, rank_about_two, top_share, larger_groups_learn_faster, multi_turn,
         baseline, other_credit, rank_and_spread, rank_aware)


def of(verdicts: Sequence[Verdict], words: str) -> Verdict:
    """The one verdict whose definition holds these words."""
    found = [verdict for verdict in verdicts if words in verdict.definition]
    assert len(found) == 1, [verdict.definition for verdict in verdicts]
    return found[0]


# -- what is common --------------------------------------------------------------------------------------------------

ALL_RIGHT = {"signal/dead_groups": 1.0, "signal/groups": 1.0, "reward/mean": 1.0, "reward/std": 0.0}
"""A step of one group whose rewards are all 1."""


@each("test", TESTS)
@each("runs", [[], [evidence()], [Evidence(name="x", config={})],
                                  [evidence(method="mine", group="eight", seed=None, credit="own:mine")],
                                  [evidence(inner_steps=[1], minibatches={})], [evidence(group=0, steps=[ALL_RIGHT])]])
def test_without_what_it_needs_a_claim_is_undecided_and_says_which_flags_give_it(
        test: Callable[[Sequence[Evidence]], list[Verdict]], runs: list[Evidence]) -> None:
    verdict, = test(runs)
    assert (verdict.outcome, verdict.observed) == ("undecided", None)
    assert verdict.reason.startswith("needs ")
    assert "creditscope" in verdict.reason


def test_three_runs_are_averaged_each_and_fewer_give_the_mean_of_their_readings_without_an_interval() -> None:
    # Means of the runs 1, 2, 6: mean 3, s = √7, half width 4.3027·√(7/3).
    value, unit = over_runs([[0.0, 2.0], [2.0], [6.0], []])  # type: ignore[misc]
    assert (value.mean, value.n, unit) == (3.0, 3, "runs")
    assert value.high == pytest.approx(3 + 4.3027 * math.sqrt(7 / 3), abs=1e-12)
    value, unit = over_runs([[0.0, 2.0], [4.0]], "steps")  # type: ignore[misc]
    assert (value.mean, value.low, value.high, value.n, unit) == (2.0, None, None, 3, "steps of 2 runs")
    assert over_runs([[], []]) is None


def test_a_ratio_is_of_sums_by_run_and_by_reading_below_three_runs() -> None:
    # Readings 0 and 1 of one run: (1 + 3)/(2 + 2) = 1 and 6/2 = 3; the run whole: 10/6.
    rows = [(0.0, 1.0, 2.0), (1.0, 6.0, 2.0), (0.0, 3.0, 2.0)]
    value, unit = ratio_over_runs([rows])  # type: ignore[misc]
    assert (value.mean, value.low, value.high, value.n, unit) == (2.0, None, None, 2, "readings of one run")
    value, unit = ratio_over_runs([rows, rows])  # type: ignore[misc]
    assert (value.mean, value.low, value.high, value.n, unit) == (2.0, None, None, 4, "readings of 2 runs")
    value, unit = ratio_over_runs([rows, rows, rows])  # type: ignore[misc]
    assert (value.n, unit) == (3, "runs")
    assert (value.mean, value.low, value.high) == pytest.approx((10 / 6,) * 3, abs=1e-15)
    assert ratio_over_runs([[], []]) is None


def test_runs_that_sampled_the_same_count_once_and_other_tasks_are_other_families() -> None:
    short = evidence(groups={"x": [1.0]}, scope="light")
    long = evidence(groups={"x": [1.0, 2.0]}, scope="full")
    other = evidence(groups={"x": [3.0]}, task="turns")
    found = list(sweeps([short, long, other, evidence()], lambda run: len(run.column("x"))))
    assert [[id(run) for run in family] for family in found] == [[id(long)], [id(other)]]


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
    assert is_binary(step, 4) is binary
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


# -- P1.5 ------------------------------------------------------------------------------------------------------------


def test_two_directions_give_rank_two_at_every_R_by_every_definition_but_the_centred(tmp_path: Path) -> None:
    found = rank_about_two(sweep(tmp_path, two_directions))
    by = {verdict.definition: verdict for verdict in found}
    assert len(found) == len(DEFINITIONS) + 2
    for column, words in DEFINITIONS.items():
        if column != "all/centred_effective_rank":
            assert by[words].outcome == "holds", words
            assert by[words].observed == pytest.approx(2.0, abs=1e-6)
    # ψ − ψ̄ = ±(e₁ − e₂)/2: one direction.
    centred = by[DEFINITIONS["all/centred_effective_rank"]]
    assert (centred.outcome, centred.observed) == ("refuted", pytest.approx(1.0, abs=1e-6))
    assert [v.outcome for v in found if "slope" in v.definition] == ["holds", "holds"]


def test_orthogonal_scores_refute_rank_two_unless_the_spectrum_is_cut(tmp_path: Path) -> None:
    found = rank_about_two(sweep(tmp_path, orthogonal))
    by = {verdict.definition: verdict for verdict in found}
    full = by[DEFINITIONS["all/effective_rank"]]
    # k = R/2: 4k(R−k)/R = R, so 2, 4, 8; the farthest from 2 is shown.
    assert (full.outcome, full.n, full.of) == ("refuted", 3, "runs")
    assert full.observed == pytest.approx(8.0, abs=1e-9)
    assert "2.00, 4.00, 8.00 at R = 2, 4, 8, where orthogonal" in full.reason
    for column in ("qv/effective_rank", "layer/effective_rank", "all/entropy_rank", "all/participation_ratio",
                   "all/stable_rank", "all/energy_rank_90", "all/energy_rank_99", "all/centred_effective_rank"):
        assert by[DEFINITIONS[column]].outcome == "refuted", column
    for column in ("all/effective_rank_truncated_2", "layer/effective_rank_truncated_2"):
        assert by[DEFINITIONS[column]].outcome == "holds", column
    slope, layers = (v for v in found if "slope" in v.definition)
    assert (slope.outcome, layers.outcome) == ("refuted", "refuted")
    assert slope.observed == pytest.approx(1.0, abs=1e-9)  # log R on log R
    assert "null 1.00" in slope.reason


def test_one_direction_refutes_rank_two_from_below_even_at_R_2(tmp_path: Path) -> None:
    found = rank_about_two(sweep(tmp_path, one_direction, sizes=(2,)))
    verdict = next(v for v in found if v.definition == DEFINITIONS["all/effective_rank"])
    assert (verdict.outcome, verdict.observed) == ("refuted", pytest.approx(1.0, abs=1e-6))


@pytest.mark.parametrize("sizes", [(2,), (8,), (2, 8)])
def test_rank_two_at_fewer_than_two_larger_R_is_not_whatever_R(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    found = rank_about_two(sweep(tmp_path, two_directions, sizes=sizes))
    verdict = next(v for v in found if v.definition == DEFINITIONS["all/effective_rank"])
    assert verdict.outcome == "undecided"
    assert "needs 2 group sizes of four or more" in verdict.reason


def ranked(size: int, seed: int, *values: float, **changes: Any) -> Evidence:
    return evidence(group=size, seed=seed, groups={"all/effective_rank": list(values)}, **changes)


@pytest.mark.parametrize(("value", "outcome"), [(1.5, "holds"), (2.5, "holds"), (1.49, "refuted"), (2.51, "refuted")])
def test_the_band_of_about_two_ends_where_numbers_stop_rounding_to_it(value: float, outcome: str) -> None:
    runs = [ranked(size, seed, value if size == 8 else 2.0) for size in (4, 8) for seed in range(3)]
    verdict = of([v for v in rank_about_two(runs) if "slope" not in v.definition], "rollout matrix")
    assert (verdict.outcome, verdict.observed) == (outcome, value)


@pytest.mark.parametrize(("runs", "unit"), [(1, "3 readings of one run"), (2, "6 readings of 2 runs")])
def test_one_or_two_runs_decide_nothing_however_their_readings_agree(runs: int, unit: str) -> None:
    verdict = of(rank_about_two([ranked(8, seed, 4.0, 4.1, 4.2) for seed in range(runs)]), "rollout matrix")
    assert (verdict.outcome, verdict.interval, f"{verdict.n} {verdict.of}") == ("undecided", None, unit)
    assert verdict.observed == pytest.approx(4.1, abs=1e-12)
    assert f"{unit} give no interval over runs, it needs 3 seeds" in verdict.reason
    three = of(rank_about_two([ranked(8, seed, 4.0, 4.1, 4.2) for seed in range(3)]), "rollout matrix")
    assert (three.outcome, three.n, three.of) == ("refuted", 3, "runs")


@pytest.mark.parametrize("names", [
    ("model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.0.self_attn.v_proj.lora_B.weight"),
    ("model.layers.0.self_attn.qkv_proj.weight",), ("transformer.h.0.attn.c_attn.weight",)])
def test_definitions_by_layer_need_parameters_of_these_names_and_the_others_do_not(
        tmp_path: Path, names: tuple[str, ...]) -> None:
    by = {v.definition: v for v in rank_about_two(sweep(tmp_path, orthogonal, names=names))}
    assert len(by) == len(DEFINITIONS) + 1  # the slope of all parameters; by layer there is none
    for column, words in DEFINITIONS.items():
        if column.startswith("all/"):
            assert by[words].outcome in ("holds", "refuted"), column
            continue
        assert (by[words].outcome, by[words].observed) == ("undecided", None), column
        assert by[words].reason.startswith("needs parameters named q_proj.weight and v_proj.weight"), column


def test_an_interval_across_the_band_is_undecided_with_the_number_of_runs() -> None:
    # Means 1, 2, 3 at R = 8: half width 4.3027/√3 = 2.484, ½ from either bound: 3·4.968² = 74.05.
    runs = [ranked(size, seed, 1.0 + seed if size == 8 else 2.0) for size in (4, 8) for seed in range(3)]
    verdict = of([v for v in rank_about_two(runs) if "slope" not in v.definition], "rollout matrix")
    assert verdict.outcome == "undecided"
    assert "(shown: R = 8)" in verdict.reason
    assert "about 75 runs would decide" in verdict.reason


@each(("power", "outcome"), [
    (1.0, "refuted"), (0.5, "refuted"), (1.1 * FLAT, "refuted"), (0.9 * FLAT, "holds"), (0.0, "holds"),
    (-0.9 * FLAT, "holds"), (-1.1 * FLAT, "refuted"), (-0.5, "refuted"), (-1.0, "refuted")])
def test_the_slope_of_a_power_law_is_its_power(power: float, outcome: str) -> None:
    runs = [ranked(size, seed, (1 + seed) * size**power) for size in (2, 4, 16) for seed in range(3)]
    assert slopes(runs, "all/effective_rank") == pytest.approx([power] * 3, abs=1e-12)
    assert of(rank_about_two(runs), "slope").outcome == outcome


def test_seeds_that_miss_an_R_have_no_slope() -> None:
    runs = [ranked(size, seed, 2.0) for size in (4, 8) for seed in range(3)][:-1]
    verdict = of(rank_about_two(runs), "slope")
    assert (verdict.outcome, verdict.n) == ("undecided", 2)
    assert of(rank_about_two([ranked(4, 0, 2.0), ranked(8, 1, 2.0)]), "slope").reason.startswith("needs 3 seeds")


@each("changes", [{"adapt": "raise_group,most=16"}, {"adapt": "late_group"},
                                     {"adapt": "denser_credit,to=step_reward"}, {"method": "ppo"},
                                     {"credit": "step_reward"}, {"credit": "leave_one_out"}, {"inner_steps": 2},
                                     {"minibatches": 4}, {"inner_steps": 1, "minibatches": 2}])
def test_runs_that_change_their_R_have_other_credit_or_several_updates_a_batch_say_nothing_about_rank_and_R(
        changes: dict[str, Any]) -> None:
    assert [v.definition for v in rank_about_two([ranked(8, 0, 2.0, 2.0, **changes)])] == [""]


@pytest.mark.parametrize("changes", [{"inner_steps": 1}, {"minibatches": 1}, {"inner_steps": None, "minibatches": None},
                                     {"inner_steps": 1, "minibatches": 1}, {"adapt": None}])
def test_runs_with_one_update_a_batch_are_as_P1s(changes: dict[str, Any]) -> None:
    runs = [ranked(8, seed, 4.0, **changes) for seed in range(3)]
    assert of(rank_about_two(runs), "rollout matrix").outcome == "refuted"


@pytest.mark.parametrize("order", [1, -1])
def test_a_run_that_was_read_twice_is_one_run(order: int) -> None:
    runs = [ranked(8, seed, 4.0, 4.0 + seed) for seed in range(2)]
    twins = [ranked(8, seed, 4.0, 4.0 + seed, 9.0, scope="full", also=["step_reward"]) for seed in range(2)]
    verdict = of(rank_about_two((runs + twins)[::order]), "rollout matrix")
    assert (verdict.n, verdict.of) == (6, "readings of 2 runs")
    assert verdict.observed == pytest.approx((4 + 4 + 9 + 4 + 5 + 9) / 6, abs=1e-12)  # of the twins with more readings


def test_a_verdict_is_the_same_from_the_record_and_from_its_file(tmp_path: Path) -> None:
    runs = sweep(tmp_path, unequal)
    for i, run in enumerate(runs):
        (tmp_path / f"{i}.evidence.json").write_text(to_json(run))
    again = [from_json(tmp_path / f"{i}.evidence.json") for i in range(len(runs))]
    for ours, theirs in zip(rank_about_two(runs), rank_about_two(again), strict=True):
        assert (ours.definition, ours.outcome, ours.n) == (theirs.definition, theirs.outcome, theirs.n)
        assert ours.observed == pytest.approx(theirs.observed, abs=1e-4)  # five digits are kept


# -- P1.6 ------------------------------------------------------------------------------------------------------------


def shares(by_size: dict[int, float], ranks: dict[int, int] | None = None) -> list[Evidence]:
    full = ranks or {2: 2, 4: 3, 8: 7}
    return [evidence(group=size, seed=seed, groups={"all/top1": [top, top], "layer/top1": [top, top],
                                                    "all/numerical_rank": [1.0, float(full[size])]})
            for size, top in by_size.items() for seed in range(3)]


@pytest.mark.parametrize("tops", [{2: 0.65, 4: 0.75, 8: 0.55}, {2: 0.56, 4: 0.66, 8: 0.46}, {2: 0.74, 4: 0.84, 8: 0.64},
                                  {2: 0.6, 4: 0.8, 8: 0.5}])
def test_the_printed_top_shares_and_ranks_hold_as_printed_and_half_a_digit_beyond(tops: dict[int, float]) -> None:
    assert [verdict.outcome for verdict in top_share(shares(tops))] == ["holds"] * 3


@pytest.mark.parametrize("tops", [{2: 0.65, 4: 0.75, 8: 0.75}, {2: 0.65, 4: 0.55, 8: 0.55}, {2: 0.5, 4: 0.75, 8: 0.55}])
def test_a_top_share_outside_its_band_at_one_R_refutes_it(tops: dict[int, float]) -> None:
    every, layers, rank = top_share(shares(tops))
    assert (every.outcome, layers.outcome, rank.outcome) == ("refuted", "refuted", "holds")
    wrong = next(size for size, top in tops.items() if top != {2: 0.65, 4: 0.75, 8: 0.55}[size])
    assert every.observed == pytest.approx(tops[wrong], abs=1e-15)


def test_independent_rows_have_rank_R_which_refutes_the_printed_ranks(tmp_path: Path) -> None:
    verdict = of(top_share(sweep(tmp_path, orthogonal)), "largest rank")
    assert (verdict.outcome, verdict.observed) == ("refuted", 8.0)
    assert "2, 4, 8 at R = 2, 4, 8" in verdict.reason


def test_ranks_below_the_printed_ones_and_missing_sizes_are_undecided() -> None:
    tops = {2: 0.65, 4: 0.75, 8: 0.55}
    assert of(top_share(shares(tops, {2: 2, 4: 3, 8: 6})), "largest rank").outcome == "undecided"
    found = top_share(shares({2: 0.65, 8: 0.55}))
    assert [verdict.outcome for verdict in found] == ["undecided"] * 3
    assert all("--group 4 as well" in verdict.reason for verdict in found)


def test_runs_whose_ranks_were_not_read_need_them() -> None:
    runs = seeds(lambda seed: evidence(seed=seed, groups={"all/top1": [0.55]}))
    verdict = of(top_share(runs), "largest rank")
    assert (verdict.outcome, verdict.observed) == ("undecided", None)
    assert verdict.reason.startswith("needs runs that the microscope read")


# -- P1.7 ------------------------------------------------------------------------------------------------------------


def test_at_equal_steps_the_larger_group_is_ahead_where_rollouts_teach_and_at_equal_rollouts_it_is_not() -> None:
    # Accuracy = rollouts/1000, 8 prompts a step. After three steps R = 2 spent 48, R = 8 192: 0.192 − 0.048 = 0.144.
    runs = [learner(lambda spent: spent / 1000, group=size, steps=24 // size, seed=seed) for size in (2, 8)
            for seed in range(3)]
    steps, rollouts = larger_groups_learn_faster(runs)
    assert "equal steps" in steps.definition
    assert (steps.outcome, steps.n, steps.of) == ("holds", 3, "seeds")
    assert steps.observed == pytest.approx(0.144, abs=1e-12)
    assert "after 3 steps R = 8 differs by +14.4" in steps.reason
    # Twelve steps of R = 2 and three of R = 8 are 192 rollouts, 0.192 each.
    assert rollouts.outcome == "refuted"
    assert rollouts.observed == pytest.approx(0.0, abs=1e-12)
    assert "after 192 rollouts" in rollouts.reason
    assert "points from R = 2" in rollouts.reason


def test_a_larger_group_that_learns_more_from_a_rollout_is_ahead_at_equal_rollouts() -> None:
    runs = [learner(lambda spent, size=size: size * spent / 10000, group=size, steps=48 // size,  # type: ignore[misc]
                    seed=seed) for size in (8, 16) for seed in range(3)]
    found = larger_groups_learn_faster(runs)
    assert [verdict.outcome for verdict in found] == ["holds", "holds"]
    # Six steps of 8·8 and three of 8·16 are 384 rollouts: (16 − 8)·384/10000.
    assert of(found, "equal rollouts").observed == pytest.approx(0.3072, abs=1e-12)


def test_a_larger_group_that_learns_less_is_refuted_at_equal_steps() -> None:
    runs = [learner(lambda spent, size=size: spent / size**3, group=size, seed=seed)  # type: ignore[misc]
            for size in (4, 8) for seed in range(3)]
    assert of(larger_groups_learn_faster(runs), "equal steps").outcome == "refuted"


def test_learning_is_compared_by_seed_and_two_seeds_are_not_enough() -> None:
    # The seeds differ by more than the groups do; paired, only the gap is left.
    runs = [learner(lambda spent, luck=seed, size=size: 0.2 * luck + 0.01 * (size == 8) * (spent > 0),  # type: ignore[misc]
                    group=size, seed=seed) for size in (4, 8) for seed in range(4)]
    verdict = of(larger_groups_learn_faster(runs), "equal steps")
    assert verdict.outcome == "holds"
    assert verdict.observed == pytest.approx(0.01, abs=1e-12)
    two = of(larger_groups_learn_faster([run for run in runs if run["seed"] < 2]), "equal steps")
    assert (two.outcome, two.n, two.interval) == ("undecided", 2, None)
    none = [run for run in runs if (run["seed"] < 2) == (run["group"] == 4)]
    assert of(larger_groups_learn_faster(none), "equal steps").reason.startswith("needs 3 seeds")


def evaluated(size: int, seed: int, *points: tuple[int, float]) -> Evidence:
    """A run evaluated at these (rollouts spent, accuracy), a step between two."""
    spent = [x for x, _ in points]
    lines = [{"eval/accuracy": y, "rollouts/spent": after - x}
             for (x, y), after in zip(points, spent[1:], strict=False)]
    return evidence(group=size, seed=seed, steps=[*lines, {"eval/accuracy": points[-1][1]}])


@pytest.mark.parametrize(("near", "decides"), [(100, True), (110, True), (111, False), (90, True), (89, False)])
def test_learning_is_compared_where_both_were_evaluated_within_a_tenth(near: int, decides: bool) -> None:
    # R = 4 ends at 100. R = 8 is evaluated at `near` and at 400, at 1/1000 a rollout, so 0.1 on its line at 100.
    runs = [run for seed in range(3) for run in (
        evaluated(4, seed, (0, 0.0), (50, 0.02), (100, 0.04)),
        evaluated(8, seed, (0, 0.0), (near, near / 1000), (400, 0.4)))]
    verdict = of(larger_groups_learn_faster(runs), "equal rollouts")
    assert verdict.outcome == ("holds" if decides else "undecided")
    if decides:
        assert verdict.observed == pytest.approx(0.06, abs=1e-12)
    else:
        assert verdict.reason.startswith("needs an evaluation at 100 rollouts, to a tenth, of R = 8")
        assert "creditscope train --eval-rollouts 100" in verdict.reason


@pytest.mark.parametrize(("unit", "flag"), [("steps", "--eval-every 3"), ("rollouts", "--eval-rollouts 96")])
def test_the_flag_that_gives_the_evaluation_counts_in_the_unit_of_the_comparison(unit: str, flag: str) -> None:
    # R = 4 ends after 3 steps of 8 prompts, 96 rollouts; R = 8 is evaluated at the end of its 10 steps alone.
    late = [{"eval/accuracy": 0.0, "rollouts/spent": 64}, *[{"rollouts/spent": 64}] * 9, {"eval/accuracy": 0.6}]
    runs = [run for seed in range(3) for run in (learner(lambda spent: spent / 1000, group=4, seed=seed),
                                                 evidence(group=8, seed=seed, steps=late))]
    verdict = of(larger_groups_learn_faster(runs), f"equal {unit}")
    assert verdict.outcome == "undecided"
    assert verdict.reason.endswith(f"of R = 8: creditscope train {flag}")


def test_a_run_that_has_not_finished_is_not_compared() -> None:
    runs = [learner(lambda spent: spent / 1000, group=size, seed=seed) for size in (4, 8) for seed in range(4)]
    cut = [replace(run, finished=run["seed"] != 3 or run["group"] != 8) for run in runs]
    assert of(larger_groups_learn_faster(runs), "equal steps").n == 4
    assert of(larger_groups_learn_faster(cut), "equal steps").n == 3
    verdict, = larger_groups_learn_faster([replace(run, finished=False) for run in runs])
    assert (verdict.outcome, verdict.definition) == ("undecided", "")
    assert verdict.reason.startswith("needs")


def test_a_seed_that_only_one_size_has_does_not_say_where_they_are_compared() -> None:
    runs = [learner(lambda spent: spent / 1000, group=size, seed=seed) for size in (4, 8) for seed in range(3)]
    short = learner(lambda spent: 0.9, group=4, steps=1, seed=7)
    verdict = of(larger_groups_learn_faster([*runs, short]), "equal steps")
    # After three steps of 8 prompts: 0.192 − 0.096.
    assert (verdict.outcome, verdict.n, verdict.observed) == ("holds", 3, pytest.approx(0.096, abs=1e-12))
    assert "after 3 steps" in verdict.reason


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


# -- P1.12 -----------------------------------------------------------------------------------------------------------


def test_leave_one_out_leaves_the_rank_and_credit_that_sets_rows_apart_raises_it(tmp_path: Path) -> None:
    # Rows R/(R−1) as long have the same spectrum shape; orthogonal rows have rank 8 where two directions have 2.
    also = {"leave_one_out": lambda reward: two_directions(reward) * 8 / 7, "step_reward": orthogonal}
    found = other_credit([recorded(tmp_path, two_directions, also=also, seed=seed) for seed in range(3)])
    assert [verdict.outcome for verdict in found] == ["refuted", "holds"]
    alone, steps = found
    assert "leave_one_out" in alone.definition
    assert alone.observed == pytest.approx(1.0, abs=1e-7)
    assert (steps.n, steps.of) == (3, "runs")
    assert steps.observed == pytest.approx(4.0, abs=1e-6)
    assert "× 4.00" in steps.reason


@each(("own", "other", "outcome"), [
    (1.0, 1.6, "refuted"), (1.0, 2.4, "refuted"), (1.9, 2.45, "refuted"), (1.9, 2.6, "holds"), (2.2, 2.6, "refuted"),
    (4.0, 4.4, "refuted"), (4.0, 5.2, "holds"), (4.0, 3.0, "refuted")])
def test_a_rank_is_broken_where_it_rises_by_a_quarter_and_beyond_two_and_a_half(own: float, other: float, outcome: str
                                                                              ) -> None:
    runs = [evidence(seed=seed, groups={"all/effective_rank": [own] * 2,
                                        "credit:mine/effective_rank": [other, other + 0.001 * seed]})
            for seed in range(3)]
    verdict, = other_credit(runs)
    assert verdict.outcome == outcome
    assert verdict.observed == pytest.approx((other + 0.0005) / own, abs=1e-12)


def test_only_groups_that_both_credits_read_are_compared() -> None:
    runs = [evidence(seed=seed, groups={"step": [0.0, 0.0, 1.0], "all/effective_rank": [2.0, 50.0, 2.0],
                                        "credit:mine/effective_rank": [3.0, None, 5.0]}) for seed in range(3)]
    verdict, = other_credit(runs)
    assert (verdict.outcome, verdict.observed) == ("holds", 2.0)  # (3 + 5)/(2 + 2)


def test_a_ratio_about_the_threshold_is_undecided_and_R_2_is_not_asked() -> None:
    def run(seed: int, size: int = 8) -> Evidence:
        return evidence(group=size, seed=seed, groups={"all/effective_rank": [2.0], "credit:mine/effective_rank":
                                                       [2.2 + 0.4 * seed]})

    verdict, = other_credit(seeds(run))
    assert verdict.outcome == "undecided"
    assert "would decide" in verdict.reason
    verdict, = other_credit([run(seed, 2) for seed in range(3)])
    assert verdict.reason.startswith("needs")


# -- P1.13 -----------------------------------------------------------------------------------------------------------


def spread(rank: Callable[[float, float], float], seed: int) -> Evidence:
    """Eight groups of R = 8 with k = 1, 2, 3, 4 right; rank from (σ_r, null), null = 4k(R−k)/R = 32σ_r²."""
    right = [1, 2, 3, 4] * 2
    std = [math.sqrt(k * (8 - k)) / 8 for k in right]
    null = [4 * k * (8 - k) / 8 for k in right]
    noise = 1 + 0.001 * np.random.default_rng(seed).normal(size=8)
    ranks = [rank(s, n) * e for s, n, e in zip(std, null, noise.tolist(), strict=True)]
    return evidence(seed=seed, groups={"reward_std": std, "orthogonal_null": null, "all/effective_rank": ranks})


def test_the_rank_rises_with_the_spread_or_it_does_not() -> None:
    plain, freed = rank_and_spread(seeds(lambda seed: spread(lambda std, null: null * (1 + std), seed)))
    assert (plain.outcome, freed.outcome) == ("holds", "holds")
    assert freed.definition.endswith("over its null 4k(R−k)/R: does it fall faster than the null?")
    plain, freed = rank_and_spread(seeds(lambda seed: spread(lambda std, null: 2 - std, seed)))
    assert (plain.outcome, freed.outcome) == ("refuted", "refuted")


@pytest.mark.parametrize("fall", [0.2, 0.5, 1.0])
def test_a_rank_that_rises_only_as_its_null_does_is_told_apart(fall: float) -> None:
    plain, freed = rank_and_spread(seeds(lambda seed: spread(lambda std, null: null * (2 - fall * std), seed)))
    assert (plain.outcome, freed.outcome) == ("holds", "refuted")


def test_a_correlation_needs_eight_groups_that_differ() -> None:
    assert correlation([(float(i), float(i)) for i in range(7)]) is None
    assert correlation([(float(i), 0.5) for i in range(9)]) is None
    assert correlation([(float(i), -float(i)) for i in range(8)]) == pytest.approx(-1.0, abs=1e-12)


def test_correlations_of_two_runs_are_undecided() -> None:
    found = rank_and_spread([spread(lambda std, null: null, seed) for seed in range(2)])
    assert {verdict.outcome for verdict in found} == {"undecided"}
    assert "2 runs give no interval over runs, it needs 3 seeds" in found[0].reason


# -- P1.14 -----------------------------------------------------------------------------------------------------------


def spender(end: float, seed: int, **changes: Any) -> Evidence:
    """192 rollouts of R = 8 or less, accuracy on a line to `end`."""
    return learner(lambda spent: 0.2 + (end + 0.1 * seed - 0.2) * spent / 192, group=8, seed=seed, rollouts=192,
                   **changes)


def schedule(rule: float, fixed: float, late: float | None, name: str = "raise_group,most=32") -> list[Evidence]:
    runs = seeds(lambda seed: spender(rule + 0.001 * seed, seed, adapt=name)) + seeds(lambda seed: spender(fixed, seed))
    return runs + (seeds(lambda seed: spender(late, seed, adapt="late_group,at=0.5")) if late is not None else [])


@pytest.mark.parametrize("name", ["raise_group,most=32", "denser_credit,to=step_reward"])
def test_a_rule_that_beats_the_fixed_groups_and_the_control_holds(name: str) -> None:
    verdict, = rank_aware(schedule(0.5, 0.4, 0.45, name))
    assert (verdict.outcome, verdict.n, verdict.of) == ("holds", 3, "seeds")
    assert name in verdict.definition
    assert verdict.observed == pytest.approx(0.051, abs=1e-12)  # the smaller gap, 0.5 + mean(0, .001, .002) − 0.45


@pytest.mark.parametrize(("fixed", "late"), [(0.6, 0.4), (0.4, 0.6)])
def test_a_rule_behind_the_fixed_groups_or_behind_the_control_is_refuted(fixed: float, late: float) -> None:
    verdict, = rank_aware(schedule(0.5, fixed, late))
    assert verdict.outcome == "refuted"
    assert verdict.observed == pytest.approx(-0.099, abs=1e-12)


@pytest.mark.parametrize(("other", "outcome", "best"), [(0.7, "refuted", 4), (0.45, "holds", 4), (0.3, "holds", 8)])
def test_a_rule_is_compared_with_the_best_of_the_fixed_settings(other: float, outcome: str, best: int) -> None:
    more = seeds(lambda seed: learner(lambda spent: other + 0.1 * seed, group=4, steps=6, seed=seed, rollouts=192))
    verdict, = rank_aware(schedule(0.5, 0.4, 0.4) + more)
    assert verdict.outcome == outcome
    assert f"the best fixed setting, R = {best}" in verdict.reason


def test_credit_that_is_dense_from_the_start_is_a_fixed_setting_too() -> None:
    dense = seeds(lambda seed: spender(0.6, seed, credit="step_reward"))
    verdict, = rank_aware(schedule(0.5, 0.4, 0.4, "denser_credit,to=step_reward") + dense)
    assert verdict.outcome == "refuted"
    assert "R = 8 with step_reward" in verdict.reason


def test_without_the_control_a_rule_cannot_hold_but_can_be_refuted() -> None:
    verdict, = rank_aware(schedule(0.5, 0.4, None))
    assert verdict.outcome == "undecided"
    assert "needs 3 shared seeds of runs with --adapt late_group" in verdict.reason
    assert rank_aware(schedule(0.5, 0.6, None))[0].outcome == "refuted"


def test_two_shared_seeds_or_another_budget_decide_nothing() -> None:
    few = [run for run in schedule(0.5, 0.4, 0.4) if run["adapt"] != "none" or run["seed"] < 2]
    assert rank_aware(few)[0].outcome == "undecided"
    rule = [run for run in schedule(0.5, 0.4, None) if run["adapt"] != "none"]
    richer = seeds(lambda seed: learner(lambda spent: 0.1, steps=9, seed=seed, rollouts=500))
    verdict, = rank_aware(rule + richer)
    assert verdict.reason.startswith("needs 3 shared seeds")


def test_every_threshold_is_explained() -> None:
    source = Path(p1_runs.__file__).read_text().splitlines()
    for name in ("ROUNDING", "SUM_ROUNDING", "LAW_BAND", "THIRDS", "ABOUT_TWO", "SIZES", "FLAT", "DIGIT", "NEAR",
                 "LOST", "APART", "RAISED", "PAIRED_GROUPS"):
        line = next(i for i, text in enumerate(source) if text.startswith(f"{name} = "))
        assert source[line + 1].startswith('"""'), name
