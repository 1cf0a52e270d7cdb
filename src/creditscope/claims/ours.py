"""Two claims of our own about the rank of arXiv:2606.29238 (P1.5): why it is low (C.1), and why it may read 2 (C.2). No
torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from creditscope.claims.evidence import Evidence, cells, rows_with
from creditscope.claims.reading import READ, by_size, estimate, ratio_over_runs, sweeps, with_outcome
from creditscope.claims.verdict import Band, ClaimVerdict, at_most, exact, missing, needing
from creditscope.microscope.spectrum import Spectrum, spectrum
from creditscope.runs.numbers import mean

LOW_RANK = math.log(1.1)
"""The mean gap from which on a rank is low: a tenth below what the credits allow."""
HALF = 0.5
"""The share of the gap that an explanation must cover: more than all others together."""


@needing(f"{READ}, with outcome credit")
def norm_concentration(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """C.1: the share of the gap from the credits' null to the measured rank that unequal norms explain, at each R.

        gap = log(w_null / r_eff)              w_null = (Σ|c|)²/Σc²: orthogonal scores of equal norm
        norms first: log(w_null / norm_null)   norm_null = (Σ‖g‖)²/Σ‖g‖²: orthogonal rows of the measured norms
        norms last:  log(equal_norm_rank / r_eff)   equal_norm_rank: the measured directions, rows of norm |c_i|

    Norms and alignment overlap, so there is one verdict for each of the two orders. Σ part / Σ gap over a run's groups.
    """
    for family in sweeps(with_outcome(runs), lambda run: len(_gaps(run, "all/norm_null"))):
        for column, words in ORDERS.items():
            for size, cell in cells(family, "group").items():
                yield _explained(cell, size, column, words)


ORDERS = {"all/norm_null": "norms first, alignment has the rest",
          "all/equal_norm_rank": "alignment first, norms have the rest"}


def _explained(cell: Sequence[Evidence], size: int, column: str, words: str) -> ClaimVerdict:
    definition = f"share of log(credit null / (Σσ)²/Σσ²) that unequal score norms explain, {words}, R = {size}"
    gaps = [_gaps(run, column) for run in cell]
    found = ratio_over_runs(gaps)
    every = [gap for rows in gaps for _, _, gap in rows]
    if not every:
        return missing(cell[0].subject, f"readings with the column {column}: creditscope papers check RUN --save makes "
                       "evidence with it", definition)
    times = math.exp(mean(every))
    if found is None or math.log(times) < LOW_RANK:
        return missing(cell[0].subject, f"a low rank to explain: the rank is {times:.2f} times below what the credits "
                       f"allow, not {math.exp(LOW_RANK):.1f}", definition)
    return estimate(definition, cell[0].subject, found, Band(low=HALF), f"unequal norms explain {found} "
                    f"of the gap, the rank being {times:.1f} times below what the credits allow")


def _gaps(run: Evidence, column: str) -> list[tuple[float, float, float]]:
    """(step, part, gap) of each group, the part by the order that the column stands for."""
    last = column == "all/equal_norm_rank"
    found = rows_with(run.groups, "step", "w_null", column, "all/effective_rank")
    return [(step, math.log(other / rank) if last else math.log(null / other), math.log(null / rank))
            for step, null, other, rank in found if min(null, other, rank) > 0.5]  # no rank is below 1


LEAST = 1.5
"""The smallest rank that rounds to 2. Cut to two values, no rank exceeds 2."""
MOST_TOP = (1 + math.sqrt(3) / 2) / 2
"""The top share f at which 1 + 2√(f(1−f)) = 1.5: f(1−f) = 1/16, f = (1 + √(3/4))/2 = 0.933."""
SHARE = 0.9
"""The share of groups that must read about 2 for "any data"."""
EXACT = 1e-7
"""Rounding of a singular value: √ of an eigenvalue's rounding, 1e-16, is 1e-8."""
BATTERY_SIZES = (4, 8, 16, 32, 64)


