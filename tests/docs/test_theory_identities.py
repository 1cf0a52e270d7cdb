"""The identities of docs/theory.md by a second route: sums over every answer or every ordered group, real optimisers.

`tests/docs/test_theory.py` checks the page itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from creditscope import METHODS, Method, Rollouts, advantage, effective_credit, spectrum, surrogate
from creditscope.exact.enumeration import World, best_constant, constant_variance, measure
from creditscope.exact.p1 import answers, dead_law, group_gradients
from creditscope.microscope.geometry import weighted
from creditscope.optimizer.carry import carry, carry_limit
from creditscope.optimizer.replay import adam
from makers import make

PAGE = " ".join((Path(__file__).resolve().parents[2] / "docs" / "theory.md").read_text().split())
TINY = {"rtol": 0.0, "atol": 1e-12}


# -- expectations ------------------------------------------------------------------------------------------------------


def mean(chance: Tensor, value: Tensor) -> Tensor:
    """Σ_y π(y) f(y), f (N, ...)."""
    return torch.tensordot(chance, value, dims=1)


def ordered_groups(world: World, size: int) -> tuple[Tensor, Tensor]:
    """(N^R, R) every ordered group, and its probability."""
    index = torch.cartesian_prod(*[torch.arange(len(world.chance))] * size)
    return index, world.chance[index].prod(dim=1)


def estimates(world: World, method: Method, size: int) -> tuple[Tensor, Tensor]:
    """(N^R, D) ĝ = 1/R Σ_i A_i ψ_i of every ordered group, and its probability."""
    index, chance = ordered_groups(world, size)
    number = torch.arange(len(index)).repeat_interleave(size)
    credit = advantage(method, world.rollouts.reward[index].flatten(), number).view_as(index)
    return (credit[:, :, None] * world.scores[index]).mean(dim=1), chance


def token_gradient(world: World, credit: Tensor) -> Tensor:
    """E[Σ_t credit_t ψ_t] by autograd on the table's logits."""
    logits = world.policy.log().requires_grad_()
    logp = logits.log_softmax(dim=1)[world.state.clamp(min=0), world.rollouts.tokens]
    weight = credit.masked_fill(~world.rollouts.mask, 0.0) * world.chance[:, None]
    return torch.autograd.grad((weight * logp).sum(), logits)[0]


@pytest.mark.parametrize("std", ["sample", "population"])
@pytest.mark.parametrize("size", [2, 3])
def test_dividing_by_the_std_multiplies_the_gradient_of_a_prompt_by_one_number(size: int, std: str) -> None:
    world, divisor = answers(), size * (size - 1) if std == "sample" else size * size
    p = float(mean(world.chance, world.rollouts.reward))
    # c_k k(R−k) with σ_r² = k(R−k)/(R(R−1)), or /R².
    total = math.fsum(math.comb(size, k) * p**k * (1 - p) ** (size - k) * math.sqrt(divisor * k * (size - k))
                      for k in range(size + 1))
    method = METHODS["p1_grpo"].but(name="scaled", scale="group_std", std=std)
    found, chance = estimates(world, method, size)
    expected = total / (size**2 * p * (1 - p)) * world.gradient.flatten()
    torch.testing.assert_close(mean(chance, found), expected, **TINY)
    torch.testing.assert_close(measure("outcome", method, world, size).gradient.flatten(), expected, **TINY)


def std_weight(p: float, size: int) -> float:
    """E_k[c_k k(R−k)] / (R² p(1−p)) with the sample std, the binomial law through logarithms."""
    logs = [math.lgamma(size + 1) - math.lgamma(k + 1) - math.lgamma(size - k + 1) + k * math.log(p)
            + (size - k) * math.log(1 - p) for k in range(size + 1)]
    total = math.fsum(math.exp(log) * math.sqrt(size * (size - 1) * k * (size - k)) for k, log in enumerate(logs))
    return total / (size**2 * p * (1 - p))


def test_from_four_rollouts_on_a_std_gives_hard_and_easy_prompts_more_weight() -> None:
    for p in (0.1, 0.5, 0.8):
        assert std_weight(p, 4000) == pytest.approx(1 / math.sqrt(p * (1 - p)), rel=2e-3)
        for size in (2, 3):
            assert std_weight(p, size) == pytest.approx(std_weight(0.5, size), rel=1e-12)
    for size in (4, 5, 8, 16, 64):
        assert std_weight(0.02, size) == pytest.approx(std_weight(0.98, size), rel=1e-9)
        assert std_weight(0.02, size) > 1.05 * std_weight(0.5, size)


