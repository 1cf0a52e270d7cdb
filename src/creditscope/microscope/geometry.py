"""Readings of the Gram K_ij = ⟨g_i, g_j⟩ of per-rollout rows besides its spectrum, and the nulls to compare with.

A row is g_i = c_i ψ_i, with c_i the w of rollout i's tokens and ψ_i = Σ_t ∇ log π(y_it) its score, so K = diag(c) S
diag(c) with S_ij = ⟨ψ_i, ψ_j⟩, where all tokens of a rollout have one w (arXiv:2606.29238, Theorem 3.1). A row of zeros
counts in N. A reading that cannot be taken is None, never 0. numpy only: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditscope.errors import CreditscopeError
from creditscope.microscope.spectrum import (
    Spectrum,
    as_array,
    at_least,
    orthogonal_null,
    precision,
    reals,
    spectrum,
    square,
    unitless,
)
from creditscope.runs import schema

Array = NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)


def live(w: Any) -> NDArray[np.bool_]:
    """(N,) True where c_i ≠ 0: the rows whose score can be computed from their gradient."""
    return np.not_equal(_vector(w, "w"), 0)


def weighted(scores_gram: Any, w: Any) -> Array:
    """K_ij = c_i c_j S_ij, the Gram of the rows c_i ψ_i.

    >>> weighted([[1.0, 1.0], [1.0, 4.0]], [2.0, -1.0]).tolist()
    [[4.0, -2.0], [-2.0, 4.0]]
    """
    s = _square(scores_gram)
    c = _vector(w, "w", len(s))
    return s * np.outer(c, c)


def unweighted(gram: Any, w: Any) -> Array:
    """S_ij = K_ij / (c_i c_j), the Gram of the scores ψ_i; an error where c_i = 0."""
    k = _square(gram)
    c = _vector(w, "w", len(k))
    dead = np.flatnonzero(~live(c))
    if len(dead):
        raise CreditscopeError(f"rows {_few(dead)} have w = 0, so their gradient is 0 and their score cannot be "
                               f"read back from it; pass only the rows where live(w) holds, or measure the scores "
                               f"in a pass of their own")
    return k / np.outer(c, c)


def centred(scores_gram: Any, w: Any) -> Array:
    """diag(A) C S C diag(A) with C = I − 11ᵀ/R: the Gram of A_i(ψ_i − ψ̄) in a group of R rows, of rank at most R − 1.

    ψ̄ is the mean over all rows of the group, those with A = 0 too. Zero-sum advantages do not centre the scores: the
    rows A_i ψ_i are independent whenever the scores are (P1.5, doubt 1).

    >>> centred([[1.0, 0.0], [0.0, 1.0]], [1.0, -1.0]).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    s = _square(scores_gram)
    centring = np.eye(len(s)) - 1 / len(s)
    return weighted(centring @ s @ centring, w)


def pooled(gram: Any, group: Any) -> Array:
    """(P, P) the Gram of the group sums Σ_{i ∈ g} g_i, groups in ascending order of their ids.

    Rollouts that share a baseline are not independent (P1.2), but groups are: sampling noise is counted in groups.
    """
    k = _square(gram)
    ids = _groups(group, len(k))
    member = (np.unique(ids)[:, None] == ids[None, :]).astype(np.float64)
    return np.asarray(member @ k @ member.T, dtype=np.float64)


def by_group(gram: Any, group: Any) -> Iterator[tuple[int, Array]]:
    """(group id, its block of the Gram) in ascending order of the ids."""
    k = _square(gram)
    for name, rows in rows_by_group(_groups(group, len(k))):
        yield name, k[np.ix_(rows, rows)]


def cancellation(gram: Any) -> float | None:
    """‖Σ g_i‖² / Σ‖g_i‖²: 0 when the rows sum to 0, 1 when they are orthogonal, N when identical; None if all are 0.

    >>> [cancellation([[1.0, cosine], [cosine, 1.0]]) for cosine in (-1.0, 0.0, 1.0)]
    [0.0, 1.0, 2.0]
    """
    k = _square(gram)
    energy = float(np.trace(k))
    # A sum of squares cannot be negative; rounding of a sum that cancels can.
    return max(float(k.sum()), 0.0) / energy if energy > 0 else None


