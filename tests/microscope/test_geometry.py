"""Readings of a Gram by hand, against explicit rows, and where they must refuse to speak."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from creditscope import CreditscopeError, spectrum
from creditscope.microscope.geometry import (
    between,
    by_group,
    cancellation,
    centred,
    concentration,
    conflict,
    group_squares,
    live,
    noise_scale,
    norm_null,
    optimal_baseline,
    permutation_null,
    pooled,
    ranks,
    summary,
    unweighted,
    w_null,
    weighted,
)
from creditscope.microscope.spectrum import orthogonal_null

SEEDS = st.integers(0, 999)


def rows(n: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, columns))


def gram(g: np.ndarray) -> np.ndarray:
    return np.asarray(g @ g.T)


def binary_advantage(right: int, rollouts: int) -> np.ndarray:
    reward = (np.arange(rollouts) < right).astype(float)
    return reward - reward.mean()


# Credit in and out.

@given(st.integers(1, 8), SEEDS)
def test_weighting_is_that_of_explicit_rows_and_unweighting_takes_it_back(n: int, seed: int) -> None:
    psi, c = rows(n, 20, seed), rows(n, 1, seed + 1)[:, 0]
    assert np.allclose(weighted(gram(psi), c), gram(c[:, None] * psi))
    assert np.allclose(unweighted(gram(c[:, None] * psi), c), gram(psi))


def test_a_row_without_credit_cannot_be_unweighted_and_is_named() -> None:
    c = np.array([0.5, 0.0, -0.5, 0.0])
    k = gram(c[:, None] * rows(4, 9, 0))
    with pytest.raises(CreditscopeError, match=r"rows 1, 3 have w = 0.*live\(w\)"):
        unweighted(k, c)
    kept = live(c)
    assert kept.tolist() == [True, False, True, False]
    assert np.allclose(unweighted(k[np.ix_(kept, kept)], c[kept]), gram(rows(4, 9, 0)[kept]))


def test_centring_by_hand() -> None:
    # ψ₁ = (2, 0), ψ₂ = (0, 0): ψ̄ = (1, 0), rows 1·(1, 0) and −3·(−1, 0) = (3, 0), so K = [[1, 3], [3, 9]].
    assert centred([[4.0, 0.0], [0.0, 0.0]], [1.0, -3.0]).tolist() == [[1.0, 3.0], [3.0, 9.0]]


@given(st.integers(2, 20), SEEDS)
def test_centring_is_that_of_explicit_rows(size: int, seed: int) -> None:
    psi, c = rows(size, 30, seed), rows(size, 1, seed + 1)[:, 0]
    assert np.allclose(centred(gram(psi), c), gram(c[:, None] * (psi - psi.mean(axis=0))))


@given(st.integers(2, 12), st.data())
def test_zero_sum_credit_leaves_rank_r_and_centred_scores_have_rank_r_minus_1(r: int, data: st.DataObject) -> None:
    # P1.5, doubt 1: the raw rows stay independent although their credits sum to zero.
    a = binary_advantage(data.draw(st.integers(1, r - 1)), r)
    s = gram(rows(r, 40, data.draw(SEEDS)))
    assert a.sum() == pytest.approx(0)
    assert spectrum(weighted(s, a)).numerical_rank == r
    assert spectrum(centred(s, a)).numerical_rank == r - 1


@given(st.integers(2, 10), SEEDS)
def test_the_spectrum_does_not_see_the_signs_of_the_credit_but_cancellation_does(n: int, seed: int) -> None:
    s, c = gram(rows(n, 20, seed)), rows(n, 1, seed + 1)[:, 0]
    assert np.allclose(spectrum(weighted(s, c)).values, spectrum(weighted(s, np.abs(c))).values)
    plus, minus = np.full(n, 1.0), np.where(np.arange(n) == 0, -1.0, 1.0)
    assert cancellation(weighted(s, plus)) != pytest.approx(cancellation(weighted(s, minus)))


# Groups.

@given(st.integers(1, 9), SEEDS)
def test_blocks_are_the_grams_of_each_groups_rows_and_pooling_is_the_gram_of_their_sums(n: int, seed: int) -> None:
    g = rows(n, 15, seed)
    group = np.random.default_rng(seed).integers(-2, 2, size=n)
    found = dict(by_group(gram(g), group))
    assert list(found) == sorted(set(group.tolist()))
    for name, block in found.items():
        assert np.allclose(block, gram(g[group == name]))
    sums = np.stack([g[group == name].sum(axis=0) for name in found])
    assert np.allclose(pooled(gram(g), group), gram(sums))


# One number from one Gram.

def test_cancellation_by_hand() -> None:
    # g₁ = (3, 0), g₂ = (−1, 1): the sum is (2, 1), ‖·‖² = 5, over 9 + 2.
    g = np.array([[3.0, 0.0], [-1.0, 1.0]])
    assert cancellation(gram(g)) == pytest.approx(5 / 11)
    assert cancellation(np.zeros((3, 3))) is None


@given(st.integers(1, 10), SEEDS)
def test_cancellation_is_one_for_orthogonal_rows_n_for_identical_ones_and_lies_between_zero_and_n(
        n: int, seed: int) -> None:
    assert cancellation(np.eye(n) * 7) == pytest.approx(1)
    assert cancellation(np.ones((n, n)) * 7) == pytest.approx(n)
    g = rows(n, 5, seed)
    value = cancellation(gram(g))
    assert value == pytest.approx((g.sum(axis=0) ** 2).sum() / (g**2).sum())
    assert value is not None
    assert 0 <= value <= n + 1e-9
    assert cancellation(gram(np.concatenate([g, -g]))) == pytest.approx(0, abs=1e-12)


def test_conflict_by_hand() -> None:
    # Angles 0°, 120° and 240° all stand more than 90° apart; a fourth row at 60° conflicts with 240° alone.
    # Pairs: (0,120) (0,240) (120,240) (240,60) of six. A row of zeros changes nothing.
    angle = np.radians([0.0, 120.0, 240.0, 60.0])
    g = np.stack([np.cos(angle), np.sin(angle)], axis=1) * np.array([1.0, 2.0, 3.0, 4.0])[:, None]
    assert conflict(gram(g[:3])) == 1.0
    assert conflict(gram(g)) == pytest.approx(4 / 6)
    assert conflict(gram(np.concatenate([g, np.zeros((2, 2))]))) == pytest.approx(4 / 6)


def test_conflict_is_absent_with_fewer_than_two_live_rows_and_rounding_is_no_conflict() -> None:
    assert conflict([[1.0]]) is None
    assert conflict([[1.0, 0.0], [0.0, 0.0]]) is None
    assert conflict([[1.0, -1e-15], [-1e-15, 1.0]]) == 0.0
    assert conflict([[1.0, -1e-4], [-1e-4, 1.0]]) == 1.0
    assert conflict([[1.0, -1e-4], [-1e-4, 1.0]], eps=5e-4) == 0.0


def test_the_noise_scale_by_hand() -> None:
    # One dimension, g = 1, 2, 3: mean of squares 14/3, mean product of pairs (2 + 3 + 6)/3 = 11/3, B = 1 / (11/3).
    # The same from the textbook: sample variance 1 (ddof 1), ‖G‖² = mean² − variance/N = 4 − 1/3.
    found = noise_scale(gram(np.array([[1.0], [2.0], [3.0]])))
    assert found == pytest.approx(3 / 11)
    assert found == pytest.approx(1 / (4 - 1 / 3))


@pytest.mark.slow
def test_the_noise_scale_of_many_samples_is_the_true_one() -> None:
    # G = (1, 0, ..., 0), Σ = 0.5²·I in 8 dimensions: tr Σ / ‖G‖² = 2. Rows are divided by N: they sum to the gradient.
    g = (np.eye(1, 8) + 0.5 * rows(4000, 8, 0)) / 4000
    assert noise_scale(gram(g)) == pytest.approx(2, rel=0.05)


def test_both_parts_of_the_noise_scale_are_unbiased_at_n_of_3() -> None:
    # Over many small batches the estimates of ‖G‖² have mean 1 and those of tr Σ 2; the naive ‖mean‖² has 1 + 2/3.
    batches = np.eye(1, 8) + 0.5 * np.random.default_rng(1).normal(size=(40000, 3, 8))
    ks = np.einsum("bid,bjd->bij", batches, batches)
    diagonal = np.einsum("bii->b", ks) / 3
    signal = (ks.sum(axis=(1, 2)) - 3 * diagonal) / 6
    assert signal.mean() == pytest.approx(1, abs=0.02)
    assert (diagonal - signal).mean() == pytest.approx(2, abs=0.02)
    positive = [i for i in range(20) if signal[i] > 0]
    for i in positive:
        assert noise_scale(ks[i]) == pytest.approx((diagonal[i] - signal[i]) / signal[i])


def test_a_gradient_that_cannot_be_seen_has_no_noise_scale() -> None:
    assert noise_scale([[1.0, -0.5], [-0.5, 1.0]]) is None
    assert noise_scale(np.eye(4)) is None
    assert noise_scale([[3.0]]) is None


@pytest.mark.slow
def test_rollouts_of_one_prompt_understate_the_noise_and_pooled_groups_do_not() -> None:
    # Prompt gradients G_p = G + u_p with tr Cov(u) = 8, two rollouts a prompt with tr Cov = 8 of their own, ‖G‖² = 1.
    # A prompt's sum is 2G + 2u + noise of 16: B in prompts = (4·8 + 16)/4 = 12. Rollouts share u: their pairs see more
    # signal than there is, and a batch of 2 prompts reads far less noise than 2·12 rollouts.
    random = np.random.default_rng(3)
    prompt = np.eye(1, 8) + random.normal(size=(1500, 8))
    group = np.repeat(np.arange(1500), 2)
    g = prompt[group] + random.normal(size=(3000, 8))
    assert noise_scale(pooled(gram(g), group)) == pytest.approx(12, rel=0.15)
    small = [gram(g[i : i + 4]) for i in range(0, 3000, 4)]
    seen = sum(k.sum() - np.trace(k) for k in small) / len(small) / 12
    assert seen == pytest.approx(1 + 8 / 3, rel=0.1)  # a third of the pairs share u


@given(st.integers(2, 8), SEEDS, st.floats(1e-6, 1e6))
def test_readings_do_not_depend_on_scale_or_on_the_order_of_the_rows(n: int, seed: int, scale: float) -> None:
    k = gram(rows(n, 12, seed) + 1.0)
    order = np.random.default_rng(seed).permutation(n)
    for reading in (cancellation, conflict, noise_scale, norm_null):
        expected = reading(k)  # a noise scale that is None stays None
        assert reading(k * scale) == pytest.approx(expected)
        assert reading(k[np.ix_(order, order)]) == pytest.approx(expected)


# The nulls.

@given(st.integers(2, 30), st.data())
def test_the_w_null_of_a_binary_group_is_the_orthogonal_null(r: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, r - 1))
    assert w_null(binary_advantage(k, r)) == pytest.approx(orthogonal_null(k, r))
    assert w_null([0.0, 0.0]) is None


@given(st.integers(1, 10), SEEDS)
def test_the_measured_effective_rank_never_exceeds_the_norm_null_and_meets_it_when_rows_are_orthogonal(
        n: int, seed: int) -> None:
    g = rows(n, 6, seed) * np.exp(rows(n, 1, seed + 1))
    null = norm_null(gram(g))
    assert null is not None
    assert spectrum(gram(g)).effective_rank <= null + 1e-6
    norms = np.abs(rows(n, 1, seed)[:, 0])
    assert norm_null(np.diag(norms**2)) == pytest.approx(spectrum(np.diag(norms**2)).effective_rank)
    assert norm_null(np.zeros((2, 2))) is None


# Concentration.

def test_concentration_by_hand() -> None:
    # Norms 3, 1 and eighteen zeros... of 20 items the top tenth is two: all of 10. One holds 9/10. 10²/(81 + 1).
    c = concentration([3.0, 1.0] + [0.0] * 18)
    assert c is not None
    assert (c.top1, c.top10) == (pytest.approx(0.9), pytest.approx(1.0))
    assert c.effective_number == pytest.approx(100 / 82)
    assert concentration([0.0, 0.0]) is None


@given(st.integers(1, 40), st.floats(1e-200, 1e200))
def test_equal_norms_have_n_effective_items(n: int, norm: float) -> None:
    c = concentration(np.full(n, norm))
    assert c is not None
    assert (c.top1, c.effective_number) == (pytest.approx(1 / n), pytest.approx(n))
    assert c.top10 == pytest.approx(max(1, n // 10) / n)


@given(st.integers(2, 20), SEEDS)
def test_concentration_is_that_of_a_diagonal_spectrum(n: int, seed: int) -> None:
    # For orthogonal rows the items are the eigenvalues: top1 and the participation ratio say the same.
    norms = np.abs(rows(n, 1, seed)[:, 0])
    c, s = concentration(norms), spectrum(np.diag(norms**2))
    assert c is not None
    assert c.top1 == pytest.approx(s.top1)
    assert c.effective_number == pytest.approx(s.participation_ratio)


# The optimal baseline.

def test_the_optimal_baseline_by_hand() -> None:
    # ‖ψ‖² = 4, 1, 1 and r = 1, 0, 0: b* = 4/6 = 2/3, mean 1/3. V(1/3) = 4·4/9 + 2·1/9 = 2, V(2/3) = 4/9 + 2·4/9 = 4/3,
    # so the mean costs 2 − 4/3 = 2/3 more.
    # By chance: Var‖ψ‖² = 2, Var r = 2/9, 3·2·(2/9)/(2·2) = 1/3.
    (b,) = optimal_baseline([4.0, 1.0, 1.0], [1.0, 0.0, 0.0])
    assert (b.mean, b.optimal) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert (b.variance_optimal + b.excess, b.variance_optimal) == (pytest.approx(2), pytest.approx(4 / 3))
    assert b.excess == pytest.approx(2 / 3)
    assert b.by_chance == pytest.approx(1 / 3)


@given(st.integers(2, 9), SEEDS)
def test_no_other_baseline_has_less_variance_and_the_excess_is_the_covariances(n: int, seed: int) -> None:
    x, r = rows(n, 1, seed)[:, 0] ** 2, rows(n, 1, seed + 1)[:, 0]
    (b,) = optimal_baseline(x, r, np.full(n, 5))
    assert b.group == 5
    for other in np.linspace(-3, 3, 25):
        assert b.variance_optimal <= ((r - other) ** 2 * x).sum() + 1e-12
    assert b.excess == pytest.approx((b.mean - b.optimal) ** 2 * x.sum(), abs=1e-9)
    assert b.excess == pytest.approx(n * np.cov(x, r, ddof=0)[0, 1] ** 2 / x.mean(), abs=1e-9)


def test_the_excess_by_chance_is_its_mean_over_every_permutation() -> None:
    x, r = np.array([4.0, 1.0, 0.5, 2.0, 0.1]), np.array([1.0, 0.0, 0.0, 1.0, 0.3])
    (b,) = optimal_baseline(x, r)
    dealt = [optimal_baseline(x[list(order)], r)[0].excess for order in itertools.permutations(range(5))]
    assert b.by_chance == pytest.approx(np.mean(dealt))


def test_equal_norms_make_the_mean_optimal_and_unequal_ones_may_not() -> None:
    (b,) = optimal_baseline(np.full(4, 2.0), [1.0, 0.0, 0.0, 1.0])
    assert (b.excess, b.by_chance) == (0.0, 0.0)
    (b,) = optimal_baseline([9.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 1.0])
    assert b.excess > 0.1 * b.variance_optimal


def test_the_estimators_measured_variance_falls_by_what_the_baseline_says() -> None:
    # A two-armed policy, π(1) = p, ψ = ∇ log π = y − p: ‖ψ‖² = (1−p)² for arm 1 and p² for arm 0, r = y.
    # b* = E[r‖ψ‖²]/E‖ψ‖² = p(1−p)²/(p(1−p)) = 1 − p. Var[(r−b)ψ] by the two outcomes.
    p = 0.2
    outcomes = np.array([1.0] * 2 + [0.0] * 8)  # shares p and 1 − p
    psi = outcomes - p
    (b,) = optimal_baseline(psi**2, outcomes)
    assert b.optimal == pytest.approx(1 - p)
    assert ((outcomes - b.mean) * psi).mean() == pytest.approx(((outcomes - b.optimal) * psi).mean())  # unbiased
    assert ((outcomes - b.mean) * psi).var() - ((outcomes - b.optimal) * psi).var() == pytest.approx(b.excess / 10)


def test_groups_without_two_rewards_or_without_scores_have_no_baseline() -> None:
    found = optimal_baseline([1.0, 2.0, 0.0, 0.0, 3.0, 1.0], [1.0, 1.0, 1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1, 2, 2])
    assert [b.group for b in found] == [2]
    (b,) = optimal_baseline([1.0, 0.0], [0.1, 0.7])  # b* = 0.1 leaves nothing
    assert b.variance_optimal == 0
    assert b.excess == pytest.approx(0.09)


# Chance.

def test_the_permutation_null_by_hand() -> None:
    # ‖ψ‖² = 9, 1, 1 orthogonal, c = (1, ½, ½)·: the large credit meets norm 3 in a third of the deals, norm 1 else.
    # Rows' norms 3, ½, ½: r_eff = 16/9.5. Or 1.5, 1, ½: 9/3.5. Signs do not matter.
    null = permutation_null(np.diag([9.0, 1.0, 1.0]), [1.0, -0.5, -0.5], draws=400, seed=1)["effective_rank"]
    assert sorted({round(v, 9) for v in null.tolist()}) == [pytest.approx(16 / 9.5), pytest.approx(9 / 3.5)]
    assert null.mean() == pytest.approx((16 / 9.5 + 2 * 9 / 3.5) / 3, abs=0.05)


@given(st.integers(1, 6), SEEDS)
def test_at_half_right_chance_leaves_the_ranks_alone_but_moves_cancellation(half: int, seed: int) -> None:
    s, a = gram(rows(2 * half, 20, seed)), binary_advantage(half, 2 * half)
    null, observed = permutation_null(s, a, draws=20, seed=seed), ranks(spectrum(weighted(s, a)))
    for name in ("effective_rank", "entropy_rank", "participation_ratio", "stable_rank", "top1"):
        assert np.allclose(null[name], observed[name]), name
    if half > 1:
        assert np.ptp(null["cancellation"]) > 1e-6


def test_right_answers_that_point_another_way_stand_out_and_chance_does_not() -> None:
    # Right answers at +e₁, wrong ones at −e₁ (plus noise): credit and score agree, so the rows add up.
    a = binary_advantage(4, 8)
    psi = np.sign(a)[:, None] * np.eye(1, 30) * 4 + rows(8, 30, 0)
    aligned = permutation_null(gram(psi), a, draws=300)["cancellation"]
    assert cancellation(weighted(gram(psi), a)) > np.quantile(aligned, 0.975)
    s = gram(rows(8, 30, 1))
    plain = permutation_null(s, a, draws=300)["cancellation"]
    assert cancellation(weighted(s, a)) < np.quantile(plain, 0.95)


def test_the_same_seed_deals_the_same_credits_and_a_draw_without_a_gradient_is_left_out() -> None:
    s, c = gram(rows(6, 9, 0)), binary_advantage(2, 6)
    first, again, other = (permutation_null(s, c, draws=30, seed=seed)["effective_rank"] for seed in (0, 0, 1))
    assert first.tolist() == again.tolist() != other.tolist()
    # An empty rollout has ψ = 0: when it is dealt the only credit there is no Gram to read.
    null = permutation_null(np.diag([1.0, 0.0]), [1.0, 0.0], draws=40)["effective_rank"]
    assert 0 < len(null) < 40
    with pytest.raises(CreditscopeError, match="nothing to shuffle"):
        permutation_null(s, np.zeros(6))


# All of it.

def test_the_summary_by_hand() -> None:
    # Group 0: orthogonal scores of norm 1 under k = 1 of R = 2, so K = ¼I. Group 1: the same score twice, A = ±½.
    # Group 2 is unanimous. r_eff: 2 and 1, mean 1.5 over the two live groups; nulls 2 and 2.
    psi = np.zeros((6, 4))
    psi[0, 0] = psi[1, 1] = psi[2, 2] = psi[3, 2] = psi[4, 3] = psi[5, 3] = 1.0
    c = np.array([0.5, -0.5, 0.5, -0.5, 0.0, 0.0])
    out = summary(gram(c[:, None] * psi), c, [0, 0, 1, 1, 2, 2], right=[1, 0, 1, 0, 1, 1])
    assert out["gram/live_groups"] == 2
    assert out["gram/group/effective_rank"] == pytest.approx(1.5)
    assert out["gram/group/orthogonal_null"] == 2
    assert out["gram/orthogonal_null"] == out["gram/w_null"] == 4
    assert out["gram/group/norm_null"] == pytest.approx(2)
    # Batch: eigenvalues ¼, ¼, ½: (½ + ½ + 0.7071)² / 1.
    assert out["gram/effective_rank"] == pytest.approx((1 + math.sqrt(0.5)) ** 2)
    assert out["gram/effective_rank_truncated_2"] == pytest.approx((0.5 + math.sqrt(0.5)) ** 2 / 0.75)
    # Group 0 sums to (½, −½): ½ over ½. Group 1 sums to 0. Batch: ½ / 1.
    assert out["gram/group/cancellation"] == pytest.approx(0.5)
    assert out["gram/cancellation"] == pytest.approx(0.5)
    # One pair in six of the four live rows conflicts; group 1's pair does, group 0's does not.
    assert (out["gram/conflict"], out["gram/group/conflict"]) == (pytest.approx(1 / 6), 0.5)
    # Group 1 centred is 0 and has no rank; group 0 centred has rank 1.
    assert out["gram/group/centred_effective_rank"] == pytest.approx(1)
    # The live rows cancel: no signal, no noise scale, in rollouts or in groups.
    assert "gram/noise_scale" not in out
    assert "gram/noise_scale_groups" not in out


@given(st.integers(2, 10), SEEDS)
def test_the_summary_repeats_the_functions_it_is_made_of(n: int, seed: int) -> None:
    k = gram(rows(n, 20, seed) + 0.7)
    out, s = summary(k), spectrum(k)
    assert out["gram/effective_rank"] == s.effective_rank
    assert out["gram/entropy_rank"] == s.entropy_rank
    assert out["gram/participation_ratio"] == s.participation_ratio
    assert out["gram/stable_rank"] == s.stable_rank
    assert (out["gram/energy_rank_90"], out["gram/energy_rank_99"]) == (s.energy_rank(0.9), s.energy_rank(0.99))
    assert out["gram/top1"] == s.top1
    assert (out["gram/cancellation"], out["gram/conflict"]) == (cancellation(k), conflict(k))
    assert out.get("gram/noise_scale") == noise_scale(k)
    assert not any("null" in name and name != "gram/norm_null" for name in out)
    assert all(isinstance(value, float) for value in out.values())


def test_the_noise_is_counted_in_rollouts_and_in_groups_but_not_inside_a_group() -> None:
    # Eight rows around one mean: all products are positive, so the scale exists everywhere it is asked for.
    k, group = gram(rows(8, 20, 0) + 3.0), np.repeat([0, 1], 4)
    out = summary(k, group=group)
    assert out["gram/noise_scale"] == noise_scale(k)
    assert out["gram/noise_scale_groups"] == noise_scale(pooled(k, group))
    assert "gram/group/noise_scale" not in out
    assert out["gram/group/cancellation"] == pytest.approx(np.mean([cancellation(b) for _, b in by_group(k, group)]))


def test_what_does_not_exist_is_absent_from_the_summary() -> None:
    assert summary(np.zeros((3, 3))) == {}
    assert summary(np.zeros((3, 3)), group=[0, 0, 1]) == {"gram/live_groups": 0.0}
    one = summary([[2.0]], right=[True])
    assert one["gram/effective_rank"] == 1
    for name in ("conflict", "noise_scale", "effective_rank_truncated_2", "orthogonal_null"):
        assert f"gram/{name}" not in one
    # A zero credit hides a score, so this group has no centred rank; graded rewards have no orthogonal null.
    c = np.array([1.0, 0.0, -1.0])
    assert "gram/group/centred_effective_rank" not in summary(weighted(gram(rows(3, 9, 0)), c), c, [0, 0, 0])


def test_the_precision_of_the_gram_reaches_every_reading_of_the_summary() -> None:
    k = np.array([[1.0, -1e-5], [-1e-5, 1e-5]])
    assert (summary(k)["gram/numerical_rank"], summary(k)["gram/conflict"]) == (2, 1)
    coarse = summary(k, eps=5e-3)
    assert (coarse["gram/numerical_rank"], coarse["gram/conflict"]) == (1, 0)


def test_centred_ranks_survive_scores_that_are_almost_the_same() -> None:
    # What is left after the mean is a 1e-5 of the score: 1e-10 of the Gram, with rounding of 1e-16 beside it.
    psi = np.ones((6, 40)) + 1e-5 * rows(6, 40, 0)
    c = binary_advantage(2, 6)
    out = summary(weighted(gram(psi), c), c)
    deviations = c[:, None] * (psi - psi.mean(axis=0))
    assert out["gram/centred_effective_rank"] == pytest.approx(spectrum(gram(deviations)).effective_rank, rel=0.02)
    same = np.ones((6, 40))
    assert "gram/centred_effective_rank" not in summary(weighted(gram(same), c), c)


def test_tensors_are_accepted() -> None:
    g = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    k, c = g @ g.T, torch.tensor([0.5, -0.5, 0.5, -0.5])
    group = torch.tensor([3, 3, 1, 1])
    assert summary(k, c, group, right=c > 0) == summary(k.numpy(), c.numpy(), group.numpy(), right=[1, 0, 1, 0])


@pytest.mark.parametrize(("call", "message"), [
    (lambda: cancellation([[1.0, 2.0]]), r"square Gram matrix \(N, N\), got shape \(1, 2\)"),
    (lambda: conflict([[1.0, float("inf")], [0.0, 1.0]]), r"entry \(0, 1\) is inf"),
    (lambda: weighted(np.eye(3), [1.0, 2.0]), r"w must be \(N,\) = \(3,\), one value per row.*got shape \(2,\)"),
    (lambda: live([1.0, float("nan")]), "w must be finite: row 1 is nan"),
    (lambda: list(by_group(np.eye(2), [0.0, 1.0])), r"group must be \(N,\) = \(2,\) integers.*float64"),
    (lambda: summary(np.eye(2), right=[0.5, 1.0]), "binary rewards.*values 0.5, 1.0.*leave it out"),
    (lambda: concentration([1.0, -2.0]), "item 1 is -2.0"),
    (lambda: optimal_baseline([1.0, -2.0], [0.0, 1.0]), "row 1 has -2.0"),
    (lambda: permutation_null(np.eye(2), [1.0, 1.0], draws=0), "draws must be a whole number of at least 1, got 0"),
])
def test_what_cannot_be_read_is_refused_in_words(call: Any, message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        call()


def test_the_agreement_of_groups_by_hand() -> None:
    # Groups (1, 0) + (1, 0) = (2, 0), (0, 1), and one without a gradient: ‖Σ‖² = 5, squares 4 and 1, P = 2.
    k, group = gram(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])), [0, 0, 1, 2]
    assert group_squares(k, group) == {0: 4.0, 1: 1.0}
    assert summary(k, group=group)["gram/between"] == 0.0
    # (2, 0) and (1, 1): ‖Σ‖² = 10, squares 4 and 2, so (10 − 6)/6.
    assert summary(gram(np.array([[2.0, 0.0], [1.0, 1.0]])), group=[0, 1])["gram/between"] == pytest.approx(4 / 6)
    assert "gram/between" not in summary(k, group=[0, 0, 0, 1])  # one live group
    assert "gram/between" not in summary(k)


@given(st.integers(2, 6), st.integers(0, 99))
def test_the_agreement_of_groups_is_the_mean_product_of_pairs_over_the_mean_square(count: int, seed: int) -> None:
    sums = np.random.default_rng(seed).normal(size=(count, 3))
    pairs = [sums[a] @ sums[b] for a, b in itertools.permutations(range(count), 2)]
    found = between(float((sums.sum(0) ** 2).sum()), (sums**2).sum(1))
    assert found == pytest.approx(float(np.mean(pairs) / np.mean((sums**2).sum(1))), abs=1e-9)
