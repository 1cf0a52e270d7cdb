"""Is there a reward, and does it depend on the answer?"""

from __future__ import annotations

import math
from itertools import pairwise

from creditscope.diagnosis import signs
from creditscope.diagnosis.finding import (
    FEW,
    THIRDS,
    Finding,
    State,
    between,
    ends,
    finding,
    grade,
    has,
    lacking,
    last,
    level,
    series_of,
    trend,
    unknown,
)
from creditscope.diagnosis.log import Log, Series, is_number
from creditscope.diagnosis.onset import crossed
from creditscope.diagnosis.signs import percent
from creditscope.diagnosis.thresholds import (
    APART_BROKEN,
    APART_PAIRS,
    APART_WATCH,
    FAILED_BROKEN,
    FORM,
    FORM_BROKEN,
    GOLD_BROKEN,
    GOLD_WATCH,
    LENGTH_BROKEN,
    LENGTH_STEPS,
    LENGTH_WATCH,
    MISSING,
    MISSING_BROKEN,
    SILENT,
)
from creditscope.runs import schema
from creditscope.runs.intervals import mean_interval


def constant(log: Log) -> Finding:
    """The same reward for every answer, batch after batch: Var r = 0, so A = 0."""
    series = series_of(log, schema.REWARD_MEAN)
    silent, flat = signs.silent_end(log), signs.flat_rewards(log)
    if not silent and not level(log, schema.REWARD_STD) and not level(log, schema.REWARD_MAX):
        return lacking(log, f"needs the spread of the rewards beside {series.name}",
                       {schema.REWARD_STD: FEW, schema.REWARD_MAX: FEW})
    spread = level(log, schema.REWARD_STD)
    if spread and spread.resolution and max(spread.values) == 0:
        return unknown(f"{spread.name} is printed as 0: it is below {spread.resolution:g}",
                       settles="the log with more digits")
    since = silent[0].rows[0].place if silent else math.inf
    count = sum(row.place >= since for row in series.rows)
    same = last(series).part(-count) if count else None
    if same is None or count < SILENT or min(same.values) != max(same.values):
        return finding("fine", f"Rewards differ; their mean is {last(series).mean:.3g}", last(series))
    value, earlier = same.values[-1], series.part(0, -count) if count < len(series) else None
    before = earlier.mean if earlier else value
    words, key = f"down from {before:.3g} before", "step size"
    if before == value:
        words, key = "at a bound or by a fault of the reward function", "reward"
    elif before < value:
        words, key = f"up from {before:.3g} before: nothing is left to learn here", "too easy"
    who = "Every answer gets" if flat else f"In the last {count} readings every answer gets"
    narrow = signs.nearly_all_cut(log) and not signs.cuts_came_later(log)
    causes = ["form", *(["truncation"] if narrow else [])]
    # A reward that was higher before fell for a reason, which is then the cause.
    if before > value:
        causes += ["step size", "updates", "weight decay", "entropy", "length drift", "reward trend"]
    else:
        causes += ["too easy"] if before < value else ["cold sampler", "hot sampler"]
    return finding("broken" if flat and before >= value else "watch", f"{who} the reward {value:g}, {words}", earlier,
                   same, *(part.part(-len(same)) for part in silent), why="Var r = 0, so A = 0.",
                   remedy=key, onset=silent[0].rows[0].step, follows=causes)


def missing(log: Log) -> Finding:
    """Answers without a reward: the reward function failed, or gave None or NaN.

    A trainer that counts them as 0 logs Σ_f mean_f over the answers that have one, and a mean reward below it.
    """
    errors, groups = log.finite(schema.REWARD_ERRORS), log.finite(schema.ROLLOUTS_SAMPLED)
    whole = log.series(schema.REWARD_MEAN)
    bad = [row for row in whole.rows if not is_number(row.values[whole.name])] if whole else []
    if whole and bad:
        series = Series(whole.name, bad, log.source)
        return finding("broken", f"The mean reward is not a number in {len(bad)} readings: some answers had no reward",
                       series.part(0, 3),
                       why="One missing reward leaves the mean and every advantage of its group undefined.",
                       onset=bad[0].step)
    if errors and groups:
        share = math.fsum(errors.values) / max(1.0, math.fsum(groups.values))
        parts = _parts(log)
        if parts.bad and share < MISSING:
            return parts
        return finding(grade(share, MISSING, FAILED_BROKEN), f"{percent(share)} of the answers have no reward: the "
                       "function failed on them or gave no number", errors,
                       why="An answer without a reward counts as 0 and is punished like a wrong one; TRL since 1.6 "
                       "leaves it out: its A is 0, and its group has fewer answers to compare.",
                       onset=crossed(errors, lambda count: count > 0, 1))
    return _parts(log)


