"""Ranks by hand, by identity, and against a full SVD."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from creditscope import CreditscopeError, spectrum
from creditscope.microscope.geometry import centred_rank, conflict
from creditscope.microscope.spectrum import orthogonal_null
from each import each


def test_every_rank_by_hand() -> None:
    # Rows 3e₁ and 1e₂: σ = (3, 1), Σσ = 4, Σσ² = 10, Σσ⁴ = 82.
    s = spectrum([[9.0, 0.0], [0.0, 1.0]])
    assert s.values.tolist() == [3.0, 1.0]
    assert s.effective_rank == pytest.approx(16 / 10)
    assert s.participation_ratio == pytest.approx(100 / 82)
    assert s.stable_rank == pytest.approx(10 / 9)
    assert s.top1 == pytest.approx(0.9)
    assert s.entropy_rank == pytest.approx(math.exp(-(.75 * math.log(.75) + .25 * math.log(.25))))
    assert (s.energy_rank(0.9), s.energy_rank(0.91), s.energy_rank(1.0)) == (1, 2, 2)


@given(st.integers(1, 9), st.integers(1, 30), st.integers(0, 99))
def test_the_values_are_those_of_a_full_svd(rows: int, columns: int, seed: int) -> None:
    g = np.random.default_rng(seed).normal(size=(rows, columns))
    expected = np.zeros(rows)
    expected[: min(rows, columns)] = np.linalg.svd(g, compute_uv=False)
    s = spectrum(g @ g.T)
    assert np.allclose(s.values, expected, atol=1e-6 * expected[0])
    assert s.numerical_rank == min(rows, columns)


@given(st.integers(2, 12), st.integers(0, 99))
def test_all_ranks_lie_between_one_and_n_and_their_order_is_fixed(n: int, seed: int) -> None:
    g = np.random.default_rng(seed).normal(size=(n, 20))
    s = spectrum(g @ g.T)
    assert 1 <= s.stable_rank <= s.participation_ratio + 1e-9
    assert s.participation_ratio <= s.effective_rank + 1e-9
    assert s.effective_rank <= s.entropy_rank + 1e-9
    assert s.entropy_rank <= n + 1e-9


def test_identical_rollouts_have_every_rank_one_exactly_and_a_numerical_rank_of_one() -> None:
    g = np.tile(np.random.default_rng(0).normal(size=50), (8, 1))
    s = spectrum(g @ g.T)
    assert s.effective_rank == pytest.approx(1, abs=1e-6)
    assert s.numerical_rank == 1
    assert s.energy_rank(0.999) == 1


@given(st.integers(2, 40), st.data())
def test_orthogonal_scores_under_binary_reward_sit_on_the_null(rollouts: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(1, rollouts - 1))
    a = np.where(np.arange(rollouts) < right, 1 - right / rollouts, -right / rollouts)
    assert spectrum(np.diag(a * a)).effective_rank == pytest.approx(orthogonal_null(right, rollouts))


@given(st.floats(0.5, 0.999))
def test_truncation_to_two_prints_the_same_formula_whatever_the_data(f: float) -> None:
    # With σ₁² : σ₂² = f : 1−f the truncated metric is 1 + 2√(f(1−f)); the other six values leave no trace.
    tail = [0.3 * (1 - f)] * 6
    s = spectrum(np.diag([f, 1 - f, *tail]))
    assert s.truncated(2).effective_rank == pytest.approx(1 + 2 * math.sqrt(f * (1 - f)))
    assert s.effective_rank > s.truncated(2).effective_rank


def test_a_torch_tensor_and_any_scale_are_accepted() -> None:
    g = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    small = spectrum(1e-30 * g @ g.T)
    assert small.effective_rank == pytest.approx(spectrum(g @ g.T).effective_rank)


def test_a_coarser_gram_has_a_higher_floor() -> None:
    gram = np.diag([1.0, 1e-5])
    assert spectrum(gram).numerical_rank == 2
    assert spectrum(gram, eps=5e-4).numerical_rank == 1


@each(("gram", "message"), [
    ([[1.0, 2.0]], r"square Gram matrix \(N, N\), got shape \(1, 2\)"),
    ([[0.0, 0.0], [0.0, 0.0]], "is 0: no rollout has a gradient"),
    ([[1.0, float("nan")], [0.0, 1.0]], r"entry \(0, 1\) is nan"),
    ([[1.0, 0.5], [0.0, 1.0]], "differs from its transpose"),
    ([[1.0, 2.0], [2.0, 1.0]], "no negative eigenvalue; this one has -1"),
    (torch.eye(2, dtype=torch.complex64), "must hold real numbers, got complex64 from Tensor"),
    (torch.eye(2, dtype=torch.bfloat16), r"got Tensor: .*BFloat16; convert it with \.detach\(\)\.cpu\(\)\.double"),
    ([["a", "b"]], "must hold real numbers, got <U1 from list"),
    ([[1.0], [1.0, 2.0]], "array of real numbers or a CPU tensor"),
    (None, "must hold real numbers, got object from NoneType"),
])
def test_what_is_no_gram_matrix_is_refused(gram: object, message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        spectrum(gram)


@pytest.mark.parametrize("eps", [float("nan"), float("inf"), -1.0, "x", None, 1j, True])
def test_a_precision_that_is_no_finite_number_of_at_least_0_is_refused(eps: object) -> None:
    for read in (lambda: spectrum(np.eye(3), eps), lambda: conflict(np.eye(3), eps),
                 lambda: centred_rank(np.eye(3), [1.0, 2.0, 3.0], eps)):
        with pytest.raises(CreditscopeError, match="eps is the relative precision of the Gram's entries, a finite"):
            read()


def test_a_gram_that_carries_a_gradient_is_read_as_its_values() -> None:
    assert spectrum(torch.eye(3, requires_grad=True)).effective_rank == pytest.approx(3.0)


def test_shares_and_cuts_outside_their_range_are_refused() -> None:
    s = spectrum(np.eye(3))
    for call in (lambda: s.energy_rank(0.0), lambda: s.truncated(4), lambda: s.truncated(1.5),
                 lambda: s.energy_rank("x"), lambda: orthogonal_null(0, 8)):
        with pytest.raises(CreditscopeError):
            call()
