"""Does the policy move too far? Steps, updates per batch, decay, entropy, length, KL, gradients, the sampler."""

from __future__ import annotations

import math
from collections.abc import Callable

from creditscope.diagnosis import signs
from creditscope.diagnosis.finding import (
    FEW,
    TREND,
    Finding,
    State,
    ends,
    finding,
    grade,
    has,
    lacking,
    last,
    level,
    over,
    series_of,
    unknown,
)
from creditscope.diagnosis.log import Log, Series, is_number
from creditscope.diagnosis.onset import crossed, left_beginning
from creditscope.diagnosis.signs import percent
from creditscope.diagnosis.thresholds import (
    CLIP_MUCH,
    CLIP_SOME,
    COLLAPSED,
    DECAY,
    ENTROPY_GONE,
    ENTROPY_LEFT,
    ENTROPY_LOW,
    ENTROPY_NATS,
    ENTROPY_RISE,
    FIRST_STEPS,
    GAP,
    GROWN,
    KL_FIRST,
    KL_WATCH,
    PAST_BROKEN,
    PAST_WATCH,
    RATIO_BROKEN,
    RATIO_WATCH,
    SHRUNK_BROKEN,
    SHRUNK_WATCH,
    SPIKE,
    STEP_BROKEN,
    STEP_WATCH,
    UPDATES_MANY,
    ZERO_MANY,
)
from creditscope.runs import schema

FAR = ("weight decay", "updates", "step size")
"""Rules whose findings explain a policy that moved too far."""


def _worst(series: Series) -> Series:
    """The reading with the largest value, over all steps: what happened early does not expire."""
    at = max(range(len(series)), key=lambda k: series.values[k])
    return series.part(at, at + 1)


def step_size(log: Log) -> Finding:
    """The largest KL after an update over the whole run; from a log alone, a reward that collapsed."""
    series, updates = log.finite(schema.OVERSHOOT_KL), log.fact("updates")
    rate = log.setting("learning_rate")
    top = rate if rate is not None else max(found.values) if (found := log.finite("lr")) else None
    named = f" (learning rate {top:.2g})" if top else ""
    fell = _collapsed(log)
    if series:
        worst = _worst(series)
        state = grade(worst.mean, STEP_WATCH, STEP_BROKEN)
        harmless = not fell and (signs.rises(log) or signs.nearly_all_right(log) is not None)
        state = "broken" if state == "watch" and fell else _milder(state) if harmless else state
        if state == "fine":
            return finding("fine", f"No update moved the policy by more than {worst.mean:.2g} nats per token", worst)
        return finding(state, f"Steps are too large: an update moved the policy by {worst.mean:.2g} nats per "
                       f"token{signs.at_step(worst)}{named}" + (f", and {fell}" if fell else ""), worst,
                       why="KL(π_old ‖ π) after the update; the gradient is known at π_old alone.",
                       onset=crossed(series, lambda x: x >= STEP_WATCH, 1), follows=["updates", "weight decay"])
    if not fell:
        return finding("fine", f"Nothing says that steps are too large{named}")
    reward = series_of(log, schema.REWARD_MEAN)
    return finding("broken", f"Steps are too large{named}: {fell}",
                   *ends(reward) if len(reward) >= TREND else (reward,),
                   why="The updates lowered a reward that was higher before; smaller updates keep π near the π_old "
                   "that was sampled.", onset=left_beginning(reward, rising=False),
                   follows=["weight decay", *(["updates"] if updates != 1 else []),
                            *(["length drift"] if _shrank(log) else [])])


def _milder(state: State) -> State:
    return "watch" if state == "broken" else "fine"


def _collapsed(log: Log) -> str:
    """What collapsed, in words; empty where nothing did."""
    found, unit = signs.reward_trend(log), signs.reward_unit(log)
    if found and signs.outcome(log) == "fell" and -found.change.mean >= COLLAPSED * unit > 0:
        return f"the reward fell from {found.first.mean:.3g} to {found.last.mean:.3g}"
    reward = log.series(schema.REWARD_MEAN)
    flat = signs.flat_rewards(log)
    if reward and flat and len(reward.finite) >= 2 * FEW:
        first, after = reward.finite.part(0, FEW), reward.finite.part(-FEW)
        if first.mean > after.mean and max(after.values) == min(after.values):
            return f"the reward fell from {first.mean:.3g} at first to {after.mean:.3g} for every answer"
    return ""


