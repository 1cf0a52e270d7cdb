"""Tests for errors that Σ_ij K_ij = ‖∇‖² does not detect: swapped rows, and a gradient that is wrong like its rows.

`prove` compares one pass under the microscope with one without it, parameter by parameter, and runs passes in which
half of the rollouts have no loss: their rows must be exactly 0, whatever the precision. It is for one process;
`proof_ranks.prove_ranks` is for several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.errors import CreditscopeError
from creditscope.microscope.gram import squared_norms
from creditscope.microscope.scope import ROUNDING, Microscope
from creditscope.microscope.shards import is_shard, local, many_ranks

WIDER = 3
"""Times the tolerance of the self-check: the order of sums differs from that of the trainer's own pass."""
DEEP = 2
"""Times that again between two passes in half precision, where the rounding of all layers above reaches a gradient: of
some 15 proofs of a model of 24 layers two were at 0.065 and 0.067 (limit 0.06 without it). One of N rollouts is up
to 1/√N of the scale, so the limit is at most half of that, and 0.06 from 70 rollouts on."""
LEAST = 1e-6
"""The smallest tolerance: models in float64 hold norms that compute in float32."""
EVERY = 25
"""Readings between two proofs of a model that has not changed."""


class Proofs:
    """When a microscope's readings are proven: the first, every 25th, and the first after the model has changed.

    A first proof takes 2 + ⌈log₂ N⌉ passes and detects any permutation of rows; a later one takes 3, with a new random
    half of the rollouts.
    """

    def __init__(self, every: int = EVERY) -> None:
        self._every, self.readings = every, 0
        self._kind: Any = None

    def due(self, model: nn.Module) -> str | None:
        """What this reading needs: "all" halves, "one", or None. Call it once per reading."""
        now, number = kind(model), self.readings
        self.readings += 1
        if now != self._kind:
            self._kind = now
            return "all"
        return "one" if number % self._every == 0 else None

    def run(self, what: str, scope: Microscope, backward: Callable[[Tensor], None], rollouts: int) -> float:
        try:
            return prove(scope, backward, rollouts, None if what == "all" else drawn(rollouts, self.readings))
        except CreditscopeError:
            self.again()
            raise

    def again(self) -> None:
        """After a proof that failed: the next reading is proven in full."""
        self._kind = None


def kind(model: nn.Module) -> tuple[Any, ...]:
    """Modes, trainable parameters and their types, hooks and classes of modules: a proof depends on them."""
    modules = tuple((name, type(module).__qualname__, module.training, len(module._forward_hooks),
                     len(module._forward_pre_hooks), "forward" in module.__dict__)
                    for name, module in model.named_modules())
    return modules, tuple((name, p.dtype, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad)


def prove(scope: Microscope, backward: Callable[[Tensor], None], rollouts: int,
          halves_of: list[Tensor] | None = None) -> float:
    """The largest error found, as a share of the tolerance; an exception where one is above it.

        ∇ with the microscope = ∇ without, for every trainable parameter of the model
        h_i = 0  ⇒  row i of ∇ Σ_i h_i J_i is 0        hᵀ K h = ‖∇ Σ_i h_i J_i‖², for every parameter

    h runs over the `halves` of the rollouts, or over those given. `backward(weights)` runs forward and backward of
    Σ_i weights_i J_i over one batch, weights (N,) in float64. Every pass starts from the same random state and buffers;
    these and the gradients are restored. Errors are shares of the parameter's own rows, or of the rounding of all rows
    where that is larger: the gradient of a key's bias, for example, is 0 but for rounding.
    """
    if many_ranks() and torch.distributed.get_world_size() > 1:
        raise CreditscopeError("prove compares with the gradient of one process, and this one trains with others, "
                               "whose gradients an engine adds; call proof_ranks.prove_ranks on all ranks")
    every = torch.ones(rollouts, dtype=torch.float64)
    with as_before(scope.model) as restart:
        restart()
        with scope:
            backward(every)
        under = projected(scope.model)
        layers, checks = dict(scope.layers), dict(scope.checks)
        rounding = (WIDER * scope.eps) ** 2 * float(scope.gram.trace())
        restart()
        backward(every)
        worst = compare_gradients(scope, under, layers, checks, rounding)
        for half in halves(rollouts) if halves_of is None else halves_of:
            restart()
            with scope:
                backward(half)
            require_silence(scope, half)
            grads = [p.new_zeros(1) if (p := scope.parameters[name]).grad is None else p.grad for name in layers]
            norms = squared_norms([g for g in grads if g is not None]).tolist()
            worst = max(worst, compare_rows(scope, half, layers, checks, rounding, norms))
    return worst


def halves(rollouts: int) -> list[Tensor]:
    """(N,) of 0 and 1 each: bit b of the rollout's number, for every b. A permutation of rows changes one half or more:
    one that maps each of these sets to itself leaves every bit of every number unchanged.

    >>> [half.tolist() for half in halves(3)]
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    number = torch.arange(rollouts)
    return [((number >> bit) & 1).double() for bit in range((rollouts - 1).bit_length())]


def drawn(rollouts: int, seed: int) -> list[Tensor]:
    """One half of the rollouts, another for each seed; the global random state is not touched."""
    if rollouts < 2:
        return []
    half = torch.zeros(rollouts, dtype=torch.float64)
    half[torch.randperm(rollouts, generator=torch.Generator().manual_seed(seed))[: rollouts // 2]] = 1
    return [half]


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@contextmanager
def as_before(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Yields a function that empties gradients and restores buffers and random state; at the end all are restored."""
    grads = {p: p.grad for p in model.parameters()}
    buffers = {name: (b, b.detach().clone()) for name, b in model.named_buffers()}
    device = next(iter(grads)).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        state = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None

        def restart() -> None:
            for p in model.parameters():
                p.grad = None
            with torch.no_grad():
                for name, b in model.named_buffers():
                    if name in buffers and b is buffers[name][0] and not torch.equal(b, buffers[name][1]):
                        b.copy_(buffers[name][1])
            torch.set_rng_state(state[0])
            if state[1] is not None:
                torch.cuda.set_rng_state(state[1], device)

        try:
            yield restart
        finally:
            restart()
            for p, grad in grads.items():
                p.grad = grad


def projected(model: nn.Module) -> dict[str, tuple[float, float]]:
    """Two numbers of each parameter's gradient; of shards, of this rank's part."""
    return {name: _projections(_laid_out(p)) for name, p in _trainable(model).items()}


def _laid_out(p: nn.Parameter) -> Tensor | None:
    """The gradient, in parts as the parameter is: torch returns a whole one for an embedding that is cut."""
    if p.grad is None or not is_shard(p.grad) or p.grad.placements == p.placements:  # type: ignore[attr-defined]
        return p.grad
    return p.grad.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined,no-any-return]


