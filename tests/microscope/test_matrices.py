"""One layer's gradient matrix: twins against a full SVD, and bounds that hold for what was not computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from creditscope import CreditscopeError, spectrum
from creditscope.microscope import matrices
from creditscope.microscope.matrices import LayerSpectrum, layer_spectrum, model_spectra
from creditscope.microscope.spectrum import Spectrum
from each import each


def with_values(values: Tensor, d_out: int, d_in: int, seed: int = 0) -> Tensor:
    """A matrix with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(d, len(values), dtype=torch.float64, generator=generator)).Q
            for d in (d_out, d_in))
    return (u * values) @ v.T


def truth(grad: Tensor) -> Spectrum:
    return Spectrum(torch.linalg.svdvals(grad.double()).numpy(), 0.0)


SHAPES = {
    "flat": torch.ones(40, dtype=torch.float64),
    "geometric": 0.8 ** torch.arange(40, dtype=torch.float64),
    "power": 1 / torch.arange(1, 41, dtype=torch.float64),
    "one": torch.tensor([1.0] + [1e-3] * 39, dtype=torch.float64),
    "low rank": torch.tensor([3.0, 2.0, 1.0] + [0.0] * 37, dtype=torch.float64),
}


def test_every_reading_by_hand() -> None:
    # σ = (3, 1): (3 + 1)²/10 and 10/9.
    s = layer_spectrum(torch.diag(torch.tensor([3.0, 1.0])))
    assert s.full
    assert s.energy == 10
    assert s.effective_rank == (pytest.approx(1.6), pytest.approx(1.6))
    assert s.stable_rank == (pytest.approx(10 / 9), pytest.approx(10 / 9))


def test_the_bounds_by_hand() -> None:
    # s = (2, 1) of three values with energy 6, so 1 is missed. All on the first: σ² = 5, 1. Spread over one: 4, 1, 1.
    s = LayerSpectrum((3, 7), np.array([2.0, 1.0]), 6.0)
    assert s.effective_rank == (pytest.approx((5**0.5 + 1) ** 2 / 6), pytest.approx(16 / 6))
    assert s.stable_rank == (pytest.approx(6 / 5), pytest.approx(6 / 4))


@each("shape", [(40, 90), (90, 40), (40, 40)])
@each("name", SHAPES)
def test_a_small_layer_has_its_whole_svd(name: str, shape: tuple[int, int]) -> None:
    grad = with_values(SHAPES[name], *shape)
    s = layer_spectrum(grad)
    assert s.full
    assert s.shape == shape
    assert np.allclose(s.values, torch.linalg.svdvals(grad).numpy())
    assert s.effective_rank == (pytest.approx(truth(grad).effective_rank), pytest.approx(truth(grad).effective_rank))
    assert s.energy == pytest.approx(float((grad**2).sum()))


@each("shape", [(40, 300), (300, 40)])
@each("name", SHAPES)
@each("k", [1, 5, 20])
def test_a_large_layer_has_values_from_below_and_bounds_that_hold(name: str, shape: tuple[int, int], k: int) -> None:
    grad = with_values(SHAPES[name], *shape)
    s, full = layer_spectrum(grad, k=k, exact_to=0), truth(grad)
    assert not s.full
    assert len(s.values) == k
    assert (s.values <= full.values[:k] + 1e-9).all()
    assert np.allclose(s.values, full.values[:k], rtol=0.02)
    for reading in ("effective_rank", "stable_rank"):
        low, high = getattr(s, reading)
        assert low - 1e-9 <= getattr(full, reading) <= high + 1e-9, reading


