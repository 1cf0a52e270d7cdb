"""Sketches against the gradients they stand for: by identity, by enumeration of all signs, by a z-test over seeds."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from creditscope import CreditscopeError, spectrum
from creditscope.microscope.sketch import Sketch, Sketcher, signs

N, T, OUT, IN = 3, 5, 6, 4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def outer(delta: Tensor, a: Tensor) -> Tensor:
    return torch.einsum("nto,nti->noi", delta, a)


def by_hand(sketcher: Sketcher, name: str, weight: Tensor) -> Tensor:
    """P_out dW P_inᵀ / k with everything written out."""
    left = signs(sketcher.seed, name, "out", weight.shape[1], sketcher.k).double()
    right = signs(sketcher.seed, name, "in", weight.shape[2], sketcher.k).double()
    return torch.einsum("or,noi,is->nrs", left, weight, right).flatten(1) / sketcher.k


def z_scores(draw: Callable[[int], Tensor], truth: Tensor, seeds: int) -> Tensor:
    """(mean − truth)/standard error of the mean, over seeds."""
    draws = torch.stack([draw(seed) for seed in range(seeds)])
    return (draws.mean(0) - truth) / (draws.std(0) / seeds**0.5)


# Identities.

def test_a_matrix_is_its_projected_gradient_and_equals_dense() -> None:
    sketcher, delta, a = Sketcher(k=4), random(N, T, OUT), random(N, T, IN, seed=1)
    got = sketcher.matrix("w", delta, a)
    assert got.shape == (N, 16)
    assert torch.allclose(got, by_hand(sketcher, "w", outer(delta, a)), atol=1e-12)
    assert torch.allclose(got, sketcher.dense("w", outer(delta, a)), atol=1e-12)


@pytest.mark.parametrize("shape", [(9, 2), (2, 9)])
def test_dense_is_the_same_whichever_side_is_longer(shape: tuple[int, int]) -> None:
    sketcher, g = Sketcher(k=3, seed=7), random(N, *shape)
    assert torch.allclose(sketcher.dense("w", g), by_hand(sketcher, "w", g), atol=1e-12)


def test_a_tied_head_and_its_embedding_add_up_to_the_sketch_of_the_summed_gradient() -> None:
    vocabulary, width = 11, 4
    ids = torch.tensor([[0, 3, 3, 10, 1], [5, 5, 5, 5, 5], [2, 9, 0, 7, 3]])
    logits, hidden, embedded = random(N, T, vocabulary), random(N, T, width, seed=1), random(N, T, width, seed=2)
    one_hot = torch.nn.functional.one_hot(ids, vocabulary).double()
    sketcher = Sketcher(k=4)
    tied = sketcher.matrix("emb", logits, hidden) + sketcher.rows("emb", ids, embedded, vocabulary)
    assert torch.allclose(tied, sketcher.dense("emb", outer(logits, hidden) + outer(one_hot, embedded)), atol=1e-12)


def test_a_vector_is_the_diagonal_matrix_it_multiplies_by(monkeypatch: pytest.MonkeyPatch) -> None:
    sketcher, g = Sketcher(k=4), random(N, 10)
    whole = sketcher.vector("norm", g)
    assert torch.allclose(whole, by_hand(sketcher, "norm", torch.diag_embed(g)), atol=1e-12)
    assert torch.equal(sketcher.dense("norm", g), whole)
    # Ten entries in chunks of four: the last chunk is short.
    monkeypatch.setattr("creditscope.microscope.sketch.VECTOR_CHUNK", 4)
    assert torch.allclose(sketcher.vector("norm", g), whole, atol=1e-12)


def test_experts_are_one_tall_matrix_and_a_number_is_a_vector_of_one() -> None:
    sketcher, g = Sketcher(k=4), random(N, 2, 5, 3)
    assert torch.equal(sketcher.dense("experts", g), sketcher.dense("experts", g.reshape(N, 10, 3)))
    # One entry with signs ±1: S = ±g/k in all 16 cells, so ⟨S_i, S_j⟩ = 16 g_i g_j/4² = g_i g_j, without error.
    s = sketcher.dense("scale", random(N))
    assert torch.allclose(s @ s.T, torch.outer(random(N), random(N)))


def test_one_entry_is_kept_exactly_because_signs_have_no_variance() -> None:
    # dW = 3 e₂e₁ᵀ and 5 e₂e₁ᵀ: S = ±(3 or 5)/k everywhere, K = [[9, 15], [15, 25]].
    g = torch.zeros(2, OUT, IN, dtype=torch.float64)
    g[0, 2, 1], g[1, 2, 1] = 3, 5
    gram = Sketch(Sketcher(k=4).dense("w", g), 4, 0, ("w",)).gram
    assert torch.allclose(gram, torch.tensor([[9.0, 15.0], [15.0, 25.0]], dtype=torch.float64))


@given(st.integers(0, 99), st.floats(-3, 3))
def test_a_sketch_is_linear_in_the_gradient(seed: int, c: float) -> None:
    sketcher, x, y = Sketcher(k=4, seed=seed), random(N, OUT, IN, seed=seed), random(N, OUT, IN, seed=seed + 1)
    apart = sketcher.dense("w", x) + c * sketcher.dense("w", y)
    assert torch.allclose(sketcher.dense("w", x + c * y), apart, atol=1e-11)


def test_padding_with_zero_delta_changes_nothing() -> None:
    sketcher, delta, a = Sketcher(k=4), random(N, T, OUT), random(N, T, IN, seed=1)
    delta[:, 3:] = 0
    assert torch.allclose(sketcher.matrix("w", delta, a), sketcher.matrix("w", delta[:, :3], a[:, :3]), atol=1e-12)


def test_a_whole_gradient_is_the_sum_over_names_and_over_rollouts() -> None:
    sketcher = Sketcher(k=4)
    weight, scale = random(N, OUT, IN), random(N, OUT, seed=1)
    rows = sketcher.dense("w", weight) + sketcher.vector("s", scale)
    total = sketcher.gradient([("w", weight.sum(0)), ("s", scale.sum(0))])
    assert total.shape == (16,)
    assert torch.allclose(total, rows.sum(0), atol=1e-12)


# Seeds.

PINNED = "from creditscope.microscope.sketch import signs; print(signs(3, 'model.layers.0.q', 'in', 2, 5).tolist())"


@pytest.mark.slow
def test_signs_are_pinned_and_the_same_in_another_process_with_another_hash_seed() -> None:
    # SHAKE-256 of "creditscope sketch|3|in|model.layers.0.q" begins with the bits 10111100 11...: 1 is +, 0 is −.
    expected = [[1, -1, 1, 1, 1], [1, -1, -1, 1, 1]]
    assert signs(3, "model.layers.0.q", "in", 2, 5).tolist() == expected
    source = str(Path(__file__).parents[2] / "src")
    env = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    said = subprocess.run([sys.executable, "-c", PINNED], env=env, capture_output=True, text=True, check=True).stdout
    assert said.strip() == str(expected)


def test_a_sketch_is_pinned() -> None:
    # signs(0, 'head.weight', 'out', 3, 4) are in the docstring of signs. Column sums over the three rows: 3 rows of
    # (−−+−), (−−−+), (+++−) give (−1, −1, 1, −1). dW = all ones, so S = outer(column sums of P_out, of P_in)/4.
    right = signs(0, "head.weight", "in", 2, 4).double().sum(0)
    expected = torch.outer(torch.tensor([-1.0, -1.0, 1.0, -1.0]).double(), right) / 4
    assert torch.equal(Sketcher(k=4).dense("head.weight", torch.ones(1, 3, 2).double())[0], expected.flatten())


def test_seed_name_and_side_each_change_the_signs_and_a_longer_side_keeps_the_first() -> None:
    base = signs(0, "w", "out", 64, 8)
    for other in (signs(1, "w", "out", 64, 8), signs(0, "v", "out", 64, 8), signs(0, "w", "in", 64, 8)):
        # 512 fair signs agree in 256 ± 11: five standard deviations are 57.
        assert abs(int((base == other).sum()) - 256) < 57
    assert torch.equal(signs(0, "w", "out", 99, 8)[:64], base)
    assert set(base.unique().tolist()) == {-1, 1}


# Precision.

@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize(("dtype", "tolerance", "out"), [
    (torch.float64, 1e-14, torch.float64), (torch.float32, 1e-6, torch.float32), (torch.bfloat16, 4e-3, torch.float32),
])
def test_every_dtype_gives_the_same_sketch_within_its_rounding(dtype: torch.dtype, tolerance: float,
                                                               out: torch.dtype) -> None:
    # The inputs are bfloat16 numbers, so only the arithmetic differs: bfloat16 rounds each projected factor by 2⁻⁹.
    delta, a = (x.to(torch.bfloat16) for x in (random(N, 40, 64), random(N, 40, 32, seed=1)))
    ids = torch.arange(N * 40).reshape(N, 40) % 64
    exact = Sketcher(k=4)
    for call in (lambda s, d, x: s.matrix("w", d, x), lambda s, d, x: s.rows("e", ids, x, 64),
                 lambda s, d, x: s.vector("v", d[:, 0]), lambda s, d, x: s.dense("dense", d)):
        # oneDNN's bfloat16 dies of an illegal instruction on virtual machines that announce AMX and do not allow it.
        with torch.backends.mkldnn.flags(enabled=False):
            want, got = call(exact, delta.double(), a.double()), call(Sketcher(k=4), delta.to(dtype), a.to(dtype))
        assert got.dtype == out
        assert float((got.double() - want).norm() / want.norm()) <= tolerance


@pytest.mark.filterwarnings("ignore:TF32")
def test_a_backward_inside_autocast_does_not_round_the_sketch() -> None:
    delta, a = random(N, T, OUT).float(), random(N, T, IN, seed=1).float()
    weight = outer(delta, a)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.backends.mkldnn.flags(enabled=False):
        got, dense = Sketcher(k=4).matrix("w", delta, a), Sketcher(k=4).dense("w", weight)
    assert got.dtype == dense.dtype == torch.float32
    # Autocast rounds each projected factor by 2⁻⁹, and nothing after that.
    want = Sketcher(k=4).matrix("w", delta.double(), a.double())
    assert float((got - want).norm() / want.norm()) < 4e-3
    assert float((dense - want).norm() / want.norm()) < 1e-6


# Expectation and variance.

def all_sketches(a: Tensor, b: Tensor, k: int) -> Tensor:
    """Sketches of A and B under every choice of signs: (choices, 2, k²)."""
    out, into = a.shape
    draws = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=k * (out + into))), dtype=torch.float64)
    left, right = draws[:, : k * out].view(-1, k, out), draws[:, k * out:].view(-1, k, into)
    return torch.einsum("cro,noi,csi->cnrs", left, torch.stack([a, b]), right).flatten(2) / k


def test_the_gram_and_its_measured_variance_are_unbiased_by_enumeration() -> None:
    # k = 2 and 2 × 3 gradients: 2^(4+6) = 1024 choices of signs, each equally likely.
    a, b = random(2, 3), random(2, 3, seed=1)
    sketches = [Sketch(s, 2, 0, ("w",)) for s in all_sketches(a, b, 2)]
    grams = torch.stack([s.gram for s in sketches])
    both = torch.stack([a, b]).flatten(1)
    assert torch.allclose(grams.mean(0), both @ both.T, atol=1e-12)
    measured = torch.stack([s.variance for s in sketches]).mean(0)
    assert torch.allclose(measured, grams.var(0, correction=0), rtol=1e-10)


def two_layers() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    delta, a = random(N, T, OUT), random(N, T, IN, seed=1)
    # The second layer is like the first, as neighbouring layers are: cross terms then have one sign.
    return delta, a, delta + 0.3 * random(N, T, OUT, seed=2), a + 0.3 * random(N, T, IN, seed=3)


@pytest.mark.slow
def test_the_gram_over_layers_is_unbiased_and_one_name_for_two_layers_biases_it() -> None:
    d1, a1, d2, a2 = two_layers()
    g1, g2 = outer(d1, a1).flatten(1), outer(d2, a2).flatten(1)
    truth, wrong = g1 @ g1.T + g2 @ g2.T, (g1 + g2) @ (g1 + g2).T

    def gram(seed: int, second: str) -> Tensor:
        sketcher = Sketcher(k=4, seed=seed)
        s = sketcher.matrix("one", d1, a1) + sketcher.matrix(second, d2, a2)
        return s @ s.T

    # Six different entries: |z| > 4.5 has probability 4e-5 if the mean is right.
    assert z_scores(lambda seed: gram(seed, "two"), truth, 1500).abs().max() < 4.5
    # With shared signs the sketch is that of g₁ + g₂, whose Gram has the cross terms too.
    assert z_scores(lambda seed: gram(seed, "one"), wrong, 1500).abs().max() < 4.5
    assert z_scores(lambda seed: gram(seed, "one"), truth, 1500).abs().max() > 20
    # And the test sees a scale that is wrong by a tenth.
    assert z_scores(lambda seed: 1.1 * gram(seed, "two"), truth, 1500).abs().max() > 4.5


@pytest.mark.slow
def test_rows_and_vectors_are_unbiased_over_seeds() -> None:
    ids, delta, g = torch.tensor([[0, 1, 1], [2, 0, 1]]), random(2, 3, 4), random(2, 5, seed=1)
    table = outer(torch.nn.functional.one_hot(ids, 3).double(), delta).flatten(1)

    def rows(seed: int) -> Tensor:
        s = Sketcher(k=3, seed=seed).rows("e", ids, delta, 3)
        return s @ s.T

    def vector(seed: int) -> Tensor:
        s = Sketcher(k=3, seed=seed).vector("v", g)
        return s @ s.T

    assert z_scores(rows, table @ table.T, 1500).abs().max() < 4.5
    assert z_scores(vector, g @ g.T, 1500).abs().max() < 4.5


@pytest.mark.slow
def test_a_vector_has_the_variance_of_a_dense_projection_to_k_squared_numbers() -> None:
    # Var = (|x|²|y|² + (x·y)² − 2Σx²y²)/k². For x = y = (1, 1, 1, 1): (16 + 16 − 8)/9 = 24/9.
    ones = torch.ones(4, dtype=torch.float64)
    grams = np.array([float((Sketcher(k=3, seed=s).vector("v", ones[None]) ** 2).sum()) for s in range(3000)])
    assert grams.var() == pytest.approx(24 / 9, rel=0.12)


# The measured error.

def model(seed: int, k: int = 8) -> tuple[Sketch, Tensor]:
    """A sketch of six rollouts over six unequal layers, an embedding and two scales, and the exact Gram."""
    n, sketcher, total, rows = 6, Sketcher(k=k, seed=seed), torch.zeros(6, 6, dtype=torch.float64), 0
    common = random(1, 4, 12, seed=99)
    parts: list[tuple[str, Tensor]] = []
    for layer in range(6):
        delta = random(n, 4, 12, seed=layer) + common
        parts.append((f"w{layer}", outer(delta, random(n, 4, 9, seed=layer + 20)) * (1 + layer / 3)))
    parts += [(f"v{i}", random(n, 12, seed=40 + i) * 3) for i in range(2)]
    for name, g in parts:
        rows = rows + sketcher.dense(name, g)
        total = total + g.flatten(1) @ g.flatten(1).T
    assert isinstance(rows, Tensor)
    return Sketch(rows, k, seed, tuple(name for name, _ in parts)), total


@pytest.mark.slow
def test_the_measured_error_is_right_on_average_and_covers() -> None:
    runs = [model(seed) for seed in range(250)]
    truth = runs[0][1]
    error2 = torch.stack([(s.gram - truth).square() for s, _ in runs])
    claimed = torch.stack([s.variance for s, _ in runs])
    # Pooled over 36 entries and 250 seeds: the claimed mean square error is the true one within a tenth.
    assert float(claimed.sum()) == pytest.approx(float(error2.sum()), rel=0.1)
    # Diagonal and off-diagonal entries apart, since their variances differ by a factor of two or more.
    on = torch.eye(6, dtype=torch.bool)
    for entries in (on, ~on):
        assert float(claimed[:, entries].sum()) == pytest.approx(float(error2[:, entries].sum()), rel=0.15)
    # Two standard errors hold the truth about as often as they should; a variance from 8 rows and columns costs some.
    inside = (error2 <= 4 * claimed.clamp(min=0)).double().mean()
    assert 0.84 < float(inside) < 0.97
    # ‖K̂ − K‖/‖K‖, root mean square over seeds, is what relative_error says in the median run.
    rms = float((error2.sum((1, 2)).mean() / truth.square().sum()).sqrt())
    assert float(np.median([s.relative_error for s, _ in runs])) == pytest.approx(rms, rel=0.15)


def test_twice_the_k_gives_an_error_smaller_by_a_factor_between_root_two_and_two() -> None:
    # Var = c₁/k + c₂/k²: doubling k divides the standard error by √2 to 2.
    errors = [float(np.mean([model(seed, k)[0].relative_error for seed in range(40)])) for k in (8, 16)]
    assert 2**0.5 * 0.95 < errors[0] / errors[1] < 2 * 1.05


def test_noise_alone_has_an_infinite_error_and_nothing_has_none() -> None:
    # 200 independent rows in 2² coordinates: K̂'s norm is all noise, as N/k² = 50 says.
    sketcher = Sketcher(k=2)
    s = sum((sketcher.vector(f"v{i}", random(200, 50, seed=i)) for i in range(20)), torch.zeros(200, 4))
    assert Sketch(s, 2, 0, ("v",)).relative_error > 1.5
    assert np.isnan(Sketch(torch.zeros(3, 4), 2, 0, ("v",)).relative_error)
    # All variance in the gram, none of it signal: rows cancel in every cell but one.
    spike = torch.zeros(1, 16)
    spike[0, 5] = 1
    assert Sketch(spike, 4, 0, ("v",)).relative_error == float("inf")


# Micro-batches and ranks.

def test_stacked_sketches_have_every_pair_and_the_gram_of_one_batch() -> None:
    whole, _ = model(0)
    parts = [Sketch(whole.rows[i:i + 2], whole.k, whole.seed, whole.names[::-1]) for i in (0, 2, 4)]
    joined = Sketch.cat(parts)
    assert torch.equal(joined.gram, whole.gram)
    assert joined.gram.dtype == torch.float64


def test_context_parallel_shards_are_summed_before_the_gram() -> None:
    sketcher, delta, a = Sketcher(k=4), random(N, T, OUT), random(N, T, IN, seed=1)
    shards = [Sketch(sketcher.matrix("w", delta[:, t], a[:, t]), 4, 0, ("w",)) for t in (slice(2), slice(2, T))]
    whole = Sketch(sketcher.matrix("w", delta, a), 4, 0, ("w",))
    assert torch.allclose(Sketch(shards[0].rows + shards[1].rows, 4, 0, ("w",)).gram, whole.gram, atol=1e-12)
    assert not torch.allclose(shards[0].gram + shards[1].gram, whole.gram, rtol=0.05)


def plain(n: int = 2, k: int = 2, seed: int = 0, names: tuple[str, ...] = ("w",)) -> Sketch:
    return Sketch(torch.ones(n, k * k), k, seed, names)


@pytest.mark.parametrize(("sketches", "message"), [
    ([], "no sketches were given"),
    ([plain(), plain(k=3)], "k is 2 in the first and 3 in number 1"),
    ([plain(), plain(seed=5)], "seed is 0 in the first and 5 in number 1"),
    ([plain(names=("w", "v")), plain()], "only the first has v, only number 1 has nothing"),
])
def test_sketches_that_do_not_fit_are_refused_with_the_difference(sketches: list[Sketch], message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        Sketch.cat(sketches)


def test_orthogonal_steps_look_correlated_as_their_number_nears_k_squared() -> None:
    # S orthogonal steps show a participation ratio of S/(1 + S/k²): 16 of k² = 64 show 12.8, and 64 show 32.
    for steps in (16, 64):
        sketcher = Sketcher(k=8)
        rows = torch.stack([sketcher.gradient([("v", torch.eye(600)[s * 9:s * 9 + 9].sum(0))]) for s in range(steps)])
        ratio = spectrum(rows.double() @ rows.double().T).participation_ratio
        assert ratio == pytest.approx(steps / (1 + steps / 64), rel=0.1)


def test_wrong_input_is_refused_with_what_was_given() -> None:
    sketcher = Sketcher(k=4)
    sketcher.vector("w", torch.ones(2, 5))
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: Sketcher(k=1), "at least 2, got 1"),
        (lambda: sketcher.vector("w", torch.ones(2, 6)), "'w' had size 5 on its out side and now has 6"),
        (lambda: sketcher.gradient([]), "no tensor to sketch"),
        (lambda: Sketch(torch.ones(2, 5), 4, 0, ()), r"rows \(N, 16\), got \(2, 5\)"),
    ]
    for call, message in calls:
        with pytest.raises(CreditscopeError, match=message):
            call()
