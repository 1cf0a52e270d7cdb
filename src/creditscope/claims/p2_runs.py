"""P2's claims (arXiv:2601.05002) about training, on the evidence of runs. No torch.

A family is a set of runs that differ in their seed alone. Its number is the mean over runs of each run's mean over
steps, with its interval over runs. Fewer than three runs decide nothing: two may agree by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from creditscope.claims.evidence import ENOUGH, Evidence, families
from creditscope.claims.reading import from_three, rule_of
from creditscope.claims.verdict import NOTHING, POSITIVE, Band, ClaimVerdict, all_of, at_most, missing, needing
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import OWN_CREDIT, Method
from creditscope.methods.find import find, row_of
from creditscope.methods.words import law
from creditscope.optimizer.table import OPTIMIZERS, OptimizerRow
from creditscope.runs import schema
from creditscope.runs.correlation import ROUNDING, correlation
from creditscope.runs.intervals import Interval, mean_interval, paired
from creditscope.runs.kinds import HALF, brake_of, estimator_of, relative_change
from creditscope.runs.numbers import in_percent, in_points

PROBE = "--probe light --probe-every 1"

def _trained(runs: Sequence[Evidence], over: Sequence[str] = ()) -> Iterator[list[Evidence]]:
    """Families of the runs whose method is in the table."""
    yield from families([run for run in runs if row_of({"method": run["method"]}) is not None], over)


def _by_seed(runs: Sequence[Evidence], number: Callable[[Evidence], float | None]) -> dict[int, float]:
    """seed -> the number of its run, where it has one. Several records of one run count once."""
    return {int(_number(run, "seed", 0)): found for run in runs if (found := number(run)) is not None}


def _over_runs(runs: Sequence[Evidence], number: Callable[[Evidence], float | None]) -> Interval | None:
    found = _by_seed(runs, number)
    return mean_interval(list(found.values())) if found else None


def _row(run: Evidence) -> Method:
    """The run's method with the run's own β."""
    row = find(str(run["method"]))
    return row.replace(beta=_number(run, "beta", row.beta))


def _updates(run: Evidence) -> int:
    """Optimiser steps per batch."""
    return int(_number(run, "inner_steps", 1) * _number(run, "minibatches", 1))


def _optimizer(run: Evidence) -> OptimizerRow:
    """The run's optimiser; runs without the setting used AdamW."""
    return OPTIMIZERS.get(str(run["optimizer"]), OPTIMIZERS["adamw"])


def _number(run: Evidence, name: str, default: float) -> float:
    """A setting; a run without it had its default."""
    value = default if run[name] is None else run[name]
    if not isinstance(value, int | float):
        raise CreditscopeError(f"run {run.name}: {name} is {value!r:.60}, not a number; is this a run of creditscope "
                               f"lab train?")
    return value


def _subject(run: Evidence, brake: bool = True) -> str:
    """Model, task, method and the settings that P2's claims depend on."""
    words = [run.subject, f"R = {run['group']}", f"μ = {_updates(run)}", f"lr = {_number(run, 'lr', 0):g}"]
    if run["credit"] not in (None, OWN_CREDIT):
        words.insert(1, str(run["credit"]))
    words.append(f"β₁ = {_number(run, 'beta1', 0.9):g}" if _optimizer(run).adaptive else "SGD")
    if _row(run).beta:
        words.append(f"β = {_row(run).beta:g}")
    if brake and brake_of(run.config) != "none":
        words.append(f"brake {brake_of(run.config)}")
    return ", ".join(words)


def _over_seeds(definition: str, subject: str, value: Interval, band: Band, words: str, *, expected: str,
                threshold: str) -> ClaimVerdict:
    """The verdict on a mean over runs; if undecided, the reason says how many runs would decide."""
    known = from_three(value)
    outcome = band.judge(known)
    if outcome == "undecided":
        wanted = max(band.enough(value) or 0, ENOUGH)
        words += f": {value.n} run{'s' * (value.n > 1)} cannot tell, needs about {wanted}"
    return ClaimVerdict(definition=definition, subject=subject, outcome=outcome, reason=words, observed=value.mean,
                   interval=known.ends, expected=expected, threshold=threshold, n=value.n, of="runs")


