"""Reading a live optimiser between backward() and step(): what the next update is made of, and what it would be.

Nothing here changes the parameters, their gradients or the optimiser's state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from creditscope.errors import CreditscopeError

Group = Mapping[str, Any]
State = Mapping[str, Any]
CLOSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimisers with a closed form. A subclass may have another step, so it does not count."""


@dataclass(frozen=True)
class Parts:
    """One parameter's next update as a sum."""

    momentum: Tensor
    """From the first moment as it stood before this step."""
    fresh: Tensor
    """From this step's gradient. Coupled (L2) weight decay is part of the gradient, so it counts here."""
    decay: Tensor
    """From decoupled weight decay, −lr·λ·θ."""

    @property
    def total(self) -> Tensor:
        """The whole update."""
        return self.momentum + self.fresh + self.decay


@torch.no_grad()
def split(optimizer: torch.optim.Optimizer) -> dict[Tensor, Parts]:
    """The update that step() is about to make, as a sum, for every parameter that has a gradient.

    Adam, AdamW and SGD have closed forms (`adam_parts`, `sgd_parts`). For any other optimiser the step is really taken
    twice (`counterfactual`): `momentum` is the update with gradient 0, which includes weight decay of either kind,
    `fresh` is the rest of the true update and `decay` is 0. The two definitions differ for Adam: the closed form
    divides both parts by the √v̂ of the true step, while a gradient of 0 would also have made v̂ smaller.
    """
    optimizer = bare(optimizer)
    if type(optimizer) in CLOSED:
        return {p: closed_parts(optimizer, group, p) for group, p in moving(optimizer)}
    true, without = counterfactual(optimizer, 1.0), counterfactual(optimizer, 0.0)
    return {p: Parts(without[p], true[p] - without[p], torch.zeros_like(p)) for p in true}


def closed_parts(optimizer: torch.optim.Optimizer, group: Group, p: Tensor) -> Parts:
    """`adam_parts` or `sgd_parts` of one parameter and its gradient."""
    assert p.grad is not None
    rule = sgd_parts if isinstance(optimizer, torch.optim.SGD) else adam_parts
    return rule(group, optimizer.state.get(p, {}), p, p.grad)


def adam_parts(group: Group, state: State, theta: Tensor, grad: Tensor) -> Parts:
    """−lr·β₁m/((1−β₁^t)(√v̂+ε)) − lr·(1−β₁)g/((1−β₁^t)(√v̂+ε)) − lr·λθ, with the v̂ that includes this gradient g."""
    before, fresh, v_hat = adam_moments(group, state, theta, grad)
    rate = -learning_rate(group) / (v_hat.sqrt_() + group["eps"])
    return Parts(rate * before, rate * fresh, decoupled_decay(group, theta))


