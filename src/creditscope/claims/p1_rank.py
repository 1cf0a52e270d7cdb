"""Claims of arXiv:2606.29238 (P1) about the rank of a group's rollout matrix, on runs: about 2 whatever R (P1.5), the
top share (P1.6), under other credit (P1.12), with the spread of rewards (P1.13). No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from creditscope.claims.evidence import Evidence, cells, mean_of, rows_with
from creditscope.claims.reading import READ, SEEDS, by_size, estimate, mean_over, ratio_over_runs, sweeps, with_outcome
from creditscope.claims.verdict import POSITIVE, Band, ClaimVerdict, Outcome, all_of, missing, needing
from creditscope.runs.numbers import mean

ABOUT_TWO = Band(1.5, 2.5)
"""The values that round to 2. P1 prints "≈ 2" and bars of about that height."""
SIZES = 2
"""Group sizes of four or more that "whatever R" needs. At R = 2 no rank exceeds 2."""
FLAT = math.log(2.5 / 1.5) / math.log(32 / 2)
"""The largest slope of log rank on log R that is still "whatever R", 0.18: from R = 2 to 32 it leads from one end of
`ABOUT_TWO` to the other. Rows of orthogonal scores have a slope of nearly 1."""
DEFINITIONS = {
    "all/effective_rank": "(Σσ)²/Σσ² of the rollout matrix, all parameters",
    "qv/effective_rank": "(Σσ)²/Σσ², q_proj and v_proj of all layers together",
    "layer/effective_rank": "(Σσ)²/Σσ² of each q_proj and v_proj, mean over them (as P1)",
    "all/effective_rank_truncated_2": "(Σσ)²/Σσ² of the two largest σ, all parameters",
    "layer/effective_rank_truncated_2": "(Σσ)²/Σσ² of the two largest σ of each q_proj and v_proj, mean over them",
    "all/entropy_rank": "exp H(σ/Σσ), all parameters",
    "all/participation_ratio": "(Σσ²)²/Σσ⁴, all parameters",
    "all/stable_rank": "Σσ²/σ₁², all parameters",
    "all/energy_rank_90": "fewest directions with 90 % of Σσ², all parameters",
    "all/energy_rank_99": "fewest directions with 99 % of Σσ², all parameters",
    "all/centred_effective_rank": "(Σσ)²/Σσ² of the rows A_i(ψ_i − ψ̄), all parameters",
}
"""Possible definitions of P1's "effective rank"."""


