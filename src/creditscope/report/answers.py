"""Four sentences on a run, by rule: signal, credit, directions, optimiser.

`broken`: the run cannot learn as it stands, or got worse. `watch`: a number that usually costs something. `good`:
neither. Low rank and even credit occur in most runs that learn, so neither is a fault. Every number is a mean over the
last `LAST` steps that have it; fewer than `FEWEST` steps, or old ones, are `unknown`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np

from creditscope.diagnosis.optimizer_verdicts import BLIND
from creditscope.diagnosis.thresholds import ENTROPY_LEFT, ENTROPY_LOW
from creditscope.methods.find import row_of
from creditscope.methods.words import law
from creditscope.report.remedies import words
from creditscope.report.run import Run
from creditscope.report.wording import mean_of, near, percent, short, too_few
from creditscope.runs import schema
from creditscope.runs.columns import Steps, is_number
from creditscope.runs.intervals import Interval, overlap, quantile
from creditscope.runs.numbers import mean_over
from creditscope.runs.numbers import percent as with_interval

SHAPES = {"good": "●", "watch": "▲", "broken": "■", "unknown": "○"}
"""State -> the shape that tells it without colour."""

LAST = 10
"""Steps of a mean: enough to smooth one batch, few enough to describe the run as it is now."""
FEWEST = 3
"""Steps below which no mean is given."""
FEWEST_GROUPS = 16
"""Groups below which no share is given: the 95 % interval of a share of n is up to ±1/√n, here ±25 points."""
LIVE_GOOD, LIVE_BROKEN = 0.5, 0.1
"""Shares of live groups. A dead group has no gradient and still counts in the mean: at 1/2 the step is half as long;
below 1/10, nine of ten rollouts are sampled in vain."""
CUT_WATCH, CUT_BROKEN = 0.1, 0.5
"""Shares of answers cut off at the length limit: their reward judges the limit, not the answer."""
SOLVED = 0.95
"""Mean reward, where 1 is the most, from which groups are dead because their answers are right."""
TOP_WATCH = 0.9
"""Share of Σ|w| on a tenth of the tokens: above it an error in those tokens decides the update."""
ONE_SIDED = 0.9
"""Share of Σ|w| of one sign: above it nearly all tokens are pushed the same way, whatever their reward."""
SILENT_BROKEN = 0.5
"""Share of steps in which every w was 0."""
ONE_WAY, WAYS = 1.25, 3.0
"""Effective rank below which the rollouts of a group push along one line, and the least null for which that is said: at
r_eff = 1.25 the second of two directions holds 2 % of the energy."""
PAST_WATCH, PAST_BROKEN = 0.05, 0.2
"""Shares of bounded tokens outside the clip range after the last update on the batch."""


@dataclass(frozen=True)
class Answer:
    topic: str
    state: str
    sentence: str
    rule: str
    """The thresholds, and which steps the number is a mean of."""
    evidence: str
    """The id of the section that shows it."""


def answers(run: Run) -> list[Answer]:
    return [signal(run), credit(run), directions(run), optimiser(run)]


# -- signal -----------------------------------------------------------------------------------------------------------


Clause = tuple[str, str]


def signal(run: Run) -> Answer:
    """live = Σ live groups / Σ groups, after what was learnt; then truncation, failed rewards and entropy."""
    steps = _last(run.trained, schema.SIGNAL_GROUPS, schema.SIGNAL_LIVE_GROUPS)
    rule = (f"Broken when accuracy fell, watch when the reward did: 95 % intervals apart. Live groups: watch below "
            f"{percent(LIVE_GOOD)}, broken below {percent(LIVE_BROKEN)}. Cut off: watch from {percent(CUT_WATCH)}, "
            f"broken from {percent(CUT_BROKEN)} unless the reward rose. {mean_of(steps)}")
    trend = reward_trend(run.trained)
    rose = trend is not None and trend[1] > trend[0]
    every = (progress(run.steps, run.trained), _live(steps), _cut(steps, rose), _unjudged(run.trained[-LAST:]),
             _entropy(run.trained))
    clauses = [clause for clause in every if clause is not None]
    said = "; ".join(text for _, text in clauses)
    sentence = f"{said[0].upper()}{said[1:]}. {loss_sentence(run.config)}".strip()
    return Answer("Signal", worst(*(state for state, _ in clauses)), sentence, rule, "steps")


def progress(steps: Sequence[Mapping[str, Any]], trained: Sequence[Mapping[str, Any]]) -> Clause | None:
    """The last evaluation against the first; where their intervals overlap, the reward over training."""
    evaluated = _having(steps, schema.EVAL_ACCURACY)
    trend = reward_trend(trained)
    rewards = f"mean reward {'fell' if trend[1] < trend[0] else 'rose'} from {short(trend[0])} to " \
              f"{short(trend[1])}" if trend else ""
    state = "watch" if trend and trend[1] < trend[0] else "good"
    if len(evaluated) > 1:
        first, last = _accuracy(evaluated[0]), _accuracy(evaluated[-1])
        said = f"accuracy on unseen problems {100 * first.mean:.1f} → {with_interval(last)}"
        if overlap(first, last) is False:
            return ("broken", f"{said}: it fell") if last.mean < first.mean else ("good", f"{said}: it rose")
        return state, f"{said}: no clear change" + (f"; {rewards}" if rewards else "")
    reward = mean_over(_last(trained, schema.REWARD_MEAN), schema.REWARD_MEAN)
    return (state, rewards or f"mean reward {short(reward)}") if reward is not None else None


def _accuracy(step: Mapping[str, Any]) -> Interval:
    low, high = (float(step[name]) if is_number(step.get(name)) else None
                 for name in (schema.EVAL_LOW, schema.EVAL_HIGH))
    return Interval(float(step[schema.EVAL_ACCURACY]), low, high, n=1)


def reward_trend(trained: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Mean rewards of the first and the last third of the steps, None where they cannot be told apart.

        |m₂ − m₁| > t·√((s₁² + s₂²)/n),   t of n − 1 degrees of freedom
    """
    rewards = Steps.of(trained).numbers(schema.REWARD_MEAN).values
    n = len(rewards) // 3
    if n < FEWEST:
        return None
    first, last = float(rewards[:n].mean()), float(rewards[-n:].mean())
    variance = rewards[:n].var(ddof=1) + rewards[-n:].var(ddof=1)
    return (first, last) if abs(last - first) > quantile(n - 1) * math.sqrt(variance / n) else None


