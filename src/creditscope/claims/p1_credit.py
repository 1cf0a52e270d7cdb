"""Claims of arXiv:2606.29238 (P1) about credit and baseline, on runs: uniform credit (P1.1), zero sums (P1.2), dead
groups (P1.4), the bias over turns (P1.8), the optimal baseline (P1.11). No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from creditscope.claims.evidence import Evidence, cells, families, over_runs, rows_with
from creditscope.claims.reading import READ, SWEEP, BySize, credit_of, estimate, fixed, mean_over, sweeps, with_outcome
from creditscope.claims.verdict import POSITIVE, Band, ClaimVerdict, at_most, exact, missing, needing
from creditscope.credit.table import ESTIMATORS
from creditscope.methods import find
from creditscope.runs import schema
from creditscope.runs.numbers import mean

ROUNDING = 1e-9
"""A share of credit at or below it is rounding: both are computed in float64 from the same numbers."""
SUM_ROUNDING = 1e-5
"""|Σc| / Σ|c| at or below it is rounding: credits are float32, good to 6e-8, and a group adds up to 64 of them."""


@needing("the metric credit/within: any run of creditscope lab train that had a group with right and wrong answers")
def uniform_credit(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """P1.1: within = Σ_it (A_it − Ā_i)² / Σ_it A_it² is 0 under outcome credit, and above 0 under token credit."""
    known = [run for run in fixed(runs) if run.series(schema.CREDIT_WITHIN) and credit_of(run) in ESTIMATORS]
    for family in families(known, SWEEP):
        name, subject = credit_of(family[0]), family[0].subject
        definition = f"share of the credit that differs inside a rollout, credit {name}"
        if ESTIMATORS[name].per_answer:
            values = [value for run in family for _, value in run.series(schema.CREDIT_WITHIN)]
            yield at_most(ROUNDING, definition, subject, max(values), f"in {len(values)} steps the largest share that "
                          f"differs inside a rollout is {max(values):.2g}", threshold="at most {:g} in every step",
                          n=len(values), of="steps")
        else:
            least = min(run.mean(schema.CREDIT_WITHIN) or 0.0 for run in family)
            yield exact(definition, subject, least > ROUNDING, least,
                        f"in the run with the least of it, {least:.2g} of the credit differs inside a rollout",
                        expected="above 0", threshold=f"mean above {ROUNDING:g} in every run", n=len(family), of="runs")


@needing(f"{READ}, with outcome credit and a method that has a group baseline (--method p1_grpo)")
def zero_sum(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """P1.2: |Σ_i c_i| / Σ_i |c_i| = 0 in every group, c the credit that reaches the gradient under a centred row."""
    centred = [run for run in with_outcome(runs) if (row := find.row_of(run.config)) is not None and row.centred]
    for family in sweeps(centred, lambda run: len(run.column("w_sum"))):
        values = [value for run in family for value in run.column("w_sum")]
        row = find.row_of(family[0].config)
        divided = row is not None and row.aggregate == "sequence_mean"
        yield at_most(SUM_ROUNDING, "|Σc| / Σ|c| in a group, c the credit that reaches the gradient", family[0].subject,
                      max(values), f"the largest of {len(values)} groups is {max(values):.2g}"
                      + (", under a row that divides by the length of the answer" if divided else ""),
                      threshold="at most {:g} in every group", n=len(values), of="groups")


LAW_BAND = 0.05
"""How far the share of dead groups may lie from the law: five groups in a hundred, since P1 gives no number."""
THIRDS = 6
"""Steps that a run needs for a comparison of its first third with its last: two in each."""


@needing("the metrics reward/mean and signal/dead_groups of a run with outcome credit and binary rewards; and for the "
         f"gradients {READ}")
def sparsity(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """P1.4: a unanimous group has no gradient, P(dead) = p^R + (1−p)^R, and the dead share grows over training."""
    own = with_outcome(runs)
    yield from _unanimous(own)
    yield from _law(own)
    yield from _growth(own)


def _unanimous(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """max |K_ij| over unanimous groups is 0 under a row that compares siblings and has no KL term."""
    known = [run for run in runs if (row := find.row_of(run.config)) is not None and row.centred and not row.beta]
    for family in families(known, SWEEP):
        looks = [(count, largest) for run in family
                 for count, largest in rows_with(run.readings, "unanimous", "unanimous_largest") if count]
        if looks:
            largest, count = max(largest for _, largest in looks), int(sum(count for count, _ in looks))
            yield at_most(0.0, "largest |⟨g_i, g_j⟩| in a unanimous group", family[0].subject, largest,
                          f"the largest entry of the Grams of {count} unanimous groups is {largest:.2g}",
                          threshold="exactly 0", n=count, of="groups")


def dead_share(right: int, count: int, size: int) -> float:
    """p^R + (1−p)^R without bias from K = `right` of N = `count` rewards: [C(K,R) + C(N−K,R)] / C(N,R).

    With the batch's mean in place of p the result is too large: by 0.03 with eight groups of two.

    >>> dead_share(8, 16, 2), dead_share(2, 4, 2)
    (0.4666666666666667, 0.3333333333333333)
    """
    return (math.comb(right, size) + math.comb(count - right, size)) / math.comb(count, size)


def is_binary(mean: float, std: float, count: float) -> bool:
    """Whether all of `count` rewards are 0 or 1: then mean r² = mean r, var·(B−1)/B + mean² = mean, B = count.

    To 1e-4, because the recorded std is a float32.
    """
    return 0 <= mean <= 1 and abs(std**2 * (count - 1) / count + mean**2 - mean) < 1e-4


def _law(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """Measured share of dead groups less p^R + (1−p)^R for prompts that all have one p."""
    def excess(run: Evidence) -> list[float]:
        size = run["group"]
        known = [(dead, groups * size, mean, std) for dead, groups, mean, std in run.columns.together(
            schema.SIGNAL_DEAD_GROUPS, schema.SIGNAL_GROUPS, schema.REWARD_MEAN, schema.REWARD_STD)]
        if not all(0 < size <= count and is_binary(mean, std, count) for _, count, mean, std in known):
            return []
        return [dead - dead_share(round(mean * round(count)), round(count), size) for dead, count, mean, _ in known]

    band = Band(-LAW_BAND, LAW_BAND)
    for family in sweeps(runs, lambda run: len(excess(run))):
        found = BySize({size: value for size, cell in cells(family, "group").items()
                        if (value := over_runs([excess(run) for run in cell], "steps")) is not None})
        yield found.verdict(
            "share of dead groups less p^R + (1−p)^R for one p, estimated from the batch without bias",
            family[0].subject, dict.fromkeys(found, band),
            f"the share less the law for one p is {found.listed(3)}, and prompts of different p raise it (Jensen)",
            expected="0", threshold=f"interval {band} at every R")


def _growth(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """Mean share of dead groups in the last third of a run's steps less that in the first third."""
    def grown(run: Evidence) -> float:
        values = [value for _, value in run.series(schema.SIGNAL_DEAD_GROUPS)]
        third = len(values) // 3
        return (math.fsum(values[-third:]) - math.fsum(values[:third])) / third

    long = [run for run in runs if len(run.series(schema.SIGNAL_DEAD_GROUPS)) >= THIRDS]
    for family in sweeps(long, lambda run: len(run.series(schema.SIGNAL_DEAD_GROUPS))):
        found = mean_over("runs", [grown(run) for run in family])
        yield estimate("share of dead groups, last third of the steps less first third", family[0].subject, found,
                       POSITIVE, "from first to last third of a run the share of dead groups changes by "
                       f"{found}")


