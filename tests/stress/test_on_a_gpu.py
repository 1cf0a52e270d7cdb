"""The same edges on a GPU, where the products are taken by kernels: bfloat16, float16, 8,192 tokens, R = 64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from creditscope import CreditscopeError, Microscope, spectrum
from creditscope.microscope.gram import squared_norms
from creditscope.microscope.proof import prove
from makers import make
from small_models import COMMON, apart, batch, build, by_loop, double, grams, objective, total

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def on_gpu(dtype: torch.dtype, n: int, t: int, **changes: Any) -> tuple[Any, Tensor, Tensor]:
    model = build("llama", dtype, **{**COMMON, "max_position_embeddings": 8192, **changes}).cuda()
    ids, credit = batch(n, t)
    return model, ids.cuda(), credit.cuda()


def measured(model: Any, ids: Tensor, credit: Tensor) -> Microscope:
    model.zero_grad(set_to_none=True)
    with Microscope(model) as scope:
        objective(model, ids, credit).backward()
    return scope


@pytest.mark.parametrize("power", [-100, -80, -40, 0, 40, 80, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gradient_of_any_size_is_read_right_or_refused(dtype: torch.dtype, power: int) -> None:
    model, ids, credit = on_gpu(dtype, 4, 33)
    truth = total(grams(by_loop(double(model), ids, credit))).cpu()
    if dtype == torch.float16 and power < 0:  # the loss itself is 0 in float16, and so is the gradient
        assert not bool(measured(model, ids, credit * 2.0**power).gram.any())
    elif power in (0, 40, -40) and not (dtype == torch.float16 and power):
        assert apart(measured(model, ids, credit * 2.0**power).gram * 4.0**-power, truth) < CLOSE[dtype]
    else:
        with pytest.raises(CreditscopeError, match=r"too small for products|too large for products|is not finite"):
            measured(model, ids, credit * 2.0**power)


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1.0, 1e22, 1e30])
def test_norms_on_the_device_are_those_of_float64_at_any_size(size: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        g = (torch.randn(300, 200, device="cuda") * size).to(dtype)
        assert float(squared_norms([g, g.flatten()])[0]) == pytest.approx(float(g.double().square().sum()), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_completions_of_8192_tokens_have_the_gram_of_their_float64_loop(dtype: torch.dtype) -> None:
    model, ids, credit = on_gpu(dtype, 4, 8192)
    truth = total(grams(by_loop(double(model), ids, credit))).cpu()
    assert apart(measured(model, ids, credit).gram, truth) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sixty_four_rollouts_have_the_gram_of_their_float64_loop(dtype: torch.dtype) -> None:
    model, ids, credit = on_gpu(dtype, 64, 257)
    truth = total(grams(by_loop(double(model), ids, credit))).cpu()
    assert apart(measured(model, ids, credit).gram, truth) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_identical_rollouts_have_rank_one_on_the_device(dtype: torch.dtype) -> None:
    """By hand: K = a aᵀ‖ψ‖²."""
    model, ids, _ = on_gpu(dtype, 1, 129)
    a = torch.tensor([1.0, -0.5, 0.25, 2.0], dtype=torch.float64, device="cuda")
    scope = measured(model, ids.expand(4, -1), a[:, None].expand(4, 128))
    assert apart(scope.gram / scope.gram[0, 0], torch.outer(a, a).cpu()) < CLOSE[dtype]
    assert spectrum(scope.gram, scope.eps).numerical_rank == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_kernels_rows_belong_to_their_rollouts(dtype: torch.dtype) -> None:
    model, ids, credit = on_gpu(dtype, 11, 65, hidden_size=64)

    def backward(weights: Tensor) -> None:
        objective(model, ids, credit * weights.to(credit)[:, None]).backward()

    assert prove(Microscope(model), backward, 11) < 0.5


def test_rows_moves_and_trimming_do_not_wait_for_the_gpu() -> None:
    """torch raises at each call that waits; a check of values would."""
    rollouts = make([0.0, 1.0, 1.0], [0, 0, 1], [3, 5, 2])
    index = torch.tensor([2, 0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        part = rollouts.to("cuda").rows(index).trim()
        with pytest.raises(RuntimeError, match="synchroniz"):
            bool(part.mask.any())  # can-fail: this one waits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert part.tokens.shape == (2, 3)
    assert torch.equal(part.tokens.cpu(), rollouts.tokens[index, :3])
