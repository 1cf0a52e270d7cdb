"""Is there contrast inside the groups? A group whose rewards are all equal has A = 0 and trains nothing."""

from __future__ import annotations

import math
from dataclasses import replace

from creditscope.diagnosis import signs
from creditscope.diagnosis.finding import (
    FEW,
    THIRDS,
    Finding,
    State,
    expect_enough,
    finding,
    grade,
    has,
    lacking,
    last,
    level,
    over,
    series_of,
    trend,
    unknown,
)
from creditscope.diagnosis.log import Log, Series
from creditscope.diagnosis.onset import crossed, left_beginning
from creditscope.diagnosis.signs import percent
from creditscope.diagnosis.thresholds import (
    COLD,
    CUT_BROKEN,
    CUT_WATCH,
    DEAD_BOUND,
    DEAD_BROKEN,
    DEAD_WATCH,
    DILUTION,
    DISTINCT,
    ENTROPY_LOW,
    HOT,
    HOT_ENTROPY,
    NEAR_LIMIT,
    ONE_TEXT,
    WRONG,
)
from creditscope.runs import schema

NOT_COUNTED = "the log does not say how many groups are dead, see dead groups"
WHY = "A_i = r_i − mean r = 0 in a group with one reward."
DEATH = ("reward missing", "form", "reward constant", "one rollout", "truncation", "cold sampler", "hot sampler",
         "too easy", "too hard")
"""Rules whose findings explain dead groups, whenever they are bad."""


def one_rollout(log: Log) -> Finding:
    """With R = 1 a group mean is the reward itself: no baseline, or no advantage at all."""
    row, size = log.fact("method"), log.fact("group")
    if size is None:
        return unknown("rollouts per prompt are not known", settles=signs.SETTINGS_FILE)
    if row is None or size != 1 or row.baseline in ("none", "external"):
        return finding("fine", "Not in play: " + (
            f"{size:.0f} rollouts per prompt" if size != 1 else
            f"{log.fact('loss')} is not known to compare the answers of a group"))
    if signs.assumes(log, "group"):
        return unknown(f"rollouts per prompt were not given; {log.trainer.name}'s default is 1")
    return finding("broken", "One rollout per prompt: a method with a group baseline has nothing to compare an answer "
                   "with, so the reward itself is its advantage, or 0", why="A = r − mean r over R = 1 answers: 0, or "
                   "r where a trainer leaves the mean out.", onset=0)


# -- the sampler ------------------------------------------------------------------------------------------------------