def _parts(log: Log) -> Finding:
    """TRL logs each reward function's mean over the answers that have one, beside the mean of their sum over all."""
    names = sorted({name for row in log.rows for name in row.values
                    if name.startswith("rewards/") and name.endswith("/mean")})
    whole = log.series(schema.REWARD_MEAN)
    weights = log.settings.given.get("reward_weights")
    rows = [row for row in whole.rows if all(is_number(row.values.get(name, math.nan)) for name in names)] \
        if whole and names else []
    if whole is None or len(rows) < THIRDS or weights is not None:
        return finding("fine", "No answer is known to lack a reward")
    told = math.fsum(math.fsum(row.values[name] for name in names) for row in rows) / len(rows)
    used = math.fsum(row.values[whole.name] for row in rows) / len(rows)
    lost = 1 - used / told if told > 0 else 0.0
    if lost < MISSING:
        return finding("fine", "No answer is known to lack a reward", last(whole))
    # Of several functions each may leave answers to another, or have a weight that is not known.
    several = len(names) > 1
    state: State = "watch" if several else grade(lost, MISSING, MISSING_BROKEN)
    return finding(state, f"{percent(lost)} of the reward is missing: "
                   f"{' + '.join(names)} is {told:.3g} over the answers that have one, {whole.name} {used:.3g} over "
                   "all",
                   Series(whole.name, rows, log.source), why="An answer whose reward is None or NaN counts as 0 in the "
                   "sum, and is punished like a wrong one.", onset=rows[0].step,
                   settles="reward_weights, and whether each function is meant for every prompt" if several else "")


def form(log: Log) -> Finding:
    """Answers whose number is the reference and that earn nothing: it is not marked as the verifier asks.

    Of n answers with the right number lost/(lost + paid) earn nothing, where rewards are 0 and 1.
    """
    lost, paid = level(log, schema.REWARD_LOST_TO_FORM), level(log, schema.REWARD_MEAN)
    if (lost is None or paid is None) and signs.rises(log):
        return finding("fine", "Not in play: the reward rises")
    if lost is None or paid is None:
        # Without the share its absence matters, however few rewards there are.
        needs = [name for name in (schema.REWARD_LOST_TO_FORM, schema.REWARD_MEAN)
                 if log.finite(schema.REWARD_LOST_TO_FORM)]
        return lacking(log, "whether right numbers are lost to their form is not in the log", dict.fromkeys(needs, FEW),
                       "the last number of some answers beside their references")
    share = lost.mean / (lost.mean + max(paid.mean, 0.0)) if lost.mean > 0 else 0.0
    if lost.mean < FORM:
        return finding("fine", f"{percent(lost.mean)} of the answers have the right number and earn nothing", lost)
    much, learns = share >= FORM_BROKEN, signs.rises(log)
    state: State = "broken" if much and not learns else "fine" if learns and not much else "watch"
    words = "Right answers are not paid for their form" if state != "fine" else "The reward rises, and form is learnt"
    return finding(state, f"{words}: {percent(lost.mean)} of the answers have the "
                   f"right number and earn nothing, beside a mean reward of {paid.mean:.3g}", lost, paid,
                   why="The last number of the text is the reference, and r = 0: it is not marked as the verifier "
                   "asks. A right answer is then punished like a wrong one.",
                   onset=crossed(log.finite(schema.REWARD_LOST_TO_FORM) or lost, lambda value: value >= FORM))


def noise(log: Log) -> Finding:
    """Of pairs of equal answers to one prompt, over all steps: the share that got different rewards."""
    pairs, apart = log.finite(schema.REWARD_EQUAL_TEXTS), log.finite(schema.REWARD_EQUAL_TEXTS_APART)
    if not pairs or not apart:
        return unknown("whether equal answers get equal rewards is not in the log", settles=signs.callback(log))
    count, other = math.fsum(pairs.values), math.fsum(apart.values)
    if count < APART_PAIRS:
        return unknown(f"only {count:.0f} pairs of equal answers were sampled, {APART_PAIRS:.0f} are needed")
    share = other / count
    if share < APART_WATCH:
        return finding("fine", f"Equal answers get equal rewards: {other:.0f} of {count:.0f} pairs differ")
    return finding(grade(share, APART_WATCH, APART_BROKEN), f"The reward does not depend on the answer alone: of "
                   f"{count:.0f} pairs of rollouts with the same prompt and the same text, {percent(share)} got "
                   f"different rewards", apart, pairs, why="A verifier is a function of prompt and answer: r(x, y) = "
                   "r(x, y). What differs between equal answers is noise, a wrong order of rows, or a wrong group.",
                   onset=crossed(apart, lambda x: x > 0), follows=["reward missing"])