def compare_gradients(scope: Microscope, under: dict[str, tuple[float, float]], layers: dict[str, Tensor],
                      checks: dict[str, Any], rounding: float) -> float:
    """`projected` with the microscope, `under`, against `.grad` of a pass without it."""
    worst = 0.0
    for name, p in _trainable(scope.model).items():
        plain = _projections(_laid_out(p))
        trace = float(layers[name].trace()) if name in layers else 0.0
        scale = sqrt(trace + plain[1] + rounding)
        apart = max(abs(under[name][0] - plain[0]), abs(sqrt(under[name][1]) - sqrt(plain[1]))) \
            if name in under else sqrt(plain[1])
        tolerance = _tolerance(scope, checks, name)
        if scope.eps >= ROUNDING[torch.bfloat16]:
            tolerance = max(tolerance, min(DEEP * tolerance, 0.5 / sqrt(len(scope.gram))))
        error = apart / scale / tolerance if scale else 0.0
        if not error <= 1:
            raise CreditscopeError(f"the microscope changes the gradient of {name!r} (by {apart / scale:.2g} of its "
                                   f"size, tolerance {tolerance:.0g}): a training step under it would be another step. "
                                   f"Where the model is random or keeps state outside its buffers, two plain passes "
                                   f"differ too; else report the model's class")
        worst = max(worst, error)
    return worst


def require_silence(scope: Microscope, half: Tensor) -> None:
    """Rollouts without a loss have rows of 0, or rows mix."""
    norms = scope.gram.diagonal()
    loud = [i for i in (half == 0).nonzero().flatten().tolist() if float(norms[i]) != 0]
    if loud:
        where = next(name for name, gram in scope.layers.items() if float(gram[loud[0], loud[0]]) != 0)
        raise CreditscopeError(
            f"the loss of rollouts {half.nonzero().flatten().tolist()[:4]} … alone has a gradient through rollout "
            f"{loud[0]} ({len(loud)} such) at {where!r}: the model or the loss mixes rows, by batch statistics for "
            f"example, or rows= and segments= name the wrong owners")


def compare_rows(scope: Microscope, half: Tensor, layers: dict[str, Tensor], checks: dict[str, Any],
                 rounding: float, norms: Sequence[float]) -> float:
    """hᵀ K h against `norms`, ‖∇ Σ_i h_i J_i‖² of each layer."""
    worst = 0.0
    for (name, gram), norm in zip(layers.items(), norms, strict=True):
        found = float(half @ gram @ half)
        scale = float(gram.diagonal() @ half) + norm + rounding
        error = abs(found - norm) / scale / _tolerance(scope, checks, name) if scale else 0.0
        if not error <= 1:
            raise CreditscopeError(
                f"the rows of {name!r} are not those of their rollouts: ‖∇‖² of rollouts "
                f"{half.nonzero().flatten().tolist()[:4]} … alone is {norm:.6g}, their rows give {found:.6g}. The "
                f"model mixes or reorders its rows undetected, or rows= and segments= name the wrong owners")
        worst = max(worst, error)
    return worst


def _tolerance(scope: Microscope, checks: dict[str, Any], name: str) -> float:
    known = checks[name].tolerance if name in checks else scope.tolerance
    return max(WIDER * known, LEAST)


def _projections(grad: Tensor | None) -> tuple[float, float]:
    """σᵀ G τ for fixed signs, different for rows and columns so that Gᵀ gives another number, and ‖G‖²."""
    if grad is None or not local(grad).numel():
        return 0.0, 0.0
    grad = local(grad)
    grad = torch.view_as_real(grad.detach()) if grad.is_complex() else grad.detach()
    flat = grad.reshape(len(grad), -1) if grad.dim() else grad.reshape(1, 1)
    wide = torch.promote_types(flat.dtype, torch.float32)
    columns = _signs(flat.shape[1], 0.7548776662466927, flat)
    rows = _signs(flat.shape[0], 0.5698402909980532, flat).double()
    return float((flat @ columns).to(wide).double() @ rows), float(squared_norms([flat])[0])


def _signs(count: int, step: float, like: Tensor) -> Tensor:
    up = torch.arange(count, dtype=torch.float64).mul(step).frac().ge(0.5)
    return torch.where(up, 1.0, -1.0).to(like)
