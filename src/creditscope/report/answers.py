"""Four topics of a run in numbers: signal, credit, directions, optimiser.

A sentence gives means over the last LAST steps that have a number, and where it matters the largest value with its
step. It judges nothing: a topic's state is that of the diagnosis' findings on it, by the table TOPICS.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from creditscope.diagnosis.engine import SIGNS, Diagnosis
from creditscope.diagnosis.finding import STATES, Finding, State
from creditscope.methods.find import row_of
from creditscope.methods.words import law
from creditscope.report.remedies import words
from creditscope.report.run import Run
from creditscope.report.wording import mean_of, near, percent, short
from creditscope.runs import schema
from creditscope.runs.columns import Steps, is_number
from creditscope.runs.intervals import Interval
from creditscope.runs.numbers import mean_over
from creditscope.runs.numbers import percent as with_interval

LAST = 10
"""Steps of a mean: enough to smooth one batch, few enough to describe the run as it is now."""
TOPICS: Mapping[str, tuple[str, ...]] = {
    "Signal": (),
    "Credit": ("dilution", "KL only", "KL pull", "length constant", "cispo cap", "loss"),
    "Directions": ("signal",),
    "Optimiser": ("learning rate", "gradient", "gradient clip", "clip", "updates", "step size", "small steps",
                  "epsilon", "rounding", "frozen", "weight decay", "KL level", "sampler"),
}
"""Topic -> its rules; a rule that stands in no row is one of Signal."""


@dataclass(frozen=True)
class Answer:
    topic: str
    state: State
    sentence: str
    rule: str
    """The findings that the state is of, and which steps the numbers are means of."""
    evidence: str
    """The id of the section that shows it."""


def answers(run: Run) -> list[Answer]:
    said = {"Signal": signal(run), "Credit": credit(run), "Directions": directions(run), "Optimiser": optimiser(run)}
    shown = dict(zip(TOPICS, ("steps", "tokens", "directions", "optimizer"), strict=True))
    return [Answer(topic, state_of(found := of_topic(run.diagnosis, topic)), f"{text[:1].upper()}{text[1:]}",
                   f"{judged(found)} {over}".strip(), shown[topic]) for topic, (text, over) in said.items()]


def of_topic(diagnosis: Diagnosis, topic: str) -> list[Finding]:
    """The findings on a topic, most severe first."""
    others = {rule for name, rules in TOPICS.items() if name != "Signal" for rule in rules}
    return [each for each in diagnosis.findings
            if each.rule in TOPICS[topic] or (topic == "Signal" and each.rule not in others)]


def state_of(findings: Iterable[Finding]) -> State:
    """The most severe that is known: unknown only where every question is open."""
    states = [each.state for each in findings if each.state != "unknown"]
    return worst(*states) if states else "unknown"


def worst(*states: State) -> State:
    """broken > watch > unknown > fine."""
    return min(states, key=STATES.index)


def judged(findings: Sequence[Finding]) -> str:
    """The findings behind a state, by sign."""
    parts = [f"{SIGNS[state]} {', '.join(rules)}" for state in STATES
             if (rules := [each.rule for each in findings if each.state == state])]
    return f"Findings: {'; '.join(parts)}." if parts else "No rule judges this."


Told = tuple[str, str]
"""A sentence, and which steps its numbers are means of."""


# -- signal -----------------------------------------------------------------------------------------------------------


def signal(run: Run) -> Told:
    """What was learnt, live groups, answers cut at the limit, failed rewards, entropy."""
    steps = _last(run.trained, schema.SIGNAL_GROUPS, schema.SIGNAL_LIVE_GROUPS)
    clauses = [*progress(run), *_live(steps), *_cut(run), *_unjudged(run), *_entropy(run)]
    said = "; ".join(clauses) or "no reward and no group is recorded"
    return f"{said}. {loss_sentence(run.config)}".strip(), mean_of(steps)


def progress(run: Run) -> list[str]:
    """The first and the last evaluation; the mean reward, beside a learned one the verifier's, or the margin of pairs,
    of the first and the last third of the steps."""
    evaluated = _having(run.steps, schema.EVAL_ACCURACY)
    rewards, gold = (run.trained.numbers(name).values for name in (schema.REWARD_MEAN, schema.REWARD_GOLD_MEAN))
    said = []
    if len(evaluated) > 1:
        first, last = _accuracy(evaluated[0]), _accuracy(evaluated[-1])
        said.append(f"accuracy on unseen problems {100 * first.mean:.1f} → {with_interval(last)}")
    told = {"mean learned reward" if len(gold) else "mean reward": rewards, "verifier's reward": gold,
            "margin of pairs": run.trained.numbers(schema.PAIRS_MARGIN).values,
            "implicit reward of the chosen": run.trained.numbers(schema.PAIRS_CHOSEN_REWARD).values}
    for name, values in told.items():
        third = len(values) // 3
        if third:
            said.append(f"{name} {short(values[:third].mean())} → {short(values[-third:].mean())} (thirds)")
        elif len(values):
            said.append(f"{name} {short(values.mean())}")
    return said


def _accuracy(step: Mapping[str, Any]) -> Interval:
    low, high = (float(step[name]) if is_number(step.get(name)) else None
                 for name in (schema.EVAL_LOW, schema.EVAL_HIGH))
    return Interval(float(step[schema.EVAL_ACCURACY]), low, high, n=1)


def _live(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    groups, live = math.fsum(step[schema.SIGNAL_GROUPS] for step in steps), math.fsum(map(live_groups, steps))
    return [f"{short(live / len(steps))} of {short(groups / len(steps))} groups carry signal"] if groups else []


def live_groups(step: Mapping[str, Any]) -> float:
    """Groups in which a token has credit; where that was not recorded, groups whose rewards differ."""
    dead = step.get(schema.CREDIT_DEAD_GROUPS)
    return float(round(step[schema.SIGNAL_GROUPS] * (1 - dead)) if is_number(dead) else step[schema.SIGNAL_LIVE_GROUPS])


def _cut(run: Run) -> list[str]:
    cut = mean_over(_last(run.trained, schema.LENGTH_TRUNCATED), schema.LENGTH_TRUNCATED)
    return [f"{percent(cut)} of the answers are cut off at the length limit"] if cut else []


def _unjudged(run: Run) -> list[str]:
    failed = int(run.trained.numbers(schema.REWARD_ERRORS).values.sum())
    return [f"the reward function failed on {failed} answer{'s' * (failed != 1)}"] if failed else []


def _entropy(run: Run) -> list[str]:
    values = run.trained.numbers(schema.ENTROPY_MEAN).values
    n = min(LAST, len(values) // 2)
    return [f"entropy {short(values[:n].mean())} → {short(values[-n:].mean())} nats per token"] if n else []


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
    "margin": "The loss shows how far apart the answers of a pair are, no measure of progress.",
    "label": "The loss shows how far answers lie on the side of their labels, no measure of progress.",
}


# -- credit -----------------------------------------------------------------------------------------------------------

TOP = schema.W_TOP10_MASS
SAME = 1e-9
"""`credit/within` of credit that is equal inside each answer, up to rounding."""


def credit(run: Run) -> Told:
    """Σ of the tenth of tokens with most |w| over Σ|w|, against the same if tokens with w ≠ 0 shared it evenly."""
    steps, silent = _last(run.trained, TOP), sum(map(has_no_credit, run.trained[-LAST:]))
    said = []
    if steps:
        top, zero, within, positive = (mean_over(steps, name) for name in (
            TOP, schema.W_ZERO, schema.CREDIT_WITHIN, schema.W_POSITIVE_MASS))
        assert top is not None
        said.append(f"the top tenth of tokens carries {percent(top)} of the effective credit"
                    + ("" if zero is None else f" (even: {percent(even_share(steps))})"))
        said += [f"{percent(zero)} of tokens have none"] if zero else []
        if within is not None:
            said.append("it varies only between answers" if within < SAME else
                        f"{percent(within)} varies inside answers")
        said += [f"{percent(positive)} pushes up"] if positive is not None else []
    if silent:
        said.append(f"in {silent} of the last {min(LAST, len(run.trained))} steps no token had any")
    return f"{'; '.join(said) or 'no effective credit is recorded'}.", mean_of(steps)


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


# -- directions -------------------------------------------------------------------------------------------------------

RANK, OWN_NORMS = schema.GRAM_GROUP_EFFECTIVE_RANK, schema.GRAM_GROUP_NORM_NULL
NULLS = {schema.GRAM_GROUP_W_NULL: "orthogonal, equal norms",
         schema.GRAM_GROUP_ORTHOGONAL_NULL: "orthogonal, equal norms, two rewards"}
"""Metric -> which null it is. The first that was recorded is taken; token credit has only the second."""


def directions(run: Run) -> Told:
    """r_eff = (Σσ)²/Σσ² of the gradients of a group's rollouts beside its nulls, means over groups and readings."""
    by_null = {name: _last(run.trained, RANK, name) for name in NULLS}
    name = max(by_null, key=lambda one: len(by_null[one]))  # of equals the first
    steps, size = by_null[name] or _last(run.trained, RANK), run.config.get("group")
    found, null, own = mean_over(steps, RANK), mean_over(steps, name), mean_over(steps, OWN_NORMS)
    if size == 1 or found is None:
        return ("one rollout per group has one direction." if size == 1 else
                f"not read: {words(run.config, 'rank')}." if run.config.get("scope") in (None, "off") else
                "not read: no group was live when the microscope looked."), mean_of(steps, "readings")
    said = f"{size if is_number(size) else 'the'} rollouts push in {short(found)} directions; " + (
        "no null to compare with was read" if null is None else f"null {short(null)} ({NULLS[name]})")
    said += f", {short(own)} with their own norms" if own is not None else ""
    return f"{said}.", mean_of(steps, "readings")


