"""P2's claims (arXiv:2601.05002) about training, read from what `creditscope train` left behind. No torch.

A family is a set of runs that differ in their seed alone. Its number is the mean over runs of each run's mean over
steps, with its interval over runs. Two runs that agree by chance have one of no width: fewer than three decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from creditscope.claims.evidence import ENOUGH, Evidence, families
from creditscope.claims.reading import row_of
from creditscope.claims.verdict import (
    Outcome,
    Verdict,
    above,
    all_of,
    below,
    decided,
    ends,
    enough,
    inside,
    missing,
)
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.methods.find import find
from creditscope.methods.words import law
from creditscope.runs.intervals import Interval, mean_interval, paired
from creditscope.runs.kinds import HALF, brake_of, estimator_of, relative_change
from creditscope.runs.numbers import in_percent, in_points
from creditscope.runs.progress import ROUNDING, correlation

PROBE = "--probe light --probe-every 1"

# -- a family ---------------------------------------------------------------------------------------------------------


def _trained(runs: Sequence[Evidence], over: Sequence[str] = ()) -> Iterator[list[Evidence]]:
    """Families of the runs that trained with a method of the table, and not of records that were made otherwise."""
    yield from families([run for run in runs if row_of(run) is not None], over)


def _by_seed(runs: Sequence[Evidence], number: Callable[[Evidence], float | None]) -> dict[int, float]:
    """seed -> the number of its run, where it has one. However many records there are of a run, it counts once."""
    return {int(_number(run, "seed", 0)): found for run in runs if (found := number(run)) is not None}


def _over_runs(runs: Sequence[Evidence], number: Callable[[Evidence], float | None]) -> Interval | None:
    found = _by_seed(runs, number)
    return mean_interval(list(found.values())) if found else None


def _mean(metric: str) -> Callable[[Evidence], float | None]:
    """run -> mean over its steps."""
    return lambda run: run.mean(metric)


def _row(run: Evidence) -> Method:
    """The run's method with the run's own β."""
    row = find(str(run["method"]))
    return row.but(name=row.name, beta=_number(run, "beta", row.beta))


def _updates(run: Evidence) -> int:
    """Optimiser steps a batch."""
    return int(_number(run, "inner_steps", 1) * _number(run, "minibatches", 1))


def _adam(run: Evidence) -> bool:
    return bool(run["optimizer"] != "sgd")


def _number(run: Evidence, name: str, default: float) -> float:
    """A setting; a run that is older than it had its default."""
    value = default if run[name] is None else run[name]
    if not isinstance(value, int | float):
        raise CreditscopeError(f"run {run.name}: {name} is {value!r:.60}, not a number; is this a run of creditscope "
                               f"train?")
    return value


def _subject(run: Evidence, brake: bool = True) -> str:
    """Model, task, method and what P2's claims turn on."""
    words = [run.subject, f"R = {run['group']}", f"μ = {_updates(run)}", f"lr = {_number(run, 'lr', 0):g}"]
    if run["credit"] not in (None, "outcome"):
        words.insert(1, str(run["credit"]))
    words.append(f"β₁ = {_number(run, 'beta1', 0.9):g}" if _adam(run) else "SGD")
    if _row(run).beta:
        words.append(f"β = {_row(run).beta:g}")
    if brake and brake_of(run.config) != "none":
        words.append(f"brake {brake_of(run.config)}")
    return ", ".join(words)


def _verdict(claim: str, definition: str, subject: str, outcome: Outcome, value: Interval, expected: str,
             threshold: str, words: str, *bounds: float) -> Verdict:
    """A verdict on a mean over runs; one that is undecided says how many runs would do."""
    if value.n < ENOUGH:
        outcome = "undecided"
    if outcome == "undecided":
        wanted = max(enough(value, *bounds) or 0, ENOUGH) if value.n > 1 else ENOUGH
        words += f": {value.n} run{'s' * (value.n > 1)} cannot tell, needs about {wanted}"
    return Verdict(claim=claim, definition=definition, subject=subject, outcome=outcome, reason=words,
                   observed=value.mean, interval=ends(value) if value.n >= ENOUGH else None, expected=expected,
                   threshold=threshold, n=value.n,
                   of="runs")


# -- P2.3: the reward's scale ------------------------------------------------------------------------------------------

UNSEEN = 0.05
"""Change of the update, had all credit been a tenth, below which the optimiser is blind to it. One that follows the
credit's scale changes by 0.9; a twentieth is what ε leaves where a few weights have gradients of its own size."""
SMALL_EPS, LARGE_EPS = 1e-8, 1e-5
"""The two ε between which P2's limit is reached and missed; of one in between it says nothing."""


