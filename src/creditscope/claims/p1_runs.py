"""The claims of arXiv:2606.29238 (P1) that runs can decide: each function reads evidence, gives verdicts. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from creditscope.claims.evidence import ENOUGH, Evidence, cells, families, mean_of, over_runs
from creditscope.claims.reading import (
    READ,
    SEEDS,
    SWEEP,
    at_every_size,
    at_sizes,
    by_size,
    credit_of,
    fixed,
    from_three,
    listed,
    numbers,
    ratio_over_runs,
    row_of,
    rows_with,
    shown,
    sweeps,
    verdict_of,
    with_outcome,
)
from creditscope.claims.verdict import Outcome, Verdict, above, all_of, below, decided, inside, missing
from creditscope.credit.table import ESTIMATORS
from creditscope.runs.compare import at, in_points
from creditscope.runs.intervals import mean_interval, paired

ROUNDING = 1e-9
"""A share of credit at or below it is rounding: both are computed in float64 from the same numbers."""
SUM_ROUNDING = 1e-5
"""|Σc| / Σ|c| at or below it is rounding: credits are float32, good to 6e-8, and a group adds up to 64 of them."""
WHOLE = frozenset({"outcome", "leave_one_out", "optimal_scalar", "optimal_sequence", "salt"})
"""Estimators that give a rollout one number. Every other one of the list gives tokens or steps their own."""


# -- P1.1 ------------------------------------------------------------------------------------------------------------


def uniform_credit(runs: Sequence[Evidence]) -> list[Verdict]:
    """P1.1: within = Σ_it (A_it − Ā_i)² / Σ_it A_it² is 0 under outcome credit, and above 0 under token credit."""
    verdicts = []
    known = [run for run in fixed(runs) if run.series("credit/within") and credit_of(run) in ESTIMATORS]
    for family in families(known, SWEEP):
        name = credit_of(family[0])
        values = [value for run in family for _, value in run.series("credit/within")]
        if name in WHOLE:
            largest = max(values)
            verdicts.append(Verdict(
                claim="P1.1", definition=f"share of the credit that differs inside a rollout, credit {name}",
                subject=family[0].subject, outcome=decided(largest <= ROUNDING), observed=largest, expected="0",
                threshold=f"at most {ROUNDING:g} in every step", n=len(values), of="steps",
                reason=f"in {len(values)} steps the largest share that differs inside a rollout is {largest:.2g}"))
            continue
        least = min(run.mean("credit/within") or 0.0 for run in family)
        verdicts.append(Verdict(
            claim="P1.1", definition=f"share of the credit that differs inside a rollout, credit {name}",
            subject=family[0].subject, outcome=decided(least > ROUNDING), observed=least, expected="above 0",
            threshold=f"mean above {ROUNDING:g} in every run", n=len(family), of="runs",
            reason=f"in the run with the least of it, {least:.2g} of the credit differs inside a rollout"))
    return verdicts or [missing("P1.1", "runs", "the metric credit/within: any run of creditscope train that had a "
                                                "group with right and wrong answers")]


# -- P1.2 ------------------------------------------------------------------------------------------------------------


def zero_sum(runs: Sequence[Evidence]) -> list[Verdict]:
    """P1.2: |Σ_i c_i| / Σ_i |c_i| = 0 in every group, c the credit that reaches the gradient under a centred row."""
    verdicts = []
    centred = [run for run in with_outcome(runs) if (row := row_of(run)) is not None and row.centred]
    for family in sweeps(centred, lambda run: len(run.column("w_sum"))):
        values = [value for run in family for value in run.column("w_sum")]
        largest = max(values)
        row = row_of(family[0])
        divided = row is not None and row.aggregate == "sequence_mean"
        verdicts.append(Verdict(
            claim="P1.2", definition="|Σc| / Σ|c| in a group, c the credit that reaches the gradient",
            subject=family[0].subject, outcome=decided(largest <= SUM_ROUNDING), observed=largest, expected="0",
            threshold=f"at most {SUM_ROUNDING:g} in every group", n=len(values), of="groups",
            reason=f"the largest of {len(values)} groups is {largest:.2g}"
                   + (", under a row that divides by the length of the answer" if divided else "")))
    return verdicts or [missing("P1.2", "runs", f"{READ}, with outcome credit and a method that has a group baseline "
                                                f"(--method p1_grpo)")]


# -- P1.4 ------------------------------------------------------------------------------------------------------------

LAW_BAND = 0.05
"""How far the share of dead groups may lie from the law: five groups in a hundred, which a reader of a plot would still
call agreement. P1 gives no number of its own."""
THIRDS = 6
"""Steps that a run needs before its first third is compared with its last: two in each."""


def sparsity(runs: Sequence[Evidence]) -> list[Verdict]:
    """P1.4: a unanimous group has no gradient, P(dead) = p^R + (1−p)^R, and the dead share grows over training."""
    own = with_outcome(runs)
    verdicts = [*_unanimous(own), *_law(own), *_growth(own)]
    return verdicts or [missing("P1.4", "runs", "the metrics reward/mean and signal/dead_groups of a run with outcome "
                                                "credit and binary rewards; and for the gradients " + READ)]


def _unanimous(runs: Sequence[Evidence]) -> Iterator[Verdict]:
    """max |K_ij| over unanimous groups is 0 under a row that compares siblings and has no KL term."""
    known = [run for run in runs if (row := row_of(run)) is not None and row.centred
             and not (run["beta"] if run["beta"] is not None else row.beta)]
    for family in families(known, SWEEP):
        looks = [(count, largest) for run in family
                 for count, largest in rows_with(run.readings, "unanimous", "unanimous_largest") if count]
        if not looks:
            continue
        largest, count = max(largest for _, largest in looks), int(sum(count for count, _ in looks))
        yield Verdict(
            claim="P1.4", definition="largest |⟨g_i, g_j⟩| in a unanimous group", subject=family[0].subject,
            outcome=decided(largest == 0), observed=largest, expected="0", threshold="exactly 0", n=count, of="groups",
            reason=f"the largest entry of the Grams of {count} unanimous groups is {largest:.2g}")


def dead_share(right: int, count: int, size: int) -> float:
    """p^R + (1−p)^R without bias from K = `right` of N = `count` rewards: [C(K,R) + C(N−K,R)] / C(N,R).

    The batch's own mean in place of p would exceed it: by 0.03 with eight groups of two.

    >>> dead_share(8, 16, 2), dead_share(2, 4, 2)
    (0.4666666666666667, 0.3333333333333333)
    """
    return (math.comb(right, size) + math.comb(count - right, size)) / math.comb(count, size)


def is_binary(step: Mapping[str, float], size: int) -> bool:
    """Whether a step's rewards are 0 and 1, from mean and std: in [0, 1] the mean of r² equals that of r only then.

    var·(B−1)/B + mean² = mean, B = groups·R; to 1e-4, because the record's std is a float32's.
    """
    count = step["signal/groups"] * size
    if not 0 < size <= count:
        return False
    mean, std = step["reward/mean"], step["reward/std"]
    return 0 <= mean <= 1 and abs(std**2 * (count - 1) / count + mean**2 - mean) < 1e-4


def _law(runs: Sequence[Evidence]) -> Iterator[Verdict]:
    """Measured share of dead groups less p^R + (1−p)^R for prompts that all have one p."""
    names = ("signal/dead_groups", "signal/groups", "reward/mean", "reward/std")

    def excess(run: Evidence) -> list[float]:
        known = [dict(zip(names, step, strict=True)) for step in run.columns.together(*names)]
        if not all(is_binary(step, run["group"]) for step in known):
            return []
        counts = [round(step["signal/groups"] * run["group"]) for step in known]
        return [step["signal/dead_groups"] - dead_share(round(step["reward/mean"] * count), count, run["group"])
                for step, count in zip(known, counts, strict=True)]

    for family in sweeps(runs, lambda run: len(excess(run))):
        found = {size: value for size, cell in cells(family, "group").items()
                 if (value := over_runs([excess(run) for run in cell], "steps")) is not None}
        yield at_every_size(
            "P1.4", "share of dead groups less p^R + (1−p)^R for one p, estimated from the batch without bias",
            family[0].subject, found,
            dict.fromkeys(found, (-LAW_BAND, LAW_BAND)),
            f"the share less the law for one p is {listed(found, 3)}, and prompts of different p raise it (Jensen)",
            expected="0", threshold=f"interval within ±{LAW_BAND} at every R")


def _growth(runs: Sequence[Evidence]) -> Iterator[Verdict]:
    """Mean share of dead groups in the last third of a run's steps less that in the first third."""
    def grown(run: Evidence) -> float:
        values = [value for _, value in run.series("signal/dead_groups")]
        third = len(values) // 3
        return (math.fsum(values[-third:]) - math.fsum(values[:third])) / third

    def long(run: Evidence) -> int:
        count = len(run.series("signal/dead_groups"))
        return count if count >= THIRDS else 0

    for family in sweeps(runs, long):
        value = from_three(mean_interval([grown(run) for run in family]))
        yield verdict_of("P1.4", "share of dead groups, last third of the steps less first third", family[0].subject,
                         above(value, 0.0), (value, "runs"),
                         f"from first to last third of a run the share of dead groups changes by {shown(value)}",
                         expected="above 0", threshold="interval above 0", bounds=(0.0,))


