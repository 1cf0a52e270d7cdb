"""Rows of any model under the microscope, beside one backward per row; and models that it has to refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from creditscope import CreditscopeError
from creditscope.microscope.scope import Microscope
from small_models import apart, gradient, grams, loop, total


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def against_loop(model: nn.Module, x: Tensor, tolerance: float = 1e-12, alone: bool = True,
                 **kwargs: Any) -> Microscope:
    """Σ (random credit · output) under the microscope, against one backward per row: alone, or in its batch."""
    with torch.no_grad():
        credit = torch.cos(torch.arange(model(x).numel(), dtype=torch.float64)).view(model(x).shape)
    want = loop(model, [lambda i=i: ((model(x[i:i + 1]) if alone else model(x)[i:i + 1]) * credit[i:i + 1]).sum()
                        for i in range(len(x))])
    plain = gradient(model, lambda: (model(x) * credit).sum())
    model.zero_grad(set_to_none=True)
    with Microscope(model, **kwargs) as scope:
        (model(x) * credit).sum().backward()
    for name, rows in want.items():
        if rows.any():
            assert apart(scope.layers[name], rows @ rows.T) <= tolerance, name
    assert apart(scope.gram, total(grams(want))) <= tolerance
    for name, p in model.named_parameters():
        if p.requires_grad and p.grad is not None:
            assert torch.allclose(p.grad, plain[name], rtol=0, atol=tolerance * float(plain[name].abs().max()) + 1e-14)
    assert scope.coverage == 1.0
    return scope


def refused(model: nn.Module, x: Tensor, words: str, **kwargs: Any) -> None:
    """The model runs as it does without the microscope, and is refused at the end of the context."""
    plain = gradient(model, lambda: model(x).square().sum())
    model.zero_grad(set_to_none=True)
    with pytest.raises(CreditscopeError, match=words), Microscope(model, **kwargs):
        model(x).square().sum().backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            want = plain[name].to_dense()
            assert torch.allclose(p.grad.to_dense(), want, rtol=0, atol=1e-14 * max(1.0, float(want.abs().max())))


def perturbed(model: nn.Module) -> Any:
    """A float64 model without parameters at their initial 0 or 1."""
    for i, p in enumerate(model.double().parameters()):
        p.data += 0.3 * noise(*p.shape, seed=i)
    return model
