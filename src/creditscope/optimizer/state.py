"""The next update of a live optimiser, read between backward() and step(): its parts, and under other gradients.

Parameters, gradients and the optimiser's state are not changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
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

    Adam, AdamW and SGD have closed forms. Any other optimiser takes the step twice on copies: `momentum` is the update
    with gradient 0, weight decay included, `fresh` the rest of the true update and `decay` 0. The definitions differ
    for Adam: the closed form divides both parts by the √v̂ of the true step, which a gradient of 0 would change.
    """
    optimizer, family = bare(optimizer), family_of(optimizer)
    if family is not None:
        return {p: family.parts(group, optimizer.state.get(p, {}), p, p.grad) for group, p in moving(optimizer)
                if p.grad is not None}
    grads = {p: p.grad for _, p in moving(optimizer) if p.grad is not None}
    true, without = (updates(optimizer, {p: scale * g for p, g in grads.items()}) for scale in (1.0, 0.0))
    return {p: Parts(without[p], true[p] - without[p], torch.zeros_like(p)) for p in true}


def first_moment(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor | None:
    """The live buffer of the first moment (`exp_avg` or `momentum_buffer`), None where there is none (yet)."""
    state = optimizer.state.get(param, {})
    found = state.get("exp_avg", state.get("momentum_buffer"))
    return found if isinstance(found, Tensor) else None


@torch.no_grad()
def updates(optimizer: torch.optim.Optimizer, grads: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """The update that step() would make with these gradients: the step is taken on copies.

    Works for any optimiser whose step() needs no closure. Parameters, gradients, state, parameter groups, attributes
    and random state are not changed; neither step hooks nor a scheduler's patch of step() run. In float32 the update,
    a difference of two parameters, has a rounding error of about 1e-7·|θ|.
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
    """Replace everything that step() may change by copies, then restore the originals. Yields {p: its data}."""
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
    """(group, parameter) for every parameter with a gradient."""
    return ((group, p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
