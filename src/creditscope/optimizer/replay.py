"""What an optimiser does with a history of gradients, in closed form: no loop over steps, no state.

Torch's canonical Adam, AdamW and SGD, and how long each goes on after the gradient has become 0 (arXiv:2601.05002,
Prop. 3 and 7). The parameter moves by the update Δ: θ_T = θ_{T−1} + Δ_T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError


def adam(grads: Tensor, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
         amsgrad: bool = False) -> Tensor:
    """Δ_T = −lr · m̂_T / (√v̂_T + ε), the update of step T from all gradients so far, (T, ...) -> (...).

        m̂_T = (1−β₁)/(1−β₁^T) Σ_t β₁^{T−t} g_t        v̂_T = (1−β₂)/(1−β₂^T) Σ_t β₂^{T−t} g_t²

    With `amsgrad` the sum in v̂_T is the largest of those after 1, ..., T steps.

    >>> adam(torch.tensor([2.0, 2.0, 2.0]), lr=0.1)  # a constant gradient: one full step, whatever its size
    tensor(-0.1000)
    """
    steps = _steps(grads)
    squares = grads.square()
    v = _average(squares, betas[1])
    if amsgrad:
        v = torch.stack([_average(squares[:t], betas[1]) for t in range(1, steps + 1)]).amax(0)
    m_hat = _average(grads, betas[0]) / (1 - betas[0] ** steps)
    return -lr * m_hat / ((v / (1 - betas[1] ** steps)).sqrt() + eps)


def adamw(start: Tensor, grads: Tensor, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
          weight_decay: float = 0.01) -> Tensor:
    """θ_T = (1−lr·λ)^T θ_0 + Σ_t (1−lr·λ)^{T−t} Δ_t: the parameter after T steps, with Δ_t from `adam`."""
    steps, keep = _steps(grads), 1 - lr * weight_decay
    updates = torch.stack([adam(grads[:t], lr, betas, eps) for t in range(1, steps + 1)])
    return keep**steps * start + _powers(keep, updates).mul(updates).sum(0)


def sgd(grads: Tensor, lr: float, momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False) -> Tensor:
    """Δ_T = −lr · b_T, or −lr · (g_T + μ b_T) with `nesterov`, from all gradients so far, (T, ...) -> (...).

        b_T = μ^{T−1} g_1 + (1−τ) Σ_{t≥2} μ^{T−t} g_t

    The first gradient is not dampened, and without momentum none is: so torch has it.
    """
    steps = _steps(grads)
    if momentum == 0:
        return -lr * grads[-1]
    weighted = _powers(momentum, grads) * grads
    b = weighted[0] + (1 - dampening) * weighted[1:].sum(0) if steps > 1 else weighted[0]
    return -lr * (grads[-1] + momentum * b if nesterov else b)


def carry(step: int, lag: int, betas: tuple[float, float] = (0.9, 0.999)) -> float:
    """C_{T,k}: the share of a full step that Adam still makes at step T+k, when a constant gradient became 0 at step T.

        C_{T,k} = β₁^{k+1}(1−β₁^{T−1})/(1−β₁^{T+k}) · √(β₂^{−(k+1)}(1−β₂^{T+k})/(1−β₂^{T−1}))

    The gradient lasted T−1 steps, and k = 0 is the first step without it. ε is taken as 0. P2, Eq. 36.

    >>> round(carry(step=2, lag=0, betas=(0.9, 0.95)), 4)
    0.6786
    """
    # (β₁/√β₂)^{k+1} is taken as one power: alone, β₂^{−(k+1)} overflows.
    limit, first = carry_limit(lag, betas), _lasting(step, lag, betas[0])
    return float(limit * first / _lasting(step, lag, betas[1]) ** 0.5)


def carry_limit(lag: int, betas: tuple[float, float] = (0.9, 0.999)) -> float:
    """C_{∞,k} = (β₁/√β₂)^{k+1}, the carry after a gradient that lasted long. P2, Eq. 38.

    >>> round(carry_limit(lag=0, betas=(0.9, 0.95)), 3)
    0.923
    """
    for name, beta in zip(("β₁", "β₂"), betas, strict=True):
        if not 0 <= beta < 1:
            raise CreditscopeError(f"the carry needs 0 ≤ β₁ < 1 and 0 < β₂ < 1, got {name} = {beta}")
    if betas[1] == 0:
        raise CreditscopeError("with β₂ = 0 the step after a zero gradient is 0/0; give β₂ above 0")
    return float((betas[0] / betas[1] ** 0.5) ** (lag + 1))


def carry_sgd(step: int, lag: int, momentum: float) -> float:
    """μ^{k+1}(1−μ^{T−1})/(1−μ^{T+k}): the same share for SGD with momentum.

    T−1 constant gradients g fill the buffer to g(1−μ^{T−1})/(1−μ), each zero gradient multiplies it by μ, and g itself
    would have filled it to g(1−μ^{T+k})/(1−μ). It is Adam's first factor with μ for β₁. No dampening, no Nesterov.

    >>> carry_sgd(step=2, lag=0, momentum=0.5)  # the buffer is 0.5 g where it would have been 1.5 g
    0.3333333333333333
    """
    if not 0 <= momentum < 1:
        raise CreditscopeError(f"the carry needs a momentum 0 ≤ μ < 1, got {momentum}")
    return float(momentum ** (lag + 1) * _lasting(step, lag, momentum))


def _lasting(step: int, lag: int, beta: float) -> float:
    """(1−β^{T−1})/(1−β^{T+k}): a gradient of T−1 steps against one that would have lasted T+k."""
    if step < 2 or lag < 0:
        raise CreditscopeError(f"the carry needs a gradient that lasted, step ≥ 2, and lag ≥ 0; got step = {step} and "
                               f"lag = {lag}")
    return float((1 - beta ** (step - 1)) / (1 - beta ** (step + lag)))


def _average(x: Tensor, beta: float) -> Tensor:
    """(1−β) Σ_t β^{T−t} x_t: an exponential moving average that started at 0."""
    return (1 - beta) * _powers(beta, x).mul(x).sum(0)


def _powers(base: float, x: Tensor) -> Tensor:
    """base^{T−t} for t = 1 ... T, in a shape that multiplies x (T, ...). 0⁰ is 1."""
    ages = torch.arange(len(x) - 1, -1, -1, device=x.device, dtype=x.dtype)
    return (base**ages).view(-1, *[1] * (x.dim() - 1))


def _steps(grads: Tensor) -> int:
    if grads.dim() == 0 or len(grads) == 0:
        raise CreditscopeError(f"a history of gradients is (T, ...) with T ≥ 1, got shape {tuple(grads.shape)}")
    return len(grads)
