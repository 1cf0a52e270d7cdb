"""Optimisers whose next update has a closed form: its parts, and one row of `FAMILIES` each.

Other optimisers have no row; `state` reads those by taking steps on copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from creditscope.optimizer.carry import carry

Group = Mapping[str, Any]
State = Mapping[str, Any]


@dataclass(frozen=True)
class Parts:
    """One parameter's next update as a sum."""

    momentum: Tensor  # from the first moment before this step
    fresh: Tensor  # from this step's gradient, of which coupled (L2) weight decay is a part
    decay: Tensor  # from decoupled weight decay, −lr·λ·θ

    @property
    def total(self) -> Tensor:
        return self.momentum + self.fresh + self.decay


def adam_parts(group: Group, state: State, theta: Tensor, grad: Tensor) -> Parts:
    """−lr·β₁m/((1−β₁^t)(√v̂+ε)) − lr·(1−β₁)g/((1−β₁^t)(√v̂+ε)) − lr·λθ, with the v̂ that includes this gradient g."""
    before, fresh, v_hat = adam_moments(group, state, theta, grad)
    rate = -learning_rate(group) / (v_hat.sqrt_() + group["eps"])
    return Parts(rate * before, rate * fresh, decoupled_decay(group, theta))


def adam_moments(group: Group, state: State, theta: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(β₁m/(1−β₁^t), (1−β₁)g/(1−β₁^t), v̂_t) with m and v of step t−1; with amsgrad, v̂_t = max(v_max, v_t)/(1−β₂^t)."""
    (beta1, beta2), t = map(float, group["betas"]), step_number(state)
    g = descent(group, theta, grad)
    m, v = torch.zeros_like(g), (1 - beta2) * g.square()
    if "exp_avg" in state:
        m.add_(state["exp_avg"], alpha=beta1)
        v.add_(state["exp_avg_sq"], alpha=beta2)
    if group["amsgrad"] and "max_exp_avg_sq" in state:
        v = torch.maximum(v, state["max_exp_avg_sq"])
    return m / (1 - beta1**t), (1 - beta1) / (1 - beta1**t) * g, v / (1 - beta2**t)


def sgd_parts(group: Group, state: State, theta: Tensor, grad: Tensor) -> Parts:
    """−lr·μb − lr·(1−τ)g; with Nesterov −lr·μ²b − lr·(1+μ(1−τ))g. On the first step there is no b, and τ is 0."""
    mu, g = group["momentum"], descent(group, theta, grad)
    b = state.get("momentum_buffer") if mu else None
    kept, taken = mu if b is not None else 0.0, 1 - group["dampening"] if b is not None else 1.0
    if group["nesterov"]:
        kept, taken = mu * kept, 1 + mu * taken
    lr = learning_rate(group)
    momentum = torch.zeros_like(g) if b is None else -lr * kept * b
    return Parts(momentum, -lr * taken * g, torch.zeros_like(g))


def descent(group: Group, theta: Tensor, grad: Tensor) -> Tensor:
    """The gradient in the moments: −grad with `maximize`, + λθ with coupled weight decay; float32 or wider."""
    g = grad.to(torch.promote_types(grad.dtype, torch.float32))
    g = -g if group["maximize"] else g
    return g if decoupled(group) or not group["weight_decay"] else g + group["weight_decay"] * theta


def decoupled_decay(group: Group, theta: Tensor) -> Tensor:
    """−lr·λ·θ where weight decay is decoupled, else 0."""
    return -learning_rate(group) * group["weight_decay"] * theta if decoupled(group) else torch.zeros_like(theta)


def decoupled(group: Group) -> bool:
    """Whether weight decay acts on the parameter (AdamW) and not through the gradient (Adam, SGD)."""
    return bool(group.get("decoupled_weight_decay", False))


def learning_rate(group: Group) -> float | Tensor:
    """lr as a number or, where it is a tensor of one element, as a 0-d tensor: no sync."""
    lr: float | Tensor = group["lr"]
    return lr.squeeze() if isinstance(lr, Tensor) else lr


def step_number(state: State) -> Tensor:
    """t, the number of the coming step, in float64, on the device of the optimiser's counter."""
    return torch.as_tensor(state.get("step", 0)).double() + 1


@dataclass(frozen=True)
class OptimizerFamily:
    parts: Callable[[Group, State, Tensor, Tensor], Parts]  # (group, state, θ, gradient) → the next update as a sum
    normalises: bool  # whether the update is divided by √v̂, so that the scale of the gradients cancels up to ε
    remembers: Callable[[Group], bool]  # whether gradients of past steps enter the update
    carry: Callable[[Group, int], float | None]
    """(group, T) → the share of a full step made at step T, when a constant gradient became 0 at T: C_{T,0} for Adam, μ
    for SGD; None where there is no closed form."""


_ADAM = OptimizerFamily(adam_parts, normalises=True, remembers=lambda group: True,
               carry=lambda group, step: carry(step, 0, group["betas"]) if group["betas"][1] > 0 else None)
_SGD = OptimizerFamily(sgd_parts, normalises=False, remembers=lambda group: bool(group["momentum"]),
              carry=lambda group, step: None if group["nesterov"] or group["dampening"] else float(group["momentum"]))
FAMILIES: Mapping[type[torch.optim.Optimizer], OptimizerFamily] = MappingProxyType(
    {torch.optim.Adam: _ADAM, torch.optim.AdamW: _ADAM, torch.optim.SGD: _SGD})
"""By exact class: a subclass may have another step."""


def family_of(optimizer: Any) -> OptimizerFamily | None:
    return FAMILIES.get(type(bare(optimizer)))


def bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimiser inside accelerate's (and so TRL's) wrapper."""
    # By name: accelerate may not be installed, and other wrappers (Lookahead) have a step of their own.
    wrapped = type(optimizer).__name__ == "AcceleratedOptimizer"
    inner: torch.optim.Optimizer = optimizer.optimizer if wrapped else optimizer
    return inner