@needing(f"{READ}, with outcome credit, at several --group")
def rank_about_two(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """P1.5: the rank of a group's rollout matrix is about 2 whatever R; one verdict per definition, and its slope."""
    for family in sweeps(with_outcome(runs), lambda run: len(run.column("all/effective_rank"))):
        null = by_size(family, "orthogonal_null")
        beside = f", where orthogonal scores of equal norm have (Σσ)²/Σσ² = {null.numbers()}" if null else ""
        for column, words in DEFINITIONS.items():
            found = by_size(family, column)
            if not found:
                yield missing(family[0].subject, "the centred scores: a run whose credits are not 0"
                              if column.startswith("all/") else
                              "parameters named q_proj.weight and v_proj.weight (not LoRA's, nor a fused qkv)", words)
                continue
            few = sum(size >= 4 for size in found) < SIZES
            yield found.verdict(
                words, family[0].subject, dict.fromkeys(found, ABOUT_TWO), f"it is {found.listed()}{beside}",
                expected="about 2 at every R", threshold=f"interval {ABOUT_TWO} at every R",
                still=f"{SIZES} group sizes of four or more: creditscope papers reproduce p1" if few else "")
        for column in ("all/effective_rank", "layer/effective_rank"):
            if len(by_size(family, column)) > 1:
                yield _slope(family, column)


def slopes(runs: Sequence[Evidence], column: str) -> list[float]:
    """For each seed that was run at every R: the least-squares slope of log(mean of the column) on log R."""
    sizes = cells([run for run in runs if run.column(column)], "group")
    means = {size: {run["seed"]: mean(run.column(column)) for run in cell} for size, cell in sizes.items()}
    seeds = set.intersection(*(set(cell) for cell in means.values())) if means else set()
    return [float(np.polyfit(np.log(list(means)), np.log([cell[seed] for cell in means.values()]), 1)[0])
            for seed in sorted(seeds)]


def _slope(family: Sequence[Evidence], column: str) -> ClaimVerdict:
    definition, by_seed = f"slope of log rank on log R; {DEFINITIONS[column]}", slopes(family, column)
    if not by_seed:
        return missing(family[0].subject, f"{SEEDS}, each at every R", definition)
    found, null = mean_over("seeds", by_seed), slopes(family, "orthogonal_null")
    beside = f", and that of the orthogonal null {mean(null):.2f}" if null else ""
    return estimate(definition, family[0].subject, found, Band(-FLAT, FLAT),
                    f"the slope at R = {', '.join(map(str, cells(family, 'group')))} is {found}{beside}", expected="0",
                    threshold=f"interval within ±{FLAT:.2f}")


PRINTED_TOP1 = {2: (0.6, 0.7), 4: (0.7, 0.8), 8: (0.5, 0.6)}
"""σ₁²/Σσ² by R in P1's Table 1."""
DIGIT = 0.05
"""Half of the last printed digit: an end that reads 0.6 may be anything from 0.55 to 0.65."""
PRINTED_RANK = {2: 2, 4: 3, 8: 7}
""""Max rank" by R in the same table."""


@needing(f"{READ}, with outcome credit, at --group 2, 4 and 8")
def top_share(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """P1.6: σ₁²/Σσ² lies in the printed band of each R, and the largest rank of a group is 2, 3, 7 at R = 2, 4, 8."""
    bands = {size: Band(low - DIGIT, high + DIGIT) for size, (low, high) in PRINTED_TOP1.items()}
    printed = [run for run in with_outcome(runs) if run["group"] in PRINTED_TOP1]
    for family in sweeps(printed, lambda run: len(run.column("all/top1"))):
        lacking = [size for size in PRINTED_TOP1 if size not in cells(family, "group")]
        still = f"--group {', '.join(map(str, lacking))} as well" if lacking else ""
        for column, words in (("all/top1", "all parameters"), ("layer/top1", "mean over q_proj and v_proj (as P1)")):
            if found := by_size(family, column):
                yield found.verdict(
                    f"σ₁²/Σσ², {words}", family[0].subject, bands, f"the share is {found.listed()}",
                    expected="0.6–0.7, 0.7–0.8, 0.5–0.6 at R = 2, 4, 8",
                    threshold=f"interval inside the printed band, {DIGIT} wider at each end", still=still)
        yield _largest_rank(family, still)


def _largest_rank(family: Sequence[Evidence], still: str) -> ClaimVerdict:
    """The largest numerical rank of a group by R: above the printed one refutes, below needs more groups."""
    definition = "largest rank of a group's rollout matrix (values above rounding), all parameters"
    found = {size: int(max(value for run in cell for value in run.column("all/numerical_rank")))
             for size, cell in cells([run for run in family if run.column("all/numerical_rank")], "group").items()}
    if not found:
        return missing(family[0].subject, READ, definition)
    higher = any(rank > PRINTED_RANK[size] for size, rank in found.items())
    lower = any(rank < PRINTED_RANK[size] for size, rank in found.items())
    outcome: Outcome = "refuted" if higher else "undecided" if lower or still else "holds"
    needs = f"; it needs {still}" if still and not higher else ""
    return ClaimVerdict(
        definition=definition, subject=family[0].subject, outcome=outcome, observed=float(max(found.values())),
        expected="2, 3, 7 at R = 2, 4, 8", threshold="equal at every R; above refutes, below needs more groups",
        n=sum(len(run.column("all/numerical_rank")) for run in family), of="groups",
        reason=f"the largest rank is {', '.join(map(str, found.values()))} at R = {', '.join(map(str, found))}, where "
               f"rows A_i ψ_i of independent scores have rank R{needs}")


RAISED = 1.25
"""The factor by which another credit must raise the rank. P1 asks whether it "breaks" rank 2: a quarter more takes 2 to
2.5, where `ABOUT_TWO` ends."""
BESIDE = {"entropy_rank": "exp H", "participation_ratio": "(Σσ²)²/Σσ⁴", "stable_rank": "Σσ²/σ₁²"}
"""Other definitions whose ratio is part of the reason."""


@needing("the same rollouts read under other credits, at --group 4 or more: creditscope lab train --scope light --also "
         "leave_one_out step_reward")
def other_credit(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """P1.12: another credit raises (Σσ)²/Σσ² of the same rollouts well above 2; one verdict per credit."""
    large = [run for run in with_outcome(runs) if run["group"] >= 4]
    for name in sorted({name.split("/")[0] for run in large for name in run.groups if name.startswith("credit:")}):
        yield from _raised(large, name)


def _raised(runs: Sequence[Evidence], name: str) -> Iterator[ClaimVerdict]:
    """The ratio of mean ranks, other credit over the run's own, and the mean rank itself, at each R."""
    credit = name.removeprefix("credit:")
    for family in sweeps(runs, lambda run: len(run.column(f"{name}/effective_rank")), ("rollouts", "steps")):
        ratios = {key: found for key in ("effective_rank", *BESIDE) if (found := ratio_over_runs(
            [rows_with(run.groups, "step", f"{name}/{key}", f"all/{key}") for run in family])) is not None}
        found, rank = ratios.get("effective_rank"), mean_of(family, f"{name}/effective_rank")
        if found is None or rank is None:
            continue
        others = ", ".join(f"{words} × {ratios[key].value.mean:.2f}" for key, words in BESIDE.items() if key in ratios)
        yield estimate(
            f"(Σσ)²/Σσ² under {credit} over that under outcome, same rollouts, R = {family[0]['group']}",
            family[0].subject, found, Band(low=RAISED), f"{credit} multiplies the rank by {found} to "
            f"{rank.value.mean:.2f}" + (f", and by other definitions {others}" if others else ""),
            outcome=all_of([Band(low=RAISED).judge(found.value), Band(low=ABOUT_TWO.high).judge(rank.value)]),
            expected=f"above {RAISED}, and the rank above {ABOUT_TWO.high}",
            threshold=f"ratio's interval above {RAISED} and rank's above {ABOUT_TWO.high}; either below refutes")


PAIRED_GROUPS = 8
"""Groups that a run needs for a correlation: below it the interval of one correlation spans most of −1 to 1."""
SAME = 1e-9
"""A spread at or below it is rounding."""


@needing(f"{READ}, with outcome credit at --group 4 or more, and {PAIRED_GROUPS} groups of different reward std in a "
         "run")
def rank_and_spread(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """P1.13: does the rank fall as σ_r → 0? The correlation of (Σσ)²/Σσ² with σ_r over a run's groups; and of that rank
    divided by its null 4k(R−k)/R = 4R·σ_r², which falls with σ_r for any gradients."""
    for family in sweeps(with_outcome(runs), lambda run: len(run.column("all/effective_rank"))):
        plain = [rows_with(run.groups, "all/effective_rank", "reward_std") for run in family]
        freed = [[(rank / null, std) for rank, null, std in rows_with(
            run.groups, "all/effective_rank", "orthogonal_null", "reward_std") if null] for run in family]
        for words, by_run in (("(Σσ)²/Σσ²", plain),
                              ("(Σσ)²/Σσ² over its null 4k(R−k)/R: does it fall faster than the null?", freed)):
            if by_seed := [r for pairs in by_run if (r := correlation(pairs)) is not None]:
                found = mean_over("runs", by_seed)
                yield estimate(f"correlation with σ_r over the groups of a run, {words}", family[0].subject, found,
                               POSITIVE, f"the correlation is {found}")


def correlation(pairs: Sequence[Sequence[float]]) -> float | None:
    """Pearson's r; None of too few pairs, or where one side does not vary beyond rounding."""
    if len(pairs) < PAIRED_GROUPS or np.ptp(pairs, axis=0).min() <= SAME:
        return None
    x, y = np.array(pairs, dtype=np.float64).T
    return float(np.corrcoef(x, y)[0, 1])