def blind_to_scale(runs: Sequence[Evidence]) -> list[Verdict]:
    """`optimizer/scale_change`: small under Adam with β = 0 and a small ε, and not under whatever breaks that."""
    definition = "relative change of the update, had all credit since the start been a tenth (optimizer/scale_change)"
    out, lacking = [], []
    for family in _trained(runs):
        subject, broken_by = _subject(family[0]), _broken_by(family[0])
        if broken_by is None:
            continue
        value = _over_runs(family, _mean("optimizer/scale_change"))
        if value is None:
            lacking.append(missing("P2.3", subject, f"optimizer/scale_change: train with {PROBE}, and with a "
                                   f"--clip-norm that no gradient reaches", definition))
            continue
        blind = broken_by == ""
        out.append(_verdict(
            "P2.3", definition, subject, below(value, UNSEEN) if blind else above(value, UNSEEN), value,
            "blind" if blind else f"broken by {broken_by}", f"blind: < {UNSEEN:g}",
            f"a tenth of the credit changes the update by {100 * value.mean:.2g} %", UNSEEN))
    # Runs that were not probed are nothing to speak of beside runs that were.
    return out or lacking or [missing("P2.3", "no run", f"a run with {PROBE}", definition)]


def _broken_by(run: Evidence) -> str | None:
    """What P2, or we, say makes the update see the scale; nothing, or None where neither says anything."""
    if not _adam(run):
        return "SGD"
    if _row(run).has_loss_kl:
        return f"β = {_row(run).beta:g}"
    if run["optimizer"] == "adam" and _number(run, "weight_decay", 0):
        return "coupled weight decay"
    eps = _number(run, "eps", SMALL_EPS)
    if eps >= LARGE_EPS:
        return f"ε = {eps:g}"
    return "" if eps <= SMALL_EPS else None


# -- P2.4: overshoot ---------------------------------------------------------------------------------------------------

CLOSE = 0.1
"""Of a full step: how far the measured carry may lie from C. P2 derives C for one token under a constant gradient; a
tenth is less than what separates C with momentum (0.9) from C without (0)."""


def overshoot(runs: Sequence[Evidence]) -> list[Verdict]:
    """Do tokens move on after their gradient has stopped, and by what C_{T,0} says? Adam, several updates, no brake."""
    after = "share of the distance past the bound moved after the token's own gradient stopped (overshoot/after)"
    carried = "first move after the gradient stopped over the move that crossed, minus C (overshoot/carry − " \
              "overshoot/carry_predicted)"
    needs = f"runs with --inner-steps 2 or more, Adam, no brake, a method that clips, and {PROBE}"
    out = []
    for family in _trained(runs):
        first = family[0]
        if _updates(first) < 2 or not _adam(first) or brake_of(first.config) != "none":
            continue
        subject = _subject(first)
        share = _over_runs(family, _mean("overshoot/after"))
        if share is None:
            out.append(missing("P2.4", subject, f"overshoot/after: {needs}", after))
        elif _number(first, "beta1", 0.9):
            out.append(_verdict("P2.4", after, subject, above(share, 0.0), share, "above 0", "> 0",
                                f"{100 * share.mean:.0f} % of the distance is moved after the gradient stopped", 0.0))
        else:
            out.append(_verdict(
                "P2.4", f"without momentum, {after}", subject, below(share, CLOSE), share, "none of it", f"< {CLOSE:g}",
                f"{100 * share.mean:.0f} % of the distance is moved after the gradient stopped", CLOSE))
        gap = _over_runs(family, _carry_gap)
        if gap is None:
            out.append(missing("P2.4", subject, f"overshoot/carry beside overshoot/carry_predicted: {needs}, and "
                               f"--minibatches 1", carried))
            continue
        out.append(_verdict("P2.4", carried, subject, inside(gap, -CLOSE, CLOSE), gap, "0", f"within ±{CLOSE:g}",
                            f"the measured carry lies {gap.mean:+.2f} of a full step from C", -CLOSE, CLOSE))
    return out or [missing("P2.4", "no run", needs)]


def _carry_gap(run: Evidence) -> float | None:
    """Mean of carry − C over the steps that have both."""
    both = [carry - told for carry, told in run.columns.together("overshoot/carry", "overshoot/carry_predicted")]
    return sum(both) / len(both) if both else None


# -- P2.5: the loss's value -------------------------------------------------------------------------------------------

NO_SIGNAL = 0.3
"""|r| of J and reward over training below which J is no progress signal: it then explains less than r² = 9 % of what
the reward does."""


