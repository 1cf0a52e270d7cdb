"""From an interval to an outcome."""

from __future__ import annotations

import pytest

from creditscope.claims.verdict import Band, ClaimVerdict, all_of, at_most, exact, missing, needing
from creditscope.runs.intervals import Interval

ONE = Interval(1.0, None, None, 1)


@pytest.mark.parametrize(("low", "high", "said"), [
    (1.6, 2.4, "holds"), (1.5, 2.5, "holds"), (1.4, 2.4, "undecided"), (1.6, 2.6, "undecided"),
    (1.0, 1.4, "refuted"), (2.6, 3.0, "refuted"), (1.0, 3.0, "undecided")])
def test_a_band_holds_what_lies_wholly_inside_and_refutes_what_lies_wholly_outside(low, high, said) -> None:
    assert Band(1.5, 2.5).judge(Interval((low + high) / 2, low, high, 3)) == said


@pytest.mark.parametrize(("low", "high", "over", "under"), [
    (0.1, 0.3, "holds", "refuted"), (-0.3, -0.1, "refuted", "holds"), (-0.1, 0.1, "undecided", "undecided"),
    (0.0, 0.1, "undecided", "refuted"), (-0.1, 0.0, "refuted", "undecided")])
def test_a_bound_is_passed_or_not_when_the_whole_interval_is(low, high, over, under) -> None:
    value = Interval((low + high) / 2, low, high, 3)
    assert (Band(low=0.0).judge(value), Band(high=0.0).judge(value)) == (over, under)


def test_one_value_without_an_interval_decides_nothing() -> None:
    assert {band.judge(ONE) for band in (Band(0, 2), Band(low=0), Band(high=2))} == {"undecided"}
    assert Band(low=0.5).enough(ONE) is None


def test_several_cases_hold_together_only_if_each_does() -> None:
    assert all_of(["holds", "holds"]) == "holds"
    assert all_of(["holds", "undecided"]) == "undecided"
    assert all_of(["undecided", "refuted"]) == "refuted"
    assert all_of([]) == "undecided"


def test_the_sample_that_would_decide_grows_with_the_square_of_the_width() -> None:
    # Half width 0.6 around 2.3, nearest bound 2.5 is 0.2 away: 3·(0.6/0.2)² = 27.
    assert Band(1.5, 2.5).enough(Interval(2.3, 1.7, 2.9, 3)) == 27
    assert Band(high=2.5).enough(Interval(2.5, 2.0, 3.0, 3)) is None, "on the bound no sample decides"


def test_what_is_missing_is_undecided_and_says_what_it_needs() -> None:
    found = missing("tiny", "--scope light")
    assert (found.outcome, found.reason) == ("undecided", "needs --scope light")
    assert found.observed is None


@pytest.mark.parametrize(("band", "words"), [
    (Band(low=0.0), "above 0"), (Band(high=0.05), "below 0.05"), (Band(-0.3, 0.3), "within ±0.3"),
    (Band(1.5, 2.5), "inside [1.5, 2.5]")])
def test_a_band_in_words(band: Band, words: str) -> None:
    assert str(band) == words


@pytest.mark.parametrize(("observed", "outcome"), [(0.1, "holds"), (0.11, "refuted"), (float("nan"), "refuted")])
def test_the_largest_difference_may_equal_its_limit_and_not_exceed_it(observed: float, outcome: str) -> None:
    found = at_most(0.1, "x − y", "a case", observed, "why", threshold="at most {:g}", n=3)
    assert (found.outcome, found.expected, found.threshold, found.n, found.of) == (outcome, "0", "at most 0.1", 3,
                                                                                 "cases")


def test_a_count_that_was_checked_exactly_is_a_float_in_its_verdict() -> None:
    found = exact("pairs", "a case", False, 2, "why", threshold="none", n=3)
    assert (found.outcome, found.observed, type(found.observed)) == ("refuted", 2.0, float)


def test_a_test_without_a_verdict_says_what_it_needs() -> None:
    @needing("a run", subject="no run", definition="x")
    def test(runs: object) -> list[ClaimVerdict]:
        return [missing("tiny", "more")] * len(runs)  # type: ignore[arg-type]

    assert [(v.subject, v.reason, v.definition) for v in test([])] == [("no run", "needs a run", "x")]
    assert [v.subject for v in test([1, 2])] == ["tiny", "tiny"]  # type: ignore[list-item]
