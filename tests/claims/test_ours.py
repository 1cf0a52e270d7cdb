"""Our two claims about the rank: each can hold, fail, and lack something to look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from claims.makers_claims import evidence, one_direction, orthogonal, recorded, seeds, sweep, two_directions, unequal
from creditscope.claims.evidence import Evidence
from creditscope.claims.ours import (
    LEAST,
    MOST_TOP,
    ORDERS,
    battery,
    cut_to_two,
    norm_concentration,
    of_top_share,
    truncated_two,
    truncated_two_runs,
)
from creditscope.claims.verdict import ClaimVerdict
from creditscope.microscope.spectrum import Spectrum, spectrum
from each import each

# -- C.1 -------------------------------------------------------------------------------------------------------------


def by_order(verdicts: Sequence[ClaimVerdict]) -> tuple[list[ClaimVerdict], list[ClaimVerdict]]:
    """Norms first, and norms last, each by R."""
    first, last = ([v for v in verdicts if f"explain, {words}, R = " in v.definition] for words in ORDERS.values())
    assert len(first) == len(last) == len(verdicts) / 2
    return first, last


def test_unequal_norms_explain_all_of_a_low_rank_whose_scores_are_orthogonal(tmp_path: Path) -> None:
    # Norms 1, 1/2: (3/2)²/(5/4) = 1.8 at R = 2, which is 1.11 times below its null of 2. Without the norms the scores
    # are orthogonal, so nothing is left for alignment in either order.
    for verdicts in by_order(norm_concentration(sweep(tmp_path, unequal))):
        assert [verdict.definition.rpartition(", ")[2] for verdict in verdicts] == ["R = 2", "R = 4", "R = 8"]
        assert [(verdict.outcome, verdict.n, verdict.of) for verdict in verdicts] == [("holds", 3, "runs")] * 3
        assert [verdict.observed for verdict in verdicts] == pytest.approx([1.0] * 3, abs=1e-9)
        assert "the rank being 1.1 times below what the credits allow" in verdicts[0].reason


def test_unequal_norms_explain_nothing_where_scores_of_equal_norm_are_alike(tmp_path: Path) -> None:
    for two, *more in by_order(norm_concentration(sweep(tmp_path, two_directions))):
        # R = 2 has its full rank of 2, so there is nothing to explain. The others have 2 where they might have R.
        assert two.outcome == "undecided"
        assert two.reason.startswith("needs a low rank to explain: the rank is 1.00 times below")
        assert [(verdict.outcome, verdict.n) for verdict in more] == [("refuted", 3), ("refuted", 3)]
        assert [verdict.observed for verdict in more] == pytest.approx([0.0, 0.0], abs=1e-9)
        assert ["2.0 times below" in more[0].reason, "4.0 times below" in more[1].reason] == [True, True]


def test_orthogonal_scores_of_equal_norm_leave_no_low_rank_to_explain(tmp_path: Path) -> None:
    verdicts = norm_concentration(sweep(tmp_path, orthogonal))
    assert len(verdicts) == 2 * 3
    for verdict in verdicts:
        assert verdict.outcome == "undecided"
        assert verdict.reason.startswith("needs a low rank to explain: the rank is 1.00 times below what the credits "
                                         "allow, not 1.1")


def test_where_norms_and_alignment_overlap_the_order_decides(tmp_path: Path) -> None:
    """Four scores in one direction, of norms 1, 0.1, 0.1, 0.1: either alone would lower the rank."""
    def lead(reward: np.ndarray) -> np.ndarray:
        return np.where(np.arange(len(reward)) == 0, 1.0, 0.1)[:, None]

    # The rank is 1, its null 4. Norms first: 1.3²/1.03 = 1.6408 is left of 4, log(4/1.6408)/log 4 = 0.6429.
    # Norms last: four rows of one direction and equal norm have rank 1 already, so norms have nothing left to do.
    (first,), (last,) = by_order(norm_concentration(sweep(tmp_path, lead, sizes=(4,))))
    assert (first.outcome, last.outcome) == ("holds", "refuted")
    assert first.observed == pytest.approx(math.log(4 / (1.69 / 1.03)) / math.log(4), abs=1e-6)
    assert last.observed == pytest.approx(0.0, abs=1e-6)


def concentrated(first: float, seed: int, last: float | None = None, **changes: Any) -> Evidence:
    """A null of 8, a rank of 2, and norms that explain a share of log 4: the first or what the other left of it."""
    last = first if last is None else last
    return evidence(seed=seed, groups={"w_null": [8.0] * 3, "all/effective_rank": [2.0] * 3,
                                       "all/norm_null": [8.0 / 4.0**first] * 3,
                                       "all/equal_norm_rank": [2.0 * 4.0**last] * 3}, **changes)


@pytest.mark.parametrize(("part", "outcome"), [(0.1, "refuted"), (0.45, "refuted"), (0.55, "holds"), (1.2, "holds")])
def test_the_share_is_of_logarithms_and_half_decides(part: float, outcome: str) -> None:
    verdicts = norm_concentration(seeds(lambda seed: concentrated(part + 0.001 * seed, seed)))
    assert [(verdict.outcome, verdict.observed) for verdict in verdicts] == [
        (outcome, pytest.approx(part + 0.001, abs=1e-12))] * 2


def test_each_order_and_each_r_is_judged_by_its_own_share() -> None:
    four = seeds(lambda seed: concentrated(0.8, seed, last=0.2, group=4))
    eight = seeds(lambda seed: concentrated(0.3, seed, last=0.7, group=8))
    first, last = by_order(norm_concentration([*eight, *four]))
    assert [(v.outcome, v.n, v.definition[-5:]) for v in first] == [("holds", 3, "R = 4"), ("refuted", 3, "R = 8")]
    assert [(v.outcome, v.n, v.definition[-5:]) for v in last] == [("refuted", 3, "R = 4"), ("holds", 3, "R = 8")]
    assert [v.observed for v in (*first, *last)] == pytest.approx([0.8, 0.3, 0.2, 0.7], abs=1e-12)


@pytest.mark.parametrize(("rank", "outcome"), [(8.0, "undecided"), (7.9, "undecided"), (7.6, "undecided"),
                                               (7.3, "undecided"), (7.2, "holds"), (9.0, "undecided")])
def test_a_rank_less_than_a_tenth_below_its_null_is_no_low_rank(rank: float, outcome: str) -> None:
    # 8/1.1 = 7.27. All of the gap is the norms', in either order.
    runs = [evidence(seed=seed, groups={"w_null": [8.0], "all/effective_rank": [rank], "all/norm_null": [rank],
                                        "all/equal_norm_rank": [8.0]}) for seed in range(3)]
    verdicts = norm_concentration(runs)
    assert [(verdict.outcome, verdict.observed is None) for verdict in verdicts] == [
        (outcome, outcome == "undecided")] * 2
    assert {f"the rank is {8 / rank:.2f} times below" in verdict.reason for verdict in verdicts} == {
        outcome == "undecided"}


def test_a_share_about_half_is_undecided_and_says_how_many_runs_would_decide() -> None:
    verdicts = norm_concentration(seeds(lambda seed: concentrated(0.4 + 0.15 * seed, seed)))
    assert [verdict.outcome for verdict in verdicts] == ["undecided"] * 2
    assert all("runs would decide" in verdict.reason for verdict in verdicts)




def test_evidence_from_before_the_second_order_lacks_its_column_and_not_a_low_rank() -> None:
    runs = seeds(lambda seed: evidence(seed=seed, groups={
        "w_null": [8.0], "all/effective_rank": [2.0], "all/norm_null": [2.0]}))
    (first,), (last,) = by_order(norm_concentration(runs))
    assert (first.outcome, last.outcome) == ("holds", "undecided")
    assert last.reason.startswith("needs ")
    assert "1.00 times below" not in last.reason  # it is 4 times below


@pytest.mark.slow
@given(st.integers(0, 999), st.integers(2, 12))
def test_the_rank_never_exceeds_the_null_of_its_norms(seed: int, size: int) -> None:
    """Majorisation: so alignment only ever lowers the rank, and gap − part ≥ 0."""
    random = np.random.default_rng(seed)
    rows = random.lognormal(size=(size, 1)) * random.normal(size=(size, 5))
    norms = np.sqrt((rows**2).sum(axis=1))
    assert spectrum(rows @ rows.T).effective_rank <= norms.sum() ** 2 / (norms**2).sum() * (1 + 1e-12)


# -- C.2 without a run -----------------------------------------------------------------------------------------------


def test_two_values_print_a_function_of_their_top_share() -> None:
    # σ = 3, 1: (3 + 1)²/(9 + 1) = 1.6, and f = 0.9: 1 + 2√0.09 = 1.6. σ = 1, 1: 2.
    assert cut_to_two(Spectrum(np.array([3.0, 1.0, 0.5]), 0.0)) == pytest.approx(1.6, abs=1e-15)
    assert of_top_share(0.9) == pytest.approx(1.6, abs=1e-15)
    assert of_top_share(0.5) == 2.0


def test_the_reading_falls_below_one_and_a_half_beyond_a_top_share_of_93_percent() -> None:
    # 2√(f(1−f)) = ½ ⇔ f² − f + 1/16 = 0 ⇔ f = (1 + √¾)/2.
    assert pytest.approx(0.9330127, abs=1e-7) == MOST_TOP
    assert of_top_share(MOST_TOP) == pytest.approx(LEAST, abs=1e-12)
    assert of_top_share(0.93) > LEAST > of_top_share(0.94)


def test_every_top_share_that_P1_prints_reads_as_two_when_cut() -> None:
    # P1's Table 1 has 0.5 to 0.8: 2.0 to 1.8.
    assert [round(of_top_share(f), 2) for f in (0.5, 0.6, 0.7, 0.8)] == [2.0, 1.98, 1.92, 1.8]


def test_any_data_of_the_battery_read_two_when_cut() -> None:
    found = truncated_two()
    assert [verdict.outcome for verdict in found] == ["holds"] * 3
    identity, _, share = found
    assert (identity.n, share.observed) == (30, 1.0)
    assert identity.observed is not None
    assert identity.observed < 1e-12
    assert "to 64.0" in share.reason  # orthogonal rows, R = 64


def test_rank_one_data_refute_that_any_data_read_two() -> None:
    ones = [("rank one", np.outer(np.arange(1.0, size + 1), np.ones(5))) for size in (4, 8, 16)]
    identity, side, share = truncated_two(iter(ones))
    assert (identity.outcome, side.outcome, share.outcome) == ("holds", "holds", "refuted")
    assert share.observed == 0.0


def test_data_close_to_rank_one_are_counted() -> None:
    # Ten matrices of two rows, (1, 0) and (0, s): cut or not they read (1 + s)²/(1 + s²). Two of s = 0.1: 1.198.
    cases = [("pairs", np.diag([1.0, 0.1 if i < 2 else 0.9])) for i in range(10)]
    assert truncated_two(iter(cases))[2].observed == 0.8
    assert truncated_two(iter(cases))[2].outcome == "refuted"
    assert truncated_two(iter(cases[1:]))[2].observed == pytest.approx(8 / 9, abs=1e-15)
    assert truncated_two(iter(cases[2:]))[2].outcome == "holds"


def test_an_instrument_that_does_not_cut_refutes_the_identity() -> None:
    identity, side, _ = truncated_two(printed=lambda s: s.effective_rank)
    assert identity.outcome == "refuted"
    assert side.outcome == "holds"  # it never reads less than the cut one
    identity, side, _ = truncated_two(printed=lambda s: 1.0)
    assert (identity.outcome, side.outcome) == ("refuted", "refuted")


def test_the_battery_is_the_same_every_time_and_of_every_size() -> None:
    first, again = list(battery()), list(battery())
    assert all((a == b).all() for (_, a), (_, b) in zip(first, again, strict=True))
    assert {len(rows) for _, rows in first} == {4, 8, 16, 32, 64}


# -- C.2 on runs -----------------------------------------------------------------------------------------------------


def test_recorded_groups_of_any_rank_read_two_when_cut(tmp_path: Path) -> None:
    every, layers = truncated_two_runs(sweep(tmp_path, orthogonal))
    assert (every.outcome, layers.outcome) == ("holds", "holds")
    assert (every.observed, every.n, every.of) == (1.0, 6, "runs")  # R = 2 is not asked
    assert "while the full spectrum reads 4.0, 8.0 at R = 4, 8" in every.reason


def test_recorded_groups_of_rank_one_refute_it(tmp_path: Path) -> None:
    found = truncated_two_runs([recorded(tmp_path, one_direction, seed=seed) for seed in range(3)])
    assert [verdict.outcome for verdict in found] == ["refuted", "refuted"]
    assert found[0].observed == 0.0


def cut(values: Sequence[float], seed: int) -> Evidence:
    return evidence(seed=seed, groups={"all/effective_rank_truncated_2": list(values)})


@pytest.mark.parametrize(("below", "outcome"), [(0, "holds"), (1, "holds"), (3, "refuted"), (5, "refuted"),
                                                (9, "refuted")])
def test_nine_groups_of_ten_are_the_threshold(below: int, outcome: str) -> None:
    verdict, = truncated_two_runs(seeds(lambda seed: cut([1.8] * (20 - below) + [1.4] * below, seed)))
    assert (verdict.outcome, verdict.observed) == (outcome, pytest.approx(1 - below / 20, abs=1e-12))


def test_shares_about_the_threshold_decide_nothing() -> None:
    verdict, = truncated_two_runs(seeds(lambda seed: cut([1.8] * (8 + seed) + [1.4] * (2 - seed), seed)))
    assert verdict.outcome == "undecided"


@each("test", [norm_concentration, truncated_two_runs])
@each("runs", [[], [evidence()], [Evidence(name="x", config={})], [Evidence(
    name="x", config={"group": 4, "seed": 0}, groups={"step": [0.0], "all/effective_rank": [None]})]])
def test_without_readings_our_claims_are_undecided(test: Callable[[Sequence[Evidence]], list[ClaimVerdict]],
                                                   runs: list[Evidence]) -> None:
    verdict, = test(runs)
    assert verdict.outcome == "undecided"
    assert verdict.reason.startswith("needs runs that the microscope read: creditscope lab train --scope light")


@pytest.mark.parametrize(("runs", "of"), [(1, "3 readings of one run"), (2, "6 readings of 2 runs")])
def test_the_readings_of_one_run_or_two_give_a_number_and_decide_nothing(runs: int, of: str) -> None:
    verdicts = norm_concentration(seeds(lambda seed: concentrated(1.0, seed), runs))
    verdicts += truncated_two_runs(seeds(lambda seed: cut([1.8] * 3, seed), runs))
    assert len(verdicts) == 3
    for verdict in verdicts:
        assert (verdict.outcome, f"{verdict.n} {verdict.of}", verdict.interval) == ("undecided", of, None)
        assert math.isclose(verdict.observed or 0.0, 1.0, abs_tol=1e-12)
        assert f"; {of} give no interval over runs, it needs 3 seeds" in verdict.reason
