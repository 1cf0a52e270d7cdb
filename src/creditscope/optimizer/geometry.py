"""The geometry of updates: direction, size relative to the weights, and the share of weights that they change."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from creditscope.errors import CreditscopeError
from creditscope.microscope.shards import local, parts
from creditscope.microscope.sketch import Sketcher
from creditscope.optimizer.families import bare
from creditscope.runs import schema

NAMES = (schema.UPDATE_COSINE, schema.UPDATE_RATIO, schema.UPDATE_ZERO, schema.UPDATE_ZERO_BF16)


class UpdateGeometry:
    """The update Δ of one step, from the parameters before and after it; `before`, step(), `after`, zero_grad().

        update/cosine      cos(Δ, −g): 1 for plain SGD
        update/ratio       ‖Δ‖/‖θ‖
        update/zero        share of coordinates with Δ = 0 exactly, in their stored precision
        update/zero_bf16   share with bf16(θ+Δ) = bf16(θ): lost if weights were kept in bfloat16

    With a `sketcher` the update is also sketched: `sketch`, (k²,).

    >>> theta = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> theta.grad = torch.tensor([1.0, 0.0])
    >>> geometry = UpdateGeometry([("theta", theta)])
    >>> geometry.before(); torch.optim.SGD([theta], lr=0.5).step(); geometry.after()
    {'update/cosine': 1.0, 'update/ratio': 0.1, 'update/zero': 0.5, 'update/zero_bf16': 0.5}
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], sketcher: Sketcher | None = None) -> None:
        self.sketch: Tensor | None = None
        self.layers: dict[str, dict[str, float]] = {}  # parameter name -> the same numbers for it alone
        self._parameters = dict(named_parameters)
        self._before: dict[str, Tensor] = {}
        self._sketcher = sketcher

    @torch.no_grad()
    def before(self) -> None:
        self._before = {name: p.clone() for name, p in self._parameters.items() if p.grad is not None and p.numel()}

    @torch.no_grad()
    def after(self) -> dict[str, float]:
        """The numbers over all parameters; one that does not exist, as the cosine of an update of 0, is absent."""
        if not self._before:
            raise CreditscopeError("no parameter was copied: call before() between backward() and step()")
        if self._sketcher is not None:
            self.sketch = self._sketcher.gradient((name, self._parameters[name] - was)
                                                  for name, was in self._before.items())
        sums = gather(self._sums(name, was) for name, was in self._before.items())
        counts = torch.tensor([self._parameters[name].numel() for name in self._before], dtype=torch.float64)
        self.layers = {name: _read(*each) for name, *each in zip(self._before, sums, counts, strict=True)}
        self._before = {}
        return _read(sums.sum(0), counts.sum())

    def _sums(self, name: str, was: Tensor) -> Tensor:
        """(6,): ‖Δ‖², ‖θ‖², ‖g‖², −⟨Δ, g⟩, and how many coordinates have Δ = 0 and bf16(θ+Δ) = bf16(θ)."""
        p = self._parameters[name]
        if p.grad is None:
            raise CreditscopeError(f"{name} has lost its gradient: call after() before zero_grad()")
        delta = p - was
        sums = [square(delta), square(was), square(p.grad), -(delta * p.grad).sum(dtype=torch.float64),
                (delta == 0).sum(), (p.bfloat16() == was.bfloat16()).sum()]
        return torch.stack([x.double() for x in sums])


def _read(sums: Tensor, count: Tensor) -> dict[str, float]:
    delta, theta, g, dot, zero, rounded = sums
    values = torch.stack([dot / (delta * g).sqrt(), (delta / theta).sqrt(), zero / count, rounded / count])
    return {name: value for name, value in zip(NAMES, values.tolist(), strict=True) if math.isfinite(value)}


ENTRIES = 4096
"""Of each parameter in a sample of the weights, at most."""