# -- P1.5 ------------------------------------------------------------------------------------------------------------

ABOUT_TWO = (1.5, 2.5)
"""What may be called 2: what rounds to it. P1 prints "≈ 2" and bars of about that height."""
SIZES = 2
"""Group sizes of four or more that "whatever R" needs. R = 2 cannot tell: no rank of it exceeds 2."""
FLAT = math.log(ABOUT_TWO[1] / ABOUT_TWO[0]) / math.log(32 / 2)
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
"""What may have been meant by "effective rank"."""


def rank_about_two(runs: Sequence[Evidence]) -> list[Verdict]:
    """P1.5: the rank of a group's rollout matrix is about 2 whatever R; one verdict a definition, and its slope."""
    verdicts = []
    for family in sweeps(with_outcome(runs), lambda run: len(run.column("all/effective_rank"))):
        null = by_size(family, "orthogonal_null")
        for column, words in DEFINITIONS.items():
            found = by_size(family, column)
            if not found:
                verdicts.append(missing("P1.5", family[0].subject, "parameters named q_proj.weight and v_proj.weight "
                                        "(not LoRA's, nor a fused qkv)" if not column.startswith("all/") else
                                        "the centred scores: a run whose credits are not 0", words))
                continue
            beside = f", where orthogonal scores of equal norm have (Σσ)²/Σσ² = {numbers(null)}" if null else ""
            few = sum(size >= 4 for size in found) < SIZES
            verdicts.append(at_every_size(
                "P1.5", words, family[0].subject, found, dict.fromkeys(found, ABOUT_TWO),
                f"it is {listed(found)}{beside}", expected="about 2 at every R",
                threshold=f"interval inside [{ABOUT_TWO[0]}, {ABOUT_TWO[1]}] at every R",
                still=f"{SIZES} group sizes of four or more: creditscope reproduce p1" if few else ""))
        verdicts += [_slope(family, column) for column in ("all/effective_rank", "layer/effective_rank")
                     if len(by_size(family, column)) > 1]
    return verdicts or [missing("P1.5", "runs", f"{READ}, with outcome credit, at several --group")]