def adam_moments(group: Group, state: State, theta: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(β₁m/(1−β₁^t), (1−β₁)g/(1−β₁^t), v̂_t): the corrected moments of step t, the first one in its two parts.

    m and v are those of step t−1, 0 before the first. With amsgrad, v̂_t = max(v_max, v_t)/(1−β₂^t).
    """
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
    """The gradient that enters the moments: −grad with `maximize`, + λθ with coupled weight decay; float32 or wider."""
    g = grad.to(torch.promote_types(grad.dtype, torch.float32))
    g = -g if group["maximize"] else g
    return g if decoupled(group) or not group["weight_decay"] else g + group["weight_decay"] * theta


def decoupled_decay(group: Group, theta: Tensor) -> Tensor:
    """−lr·λ·θ where weight decay is decoupled, else 0."""
    return -learning_rate(group) * group["weight_decay"] * theta if decoupled(group) else torch.zeros_like(theta)


def decoupled(group: Group) -> bool:
    """Whether weight decay acts on the parameter itself (AdamW) and not through the gradient (Adam, SGD)."""
    return bool(group.get("decoupled_weight_decay", False))


def learning_rate(group: Group) -> float | Tensor:
    """lr as a number or, where it is a tensor of one element, as a tensor without dimensions: no sync."""
    lr: float | Tensor = group["lr"]
    return lr.squeeze() if isinstance(lr, Tensor) else lr


def step_number(state: State) -> Tensor:
    """t, the number of the step that is about to be taken, in float64 and where the optimiser keeps it."""
    return torch.as_tensor(state.get("step", 0)).double() + 1


def first_moment(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor | None:
    """The live buffer of the first moment (`exp_avg` or `momentum_buffer`), None where there is none (yet)."""
    state = optimizer.state.get(param, {})
    found = state.get("exp_avg", state.get("momentum_buffer"))
    return found if isinstance(found, Tensor) else None


def momentum_of(group: Group) -> float:
    """β₁ or μ of a parameter group, 0.0 for an optimiser that has neither."""
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


def counterfactual(optimizer: torch.optim.Optimizer,
                   scale: float | Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
    """The update that step() would make with every gradient times `scale`, or `scale(gradient)`: see `updates`."""
    change = scale if callable(scale) else lambda g: g.mul_(scale)
    optimizer = bare(optimizer)
    return updates(optimizer, {p: change(p.grad.detach().clone()) for _, p in moving(optimizer) if p.grad is not None})


@torch.no_grad()
def updates(optimizer: torch.optim.Optimizer, grads: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """The update that step() would make with these gradients: the step is really taken, on copies.

    Works for any optimiser whose step() needs no closure. Parameters, gradients, state, parameter groups, attributes
    and random numbers are afterwards what they were, to the bit: the originals are set aside, not written to. Step
    hooks do not run, and a scheduler that has patched step() does not hear of it. An update is the difference of two
    parameters, so in float32 it carries a rounding error of about 1e-7·|θ|.
    """
    optimizer = bare(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise CreditscopeError("LBFGS evaluates the loss inside step(), so no step can be tried beside the real one; "
                               "use another optimiser")
    with _aside(optimizer) as live:
        for p in live:
            p.grad = grads.get(p)
        # The class's own step: the one on the instance may have been patched.
        type(optimizer).step(optimizer)
        return {p: p.data.sub_(live[p]) for p in grads}


@contextmanager
def _aside(optimizer: torch.optim.Optimizer) -> Iterator[dict[Tensor, Tensor]]:
    """Put copies in the place of everything that step() may change, then the originals back. Yields {p: its data}."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    data, grads = {p: p.data for p in params}, {p: p.grad for p in params}
    attributes, groups = dict(vars(optimizer)), [dict(group) for group in optimizer.param_groups]
    keep = {id(p): p for p in params}
    hooks: tuple[dict[int, Any], ...] = (torch_optimizer._global_optimizer_pre_hooks,
                                         torch_optimizer._global_optimizer_post_hooks)
    hooked = [dict(each) for each in hooks]
    devices = sorted({p.device.index for p in params if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            for each in hooks:
                each.clear()
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = {}, {}
            optimizer.state = copy.deepcopy(optimizer.state, keep)
            for group in optimizer.param_groups:
                group.update(copy.deepcopy({k: v for k, v in group.items() if k != "params"}))
            for p in params:
                p.data = data[p].clone()
            yield data
    finally:
        for p in params:
            p.data, p.grad = data[p], grads[p]
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for group, was in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(was)
        for each, had in zip(hooks, hooked, strict=True):
            each.update(had)


def moving(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """(group, parameter) for every parameter that step() will move: those with a gradient."""
    return ((group, p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimiser inside the wrapper that accelerate (and so TRL) puts around it."""
    # By name: accelerate may not be installed, and other wrappers (Lookahead) have a step of their own.
    wrapped = type(optimizer).__name__ == "AcceleratedOptimizer"
    inner: torch.optim.Optimizer = optimizer.optimizer if wrapped else optimizer
    return inner