def test_the_product_of_ratios_is_exact_and_the_tokens_own_ratio_is_not() -> None:
    draw = torch.Generator().manual_seed(0)
    old, move = torch.randn(2, 3, 2, generator=draw, dtype=torch.float64)
    reward = torch.tensor([0.0, 1.0, 1.0, 0.25], dtype=torch.float64)  # of the answers 00, 01, 10, 11

    def logp(logits: Tensor) -> Tensor:
        """(4, 2): the second token's logits are those of the row 1 + first token."""
        table, first = logits.log_softmax(dim=1), torch.tensor([0, 0, 1, 1])
        return torch.stack([table[0, first], table[1 + first, torch.tensor([0, 1, 0, 1])]], dim=1)

    def gradient(at: Tensor, value: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = at.clone().requires_grad_()
        return torch.autograd.grad(value(logp(leaf)), leaf)[0]

    chance = logp(old).sum(dim=1).exp()
    sampled: dict[str, Callable[[Tensor], Tensor]] = {
        "product": lambda now: (chance * reward * (now - logp(old)).sum(dim=1).exp()).sum(),
        "token": lambda now: (chance * reward * (now - logp(old)).exp().sum(dim=1)).sum()}
    for at, exact in ((old, {"product", "token"}), (old + move, {"product"})):
        truth = gradient(at, lambda now: (now.sum(dim=1).exp() * reward).sum())
        off = {name: float((gradient(at, value) - truth).abs().max()) for name, value in sampled.items()}
        assert {name for name, error in off.items() if error < 1e-14} == exact
        assert all(error > 0.01 for name, error in off.items() if name not in exact)


def test_two_of_the_three_parts_of_uniform_credit_have_no_mean_gradient() -> None:
    world, b = answers(), 0.3
    v, q, r = world.value[:, :-1], world.value[:, 1:], world.rollouts.reward[:, None]
    assert float((v - b).abs().max()) > 0.2
    assert float((r - q).abs().max()) > 0.2
    torch.testing.assert_close(token_gradient(world, q - v), world.gradient, **TINY)
    torch.testing.assert_close(token_gradient(world, v - b), torch.zeros_like(world.gradient), **TINY)
    torch.testing.assert_close(token_gradient(world, r - q), torch.zeros_like(world.gradient), **TINY)
    torch.testing.assert_close(token_gradient(world, (r - b).expand_as(v)), world.gradient, **TINY)


# -- dead groups -------------------------------------------------------------------------------------------------------


def test_the_share_of_dead_groups_is_that_of_a_count_over_all_groups() -> None:
    for p, size in itertools.product((Fraction(1, 2), Fraction(9, 10), Fraction(1, 7)), (2, 3, 8)):
        share = sum(math.prod(p if right else 1 - p for right in group)
                    for group in itertools.product((0, 1), repeat=size) if len(set(group)) == 1)
        assert float(share) == pytest.approx(dead_law(float(p), size), rel=1e-14)
    assert [f"{dead_law(p, 8):.2g}" for p in (0.5, 0.9, 0.99)] == ["0.0078", "0.43", "0.92"]
    assert all(name in PAGE for name in ("0.008 at $p=0.5$", "0.43 at 0.9", "0.92 at 0.99"))
    for size in (2, 4, 8):  # prompts of 0.1 and 0.7
        assert (dead_law(0.1, size) + dead_law(0.7, size)) / 2 > dead_law(0.4, size)


def live_and_dead(dead_length: int) -> Rollouts:
    """A live group of 3 and 5 tokens, and a dead one of `dead_length` tokens each."""
    return make([1, 0, 1, 1], [0, 0, 1, 1], [3, 5, dead_length, dead_length], width=8)


def at_ratio_one(name: str, batch: Rollouts) -> Tensor:
    method = METHODS[name].replace(max_tokens=8) if METHODS[name].aggregate == "constant" else METHODS[name]
    return effective_credit(lambda logp: surrogate(method, logp, batch), batch.logp)


@pytest.mark.parametrize(("name", "dead_length", "factor"), [
    ("p1_grpo", 4, 1 / 2), ("rloo", 4, 1 / 2), ("dr_grpo", 4, 1 / 2), ("grpo", 4, 1 / 2), ("grpo", 8, 1 / 2),
    ("dapo", 8, 1.0), ("cispo", 4, 1 / 2), ("cispo", 8, 8 / 24), ("maxrl", 8, 8 / 24), ("gpg", 4, 1.0),
    ("gpg", 8, 2 * 8 / 24)])
def test_a_dead_group_does_to_the_rest_what_the_table_says(name: str, dead_length: int, factor: float) -> None:
    both = live_and_dead(dead_length)
    w, alone = at_ratio_one(name, both), at_ratio_one(name, both.rows(torch.tensor([0, 1])))
    assert float(w[2:].abs().max()) == 0
    assert float(alone.abs().max()) > 0
    torch.testing.assert_close(w[:2], factor * alone, **TINY)


@pytest.mark.parametrize("name", ["reinforce", "reinforce_pp", "reinforce_pp_baseline"])
def test_without_the_groups_mean_a_dead_group_is_pushed_one_way(name: str) -> None:
    w = at_ratio_one(name, live_and_dead(4))[2:, :4]
    assert bool((w > 0).all() or (w < 0).all())


def test_after_the_std_every_live_group_has_the_same_sum_of_squares() -> None:
    for size in (2, 5, 8):
        for right in range(1, size):
            reward = (torch.arange(size) < right).double()
            found = advantage(METHODS["grpo"], reward, torch.zeros(size, dtype=torch.int64))
            assert float(found.square().sum()) == pytest.approx(size - 1, rel=1e-12)


# -- rank --------------------------------------------------------------------------------------------------------------


def test_two_clusters_of_scores_have_the_rank_of_the_page() -> None:
    for size, right in ((2, 1), (8, 4), (8, 1), (32, 5)):
        credit = np.where(np.arange(size) < right, 1 - right / size, -right / size)
        scores = np.eye(2)[(np.arange(size) >= right).astype(int)]
        sigma = np.linalg.svd(credit[:, None] * scores, compute_uv=False)
        by_hand = 1 + 2 * math.sqrt(right * (size - right)) / size
        assert sigma.sum() ** 2 / (sigma**2).sum() == pytest.approx(by_hand, rel=1e-12)
        # The Gram's rounding, 1e-16, is 1e-8 in a singular value that is 0.
        assert spectrum(weighted(scores @ scores.T, credit)).effective_rank == pytest.approx(by_hand, abs=1e-6)


def test_signs_and_zero_sum_leave_every_singular_value_of_the_rows() -> None:
    draw = np.random.default_rng(0)
    scores, credit = draw.standard_normal((6, 40)), np.array([0.5, 0.5, 0.5, -0.5, -0.5, -0.5])
    signed, plain = (np.linalg.svd(c[:, None] * scores, compute_uv=False) for c in (credit, np.abs(credit)))
    np.testing.assert_allclose(signed, plain, rtol=1e-12)
    np.testing.assert_allclose(credit @ scores, credit @ (scores - scores.mean(axis=0)), rtol=1e-12)


def test_zero_sum_bounds_the_null_of_orthogonal_scores_from_below_by_two() -> None:
    draw = np.random.default_rng(1)
    for size in (2, 3, 8, 32):
        credit = draw.lognormal(sigma=3, size=(200, size)) * draw.choice([-1, 1], size=(200, size))
        credit -= credit.mean(axis=1, keepdims=True)
        null = np.abs(credit).sum(axis=1) ** 2 / (credit**2).sum(axis=1)
        assert 2 - 1e-12 <= null.min() <= null.max() <= size + 1e-12
    two = np.array([1.0, -1.0, *[0.0] * 6])
    assert np.abs(two).sum() ** 2 / (two**2).sum() == 2


def test_the_null_is_four_times_R_minus_1_times_the_sample_variance_of_the_rewards() -> None:
    for size, right in ((4, 1), (8, 3), (32, 16)):
        reward = (np.arange(size) < right).astype(float)
        credit = reward - reward.mean()
        null = 4 * (size - 1) * reward.var(ddof=1)
        assert np.abs(credit).sum() ** 2 / (credit**2).sum() == pytest.approx(null, rel=1e-12)


# -- the baseline ------------------------------------------------------------------------------------------------------


def spread(chance: Tensor, value: Tensor) -> float:
    """E‖x − E x‖² over what was listed, x (N, D)."""
    return float(mean(chance, (value - mean(chance, value)).square().sum(dim=1)))


def test_b_star_has_less_variance_than_any_other_constant_by_listing_all_answers() -> None:
    world = answers()
    reward, norm = world.rollouts.reward, world.scores.square().sum(dim=1)
    best, scale = float(best_constant(world)), float(mean(world.chance, norm))
    covariance = float(mean(world.chance, norm * reward) - mean(world.chance, norm) * mean(world.chance, reward))
    assert best == pytest.approx(float(mean(world.chance, reward)) + covariance / scale, abs=1e-12)
    least = spread(world.chance, (reward - best)[:, None] * world.scores)
    for off in (-1.0, -0.1, -0.001, 0.001, 0.1, 1.0):
        found = spread(world.chance, (reward - best - off)[:, None] * world.scores)
        assert found - least == pytest.approx(off**2 * scale, abs=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_estimating_the_mean_from_the_group_costs_what_the_page_says(size: int) -> None:
    world = answers()
    reward, norm = world.rollouts.reward, world.scores.square().sum(dim=1)
    center, square = mean(world.chance, reward), float(world.gradient.square().sum())
    sigma2 = float(mean(world.chance, (reward - center).square()))
    constant = constant_variance(world, center, size)
    expected = constant + (sigma2 * float(mean(world.chance, norm)) + square) / (size * (size - 1))
    found, chance = estimates(world, METHODS["rloo"], size)
    assert spread(chance, found) == pytest.approx(expected, abs=1e-12)
    shrunk, chance = estimates(world, METHODS["p1_grpo"], size)
    assert spread(chance, shrunk) == pytest.approx(expected * (size - 1) ** 2 / size**2, abs=1e-12)


def test_with_two_choices_of_one_token_the_best_constant_leaves_no_variance() -> None:
    for p in (0.05, 0.25, 0.6):
        chance, reward = torch.tensor([1 - p, p]).double(), torch.tensor([0.0, 1.0]).double()
        scores = torch.eye(2).double() - chance
        norm = scores.square().sum(dim=1)
        best = float(mean(chance, norm * reward) / mean(chance, norm))
        assert best == pytest.approx(1 - p, abs=1e-7)
        assert spread(chance, (reward - best)[:, None] * scores) == pytest.approx(0, abs=1e-12)


# -- shared prefixes and lengths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_a_mean_over_each_answer_ascends_the_reward_per_token(size: int) -> None:
    world = answers()
    plain = METHODS["grpo"].but(name="plain", scale="none", bound="none", clip_low=None, clip_high=None)
    groups, chance = world.groups(size)
    # ∂J/∂z of each group in a batch of all groups, whose 1/B counts them all.
    found = mean(chance, group_gradients(plain, world, groups)) * len(groups)
    logits = world.policy.log().requires_grad_()
    logp = logits.log_softmax(dim=1)[world.state.clamp(min=0), world.rollouts.tokens]
    probability = logp.masked_fill(~world.rollouts.mask, 0.0).sum(dim=1).exp()
    b = mean(world.chance, world.rollouts.reward)
    worth = (probability * (world.rollouts.reward - b) / world.rollouts.lengths).sum()
    expected = torch.autograd.grad(worth, logits)[0]
    torch.testing.assert_close(found, (size - 1) / size * expected, **TINY)
    turned = torch.cosine_similarity(expected.flatten(), world.gradient.flatten(), dim=0)
    assert float(turned) < 0.995


def test_W_at_a_shared_root_is_the_covariance_of_credit_and_one_over_the_length() -> None:
    batch = make([1, 0, 0.25, 1], [0] * 4, [2, 7, 3, 5])
    batch = replace(batch, tokens=torch.where(torch.arange(7) < 2, 1, batch.tokens))
    w = at_ratio_one("grpo", batch)
    credit = advantage(METHODS["grpo"], batch.reward, batch.group)
    covariance = np.cov(credit.numpy(), 1 / batch.lengths.numpy(), ddof=0)[0, 1]
    for shared in (0, 1):
        assert float(w[:, shared].sum()) == pytest.approx(covariance, abs=1e-15)  # R/B = 1


# -- the optimiser -----------------------------------------------------------------------------------------------------


GRADS = (3.0, -1.0, 2.0, 0.5)


def last_update(scale: float, eps: float) -> float:
    """The last of four steps of torch's AdamW, learning rate 1, with gradients times `scale`."""
    theta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([theta], lr=1.0, eps=eps, weight_decay=0.0)
    before = 0.0
    for grad in GRADS:
        before = float(theta.detach())
        theta.grad = torch.full_like(theta, scale * grad)
        optimizer.step()
    return float(theta.detach()) - before


def moments() -> tuple[float, float]:
    """m̂ and √v̂ of the four gradients, by their recursions."""
    m = v = 0.0
    for grad in GRADS:
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
    return m / (1 - 0.9**4), math.sqrt(v / (1 - 0.999**4))


def test_the_three_regimes_of_epsilon_are_those_of_a_real_adamw() -> None:
    m, root = moments()
    for scale, eps in ((0.01, 1e-3), (7.0, 0.1), (1.0, 1e-8)):
        assert last_update(scale, eps) == pytest.approx(-m / (root + eps / scale), rel=1e-12)
    assert last_update(1e6, 1e-8) == pytest.approx(-m / root, rel=1e-12)
    assert last_update(0.25, 0.0) == pytest.approx(-m / root, rel=1e-12)
    assert last_update(0.25, 0.25 * root) == pytest.approx(-m / root / 2, rel=1e-12)
    assert last_update(1e-9, 1.0) == pytest.approx(-1e-9 * m, rel=1e-7)
    assert float(adam(torch.tensor(GRADS).double(), lr=1.0)) == pytest.approx(last_update(1.0, 1e-8), rel=1e-12)


def moves_after(step: int, steps: int, betas: tuple[float, float]) -> list[float]:
    """The steps of torch's AdamW with ε = 0 and learning rate 1, when a gradient of 1 becomes 0 at step `step`."""
    theta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([theta], lr=1.0, betas=betas, eps=0.0, weight_decay=0.0)
    out = []
    for t in range(1, step + steps):
        theta.grad = torch.full_like(theta, float(t < step))
        before = float(theta.detach())
        optimizer.step()
        if t >= step:
            out.append(before - float(theta.detach()))
    return out


def test_a_real_adam_goes_on_for_as_many_full_steps_as_the_page_says() -> None:
    betas = (0.9, 0.95)
    for step in (2, 5, 30):
        found = moves_after(step, 6, betas)
        assert found == pytest.approx([carry(step, k, betas) for k in range(6)], abs=1e-12)
    # 0.95^500 = 7e-12: the limit T → ∞; (β₁/√β₂)^300 = 4e-11: the end of the sum.
    whole = sum(moves_after(501, 300, betas))
    assert whole == pytest.approx(0.9 / (math.sqrt(0.95) - 0.9), abs=1e-8)
    numbers = [f"{carry_limit(0, b):.2f}" for b in ((0.9, 0.999), betas)]
    sums = [f"{0.9 / (math.sqrt(b) - 0.9):.1f}" for b in (0.999, 0.95)]
    assert (numbers, sums) == (["0.90", "0.92"], ["9.0", "12.1"])
    assert "0.90 of it with $(\\beta_1,\\beta_2)=(0.9,0.999)$ in the limit, 0.92 with $(0.9,0.95)$" in PAGE
    assert "full steps: 9.0 and 12.1." in PAGE


# -- the loss ----------------------------------------------------------------------------------------------------------


def test_the_loss_at_ratio_one_is_a_covariance_of_weights_and_credit_and_its_gradient_is_not_0() -> None:
    batch = make([1, 0, 0.25, 1], [0] * 4, [2, 7, 3, 5])
    credit, length = advantage(METHODS["dr_grpo"], batch.reward, batch.group), batch.lengths.double()
    value = {name: float(surrogate(METHODS[name], batch.logp, batch)) for name in ("grpo", "dr_grpo", "dapo")}
    assert value["grpo"] == pytest.approx(0, abs=1e-15)
    assert float(at_ratio_one("grpo", batch).abs().max()) > 0.01
    weight = length / (4 * 7)  # Σ_t 1/(B·L_max), L_max the width of the batch
    expected = float(((weight - weight.mean()) * (credit - credit.mean())).sum())
    assert value["dr_grpo"] == pytest.approx(expected, abs=1e-15)
    assert abs(expected) > 0.01
    higher = replace(batch, reward=batch.reward + 1)
    assert float(surrogate(METHODS["dr_grpo"], batch.logp, higher)) == pytest.approx(expected, abs=1e-14)
