"""The share of a full step that Adam makes after the gradient has become 0 (arXiv:2601.05002, Prop. 7). No torch."""

from __future__ import annotations

from creditscope.errors import CreditscopeError


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