def some_entries(x: Tensor) -> Tensor:
    """At most ENTRIES entries of this rank's part of x, flat and evenly spaced: a view where x is contiguous."""
    flat = local(x.detach()).reshape(-1)
    return flat[::max(1, -(-flat.numel() // ENTRIES))]


class SampledUpdate:
    """`update/ratio` and `update/zero` of one step from a sample of each parameter: made before the step, read after.

        update/ratio = √(Σ_p n_p mean_S Δ² / ‖θ‖²)        update/zero = Σ_p n_p share_S(Δ = 0) / Σ_p n_p

    S are the sampled entries of parameter p, n_p is its size, and ‖θ‖ is over all weights. Parameters are compared as
    they are stored: an update that bfloat16 rounds away is 0. Of sharded parameters every rank reads its own part;
    `sums` of the ranks add up to those of the model.

    >>> theta = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> update = SampledUpdate([theta])
    >>> theta.data[0] -= 0.5
    >>> SampledUpdate.read(update.sums())
    {'update/ratio': 0.1, 'update/zero': 0.5}
    """

    @torch.no_grad()
    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._before = [(p, some_entries(p).clone(), square(local(p))) for p in parameters if local(p).numel()]

    @torch.no_grad()
    def sums(self, ranks: int = 1) -> Tensor:
        """(4,): Σ n mean Δ², ‖θ‖² before the step, Σ n share(Δ = 0), Σ n. A part that c of `ranks` hold counts 1/c."""
        rows = []
        for p, was, norm in self._before:
            now, n = some_entries(p), local(p).numel() * parts(p) / ranks
            delta = now.double() - was.double()
            rows.append(torch.stack([n * delta.square().mean(), norm * parts(p) / ranks,
                                     n * (now == was).double().mean(), torch.full_like(norm, n)]))
        return gather(rows).sum(0) if rows else torch.zeros(4, dtype=torch.float64)

    @staticmethod
    def read(sums: Tensor) -> dict[str, float]:
        moved, theta, zero, count = sums.tolist()
        if not count > 0:
            return {}
        ratio = {schema.UPDATE_RATIO: math.sqrt(moved / theta)} if theta > 0 and math.isfinite(moved) else {}
        return ratio | {schema.UPDATE_ZERO: zero / count}


@torch.no_grad()
def epsilon_factor(optimizer: torch.optim.Optimizer) -> float | None:
    """The median of √v̂/(√v̂ + ε), v̂ = v/(1 − β₂^t), after a step: the factor by which ε shortened that step of Adam.

    Over `some_entries` of each parameter on this rank, those with v̂ > 0: a weight that never had a gradient, as an
    embedding's row that no prompt used, does not move for another reason. With amsgrad v is its maximum. None for an
    optimiser that keeps no v, and before its first step. With equal steps the factor is the same for each weight:

    >>> theta = torch.nn.Parameter(torch.zeros(3)); theta.grad = torch.ones(3)
    >>> adam = torch.optim.Adam([theta], eps=1.0); adam.step()
    >>> round(epsilon_factor(adam), 6)
    0.5
    """
    inner = bare(optimizer)
    alike: dict[tuple[float, float, torch.device], list[Tensor]] = {}  # cat: few operations
    for group in inner.param_groups:
        for p in group["params"] if {"betas", "eps"} <= set(group) else ():
            state = inner.state.get(p, {})
            v, step = state.get("max_exp_avg_sq", state.get("exp_avg_sq")), float(state.get("step", 0))
            if p.grad is not None and step >= 1 and isinstance(v, Tensor) and v.shape == p.shape:
                rest = 1 - float(group["betas"][1])**step
                alike.setdefault((rest, float(group["eps"]), local(v).device), []).append(some_entries(v))
    found = []
    for (rest, eps, _), entries in alike.items():
        root = (torch.cat([x.float() for x in entries]) / rest).sqrt()
        root = root[root > 0]
        found.append(root / (root + eps))
    every = torch.cat([x.to(found[0].device) for x in found]) if found else torch.zeros(0)
    return float(every.median()) if len(every) else None


def trainable_share(model: nn.Module) -> float | None:
    """`update/trainable`: #(weights with requires_grad) / weights, shared weights once; None for a model without any.

    >>> trainable_share(nn.Linear(3, 1, bias=False))
    1.0
    """
    sizes = [(p.requires_grad, _size(p)) for p in model.parameters()]
    total = sum(size for _, size in sizes)
    return sum(size for trained, size in sizes if trained) / total if total else None


def reached_share(model: nn.Module) -> float | None:
    """`update/reached`: #(weights that are trained, or that a trained adapter adds to) / #(weights of no adapter).

    A layer with an adapter keeps its own weights in `base_layer`, as peft's layers do: W x + B A x changes all of W.
    """
    adapters: set[int] = set()
    reached = {id(p) for p in model.parameters() if p.requires_grad}
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module):
            own = {id(p) for p in base.parameters()}
            added = {id(p): p.requires_grad for p in module.parameters() if id(p) not in own}
            adapters |= added.keys()
            reached |= own if any(added.values()) else set()
    sizes = {id(p): _size(p) for p in model.parameters() if id(p) not in adapters}
    total = sum(sizes.values())
    return sum(size for each, size in sizes.items() if each in reached) / total if total else None


def _size(p: Tensor) -> int:
    """Weights of a parameter; bitsandbytes packs two of 4 bits into a byte, and bytes into its storage's type."""
    packed = 2 * p.element_size() if type(p).__name__ == "Params4bit" and getattr(p, "bnb_quantized", True) else 1
    return p.numel() * packed


def square(x: Tensor) -> Tensor:
    """‖x‖², summed in float64 without a float64 copy of x."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()


def gather(rows: Iterable[Tensor]) -> Tensor:
    """Rows from any devices, stacked on the CPU by one transfer."""
    rows = list(rows)
    return torch.stack([row.to(rows[0].device) for row in rows]).cpu()