def _live(steps: Sequence[Mapping[str, Any]]) -> Clause:
    groups, live = math.fsum(step[schema.SIGNAL_GROUPS] for step in steps), math.fsum(map(live_groups, steps))
    if groups < FEWEST_GROUPS:
        return "unknown", f"{too_few(groups, 'group', FEWEST_GROUPS)}"
    share = live / groups
    said = f"{short(live / len(steps))} of {short(groups / len(steps))} groups carry signal"
    if share < LIVE_GOOD and is_solved(steps):
        return "watch", f"{said}, because {RIGHT}"
    return "good" if share >= LIVE_GOOD else "watch" if share >= LIVE_BROKEN else "broken", said


RIGHT = "nearly every answer is right: little is left to learn here"


def is_solved(steps: Sequence[Mapping[str, Any]]) -> bool:
    reward = mean_over(steps, schema.REWARD_MEAN)
    return reward is not None and SOLVED <= reward <= 1


def live_groups(step: Mapping[str, Any]) -> float:
    """Groups in which a token has credit; where that was not recorded, groups whose rewards differ."""
    dead = step.get(schema.CREDIT_DEAD_GROUPS)
    return float(round(step[schema.SIGNAL_GROUPS] * (1 - dead)) if is_number(dead) else step[schema.SIGNAL_LIVE_GROUPS])


def _cut(steps: Sequence[Mapping[str, Any]], rose: bool) -> Clause | None:
    """Answers cut at the limit; not `broken` where the reward rose all the same."""
    cut = mean_over(steps, schema.LENGTH_TRUNCATED)
    if not cut:
        return None
    return ("broken" if cut >= CUT_BROKEN and not rose else "watch" if cut >= CUT_WATCH else "good",
            f"{percent(cut)} of the answers are cut off at the length limit")


def _unjudged(steps: Sequence[Mapping[str, Any]]) -> Clause | None:
    failed = sum(int(step[schema.REWARD_ERRORS]) for step in steps if is_number(step.get(schema.REWARD_ERRORS)))
    return ("watch", f"the reward function failed on {failed} answer{'s' * (failed != 1)}") if failed else None


