"""Credit that is one number an answer: the method's own, and two other baselines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from creditscope import METHODS, CreditscopeError, Rollouts
from creditscope.batch.groups import Groups
from creditscope.credit.leave_one_out import leave_one_out
from creditscope.credit.optimal_scalar import optimal_scalar
from creditscope.credit.outcome import outcome
from creditscope.credit.tools import Tools
from creditscope.objective.advantages import token_advantage
from each import each
from makers import make, random_batches

D = torch.float64
PLAIN = METHODS["p1_grpo"]  # r − mean, nothing else
OWN = [name for name, row in METHODS.items() if row.baseline != "external"]


class Norms(Tools):
    """Scores of which the squared norms are known."""

    def __init__(self, *squares: float) -> None:
        self._gram = torch.diag(torch.tensor(squares, dtype=D))

    def gram(self) -> Tensor:
        return self._gram


def on(credit: Tensor, batch: Rollouts) -> Tensor:
    return credit[batch.mask]


@each(("name", "beta"), [*((name, 0.0) for name in OWN), ("rloo", 0.1), ("reinforce_pp", 0.1)])
def test_outcome_is_the_methods_own_advantage_to_the_bit(name: str, beta: float) -> None:
    row = METHODS[name].but(name="x", beta=beta) if beta else METHODS[name]
    batch = make([1, 0, .25, 1, 0, .5], [0, 0, 0, 1, 1, 1], [4, 2, 7, 1, 3, 5], seed=3)
    found = outcome(row, batch, Tools())
    assert found.shape == batch.mask.shape
    assert torch.equal(on(found, batch), on(token_advantage(row, batch).expand_as(found), batch))
    assert bool(on(found, batch).any())


def test_outcome_has_nothing_to_give_a_method_that_takes_credit_from_a_critic() -> None:
    with pytest.raises(CreditscopeError, match="'ppo' takes its credit from outside"):
        outcome(METHODS["ppo"], make([1, 0], [0, 0], [2, 2]), Tools())


def test_leave_one_out_by_hand() -> None:
    # Group 0: others of the 1 have mean ¼, others of the 0 ¾, others of the ½ ½. Group 1: ±1.
    batch = make([1, 0, .5, 0, 1], [0, 0, 0, 1, 1], [2, 1, 3, 1, 2])
    expected = torch.tensor([.75, .75, -.75, 0., 0., 0., -1., 1., 1.], dtype=D)
    found = leave_one_out(METHODS["reinforce"], batch, Tools())
    torch.testing.assert_close(on(found, batch), expected, rtol=0, atol=1e-15)


@given(random_batches())
def test_leave_one_out_is_the_group_mean_times_R_over_R_minus_1(batch: Rollouts) -> None:
    size = Groups(batch.group).size[:, None]
    plain = outcome(PLAIN, batch, Tools()) * size / (size - 1)
    torch.testing.assert_close(on(leave_one_out(PLAIN, batch, Tools()), batch), on(plain, batch), rtol=0, atol=1e-12)


@given(random_batches())
def test_a_std_without_epsilon_takes_the_factor_of_leave_one_out_away_again(batch: Rollouts) -> None:
    found, own = (estimate(METHODS["grpo"], batch, Tools()) for estimate in (leave_one_out, outcome))
    torch.testing.assert_close(on(found, batch), on(own, batch), rtol=0, atol=1e-12)


def test_optimal_scalar_by_hand() -> None:
    # ‖ψ‖² = 1, 3, 4 and rewards 1, 0, ½: b* = (1·1 + 0·3 + ½·4)/8 = ⅜. Its mean would be ½.
    batch = make([1, 0, .5], [5, 5, 5], [2, 1, 1])
    found = optimal_scalar(PLAIN, batch, Norms(1, 3, 4))
    assert on(found, batch).tolist() == [.625, .625, -.375, .125]


def test_the_optimal_scalar_of_each_group_knows_that_group_alone() -> None:
    # Group 8: b* = (1·1 + 0·3)/4 = ¼. Group −2: b* = (2·½ + 6·1)/8 = ⅞.
    batch = make([1, .5, 0, 1], [8, -2, 8, -2], [1, 1, 1, 1])
    assert on(optimal_scalar(PLAIN, batch, Norms(1, 2, 3, 6)), batch).tolist() == [.75, -.375, -.25, .125]


@given(random_batches(), st.floats(1e-6, 1e6))
def test_with_equal_norms_the_optimal_scalar_is_the_group_mean(batch: Rollouts, square: float) -> None:
    found = optimal_scalar(PLAIN, batch, Norms(*[square] * len(batch)))
    torch.testing.assert_close(on(found, batch), on(outcome(PLAIN, batch, Tools()), batch), rtol=0, atol=1e-12)


def test_no_constant_baseline_has_less_variance_than_the_optimal_scalar() -> None:
    # Σ (r − b)² ‖ψ‖² is a parabola in b; its least value is at b*.
    batch, squares = make([1, 0, .5], [0, 0, 0], [1, 1, 1]), torch.tensor([1., 3., 4.], dtype=D)
    best = 1 - float(optimal_scalar(PLAIN, batch, Norms(1, 3, 4))[0, 0])

    def spread(b: float) -> float:
        return float(((batch.reward - b) ** 2 * squares).sum())

    assert spread(best) < min(spread(best - 1e-3), spread(best + 1e-3))


def test_a_group_whose_scores_are_all_zero_takes_its_mean() -> None:
    batch = make([1, 0, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1])
    # The other group: b* = (1·1 + 0·3)/4 = ¼.
    assert on(optimal_scalar(PLAIN, batch, Norms(0, 0, 1, 3)), batch).tolist() == [.5, -.5, .75, -.25]


@each("value", [0.1, 1 / 3, 1e-30, 7e20])
@each("dtype", [torch.float32, D])
@each("name", ["grpo", "p1_grpo", "reinforce"])
def test_a_unanimous_group_has_credit_exactly_zero(value: float, dtype: torch.dtype, name: str) -> None:
    batch = make([value] * 7, [0] * 7, [1, 2, 3, 1, 2, 3, 4], dtype=dtype)
    for found in (leave_one_out(METHODS[name], batch, Tools()),
                  optimal_scalar(METHODS[name], batch, Norms(1, 2, 3, 4, 5, 6, 7))):
        assert found.abs().max() == 0


def test_half_precision_rewards_are_averaged_in_float32() -> None:
    # 512 rewards of 1 and one 0: bfloat16 counts 1 + 1 + … to 256 and no further.
    batch = make([0.0] + [1.0] * 512, [0] * 513, [1] * 513, dtype=torch.float32)
    batch = replace(batch, reward=batch.reward.bfloat16())
    for found in (leave_one_out(PLAIN, batch, Tools()), optimal_scalar(PLAIN, batch, Norms(*[1.0] * 513))):
        assert found.dtype == torch.float32
    assert float(leave_one_out(PLAIN, batch, Tools())[0, 0]) == -1.0
    assert float(optimal_scalar(PLAIN, batch, Norms(*[1.0] * 513))[0, 0]) == pytest.approx(-512 / 513, rel=1e-6)


def test_without_a_microscope_the_optimal_scalar_says_what_it_needs() -> None:
    with pytest.raises(CreditscopeError, match="needs a backward pass under the microscope, and there is none here"):
        optimal_scalar(PLAIN, make([1, 0], [0, 0], [1, 1]), Tools())