def _shrank(log: Log) -> bool:
    """Whether answers lost nine tenths of their length: what is paid for short answers explains more than a step."""
    if not has(log, schema.LENGTH_MEAN, TREND):
        return False
    before, after = (part.mean for part in ends(series_of(log, schema.LENGTH_MEAN)))
    return after <= SHRUNK_BROKEN * before


def updates(log: Log) -> Finding:
    """Several updates per batch that carry tokens past their bound, or clip many."""
    count, past, clip = log.fact("updates"), log.finite(schema.OVERSHOOT_PAST), level(log, "clip")
    if count == 1:
        return finding("fine", "Not in play: one optimiser step per batch")
    often = "an unknown number of optimiser steps" if count is None else f"{count} optimiser steps"
    harm = not signs.rises(log)
    why = "Past 1 ± ε the term is constant in π, so w = 0; momentum and other tokens still move it."
    if past and len(past) >= 2:
        worst, recent = _worst(past), last(past)
        high = max(recent.mean, worst.mean if harm else 0.0)
        state = grade(high, PAST_WATCH, PAST_BROKEN)
        if not harm:
            state = "watch" if high >= PAST_BROKEN else "fine"
        elif state == "watch" and _collapsed(log):
            state = "broken"
        return finding(state, f"{percent(recent.mean)} of the tokens that have a bound end past it{over(recent)}, "
                       f"{percent(worst.mean)} at most{signs.at_step(worst)}, with {often} per batch", recent, worst,
                       onset=crossed(past, lambda x: x >= PAST_WATCH, 1), why=why)
    if clip is None:
        return lacking(log, f"with {often} per batch, neither clipped tokens nor tokens past their bound were read",
                       {schema.OVERSHOOT_PAST: 2, "clip": FEW}, signs.callback(log))
    state = grade(clip.mean, CLIP_MUCH) if harm else "fine"
    if count is not None and harm and count >= UPDATES_MANY and clip.mean >= CLIP_SOME:
        state = "broken"
    given = (count or 0) > 1 and not signs.assumes(log, "updates")
    state = "broken" if given and clip.mean >= CLIP_SOME and harm and _collapsed(log) else state
    return finding(state, f"{percent(clip.mean)} of the tokens are clipped{over(clip)}, with {often} per batch", clip,
                   onset=crossed(series_of(log, "clip"), lambda x: x >= CLIP_MUCH), why=why)


def decay(log: Log) -> Finding:
    """AdamW multiplies each weight by 1 − ηλ per step: over the run they shrink by Σ ηλ."""
    weight, rate = log.setting("weight_decay"), log.finite("lr")
    if weight == 0:
        return finding("fine", "There is no weight decay")
    if weight is None or not rate:
        return unknown("the weight decay and the learning rate are not both known",
                       settles=signs.SETTINGS_FILE)
    total = weight * math.fsum(rate.values) / len(rate) * signs.planned(log)
    if total < DECAY:
        return finding("fine", f"Weight decay shrinks the weights by {percent(total)} over the run", rate)
    state: State = "broken" if not signs.rises(log) else "watch"
    return finding(state, f"Weight decay shrinks the weights by {percent(min(1.0, 1 - math.exp(-total)))} over the "
                   f"run: {log.spelled('weight_decay')} = {weight:g}", rate, why="θ ← (1 − ηλ)θ at every step, "
                   "whatever the gradient says.", onset=0)