def cold(log: Log) -> Finding:
    """Answers of a group that are all the same text, from the start: the sampler does not explore."""
    distinct, entropy = log.finite(schema.SIGNAL_DISTINCT_TEXTS), log.finite("entropy")
    named = [f"{log.spelled(name)} = {value:g}" for name in ("temperature", "top_p")
             if (value := log.setting(name)) is not None and 0 <= value < COLD]
    named += [f"{log.spelled('top_k')} = 1"] if log.setting("top_k") == 1 else []
    said = f" ({', '.join(named)})" if named else ""
    why = "R draws of one text are one draw: all rewards are equal, and A = 0."
    if distinct and len(distinct) >= FEW and (log.fact("group") or 2) > 1:
        first = distinct.part(0, max(FEW, len(distinct) // 10))
        one = ONE_TEXT / size if (size := log.fact("group")) else 0.0  # in distinct answers per rollout
        if first.mean <= max(DISTINCT, one) and (named or not signs.nearly_all_right(log)):
            state: State = "broken" if named or first.mean <= one else "watch"
            return finding(state, f"The sampler repeats itself: {percent(first.mean)} of the answers are distinct from "
                           f"the start{said}", first, onset=first.rows[0].step, why=why,
                           follows=[] if named else ["truncation"])
        return finding("fine", f"Answers of a group differ: {percent(last(distinct).mean)} are distinct",
                       last(distinct))
    low = entropy.part(0, FEW) if entropy and log.fact("per_token") and len(entropy) >= FEW else None
    narrow = low is not None and low.mean < ENTROPY_LOW
    if named and (narrow or _dead_share(log) >= DEAD_BOUND or not low):
        state = "broken" if _dead_share(log) >= DEAD_WATCH else "watch"
        return finding(state, f"The sampler hardly explores{said}: the answers of a group are nearly one text", low,
                       onset=0, why=why)
    if narrow and low is not None and low.mean > 0:
        return finding("watch", f"The sampler hardly explores: {low.mean:.2g} nats per token from the start", low,
                       onset=low.rows[0].step, settles="the sampler's temperature, top-p and top-k", why=why)
    if low is None:
        expect_enough(log, {**({schema.SIGNAL_DISTINCT_TEXTS: FEW} if distinct and log.fact("group") != 1 else {}),
                            **({"entropy": FEW} if entropy and log.fact("per_token") else {})})
    return finding("fine", "Not in play: nothing says that the sampler is narrow")


def hot(log: Log) -> Finding:
    """Sampling so flat that answers are noise."""
    temperature, entropy = log.setting("temperature"), log.finite("entropy")
    first = entropy.part(0, FEW) if entropy and log.fact("per_token") and len(entropy) >= FEW else None
    high = first is not None and first.mean >= HOT_ENTROPY
    warm = temperature is not None and temperature >= HOT
    if not high and not (warm and first is None):
        if first is None and entropy and log.fact("per_token"):
            expect_enough(log, {"entropy": FEW})
        return finding("fine", "Not in play: nothing says that the sampler is too wide", first)
    said = f" ({log.spelled('temperature')} = {temperature:g})" if temperature is not None else ""
    bad = warm or not signs.rises(log)
    told = f": {first.mean:.2g} nats per token from the start" if first else ""
    if not bad:
        return finding("fine", f"The sampler is wide{said}{told}, and the reward rises", first)
    return finding("broken" if warm and high else "watch",
                   f"The sampler draws nearly at random{said}{told}", first,
                   why="π^(1/T) is flat at large T: answers are noise, and few of them are right.", onset=0)


# -- difficulty -------------------------------------------------------------------------------------------------------


def too_hard(log: Log) -> Finding:
    """Dead groups whose answers are all wrong."""
    recent, dead = level(log, schema.REWARD_MEAN), _dead_share(log)
    if recent is None:
        return lacking(log, "the reward was not read", {schema.REWARD_MEAN: FEW})
    among = level(log, schema.SIGNAL_DEAD_REWARD)
    wrong = signs.is_small(log, among or recent, WRONG)
    if dead < DEAD_BOUND or not wrong or signs.flat_rewards(log):
        return finding("fine", "Not in play: few groups are known to be all wrong", recent)
    state: State = "fine" if signs.rises(log) and dead < DEAD_BROKEN else grade(dead, DEAD_WATCH, DEAD_BROKEN)
    state = "watch" if state == "fine" and not signs.rises(log) else state
    words = "The reward rises although many prompts are hard" if state == "fine" else \
        f"{'Most' if dead >= DEAD_WATCH else 'Many'} prompts are too hard"
    return finding(state, f"{words}: in {percent(dead)} of the groups all rewards are equal, and the mean reward is "
                   f"{recent.mean:.3g}", recent, among, why=WHY, onset=_dead_onset(log),
                   follows=["truncation", "hot sampler", "reward missing", "form", "step size", "updates",
                            "weight decay", "reward trend"])


def too_easy(log: Log) -> Finding:
    """Dead groups whose answers are all right: nothing is left to learn on these prompts."""
    right, dead = signs.nearly_all_right(log) or signs.at_the_top(log), _dead_share(log)
    if right is None:
        expect_enough(log, {schema.REWARD_MEAN: FEW})
    if right is None or dead < DEAD_BOUND:
        return finding("fine", "Not in play: few groups are known to be all right", right)
    learnt = signs.outcome(log) == "rose"
    words = "is nearly solved by now" if learnt else "was nearly solved from the start"
    return finding("watch", f"The set of prompts {words}: {percent(dead)} of the groups are dead, and the mean reward "
                   f"is {right.mean:.3g}", right, why=WHY,
                   onset=_dead_onset(log), follows=["memorised", "reward length", "held out"])


def _dead_share(log: Log) -> float:
    """The share of dead groups over the last readings, or what is known as its lower bound."""
    if log.fact("dead_counted") and (counted := level(log, "dead")):
        return counted.mean
    return _zero_std(log)


def _zero_std(log: Log) -> float:
    """Share of readings in which the std of all rewards is exactly 0, so that every group is dead: over the last third
    where that is half or more, or clearly above the first third; else over the whole log."""
    spread = log.finite(schema.REWARD_STD)
    if not spread or len(spread) < THIRDS:
        return 1.0 if signs.all_dead(log) else 0.0
    zero = Series(spread.name, [replace(row, values={spread.name: float(signs.exactly_zero(spread, value))})
                                for row, value in zip(spread.rows, spread.values, strict=True)], spread.source)
    found = trend(zero)
    grew = found.change.excludes_zero and found.change.mean > 0
    return found.last.mean if grew or found.last.mean >= DEAD_WATCH else zero.mean


def _dead_onset(log: Log) -> int | None:
    counted = log.series("dead")
    return crossed(counted, lambda share: share >= DEAD_BOUND) if counted and log.fact("dead_counted") else None


def dead(log: Log) -> Finding:
    """Share of groups with one reward, as the trainer counts it, or a lower bound."""
    if not log.fact("dead_counted") or not log.series("dead"):
        if log.fact("dropped"):
            return finding("fine", "Dead groups are dropped before the loss, and others are drawn")
        if flat := signs.flat_rewards(log):
            return finding("broken", "Every group is dead: all answers of a batch get the same reward", *flat, why=WHY,
                           onset=flat[0].rows[0].step, follows=DEATH)
        return _uncounted(log)
    recent, norm = last(series_of(log, "dead")), level(log, schema.GRAD_NORM)
    if norm and signs.no_gradient(log) and recent.mean < DEAD_BROKEN and not signs.nearly_all_right(log):
        return finding("broken", f"No group trains anything: the gradient is 0, although {recent.name} says "
                       f"{recent.mean:.0%}", norm, recent, why=WHY, follows=DEATH,
                       remedy="dead counted" if signs.assumes(log, "dead_counted") else "dead groups")
    if recent.mean == 0:
        row = log.fact("method")
        return finding("fine", "No group is dead: " + (
            "an answer has a w by the sign of its own reward, in a tie too" if row is not None and row.by_sign else
            "in each of them some answers got more reward than others"), recent)
    spread = level(log, schema.REWARD_STD)
    by_prompt = min(recent.values) == 1 and spread is not None and min(spread.values) > 0
    said = "rewards differ between prompts and never between the answers to one: they do not depend on the answer" \
        if by_prompt else "nothing that is rewarded differs between their answers, so they train nothing"
    return finding(grade(recent.mean, DEAD_WATCH, DEAD_BROKEN), f"{percent(recent.mean)} of the groups are "
                   f"dead{over(recent)}: {said}", recent, spread if by_prompt else None, why=WHY,
                   remedy="reward" if by_prompt else "",
                   onset=_dead_onset(log), follows=[*DEATH, "entropy", "length drift", "step size",
                                                                        "updates", "weight decay", "reward trend"])


def _uncounted(log: Log) -> Finding:
    """Where no share is logged: readings whose std is exactly 0, or p^R + (1−p)^R for rewards of 0 and 1 with mean p.

    q^R + (1−q)^R is convex in q, so prompts of unequal difficulty around p leave more groups dead (Jensen).
    """
    counted, norm, bound = log.finite("dead"), level(log, schema.GRAD_NORM), _zero_std(log)
    counted = last(counted) if counted else None
    doubt = (f"{counted.name} cannot be trusted: it is taken from the std of the whole batch and reads 0 beside dead "
             f"groups" if counted else f"{log.trainer.name} does not log how many groups are dead")
    if norm and signs.no_gradient(log):
        return finding("broken", f"No group trains anything: the gradient is 0. {doubt}", norm, counted,
                       why="∇J = Σ w ∇log π, and w = 0 where A = 0.",
                       remedy="dead counted" if counted else "dead groups", follows=DEATH)
    if bound >= DEAD_BOUND:
        spread = series_of(log, schema.REWARD_STD)
        return finding(grade(bound, DEAD_BOUND, DEAD_BROKEN), f"At least {percent(bound)} of the groups are dead: "
                       f"{spread.name} is exactly 0 in so many of the readings", spread, why=WHY, follows=DEATH,
                       onset=crossed(spread, lambda x: x == 0))
    recent, size = last(series_of(log, schema.REWARD_MEAN)), log.fact("group")
    if size is None or min(recent.values) < 0 or max(recent.values) > 1 or size < 2:
        return unknown(doubt, settles=signs.remedy(log, "dead counted"))
    share = math.fsum(p**size + (1 - p)**size for p in recent.values) / len(recent)
    if signs.assumes(log, "group") or share < DEAD_WATCH:
        return unknown(f"{doubt}. If rewards are 0 or 1, at least {share:.0%} of the groups are dead on average",
                       settles=signs.remedy(log, "dead counted"))
    return finding("watch" if not signs.rises(log) else "fine",
                   f"{doubt}. If rewards are 0 or 1, at least {share:.0%} of the groups are dead on average", recent,
                   counted, why=f"Groups of R = {size:.0f} answers at success rate p are unanimous with p^R + (1−p)^R, "
                   f"and more often where p differs between prompts.", remedy="dead counted", follows=DEATH)


def dilution(log: Log) -> Finding:
    """Dead groups stay in the denominator: live answers alone would give ∇J times 1/(1 − dead)."""
    row = log.fact("method")
    if row is None:
        return unknown(f"no row of `creditscope list methods` stands for {log.fact('loss')}")
    if log.fact("dropped") or row.aggregate == "token_sum":
        return finding("fine", f"{log.fact('loss')} has no dead groups in its denominator")
    nothing = "Every group is dead: there is nothing to dilute"
    if not log.fact("dead_counted"):
        return finding("fine", nothing) if signs.all_dead(log) else unknown(NOT_COUNTED)
    series = series_of(log, "dead")
    factors = sorted(1 / (1 - share) for share in series.values if share < 1)
    recent = [share for share in last(series).values if share < 1]
    if not recent:
        return finding("fine", nothing, last(series))
    odd = len(factors) // 10
    now, low, high = 1 / (1 - math.fsum(recent) / len(recent)), factors[odd], factors[-1 - odd]
    if factors[-1] == 1:
        return finding("fine", "No batch that trains has a dead group in its denominator", last(series))
    return finding("fine" if signs.rises(log) else grade(now, DILUTION),
                   f"Dead groups count in the denominator: live tokens only would scale the gradient by × {now:.2f} "
                   f"now, by × {low:.2f} to × {high:.2f} in the middle 80% of the batches", last(series),
                   why="∇J = 1/(live + dead)·Σ_live, for answers of about equal length. Adam divides a constant factor "
                   "out, not one that changes.",
                   follows=["dead groups", "too hard", "too easy", *DEATH])


def kl_only(log: Log) -> Finding:
    """A dead group has no reward term: under a KL term it is pulled to the reference and nothing else."""
    beta = log.fact("beta")
    if beta == 0 or log.fact("dropped"):
        why = "There is no KL term in the loss" if beta == 0 else "Dead groups are dropped before the loss"
        return finding("fine", f"{why}: dead groups have no gradient")
    if beta is None and not log.finite("kl"):
        return unknown("whether the loss has a KL term is not known", settles="the KL to the reference, in the log")
    share = _dead_share(log)
    if share == 0 and not (log.fact("dead_counted") and level(log, "dead")):
        return lacking(log, NOT_COUNTED, {"dead": FEW} if log.fact("dead_counted") else {})
    weight = "" if beta is None else f", with weight {beta:g}"
    return finding("fine" if signs.rises(log) else grade(share, DEAD_WATCH), f"{percent(share)} of the groups are dead "
                   f"and pulled to the reference alone{weight}", level(log, "kl"),
                   why="∇J = Σ w ∇log π − β ∇KL, and w = 0 in a dead group.",
                   follows=["dead groups", "too hard", "too easy", *DEATH])


def saturation(log: Log) -> Finding:
    """Dead groups grow, first third against last: prompts become all right or all wrong."""
    nothing = "Not in play: every group is dead, so there is no signal to run out"
    if not log.fact("dead_counted"):
        return finding("fine", nothing) if signs.all_dead(log) else unknown(NOT_COUNTED)
    share = trend(series_of(log, "dead", THIRDS))
    if share.last.mean == 1 and not signs.dead_groups_grew(log):
        return finding("fine", nothing, share.first, share.last)
    words = f"dead groups went from {percent(share.first.mean)} to {percent(share.last.mean)}"
    spread = (trend(series_of(log, schema.REWARD_STD)),) if has(log, schema.REWARD_STD, THIRDS) else ()
    words += "".join(f", the rewards' std from {part.first.mean:.2g} to {part.last.mean:.2g}" for part in spread)
    parts = [part for both in (share, *spread) for part in (both.first, both.last)]
    if not signs.dead_groups_grew(log):
        return finding("fine", f"The signal does not run out: {words}", *parts)
    state: State = "fine" if signs.rises(log) and share.last.mean < DEAD_WATCH else "watch"
    return finding(state, f"The signal runs out: {words}", *parts, why=f"A dead group has A = 0. {share.told()}",
                   onset=left_beginning(series_of(log, "dead"), rising=True),
                   follows=["memorised", "reward length", "step size", "updates", "weight decay", "entropy",
                            "length drift", "reward trend", "too easy", "too hard"])


# -- cut answers ------------------------------------------------------------------------------------------------------


def truncation(log: Log) -> Finding:
    """A truncated answer is judged on half a text; masked, it trains nothing."""
    if not has(log, "truncated"):
        return _near_limit(log)
    recent, limit, longest = last(series_of(log, "truncated")), log.fact("limit"), level(log, schema.LENGTH_MAX)
    if limit is not None and (longest is None or signs.assumes(log, "limit")):
        return unknown(f"{recent.name} compares with the longest answer of the batch, not with the limit",
                       settles="the limit, by --config or --set")
    if limit is not None and longest and max(longest.values) < limit:
        return finding("fine", f"No answer reaches the limit of {limit:.0f} tokens; {recent.name} compares with the "
                       f"longest answer of the batch, so it is not 0", longest, recent)
    if recent.mean == 0:
        return finding("fine", "No answer is cut at the limit", recent)
    return _cut(log, recent)


def _cut(log: Log, recent: Series) -> Finding:
    state = grade(recent.mean, CUT_WATCH, CUT_BROKEN)
    well = state == "broken" and not log.fact("masked") and signs.learns_all_the_same(log)
    state = "watch" if well else state
    out, why = (" and left out of the loss", "A masked answer has no token in Σ_t, so w = 0.") if log.fact("masked") \
        else ("", "The reward of half an answer says where it was cut, not whether it was right.")
    came = state != "fine" and signs.cuts_came_later(log)
    then = (f", {percent(signs.cut_at_first(log))} at first" if came else "") + (f", though {well}" if well else "")
    limit = log.setting("limit")
    at = "the limit" if limit is None else f"the limit of {limit:.0f} tokens"
    return finding(state, f"{percent(recent.mean)} of the answers are cut at {at}{over(recent)}{out}{then}",
                   recent,
                   why=why,
                   onset=crossed(series_of(log, "truncated"), lambda share: share >= CUT_WATCH),
                   follows=["reward length", "step size", "updates", "weight decay", "hot sampler", "reward trend"]
                   if came else ["hot sampler"])


def _near_limit(log: Log) -> Finding:
    """Where the share of cut answers is not logged: the mean length beside the limit."""
    size, limit = level(log, schema.LENGTH_MEAN), log.setting("limit")
    if size is None or not limit or limit < 0:
        return lacking(log, "the share of cut answers was not read",
                       {"truncated": FEW, **({schema.LENGTH_MEAN: FEW} if limit and limit > 0 else {})},
                       "the share of answers cut at the limit")
    share = size.mean / limit
    if share < NEAR_LIMIT:
        return finding("fine", f"Answers have {size.mean:.0f} tokens on average, the limit is {limit:.0f}", size)
    return finding("watch", f"Most answers end at the limit: {size.mean:.0f} of {limit:.0f} tokens on average", size,
                   why="A mean near the limit needs most answers at it; these are judged incomplete.",
                   onset=crossed(series_of(log, schema.LENGTH_MEAN), lambda x: x >= NEAR_LIMIT * limit))