def length(log: Log) -> Finding:
    """Correlation of reward and length inside groups; from a log alone, of their changes from step to step."""
    found = log.finite(schema.LENGTH_REWARD_CORRELATION)
    grown = _grown(log)
    if found and len(found) >= FEW:
        middle = mean_interval(found.values)
        low, high = middle.ends or (middle.mean, middle.mean)
        firm = min(abs(low), abs(high)) if low * high > 0 else 0.0
        state: State = grade(firm, LENGTH_WATCH, LENGTH_BROKEN)
        state = "broken" if state == "watch" and grown and grown * middle.mean > 0 else state
        way = "longer" if middle.mean > 0 else "shorter"
        return finding(state, f"The reward follows length: inside groups its correlation with length is "
                       f"{middle.mean:.2f} (95 % from {low:.2f} to {high:.2f}), so {way} answers are pushed up"
                       if state != "fine" else f"The reward is not known to follow length: inside groups their "
                       f"correlation is {middle.mean:.2f} (95 % from {low:.2f} to {high:.2f})", found,
                       why="corr(L, r) over rollouts of one prompt; 0 where length does not pay.",
                       onset=found.rows[0].step)
    if not has(log, schema.REWARD_MEAN, 2 * THIRDS) or not has(log, schema.LENGTH_MEAN, 2 * THIRDS):
        return lacking(log, "correlation of reward and length inside groups is not in the log",
                       {schema.LENGTH_REWARD_CORRELATION: FEW}, signs.callback(log))
    r = _changes_together(log)
    if abs(r) < LENGTH_STEPS or not grown or grown * r < 0 or signs.outcome(log) != "rose":
        return finding("fine", f"The reward is not known to follow length: from step to step their changes have "
                       f"correlation {r:.2f}")
    return finding("watch", f"The reward follows length: from step to step their changes have correlation {r:.2f}, and "
                   f"answers grow {'longer' if grown > 0 else 'shorter'} as the reward rises",
                   series_of(log, schema.LENGTH_MEAN), series_of(log, schema.REWARD_MEAN),
                   why="corr(ΔL̄, Δr̄) of the means of successive steps; 0 where length does not pay.",
                   settles=signs.callback(log),
                   onset=series_of(log, schema.REWARD_MEAN).rows[0].step)


START = 3
"""Readings at the start: of three the interval has t = 4.3, of two 12.7."""


def hacked(log: Log) -> Finding:
    """The verifier's reward beside a learned one: how much of its best third, or of its first readings where it fell
    within the first third, is lost in the last, while the learned one did not fall.

    A learned reward was fitted to answers near the reference. Where training has left them, it may rise alone, or tell
    nothing.
    """
    if not log.finite(schema.REWARD_GOLD_MEAN):
        return finding("fine", "Not in play: no second reward is recorded beside the one that is paid")
    gold = series_of(log, schema.REWARD_GOLD_MEAN, THIRDS)
    size = len(gold) // 3
    best = max((gold.part(at, at + size) for at in (0, size)), key=lambda part: part.mean)
    since = between(best, gold.part(-size))
    early = between(gold.part(0, START), gold.part(-size))
    if not since.change.excludes_zero and early.change.excludes_zero and early.first.mean > best.mean:
        since = early  # a fall within the first third makes that third's interval wide
    best = since.first
    lost = -since.change.mean / best.mean if best.mean > 0 else 0.0
    paid, told = trend(series_of(log, schema.REWARD_MEAN)), signs.outcome(log)
    if not since.change.excludes_zero or lost < GOLD_WATCH:
        return finding("fine", f"The verifier's reward did not clearly fall beside the learned one: {best.mean:.3g} at "
                       f"its best, {since.last.mean:.3g} in the last third", best, since.last)
    if told == "fell":
        return finding("fine", f"Not in play: the learned reward fell with the verifier's, from {paid.first.mean:.3g} "
                       f"to {paid.last.mean:.3g}", since.last)
    agree = level(log, schema.REWARD_GOLD_CORRELATION)
    lead = "is hacked: it rose" if told == "rose" else "misleads: it went"
    inside = f"; inside groups their correlation is {agree.mean:.2f}" if agree else ""
    return finding(grade(lost, GOLD_WATCH, GOLD_BROKEN), f"The learned reward {lead} from {paid.first.mean:.3g} to "
                   f"{paid.last.mean:.3g}, and the verifier's fell by {percent(lost)}, from {best.mean:.3g} to "
                   f"{since.last.mean:.3g}{inside}",
                   best, since.last, paid.last, why=since.told(), onset=since.last.rows[0].step)


def _grown(log: Log) -> int:
    """1 where the last lengths lie above the first, −1 where below, 0 where they did not clearly change."""
    if not has(log, schema.LENGTH_MEAN, THIRDS):
        return 0
    first, after = ends(series_of(log, schema.LENGTH_MEAN))
    if min(after.values) > max(first.values):
        return 1
    return -1 if max(after.values) < min(first.values) else 0


def _changes_together(log: Log) -> float:
    """corr(x_s − x_{s−1}, y_s − y_{s−1}) of mean reward and mean length over the rows that have both."""
    reward, size = series_of(log, schema.REWARD_MEAN), series_of(log, schema.LENGTH_MEAN)
    rows = [row.values for row in reward.rows if is_number(row.values.get(size.name, math.nan))]
    x, y = ([b[name] - a[name] for a, b in pairwise(rows)] for name in (reward.name, size.name))
    mx, my = math.fsum(x) / max(1, len(x)), math.fsum(y) / max(1, len(y))
    xy = math.fsum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    xx, yy = math.fsum((a - mx) ** 2 for a in x), math.fsum((b - my) ** 2 for b in y)
    return xy / math.sqrt(xx * yy) if xx * yy > 0 else 0.0
