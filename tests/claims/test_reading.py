"""From runs to a number, and what a claim says of runs that cannot give it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from claims.makers_claims import ALL_RIGHT, evidence
from creditscope.claims.evidence import Evidence, over_runs
from creditscope.claims.p1_credit import baseline, multi_turn, sparsity, uniform_credit, zero_sum
from creditscope.claims.p1_learning import larger_groups_learn_faster, rank_aware
from creditscope.claims.p1_rank import other_credit, rank_about_two, rank_and_spread, top_share
from creditscope.claims.reading import fixed, ratio_over_runs, sweeps
from creditscope.claims.verdict import ClaimVerdict
from each import each

TESTS = (uniform_credit, zero_sum, sparsity, rank_about_two, top_share, larger_groups_learn_faster, multi_turn,
         baseline, other_credit, rank_and_spread, rank_aware)


@each("test", TESTS)
@each("runs", [[], [evidence()], [Evidence(name="x", config={})],
                                  [evidence(method="mine", group="eight", seed=None, credit="own:mine")],
                                  [evidence(inner_steps=[1], minibatches={})], [evidence(group=0, steps=[ALL_RIGHT])]])
def test_without_what_it_needs_a_claim_is_undecided_and_says_which_flags_give_it(
        test: Callable[[Sequence[Evidence]], list[ClaimVerdict]], runs: list[Evidence]) -> None:
    verdict, = test(runs)
    assert (verdict.outcome, verdict.observed) == ("undecided", None)
    assert verdict.reason.startswith("needs ")
    assert "creditscope" in verdict.reason


def test_a_run_on_given_pairs_is_no_run_of_p1s() -> None:
    sampled, given = evidence(pairs=None), evidence(pairs="pairs.jsonl")
    assert fixed([sampled, given]) == [sampled]


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
