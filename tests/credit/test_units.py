"""From reward units to the method's: what the method does to an outcome, these functions do to any credit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from creditscope import METHODS, Rollouts
from creditscope.batch.groups import Groups
from creditscope.credit.leave_one_out import leave_one_out
from creditscope.credit.monte_carlo import monte_carlo
from creditscope.credit.optimal_token import optimal_token
from creditscope.credit.prefix_tree import prefix_tree
from creditscope.credit.step_return import step_return
from creditscope.credit.step_reward import step_reward
from creditscope.credit.tools import Tools
from creditscope.credit.turn_return import turn_return
from creditscope.credit.units import in_units
from creditscope.methods.axes import Method
from creditscope.objective.advantages import BASELINES, mean_entropy, token_advantage
from each import each
from makers import make, random_batches

D = torch.float64
OWN = [name for name, row in METHODS.items() if row.baseline != "external" and not row.labels]
PLAIN, GRPO = METHODS["p1_grpo"], METHODS["grpo"]


def centred(method: Method, batch: Rollouts) -> Tensor:
    """(B, 1) r_i − b_i."""
    lengths = batch.lengths.to(batch.reward.dtype)
    return (batch.reward - BASELINES[method.baseline](batch.reward, Groups(batch.group), lengths))[:, None]


def same_as_the_methods_own(method: Method, batch: Rollouts) -> None:
    ours = in_units(method, centred(method, batch), batch)
    own = token_advantage(method, batch).expand_as(ours)
    torch.testing.assert_close(ours[batch.mask], own[batch.mask], rtol=1e-12, atol=1e-12)
    assert not bool(ours[~batch.mask].any())


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
@given(batch=random_batches())
def test_the_reward_minus_its_baseline_comes_out_as_the_methods_own_advantage(name: str, batch: Rollouts) -> None:
    same_as_the_methods_own(METHODS[name], batch)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"std": "population"}, {"std_eps": 0.3}, {"scale": "batch_std"}, {"scale": "nonzero_rewards"},
    {"whiten": "tokens", "whiten_eps": 0.1}, {"whiten": "rollouts"}, {"whiten": "rollouts", "scale": "none"},
    {"entropy_cost": 0.2, "whiten": "tokens"}], ids=str)
@given(batch=random_batches())
def test_so_it_does_along_every_axis_of_the_advantage(changes: dict[str, Any], batch: Rollouts) -> None:
    same_as_the_methods_own(GRPO.but(name="x", **changes), batch)


@given(batch=random_batches())
def test_so_it_does_with_kl_in_the_token_reward(batch: Rollouts) -> None:
    same_as_the_methods_own(METHODS["reinforce_pp"].but(name="x", beta=0.1), batch)


def test_kl_in_the_token_reward_makes_the_tokens_of_an_answer_differ() -> None:
    batch = make([1, 0], [0, 0], [4, 3])
    found = in_units(METHODS["reinforce_pp"].but(name="x", beta=0.1), batch.reward[:, None], batch)
    assert len(set(found[batch.mask].tolist())) == 7


@pytest.mark.parametrize("changes", [{}, {"scale": "batch_std"}, {"whiten": "tokens"}, {"whiten": "rollouts"}], ids=str)
def test_an_empty_answer_counts_in_the_std_as_it_does_for_the_method(changes: dict[str, Any]) -> None:
    batch = make([1, 0, 0, .5, 0, 1], [0, 0, 0, 1, 1, 1], [0, 3, 2, 1, 0, 4])
    same_as_the_methods_own(GRPO.but(name="x", **changes), batch)


def test_kl_in_the_reward_is_paid_by_each_token_for_itself_and_what_follows() -> None:
    # log(π_old/π_ref) = (1, ½) and (0): β = 0.2 costs the first row 0.2·1.5 and 0.2·0.5.
    batch = replace(make([1, 0], [0, 0], [2, 1]), logp=torch.tensor([[-1., -1.], [-2., 0.]], dtype=D),
                    ref_logp=torch.tensor([[-2., -1.5], [-2., 0.]], dtype=D))
    found = in_units(METHODS["rloo"].but(name="x", beta=0.2), centred(METHODS["rloo"], batch), batch)
    torch.testing.assert_close(found, torch.tensor([[.7, .9], [-1., 0.]], dtype=D), rtol=0, atol=1e-15)


def test_the_std_of_a_group_is_that_of_what_is_credited() -> None:
    # credit (2, 0) and (−1): σ² = (4/2 + 1)/(2 − 1) = 3. The rewards, 1 and 1, have no std.
    batch = make([1, 1], [0, 0], [2, 1])
    found = in_units(GRPO, torch.tensor([[2., 0.], [-1., 9.]], dtype=D), batch)
    s = math.sqrt(3)
    torch.testing.assert_close(found, torch.tensor([[2 / s, 0.], [-1 / s, 0.]], dtype=D), rtol=0, atol=1e-15)


def test_whitening_over_rollouts_gives_each_answer_the_same_weight() -> None:
    # Token weights (½, ½) and (1): μ = (½·4 + ½·0 + 1·(−1))/2 = ½; σ² = (½·3.5² + ½·½² + 1.5²)/1 = 8.5.
    row = PLAIN.but(name="x", whiten="rollouts")
    found = in_units(row, torch.tensor([[4., 0.], [-1., 9.]], dtype=D), make([1, 0], [0, 0], [2, 1]))
    s = math.sqrt(8.5)
    torch.testing.assert_close(found, torch.tensor([[3.5 / s, -.5 / s], [-1.5 / s, 0.]], dtype=D), rtol=0, atol=1e-15)


def test_the_entropy_cost_comes_after_the_scale() -> None:
    batch = make([1, 0, 0], [0, 0, 0], [2, 3, 1])
    row = GRPO.but(name="x", entropy_cost=0.2)
    owed = in_units(GRPO, centred(GRPO, batch), batch) - in_units(row, centred(row, batch), batch)
    expected = (0.2 * mean_entropy(row, batch))[:, None].expand_as(owed).masked_fill(~batch.mask, 0.0)
    torch.testing.assert_close(owed, expected, rtol=0, atol=1e-15)


# -- rounding ----------------------------------------------------------------------------------------------------------


class Equal(Tools):
    """Every continuation earns the same."""

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        self._value = torch.tensor(value, dtype=dtype)

    def values(self, cuts: Tensor, samples: int) -> Tensor:
        return self._value.expand_as(cuts).masked_fill(cuts < 0, torch.nan)


@each("value", [0.1, 1 / 3, 1e-30, 7e20, 0.0])
@each("dtype", [torch.float32, D])
def test_a_unanimous_group_gets_exactly_zero_from_every_estimator(value: float, dtype: torch.dtype) -> None:
    # Means of 7, 4 and 3 equal floats differ by an ulp: a std of one ulp would make that a credit of one.
    batch = make([value] * 7, [3] * 7, [5] * 7, dtype=dtype, seed=1)
    step = torch.tensor([0, 0, 1, 1, 2]).expand(7, 5).clone()
    batch = replace(batch, collision=torch.full_like(batch.logp, 0.9), step=step,
                    step_reward=torch.full((7, 3), value, dtype=dtype))
    for estimate in (prefix_tree, optimal_token, step_reward, step_return, turn_return, monte_carlo):
        assert estimate(GRPO, batch, Equal(value, dtype)).abs().max() == 0, estimate.__name__


def test_a_unanimous_group_with_steps_that_differ_still_carries_signal() -> None:
    # Step rewards 1, 0 and 1, 1, a token each: mean ¾, credit (¼, −¾) and (¼, ¼).
    # σ² = ((1/16 + 9/16)/2 + (1/16 + 1/16)/2)/(2 − 1) = 3/8.
    batch = replace(make([1, 1], [0, 0], [2, 2]), step=torch.tensor([[0, 1], [0, 1]]),
                    step_reward=torch.tensor([[1., 0.], [1., 1.]], dtype=D))
    s = math.sqrt(3 / 8)
    expected = torch.tensor([[.25 / s, -.75 / s], [.25 / s, .25 / s]], dtype=D)
    torch.testing.assert_close(step_reward(GRPO, batch, Tools()), expected, rtol=0, atol=1e-15)
    assert not bool(token_advantage(GRPO, batch).any()), "the outcome alone has none"


@each("dtype", [torch.float32, D])
@each("scale", [1e-12, 1e-6, 1.0, 1e9])
def test_a_groups_std_makes_the_size_of_its_rewards_and_of_other_groups_rewards_disappear(
        scale: float, dtype: torch.dtype) -> None:
    # (½, −½)·scale over √½·scale, beside a group that is 10⁷ times as large.
    batch = make([scale, 0.0, 1e7 * scale, 0.0], [0, 0, 1, 1], [1, 1, 1, 1], dtype=dtype)
    found = in_units(GRPO, centred(GRPO, batch), batch)[:, 0]
    expected = torch.tensor([1, -1, 1, -1], dtype=dtype) * math.sqrt(.5)
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype == torch.float32 else 1e-12, atol=0)


def test_what_others_wrote_between_changes_no_std_where_kl_is_in_the_reward() -> None:
    row = METHODS["grpo"].but(name="priced", kl="k1", kl_in="reward", beta=0.5)
    plain = make([1, 0], [0, 0], [2, 2])
    # The same two tokens a row, with three foreign ones between them.
    wide = make([1, 0], [0, 0], [5, 5])
    mask = torch.tensor([[True, False, False, False, True]] * 2)
    spread = {name: torch.zeros(2, 5, dtype=torch.float64).masked_scatter(mask, getattr(plain, name))
              for name in ("logp", "ref_logp", "entropy")}
    holes = replace(wide, mask=mask, **spread)
    torch.testing.assert_close(leave_one_out(row, holes, Tools())[mask], leave_one_out(row, plain, Tools())[plain.mask],
                               rtol=0, atol=1e-12)
