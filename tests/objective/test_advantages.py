"""Advantages, each number derived by hand in a comment."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from creditscope import METHODS, CreditscopeError, Rollouts, advantage
from creditscope.batch.groups import Groups
from creditscope.objective.advantages import token_advantage
from each import each
from makers import make, random_batches

D = torch.float64


def reward(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=D)


def close(got: torch.Tensor, *expected: float) -> bool:
    return torch.allclose(got.flatten(), torch.tensor(expected, dtype=D), atol=1e-12)


ONE = torch.zeros(4, dtype=torch.int64)


def test_group_mean_by_hand() -> None:
    # mean of (1, 0, 0, 1) is ½.
    assert close(advantage(METHODS["p1_grpo"], reward(1, 0, 0, 1), ONE), .5, -.5, -.5, .5)


def test_group_std_by_hand() -> None:
    # mean ¼; Σ(r−m)² = 9/16 + 3/16 = ¾; sample variance ¼; std ½: (¾, −¼, −¼, −¼)/½.
    assert close(advantage(METHODS["grpo"], reward(1, 0, 0, 0), ONE), 1.5, -.5, -.5, -.5)


def test_population_std_by_hand() -> None:
    # population variance 3/16, std √3/4: ¾ / (√3/4) = √3, −¼ / (√3/4) = −1/√3.
    row = METHODS["grpo"].but(name="x", std="population")
    s = math.sqrt(3)
    assert close(advantage(row, reward(1, 0, 0, 0), ONE), s, -1 / s, -1 / s, -1 / s)


def test_std_eps_is_added_to_the_std() -> None:
    row = METHODS["grpo"].but(name="x", std_eps=0.5)  # std ½ + ½ = 1
    assert close(advantage(row, reward(1, 0, 0, 0), ONE), .75, -.25, -.25, -.25)


def test_leave_one_out_by_hand() -> None:
    # others of the 1: mean 0. Others of a 0: mean ⅓.
    assert close(advantage(METHODS["rloo"], reward(1, 0, 0, 0), ONE), 1, -1 / 3, -1 / 3, -1 / 3)


@given(random_batches())
def test_leave_one_out_is_the_group_mean_times_R_over_R_minus_1(batch: Rollouts) -> None:
    size = Groups(batch.group).size
    plain = advantage(METHODS["p1_grpo"], batch.reward, batch.group)
    assert torch.allclose(advantage(METHODS["rloo"], batch.reward, batch.group), plain * size / (size - 1), atol=1e-12)


def test_length_weighted_mean_by_hand() -> None:
    # b = (3·1 + 1·0)/4 = ¾.
    got = advantage(METHODS["opo"], reward(1, 0), ONE[:2], length=torch.tensor([3, 1]))
    assert close(got, .25, -.75)


def test_maximum_likelihood_advantage_by_hand() -> None:
    # m = ¼: (1 − ¼)/¼ = 3, (0 − ¼)/¼ = −1. A group without success: 0.
    assert close(advantage(METHODS["maxrl"], reward(1, 0, 0, 0), ONE), 3, -1, -1, -1)
    assert close(advantage(METHODS["maxrl"], reward(0, 0, 0, 0), ONE), 0, 0, 0, 0)


def test_gpg_scales_by_groups_over_live_groups() -> None:
    # Two groups, one unanimous: α = 2.
    group = torch.tensor([0, 0, 1, 1])
    assert close(advantage(METHODS["gpg"], reward(1, 0, 1, 1), group), 1, -1, 0, 0)


def test_beta_density_by_hand() -> None:
    # Success rates ½ and 1: m = ¾, sample variance v = 1/8, m(1−m)/v − 1 = (3/16)·8 − 1 = ½; a = ⅜, b = ⅛;
    # α = 1 + ⅛ = 9/8, β = 1 + 1/24 = 25/24. The first group is divided by the density at ½.
    group = torch.tensor([0, 0, 1, 1])
    alpha, beta = 9 / 8, 25 / 24
    density = 0.5 ** (alpha + beta - 2) * math.gamma(alpha + beta) / math.gamma(alpha) / math.gamma(beta)
    assert close(advantage(METHODS["bnpo"], reward(1, 0, 1, 1), group), .5 / density, -.5 / density, 0, 0)


def test_beta_density_of_one_group_is_flat() -> None:
    assert close(advantage(METHODS["bnpo"], reward(1, 0, 0, 0), ONE), .75, -.25, -.25, -.25)


def test_whitening_over_tokens_counts_long_answers_more() -> None:
    # Tokens: 3 of reward 1, 1 of reward 0. μ = ¾, σ² = (3·(¼)² + (¾)²)/3 = (3/16 + 9/16)/3 = ¼: (¼, −¾)/½.
    got = advantage(METHODS["reinforce_pp"], reward(1, 0), torch.tensor([0, 1]), length=torch.tensor([3, 1]))
    assert close(got, .5, -1.5)


def test_whitening_over_rollouts_counts_each_once() -> None:
    # μ = ½, σ² = (¼ + ¼)/1 = ½: ±½/√½ = ±1/√2.
    row = METHODS["reinforce_pp"].but(name="x", whiten="rollouts", kl="none", kl_in="loss")
    got = advantage(row, reward(1, 0), torch.tensor([0, 1]), length=torch.tensor([3, 1]))
    assert close(got, math.sqrt(.5), -math.sqrt(.5))


def test_kl_in_the_reward_is_subtracted_before_the_baseline() -> None:
    batch = replace(make([1, 0], group=[0, 0], lengths=[2, 1]),
                    logp=torch.tensor([[-1., -1.], [-2., 0.]], dtype=D),
                    ref_logp=torch.tensor([[-2., -1.5], [-2., 0.]], dtype=D))
    # Drifts: 1 + ½ = 1.5 and 0. β = 0.2: rewards 0.7 and 0; leave-one-out ±0.7.
    row = METHODS["rloo"].but(name="x", beta=0.2)
    assert close(token_advantage(row, batch), .7, -.7)


def test_kl_in_the_token_reward_becomes_a_return_to_go() -> None:
    batch = replace(make([1, 0], group=[0, 0], lengths=[2, 1]),
                    logp=torch.tensor([[-1., -1.], [-2., 0.]], dtype=D),
                    ref_logp=torch.tensor([[-2., -1.5], [-2., 0.]], dtype=D))
    # β = 0.2: to-go drifts 0.2·(1.5, 0.5) and 0: returns (0.7, 0.9) and 0. μ = 1.6/3,
    # σ² = Σ(x−μ)²/2 with Σx² = .49 + .81 = 1.3: (1.3 − 2.56/3)/2.
    row = METHODS["reinforce_pp"].but(name="x", beta=0.2)
    mean, std = 1.6 / 3, math.sqrt((1.3 - 2.56 / 3) / 2)
    got = token_advantage(row, batch)
    assert close(got[batch.mask], (.7 - mean) / std, (.9 - mean) / std, -mean / std)


def test_the_entropy_cost_is_the_mean_entropy_of_the_rollout() -> None:
    batch = replace(make([1, 0], group=[0, 0], lengths=[2, 1]), entropy=torch.tensor([[.2, .4], [.5, .0]], dtype=D))
    # ½ − 0.1·0.3 and −½ − 0.1·0.5.
    assert close(token_advantage(METHODS["gtpo"], batch), .47, -.55)


@each("value", [0.1, 1 / 3, 1e-30, 7e20, 0.0])
@each("dtype", [torch.float32, D])
def test_a_unanimous_group_has_advantage_exactly_zero(value: float, dtype: torch.dtype) -> None:
    # The float mean of three 0.1 is not 0.1: an unguarded std turns that ulp into advantages of order one.
    for name in ("grpo", "rloo", "p1_grpo", "opo", "gpg"):
        got = advantage(METHODS[name], torch.full((7,), value, dtype=dtype), torch.zeros(7, dtype=torch.int64))
        assert got.abs().max() == 0, name


def test_whitening_a_constant_gives_zero() -> None:
    got = advantage(METHODS["reinforce_pp"], torch.full((7,), 0.1), torch.arange(7))
    assert got.abs().max() == 0


def test_groups_need_neither_order_nor_consecutive_ids() -> None:
    r = reward(1, 0, 3, 1)
    mixed = advantage(METHODS["p1_grpo"], r, torch.tensor([90, -4, 90, -4]))
    assert close(mixed, -1, -.5, 1, .5)


def test_a_group_of_one_is_refused_with_the_choices() -> None:
    with pytest.raises(CreditscopeError, match=r"group 5 has one rollout.*sample R ≥ 2.*lone='zero' or lone='keep'"):
        advantage(METHODS["grpo"], reward(1, 0, 1), torch.tensor([3, 3, 5]))


def test_a_group_of_one_can_count_zero_or_keep_its_reward() -> None:
    group = torch.tensor([3, 3, 5])
    for lone, alone in {"zero": 0.0, "keep": 0.7}.items():
        for name in ("p1_grpo", "rloo", "opo"):
            row = METHODS[name].but(name="x", lone=lone)
            assert advantage(row, reward(1, 0, .7), group)[2] == alone, (name, lone)


@pytest.mark.parametrize(("r", "g", "message"), [
    (reward(1, 0), torch.tensor([0]), r"got \(2,\) and \(1,\)"),
    (reward(1, float("nan")), torch.tensor([0, 0]), "row 1 is nan"),
])
def test_wrong_shapes_and_nan_are_refused(r: torch.Tensor, g: torch.Tensor, message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        advantage(METHODS["grpo"], r, g)


def test_external_credit_cannot_be_computed_from_rewards() -> None:
    with pytest.raises(CreditscopeError, match="takes its credit from outside"):
        advantage(METHODS["ppo"], reward(1, 0), torch.tensor([0, 0]))


def test_negative_means_and_rewards_outside_the_unit_interval_are_refused_where_they_mean_nothing() -> None:
    with pytest.raises(CreditscopeError, match=r"must be ≥ 0: the group of row 0 has mean -0\.5"):
        advantage(METHODS["maxrl"], reward(-1, 0), torch.tensor([0, 0]))
    with pytest.raises(CreditscopeError, match=r"must lie in \[0, 1\]: row 1 has 2"):
        advantage(METHODS["bnpo"], reward(1, 2), torch.tensor([0, 0]))


def test_half_precision_rewards_are_summed_in_float32() -> None:
    r = torch.ones(4096, dtype=torch.bfloat16)
    r[0] = 0
    got = advantage(METHODS["p1_grpo"], r, torch.zeros(4096, dtype=torch.int64))
    assert got.dtype == torch.float32
    assert got[1].item() == pytest.approx(1 / 4096, rel=1e-4)  # bfloat16 sums would stop at 256


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_beta_density_does_not_fit_a_spike_to_rounding(dtype: torch.dtype) -> None:
    # The same rewards in another order: means that differ by an ulp, and a density of 1 for both groups.
    draw = torch.Generator().manual_seed(0)
    for _ in range(200):
        one = torch.rand(7, generator=draw).to(dtype)
        r = torch.cat([one, one[torch.randperm(7, generator=draw)]])
        group = torch.arange(2).repeat_interleave(7)
        got = advantage(METHODS["bnpo"], r, group)
        assert torch.allclose(got, r - r[:7].mean(), atol=1e-5)
