"""Claims of arXiv:2606.29238 (P1) about accuracy, on runs: larger groups learn faster (P1.7), and a schedule that reads
the rank beats a fixed R (P1.14). No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from creditscope.claims.evidence import ENOUGH, Evidence, Measured, cells, families
from creditscope.claims.reading import SEEDS, credit_of, estimate, from_three, sweeps, with_outcome
from creditscope.claims.verdict import POSITIVE, ClaimVerdict, Outcome, all_of, missing, needing
from creditscope.methods.axes import OWN_CREDIT
from creditscope.runs.compare import at
from creditscope.runs.intervals import paired
from creditscope.runs.numbers import in_points, mean

PAIRS = ((2, 4), (2, 8), (4, 8), (8, 16), (8, 32))
"""The R that are compared: P1's three with each other, and larger ones with P1's largest."""
NEAR = 0.1
"""How far, as a share, the nearest evaluation may lie from where two runs are compared: between evaluations accuracy is
not linear."""


@needing("runs with outcome credit at two --group, evaluated on the way: creditscope lab train --eval-every 5")
def larger_groups_learn_faster(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """P1.7: accuracy of the larger R less that of the smaller, paired by seed, at equal steps and at equal rollouts."""
    finished = [run for run in with_outcome(runs) if run.finished]
    for by, unit in (("step", "steps"), ("spent", "rollouts")):
        for family in sweeps(finished, partial(_last, by=by)):
            sizes = cells(family, "group")
            for small, large in PAIRS:
                if small in sizes and large in sizes:
                    yield _faster(sizes[small], sizes[large], by, unit)


def _last(run: Evidence, by: str) -> int:
    """The position of the run's last evaluation, 0 where it has none after training."""
    return max((x for x, _ in run.points(by)), default=0)


def _faster(small: Sequence[Evidence], large: Sequence[Evidence], by: str, unit: str) -> ClaimVerdict:
    """Both sizes are read where the first run of either ends."""
    few, many, subject = small[0]["group"], large[0]["group"], small[0].subject
    definition = f"accuracy after equal {unit}, R = {many} less R = {few}, paired by seed"
    shared = {run["seed"] for run in small} & {run["seed"] for run in large}
    both = [run for run in (*small, *large) if run["seed"] in shared]
    end = min((_last(run, by) for run in both), default=0)
    off = [run for run in both if min(abs(x - end) for x, _ in run.points(by)) > NEAR * end]
    if off:
        flag = "--eval-every" if by == "step" else "--eval-rollouts"
        return missing(subject, f"an evaluation at {end:,} {unit}, to a tenth, of R = {off[0]['group']}: creditscope "
                       f"lab train {flag} {end}", definition)
    lower, upper = ({run["seed"]: at(run.points(by), [end])[0] for run in some if run["seed"] in shared}
                    for some in (small, large))
    value = paired(upper, lower)
    if value is None:
        return missing(subject, f"{SEEDS}, the same for R = {few} and R = {many}", definition)
    value = from_three(value)
    return estimate(definition, subject, Measured(value, "seeds"), POSITIVE,
                    f"after {end:,} {unit} R = {many} differs by {in_points(value)} points from R = {few}")


RULES = ("raise_group", "denser_credit")
"""Rules that read the rank."""
CONTROL = "late_group"
"""The rule that raises R late whatever the rank: its gain is not due to the rank."""

Schedule = tuple[str, int, str]
"""Rule with its options, R at the start, credit at the start."""


@needing("runs of a rule and of fixed R at one budget: creditscope lab train --adapt raise_group --rollouts 3840 "
         "--scope light, and the same without --adapt")
def rank_aware(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """P1.14: at equal rollouts a rule that reads the rank ends above the best fixed setting and above the control."""
    spent = [run for run in runs if isinstance(run["group"], int) and isinstance(run["seed"], int)
             and isinstance(run["rollouts"], int) and 0 < run["rollouts"] <= _last(run, "spent")]
    for family in families(spent, ("adapt", "group", "credit", "steps")):
        budget = family[0]["rollouts"]
        ends_of: dict[Schedule, dict[int, float]] = {}
        for run in family:
            schedule = (str(run["adapt"] or "none"), run["group"], credit_of(run))
            ends_of.setdefault(schedule, {})[run["seed"]] = at(run.points(), [budget])[0]
        for schedule in sorted(ends_of):
            if _rule(schedule) in RULES:
                yield _aware(family[0].subject, budget, schedule, ends_of)


def _rule(schedule: Schedule) -> str:
    return schedule[0].split(",")[0]


def best_of(rivals: Mapping[Schedule, Mapping[int, float]], seeds: set[int]) -> Schedule | None:
    """The setting with the highest mean over the seeds, of those with three seeds. Chosen from the results, which
    favours it."""
    shared = {rival: [value for seed, value in found.items() if seed in seeds] for rival, found in rivals.items()}
    ready = {rival: mean(values) for rival, values in shared.items() if len(values) >= ENOUGH}
    return max(ready, key=lambda rival: ready[rival]) if ready else None


def _aware(subject: str, budget: int, schedule: Schedule, ends_of: Mapping[Schedule, Mapping[int, float]]
           ) -> ClaimVerdict:
    definition = (f"accuracy at {budget:,} rollouts, --adapt {schedule[0]} from R = {schedule[1]}, less fixed R and "
                  "the control")
    mine = ends_of[schedule]
    outcomes: list[Outcome] = []
    said, gaps, lacking = [], [], []
    for rule, words in (("none", "no --adapt"), (CONTROL, f"--adapt {CONTROL}")):
        rivals = {other: found for other, found in ends_of.items() if _rule(other) == rule}
        best = best_of(rivals, set(mine))
        gap = paired(mine, rivals[best]) if best is not None else None
        if best is None or gap is None:
            lacking.append(f"{ENOUGH} shared seeds of runs with {words}")
            outcomes.append("undecided")
            continue
        outcomes.append(POSITIVE.judge(gap))
        gaps.append(gap)
        said.append(f"{in_points(gap)} points against {_named(best)}")
    if not gaps:
        return missing(subject, " and ".join(lacking), definition)
    least = min(gaps, key=lambda gap: gap.mean)
    return estimate(definition, subject, Measured(least, "seeds"), POSITIVE,
                    f"it ends {' and '.join(said)}" + (f"; it needs {lacking[0]}" if lacking else ""),
                    outcome=all_of(outcomes), expected="above 0 against both",
                    threshold="both intervals above 0; shown: the smaller gap")


def _named(schedule: Schedule) -> str:
    rule, size, credit = schedule
    credit = "" if credit == OWN_CREDIT else f" with {credit}"
    return f"the best fixed setting, R = {size}{credit}" if rule == "none" else f"{rule} from R = {size}{credit}"