def loss_value(runs: Sequence[Evidence]) -> list[Verdict]:
    """J = 0 where Prop. 4 leaves nothing of it; elsewhere, does it go with the reward over training?

    Of runs with outcome credit: P2's J is made of A_i = r_i − mean(r), and says nothing about other credit.
    """
    nothing = "largest |J| at ratio 1 over training (objective/value)"
    signal = "correlation of J with the mean reward over the steps of a run (objective/value, reward/mean)"
    out = []
    for family in _trained(runs):
        subject = _subject(family[0])
        if estimator_of(family[0].config) != "outcome" or str(family[0]["adapt"] or "none") != "none":
            continue
        if law(_row(family[0])).kind == "zero":
            largest = _by_seed(family, _largest)
            if not largest:
                out.append(missing("P2.5", subject, "objective/value of some step", nothing))
                continue
            worst = max(largest.values())
            out.append(Verdict(
                claim="P2.5", definition=nothing, subject=subject, outcome=decided(worst <= ROUNDING), observed=worst,
                expected="0", threshold=f"≤ {ROUNDING:g}, the rounding of a float32 sum", n=len(largest), of="runs",
                reason=f"|J| is at most {worst:.2g} at every step"))
            continue
        value = _over_runs(family, _signal)
        if value is None:
            out.append(missing("P2.5", subject, "steps over which objective/value and reward/mean both change", signal))
            continue
        out.append(_verdict("P2.5", signal, subject, inside(value, -NO_SIGNAL, NO_SIGNAL), value, "about 0",
                            f"|r| ≤ {NO_SIGNAL:g}", f"the correlation of J with the reward is {value.mean:+.2f}",
                            -NO_SIGNAL, NO_SIGNAL))
    return out or [missing("P2.5", "no run", "a run of creditscope train with outcome credit")]


def _largest(run: Evidence) -> float | None:
    return max((abs(value) for _, value in run.series("objective/value")), default=None)


def _signal(run: Evidence) -> float | None:
    """r of J and reward; a J of rounding has none, for noise correlates with anything."""
    pairs = run.columns.together("objective/value", "reward/mean")
    if not pairs or max(abs(value) for value, _ in pairs) <= ROUNDING:
        return None
    found = correlation(*zip(*pairs, strict=True))
    return None if found is None else found.r


# -- P2.6: a momentum-aware rule --------------------------------------------------------------------------------------


LITTLE = 0.03
"""Accuracy that may be lost and still be called none: twice the error of an evaluation of 1,000 problems. Chosen after
the runs, in place of a rule that an interval of any width could meet."""


def momentum_aware(runs: Sequence[Evidence]) -> list[Verdict]:
    """Among finished runs that differ in their brake alone: is the distance past the bound halved, at no loss?

    Both are paired by seed with the runs that have no brake: the interval of the relative change of the distance must
    lie below −50 %, the rule of `creditscope compare brake`, and that of the difference in accuracy above −3 points.
    """
    definition = "distance past the bound against no brake, paired by seed (overshoot/distance), with accuracy not lost"
    needs = f"finished runs that differ in --brake alone, some of them without one, {ENOUGH} seeds each, with {PROBE}"
    out = []
    for family in _trained([run for run in runs if run.finished], ("brake",)):
        by_brake: dict[str, list[Evidence]] = {}
        for run in family:
            by_brake.setdefault(brake_of(run.config), []).append(run)
        plain = by_brake.pop("none", [])
        for brake, braked in by_brake.items():
            subject = f"{_subject(family[0], brake=False)}, brake {brake}"
            change = relative_change(*(_by_seed(some, _mean("overshoot/distance")) for some in (braked, plain)))
            gap = paired(*(_by_seed(some, _end) for some in (braked, plain)))
            if change is None or gap is None or min(change.n, gap.n) < ENOUGH:
                out.append(missing("P2.6", subject, needs, definition))
                continue
            outcome = all_of([below(change, HALF), above(gap, -LITTLE)])
            out.append(Verdict(
                claim="P2.6", definition=definition, subject=subject, outcome=outcome, observed=change.mean,
                interval=ends(change), n=change.n, of="seeds", expected="at most half the distance, accuracy not lost",
                threshold=f"change < {100 * HALF:g} %, accuracy above −{100 * LITTLE:g} points",
                reason=f"distance {in_percent(change)}, accuracy {in_points(gap)} points"))
    return out or [missing("P2.6", "no run", needs, definition)]


def _end(run: Evidence) -> float | None:
    """Accuracy at the last evaluation."""
    return run.points()[-1][1] if run.points() else None
