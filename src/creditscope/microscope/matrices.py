"""The spectrum of ONE layer's gradient matrix (d_out × d_in), summed over the batch.

It differs from the rollout matrix (R × d) of `spectrum`: identical rollouts have a rollout matrix of rank 1 and a layer
gradient of any rank; one token has a layer gradient δ aᵀ of rank 1 in every layer. Small layers get a full SVD, large
ones their k leading values by a randomised SVD, and bounds for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from creditscope.errors import CreditscopeError
from creditscope.microscope.spectrum import Spectrum, at_least

# Float64 copies are made of so many entries at a time (32 MB), never of a whole vocabulary-sized gradient.
CHUNK = 1 << 22
# Extra columns and power iterations, for flat spectra (arXiv:0909.4061).
OVERSAMPLE, PASSES = 10, 4


class Bounds(NamedTuple):
    """A reading lies between them; equal when the whole spectrum is known."""

    low: float
    high: float


@dataclass(frozen=True, eq=False)
class LayerSpectrum:
    """The leading singular values of a layer's gradient, from below, and its whole energy, exactly.

    The values s come from a projection of the smaller side, so s_i ≤ σ_i. Both ranks are Schur-concave in σ²: the true
    ones lie between two extreme spectra: all of the missing energy ρ = Σσ² − Σs² on the first value, and ρ spread
    evenly over the min(shape) − k values that were not computed. Nothing is assumed about convergence.
    """

    shape: tuple[int, int]
    values: NDArray[np.float64]
    """s₁ ≥ s₂ ≥ ... ≥ s_k."""
    energy: float
    """‖·‖_F² = Σσ² over all min(shape) values."""

    @property
    def full(self) -> bool:
        """Whether every singular value is here; then low = high everywhere."""
        return len(self.values) == min(self.shape)

    @property
    def effective_rank(self) -> Bounds:
        """(Σσ)² / Σσ²."""
        return self._between(lambda s: s.effective_rank)

    @property
    def stable_rank(self) -> Bounds:
        """Σσ² / σ₁²."""
        return self._between(lambda s: s.stable_rank)

    def _between(self, reading: Callable[[Spectrum], float]) -> Bounds:
        return Bounds(reading(self._concentrated), reading(self._spread))

    @property
    def _missed(self) -> float:
        return 0.0 if self.full else max(self.energy - float((self.values**2).sum()), 0.0)

    @property
    def _concentrated(self) -> Spectrum:
        """Majorises the truth: σ_i ≥ s_i, so Σ_{i≤j} σ_i² ≤ Σσ² − Σ_{j<i≤k} s_i²."""
        squares = self.values**2
        squares[0] += self._missed
        return Spectrum(np.sqrt(squares), 0.0)

    @property
    def _spread(self) -> Spectrum:
        """Majorised by the truth: a block diagonal is majorised by the whole, and equal values by any others."""
        rest = min(self.shape) - len(self.values)
        squares = np.concatenate([self.values**2, np.full(rest, self._missed / max(rest, 1))])
        return Spectrum(np.sort(np.sqrt(squares))[::-1], 0.0)


def layer_spectrum(grad: Tensor, k: int = 32, seed: int = 0, exact_to: int = 256) -> LayerSpectrum:
    """The k leading singular values of one gradient matrix, or all of them when its smaller side is at most `exact_to`.

    The same seed gives the same values; torch's global random state is not touched (`torch.svd_lowrank` takes no
    generator). The arithmetic is float64.

    >>> layer_spectrum(torch.diag(torch.tensor([3.0, 1.0]))).effective_rank
    Bounds(low=1.6, high=1.6)
    """
    _check(grad, k)
    a = grad.detach() if grad.shape[0] >= grad.shape[1] else grad.detach().T
    shape = (int(grad.shape[0]), int(grad.shape[1]))
    energy = sum(float(rows.square().sum()) for _, rows in _rows(a))
    if energy == 0:
        raise CreditscopeError(f"the gradient {shape} is 0, so it has no spectrum: every group may be unanimous, or "
                               f"the layer out of the graph")
    exact = min(shape) <= max(exact_to, k)
    values = torch.linalg.svdvals(a.double()) if exact else _leading(a, k, seed)
    return LayerSpectrum(shape, values.cpu().numpy().astype(np.float64), energy)


def model_spectra(named: Iterable[tuple[str, nn.Parameter]], k: int = 32, seed: int = 0) -> dict[str, LayerSpectrum]:
    """`layer_spectrum` of each matrix whose gradient is not 0, after `backward` and before `zero_grad`."""
    grads = {name: p.grad for name, p in named}
    return {name: layer_spectrum(g, k, seed) for name, g in grads.items()
            if g is not None and g.dim() == 2 and bool(g.any())}


def _leading(a: Tensor, k: int, seed: int) -> Tensor:
    """svdvals(A V), V a basis of (AᵀA)^q Ω for a Gaussian Ω; A is no wider than high, so V is on its smaller side."""
    columns = min(k + OVERSAMPLE, a.shape[1])
    # Drawn on the CPU: the same Ω on every device.
    omega = torch.randn(a.shape[1], columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    v = torch.linalg.qr(omega.to(a.device)).Q
    for _ in range(PASSES):
        v = torch.linalg.qr(_transposed_times(a, _times(a, v))).Q
    values: Tensor = torch.linalg.svdvals(_times(a, v))
    return values[:k]


def _times(a: Tensor, v: Tensor) -> Tensor:
    return torch.cat([rows @ v for _, rows in _rows(a)])


def _transposed_times(a: Tensor, u: Tensor) -> Tensor:
    out = torch.zeros(a.shape[1], u.shape[1], dtype=torch.float64, device=a.device)
    for start, rows in _rows(a):
        out += rows.T @ u[start : start + len(rows)]
    return out


def _rows(a: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first row, float64 rows) in chunks."""
    step = max(1, CHUNK // a.shape[1])
    for start in range(0, a.shape[0], step):
        yield start, a[start : start + step].double()


def _check(grad: Tensor, k: int) -> None:
    if not isinstance(grad, Tensor) or not grad.is_floating_point():
        raise CreditscopeError(f"layer_spectrum needs a gradient, a real tensor, got "
                               f"{grad.dtype if isinstance(grad, Tensor) else type(grad).__name__}")
    if grad.dim() != 2 or 0 in grad.shape:
        raise CreditscopeError(f"layer_spectrum needs one gradient matrix (d_out, d_in), got shape "
                               f"{tuple(grad.shape)}; a vector has no spectrum, and of a stack each matrix has its own")
    at_least(1, k, "layer_spectrum: k")
    if not bool(torch.isfinite(grad).all()):
        raise CreditscopeError(f"the gradient must be finite: {int((~torch.isfinite(grad)).sum())} of {grad.numel()} "
                               f"entries are not")