def _entropy(trained: Sequence[Mapping[str, Any]]) -> Clause | None:
    values = Steps.of(trained).numbers(schema.ENTROPY_MEAN).values
    n = min(LAST, len(values) // 2)
    if n < FEWEST:
        return None
    before, now = values[:n].mean(), values[-n:].mean()
    if now >= ENTROPY_LOW or now > ENTROPY_LEFT * before:
        return None
    return "watch", f"entropy fell from {short(before)} to {short(now)} nats per token"


def loss_sentence(config: Mapping[str, Any]) -> str:
    """What the loss shows under this row and this credit; empty where the row is unknown."""
    row = row_of(config)
    return "" if row is None else LOSS[law(row.under(config.get("credit"))).kind]


LOSS = {
    "zero": "The loss is 0 at ratio 1 by construction, no measure of progress.",
    "penalty": "The loss at ratio 1 is the KL term alone, no measure of progress.",
    "length": "The loss at ratio 1 compares lengths, no measure of progress.",
    "weights": "The loss at ratio 1 shows how the weights lean, no measure of progress.",
    "log_prob": "The loss at ratio 1 compares likelihoods, no measure of progress.",
    "outside": "The loss at ratio 1 shows how the credit is centred, no measure of progress.",
    "reward": "The loss at ratio 1 is minus the reward, weighted: it follows progress.",
}


# -- credit -----------------------------------------------------------------------------------------------------------


def credit(run: Run) -> Answer:
    """Σ of the tenth of tokens with most |w| over Σ|w|, against the same if tokens with w ≠ 0 shared it evenly."""
    rule = (f"Watch from {percent(TOP_WATCH)} of the effective credit on a tenth of the tokens, or "
            f"{percent(ONE_SIDED)} of one sign; broken when over {percent(SILENT_BROKEN)} of the steps have none. ")
    known = (step for step in reversed(run.trained) if is_number(step.get(TOP)) or has_no_credit(step))
    told = list(islice(known, LAST))[::-1]
    why = f"Not known since step {told[-1]['step']}" if is_stale(run.trained, told) else \
        too_few(len(told), "step", FEWEST) if len(told) < FEWEST else ""
    if why:
        return Answer("Credit", "unknown", f"{why}.", rule + mean_of(told), "tokens")
    silent, steps = sum(map(has_no_credit, told)), _last(told, TOP)
    if silent > SILENT_BROKEN * len(told):
        said, solved = f"In {silent} of {len(told)} steps no token had any effective credit", is_solved(told)
        return Answer("Credit", "watch" if solved else "broken", f"{said}: {RIGHT}." if solved else f"{said}.",
                      rule + mean_of(told), "tokens")
    top, zero, within = (mean_over(steps, name) for name in (TOP, schema.W_ZERO, schema.CREDIT_WITHIN))
    assert top is not None
    said = f"The top tenth of tokens carries {percent(top)} of the effective credit"
    if zero is not None:
        said += f" (even: {percent(even_share(steps))})" + (f"; {percent(zero)} of tokens have none" if zero else "")
    if within is not None:
        said += "; it varies only between answers" if within < SAME else f"; {percent(within)} varies inside answers"
    positive = mean_over(steps, schema.W_POSITIVE_MASS)
    sided = positive is not None and max(positive, 1 - positive) >= ONE_SIDED
    if positive is not None and sided:
        said += f"; {percent(max(positive, 1 - positive))} pushes {'up' if positive > 0.5 else 'down'}"
    state = "watch" if top >= TOP_WATCH or sided else "good"
    return Answer("Credit", state, f"{said}.", rule + mean_of(steps), "tokens")


def even_share(steps: Sequence[Mapping[str, Any]]) -> float:
    """min(1, 0.1/(1 − zero)), mean over steps: the top tenth's share if the tokens with w ≠ 0 had equal |w|.

    >>> even_share([{"w/zero": 0.5}, {"w/zero": 0.95}])  # 0.2 and 1
    0.6
    """
    zeros = [float(step[schema.W_ZERO]) for step in steps if is_number(step.get(schema.W_ZERO))]
    return math.fsum(0.1 / max(1 - zero, 0.1) for zero in zeros) / len(zeros)


def has_no_credit(step: Mapping[str, Any]) -> bool:
    """Whether every w of the step was 0: then `credit/dead_groups` exists and the shares of w do not."""
    return is_number(step.get(schema.CREDIT_DEAD_GROUPS)) and TOP not in step and TOP not in absent(step)


TOP = schema.W_TOP10_MASS
SAME = 1e-9
"""`credit/within` of credit that is equal inside each answer, up to rounding."""


# -- directions -------------------------------------------------------------------------------------------------------

RANK, OWN_NORMS = schema.GRAM_GROUP_EFFECTIVE_RANK, schema.GRAM_GROUP_NORM_NULL
NULLS = {schema.GRAM_GROUP_W_NULL: "orthogonal, equal norms",
         schema.GRAM_GROUP_ORTHOGONAL_NULL: "orthogonal, equal norms, two rewards"}
"""Metric -> which null it is. The first that was recorded is taken; token credit has only the second."""


def directions(run: Run) -> Answer:
    """r_eff = (Σσ)²/Σσ² of the gradients of a group's rollouts beside its nulls, means over groups and readings."""
    rule = f"Watch below {ONE_WAY:g} directions where the null is {WAYS:g} or more; low rank alone is no fault. "
    by_null = {name: _last(run.trained, RANK, name) for name in NULLS}
    name = max(by_null, key=lambda one: len(by_null[one]))  # of equals the first
    steps, size = by_null[name], run.config.get("group")
    readings = steps if len(steps) >= FEWEST else _last(run.trained, RANK)
    why = ("One rollout per group has one direction" if size == 1 else
           f"Not read since step {readings[-1]['step']}" if is_stale(run.trained, readings) else
           f"{too_few(len(readings), 'reading', FEWEST)}; {words(run.config, 'readings')}" if
           0 < len(readings) < FEWEST else
           "The rank was read, but no null to hold it against" if readings and len(steps) < FEWEST else
           "" if readings else
           f"Not read: {words(run.config, 'rank')}" if run.config.get("scope") in (None, "off") else
           "Not read: no group was live when the microscope looked")
    if why:
        return Answer("Directions", "unknown", f"{why}.", rule + mean_of(readings, "readings"), "directions")
    found, null, own = mean_over(steps, RANK), mean_over(steps, name), mean_over(steps, OWN_NORMS)
    assert found is not None
    assert null is not None
    state = "unknown" if null < WAYS else "watch" if found < ONE_WAY else "good"
    said = f"{size if is_number(size) else 'The'} rollouts push in {short(found)} directions; null {short(null)} " \
           f"({NULLS[name]})"
    said += f", {short(own)} with their own norms" if own is not None else ""
    said += {"unknown": "; too few directions to judge", "watch": "; all push along one line", "good": ""}[state]
    return Answer("Directions", state, f"{said}.", rule + mean_of(steps, "readings"), "directions")


# -- optimiser --------------------------------------------------------------------------------------------------------


def optimiser(run: Run) -> Answer:
    """Share of bounded tokens outside the clip range after the batch, and the effect of the reward's scale."""
    rule = (f"Outside the clip range: watch from {percent(PAST_WATCH)}, broken from {percent(PAST_BROKEN)} or when a "
            f"gradient is not finite. Scale below {percent(BLIND)} change hardly matters, which is no fault. ")
    steps, where = past_steps(run.trained)
    past, (scale, scales) = mean_over(steps, where), _scale(run)
    row = row_of(run.config)
    wild = [step for step in run.trained[-LAST:] if NOT_FINITE & set(absent(step))]
    if is_stale(run.trained, steps):
        state, tokens = "unknown", f"tokens outside the clip range were not counted since step {steps[-1]['step']}"
    elif past is not None and len(steps) >= FEWEST:
        state = "broken" if past >= PAST_BROKEN else "watch" if past >= PAST_WATCH else "good"
        tokens = f"{percent(past)} of bounded tokens " + (
            "end outside the clip range" if where == AT_END else
            f"are outside the clip range after {_between(where)} of the batch's updates")
    elif row is not None and row.bound == "none" and row.trust == "none":
        state, tokens = "good" if scales else "unknown", "this method has no clip range"
    else:
        state, tokens = "unknown", (
            f"overshoot: {too_few(len(steps), 'reading', FEWEST)}; {words(run.config, 'probes')}" if steps else
            f"not read: {words(run.config, 'overshoot')}" if _unprobed(run.config) else
            "overshoot was not read: no token had a bound when the probe looked")
    if wild:
        state, tokens = "broken", f"the gradient was not finite in {len(wild)} of the last steps; {tokens}"
    flag = words(run.config, "overshoot")
    said = tokens if tokens.endswith(flag) and scale.endswith(flag) else f"{tokens}; {scale}"  # one flag gives both
    both = steps and scales and (len(steps), steps[-1]["step"]) != (len(scales), scales[-1]["step"])
    over = f"{mean_of(steps, 'readings')} Scale: {mean_of(scales, 'readings').lower()}" if both else mean_of(
        steps or scales, "readings")
    return Answer("Optimiser", state, f"{said[0].upper()}{said[1:]}.", rule + over, "optimizer")


AT_END = schema.OVERSHOOT_PAST
SCALE = schema.OPTIMIZER_SCALE_CHANGE
NOT_FINITE = frozenset({schema.GRAD_NORM, schema.OBJECTIVE_VALUE})


def past_steps(trained: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """The last steps that count tokens past their bound, and the metric: after the last update on the batch, or
    where that was read too seldom after the update that most steps were read at.
    """
    found = {AT_END: _last(trained, AT_END)}
    if len(found[AT_END]) < FEWEST:
        updates = {int(k) for name in Steps.of(trained).names if (k := _between(name))}
        past = [schema.OVERSHOOT_UPDATE("past", k) for k in sorted(updates, reverse=True)]
        found |= {name: _last(trained, name) for name in past}
    where = max(found, key=lambda name: len(found[name]))  # of equals the first: the end, then the most updates
    return found[where], where


def _between(name: str) -> str:
    """k of `overshoot/k/past`; empty for other names."""
    k = name.removeprefix("overshoot/").removesuffix("/past")
    return k if k.isdecimal() and name == f"overshoot/{k}/past" else ""


def _scale(run: Run) -> tuple[str, list[Mapping[str, Any]]]:
    """Change of the update at a tenth of the credit, since the start or else from the step read on; its steps."""
    found = {metric: _last(run.trained, metric) for metric in (SCALE, f"{SCALE}_now")}
    for metric, steps in found.items():
        change = mean_over(steps, metric)
        if change is not None and len(steps) >= FEWEST and not is_stale(run.trained, steps):
            said = f"reward scale {'hardly matters' if change < BLIND else 'matters'}: a tenth of the credit changes " \
                   f"the update by {percent(change)}" + ("" if metric == SCALE else " from that step on")
            return ", ".join(filter(None, (said, _cosine(run)))), steps
    steps = found[SCALE] or found[f"{SCALE}_now"]
    return "reward scale" + (
        f" was not read since step {steps[-1]['step']}" if is_stale(run.trained, steps) else
        f": {too_few(len(steps), 'reading', FEWEST)}" if steps else
        f" was not read: {words(run.config, 'scale')}" if _unprobed(run.config) else
        " was not read: a gradient was clipped to its norm, or a part of it is not the reward's"), []


def _unprobed(config: Mapping[str, Any]) -> bool:
    return config.get("probe") in (None, "off")


def _cosine(run: Run) -> str:
    """From the last full probe: cos(Δ(φ), Δ(1)) at φ = 10, or else at φ = 0.1."""
    for step in reversed(run.record.optimizer_readings()):
        arrays = run.probed(step) or {}
        phis, cosines = arrays.get("phi", np.empty(0)), arrays.get("cosine", np.empty(0))
        if phis.dtype.kind != "f" or cosines.dtype.kind != "f" or phis.shape != cosines.shape:
            continue
        for phi in (10.0, 0.1):
            found = cosines[np.isclose(phis, phi) & np.isfinite(cosines)]
            if len(found):
                return f"cosine {near(float(found[0]), 1, least=4)} at ×{phi:g}"
    return ""


# -- steps that are read ----------------------------------------------------------------------------------------------


def _last(steps: Sequence[Mapping[str, Any]], *metrics: str) -> list[Mapping[str, Any]]:
    return _having(steps, *metrics, most=LAST)


def _having(steps: Sequence[Mapping[str, Any]], *metrics: str, most: int | None = None) -> list[Mapping[str, Any]]:
    """The steps that have all these numbers, or the last `most` of them."""
    found = Steps.of(steps)
    rows = functools.reduce(np.intersect1d, (found.numbers(name).at for name in metrics))
    return [found[row] for row in rows[-most if most else 0:].tolist()]


def is_stale(trained: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether since the last of `steps` the run went on for LAST steps and for twice their widest gap."""
    at = [int(step["step"]) for step in steps]
    gap = max((later - earlier for earlier, later in pairwise(at)), default=1)
    return bool(at) and int(trained[-1]["step"]) - at[-1] >= max(LAST, 2 * gap)


def absent(step: Mapping[str, Any]) -> list[str]:
    """The metrics that were not finite at a step."""
    found = step.get("absent")
    return [str(name) for name in found] if isinstance(found, dict) else []


def worst(*states: str) -> str:
    """broken > watch > unknown > good."""
    return max(states, key=["good", "unknown", "watch", "broken"].index)
