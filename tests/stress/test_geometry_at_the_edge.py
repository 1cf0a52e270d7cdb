"""Grams and spectra where gradients vanish, explode or coincide: right beside float64 and closed forms, or refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from creditscope import CreditscopeError, Microscope, spectrum
from creditscope.microscope import geometry
from creditscope.microscope.gram import EmbeddingRows, across, dense_gram, products, squared_norms
from creditscope.microscope.matrices import layer_spectrum
from creditscope.microscope.spectrum import Spectrum
from small_models import apart, batch, build, by_loop, double, grams, objective, total

CREDIT = [1.0, -0.5, 0.25, 2.0]


def measured(model: nn.Module, ids: Tensor, credit: Tensor) -> Microscope:
    model.zero_grad(set_to_none=True)
    with torch.backends.mkldnn.flags(enabled=False), Microscope(model) as scope:
        objective(model, ids, credit).backward()
    return scope


# -- size --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("power", [-110, -100, -80, -70, -40, 40, 70, 100, 110])
@pytest.mark.parametrize(("family", "tie"), [("llama", False), ("gpt2", True), ("mixtral", False)])
def test_gradients_of_any_size_have_the_gram_of_ordinary_ones(family: str, tie: bool, power: int) -> None:
    """Twin: 2^k times the loss is 4^k times the Gram, down to gradients of 1e-33 and up to 1e33, whose products float32
    cannot hold; a tied head has products between two such factors.
    """
    model = build(family, torch.float32, tie_word_embeddings=tie)
    ids, credit = batch()
    truth = total(grams(by_loop(double(model), ids, credit)))
    scope = measured(model, ids, credit * 2.0**power)
    assert apart(scope.gram * 4.0**-power, truth) < 2e-6
    assert spectrum(scope.gram, scope.eps).effective_rank == pytest.approx(spectrum(truth).effective_rank, rel=1e-6)


@pytest.mark.parametrize("power", [-100, -60, 0, 60, 100])
def test_bfloat16_gradients_of_any_size_have_the_gram_of_their_float64_loop(power: int) -> None:
    model = build("llama", torch.bfloat16)
    ids, credit = batch()
    truth = total(grams(by_loop(double(model), ids, credit)))
    scope = measured(model, ids, credit * 2.0**power)
    assert apart(scope.gram * 4.0**-power, truth) < 1e-2


def test_float16_that_loses_its_gradient_is_told_to_scale_its_loss_and_then_right() -> None:
    """Below 6e-5 float16 has ever fewer digits: 2⁻²⁰ times the loss leaves two or three."""
    model = build("llama", torch.float16)
    ids, credit = batch()
    truth = total(grams(by_loop(double(model), ids, credit)))
    with pytest.raises(CreditscopeError, match=r"too small for products of float16: multiply the loss by 2\*\*k"):
        measured(model, ids, credit * 2.0**-20)
    assert apart(measured(model, ids, credit).gram, truth) < 2e-3


def test_an_infinite_gradient_is_called_so_and_a_nan_too() -> None:
    model = build("llama", torch.float32)
    ids, credit = batch()
    for bad in (torch.inf, torch.nan):
        spoilt = credit.clone()
        spoilt[1, 2] = bad
        with pytest.raises(CreditscopeError, match="is not finite, so its rows have no geometry"):
            measured(model, ids, spoilt)
    assert torch.isfinite(measured(model, ids, credit).gram).all()  # the microscope is as before


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_products_and_norms_equal_their_float64_twins_at_any_size(size: float) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 5000, generator=draw) * size
    other = torch.randn(6, 5000, generator=draw) * 1e-25
    wide = rows.double() @ rows.double().T
    for found in (products(rows), dense_gram(rows)):
        assert apart(found.double(), wide) < 1e-6
    assert apart(across(rows, other).double(), rows.double() @ other.double().T) < 1e-5
    assert float(squared_norms([rows])[0]) == pytest.approx(float(rows.double().square().sum()), rel=1e-6)
    ids = torch.randint(0, 9, (6, 20), generator=draw)
    delta = torch.randn(6, 20, 8, generator=draw) * size
    explicit = torch.zeros(6, 9, 8, dtype=torch.float64)
    for i in range(6):
        explicit[i].index_add_(0, ids[i], delta[i].double())
    assert apart(EmbeddingRows(ids, delta).gram(), explicit.flatten(1) @ explicit.flatten(1).T) < 1e-6


def test_rows_of_very_different_size_meet_in_one_gram() -> None:
    """By hand: rows of 1e-15 and 1e15 have squares of 1e-30 and 1e30 times their length."""
    rows = torch.stack([torch.full((64,), 1e-15), torch.full((64,), 1e15)])
    assert products(rows).double()[1, 1].item() == pytest.approx(64e30, rel=1e-6)
    assert products(rows).double()[0, 1].item() == pytest.approx(64.0, rel=1e-6)


# -- coincidence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_identical_rollouts_have_the_gram_a_a_transposed_times_the_norm_and_rank_one(family: str) -> None:
    """By hand: rows a_i ψ with one ψ, so K = a aᵀ‖ψ‖² and one singular value: every rank is 1."""
    model = build(family)
    ids, _ = batch(1)
    a = torch.tensor(CREDIT, dtype=torch.float64)
    same, each = ids.expand(len(a), -1), a[:, None].expand(-1, ids.shape[1] - 1)
    [[norm]] = total(grams(by_loop(model, ids, torch.ones(1, ids.shape[1] - 1).double()))).tolist()
    scope = measured(model, same, each)
    assert apart(scope.gram, torch.outer(a, a) * norm) < 1e-7  # norms inside compute in float32
    found = geometry.summary(scope.gram.numpy(), CREDIT)
    for name in ("effective_rank", "entropy_rank", "participation_ratio", "stable_rank", "top1", "numerical_rank"):
        assert found[f"gram/{name}"] == pytest.approx(1.0, abs=2e-3), name
    assert "gram/centred_effective_rank" not in found  # ψ_i − ψ̄ is 0: there is nothing to have a rank


def test_a_gram_of_exactly_one_direction_has_effective_rank_one_exactly() -> None:
    found = spectrum(np.outer(CREDIT, CREDIT))
    assert found.effective_rank == pytest.approx(1.0, abs=1e-7)
    assert found.numerical_rank == 1
    left = sum(CREDIT) ** 2 / sum(c * c for c in CREDIT)
    assert geometry.cancellation(np.outer(CREDIT, CREDIT)) == pytest.approx(left)


def test_identical_rollouts_whose_credits_cancel_leave_no_gradient_and_a_whole_gram() -> None:
    """a = (1, −1): ‖∇‖² = 0 while each row has ‖ψ‖². The check holds, the cancellation is 0."""
    model = build("llama")
    ids, _ = batch(1)
    credit = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, ids.shape[1] - 1)
    scope = measured(model, ids.expand(2, -1), credit)
    k = scope.gram
    assert k[0, 0] > 0
    assert geometry.cancellation(k.numpy()) == pytest.approx(0.0, abs=1e-12)
    assert spectrum(k).effective_rank == pytest.approx(1.0, abs=1e-4)


def test_sixty_four_rollouts_are_read_as_one_by_one() -> None:
    model = build("llama")
    ids, credit = batch(64, 7)
    assert apart(measured(model, ids, credit).gram, total(grams(by_loop(model, ids, credit)))) < 1e-7


# -- certainty ---------------------------------------------------------------------------------------------------------


def test_a_certain_policy_has_a_gram_of_zero_and_no_reading_is_made_up() -> None:
    """Logits 10⁴ apart: π of the chosen token is 1 and of all others 0 in float64, so every score is 0 exactly."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)).double()
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor([0.0, 0.0, 1e4, 0.0, 0.0]))
    ids = torch.full((3, 4), 2)
    with Microscope(model) as scope:
        logp = model(ids).log_softmax(-1).gather(2, ids[:, :, None]).squeeze(2)
        logp.sum().backward()
    assert not bool(logp.detach().any())
    assert not bool(scope.gram.any())
    assert geometry.summary(scope.gram.numpy(), group=[0, 0, 0]) == {"gram/live_groups": 0.0}
    with pytest.raises(CreditscopeError, match="no rollout has a gradient"):
        spectrum(scope.gram)