def battery(seed: int = 0, width: int = 256) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """(kind, rows) of unrelated matrices, from orthogonal rows to few clusters, R from 4 to 64."""
    random = np.random.default_rng(seed)
    for size in BATTERY_SIZES:
        plain = random.normal(size=(size, width))
        yield "random", plain
        yield "orthogonal", np.linalg.qr(plain.T)[0].T
        yield "rank three", random.normal(size=(size, 3)) @ random.normal(size=(3, width))
        yield "two clusters", random.normal(size=(2, width))[np.arange(size) % 2] + 0.3 * plain
        yield "unequal norms", random.lognormal(size=(size, 1)) * plain
        advantage = np.where(np.arange(size) < size // 4, 0.75, -0.25)[:, None]
        yield "a quarter right", advantage * plain


def cut_to_two(s: Spectrum) -> float:
    return s.truncated(2).effective_rank


def of_top_share(top: float) -> float:
    """(σ₁ + σ₂)² / (σ₁² + σ₂²) = 1 + 2√(f(1−f)), f = σ₁² / (σ₁² + σ₂²).

    >>> of_top_share(0.5), round(of_top_share(0.7), 3), of_top_share(1.0)
    (2.0, 1.917, 1.0)
    """
    return 1 + 2 * math.sqrt(top * (1 - top))


def truncated_two(cases: Iterator[tuple[str, NDArray[np.float64]]] | None = None,
                  printed: Callable[[Spectrum], float] = cut_to_two) -> list[ClaimVerdict]:
    """C.2, without a run: an SVD cut to two values prints 1 + 2√(f(1−f)), which is 1.5 to 2 up to f = 0.933."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for kind, rows in battery() if cases is None else cases:
        s = spectrum(rows @ rows.T)
        found.setdefault(kind, []).append((printed(s), s.truncated(2).top1, s.effective_rank))
    every = [case for some in found.values() for case in some]
    off = max(abs(cut - of_top_share(top)) for cut, top, _ in every)
    wrong = sum((cut >= LEAST) != (top <= MOST_TOP) for cut, top, _ in every)
    share = sum(cut >= LEAST for cut, _, _ in every) / len(every)
    cuts, full = [cut for cut, _, _ in every], [rank for _, _, rank in every]
    subject = f"matrices of {len(found)} kinds: {', '.join(found)}"
    n = len(every)
    return [
        at_most(EXACT, "(Σσ)²/Σσ² of the two largest σ less 1 + 2√(f(1−f)), f = σ₁²/(σ₁² + σ₂²)", subject, off,
                f"the largest of {n} differences is {off:.2g}", threshold="at most {:g}", n=n),
        at_most(0, f"cases on the wrong side: below {LEAST} with f ≤ {MOST_TOP:.3f}, or not below it with a larger f",
                subject, wrong, f"{wrong} of {n} cases leave [{LEAST}, 2] with a first direction of at most "
                f"{MOST_TOP:.1%} of the two, or stay in it with a larger one", threshold="none", n=n),
        exact(f"share of cases in which (Σσ)²/Σσ² of the two largest σ reads {LEAST} to 2", subject, share >= SHARE,
              share, f"{share:.0%} of the cases read {LEAST} to 2, all {min(cuts):.2f} to {max(cuts):.2f}, while the "
              f"full spectrum reads {min(full):.1f} to {max(full):.1f}; rank-one data would read 1",
              expected="1, rank-one data apart", threshold=f"at least {SHARE}", n=n),
    ]


@needing(f"{READ}, with outcome credit, at --group 4 or more")
def truncated_two_runs(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """C.2 on recorded groups of R ≥ 4: the share that reads 1.5 to 2 when the spectrum is cut to two values."""
    large = [run for run in with_outcome(runs) if run["group"] >= 4]
    for where, words in (("all", "all parameters"), ("layer", "mean over q_proj and v_proj")):
        column = f"{where}/effective_rank_truncated_2"
        for family in sweeps(large, lambda run, column=column: len(run.column(column))):  # type: ignore[misc]
            found = ratio_over_runs([[(step, float(cut >= LEAST), 1.0)
                                      for step, cut in rows_with(run.groups, "step", column)] for run in family])
            full = by_size(family, f"{where}/effective_rank")
            beside = f", while the full spectrum reads {full.listed(1)}" if full else ""
            if found is not None:
                yield estimate(
                    f"share of groups whose two largest σ give (Σσ)²/Σσ² of {LEAST} to 2, {words}", family[0].subject,
                    found, Band(low=SHARE), f"{found} of the groups read {LEAST} to 2 when cut to two values{beside}",
                    expected="1")
