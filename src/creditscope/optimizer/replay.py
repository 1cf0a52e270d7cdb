"""The updates of Adam and AdamW from a history of gradients in closed form, θ_T = θ_{T−1} + Δ_T, and the update that is
left after the gradient has become 0 (arXiv:2601.05002, Prop. 3 and 7).
"""

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


def carry(step: int, lag: int, betas: tuple[float, float] = (0.9, 0.999)) -> float:
    """C_{T,k}: the share of a full step that Adam makes at step T+k, when a constant gradient became 0 at step T.

        C_{T,k} = β₁^{k+1}(1−β₁^{T−1})/(1−β₁^{T+k}) · √(β₂^{−(k+1)}(1−β₂^{T+k})/(1−β₂^{T−1}))

    The gradient lasted T−1 steps, and k = 0 is the first step without it. ε is taken as 0. P2, Eq. 36.

    >>> round(carry(step=2, lag=0, betas=(0.9, 0.95)), 4)
    0.6786
    """
    # (β₁/√β₂)^{k+1} as one power: β₂^{−(k+1)} overflows.
    limit, first = carry_limit(lag, betas), _lasting(step, lag, betas[0])
    return float(limit * first / _lasting(step, lag, betas[1]) ** 0.5)


def carry_limit(lag: int, betas: tuple[float, float] = (0.9, 0.999)) -> float:
    """C_{∞,k} = (β₁/√β₂)^{k+1}, the limit of C_{T,k} for T → ∞. P2, Eq. 38."""
    for name, beta in zip(("β₁", "β₂"), betas, strict=True):
        if not 0 <= beta < 1:
            raise CreditscopeError(f"the carry needs 0 ≤ β₁ < 1 and 0 < β₂ < 1, got {name} = {beta}")
    if betas[1] == 0:
        raise CreditscopeError("with β₂ = 0 the step after a zero gradient is 0/0; give β₂ above 0")
    return float((betas[0] / betas[1] ** 0.5) ** (lag + 1))


def _lasting(step: int, lag: int, beta: float) -> float:
    """(1−β^{T−1})/(1−β^{T+k})."""
    if step < 2 or lag < 0:
        raise CreditscopeError(f"the carry needs a gradient that lasted, step ≥ 2, and lag ≥ 0; got step = {step} and "
                               f"lag = {lag}")
    return float((1 - beta ** (step - 1)) / (1 - beta ** (step + lag)))


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