def slopes(runs: Sequence[Evidence], column: str) -> list[float]:
    """For each seed that was run at every R: the least-squares slope of log(mean of the column) on log R."""
    sizes = cells([run for run in runs if run.column(column)], "group")
    means = {size: {run["seed"]: math.fsum(run.column(column)) / len(run.column(column)) for run in cell}
             for size, cell in sizes.items()}
    seeds = set.intersection(*(set(cell) for cell in means.values())) if means else set()
    return [float(np.polyfit(np.log(list(means)), np.log([cell[seed] for cell in means.values()]), 1)[0])
            for seed in sorted(seeds)]


def _slope(family: Sequence[Evidence], column: str) -> Verdict:
    """d log rank / d log R, by seed."""
    definition, found = f"slope of log rank on log R; {DEFINITIONS[column]}", slopes(family, column)
    if not found:
        return missing("P1.5", family[0].subject, f"{SEEDS}, each at every R", definition)
    value, null = from_three(mean_interval(found)), slopes(family, "orthogonal_null")
    beside = f", and that of the orthogonal null {mean_interval(null).mean:.2f}" if null else ""
    return verdict_of("P1.5", definition, family[0].subject, inside(value, -FLAT, FLAT), (value, "seeds"),
                      f"the slope {at_sizes(list(cells(family, 'group')))} is {shown(value)}{beside}", expected="0",
                      threshold=f"interval within ±{FLAT:.2f}", bounds=(-FLAT, FLAT))


