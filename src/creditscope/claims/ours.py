"""Two claims of our own about the rank of arXiv:2606.29238 (P1.5): why it is low, and why it may read 2. No torch.

C.1: what lowers the rank of a group is that few rollouts hold most of the score norm, more than that scores are alike.
C.2: a spectrum cut to its two largest values reads about 2, whatever the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from creditscope.claims.evidence import Evidence, cells, mean, mean_of, rows_with
from creditscope.claims.reading import READ, estimate, ratio_over_runs, sweeps, with_outcome
from creditscope.claims.verdict import Band, Verdict, at_most, exact, missing, needing
from creditscope.microscope.spectrum import Spectrum, spectrum

LOW_RANK = math.log(1.1)
"""The mean gap from which on there is a low rank to explain: a tenth below what the credits allow."""
HALF = 0.5
"""The share of the gap that an explanation must cover: more than every other reason together."""


@needing(f"{READ}, with outcome credit")
def norm_concentration(runs: Sequence[Evidence]) -> Iterator[Verdict]:
    """C.1: the share of the gap from the credits' null to the measured rank that unequal norms explain, at each R.

        gap = log(w_null / r_eff)              w_null = (Σ|c|)²/Σc²: orthogonal scores of equal norm
        norms first: log(w_null / norm_null)   norm_null = (Σ‖g‖)²/Σ‖g‖²: orthogonal rows of the measured norms
        norms last:  log(equal_norm_rank / r_eff)   equal_norm_rank: the measured directions, rows of norm |c_i|

    Norms and alignment overlap: an answer that holds most of the norm leaves little for directions to do, and the other
    way round. So there are two orders, and a verdict for each. Σ part / Σ gap over a run's groups.
    """
    for family in sweeps(with_outcome(runs), lambda run: len(_gaps(run, "all/norm_null"))):
        for column, words in ORDERS.items():
            for size, cell in cells(family, "group").items():
                yield _explained(cell, size, column, words)


ORDERS = {"all/norm_null": "norms first, alignment has the rest",
          "all/equal_norm_rank": "alignment first, norms have the rest"}


def _explained(cell: Sequence[Evidence], size: int, column: str, words: str) -> Verdict:
    definition = f"share of log(credit null / (Σσ)²/Σσ²) that unequal score norms explain, {words}, R = {size}"
    gaps = [_gaps(run, column) for run in cell]
    found = ratio_over_runs(gaps)
    every = [gap for rows in gaps for _, _, gap in rows]
    if not every:
        return missing(cell[0].subject, f"readings with the column {column}: creditscope check RUN --save makes "
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
"""What still rounds to 2. Cut to two values, no rank exceeds 2, so there is no upper end to choose."""
MOST_TOP = (1 + math.sqrt(3) / 2) / 2
"""The top share f at which 1 + 2√(f(1−f)) = 1.5: f(1−f) = 1/16, f = (1 + √(3/4))/2 = 0.933."""
SHARE = 0.9
"""The share of groups that must read about 2 for "any data"."""
EXACT = 1e-7
"""Two ways to the same number agree to this: √ of an eigenvalue's rounding, 1e-16, is 1e-8."""
BATTERY_SIZES = (4, 8, 16, 32, 64)


def battery(seed: int = 0, width: int = 256) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """(kind, rows) of data that have nothing in common: from orthogonal rows to few clusters, R from 4 to 64."""
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
    """r_eff as an SVD truncated to two values prints it."""
    return s.truncated(2).effective_rank


def of_top_share(top: float) -> float:
    """(σ₁ + σ₂)² / (σ₁² + σ₂²) = 1 + 2√(f(1−f)), f = σ₁² / (σ₁² + σ₂²): the data enter by one number.

    >>> of_top_share(0.5), round(of_top_share(0.7), 3), of_top_share(1.0)
    (2.0, 1.917, 1.0)
    """
    return 1 + 2 * math.sqrt(top * (1 - top))


def truncated_two(cases: Iterator[tuple[str, NDArray[np.float64]]] | None = None,
                  printed: Callable[[Spectrum], float] = cut_to_two) -> list[Verdict]:
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
def truncated_two_runs(runs: Sequence[Evidence]) -> Iterator[Verdict]:
    """C.2 on recorded groups of R ≥ 4: the share that reads 1.5 to 2 when the spectrum is cut to two values."""
    large = [run for run in with_outcome(runs) if run["group"] >= 4]
    yield from _reads_two(large, "all", "all parameters")
    yield from _reads_two(large, "layer", "mean over q_proj and v_proj")


def _reads_two(runs: Sequence[Evidence], where: str, words: str) -> Iterator[Verdict]:
    column = f"{where}/effective_rank_truncated_2"
    for family in sweeps(runs, lambda run: len(run.column(column))):
        found = ratio_over_runs([[(step, float(cut >= LEAST), 1.0)
                                  for step, cut in rows_with(run.groups, "step", column)] for run in family])
        if found is not None:
            yield estimate(
                f"share of groups whose two largest σ give (Σσ)²/Σσ² of {LEAST} to 2, {words}", family[0].subject,
                found, Band(low=SHARE), f"{found} of the groups read {LEAST} to 2 when cut to two values"
                f"{_while(cells(family, 'group'), where)}", expected="1")


def _while(sizes: Mapping[int, Sequence[Evidence]], where: str) -> str:
    """What the full spectrum reads on the same groups, by R."""
    full = {size: found.value.mean for size, cell in sizes.items()
            if (found := mean_of(cell, f"{where}/effective_rank")) is not None}
    return f", while the full spectrum reads {', '.join(f'{rank:.1f}' for rank in full.values())} at R = " \
           f"{', '.join(map(str, full))}" if full else ""
