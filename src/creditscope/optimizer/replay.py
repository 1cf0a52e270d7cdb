"""The updates of Adam and AdamW from a history of gradients in closed form, θ_T = θ_{T−1} + Δ_T (arXiv:2601.05002,
Prop. 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError


def adam(grads: Tensor, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> Tensor:
    """Δ_T = −lr · m̂_T / (√v̂_T + ε), the update of step T from all gradients so far, (T, ...) -> (...).

        m̂_T = (1−β₁)/(1−β₁^T) Σ_t β₁^{T−t} g_t        v̂_T = (1−β₂)/(1−β₂^T) Σ_t β₂^{T−t} g_t²

    >>> adam(torch.tensor([2.0, 2.0, 2.0]), lr=0.1)  # a constant gradient: one full step, whatever its size
    tensor(-0.1000)
    """
    steps = _steps(grads)
    m_hat = _average(grads, betas[0]) / (1 - betas[0] ** steps)
    v_hat = _average(grads.square(), betas[1]) / (1 - betas[1] ** steps)
    return -lr * m_hat / (v_hat.sqrt() + eps)


def adamw(start: Tensor, grads: Tensor, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
          weight_decay: float = 0.01) -> Tensor:
    """θ_T = (1−lr·λ)^T θ_0 + Σ_t (1−lr·λ)^{T−t} Δ_t: the parameter after T steps, with Δ_t from `adam`."""
    steps, keep = _steps(grads), 1 - lr * weight_decay
    updates = torch.stack([adam(grads[:t], lr, betas, eps) for t in range(1, steps + 1)])
    return keep**steps * start + _powers(keep, updates).mul(updates).sum(0)


def _average(x: Tensor, beta: float) -> Tensor:
    """(1−β) Σ_t β^{T−t} x_t."""
    return (1 - beta) * _powers(beta, x).mul(x).sum(0)


def _powers(base: float, x: Tensor) -> Tensor:
    """base^{T−t} for t = 1 ... T, in a shape that multiplies x (T, ...). 0⁰ is 1."""
    ages = torch.arange(len(x) - 1, -1, -1, device=x.device, dtype=x.dtype)
    return (base**ages).view(-1, *[1] * (x.dim() - 1))


def _steps(grads: Tensor) -> int:
    if grads.dim() == 0 or len(grads) == 0:
        raise CreditscopeError(f"a history of gradients is (T, ...) with T ≥ 1, got shape {tuple(grads.shape)}")
    return len(grads)
