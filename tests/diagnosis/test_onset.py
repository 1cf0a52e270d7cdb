"""When a metric left its beginning, and when it crossed a limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditscope.diagnosis.finding import EDGE, THIRDS, TREND, ends, last, trend
from creditscope.diagnosis.log import LogRow, Series
from creditscope.diagnosis.onset import BLOCK, crossed, left_beginning
from diagnosis.makers_doctor import findings, log_of


def series(*values: float, steps: bool = True) -> Series:
    return Series("x", [LogRow(k + 1, k + 1 if steps else None, {"x": float(v)}) for k, v in enumerate(values)], "made")


# -- windows ----------------------------------------------------------------------------------------------------------


def test_a_level_is_read_over_the_last_tenth_and_a_drift_between_both_tenths() -> None:
    values = series(*range(100))
    assert last(values).values == list(range(90, 100))
    assert [part.values for part in ends(values)] == [list(range(10)), list(range(90, 100))]


def test_the_two_ends_of_the_shortest_drift_share_no_row() -> None:
    first, after = ends(series(*range(TREND)))
    assert (len(first), len(after)) == (EDGE, EDGE)
    assert first.values[-1] < after.values[0]


def test_a_trend_is_the_difference_of_two_thirds_with_its_interval() -> None:
    found = trend(series(0, 0, 1, 1, 9, 9, 9, 9, 9, 2, 2, 3, 3))
    assert (found.first.values, found.last.values) == ([0, 0, 1, 1], [2, 2, 3, 3])
    # Each third of 4: s² = 1/3, h = 3.1824·√(1/3)/2 = 0.91868. Change 2 ± √2·0.91868 = 2 ± 1.29921.
    assert (found.change.mean, found.change.low) == (2, pytest.approx(0.70079, abs=1e-5))
    assert found.change.high == pytest.approx(3.29921, abs=1e-5)
    assert THIRDS == 12


def test_evidence_names_file_lines_steps_and_values() -> None:
    found = findings(log_of({"dead": [0.0] * 95 + [1.0] * 5}))["dead groups"]
    # The last tenth are rows 91 to 100: five of 0, five of 1.
    assert found.evidence == ("made.log, line 91–100 (step 91–100 of the log): frac_reward_zero_std 0, 0 … 1, 1 "
                              "(n 10, mean 0.5, from 0 to 1)",)
    assert found.sentence.startswith("50% of the groups are dead")


def test_numbers_that_cannot_be_averaged_are_left_out() -> None:
    found = series(1, float("nan"), float("inf"), 1e308, -1e308, 3)
    assert found.finite.values == [1, 3]


# -- left its beginning -----------------------------------------------------------------------------------------------


def test_a_jump_is_found_at_its_first_reading() -> None:
    # Readings 1 to 10 lie in [0, 1], 11 and later at 2: the block 11 to 15 is the first that lies above the first five.
    values = series(*([0, 1] * 5), *([2] * 10))
    assert (left_beginning(values), left_beginning(values, rising=True)) == (11, 11)
    assert left_beginning(values, rising=False) is None


def test_a_block_that_touches_the_beginning_has_not_left_it() -> None:
    assert left_beginning(series(*([0, 1] * 5), *([1] * 10))) is None
    assert left_beginning(series(*([0] * 5), *([1] * (BLOCK - 1)), 0)) is None
    assert left_beginning(series(*([0] * 5), *([1] * BLOCK))) == 6


def test_one_outlier_is_no_change() -> None:
    assert left_beginning(series(*([0] * 10), 100, *([0] * 10))) is None


def test_a_fall_is_the_mirror_of_a_rise() -> None:
    values = [0, 1] * 5 + [2] * 10
    assert left_beginning(series(*(-v for v in values)), rising=False) == left_beginning(series(*values), rising=True)


def test_a_log_without_steps_has_no_onset() -> None:
    assert left_beginning(series(*([0] * 5), *([1] * 5), steps=False)) is None
    assert crossed(series(1, 1, 1, steps=False), lambda x: x > 0) is None


@given(st.lists(st.floats(-10, 10), max_size=40), st.floats(0.1, 5), st.floats(-5, 5))
def test_an_onset_depends_on_order_alone(values: list[float], scale: float, shift: float) -> None:
    """An increasing map of the readings changes nothing, as long as it keeps distinct readings distinct."""
    coarse = [round(value, 2) for value in values]
    moved = [scale * value + shift for value in coarse]
    assert left_beginning(series(*coarse)) == left_beginning(series(*moved))


# -- crossed ----------------------------------------------------------------------------------------------------------


def test_a_limit_is_crossed_where_three_readings_in_a_row_are_bad() -> None:
    values = series(0, 1, 0, 0, 1, 1, 1, 1)
    assert crossed(values, lambda x: x >= 1) == 5
    assert crossed(values, lambda x: x >= 1, block=1) == 2


def test_without_three_in_a_row_the_first_bad_reading_counts() -> None:
    assert crossed(series(0, 1, 0, 1, 1), lambda x: x >= 1) == 2
    assert crossed(series(0, 0), lambda x: x >= 1) is None
    assert crossed(series(), lambda x: x >= 1) is None