@needing("kept rollouts of a task with turns and states: creditscope lab train --task turns --keep-every 1")
def multi_turn(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """P1.8: the bias of outcome credit grows with the turn, and other baselines reduce it.

    Compared is MS_h, the mean square of the bias at turn h: its estimate is unbiased and may be below 0 by chance.
    """
    for family in sweeps(fixed(runs), lambda run: len(_squares(run, "rms_outcome"))):
        yield _by_turn(family)
        for column, words in (("rms_turn", "mean of the same turn"), ("rms_state", "mean of the same state")):
            left = over_runs([_differences(run, column) for run in family], "kept steps")
            if left is not None:
                yield estimate(f"mean square of the bias at later turns, outcome less the {words}", family[0].subject,
                               left, POSITIVE, f"with the group's {words} {_left(family, column):.0%} of the mean "
                               "square is left")


def _squares(run: Evidence, column: str) -> dict[float, dict[int, float]]:
    """kept step -> turn -> the square of an RMS, with its sign."""
    out: dict[float, dict[int, float]] = {}
    for step, turn, value in rows_with(run.turns, "step", "turn", column):
        out.setdefault(step, {})[int(turn)] = math.copysign(value * value, value)
    return out


def _by_turn(family: Sequence[Evidence]) -> ClaimVerdict:
    """The slope of MS_h on h is above 0, over the kept steps that have several turns.

    MS_0 = 0 and the bound are tested by enumeration alone: in sampled groups, whose credit sums to 0, both always hold.
    """
    subject = family[0].subject
    steps = [[turns for turns in _squares(run, "rms_outcome").values() if len(turns) > 1 and 0 in turns]
             for run in family]
    slope = over_runs([[float(np.polyfit(list(step), list(step.values()), 1)[0]) for step in some] for some in steps],
                      "kept steps")
    end = over_runs([[step[max(step)] for step in some] for some in steps])
    if slope is None or end is None:
        return missing(subject, "kept steps in which two groups met the same state at several turns: give more "
                       "--prompts", "mean square of the bias by turn")
    shares = [largest / bound for run in family
              for largest, bound in rows_with(run.turns, "largest", "bound") if bound]
    beside = f"; the largest bias is {max(shares):.2f} of its bound" if shares else ""
    return estimate("slope of the mean square of outcome's bias on the turn", subject, slope, POSITIVE,
                    f"a turn adds {slope} to the mean square, which is {end.value.mean:.2g} at the "
                    f"last{beside}")


def _differences(run: Evidence, column: str) -> list[float]:
    """For each kept step: the mean over turns h ≥ 1 of MS_h under outcome less MS_h under another baseline."""
    mine, other = _squares(run, "rms_outcome"), _squares(run, column)
    by_step = [[mine[step][turn] - other[step][turn] for turn in mine[step].keys() & other[step].keys() if turn > 0]
               for step in mine.keys() & other.keys()]
    return [mean(values) for values in by_step if values]


def _left(family: Sequence[Evidence], column: str) -> float:
    """Σ MS_h of another baseline over Σ MS_h of outcome, h ≥ 1: over all kept steps of all runs."""
    def total(name: str) -> float:
        return math.fsum(value for run in family for turns in _squares(run, name).values()
                         for turn, value in turns.items() if turn > 0)

    whole = total("rms_outcome")
    return total(column) / whole if whole else math.nan


LOST = 0.05
"""The share of variance that a baseline may lose, beyond chance, and still be called optimal: 5 % more rollouts, less
than one in a group of eight."""
APART = 0.05
"""How far b* may lie from the mean, in units of a binary reward."""


@needing("the score norms of a run with outcome credit: creditscope lab train --scope full --every 5")
def baseline(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """P1.11: the group mean minimises the variance: (V(mean) − V(b*)) / V(b*) less what chance gives, and b* − mean."""
    lost, chance = schema.BASELINE_VARIANCE_LOST, schema.BASELINE_VARIANCE_LOST_BY_CHANCE
    for family in sweeps(with_outcome(runs), lambda run: len(run.series(chance))):
        excess, shift = (over_runs([[a - b for a, b in run.columns.together(*pair)] for run in family])
                         for pair in ((lost, chance), (schema.BASELINE_OPTIMAL, schema.BASELINE_MEAN)))
        if excess is not None:
            above, by_chance = (mean([value for run in family for _, value in run.series(name)])
                                for name in (lost, chance))
            yield estimate(
                "variance lost by the group mean against b* = E[r‖ψ‖²]/E[‖ψ‖²], less what chance gives",
                family[0].subject, excess, Band(high=LOST),
                f"the mean's variance is {above:.0%} above the optimum's, where chance alone gives {by_chance:.0%}",
                expected="0")
        if shift is not None:
            yield estimate("b* less the group mean", family[0].subject, shift, Band(-APART, APART),
                           f"b* less the mean is {shift}", expected="0")