def conflict(gram: Any, eps: float = EPS) -> float | None:
    """The share of pairs i < j with cos(g_i, g_j) < 0; rows of norm 0 are left out, None with fewer than two others.

    A cosine within the Gram's own precision of 0 is no conflict: `eps` as in `spectrum`, 1e-12 at the least.

    >>> conflict([[1.0, -0.5, 0.2], [-0.5, 1.0, 0.0], [0.2, 0.0, 1.0]])
    0.3333333333333333
    """
    k, eps = _square(gram), precision(eps)
    norm = np.sqrt(np.clip(np.diag(k), 0.0, None))
    rows = np.flatnonzero(norm > 0)
    if len(rows) < 2:
        return None
    cosine = k[np.ix_(rows, rows)] / norm[rows, None] / norm[None, rows]
    return float((cosine[np.triu_indices(len(rows), 1)] < -max(eps, 1e-12)).mean())


def noise_scale(gram: Any) -> float | None:
    """B = tr Σ / ‖G‖², the batch size at which sampling noise equals signal: B_simple of arXiv:1812.06162.

        ‖G‖² = N² mean_{i≠j} K_ij        tr Σ = N² mean_i K_ii − ‖G‖²

    Both are unbiased: a sample's own gradient is G_i = N g_i, with mean G and covariance Σ; independent samples have
    E⟨G_i, G_j⟩ = ‖G‖², E‖G_i‖² = ‖G‖² + tr Σ. B is counted in rows. None where the estimate of ‖G‖² is not positive.
    Rollouts of one prompt are not independent: with several groups, pass `pooled`.

    >>> noise_scale([[5.0, 1.0], [1.0, 3.0]])
    3.0
    """
    k = _square(gram)
    n = len(k)
    if n < 2:
        return None
    diagonal = float(np.trace(k)) / n
    signal = float(k.sum() - np.trace(k)) / (n * (n - 1))
    # Below rounding of the sums a positive estimate is an accident.
    return (diagonal - signal) / signal if signal > n * EPS * diagonal else None


def between(whole: float, squares: Any) -> float | None:
    """(‖Σ_a G_a‖² − Σ_a‖G_a‖²) / ((P−1)·Σ_a‖G_a‖²) = mean_{a≠b}⟨G_a, G_b⟩ / mean_a‖G_a‖² of the sums G_a of P groups.

    `whole` is ‖Σ_a G_a‖² and `squares` (P,) are ‖G_a‖², so that no entry between groups is needed. 0 in expectation
    where groups are noise, 1 where all are equal, −1/(P−1) where they sum to 0; None with fewer than two groups.

    >>> between(4.0, [1.0, 1.0]), between(2.0, [1.0, 1.0]), between(0.0, [1.0, 1.0]), between(1.0, [1.0])
    (1.0, 0.0, -1.0, None)
    """
    return pooled_between([(whole, squares)])


def pooled_between(updates: Iterable[tuple[float, Any]]) -> float | None:
    """`between` over the groups of several updates, each a pair (‖Σ_a G_a‖², (P,) ‖G_a‖²): sums of both sides.

    >>> pooled_between([(4.0, [1.0, 1.0]), (2.0, [1.0, 1.0])])
    0.5
    """
    above = below = 0.0
    for whole, squares in updates:
        x = reals(squares, "squares")
        if len(x) > 1:
            above, below = above + float(whole) - float(x.sum()), below + (len(x) - 1) * float(x.sum())
    return above / below if below > 0 else None


def group_squares(gram: Any, group: Any) -> dict[int, float]:
    """‖G_a‖² = Σ_{i,j∈a} K_ij of each live group; one is live when its block is not 0."""
    # A sum of squares cannot be negative; rounding of a sum that cancels can.
    return {name: max(float(block.sum()), 0.0) for name, block in by_group(gram, group) if block.any()}


def norm_null(gram: Any) -> float | None:
    """r_eff of orthogonal rows that have the measured norms: (Σ‖g_i‖)² / Σ‖g_i‖²; None where every row is 0.

    The measured r_eff is at most this (the diagonal of K is majorised by its eigenvalues). Unequal score norms explain
    the difference from `w_null`, alignment of the scores the difference from the measured r_eff.

    >>> norm_null([[9.0, 3.0], [3.0, 1.0]])
    1.6
    """
    return _number(np.sqrt(np.clip(np.diag(_square(gram)), 0.0, None)))


