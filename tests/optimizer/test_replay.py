"""Closed forms against torch's own optimisers, all three implementations, and the carry against a real run-out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from creditscope import CreditscopeError
from creditscope.optimizer.carry import carry, carry_limit
from creditscope.optimizer.replay import adam, adamw
from each import each

IMPLEMENTATIONS: list[dict[str, bool]] = [{"foreach": True}, {"fused": True}, {"foreach": False}]
BETAS = [(0.9, 0.999), (0.9, 0.95), (0.0, 0.9), (0.8, 0.3)]
PRINTED = {(2, 0): 0.6786, (10, 0): 0.9047, (50, 4): 0.6763}


def history(steps: int, seed: int = 0) -> Tensor:
    """Gradients (steps, 3, 4) whose sizes differ by four decades between coordinates and vary from step to step."""
    draw = torch.Generator().manual_seed(seed)
    g = torch.randn(steps, 3, 4, dtype=torch.float64, generator=draw)
    return g * torch.logspace(-4, 0, 12, dtype=torch.float64).view(3, 4)


def train(kind: type[torch.optim.Optimizer], grads: Tensor, start: Tensor, **settings: Any) -> list[Tensor]:
    """θ_0, θ_1, ..., θ_T of a real optimiser that is fed these gradients."""
    theta = torch.nn.Parameter(start.clone())
    optimizer, seen = kind([theta], **settings), [start.clone()]
    for g in grads:
        theta.grad = g.clone()
        optimizer.step()
        seen.append(theta.detach().clone())
    return seen


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> bool:
    return float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


@each("implementation", IMPLEMENTATIONS)
@each("betas", BETAS)
@each("steps", [1, 2, 9])
def test_adam_is_torch_adam(implementation: dict[str, bool], betas: tuple[float, float], steps: int) -> None:
    g = history(steps)
    # From 0 before the last step, so that the update is not a difference of larger numbers.
    theta = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
    real = torch.optim.Adam([theta], lr=0.01, betas=betas, eps=1e-3, **implementation)
    for row in g:
        torch.nn.init.zeros_(theta)
        theta.grad = row.clone()
        real.step()
    assert close(adam(g, 0.01, betas, 1e-3), theta.detach())


def test_adam_by_hand_after_two_steps() -> None:
    # β = (1/2, 3/4), g = (1, 3). m₂ = 1/2·1/2 + 1/2·3 = 7/4, 1 − β₁² = 3/4, m̂ = 7/3.
    # v₂ = 3/4·1/4·1 + 1/4·9 = 39/16, 1 − β₂² = 7/16, v̂ = 39/7. Δ = −0.1·(7/3)/(√(39/7) + 1).
    g = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert float(adam(g, 0.1, (0.5, 0.75), 1.0)) == pytest.approx(-0.1 * 7 / 3 / ((39 / 7) ** 0.5 + 1), rel=1e-14)


@each("implementation", IMPLEMENTATIONS)
@each("weight_decay", [0.0, 0.01, 3.0])
@each("betas", BETAS)
def test_adamw_is_torch_adamw(implementation: dict[str, bool], weight_decay: float, betas: tuple[float, float]) -> None:
    g, start = history(8), history(1, seed=1)[0]
    real = train(torch.optim.AdamW, g, start, lr=0.01, betas=betas, eps=1e-3, weight_decay=weight_decay,
                 **implementation)
    assert close(adamw(start, g, 0.01, betas, 1e-3, weight_decay), real[-1])


def test_adamw_without_gradients_only_decays() -> None:
    # (1 − 0.1·0.5)³ · 8 = 0.857375 · 8.
    got = adamw(torch.tensor([8.0], dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64), 0.1, weight_decay=0.5)
    assert float(got) == pytest.approx(6.859, rel=1e-14)


# The carry.

@pytest.mark.parametrize(("step", "lag"), PRINTED)
def test_the_carry_has_the_papers_values(step: int, lag: int) -> None:
    assert round(carry(step, lag, (0.9, 0.95)), 4) == PRINTED[step, lag]


@each("implementation", IMPLEMENTATIONS)
@each("betas", [(0.9, 0.999), (0.9, 0.95), (0.8, 0.3), (0.0, 0.9)])
@each(("step", "lag"), [(2, 0), (3, 2), (10, 0), (50, 4)])
def test_the_carry_is_what_a_real_adamw_does_when_the_gradient_stops(implementation: dict[str, bool],
                                                                     betas: tuple[float, float], step: int,
                                                                     lag: int) -> None:
    ones, zeros = torch.ones(step - 1, 1, dtype=torch.float64), torch.zeros(lag + 1, 1, dtype=torch.float64)
    settings: dict[str, Any] = {"lr": 1.0, "betas": betas, "eps": 0.0, "weight_decay": 0.0, **implementation}
    start = torch.zeros(1, dtype=torch.float64)
    seen = train(torch.optim.AdamW, torch.cat([ones, zeros]), start, **settings)
    full = train(torch.optim.AdamW, torch.ones(step + lag, 1, dtype=torch.float64), start, **settings)
    measured = float((seen[-1] - seen[-2]) / (full[-1] - full[-2]))
    # θ has walked up to 54 steps of 1, so a difference of two θ is good to 54·2⁻⁵².
    assert measured == pytest.approx(carry(step, lag, betas), abs=1e-13)


@each("betas", [(0.9, 0.999), (0.9, 0.95), (0.8, 0.3)])
@each(("step", "lag"), [(2, 0), (7, 3), (50, 4)])
def test_the_carry_is_the_replay_of_ones_and_zeros(betas: tuple[float, float], step: int, lag: int) -> None:
    g = torch.cat([torch.ones(step - 1), torch.zeros(lag + 1)]).double()
    assert carry(step, lag, betas) == pytest.approx(-float(adam(g, 1.0, betas, 0.0)), rel=1e-13)


def test_the_carry_tends_to_its_limit() -> None:
    assert round(carry_limit(0, (0.9, 0.95)), 3) == 0.923
    for lag in (0, 1, 7):
        assert carry(10**6, lag, (0.9, 0.95)) == pytest.approx(carry_limit(lag, (0.9, 0.95)), rel=1e-12)
        assert carry_limit(lag, (0.9, 0.95)) == pytest.approx((0.81 / 0.95) ** ((lag + 1) / 2), rel=1e-13)
    # 0.3 forgets faster than 0.8: the step grows after the gradient has stopped.
    assert carry_limit(1, (0.8, 0.3)) > carry_limit(0, (0.8, 0.3)) > 1


def test_a_long_lag_does_not_overflow() -> None:
    # 0.95^−20001 is about 1e445; (0.9/√0.95)^20001 is 0 in float64.
    assert carry(50, 20_000, (0.9, 0.95)) == 0.0
    assert math.isfinite(carry(50, 20_000, (0.9, 0.81001)))


@pytest.mark.parametrize(("call", "says"), [
    (lambda: carry(1, 0), "step ≥ 2.*got step = 1"),
    (lambda: carry(2, -1), "lag = -1"),
    (lambda: carry(2, 0, (0.9, 0.0)), "with β₂ = 0 the step after a zero gradient is 0/0"),
    (lambda: carry_limit(0, (1.0, 0.9)), "got β₁ = 1.0"),
    (lambda: adam(torch.ones(0, 3), 0.1), r"T ≥ 1, got shape \(0, 3\)"),
])
def test_what_cannot_be_replayed_is_refused(call: Any, says: str) -> None:
    with pytest.raises(CreditscopeError, match=says):
        call()