# -- P1.6 ------------------------------------------------------------------------------------------------------------

PRINTED_TOP1 = {2: (0.6, 0.7), 4: (0.7, 0.8), 8: (0.5, 0.6)}
"""σ₁²/Σσ² by R in P1's Table 1."""
DIGIT = 0.05
"""Half of the last printed digit: an end that reads 0.6 may be anything from 0.55 to 0.65."""
PRINTED_RANK = {2: 2, 4: 3, 8: 7}
""""Max rank" by R in the same table."""


def top_share(runs: Sequence[Evidence]) -> list[Verdict]:
    """P1.6: σ₁²/Σσ² lies in the printed band of each R, and the largest rank of a group is 2, 3, 7 at R = 2, 4, 8."""
    verdicts = []
    printed = [run for run in with_outcome(runs) if run["group"] in PRINTED_TOP1]
    for family in sweeps(printed, lambda run: len(run.column("all/top1"))):
        lacking = [size for size in PRINTED_TOP1 if size not in cells(family, "group")]
        still = f"--group {', '.join(map(str, lacking))} as well" if lacking else ""
        for column, words in (("all/top1", "all parameters"), ("layer/top1", "mean over q_proj and v_proj (as P1)")):
            found = by_size(family, column)
            if found:
                bands = {size: (low - DIGIT, high + DIGIT) for size, (low, high) in PRINTED_TOP1.items()}
                verdicts.append(at_every_size(
                    "P1.6", f"σ₁²/Σσ², {words}", family[0].subject, found, bands, f"the share is {listed(found)}",
                    expected="0.6–0.7, 0.7–0.8, 0.5–0.6 at R = 2, 4, 8",
                    threshold=f"interval inside the printed band, {DIGIT} wider at each end", still=still))
        verdicts.append(_largest_rank(family, still))
    return verdicts or [missing("P1.6", "runs", f"{READ}, with outcome credit, at --group 2, 4 and 8")]


def _largest_rank(family: Sequence[Evidence], still: str) -> Verdict:
    """The largest numerical rank of a group by R: above the printed one refutes it, below it more groups are needed."""
    definition = "largest rank of a group's rollout matrix (values above rounding), all parameters"
    found = {size: int(max(value for run in cell for value in run.column("all/numerical_rank")))
             for size, cell in cells([run for run in family if run.column("all/numerical_rank")], "group").items()}
    if not found:
        return missing("P1.6", family[0].subject, READ, definition)
    higher = any(rank > PRINTED_RANK[size] for size, rank in found.items())
    lower = [size for size, rank in found.items() if rank < PRINTED_RANK[size]]
    outcome: Outcome = "refuted" if higher else "undecided" if lower or still else "holds"
    needs = f"; it needs {still}" if still and not higher else ""
    return Verdict(
        claim="P1.6", definition=definition,
        subject=family[0].subject, outcome=outcome, observed=float(max(found.values())),
        expected="2, 3, 7 at R = 2, 4, 8", threshold="equal at every R; above refutes, below needs more groups",
        n=sum(len(run.column("all/numerical_rank")) for run in family), of="groups",
        reason=f"the largest rank is {', '.join(map(str, found.values()))} {at_sizes(list(found))}, where rows A_i ψ_i "
               f"of independent scores have rank R{needs}")


# -- P1.7 ------------------------------------------------------------------------------------------------------------

PAIRS = ((2, 4), (2, 8), (4, 8), (8, 16), (8, 32))
"""Which R is compared with which: P1's three among each other, and what lies beyond against its largest."""
NEAR = 0.1
"""How far, as a share, the nearest evaluation may lie from where two runs are compared: between two evaluations a curve
that bends is not the straight line between them."""


def larger_groups_learn_faster(runs: Sequence[Evidence]) -> list[Verdict]:
    """P1.7: accuracy of the larger R less that of the smaller, paired by seed, at equal steps and at equal rollouts."""
    verdicts = [*_race(runs, "step", "steps"), *_race(runs, "spent", "rollouts")]
    return verdicts or [missing("P1.7", "runs", "runs with outcome credit at two --group, evaluated on the way: "
                                                "creditscope train --eval-every 5")]