def w_null(w: Any) -> float | None:
    """r_eff of orthogonal scores of equal norm under these w: (Σ|c|)² / Σc²; None where every w is 0.

    For A = r − mean(r) with k right answers of R it is `orthogonal_null`, 4k(R−k)/R.

    >>> w_null([0.75, -0.25, -0.25, -0.25])
    3.0
    """
    return _number(np.abs(_vector(w, "w")))


@dataclass(frozen=True)
class Concentration:
    """How the energy x_i = ‖·‖² is spread over N items."""

    top1: float
    """max x / Σx."""
    top10: float
    """The share of Σx held by the largest tenth of the items (N // 10 of them, one at the least)."""
    effective_number: float
    """(Σx)² / Σx²."""


def concentration(norms: Any) -> Concentration | None:
    """How few of the norms hold Σ‖·‖², over rollouts or tokens; None where all of them are 0.

    >>> concentration([2.0, 1.0, 1.0, 0.0])
    Concentration(top1=0.6666666666666666, top10=0.6666666666666666, effective_number=2.0)
    """
    x = _vector(norms, "norms")
    if (x < 0).any():
        raise CreditscopeError(f"a norm is not negative, item {int(np.argmin(x))} is {x.min()}; pass norms, not their "
                               f"logarithms")
    if not x.any():
        return None
    x = np.sort((x / x.max()) ** 2)[::-1]
    return Concentration(float(x[0] / x.sum()), float(x[: max(1, len(x) // 10)].sum() / x.sum()),
                         float(x.sum() ** 2 / (x * x).sum()))


@dataclass(frozen=True)
class Baseline:
    """The mean reward of one group beside the baseline that minimises V(b) = Σ_i (r_i − b)²‖ψ_i‖²."""

    group: int
    mean: float
    optimal: float
    """b* = E[r‖ψ‖²] / E[‖ψ‖²] = mean + Cov(‖ψ‖², r) / E‖ψ‖²."""
    variance_optimal: float
    """V(b*)."""
    excess: float
    """V(mean) − V(b*) = (mean − b*)² Σ‖ψ‖² ≥ 0. In a sample it is never negative: compare it with `by_chance`."""
    by_chance: float
    """R·Var(‖ψ‖²)·Var(r) / ((R−1)·E‖ψ‖²): the mean of `excess` over all permutations of the group's norms."""


def optimal_baseline(scores_gram_diag: Any, reward: Any, group: Any = None) -> list[Baseline]:
    """b* and the mean for each group with a score and two different rewards, from ‖ψ_i‖² (N,) and r_i (N,); P1.11.

    The estimator (r − b)ψ has the same mean for every b, since E[ψ] = 0, and the trace of its covariance is V(b) less a
    constant.

    >>> [(b.mean, b.optimal, b.excess) for b in optimal_baseline([3.0, 1.0], [1.0, 0.0])]
    [(0.5, 0.75, 0.25)]
    """
    x = _vector(scores_gram_diag, "scores_gram_diag")
    if (x < 0).any():
        raise CreditscopeError(f"‖ψ‖² is not negative: row {int(np.argmin(x))} has {x.min()}; pass the diagonal of the "
                               f"scores' Gram")
    r = _vector(reward, "reward", len(x))
    found = []
    for name, rows in rows_by_group(_groups(group, len(x))):
        norm, value = x[rows], r[rows]
        if norm.sum() == 0 or np.ptp(value) == 0:
            continue
        mean, best = float(value.mean()), float((value * norm).sum() / norm.sum())
        chance = len(rows) * norm.var() * value.var() / ((len(rows) - 1) * norm.mean())
        least, excess = float(((value - best) ** 2 * norm).sum()), float((mean - best) ** 2 * norm.sum())
        found.append(Baseline(name, mean, best, least, excess, float(chance)))
    return found


def permutation_null(scores_gram: Any, w: Any, draws: int = 100, seed: int = 0, eps: float = EPS) -> dict[str, Array]:
    """The draws of every rank, cancellation and conflict of a group's rows c_i ψ_i when its w is shuffled.

    A spectrum depends on |c| alone, for signs are an orthogonal matrix: diag(±1) K diag(±1). So at k = R/2 right ones
    all |A| are equal and the null of the ranks is one point; elsewhere it has at most C(R, k) values. Cancellation and
    conflict depend on the signs: their null tests whether right answers have other directions than wrong ones. A draw
    in which a reading does not exist is left out of it.
    """
    s = _square(scores_gram)
    c = _vector(w, "w", len(s))
    random = np.random.default_rng(at_least(0, seed, "permutation_null: seed"))
    observed = _readings(weighted(s, c), eps)
    if not observed:
        raise CreditscopeError("every row c_i ψ_i is 0 (every group may be unanimous), so there is nothing to shuffle")
    found = [_readings(weighted(s, random.permutation(c)), eps) for _ in range(at_least(1, draws, "draws"))]
    values = {name: [one[name] for one in found if name in one] for name in observed}
    return {name: np.array(kept) for name, kept in values.items() if kept}


def _readings(gram: Array, eps: float) -> dict[str, float]:
    if not gram.any():
        return {}
    out = ranks(spectrum(gram, eps))
    for name, value in (("cancellation", cancellation(gram)), ("conflict", conflict(gram, eps))):
        if value is not None:
            out[name] = value
    return out


RANKS: dict[str, Callable[[Spectrum], float]] = {
    "effective_rank": lambda s: s.effective_rank,
    "entropy_rank": lambda s: s.entropy_rank,
    "participation_ratio": lambda s: s.participation_ratio,
    "stable_rank": lambda s: s.stable_rank,
    "energy_rank_90": lambda s: s.energy_rank(0.9),
    "energy_rank_99": lambda s: s.energy_rank(0.99),
    "numerical_rank": lambda s: s.numerical_rank,
    "top1": lambda s: s.top1,
}


def ranks(s: Spectrum) -> dict[str, float]:
    """Every rank of a spectrum by name, and r_eff of an SVD truncated to two values."""
    out = {name: float(rank(s)) for name, rank in RANKS.items()}
    if len(s.values) >= 2:
        out["effective_rank_truncated_2"] = s.truncated(2).effective_rank
    return out


def summary(gram: Any, w: Any = None, group: Any = None, right: Any = None, eps: float = EPS) -> dict[str, float]:
    """`gram/…` of the batch and `gram/group/…`, the means over its live groups; what does not exist is absent.

    `w` (N,) adds the null of w and, for groups without a w of 0, the centred rank. `right` (N,) of bool, for binary
    rewards, adds the orthogonal null 4k(R−k)/R of A = r − mean(r); over a batch the nulls of its groups add, since
    Σ|A| = 2ΣA² in each. A group is live when its block is not 0. A mean is over the groups that have the reading.

    >>> summary([[1.0, 0.0], [0.0, 1.0]])["gram/effective_rank"]
    2.0
    """
    k = _square(gram)
    c = None if w is None else _vector(w, "w", len(k))
    verdict = None if right is None else _verdicts(right, len(k))
    out = {f"gram/{name}": value for name, value in _one(k, c, eps).items()}
    blocks: list[dict[str, float]] = []
    nulls: list[float] = []
    for _, rows in rows_by_group(_groups(group, len(k))):
        block = k[np.ix_(rows, rows)]
        if not block.any():
            continue
        found = _one(block, None if c is None else c[rows], eps)
        # The noise of one group's few, coupled rows would be read only where it happens to come out positive.
        found.pop("noise_scale", None)
        if c is not None and (rank := centred_rank(block, c[rows], eps)) is not None:
            found["centred_effective_rank"] = rank
        if verdict is not None and 0 < verdict[rows].sum() < len(rows):
            nulls.append(orthogonal_null(int(verdict[rows].sum()), len(rows)))
            found["orthogonal_null"] = nulls[-1]
        blocks.append(found)
    if nulls:
        out[schema.GRAM_ORTHOGONAL_NULL] = float(sum(nulls))
    if group is not None:
        out[schema.GRAM_LIVE_GROUPS] = float(len(blocks))
        across = noise_scale(pooled(k, group))
        if across is not None:
            out[schema.GRAM_NOISE_SCALE_GROUPS] = across
        agree = between(float(k.sum()), list(group_squares(k, group).values()))
        if agree is not None:
            out[schema.GRAM_BETWEEN] = agree
        for name in sorted({name for found in blocks for name in found}):
            out[f"gram/group/{name}"] = float(np.mean([found[name] for found in blocks if name in found]))
    elif blocks and "centred_effective_rank" in blocks[0]:
        out[schema.GRAM_CENTRED_EFFECTIVE_RANK] = blocks[0]["centred_effective_rank"]
    return out


def _one(gram: Array, w: Array | None, eps: float) -> dict[str, float]:
    if not gram.any():
        return {}
    norms = concentration(np.sqrt(np.clip(np.diag(gram), 0.0, None)))
    readings = {
        **_readings(gram, eps), "noise_scale": noise_scale(gram), "norm_null": norm_null(gram),
        "w_null": None if w is None else w_null(w),
        "norm_top1": None if norms is None else norms.top1,
        "norm_effective_number": None if norms is None else norms.effective_number,
    }
    return {name: value for name, value in readings.items() if value is not None}


def centred_rank(gram: Any, w: Any, eps: float = EPS, scores: Any = None) -> float | None:
    """r_eff of A_i(ψ_i − ψ̄) in one group, from the Gram of A_i ψ_i or, where it was read, of ψ_i (`scores`).

    None where a score is lost (A = 0 and no scores), or where centring leaves nothing but rounding.
    """
    c, eps = _vector(w, "w"), precision(eps)
    if scores is None:
        if not live(c).all():
            return None
        scores = unweighted(gram, c)
    rows = centred(scores, c)
    # An entry of the scores is off by eps of the largest; after the subtraction that is a larger share of what is left.
    before, after = np.abs(scores).max() * (c**2).max(), np.abs(rows).max()
    if after <= len(rows) * max(eps, EPS) * before:
        return None
    return spectrum(rows, max(eps, EPS) * before / after).effective_rank


def _square(gram: Any) -> Array:
    return square(gram, "the geometry")


def _vector(values: Any, name: str, rows: int | None = None) -> Array:
    x = reals(values, name)
    if x.ndim != 1 or len(x) == 0 or (rows is not None and len(x) != rows):
        wanted = "(N,)" if rows is None else f"(N,) = ({rows},), one value per row of the Gram"
        raise CreditscopeError(f"{name} must be {wanted}, got shape {x.shape}")
    if not np.isfinite(x).all():
        i = int(np.argmin(np.isfinite(x)))
        raise CreditscopeError(f"{name} must be finite: row {i} is {x[i]}")
    return x


def _groups(group: Any, rows: int) -> NDArray[np.int64]:
    if group is None:
        return np.zeros(rows, dtype=np.int64)
    ids = as_array(group, "group")
    if ids.shape != (rows,) or not np.issubdtype(ids.dtype, np.integer):
        raise CreditscopeError(f"group must be (N,) = ({rows},) integers, one id per row of the Gram, got shape "
                               f"{ids.shape} of {ids.dtype}")
    return ids.astype(np.int64)


def _verdicts(right: Any, rows: int) -> NDArray[np.bool_]:
    x = as_array(right, "right")
    if x.shape != (rows,) or x.dtype.kind not in "biuf" or not np.isin(x, (0, 1)).all():
        raise CreditscopeError(f"right must be (N,) = ({rows},) of True and False (binary rewards), got shape "
                               f"{x.shape} with values {_few(x.reshape(-1))}; leave it out when rewards are graded")
    return x.astype(bool)


def rows_by_group(ids: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """(group id, its row numbers) in ascending order of the ids."""
    for name in np.unique(ids):
        yield int(name), np.flatnonzero(ids == name)


def _number(x: Array) -> float | None:
    """(Σx)² / Σx²."""
    if not x.any():
        return None
    x = unitless(x)
    return float(x.sum() ** 2 / (x * x).sum())


def _few(items: NDArray[Any]) -> str:
    shown = ", ".join(str(item) for item in items[:8].tolist())
    return shown + (f" and {len(items) - 8} more" if len(items) > 8 else "")
