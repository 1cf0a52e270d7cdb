"""P1's claims about the rank on runs: worlds in which each holds, is refuted, or stays undecided."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from claims.makers_claims import (
    evidence,
    of,
    one_direction,
    orthogonal,
    recorded,
    seeds,
    sweep,
    two_directions,
    unequal,
)
from creditscope.claims.evidence import Evidence, from_json, to_json
from creditscope.claims.p1_rank import (
    DEFINITIONS,
    FLAT,
    correlation,
    other_credit,
    rank_about_two,
    rank_and_spread,
    slopes,
    top_share,
)
from each import each

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