def entropy(log: Log) -> Finding:
    """H falls to 0, where the R answers to a prompt are equal and A = 0; or it rises."""
    if not log.fact("per_token"):
        return unknown(f"{log.trainer.metrics['entropy']} is summed over answers by {log.fact('loss')}: length and "
                       f"entropy cannot be told apart")
    series = series_of(log, "entropy", TREND)
    both = ends(series)
    before, after = (part.mean for part in both)
    if min(series.values) < 0:
        return unknown(f"{series.name} is negative: it is not the entropy of a token's distribution")
    if after == 0 and signs.nearly_all_masked(log):
        return unknown(f"{both[1].name} is 0 because every answer is masked", "truncation")
    low, fallen = after < ENTROPY_LOW, before > 0 and after <= ENTROPY_LEFT * before
    # A solved task has little entropy left, and so has a model that was sure from the start.
    learns = signs.rises(log) or signs.nearly_all_right(log) is not None
    rose = after >= ENTROPY_RISE * before and after - before >= ENTROPY_NATS
    gone = after <= ENTROPY_GONE * before
    state: State = "broken" if low and fallen and not learns else "watch" if (fallen and (gone or not learns)) or (
        rose and not learns) else "fine"
    words = "Entropy rises" if rose else "Entropy collapsed" if low and fallen else "Entropy falls" if fallen else \
        "Entropy is low" if low else "Entropy holds"
    return finding(state, f"{words}: {before:.3g} nats per token, then {after:.3g}", *both,
                   why="An answer of L tokens has exp(L·H) likely forms; at 1 all answers to a prompt are one: A = 0.",
                   remedy="step size" if rose else "entropy",
                   onset=left_beginning(series, rising=rose),
                   follows=[*FAR, "reward length", "length drift", "memorised", "held out", "KL pull", "too easy"])


def drift(log: Log) -> Finding:
    """The mean length, first tenth against last: answers that shrink to nothing, or grow without bound."""
    series = series_of(log, schema.LENGTH_MEAN, TREND)
    both, row = ends(series), log.fact("method")
    before, after = (part.mean for part in both)
    factor = after / max(before, 1.0)
    state: State = "broken" if factor <= SHRUNK_BROKEN and not signs.rises(log) else "watch" if (
        factor <= SHRUNK_WATCH or factor >= GROWN) and not signs.rises(log) else "fine"
    state = "watch" if factor <= SHRUNK_BROKEN and state == "fine" else state
    own = row is not None and row.aggregate == "sequence_mean" and factor > 1
    shrinks = factor < 1
    told = ". With 1/L_i, a long wrong answer is punished less for each token than a short one" if own and state != \
        "fine" else ""
    return finding(state, f"Answers went from {before:.0f} to {after:.0f} tokens (× {factor:.2g}){told}", *both,
                   why="w_it ∝ A_i/L_i under a mean over each answer, ∝ A_i under a mean over all tokens.",
                   remedy="length shrinks" if shrinks else "length drift" if own else "reward length",
                   onset=left_beginning(series, rising=not shrinks),
                   follows=["KL pull", "reward length", "weight decay", *([] if shrinks and state == "broken" else FAR),
                            "hot sampler"])


def kl_level(log: Log) -> Finding:
    """KL to the reference: at the first step, where it should be 0, and at the end."""
    series = series_of(log, "kl")
    first, recent = series.values[0], last(series)
    if log.fact("beta") == 0:
        return finding("fine", f"KL is {recent.mean:.2g}, of a term that is not in the loss", recent)
    if first >= KL_FIRST and (series.rows[0].step or 0) <= FIRST_STEPS and signs.outcome(log) != "rose":
        return finding("watch", f"The reference is not the model that training starts from: KL is {first:.2g} at the "
                       f"first reading, where it should be 0", series.part(0, 3),
                       why="KL(π ‖ π_ref) = 0 at π = π_ref.", remedy="reference",
                       onset=series.rows[0].step)
    bad = recent.mean >= KL_WATCH and not signs.rises(log)
    return finding("watch" if bad else "fine", f"KL to the reference went from {first:.2g} to {recent.mean:.2g}",
                   recent,
                   why="KL per token, mean over the answers' tokens.", onset=crossed(series, lambda x: x >= KL_WATCH),
                   follows=FAR)