UNSEEN = 0.05
"""Change of the update, had all credit been a tenth, below which the optimiser is blind to its scale. An update
proportional to credit changes by 0.9; weights whose gradients are about ε leave up to a twentieth."""
SMALL_EPS, LARGE_EPS = 1e-8, 1e-5
"""P2's limit is reached at the first ε and missed at the second; nothing is claimed between them."""
SCALE = "relative change of the update, had all credit since the start been a tenth (optimizer/scale_change)"


@needing(f"a run with {PROBE}", NOTHING, SCALE)
def blind_to_scale(runs: Sequence[Evidence]) -> list[ClaimVerdict]:
    """P2.3: `optimizer/scale_change` is small under Adam with β = 0 and a small ε, and not otherwise."""
    out, lacking = [], []
    for family in _trained(runs):
        subject, broken_by = _subject(family[0]), _broken_by(family[0])
        if broken_by is None:
            continue
        value = _over_runs(family, lambda run: run.mean(schema.OPTIMIZER_SCALE_CHANGE))
        if value is None:
            lacking.append(missing(subject, f"optimizer/scale_change: train with {PROBE}, and with a --clip-norm that "
                                   "no gradient reaches", SCALE))
            continue
        out.append(_over_seeds(
            SCALE, subject, value, Band(low=UNSEEN) if broken_by else Band(high=UNSEEN),
            f"a tenth of the credit changes the update by {100 * value.mean:.2g} %",
            expected=f"broken by {broken_by}" if broken_by else "blind", threshold=f"blind: < {UNSEEN:g}"))
    return out or lacking  # runs that were not probed are mentioned only where none was


def _broken_by(run: Evidence) -> str | None:
    """The setting by which the update depends on the scale, empty where it does not, None where nothing is claimed."""
    if not _optimizer(run).adaptive:
        return "SGD"
    if _row(run).has_loss_kl:
        return f"β = {_row(run).beta:g}"
    if not _optimizer(run).decoupled and _number(run, "weight_decay", 0):
        return "coupled weight decay"
    eps = _number(run, "eps", SMALL_EPS)
    if eps >= LARGE_EPS:
        return f"ε = {eps:g}"
    return "" if eps <= SMALL_EPS else None


CLOSE = 0.1
"""Of a full step: how far the measured carry may lie from C. P2 derives C for one token under a constant gradient; C is
0.9 with momentum and 0 without."""
CLIPPED = f"runs with --inner-steps 2 or more, Adam, no brake, a method that clips, and {PROBE}"


