"""The geometry of updates: direction, size relative to the weights, and the share of weights that they change."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError
from creditscope.microscope.sketch import Sketcher
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


def square(x: Tensor) -> Tensor:
    """‖x‖², summed in float64 without a float64 copy of x."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()


def gather(rows: Iterable[Tensor]) -> Tensor:
    """Rows from any devices, stacked on the CPU by one transfer."""
    rows = list(rows)
    return torch.stack([row.to(rows[0].device) for row in rows]).cpu()
