"""Four sentences on a run, by rule: is there signal, who gets the credit, in how many directions, what was made of it.

A state says what to do about the number, not whether the idea behind the method is right: `broken` is a run that cannot
learn as it stands, `watch` is a number that usually costs something, `good` is neither. Low rank and even credit are
facts about most runs that learn, so neither is ever `broken`. Every number is a mean over the last `LAST` steps that
have it; fewer than `FEWEST` say nothing. The thresholds are ours, chosen once for all runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from creditscope.catalogue import find
from creditscope.describe import LAWS, law
from creditscope.errors import CreditscopeError
from creditscope.intervals import mean_interval, overlap
from creditscope.method import Method
from creditscope.report.run import Run

SHAPES = {"good": "●", "watch": "▲", "broken": "■", "unknown": "○"}
"""state -> the shape that tells it without colour."""

LAST = 10
"""Steps of a mean: enough to smooth one batch, few enough to be about the run as it is now."""
FEWEST = 3
"""Steps without which a mean says nothing: two cannot show that the third would differ."""
FEWEST_GROUPS = 16
"""Groups without which a share of groups says nothing: the 95 % interval of a share of n is up to ±1/√n, ±25 points."""
LIVE_GOOD, LIVE_BROKEN = 0.5, 0.1
"""Shares of live groups. A dead group has no gradient and is still counted in the mean: at a half, the step is half as
long as it seems; below a tenth, nine of ten rollouts are sampled for nothing."""
CUT_WATCH, CUT_BROKEN = 0.1, 0.5
"""Shares of answers cut off at the length limit: their reward judges the limit, not the answer. Above a half, it judges
the limit first."""
TOP_WATCH = 0.9
"""Share of the credit on a tenth of the tokens: above it, whatever goes wrong with those tokens goes wrong at all."""
ONE_SIDED = 0.9
"""Share of the credit of one sign: above it nearly all tokens are pushed the same way, so what is learnt is which
answers were sampled more than which were better."""
SILENT_BROKEN = 0.5
"""Share of steps in which no token had credit: above it most steps moved nothing."""
RANK_WATCH = 1 / 3
"""Effective rank over its null: below it, two of three directions that the credits allow are not used, so that more
rollouts a prompt buy little."""
PAST_WATCH, PAST_BROKEN = 0.05, 0.2
"""Shares of bounded tokens past their bound when the batch is done: one in twenty stands where the objective has
stopped pulling; at one in five the bound does not bound."""
BLIND = 0.05
"""Relative change of the update under a tenth of the credit: below it scale is called invisible, as in claim P2.3."""


@dataclass(frozen=True)
class Answer:
    """One line of the first screen."""

    topic: str
    state: str
    """A key of SHAPES."""
    sentence: str
    rule: str
    """The thresholds in words, and what the number is a mean of."""
    evidence: str
    """The id of the section that shows it."""


def answers(run: Run) -> list[Answer]:
    """The first screen, top to bottom."""
    return [signal(run), credit(run), directions(run), optimiser(run)]


# -- signal -----------------------------------------------------------------------------------------------------------


def signal(run: Run) -> Answer:
    """live = Σ live groups / Σ groups; and the share of answers that the length limit cut."""
    steps = _last(run.trained, "signal/groups", "signal/live_groups")
    groups, live = (sum(step[name] for step in steps) for name in ("signal/groups", "signal/live_groups"))
    rule = (f"Good from {_share(LIVE_GOOD)} live groups, broken below {_share(LIVE_BROKEN)}; cut off: watch from "
            f"{_share(CUT_WATCH)}, broken from {_share(CUT_BROKEN)}; watch when the reward fell. {_over(steps)}")
    loss = loss_sentence(run.config)
    if groups < FEWEST_GROUPS:
        return Answer("Signal", "unknown", _say(f"{_few(groups, 'group', FEWEST_GROUPS)}.", loss), rule, "steps")
    share, cut = live / groups, _mean(steps, "length/truncated") or 0.0
    reward, before = _mean(steps, "reward/mean"), fell_from(run.trained)
    state = _worst("good" if share >= LIVE_GOOD else "watch" if share >= LIVE_BROKEN else "broken",
                   "broken" if cut >= CUT_BROKEN else "watch" if cut >= CUT_WATCH else "good",
                   "good" if before is None else "watch")
    said = f"{_number(live / len(steps))} of {_number(groups / len(steps))} groups carry signal"
    said += f"; mean reward {_number(reward)}" if reward is not None else ""
    said += f", down from {_number(before)} at the start" if before is not None else ""
    said += f"; {_share(cut)} of the answers are cut off at the length limit" if cut else ""
    return Answer("Signal", state, _say(f"{said}.", loss), rule, "steps")


def fell_from(trained: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean reward of the first steps, where that of the last is lower and their 95 % intervals are apart."""
    rewards = [float(step["reward/mean"]) for step in trained if _is_number(step.get("reward/mean"))]
    length = min(LAST, len(rewards) // 2)
    if length < FEWEST:
        return None
    first, last = mean_interval(rewards[:length]), mean_interval(rewards[-length:])
    return first.mean if last.mean < first.mean and overlap(first, last) is False else None


def loss_sentence(config: Mapping[str, Any]) -> str:
    """What the loss says under this row and this credit; nothing where the row is not known."""
    row = row_of(config)
    if row is None:
        return ""
    found = law(row)
    given = config.get("credit") not in (None, "outcome") and found.kind != "log_prob"
    return LAWS["outside"] if given else found.sentence


def row_of(config: Mapping[str, Any]) -> Method | None:
    """The run's row with its own β; None where this version has no such row."""
    name, beta = config.get("method"), config.get("beta")
    if not isinstance(name, str):
        return None
    try:
        row = find(name)
        return row if beta is None else row.but(name=row.name, beta=beta, title=row.title, parent=row.parent)
    except (CreditscopeError, TypeError):
        return None


# -- credit -----------------------------------------------------------------------------------------------------------


def credit(run: Run) -> Answer:
    """Σ of the tenth of tokens with most |w| over Σ|w|, against the same if tokens with credit shared it evenly."""
    rule = (f"Watch from {_share(TOP_WATCH)} of the credit on a tenth of the tokens, or {_share(ONE_SIDED)} of one "
            f"sign; broken when over {_share(SILENT_BROKEN)} of the steps have none. ")
    told = [step for step in run.trained if _is_number(step.get(TOP)) or has_no_credit(step)][-LAST:]
    if len(told) < FEWEST:
        return Answer("Credit", "unknown", f"{_few(len(told), 'step', FEWEST)}.", rule + _over(told), "tokens")
    silent, steps = sum(map(has_no_credit, told)), _last(told, TOP)
    if silent > SILENT_BROKEN * len(told):
        return Answer("Credit", "broken", f"In {silent} of {len(told)} steps no token had any credit.",
                      rule + _over(told), "tokens")
    top, zero = _mean(steps, TOP), _mean(steps, "credit/zero")
    assert top is not None
    said = f"10 % of tokens carry {_share(top)} of the credit"
    if zero is not None:
        even = 1.0 if zero >= 0.9 else 0.1 / (1 - zero)
        said += f" (spread evenly over those that have any, {_share(even)}); {_share(zero)} have none"
    within = _mean(steps, "credit/within")
    if within is not None:
        said += ("; every token of an answer is given the same" if within < SAME
                 else f"; {_share(within)} of its square differs inside an answer")
    positive = _mean(steps, "credit/positive_mass")
    sided = positive is not None and max(positive, 1 - positive) >= ONE_SIDED
    if positive is not None and sided:
        said += f"; {_share(max(positive, 1 - positive))} pushes {'up' if positive > 0.5 else 'down'}"
    return Answer("Credit", "watch" if top >= TOP_WATCH or sided else "good", f"{said}.", rule + _over(steps), "tokens")


def has_no_credit(step: Mapping[str, Any]) -> bool:
    """Whether the step had no w other than 0: then the assigned credit was looked at, and its spread does not exist."""
    return _is_number(step.get("credit/dead_groups")) and TOP not in step and TOP not in _absent(step)


TOP = "credit/top10_mass"
SAME = 1e-9
"""`credit/within` of credit that is equal inside each answer, up to rounding."""


# -- directions -------------------------------------------------------------------------------------------------------

NULLS = {"gram/group/credit_null": "orthogonal rollouts of equal norm with the same credits",
         "gram/group/orthogonal_null": "orthogonal rollouts of equal norm with two rewards, 4k(R−k)/R"}
"""metric -> which null it is. The first that was recorded is taken; token credit has only the second."""


def directions(run: Run) -> Answer:
    """r_eff / null, r_eff = (Σσ)²/Σσ² of the gradients of a group's rollouts, means over live groups and readings."""
    rule = f"Watch below {_share(RANK_WATCH)} of the null; low rank alone breaks nothing. "
    rank = "gram/group/effective_rank"
    by_null = {name: _last(run.trained, rank, name) for name in NULLS}
    name = max(by_null, key=lambda one: len(by_null[one]))  # of equals the first
    steps = by_null[name]
    if len(steps) < FEWEST:
        readings = _last(run.trained, rank)
        said = (f"{_few(len(readings), 'reading', FEWEST)}; a smaller --every reads more often" if
                0 < len(readings) < FEWEST else "The rank was read, but no null to hold it against" if readings else
                "Not read: train with --scope light" if run.config.get("scope") in (None, "off") else
                "Not read: no group was live when the microscope looked")
        return Answer("Directions", "unknown", f"{said}.", rule + _over(readings, "readings"), "directions")
    found, null = _mean(steps, rank), _mean(steps, name)
    assert found is not None
    assert null is not None
    size = run.config.get("group")
    who = f"{size} rollouts" if isinstance(size, int) else "The rollouts of a group"
    return Answer("Directions", "watch" if found < RANK_WATCH * null else "good",
                  f"{who} push in {_number(found)} directions; null {_number(null)} ({NULLS[name]}).",
                  rule + _over(steps, "readings"), "directions")


# -- optimiser --------------------------------------------------------------------------------------------------------


def optimiser(run: Run) -> Answer:
    """Whether the reward's scale comes through, and the share of bounded tokens past their bound after the batch."""
    rule = (f"Past the bound: watch from {_share(PAST_WATCH)}, broken from {_share(PAST_BROKEN)} or when a gradient is "
            f"not finite. Scale: invisible below {_share(BLIND)} change, which is no fault. ")
    steps, where = past_steps(run.trained)
    past, scale = _mean(steps, where), _scale(run)
    row = row_of(run.config)
    wild = [step for step in run.trained[-LAST:] if NOT_FINITE & set(_absent(step))]
    if past is not None and len(steps) >= FEWEST:
        state = "broken" if past >= PAST_BROKEN else "watch" if past >= PAST_WATCH else "good"
        stand = "end" if where == AT_END else f"stand, after {_between(where)} of the batch's updates,"
        tokens = f"{_share(past)} of bounded tokens {stand} past their bound"
    elif row is not None and row.bound == "none" and row.trust == "none":
        state, tokens = "good" if scale else "unknown", "this method has no bound that a token could pass"
    else:
        state, tokens = "unknown", (
            f"overshoot: {_few(len(steps), 'reading', FEWEST)}; a smaller --probe-every reads more often" if steps else
            "overshoot was not read: train with --probe light" if _unprobed(run.config) else
            "overshoot was not read: no token had a bound when the probe looked")
    if wild:
        state, tokens = "broken", f"the gradient was not finite in {len(wild)} of the last steps; {tokens}"
    said = f"{scale or _no_scale(run.config)}; {tokens}."
    readings = steps or _last(run.trained, SCALE)
    return Answer("Optimiser", state, said[0].upper() + said[1:], rule + _over(readings, "readings"), "optimizer")


AT_END = "overshoot/past"
SCALE = "optimizer/scale_change"
NOT_FINITE = frozenset({"grad/norm", "objective/value"})


def past_steps(trained: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """The last steps that say how many tokens are past their bound, and the metric: after the batch's last update where
    that was read often enough, otherwise after as many updates as were seen at every step."""
    found = {AT_END: _last(trained, AT_END)}
    if len(found[AT_END]) < FEWEST:
        updates = {int(k) for step in trained for name in step if (k := _between(name))}
        found |= {f"overshoot/{k}/past": _last(trained, f"overshoot/{k}/past") for k in sorted(updates, reverse=True)}
    where = max(found, key=lambda name: len(found[name]))  # of equals the first: the end, then the most updates
    return found[where], where


def _between(name: str) -> str:
    """k of `overshoot/k/past`; nothing for other names."""
    k = name.removeprefix("overshoot/").removesuffix("/past")
    return k if k.isdecimal() and name == f"overshoot/{k}/past" else ""


def _scale(run: Run) -> str:
    """What a tenth of the credit would do to the update, and the cosine of the two updates where a sweep read it."""
    steps = _last(run.trained, SCALE)
    change = _mean(steps, SCALE)
    if change is None or len(steps) < FEWEST:
        return ""
    seen = f"a tenth of the credit changes the update by {_share(change)}"
    cosine = _cosine(run)
    if cosine:
        seen += f", {cosine}"
    return f"reward scale is {'invisible' if change < BLIND else 'visible'}: {seen}"


def _unprobed(config: Mapping[str, Any]) -> bool:
    return config.get("probe") in (None, "off")


def _no_scale(config: Mapping[str, Any]) -> str:
    if _unprobed(config):
        return "reward scale was not read: train with --probe light"
    return "reward scale was not read: a gradient was clipped to its norm, or a part of it is not the reward's"


def _cosine(run: Run) -> str:
    """From the last full probe: cosine of the update with that under φ times the credit, at ×10 or else at ×0.1."""
    for step in reversed(run.probes()):
        arrays = run.probed(step) or {}
        phis, cosines = arrays.get("phi", np.empty(0)), arrays.get("cosine", np.empty(0))
        if phis.dtype.kind != "f" or cosines.dtype.kind != "f" or phis.shape != cosines.shape:
            continue
        for phi in (10.0, 0.1):
            found = cosines[np.isclose(phis, phi) & np.isfinite(cosines)]
            if len(found):
                return f"cosine {_near(float(found[0]), 1, least=4)} at ×{phi:g}"
    return ""


# -- numbers in words -------------------------------------------------------------------------------------------------


def _last(steps: Sequence[Mapping[str, Any]], *metrics: str) -> list[Mapping[str, Any]]:
    """The last steps that have all these numbers."""
    return [step for step in steps if all(_is_number(step.get(name)) for name in metrics)][-LAST:]


def _mean(steps: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    values = [float(step[metric]) for step in steps if _is_number(step.get(metric))]
    return math.fsum(values) / len(values) if values else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _absent(step: Mapping[str, Any]) -> list[str]:
    found = step.get("absent")
    return list(found) if isinstance(found, dict) else []


def _worst(*states: str) -> str:
    return max(states, key=["good", "watch", "broken"].index)


def _over(steps: Sequence[Mapping[str, Any]], what: str = "steps") -> str:
    """What a number is a mean of."""
    if not steps:
        return f"No {what} to average."
    if len(steps) == 1:
        return f"One {what.removesuffix('s')}, step {steps[0]['step']}."
    return f"Mean over the last {len(steps)} {what}, {steps[0]['step']} to {steps[-1]['step']}."


def _few(count: float, what: str, needed: int) -> str:
    """Why a number is not given.

    >>> _few(1, "reading", 3)
    '1 reading is too few to say, it takes 3'
    """
    if not count:
        return f"No {what} yet; it takes {needed} to say"
    return f"{_number(count)} {what}{' is' if count == 1 else 's are'} too few to say, it takes {needed}"


def _say(*sentences: str) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _share(value: float) -> str:
    """Percent with two digits below ten, none that would read as 0 or 100 where it is not.

    >>> _share(0.714), _share(0.0163), _share(0.99962), _share(1.0)
    ('71 %', '1.6 %', '99.96 %', '100 %')
    """
    percent = 100 * value
    if 99.5 <= percent < 100:
        return f"{_near(percent, 100)} %"
    return f"{percent:.0f} %" if percent >= 9.95 or percent == 0 else f"{percent:.2g} %"


def _near(value: float, limit: float, least: int = 1) -> str:
    """So many decimals that a value below the limit is not printed as the limit; at most eight."""
    for digits in range(least, 9):
        text = f"{value:.{digits}f}"
        if float(text) != limit:
            return text
    return f"{limit:g}"
