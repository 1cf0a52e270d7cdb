"""From an interval to an outcome."""

from __future__ import annotations

import pytest

from creditscope.claims.verdict import above, all_of, below, decided, enough, inside, missing
from creditscope.runs.intervals import Interval

ONE = Interval(1.0, None, None, 1)


@pytest.mark.parametrize(("low", "high", "said"), [
    (1.6, 2.4, "holds"), (1.5, 2.5, "holds"), (1.4, 2.4, "undecided"), (1.6, 2.6, "undecided"),
    (1.0, 1.4, "refuted"), (2.6, 3.0, "refuted"), (1.0, 3.0, "undecided")])
def test_a_band_holds_what_lies_wholly_inside_and_refutes_what_lies_wholly_outside(low, high, said) -> None:
    assert inside(Interval((low + high) / 2, low, high, 3), 1.5, 2.5) == said


@pytest.mark.parametrize(("low", "high", "over", "under"), [
    (0.1, 0.3, "holds", "refuted"), (-0.3, -0.1, "refuted", "holds"), (-0.1, 0.1, "undecided", "undecided"),
    (0.0, 0.1, "undecided", "refuted"), (-0.1, 0.0, "refuted", "undecided")])
def test_a_bound_is_passed_or_not_when_the_whole_interval_is(low, high, over, under) -> None:
    value = Interval((low + high) / 2, low, high, 3)
    assert (above(value, 0.0), below(value, 0.0)) == (over, under)


def test_one_value_without_an_interval_decides_nothing() -> None:
    assert {inside(ONE, 0, 2), above(ONE, 0), below(ONE, 2)} == {"undecided"}
    assert enough(ONE, 0.5) is None


def test_several_cases_hold_together_only_if_each_does() -> None:
    assert all_of(["holds", "holds"]) == "holds"
    assert all_of(["holds", "undecided"]) == "undecided"
    assert all_of(["undecided", "refuted"]) == "refuted"
    assert all_of([]) == "undecided"
    assert (decided(True), decided(False)) == ("holds", "refuted")


def test_the_sample_that_would_decide_grows_with_the_square_of_the_width() -> None:
    # Half width 0.6 around 2.3, nearest bound 2.5 is 0.2 away: 3·(0.6/0.2)² = 27.
    assert enough(Interval(2.3, 1.7, 2.9, 3), 1.5, 2.5) == 27
    assert enough(Interval(2.5, 2.0, 3.0, 3), 2.5) is None, "on the bound no sample decides"


def test_what_is_missing_is_undecided_and_says_what_it_needs() -> None:
    found = missing("P1.5", "tiny", "--scope light")
    assert (found.outcome, found.reason) == ("undecided", "needs --scope light")
    assert found.as_dict()["observed"] is None