def _race(runs: Sequence[Evidence], by: str, unit: str) -> Iterator[Verdict]:
    finished = [run for run in with_outcome(runs) if run.finished]
    for family in sweeps(finished, lambda run: _last(run, by)):
        sizes = cells(family, "group")
        for small, large in PAIRS:
            if small in sizes and large in sizes:
                yield _faster(sizes[small], sizes[large], by, unit)


def _last(run: Evidence, by: str) -> int:
    """Where the run's last evaluation stands, 0 where it has none after training."""
    return max((x for x, _ in run.points(by)), default=0)


def _faster(small: Sequence[Evidence], large: Sequence[Evidence], by: str, unit: str) -> Verdict:
    """Both sizes are read where the first run of either ends."""
    few, many, subject = small[0]["group"], large[0]["group"], small[0].subject
    definition = f"accuracy after equal {unit}, R = {many} less R = {few}, paired by seed"
    shared = {run["seed"] for run in small} & {run["seed"] for run in large}
    both = [run for run in (*small, *large) if run["seed"] in shared]
    end = min((_last(run, by) for run in both), default=0)
    off = [run for run in both if min(abs(x - end) for x, _ in run.points(by)) > NEAR * end]
    if off:
        flag = "--eval-every" if by == "step" else "--eval-rollouts"
        return missing("P1.7", subject, f"an evaluation at {end:,} {unit}, to a tenth, of R = {off[0]['group']}: "
                                        f"creditscope train {flag} {end}", definition)
    lower, upper = ({run["seed"]: at(run.points(by), [end])[0] for run in some if run["seed"] in shared}
                    for some in (small, large))
    value = paired(upper, lower)
    if value is None:
        return missing("P1.7", subject, f"{SEEDS}, the same for R = {few} and R = {many}", definition)
    value = from_three(value)
    return verdict_of("P1.7", definition, subject, above(value, 0.0), (value, "seeds"),
                      f"after {end:,} {unit} R = {many} differs by {in_points(value)} points from R = {few}",
                      expected="above 0", threshold="interval above 0", bounds=(0.0,))


# -- P1.8 ------------------------------------------------------------------------------------------------------------


def multi_turn(runs: Sequence[Evidence]) -> list[Verdict]:
    """P1.8: the bias of outcome credit grows with the turn, and other baselines reduce it.

    Squares are compared: MS_h, the mean square of the bias at turn h, is measured without bias and may come out below
    0 by chance.
    """
    verdicts: list[Verdict] = []
    for family in sweeps(fixed(runs), lambda run: len(_squares(run, "rms_outcome"))):
        verdicts += _by_turn(family)
        for column, words in (("rms_turn", "mean of the same turn"), ("rms_state", "mean of the same state")):
            left = over_runs([_differences(run, column) for run in family], "kept steps")
            if left is not None:
                share = _left(family, column)
                verdicts.append(verdict_of(
                    "P1.8", f"mean square of the bias at later turns, outcome less the {words}", family[0].subject,
                    above(left[0], 0.0), left, f"with the group's {words} {share:.0%} of the mean square is left",
                    expected="above 0", threshold="interval above 0", bounds=(0.0,)))
    return verdicts or [missing("P1.8", "runs", "kept rollouts of a task with turns and states: creditscope train "
                                                "--task turns --keep-every 1")]


def _squares(run: Evidence, column: str) -> dict[float, dict[int, float]]:
    """kept step -> turn -> the square of an RMS, with its sign."""
    out: dict[float, dict[int, float]] = {}
    for step, turn, value in rows_with(run.turns, "step", "turn", column):
        out.setdefault(step, {})[int(turn)] = math.copysign(value * value, value)
    return out


