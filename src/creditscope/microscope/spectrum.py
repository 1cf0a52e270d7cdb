"""Singular values of the matrix G (N rollouts × P parameters) of per-rollout gradients, and ranks by every definition.

σ_i² are the eigenvalues of K = G Gᵀ. No definition is called just "rank". numpy only: no torch.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from creditscope.errors import CreditscopeError
from creditscope.files.cells import cell

SHOWN = 8
"""Directions whose energy a notebook shows."""


@dataclass(frozen=True)
class Spectrum:
    """Singular values σ₁ ≥ σ₂ ≥ ... ≥ 0, full, and the floor below which they are rounding."""

    values: NDArray[np.float64]
    floor: float
    """Values at or below it are rounding of the Gram."""

    @property
    def effective_rank(self) -> float:
        """r_eff = (Σσ)² / Σσ², on singular values, as in arXiv:2606.29238."""
        return float(self._unitless.sum() ** 2 / self._energy)

    @property
    def entropy_rank(self) -> float:
        """exp H(p), p_i = σ_i / Σσ."""
        p = self.values[self.values > 0] / self.values.sum()
        return float(np.exp(-(p * np.log(p)).sum()))

    @property
    def participation_ratio(self) -> float:
        """(Σσ²)² / Σσ⁴."""
        return float(self._energy**2 / (self._unitless**4).sum())

    @property
    def stable_rank(self) -> float:
        """Σσ² / σ₁²."""
        return float(self._energy / self._unitless[0] ** 2)

    @property
    def top1(self) -> float:
        """σ₁² / Σσ², the share of energy in one direction."""
        return 1 / self.stable_rank

    @property
    def numerical_rank(self) -> int:
        """The number of values above the floor."""
        return int((self.values > self.floor).sum())

    def energy_rank(self, q: float) -> int:
        """The fewest directions that hold the share q of the energy Σσ²."""
        if not isinstance(q, SupportsFloat) or not 0 < q <= 1:
            raise CreditscopeError(f"energy_rank needs a share 0 < q ≤ 1, got {q}; for example 0.9")
        share = np.cumsum(self._unitless**2) / self._energy
        return int(np.searchsorted(share, q - 1e-12) + 1)

    def truncated(self, k: int) -> Spectrum:
        """The spectrum of a truncated SVD of k values. Its ranks are at most k, whatever the data."""
        if at_least(1, k, "truncated: k") > len(self.values):
            raise CreditscopeError(f"truncated needs 1 ≤ k ≤ {len(self.values)}, got {k}")
        return Spectrum(self.values[:k], self.floor)

    def _repr_html_(self) -> str:
        """Ranks, and the share of energy of each direction, for a notebook."""
        count = len(self.values)
        if not count or not self.values[0] > 0:
            return cell(f"Spectrum of {count} rollouts", {"σ": "all 0"})
        share = self._unitless**2 / self._energy
        more = ", …" if count > SHOWN else ""
        return cell(f"Spectrum of {count} rollouts: effective rank {self.effective_rank:.2f}", {
            "effective rank": f"{self.effective_rank:.3f} = (Σσ)²/Σσ²",
            "entropy rank": f"{self.entropy_rank:.3f} = exp H(σ/Σσ)",
            "participation ratio": f"{self.participation_ratio:.3f} = (Σσ²)²/Σσ⁴",
            "stable rank": f"{self.stable_rank:.3f} = Σσ²/σ₁²",
            "numerical rank": f"{self.numerical_rank} of {count} above the floor {self.floor:.2g}",
            "σ²/Σσ²": ", ".join(f"{part:.1%}" for part in share[:SHOWN]) + more})

    @property
    def _energy(self) -> float:
        return float((self._unitless**2).sum())

    @property
    def _unitless(self) -> NDArray[np.float64]:
        """The values divided by a power of two near σ₁: exact, and σ⁴ does not overflow."""
        return unitless(self.values)


def spectrum(gram: Any, eps: float = float(np.finfo(np.float64).eps)) -> Spectrum:
    """The spectrum of the rows whose Gram matrix is given, (N, N), as an array or a CPU tensor.

    `eps` is the relative precision of the Gram's entries: eigenvalues below N·eps·λ₁ are rounding, so the floor is
    σ₁·√(N·eps). Rows in bfloat16 give a Gram good to about 5e-4.

    >>> round(spectrum([[1.0, 0.0], [0.0, 1.0]]).effective_rank, 6)
    2.0
    """
    k, eps = square(gram, "spectrum"), precision(eps)
    scale = float(np.abs(k).max())
    if scale == 0:
        raise CreditscopeError("the Gram matrix is 0: no rollout has a gradient (every group may be unanimous), "
                               "so it has no spectrum")
    slack = max(eps, 1e-12) * 64 * len(k)
    if np.abs(k - k.T).max() > slack * scale:
        raise CreditscopeError(f"a Gram matrix is symmetric; this one differs from its transpose by "
                               f"{np.abs(k - k.T).max() / scale:.2g} of its largest entry")
    eigenvalues = np.linalg.eigvalsh((k + k.T) / 2)[::-1]
    if eigenvalues[-1] < -slack * eigenvalues[0]:
        raise CreditscopeError(f"a Gram matrix has no negative eigenvalue; this one has {eigenvalues[-1]:.3g} beside a "
                               f"largest of {eigenvalues[0]:.3g}. Exact and sketched blocks must not be mixed")
    values = np.sqrt(np.clip(eigenvalues, 0.0, None))
    return Spectrum(values, float(values[0] * np.sqrt(len(k) * eps)))


def unitless(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values divided by the power of two below the largest: exact."""
    return np.ldexp(values, 1 - int(np.frexp(np.abs(values).max())[1]))