# -- optimiser --------------------------------------------------------------------------------------------------------

AT_END = schema.OVERSHOOT_PAST
SCALE = schema.OPTIMIZER_SCALE_CHANGE
NOT_FINITE = frozenset({schema.GRAD_NORM, schema.OBJECTIVE_VALUE})


def optimiser(run: Run) -> Told:
    """Share of bounded tokens outside the clip range after the batch, and the effect of the reward's scale."""
    steps, where = past_steps(run.trained)
    past, (scale, scales), row = mean_over(steps, where), _scale(run), row_of(run.config)
    if past is not None:
        said = f"{percent(past)} of bounded tokens " + (
            "end outside the clip range" if where == AT_END else
            f"are outside the clip range after {_between(where)} of the batch's updates") + _most(run.trained, where)
    elif row is not None and row.bound == "none" and row.trust == "none":
        said = "this method has no clip range"
    else:
        said = f"not read: {words(run.config, 'overshoot')}" if _unprobed(run.config) else \
            "overshoot was not read: no token had a bound when the probe looked"
    if wild := [step["step"] for step in run.trained.having("absent") if NOT_FINITE & set(absent(step))]:
        said = f"the gradient was not finite in {len(wild)} of {len(run.trained)} steps, first at {wild[0]}; {said}"
    flag = words(run.config, "overshoot")
    text = said if said.endswith(flag) and scale.endswith(flag) else f"{said}; {scale}"  # one flag gives both
    both = steps and scales and (len(steps), steps[-1]["step"]) != (len(scales), scales[-1]["step"])
    return f"{text}.", f"{mean_of(steps, 'readings')} Scale: {mean_of(scales, 'readings').lower()}" if both else \
        mean_of(steps or scales, "readings")


def _most(trained: Steps, metric: str) -> str:
    """The largest value with its step, where there are several."""
    at, values = trained.numbers(metric)
    if len(values) < 2:
        return ""
    place = int(values.argmax())
    return f", at most {percent(float(values[place]))} (step {trained[int(at[place])]['step']})"


def past_steps(trained: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """The last steps that count tokens past their bound, and the metric: after the last update on the batch, or where
    that was never read after the update that most steps were read at.
    """
    found = {AT_END: _last(trained, AT_END)}
    if not found[AT_END]:
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
    for metric in (SCALE, f"{SCALE}_now"):
        steps = _last(run.trained, metric)
        change = mean_over(steps, metric)
        if change is not None:
            said = f"a tenth of the credit changes the update by {percent(change)}" + (
                "" if metric == SCALE else " from that step on")
            return ", ".join(filter(None, (said, _cosine(run)))), steps
    return "reward scale was not read: " + (
        words(run.config, "scale") if _unprobed(run.config) else
        "a gradient was clipped to its norm, or a part of it is not the reward's"), []


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


def absent(step: Mapping[str, Any]) -> list[str]:
    """The metrics that were not finite at a step."""
    found = step.get("absent")
    return [str(name) for name in found] if isinstance(found, dict) else []