def _by_turn(family: Sequence[Evidence]) -> Iterator[Verdict]:
    """The slope of MS_h on h is above 0, of each kept step that has several turns.

    That MS_0 = 0 and that the bound is kept is judged by enumeration alone: on sampled groups, whose credit sums to 0,
    neither could come out otherwise.
    """
    subject = family[0].subject
    steps = [[turns for turns in _squares(run, "rms_outcome").values() if len(turns) > 1 and 0 in turns]
             for run in family]
    slope = over_runs([[float(np.polyfit(list(step), list(step.values()), 1)[0]) for step in some] for some in steps],
                      "kept steps")
    if slope is None:
        yield missing("P1.8", subject, "kept steps in which two groups met the same state at several turns: give more "
                                       "--prompts", "mean square of the bias by turn")
        return
    end = over_runs([[step[max(step)] for step in some] for some in steps])
    assert end is not None
    shares = [largest / bound for run in family
              for largest, bound in rows_with(run.turns, "largest", "bound") if bound]
    beside = f"; the largest bias is {max(shares):.2f} of its bound" if shares else ""
    yield verdict_of("P1.8", "slope of the mean square of outcome's bias on the turn", subject, above(slope[0], 0.0),
                     slope, f"a turn adds {shown(slope[0])} to the mean square, which is {end[0].mean:.2g} at the "
                     f"last{beside}", expected="above 0", threshold="interval above 0", bounds=(0.0,))


def _differences(run: Evidence, column: str) -> list[float]:
    """For each kept step: the mean over turns h ≥ 1 of MS_h under outcome less MS_h under another baseline."""
    mine, other = _squares(run, "rms_outcome"), _squares(run, column)
    by_step = [[mine[step][turn] - other[step][turn] for turn in mine[step].keys() & other[step].keys() if turn > 0]
               for step in mine.keys() & other.keys()]
    return [math.fsum(values) / len(values) for values in by_step if values]


def _left(family: Sequence[Evidence], column: str) -> float:
    """Σ MS_h of another baseline over Σ MS_h of outcome, h ≥ 1: over all kept steps of all runs."""
    def total(name: str) -> float:
        return math.fsum(value for run in family for turns in _squares(run, name).values()
                         for turn, value in turns.items() if turn > 0)

    whole = total("rms_outcome")
    return total(column) / whole if whole else math.nan


# -- P1.11 -----------------------------------------------------------------------------------------------------------

LOST = 0.05
"""The share of variance that a baseline may lose, beyond chance, and still be called optimal: 5 % more rollouts make up
for it, less than one in a group of eight."""
APART = 0.05
"""How far b* may lie from the mean, in units of a binary reward."""


def baseline(runs: Sequence[Evidence]) -> list[Verdict]:
    """P1.11: the group mean minimises the variance: (V(mean) − V(b*)) / V(b*) less what chance gives, and b* − mean."""
    verdicts = []
    lost, chance = "baseline/variance_lost", "baseline/variance_lost_by_chance"
    for family in sweeps(with_outcome(runs), lambda run: len(run.series(chance))):
        excess = over_runs([[a - b for a, b in run.columns.together(lost, chance)] for run in family])
        if excess is not None:
            means = [math.fsum(x) / len(x) for name in (lost, chance)
                     if (x := [value for run in family for _, value in run.series(name)])]
            verdicts.append(verdict_of(
                "P1.11", "variance lost by the group mean against b* = E[r‖ψ‖²]/E[‖ψ‖²], less what chance gives",
                family[0].subject, below(excess[0], LOST), excess,
                f"the mean's variance is {means[0]:.0%} above the optimum's, where chance alone gives {means[1]:.0%}",
                expected="0", threshold=f"interval below {LOST}", bounds=(LOST,)))
        both = ("baseline/optimal", "baseline/mean")
        shift = over_runs([[optimal - mean for optimal, mean in run.columns.together(*both)] for run in family])
        if shift is not None:
            verdicts.append(verdict_of(
                "P1.11", "b* less the group mean", family[0].subject, inside(shift[0], -APART, APART), shift,
                f"b* less the mean is {shown(shift[0])}", expected="0", threshold=f"interval within ±{APART}",
                bounds=(-APART, APART)))
    return verdicts or [missing("P1.11", "runs", "the score norms of a run with outcome credit: creditscope train "
                                                 "--scope full --every 5")]


# -- P1.12 -----------------------------------------------------------------------------------------------------------

RAISED = 1.25
"""By how much another credit must multiply the rank to raise it. P1 asks whether it "breaks" rank 2: a quarter more
takes 2 to 2.5, where `ABOUT_TWO` ends."""
BESIDE = {"entropy_rank": "exp H", "participation_ratio": "(Σσ²)²/Σσ⁴", "stable_rank": "Σσ²/σ₁²"}
"""Other definitions whose ratio stands in the reason."""


