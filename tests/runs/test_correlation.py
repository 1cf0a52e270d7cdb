"""r of J with the reward over a run: by hand, against numpy, and from a record."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from creditscope import CreditscopeError, Record
from creditscope.runs.correlation import correlation, over_training


def test_r_of_four_pairs_by_hand() -> None:
    # x − x̄ = −1.5, −0.5, 0.5, 1.5 and y − ȳ = −0.5, −0.5, −0.5, 1.5: Σxy = 3, ‖x‖² = 5, ‖y‖² = 3.
    found = correlation([1, 2, 3, 4], [0, 0, 0, 2])
    assert found is not None
    assert found.r == pytest.approx(3 / math.sqrt(15), abs=1e-14)
    # n − 3 = 1, so z ± 1.959964.
    z = 0.5 * math.log((1 + found.r) / (1 - found.r))
    assert found.low == pytest.approx(math.tanh(z - 1.959964), abs=1e-12)
    assert found.high == pytest.approx(math.tanh(z + 1.959964), abs=1e-12)


@pytest.mark.parametrize("m", [3, 9, 19])
def test_the_interval_of_r_0_has_ends_at_tanh_of_z_over_the_root_of_n_minus_3(m: int) -> None:
    # x from −m to m against its square: r = 0 by symmetry, n = 2m + 1.
    found = correlation(list(range(-m, m + 1)), [x * x for x in range(-m, m + 1)])
    end = math.tanh(1.959964 / math.sqrt(2 * m - 2))
    assert found == pytest.approx((0, -end, end), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_r_is_numpys_and_does_not_see_units(seed: int) -> None:
    draw = np.random.default_rng(seed)
    x, y = draw.normal(size=(2, 30))
    found = correlation(x.tolist(), y.tolist())
    assert found is not None
    assert found.r == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-12)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.r < found.high
    for a, b in ((1e200, 0.0), (1e-200, 0.0), (3.0, -7.0)):
        assert correlation((a * x + b).tolist(), y.tolist()) == pytest.approx(found, abs=1e-12)
    mirrored = correlation((-x).tolist(), y.tolist())
    assert mirrored == pytest.approx((-found.r, -found.high, -found.low), abs=1e-12)


def test_the_interval_of_a_perfect_line_is_a_point_and_of_three_pairs_there_is_none() -> None:
    line = correlation([1, 2, 4, 8], [-2, -4, -8, -16])
    assert line is not None
    assert line == pytest.approx((-1, -1, -1), abs=1e-7)
    three = correlation([1, 2, 3], [1, 3, 2])
    assert three is not None
    assert (three.low, three.high) == (None, None)


@pytest.mark.parametrize(("values", "rewards"), [([], []), ([1.0], [2.0]), ([0.3, 0.1 + 0.2], [1, 2]),
                                                 ([1, 2, 3], [0.5, 0.5, 0.5]), ([0, 0, 0], [1, 2, 3])])
def test_what_does_not_vary_correlates_with_nothing(values: list[float], rewards: list[float]) -> None:
    assert correlation(values, rewards) is None


def test_pairs_that_do_not_match_are_refused() -> None:
    with pytest.raises(CreditscopeError, match="2 values and 3 rewards"):
        correlation([1, 2], [1, 2, 3])


def record_of(path: Path, lines: list[dict[str, float | str]]) -> Record:
    with Record.create(path / "run", {}, {}) as record:
        for step, line in enumerate(lines):
            record.append(step, line)
    return Record.open(path / "run")


def test_a_run_is_read_where_both_numbers_stand(tmp_path: Path) -> None:
    pairs = [(1.0, 0.0), (2.0, 0.0), (3.0, 0.0), (4.0, 2.0)]
    lines: list[dict[str, float | str]] = [{"objective/value": a, "reward/mean": b} for a, b in pairs]
    record = record_of(tmp_path, [{"reward/mean": 9.0}, *lines, {"objective/value": 9.0}, {"eval/accuracy": 0.5}])
    found = over_training(record)
    assert (found["steps"], found["largest"]) == (4, 4.0)
    assert found["r"] == pytest.approx(3 / math.sqrt(15), abs=1e-14)
    assert found["low"] < found["r"] < found["high"]


@pytest.mark.parametrize("size", [1e-12, 1e-8, 2e-7])
def test_a_j_of_rounding_has_no_correlation(size: float, tmp_path: Path) -> None:
    noise: list[dict[str, float | str]] = [{"objective/value": size * x, "reward/mean": x} for x in (1.0, 2.0, 4.0)]
    assert over_training(record_of(tmp_path, noise)) == {"steps": 3, "largest": 4 * size, "r": None, "low": None,
                                                         "high": None}


def test_a_run_without_both_numbers_has_nothing_to_say(tmp_path: Path) -> None:
    assert over_training(record_of(tmp_path, [{"reward/mean": 1.0}])) == {}


@pytest.mark.parametrize("value", ["[bold]", 1e101, True])
def test_what_is_no_number_is_refused_by_step_and_name(value: float | str, tmp_path: Path) -> None:
    record = record_of(tmp_path, [{"objective/value": 0.5, "reward/mean": 1.0},
                                  {"objective/value": value, "reward/mean": 1.0}])
    with pytest.raises(CreditscopeError, match=r"step 1: objective/value is .*, not a number"):
        over_training(record)
