"""P1's claims about accuracy on runs: worlds in which each holds, is refuted, or stays undecided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from claims.makers_claims import evidence, learner, of, seeds
from creditscope.claims.evidence import Evidence
from creditscope.claims.p1_learning import larger_groups_learn_faster, rank_aware

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
        assert "creditscope lab train --eval-rollouts 100" in verdict.reason


@pytest.mark.parametrize(("unit", "flag"), [("steps", "--eval-every 3"), ("rollouts", "--eval-rollouts 96")])
def test_the_flag_that_gives_the_evaluation_counts_in_the_unit_of_the_comparison(unit: str, flag: str) -> None:
    # R = 4 ends after 3 steps of 8 prompts, 96 rollouts; R = 8 is evaluated at the end of its 10 steps alone.
    late = [{"eval/accuracy": 0.0, "rollouts/spent": 64}, *[{"rollouts/spent": 64}] * 9, {"eval/accuracy": 0.6}]
    runs = [run for seed in range(3) for run in (learner(lambda spent: spent / 1000, group=4, seed=seed),
                                                 evidence(group=8, seed=seed, steps=late))]
    verdict = of(larger_groups_learn_faster(runs), f"equal {unit}")
    assert verdict.outcome == "undecided"
    assert verdict.reason.endswith(f"of R = 8: creditscope lab train {flag}")


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