def other_credit(runs: Sequence[Evidence]) -> list[Verdict]:
    """P1.12: another credit raises (Σσ)²/Σσ² of the same rollouts well above 2; one verdict a credit."""
    large = [run for run in with_outcome(runs) if run["group"] >= 4]
    names = sorted({name.split("/")[0] for run in large for name in run.groups if name.startswith("credit:")})
    verdicts = [verdict for name in names for verdict in _raised(large, name)]
    return verdicts or [missing("P1.12", "runs", "the same rollouts read under other credits, at --group 4 or more: "
                                                 "creditscope train --scope light --also leave_one_out step_reward")]


def _raised(runs: Sequence[Evidence], name: str) -> Iterator[Verdict]:
    """The ratio of mean ranks, other credit over the run's own, and the mean rank itself, at each R."""
    credit = name.removeprefix("credit:")
    for family in sweeps(runs, lambda run: len(run.column(f"{name}/effective_rank")), ("rollouts", "steps")):
        ratios = {rank: found for rank in ("effective_rank", *BESIDE) if (found := ratio_over_runs(
            [[(step, other, own) for step, other, own in rows_with(run.groups, "step", f"{name}/{rank}", f"all/{rank}")]
             for run in family])) is not None}
        rank = mean_of(family, f"{name}/effective_rank")
        if "effective_rank" not in ratios or rank is None:
            continue
        found = ratios["effective_rank"]
        beside = ", ".join(f"{words} × {ratios[key][0].mean:.2f}" for key, words in BESIDE.items() if key in ratios)
        yield verdict_of(
            "P1.12", f"(Σσ)²/Σσ² under {credit} over that under outcome, same rollouts, R = {family[0]['group']}",
            family[0].subject, all_of([above(found[0], RAISED), above(rank[0], ABOUT_TWO[1])]), found,
            f"{credit} multiplies the rank by {shown(found[0])} to {rank[0].mean:.2f}"
            + (f", and by other definitions {beside}" if beside else ""),
            expected=f"above {RAISED}, and the rank above {ABOUT_TWO[1]}",
            threshold=f"ratio's interval above {RAISED} and rank's above {ABOUT_TWO[1]}; either below refutes",
            bounds=(RAISED,))


# -- P1.13 -----------------------------------------------------------------------------------------------------------

PAIRED_GROUPS = 8
"""Groups that a run needs for a correlation: below it the interval of one correlation spans most of −1 to 1."""