def gradient(log: Log) -> Finding:
    """A NaN norm makes the weights NaN; a norm of 0 means that nothing is learnt; a spike outweighs other batches."""
    for series in (log.series(schema.GRAD_NORM), log.series("loss")):
        bad = [k for k, value in enumerate(series.values) if not is_number(value)] if series else []
        if series and bad:
            return finding("broken", f"{series.name} is not a number in {len(bad)} of {len(series)} readings; the "
                           f"first is shown", series.part(bad[0], bad[0] + 1), why="One NaN in ∇J makes every weight "
                           "NaN at the next step.",
                           onset=series.rows[bad[0]].step, follows=["reward missing", *FAR])
    norm = series_of(log, schema.GRAD_NORM)
    zeros = sum(signs.exactly_zero(norm, value) for value in norm.values)
    if zeros > ZERO_MANY * len(norm):
        return finding("watch" if signs.rises(log) else "broken", f"The gradient is exactly 0 in {zeros} of "
                       f"{len(norm)} readings: nothing is learnt there", norm, why="∇J = Σ w ∇log π, and w = 0 where "
                       "a group is dead, an answer is masked, or a pair has the margin that its loss asks for.",
                       remedy="dead groups",
                       onset=crossed(norm, lambda x: x == 0),
                       follows=["truncation", "reward constant", "one rollout", "cold sampler", "too easy", "too hard",
                                "dead groups", "memorised", "step size"])
    middle = sorted(norm.values)[len(norm) // 2]
    worst = _worst(norm)
    spiked = middle > 0 and worst.mean >= SPIKE * middle and len(norm) >= TREND
    if spiked and not signs.rises(log) and signs.outcome(log) == "fell":
        return finding("watch", f"The gradient spikes: its norm is {worst.mean:.2g}{signs.at_step(worst)}, the median "
                       f"{middle:.2g}", worst, why="‖∇J‖ before clipping.", onset=worst.rows[0].step, follows=FAR)
    told = f", {zeros} of {len(norm)} readings are 0" if zeros else ""
    return finding("fine", f"The gradient's norm is {last(norm).mean:.2g}{told}", last(norm))


def sampler(log: Log) -> Finding:
    """Samples from another engine than the one that is trained: ρ = π_train/π_sampler is not 1."""
    ratio, gap = level(log, schema.SAMPLER_RATIO), level(log, schema.SAMPLER_GAP)
    if ratio is None and gap is None:
        if log.fact("sampler") is None:
            return unknown("which engine draws the samples is not known")
        if not log.fact("sampler"):
            return finding("fine", "The trainer's own forward draws the samples: there is no second engine")
        names = (log.trainer.metrics[metric] for metric in (schema.SAMPLER_RATIO, schema.SAMPLER_GAP)
                 if metric in log.trainer.metrics)
        return lacking(log, "another engine draws the samples", {schema.SAMPLER_RATIO: FEW, schema.SAMPLER_GAP: FEW},
                       f"at least {FEW} readings of {' or '.join(names)}")
    far = abs(ratio.mean - 1) if ratio else 0.0
    apart = gap.mean if gap else 0.0
    state: State = "broken" if far > RATIO_BROKEN else "watch" if far > RATIO_WATCH or apart > GAP else "fine"
    words = " and ".join(f"{series.name} is {series.mean:.3g}" for series in (ratio, gap) if series)
    return finding(state, f"Sampler and trainer {'agree' if state == 'fine' else 'do not agree'}: {words}", ratio, gap,
                   why="E[π_train/π_sampler] = 1 under the sampler; a mean below 1 is weight that a mask or a ceiling "
                   "took away.",
                   onset=min((step for step in (_left(log, schema.SAMPLER_RATIO, lambda x: abs(x - 1) > RATIO_WATCH),
                                                _left(log, schema.SAMPLER_GAP, lambda x: x > GAP)) if step is not None),
                             default=None))


def _left(log: Log, metric: str, bad: Callable[[float], bool]) -> int | None:
    return crossed(series_of(log, metric), bad) if has(log, metric) else None
