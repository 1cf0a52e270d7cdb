"""Reading a live optimiser between backward() and step(): what the next update is made of, and what it would be.

Nothing here changes the parameters, their gradients or the optimiser's state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from creditscope.errors import CreditscopeError
from creditscope.optimizer.families import Parts, bare, family_of


@torch.no_grad()
def split(optimizer: torch.optim.Optimizer) -> dict[Tensor, Parts]:
    """The update that step() is about to make, as a sum, for every parameter that has a gradient.

    Adam, AdamW and SGD have closed forms (`adam_parts`, `sgd_parts`). For any other optimiser the step is really taken
    twice (`counterfactual`): `momentum` is the update with gradient 0, which includes weight decay of either kind,
    `fresh` is the rest of the true update and `decay` is 0. The two definitions differ for Adam: the closed form
    divides both parts by the √v̂ of the true step, while a gradient of 0 would also have made v̂ smaller.
    """
    optimizer, family = bare(optimizer), family_of(optimizer)
    if family is not None:
        return {p: family.parts(group, optimizer.state.get(p, {}), p, p.grad) for group, p in moving(optimizer)
                if p.grad is not None}
    true, without = counterfactual(optimizer, 1.0), counterfactual(optimizer, 0.0)
    return {p: Parts(without[p], true[p] - without[p], torch.zeros_like(p)) for p in true}


def first_moment(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor | None:
    """The live buffer of the first moment (`exp_avg` or `momentum_buffer`), None where there is none (yet)."""
    state = optimizer.state.get(param, {})
    found = state.get("exp_avg", state.get("momentum_buffer"))
    return found if isinstance(found, Tensor) else None


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