def rank_and_spread(runs: Sequence[Evidence]) -> list[Verdict]:
    """P1.13: does the rank fall as σ_r → 0? The correlation of (Σσ)²/Σσ² with σ_r over a run's groups; and of that rank
    divided by its null 4k(R−k)/R = 4R·σ_r², which falls with σ_r whatever the gradients do.
    """
    verdicts = []
    for family in sweeps(with_outcome(runs), lambda run: len(run.column("all/effective_rank"))):
        plain = [[(rank, std) for rank, std in rows_with(run.groups, "all/effective_rank", "reward_std")]
                 for run in family]
        freed = [[(rank / null, std) for rank, null, std in rows_with(
            run.groups, "all/effective_rank", "orthogonal_null", "reward_std") if null] for run in family]
        for words, by_run in (("(Σσ)²/Σσ²", plain),
                              ("(Σσ)²/Σσ² over its null 4k(R−k)/R: does it fall faster than the null?", freed)):
            found = [r for pairs in by_run if (r := correlation(pairs)) is not None]
            if not found:
                continue
            value = from_three(mean_interval(found))
            verdicts.append(verdict_of(
                "P1.13", f"correlation with σ_r over the groups of a run, {words}", family[0].subject,
                above(value, 0.0), (value, "runs"), f"the correlation is {shown(value)}", expected="above 0",
                threshold="interval above 0", bounds=(0.0,)))
    return verdicts or [missing("P1.13", "runs", f"{READ}, with outcome credit at --group 4 or more, and "
                                                 f"{PAIRED_GROUPS} groups of different reward std in a run")]


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's r; None of too few pairs, or where one side does not vary beyond rounding.

    >>> round(correlation([(x, 2.0 * x + (x == 7)) for x in range(8)]), 3)
    0.998
    """
    if len(pairs) < PAIRED_GROUPS:
        return None
    x, y = np.array(pairs, dtype=np.float64).T
    if np.ptp(x) <= ROUNDING or np.ptp(y) <= ROUNDING:
        return None
    return float(np.corrcoef(x, y)[0, 1])


# -- P1.14 -----------------------------------------------------------------------------------------------------------

RULES = ("raise_group", "denser_credit")
"""Rules that look at the rank."""
CONTROL = "late_group"
"""The rule that raises R late whatever the rank: what it gains has nothing to do with the rank."""

Cell = tuple[str, int, str]
"""Rule with its options, R at the start, credit at the start."""


def rank_aware(runs: Sequence[Evidence]) -> list[Verdict]:
    """P1.14: at equal rollouts a rule that watches the rank ends above the best fixed setting and above the control."""
    verdicts: list[Verdict] = []
    spent = [run for run in runs if isinstance(run["group"], int) and isinstance(run["seed"], int)
             and isinstance(run["rollouts"], int) and 0 < run["rollouts"] <= _last(run, "spent")]
    for family in families(spent, ("adapt", "group", "credit", "steps")):
        budget = family[0]["rollouts"]
        ends_of: dict[Cell, dict[int, float]] = {}
        for run in family:
            cell = (str(run["adapt"] or "none"), run["group"], credit_of(run))
            ends_of.setdefault(cell, {})[run["seed"]] = at(run.points(), [budget])[0]
        verdicts += [_aware(family[0].subject, budget, cell, ends_of) for cell in sorted(ends_of)
                     if cell[0].split(",")[0] in RULES]
    return verdicts or [missing("P1.14", "runs", "runs of a rule and of fixed R at one budget: creditscope train "
                                                 "--adapt raise_group --rollouts 3840 --scope light, and the same "
                                                 "without --adapt")]


def best_of(rivals: Mapping[Cell, Mapping[int, float]], seeds: set[int]) -> Cell | None:
    """The setting with the highest mean over the seeds, of those that have three of them. It is chosen after the fact,
    which favours it.
    """
    shared = {cell: [value for seed, value in found.items() if seed in seeds] for cell, found in rivals.items()}
    ready = {cell: math.fsum(values) / len(values) for cell, values in shared.items() if len(values) >= ENOUGH}
    return max(ready, key=lambda cell: ready[cell]) if ready else None


def _aware(subject: str, budget: int, cell: Cell, ends_of: Mapping[Cell, Mapping[int, float]]) -> Verdict:
    """A rule's accuracy at the budget's end less that of the best fixed setting, and less that of the control."""
    definition = f"accuracy at {budget:,} rollouts, --adapt {cell[0]} from R = {cell[1]}, less fixed R and the control"
    mine = ends_of[cell]
    outcomes: list[Outcome] = []
    said, gaps, lacking = [], [], []
    for rule, words in (("none", "no --adapt"), (CONTROL, f"--adapt {CONTROL}")):
        rivals = {other: found for other, found in ends_of.items() if other[0].split(",")[0] == rule}
        best = best_of(rivals, set(mine))
        gap = paired(mine, rivals[best]) if best is not None else None
        if best is None or gap is None:
            lacking.append(f"{ENOUGH} shared seeds of runs with {words}")
            outcomes.append("undecided")
            continue
        outcomes.append(above(gap, 0.0))
        gaps.append(gap)
        said.append(f"{in_points(gap)} points against {_named(best)}")
    if not gaps:
        return missing("P1.14", subject, " and ".join(lacking), definition)
    reason = f"it ends {' and '.join(said)}" + (f"; it needs {lacking[0]}" if lacking else "")
    least = min(gaps, key=lambda gap: gap.mean)
    return verdict_of("P1.14", definition, subject, all_of(outcomes), (least, "seeds"), reason,
                      expected="above 0 against both", threshold="both intervals above 0; shown: the smaller gap",
                      bounds=(0.0,))


def _named(cell: Cell) -> str:
    rule, size, credit = cell
    credit = "" if credit == "outcome" else f" with {credit}"
    return f"the best fixed setting, R = {size}{credit}" if rule == "none" else f"{rule} from R = {size}{credit}"