@needing(CLIPPED, NOTHING)
def overshoot(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """P2.4: tokens move by C_{T,0} after their gradient has stopped. Adam, several updates, no brake."""
    after = "share of the distance past the bound moved after the token's own gradient stopped (overshoot/after)"
    carried = "first move after the gradient stopped over the move that crossed, minus C (overshoot/carry − " \
              "overshoot/carry_predicted)"
    for family in _trained(runs):
        first = family[0]
        if _updates(first) < 2 or not _optimizer(first).adaptive or brake_of(first.config) != "none":
            continue
        subject = _subject(first)
        share, gap = _over_runs(family, lambda run: run.mean(schema.OVERSHOOT_AFTER)), _over_runs(family, _carry_gap)
        if share is None:
            yield missing(subject, f"overshoot/after: {CLIPPED}", after)
        else:
            words = f"{100 * share.mean:.0f} % of the distance is moved after the gradient stopped"
            if _number(first, "beta1", 0.9):
                yield _over_seeds(after, subject, share, POSITIVE, words, expected="above 0", threshold="> 0")
            else:
                yield _over_seeds(f"without momentum, {after}", subject, share, Band(high=CLOSE), words,
                                  expected="none of it", threshold=f"< {CLOSE:g}")
        if gap is None:
            yield missing(subject, f"overshoot/carry beside overshoot/carry_predicted: {CLIPPED}, and --minibatches 1",
                          carried)
        else:
            yield _over_seeds(carried, subject, gap, Band(-CLOSE, CLOSE),
                              f"the measured carry lies {gap.mean:+.2f} of a full step from C", expected="0",
                              threshold=f"within ±{CLOSE:g}")


def _carry_gap(run: Evidence) -> float | None:
    """Mean of carry − C over the steps that have both."""
    both = [carry - told for carry, told in run.columns.together(schema.OVERSHOOT_CARRY,
                                                                 schema.OVERSHOOT_CARRY_PREDICTED)]
    return sum(both) / len(both) if both else None


NO_SIGNAL = 0.3
"""|r| of J and reward over training below which J is no progress signal: it explains less than r² = 9 % of the reward's
variance."""


@needing("a run of creditscope lab train with outcome credit", NOTHING)
def loss_value(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """P2.5: J = 0 where Prop. 4 leaves nothing of it; elsewhere, does J correlate with the reward over training?

    Only runs with outcome credit: P2's J has A_i = r_i − mean(r).
    """
    nothing = "largest |J| at ratio 1 over training (objective/value)"
    signal = "correlation of J with the mean reward over the steps of a run (objective/value, reward/mean)"
    for family in _trained(runs):
        subject = _subject(family[0])
        if estimator_of(family[0].config) != OWN_CREDIT or rule_of(family[0]) != "none":
            continue
        largest, value = _by_seed(family, _largest), _over_runs(family, _signal)
        if law(_row(family[0])).kind == "zero":
            if largest:
                worst = max(largest.values())
                yield at_most(ROUNDING, nothing, subject, worst, f"|J| is at most {worst:.2g} at every step",
                              threshold="≤ {:g}, the rounding of a float32 sum", n=len(largest), of="runs")
            else:
                yield missing(subject, "objective/value of some step", nothing)
        elif value is None:
            yield missing(subject, "steps over which objective/value and reward/mean both change", signal)
        else:
            yield _over_seeds(signal, subject, value, Band(-NO_SIGNAL, NO_SIGNAL),
                              f"the correlation of J with the reward is {value.mean:+.2f}", expected="about 0",
                              threshold=f"|r| ≤ {NO_SIGNAL:g}")


def _largest(run: Evidence) -> float | None:
    return max((abs(value) for _, value in run.series(schema.OBJECTIVE_VALUE)), default=None)


def _signal(run: Evidence) -> float | None:
    """r of J and reward; None where J is rounding."""
    pairs = run.columns.together(schema.OBJECTIVE_VALUE, schema.REWARD_MEAN)
    if not pairs or max(abs(value) for value, _ in pairs) <= ROUNDING:
        return None
    found = correlation(*zip(*pairs, strict=True))
    return None if found is None else found.r


LITTLE = 0.03
"""The loss of accuracy that counts as none: twice the error of an evaluation of 1,000 problems. Chosen after the runs,
in place of a rule that an interval of any width could meet."""
BRAKED = "distance past the bound against no brake, paired by seed (overshoot/distance), with accuracy not lost"
PAIRED = f"finished runs that differ in --brake alone, some of them without one, {ENOUGH} seeds each, with {PROBE}"


@needing(PAIRED, NOTHING, BRAKED)
def momentum_aware(runs: Sequence[Evidence]) -> Iterator[ClaimVerdict]:
    """P2.6: among finished runs that differ in their brake alone: is the distance past the bound halved, at no loss?

    Both are paired by seed with the runs that have no brake: the interval of the relative change of the distance must
    lie below −50 %, the rule of `creditscope lab compare brake`, and that of the difference in accuracy above −3
    points.
    """
    for family in _trained([run for run in runs if run.finished], ("brake",)):
        by_brake: dict[str, list[Evidence]] = {}
        for run in family:
            by_brake.setdefault(brake_of(run.config), []).append(run)
        plain = by_brake.pop("none", [])
        for brake, braked in by_brake.items():
            subject = f"{_subject(family[0], brake=False)}, brake {brake}"
            change = relative_change(*(_by_seed(some, lambda run: run.mean(schema.OVERSHOOT_DISTANCE))
                                       for some in (braked, plain)))
            gap = paired(*(_by_seed(some, _end) for some in (braked, plain)))
            if change is None or gap is None or min(change.n, gap.n) < ENOUGH:
                yield missing(subject, PAIRED, BRAKED)
                continue
            yield ClaimVerdict(
                definition=BRAKED, subject=subject, outcome=all_of([Band(high=HALF).judge(change),
                                                                    Band(low=-LITTLE).judge(gap)]),
                observed=change.mean, interval=change.ends, n=change.n, of="seeds",
                expected="at most half the distance, accuracy not lost",
                threshold=f"change < {100 * HALF:g} %, accuracy above −{100 * LITTLE:g} points",
                reason=f"distance {in_percent(change)}, accuracy {in_points(gap)} points")


def _end(run: Evidence) -> float | None:
    """Accuracy at the last evaluation."""
    return run.points()[-1][1] if run.points() else None