def square(gram: Any, reader: str) -> NDArray[np.float64]:
    """A Gram matrix as float64; an error unless it is (N, N) and finite."""
    k = reals(gram, "a Gram matrix")
    if k.ndim != 2 or k.shape[0] != k.shape[1] or k.shape[0] == 0:
        raise CreditscopeError(f"{reader} needs a square Gram matrix (N, N), got shape {k.shape}")
    if not np.isfinite(k).all():
        i, j = np.argwhere(~np.isfinite(k))[0]
        raise CreditscopeError(f"the Gram matrix must be finite: entry ({i}, {j}) is {k[i, j]}")
    return k


def reals(values: Any, what: str) -> NDArray[np.float64]:
    """An array, a list or a tensor on the CPU as float64. Complex numbers and text are refused."""
    found = as_array(values, what)
    if found.dtype.kind not in "biuf":
        raise CreditscopeError(f"{what} must hold real numbers, got {found.dtype} from {type(values).__name__}; a "
                               f"complex array has a .real part")
    return found.astype(np.float64)


def as_array(values: Any, what: str) -> NDArray[Any]:
    """An array, a list or a tensor on the CPU as an array of any dtype, without loading torch."""
    try:
        return np.asarray(values.detach() if hasattr(values, "detach") else values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CreditscopeError(f"{what} must be an array of real numbers or a CPU tensor in float32 or float64, got "
                               f"{type(values).__name__}: {error}; convert it with .detach().cpu().double()") from None


def precision(eps: Any) -> float:
    if isinstance(eps, bool) or not isinstance(eps, SupportsFloat) or not 0 <= float(eps) < np.inf:
        raise CreditscopeError(f"eps is the relative precision of the Gram's entries, a finite number of at least 0, "
                               f"got {eps!r}; take scope.eps, or 1e-6 for float32")
    return float(eps)


def at_least(least: int, value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < least:
        raise CreditscopeError(f"{what} must be a whole number of at least {least}, got {value!r}")
    return operator.index(value)


def orthogonal_null(right: int, rollouts: int) -> float:
    """r_eff of orthogonal scores of equal norm under binary reward: 4k(R−k)/R for k right answers of R.

    Rows are A_i ψ_i with A = 1 − k/R for the k right and −k/R for the rest: Σ|A| = 2k(R−k)/R and Σ A² = k(R−k)/R.

    >>> orthogonal_null(4, 8), orthogonal_null(1, 8)
    (8.0, 3.5)
    """
    if not 0 < right < rollouts:
        raise CreditscopeError(f"the null needs a mixed group, 0 < k < R, got k = {right} of R = {rollouts}; a "
                               f"unanimous group has no gradient")
    return 4 * right * (rollouts - right) / rollouts
