"""What Σ_ij K_ij = ‖∇‖² cannot see: rows under the wrong names, and a gradient that is wrong together with its rows.

The check of every pass compares sums. A layer whose rows are swapped has the same sum, and rows and gradient that are
made of the same wrong factors (old activations, a transposed product) agree with each other. `prove` therefore compares
one pass under the microscope with a few passes that it has no part in: once a run is enough, for what it finds is a
fault of the code or of the model, not of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError
from creditscope.microscope.gram import squared_norms
from creditscope.microscope.scope import Microscope

WIDER = 10
"""Times the tolerance of the self-check: sums are taken in another order than in the trainer's own pass."""
LEAST = 1e-6
"""The smallest tolerance: models in float64 hold norms that compute in float32."""


def prove(scope: Microscope, backward: Callable[[Tensor], None], rollouts: int) -> float:
    """The largest error found, as a share of the tolerance; an error in words where one is above it.

        ∇ with the microscope = ∇ without        hᵀ K h = ‖∇ Σ_i h_i J_i‖², for every parameter

    h runs over the `halves` of the rollouts. `backward(weights)` runs forward and backward of Σ_i weights_i J_i over
    one batch, weights (N,) in float64. It takes 2 + ⌈log₂ N⌉ passes. Gradients that parameters hold are put back.
    Errors are shares of the parameter's own rows, or of what rounding makes of all rows where those are less: the
    gradient of a key's bias, for example, is 0 but for rounding.
    """
    held = {p: p.grad for p in scope.parameters.values()}
    every = torch.ones(rollouts, dtype=torch.float64)
    try:
        _clear(scope)
        with scope:
            backward(every)
        under = {name: _projection(p.grad) for name, p in scope.parameters.items()}
        worst = 0.0
        for weights in (every, *halves(rollouts)):
            _clear(scope)
            backward(weights)
            if weights is every:
                worst = _compare_gradients(scope, under)
            worst = max(worst, _compare_rows(scope, weights))
        return worst
    finally:
        for p, grad in held.items():
            p.grad = grad


def halves(rollouts: int) -> list[Tensor]:
    """(N,) of 0 and 1 each: bit b of the rollout's number, for every b. Rows dealt out wrongly change one half or more:
    a permutation that maps each of these sets to itself leaves every bit of every number as it is.

    >>> [half.tolist() for half in halves(3)]
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    number = torch.arange(rollouts)
    return [((number >> bit) & 1).double() for bit in range((rollouts - 1).bit_length())]


def _compare_gradients(scope: Microscope, under: dict[str, float]) -> float:
    layers, rounding, worst = scope.layers, _rounding(scope), 0.0
    for name, check in scope.checks.items():
        scale = sqrt(float(layers[name].trace()) + check.from_grad + rounding)
        apart, tolerance = abs(under[name] - _projection(scope.parameters[name].grad)), _tolerance(scope, name)
        error = apart / scale / tolerance if scale else 0.0
        if not error <= 1:
            raise CreditscopeError(f"the microscope changes the gradient of {name!r} (by {apart / scale:.2g} of its "
                                   f"size, tolerance {tolerance:.0g}): a training step under it would go astray. Name "
                                   f"the module that holds it in slow=[...], and report the model's class")
        worst = max(worst, error)
    return worst


def _compare_rows(scope: Microscope, weights: Tensor) -> float:
    layers, rounding, worst = scope.layers, _rounding(scope), 0.0
    parameters = [scope.parameters[name] for name in layers]
    norms = squared_norms([p.new_zeros(1) if p.grad is None else p.grad for p in parameters]).tolist()
    for (name, gram), norm in zip(layers.items(), norms, strict=True):
        found = float(weights @ gram @ weights)
        scale = float(gram.diagonal() @ weights) + norm + rounding
        error = abs(found - norm) / scale / _tolerance(scope, name) if scale else 0.0
        if not error <= 1:
            raise CreditscopeError(
                f"the rows of {name!r} are not those of their rollouts: ‖∇‖² of rollouts "
                f"{weights.nonzero().flatten().tolist()[:4]} … alone is {norm:.6g}, their rows give {found:.6g}. The "
                f"model reorders its batch (name the module that does so in slow=[...]), or rows= and segments= name "
                f"the wrong owners")
        worst = max(worst, error)
    return worst


def _tolerance(scope: Microscope, name: str) -> float:
    return max(WIDER * scope.checks[name].tolerance, LEAST)


def _rounding(scope: Microscope) -> float:
    """What rounding makes of Σ_i ‖g_i‖² over all parameters."""
    return (WIDER * scope.eps) ** 2 * float(scope.gram.trace())


def _projection(grad: Tensor | None) -> float:
    """σᵀ G τ for fixed signs, others for rows than for columns: a transposed G has another."""
    if grad is None:
        return 0.0
    flat = grad.detach().reshape(len(grad), -1) if grad.dim() else grad.detach().reshape(1, 1)
    wide = torch.promote_types(flat.dtype, torch.float32)
    columns = _signs(flat.shape[1], 0.7548776662466927, flat)
    return float((flat @ columns).to(wide).double() @ _signs(flat.shape[0], 0.5698402909980532, flat).double())


def _signs(count: int, step: float, like: Tensor) -> Tensor:
    up = torch.arange(count, dtype=torch.float64).mul(step).frac().ge(0.5)
    return torch.where(up, 1.0, -1.0).to(like)


def _clear(scope: Microscope) -> None:
    for p in scope.parameters.values():
        p.grad = None