@pytest.mark.parametrize("gap", [20.0, 40.0, 60.0, 80.0])
def test_a_nearly_certain_policy_in_float32_has_the_gram_of_its_float64_twin(gap: float) -> None:
    """1 − π falls to 4·e⁻⁸⁰ ≈ 7e-35; from e⁻¹⁷ on float32 rounds π to 1 and the score's own entry is 0, yet the others
    are held: at gap 60 they are 9e-27 each, and so are the rows.
    """
    draw = torch.Generator().manual_seed(0)
    weight, hidden = torch.zeros(5, 8), torch.randn(3, 4, 8, generator=draw)
    bias = torch.tensor([0.0, 0.0, gap, 0.0, 0.0])
    rows = {}
    for dtype in (torch.float32, torch.float64):
        layer = nn.Linear(8, 5).to(dtype)
        with torch.no_grad():
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        with Microscope(layer) as scope:
            layer(hidden.to(dtype)).log_softmax(-1)[:, :, 2].sum(1).sum().backward()
        rows[dtype] = scope.layers["weight"]
    # The chosen token's own entry, 1 − π = Σ of the others, is the part that float32 rounds away: 16 of 20 parts.
    wide = torch.bmm(torch.full((3, 4, 4), -math.exp(-gap)).double().transpose(1, 2), hidden.double()).flatten(1)
    expected = wide @ wide.T if gap > 17 else rows[torch.float64]
    assert apart(rows[torch.float32], expected) < 1e-5


# -- numbers from a matrix ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [-500, -300, -100, 100, 300, 500])
def test_ranks_and_nulls_do_not_depend_on_the_unit(power: int) -> None:
    """Identity: K times 2^k changes no rank, share or ratio, to the bit; σ⁴ of 2^±250 cannot be held."""
    rows = np.random.default_rng(0).normal(size=(6, 20))
    k, group = rows @ rows.T, [0, 0, 0, 1, 1, 1]
    plain, scaled = geometry.summary(k, group=group), geometry.summary(k * 2.0**power, group=group)
    assert plain.keys() == scaled.keys()
    assert scaled == pytest.approx(plain, rel=1e-9)
    assert all(math.isfinite(value) for value in scaled.values())


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_a_layers_spectrum_does_not_depend_on_the_unit(size: float) -> None:
    grad = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    plain, scaled = layer_spectrum(grad), layer_spectrum(grad * size)
    assert scaled.effective_rank == pytest.approx(plain.effective_rank, rel=1e-5)
    assert scaled.stable_rank == pytest.approx(plain.stable_rank, rel=1e-5)


def test_a_spectrum_of_one_value_has_every_rank_one_at_any_size() -> None:
    for size in (2.0**-530, 2.0**-265, 1.0, 2.0**265, 2.0**530):
        found = Spectrum(np.array([size, 0.0]), 0.0)
        assert geometry.ranks(found) == dict.fromkeys(geometry.ranks(found), 1.0)
