"""Every route gives the same sum and the same Gram matrix as per-rollout gradients in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from creditscope import CreditscopeError
from creditscope.microscope import kernels, routes
from creditscope.microscope.routes import ROUTES, route, seconds, weight_gram

gpu = pytest.mark.skipif(kernels.triton is None or not torch.cuda.is_available(), reason="needs a GPU and Triton")


def factors(n: int, t: int, d_out: int, d_in: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Rollouts of unequal norm whose gradients have a common part, as those of one prompt do."""
    generator = torch.Generator(device).manual_seed(n + t + d_out + d_in)
    delta = torch.randn(n, t, d_out, device=device, generator=generator) * torch.linspace(0.3, 2, n, device=device)[
        :, None, None]
    a = torch.randn(n, t, d_in, device=device, generator=generator) + 0.3
    return delta.to(dtype), a.to(dtype)


def reference(delta: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.bmm(delta.double().transpose(1, 2), a.double())
    return rows.sum(0), rows.flatten(1) @ rows.flatten(1).T


def check(name: str, delta: Tensor, a: Tensor) -> None:
    dw, gram = ROUTES[name](delta, a)
    true_dw, true_gram = reference(delta, a)
    assert dw.dtype == a.dtype
    assert gram.dtype == torch.float64
    assert gram.shape == true_gram.shape
    assert float((gram - true_gram).abs().max() / true_gram.abs().max()) < 1e-3
    # Plain bfloat16 products round once, relative 1.7e-3; here each rollout's part is rounded too.
    assert float((dw.double() - true_dw).norm() / true_dw.norm()) < {torch.float32: 1e-6}.get(a.dtype, 3e-3)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 12])
def test_on_a_cpu_the_gram_is_that_of_the_rows_and_adds_up_to_the_norm_of_their_sum(n: int) -> None:
    delta, a = factors(n, 7, 11, 13, torch.float32, "cpu")
    check("chunks", delta, a)
    dw, gram = weight_gram(delta, a)
    assert float(gram.sum()) == pytest.approx(float(dw.double().square().sum()), rel=1e-5)


def test_a_layer_larger_than_the_scratch_is_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    delta, a = factors(4, 6, 50, 9, torch.float32, "cpu")
    whole = weight_gram(delta, a)
    monkeypatch.setattr(routes, "SCRATCH", 7 * 4 * 9 * 4)
    parts = weight_gram(delta, a)
    assert torch.allclose(whole[0], parts[0], rtol=1e-5, atol=1e-5)
    assert torch.allclose(whole[1], parts[1], rtol=1e-6)


def test_factors_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(CreditscopeError, match=r"same N and T, got \(2, 3, 4\) and \(2, 5, 4\)"):
        weight_gram(torch.zeros(2, 3, 4), torch.zeros(2, 5, 4))
    with pytest.raises(CreditscopeError, match=r"one dtype"):
        weight_gram(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, dtype=torch.float64))


def test_float32_and_many_rollouts_take_plain_torch() -> None:
    assert route(8, 512, 3072, 3072, torch.float32) == "chunks"
    assert route(65, 512, 3072, 3072, torch.bfloat16) == "chunks"


def test_the_cost_model_grows_with_tokens_and_prefers_ghost_for_few() -> None:
    for name in ("fused", "pass", "ghost"):
        times = [seconds(name, 8, t, 9216, 3072) for t in (512, 1024, 2048, 4096)]
        assert times == sorted(times)
        assert times[0] < times[-1]
    assert min(("fused", "pass", "ghost"), key=lambda name: seconds(name, 8, 64, 9216, 3072)) == "ghost"
    with pytest.raises(CreditscopeError, match="no cost model"):
        seconds("chunks", 8, 64, 9216, 3072)


SHAPES = [(1, 64, 128, 256), (2, 64, 576, 576), (3, 77, 136, 520), (5, 100, 200, 264), (8, 30, 3072, 3072),
          (8, 512, 1024, 768), (8, 300, 49152, 576), (4, 1024, 1024, 3072),
          (2, 128, 256000, 64), (2, 100, 64, 100000)]
MANY = [(12, 130, 192, 576), (16, 256, 1024, 768), (32, 128, 576, 576), (64, 40, 192, 576)]


@gpu
@pytest.mark.parametrize(("name", "shape"), [
    *[(name, shape) for name in ("fused", "pass", "ghost") for shape in SHAPES],
    *[(name, shape) for name in ("pass", "ghost") for shape in MANY],
    *[("pass", shape) for shape in [(3, 50, 71, 143), (12, 33, 101, 97), (32, 9, 117, 119)]]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_every_route_gives_the_gram_and_the_sum(name: str, shape: tuple[int, int, int, int],
                                                         dtype: torch.dtype) -> None:
    if name != "pass" and not routes._hopper():
        pytest.skip("needs a Hopper GPU")
    check(name, *factors(*shape, dtype, "cuda"))


@gpu
def test_on_a_gpu_strided_factors_and_float32_are_accepted() -> None:
    delta, a = factors(8, 64, 256, 512, torch.bfloat16, "cuda")
    straight = weight_gram(delta, a)
    strided = weight_gram(delta.transpose(0, 1).contiguous().transpose(0, 1), a.flip(0).flip(0))
    assert all(torch.equal(x, y) for x, y in zip(straight, strided, strict=True))
    check("chunks", *factors(8, 64, 256, 512, torch.float32, "cuda"))


@gpu
@pytest.mark.parametrize("shape", [(3, 5, 7, 9), (32, 9, 17, 19), (8, 512, 64, 64), (5, 100, 201, 263),
                                   (65, 9, 96, 96)])
def test_on_a_gpu_any_shape_has_a_route(shape: tuple[int, int, int, int]) -> None:
    delta, a = factors(*shape, torch.bfloat16, "cuda")
    dw, gram = weight_gram(delta, a)
    true_dw, true_gram = reference(delta, a)
    assert float((gram - true_gram).abs().max() / true_gram.abs().max()) < 1e-3
    assert float((dw.double() - true_dw).norm() / true_dw.norm()) < 3e-3


@gpu
def test_on_a_gpu_a_rollout_without_gradient_has_a_row_of_zeros() -> None:
    delta, a = factors(8, 256, 1024, 768, torch.bfloat16, "cuda")
    delta[3] = 0
    for name in ("fused", "pass", "ghost") if routes._hopper() else ("pass",):
        gram = ROUTES[name](delta, a)[1]
        assert not gram[3].any()
        assert torch.equal(gram, gram.T)


@gpu
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 65, 100), (8, 512, 3072)])
def test_on_a_gpu_the_rows_of_a_layer_norm_are_those_of_its_own_backward(shape: tuple[int, int, int]) -> None:
    n, _, d = shape
    x, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    _, mean, rstd = torch.native_layer_norm(x, (d,), None, None, 1e-5)
    dw, db = kernels.norm_rows(grad, x, mean, rstd)
    for i in range(n):
        alone = torch.nn.functional.layer_norm(x[i].double(), (d,))
        assert float((dw[i] - (alone * grad[i].double()).sum(0)).norm() / dw[i].norm()) < 1e-4
        assert float((db[i] - grad[i].double().sum(0)).norm() / db[i].norm()) < 1e-5