@given(st.integers(2, 30), st.integers(2, 30), st.integers(1, 29), st.integers(0, 99))
def test_bounds_hold_even_for_a_sketch_that_did_not_converge(d_out: int, d_in: int, k: int, seed: int) -> None:
    # Values of a random projection, no power passes at all: far too small, and the bounds must still hold. They hold on
    # the smaller side alone: what a projection of the larger one misses may have more than min(shape) − k values.
    grad = torch.randn(d_out, d_in, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    grad *= 0.7 ** torch.arange(d_in, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrices, "PASSES", 0)
        patch.setattr(matrices, "OVERSAMPLE", 0)
        s = layer_spectrum(grad, k=min(k, d_out - 1, d_in - 1), seed=seed + 1, exact_to=0)
    assert not s.full
    full = truth(grad)
    for reading in ("effective_rank", "stable_rank"):
        low, high = getattr(s, reading)
        assert low - 1e-9 <= getattr(full, reading) <= high + 1e-9, reading


def test_bounds_are_tight_when_the_energy_is_held_and_wide_when_it_is_not() -> None:
    held = layer_spectrum(with_values(SHAPES["low rank"], 40, 300), k=5, exact_to=0)
    assert held.effective_rank.high - held.effective_rank.low < 1e-3
    lost = layer_spectrum(with_values(SHAPES["flat"], 40, 300), k=5, exact_to=0)
    assert lost.effective_rank.high == pytest.approx(40)
    # All but four of forty on one value: (6 + 4)²/40.
    assert lost.effective_rank.low == pytest.approx(100 / 40, rel=0.01)


def test_a_truncated_svd_without_bounds_would_print_its_own_k() -> None:
    # P1.5, doubt 3, for a layer: the leading two values of a flat spectrum have r_eff 2, the layer 40.
    s = layer_spectrum(with_values(SHAPES["flat"], 40, 300), k=2, exact_to=0)
    assert Spectrum(s.values, 0.0).effective_rank == pytest.approx(2, rel=0.01)
    assert s.effective_rank.high == pytest.approx(40)


def test_the_same_seed_gives_the_same_values_and_the_global_state_is_left_alone() -> None:
    grad = with_values(SHAPES["flat"] + 0.5 * torch.linspace(0, 1, 40, dtype=torch.float64), 40, 300)
    before = torch.get_rng_state()
    first, again, other = (layer_spectrum(grad, k=3, seed=seed, exact_to=0).values for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert (first == again).all()
    assert (first != other).any()


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = with_values(SHAPES["power"], 300, 40)
    whole = layer_spectrum(grad, k=5, exact_to=0)
    monkeypatch.setattr(matrices, "CHUNK", 7 * 40)
    pieces = layer_spectrum(grad, k=5, exact_to=0)
    assert np.allclose(whole.values, pieces.values)
    assert whole.energy == pytest.approx(pieces.energy)


def test_half_precision_is_read_in_double() -> None:
    grad = with_values(SHAPES["power"], 60, 300).bfloat16()
    assert np.allclose(layer_spectrum(grad, k=4, exact_to=0).values, truth(grad).values[:4], rtol=1e-3)


def test_a_layers_gradient_is_another_object_than_the_rollout_matrix() -> None:
    # Eight rollouts of one token each. Identical rollouts: rollout rank 1; layer rank 1 too, for a sum of equal δ aᵀ.
    # Different rollouts: rollout rank 8, layer rank 8. One rollout of eight tokens: rollout rank 1, layer rank 8.
    generator = torch.Generator().manual_seed(0)
    delta, a = (torch.randn(8, d, dtype=torch.float64, generator=generator) for d in (12, 20))
    rows = torch.einsum("to,ti->toi", delta, a)
    one_rollout = rows.sum(dim=0)
    assert spectrum((one_rollout**2).sum().reshape(1, 1)).numerical_rank == 1
    values = layer_spectrum(one_rollout).values
    assert int((values > 1e-9 * values[0]).sum()) == 8
    eight = rows.flatten(1)
    assert spectrum(eight @ eight.T).numerical_rank == 8
    assert layer_spectrum(rows[0]).effective_rank.high == pytest.approx(1)


# A model.

def small_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    model(torch.randn(7, 6, dtype=torch.float64)).square().sum().backward()
    return model


def test_a_model_is_read_matrix_by_matrix() -> None:
    model = small_model()
    found = model_spectra(model.named_parameters())
    assert list(found) == ["0.weight", "2.weight"]  # biases are vectors
    for name, s in found.items():
        grad = model.get_parameter(name).grad
        assert grad is not None
        assert np.allclose(s.values, torch.linalg.svdvals(grad).numpy())


def test_a_layer_with_no_gradient_is_absent() -> None:
    model = small_model()
    model.get_parameter("0.weight").grad = None
    assert list(model_spectra(model.named_parameters())) == ["2.weight"]
    model.zero_grad(set_to_none=False)
    assert model_spectra(model.named_parameters()) == {}


@pytest.mark.parametrize(("call", "message"), [
    (lambda: layer_spectrum(torch.ones(3)), r"one gradient matrix \(d_out, d_in\), got shape \(3,\)"),
    (lambda: layer_spectrum(torch.zeros(3, 4)), r"gradient \(3, 4\) is 0"),
    (lambda: layer_spectrum(torch.full((2, 2), float("nan"))), "must be finite: 4 of 4"),
    (lambda: layer_spectrum(torch.ones(2, 2), k=0), "k must be a whole number of at least 1, got 0"),
])
def test_what_has_no_spectrum_is_refused_in_words(call: Any, message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        call()
