"""The rules, one per function, Log -> Finding; their thresholds stand first, each with its reason. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from creditscope.diagnosis import signs
from creditscope.diagnosis.finding import (
    FEW,
    THIRDS,
    TREND,
    Finding,
    State,
    TooFewReadings,
    ends,
    finding,
    grade,
    has,
    judge,
    last,
    level,
    over,
    series_of,
    trend,
    unknown,
)
from creditscope.diagnosis.log import Log, Series
from creditscope.diagnosis.signs import CUT_BROKEN, CUT_WATCH, percent
from creditscope.methods.words import law
from creditscope.runs import schema

LOSS_ZERO = 1e-6
"""Below it a float32 loss is 0: rounding of centred advantages alone leaves about 1e-8."""
CLIP_MUCH = 0.2
"""Share of clipped tokens: a fifth of every pass has no gradient."""
PAST = 0.05
"""Share of bounded tokens past their bound: one in twenty, as in `creditscope report`."""
DEAD_BROKEN = 0.9
"""Share of dead groups: nine tenths of the sampling is wasted."""
DEAD_WATCH = 0.5
"""Share of dead groups: half of the sampling is wasted."""
DILUTION = 2.0
"""Factor at which the step is halved, or twice as large on one batch as on another. The second leaves out the tenths at
both ends: a long log always has outliers."""
NOT_COUNTED = "the log does not say how many groups are dead, see dead groups"
KL_ONLY = 0.25
"""Share of dead groups: a quarter of the KL gradient comes from answers without a reward gradient."""
HORIZON = 0.1
"""Mean length over the constant: below a tenth, a learning rate taken from another loss is ten times too small."""
DRIFT = 1.5
"""Factor on the mean length: the cost of a step has changed by half."""
SILENT = 3
"""Batches in a row. Where nine answers of ten agree, all 16 of a batch do so by chance in 0.9^16 = 19 %, and three
batches in a row in 0.6 %."""
COLLAPSED = 0.5
"""For rewards of 0 and 1 around a half: 25 answers in a hundred, half of those that were right."""
ENTROPY_LOW = 0.02
"""Nats per token: an answer of 50 tokens then has about e = 2.7 likely forms, fewer than any group has rollouts."""
ENTROPY_LEFT = 0.3
"""Last over first: less than a third is left."""
RATIO_WATCH = 0.1
"""Distance of the mean ratio from 1: a tenth of the weight was taken away."""
RATIO_BROKEN = 0.5
"""Distance of the mean ratio from 1: half of the weight was taken away."""
GAP = 0.05
"""Mean gap on a sampled token: in log-prob (TRL, creditscope) a ratio off by 5 %, in probability (verl) by more."""


def _says_bad(rule: Callable[[Log], Finding], log: Log) -> bool:
    """Whether another rule's finding is broken or watch; the settings it assumes are not recorded."""
    assumed = dict(log.settings.assumed)
    bad = judge(rule, log).bad
    log.settings.assumed.clear()
    log.settings.assumed.update(assumed)
    return bad


def loss(log: Log) -> Finding:
    """At ratio 1 the loss is fixed by the method's row, whatever is learnt: `words.law`."""
    series, row, named = series_of(log, "loss", 1), log.fact("method"), log.fact("loss")
    if row is None:
        return unknown(f"no row of `creditscope methods` stands for {named}, so what its loss shows is not known")
    found = law(row)
    value = found.formula.removeprefix("J = ")
    if log.fact("beta") is None:
        value += " and the KL term, whose weight the log does not say,"
    start = f"is {series.values[0]:.2g} at first" if max(map(abs, series.values)) >= LOSS_ZERO else "is 0"
    meaning = found.sentence.replace(schema.REWARD_MEAN, log.trainer.metrics[schema.REWARD_MEAN])
    return finding("fine", f"The loss {start}, and no measure of progress: with {named} it is {value} at ratio 1, up "
                   f"to its sign. {meaning}", series.part(0, 6),
                   why=f"{found.formula} until the first update on a batch.")


def clip(log: Log) -> Finding:
    """Nothing can be clipped while π = π_old: ratio 1 lies inside every 1 ± ε."""
    row, updates, changes, recent = log.fact("method"), log.fact("updates"), log.trainer.changes, level(log, "clip")
    if row is not None and row.bound not in ("clip", "clip_inside"):
        return finding("fine", f"{log.fact('loss')} has no clip that zeroes a token: there is no clip ratio to read")
    if updates == 1 and not (recent and max(recent.values) > 0):
        after = level(log, "past")
        then = f". After it {after.mean:.1%} of the bounded tokens stand past their bound{over(after)}" if after else ""
        return finding("fine", f"Nothing can be clipped: each batch gets one optimiser step, so every ratio is 1 and ε "
                       f"has no effect. A clip ratio of 0 is no sign of health{then}", recent, after,
                       why=f"ρ = π/π_old = 1 until the first step on a batch, and there is no second. A second needs "
                       f"{changes['clip']}.")
    if updates == 1:
        return finding("watch", "Tokens are clipped although the settings say one optimiser step a batch: they are of "
                       "another run, or the old log-probs come from another engine", recent,
                       why="With one step a batch ρ = 1, which is inside 1 ± ε.", change=changes["sampler"])
    often = "several optimiser steps" if updates is None else f"{updates} optimiser steps"
    if "past" in log.trainer.metrics:
        return _past(log, often)
    series = series_of(log, "clip")
    share, most = last(series).mean, max(series.values)
    if most == 0 and signs.flat_rewards(log):
        return unknown(f"{series.name} counts tokens with A ≠ 0, and there are none: all rewards are the same", "reward")
    if most == 0:
        return finding("watch", f"ε has no effect: with {often} a batch no ratio ever left 1 ± ε", series,
                       why="min(ρA, clip(ρ)A) = ρA while |ρ − 1| ≤ ε.", change=changes["clip idle"])
    words = (f"{percent(share)} of the tokens are clipped{over(last(series))} and train nothing" if share else
             f"No token is clipped now, up to {percent(most)} were")
    return finding("watch" if share > CLIP_MUCH else "fine", f"{words}, with {often} a batch", last(series),
                   why="Past 1 ± ε the term is constant in π, so w = 0.", change=changes["clip much"])


def _past(log: Log, often: str) -> Finding:
    """Share of tokens past their bound after the last update on their batch; there their own gradient is 0."""
    try:
        recent = last(series_of(log, "past"))
    except TooFewReadings as lacking:
        return unknown(f"{lacking}; {log.trainer.changes['past']}")
    return finding(grade(recent.mean, PAST),
                   f"{recent.mean:.1%} of the tokens that have a bound end past it{over(recent)}, with {often} a batch",
                   recent,
                   why="Past 1 ± ε the term is constant in π, so w = 0; momentum and other tokens still move it.",
                   change=log.trainer.changes["clip much"])


def cispo(log: Log) -> Finding:
    """TRL clamps CISPO's ratio at epsilon_high itself, which defaults to epsilon = 0.2: sg[min(ρ, 0.2)] is 0.2."""
    ceiling = log.fact("ceiling")
    if ceiling is None or ceiling > 1:
        words = f"{log.fact('loss')} has no such cap" if ceiling is None else f"the cap {ceiling:g} lies above ratio 1"
        return finding("fine", f"Not in play: {words}")
    return finding("broken", f"CISPO's cap is {ceiling:g}: every ratio near 1 is cut to it, so the gradient is scaled "
                   f"by {ceiling:g} and the ratio corrects nothing", level(log, "cispo"),
                   why="The weight is sg[min(ρ, epsilon_high)]; below 1 it is a constant, and the logged ratio is the "
                   "share of tokens with A > 0.", change=log.trainer.changes["cispo cap"])


def dead(log: Log) -> Finding:
    """A group whose rewards are all equal has A = 0 and trains nothing."""
    why, change = "A_i = r_i − mean r = 0 in a group with one reward.", log.trainer.changes["dead groups"]
    if not log.fact("dead_counted"):
        if log.fact("dropped"):
            return finding("fine", "Dead groups are dropped before the loss, and others are drawn")
        if flat := signs.flat_rewards(log):
            return finding("broken", "Every group is dead: all answers of a batch get the same reward", *flat, why=why,
                           change=change, follows=["reward"])
        return _dead_uncounted(log)
    recent, norm = last(series_of(log, "dead")), level(log, schema.GRAD_NORM)
    if norm and signs.no_gradient(log) and recent.mean < DEAD_BROKEN:
        return finding("broken", f"No group trains anything: the gradient is 0, although {recent.name} says "
                       f"{recent.mean:.0%}, which cannot be trusted then", norm, recent, why=why,
                       change=log.trainer.changes["dead counted"])
    if recent.mean == 0:
        return finding("fine", "No group is dead: in each of them some answers got more reward than others", recent)
    state = grade(recent.mean, DEAD_WATCH, DEAD_BROKEN)
    right = signs.nearly_all_right(log)
    cause = f". The mean reward is {right.mean:.2g}: if 1 is the most, their answers are all right" if right else ""
    return finding(state, f"{percent(recent.mean)} of the groups are dead{over(recent)}: nothing that is rewarded "
                   f"differs between their answers, so they train nothing{cause}", recent, right, why=why,
                   change=log.trainer.changes["saturation"] if right else change, follows=[_killer(log)] if _killer(log) else [])


def _killer(log: Log) -> str:
    """The rule whose finding, if it is bad, explains dead groups."""
    entropy = level(log, "entropy")
    if _says_bad(reward, log):
        return "reward"
    if signs.nearly_all_right(log):
        return ""
    if signs.nearly_all_cut(log) and not signs.learns_all_the_same(log):
        return "truncation"
    if entropy and log.fact("per_token") and entropy.mean < ENTROPY_LOW:
        return "entropy"
    return "reward trend" if signs.dead_groups_grew(log) and _says_bad(reward_trend, log) else ""


def _dead_uncounted(log: Log) -> Finding:
    """Rewards of 0 and 1 with mean p leave at least p^R + (1−p)^R of the groups dead.

    q^R + (1−q)^R is convex in q, so prompts of unequal difficulty around p leave more (Jensen).
    """
    change, counted, norm = log.trainer.changes["dead counted"], level(log, "dead"), level(log, schema.GRAD_NORM)
    doubt = (f"{counted.name} cannot be trusted: it is taken from the std of the whole batch and reads 0 beside dead "
             f"groups" if counted else f"{log.trainer.name} does not log how many groups are dead")
    if counted and norm and signs.no_gradient(log):
        return finding("broken", f"No group trains anything: the gradient is 0. {doubt}", norm, counted,
                       why="∇J = Σ w ∇log π, and w = 0 where A = 0.", change=change)
    recent, size = last(series_of(log, schema.REWARD_MEAN)), log.fact("group")
    if min(recent.values) < 0 or max(recent.values) > 1 or size < 2:
        return unknown(f"{doubt}; give {change}")
    share = math.fsum(p**size + (1 - p)**size for p in recent.values) / len(recent)
    return finding("watch" if counted or share >= DEAD_WATCH else "unknown",
                   f"{doubt}. If rewards are 0 or 1, at least {share:.0%} of the groups are dead on average", recent,
                   counted, why=f"Groups of R = {size:.0f} answers at success rate p are unanimous with p^R + (1−p)^R, "
                   f"and more often where p differs between prompts.", change=change)


def dilution(log: Log) -> Finding:
    """Dead groups stay in the denominator: live answers alone would give ∇J times 1/(1 − dead)."""
    row = log.fact("method")
    if row is None:
        return unknown(f"no row of `creditscope methods` stands for {log.fact('loss')}")
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
    return finding(grade(max(now, high / low), DILUTION),
                   f"Dead groups count in the denominator: live tokens only would scale the gradient by × {now:.2f} "
                   f"now, by × {low:.2f} to × {high:.2f} in the middle 80% of the batches", last(series),
                   why="∇J = 1/(live + dead)·Σ_live, for answers of about equal length. Adam divides a constant factor "
                   "out, not one that changes.", change=log.trainer.changes["dilution"], follows=[_grade(last(series))])


def _grade(recent: Series) -> str:
    """The rule to follow: "dead groups" where they are many, else "saturation", their growth."""
    return "dead groups" if recent.mean >= DEAD_WATCH else "saturation"


def kl_only(log: Log) -> Finding:
    """A dead group has no reward term: under a KL term it is pulled to the reference and nothing else."""
    beta = log.fact("beta")
    if beta == 0 or log.fact("dropped"):
        why = "There is no KL term in the loss" if beta == 0 else "Dead groups are dropped before the loss"
        return finding("fine", f"{why}: dead groups push nowhere")
    why, change = "∇J = Σ w ∇log π − β ∇KL, and w = 0 in a dead group.", log.trainer.changes["KL only"]
    weight = "" if beta is None else f", with weight {beta:g}"
    if not log.fact("dead_counted"):
        if not signs.all_dead(log):
            return unknown(NOT_COUNTED)
        return finding("watch", f"Every group is dead and pulled to the reference alone{weight}", level(log, "kl"),
                       why=why, change=change, follows=["dead groups"])
    recent = last(series_of(log, "dead"))
    if recent.mean == 0:
        return finding("fine", "No group is dead, so none is pulled to the reference alone", recent)
    return finding(grade(recent.mean, KL_ONLY), f"{percent(recent.mean)} of the groups are dead"
                   f"{over(recent)} and pulled to the reference alone{weight}", recent, level(log, "kl"), why=why,
                   change=change, follows=[_grade(recent)])


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
    return finding("watch", f"The signal runs out: {words}", *parts, why=f"A dead group has A = 0. {share.told()}",
                   change=log.trainer.changes["saturation"],
                   follows=["reward trend"])


def truncation(log: Log) -> Finding:
    """A truncated answer is judged on half a text; masked, it trains nothing."""
    recent, limit, longest = last(series_of(log, "truncated")), log.fact("limit"), level(log, schema.LENGTH_MAX)
    if limit is not None and (longest is None or log.settings.assumed):
        return unknown(f"{recent.name} compares with the longest answer of the batch; needs {FEW} readings of "
                       f"{log.trainer.metrics[schema.LENGTH_MAX]} and the limit itself, given by --config or --set")
    if limit is not None and longest and max(longest.values) < limit:
        return finding("fine", f"No answer reaches the limit of {limit:.0f} tokens; {recent.name} compares with the "
                       f"longest answer of the batch, so it is not 0", longest, recent)
    if recent.mean == 0:
        return finding("fine", "No answer is cut at the limit", recent)
    state = grade(recent.mean, CUT_WATCH, CUT_BROKEN)
    well = state == "broken" and not log.fact("masked") and signs.learns_all_the_same(log)
    state = "watch" if well else state
    out, why = (" and left out of the loss", "A masked answer has no token in Σ_t, so w = 0.") if log.fact("masked") \
        else ("", "The reward of half an answer says where it was cut, not whether it was right.")
    came = state != "fine" and signs.cuts_came_later(log)
    then = (f", {percent(signs.cut_at_first(log))} at first" if came else "") + (f", though {well}" if well else "")
    return finding(state, f"{percent(recent.mean)} of the answers are cut at the limit{over(recent)}{out}{then}",
                   recent, why=why,
                   change=log.trainer.changes["truncation"],
                   follows=["reward", "reward trend"] if came else [])


def horizon(log: Log) -> Finding:
    """Dividing by a constant L_max scales the gradient by mean L / L_max against the token mean."""
    constant = log.fact("horizon")
    if constant is None:
        return finding("fine", f"Not in play: {log.fact('loss')} does not divide by a constant that is known")
    recent = last(series_of(log, schema.LENGTH_MEAN))
    share = recent.mean / max(constant, 1.0)
    return finding("watch" if share < HORIZON else "fine", f"Token sums are divided by {constant:.0f}, while answers "
                   f"have {recent.mean:.0f} tokens: the gradient is × {share:.2g} of the token mean's", recent,
                   why="1/(B·L_max) Σ_it = (mean L / L_max) · 1/ΣL Σ_it.",
                   change=log.trainer.changes["length constant"])


def drift(log: Log) -> Finding:
    """The mean length, first tenth against last."""
    both, row = ends(series_of(log, schema.LENGTH_MEAN, TREND)), log.fact("method")
    before, after = (part.mean for part in both)
    factor = after / max(before, 1.0)
    own = ". With 1/L_i, a long wrong answer is punished less for each token than a short one" \
        if row is not None and row.aggregate == "sequence_mean" and factor >= DRIFT else ""
    return finding("fine" if 1 / DRIFT < factor < DRIFT else "watch",
                   f"Answers went from {before:.0f} to {after:.0f} tokens (× {factor:.2g}){own}", *both,
                   why="w_it ∝ A_i/L_i under a mean over each answer, ∝ A_i under a mean over all tokens.",
                   change=log.trainer.changes["length drift"])


def reward(log: Log) -> Finding:
    """The same reward for every answer, batch after batch."""
    series, changes = series_of(log, schema.REWARD_MEAN), log.trainer.changes
    silent, flat = signs.silent_end(log), signs.flat_rewards(log)
    if not silent and not level(log, schema.REWARD_STD) and not level(log, schema.REWARD_MAX):
        return unknown(f"needs the spread of the rewards beside {series.name}")
    since = silent[0].rows[0].place if silent else math.inf
    count = sum(row.place >= since for row in series.rows)
    same = last(series).part(-count) if count else None
    if same is None or count < SILENT or min(same.values) != max(same.values):
        return finding("fine", f"Rewards differ; their mean is {last(series).mean:.3g}", last(series))
    value, earlier = same.values[-1], series.part(0, -count) if count < len(series) else None
    before = earlier.mean if earlier else value
    words, change = f"down from {before:.3g} before", signs.calmer(log)
    if before == value:
        words, change = "at a bound or by a fault of the reward function", changes["reward"]
    elif before < value:
        words, change = f"up from {before:.3g} before: nothing is left to learn here", changes["saturation"]
    who = "Every answer gets" if flat else f"In the last {count} readings every answer gets"
    narrow = signs.nearly_all_cut(log) and not signs.cuts_came_later(log)
    follows = ["truncation"] if narrow else ["reward trend"] if before > value else []
    return finding("broken" if flat and before >= value else "watch", f"{who} the reward {value:g}, {words}", earlier,
                   same, *(part.part(-len(same)) for part in silent), why="Var r = 0, so A = 0.", change=change,
                   follows=follows if before >= value else [])


def reward_trend(log: Log) -> Finding:
    """The reward, first third against last; and the first held-out accuracy against the last, where it was read."""
    found = judge(_thirds, log)
    if not (worse := signs.held_out_fell(log)):
        return found
    before, after = (part.values[0] for part in worse)
    told = finding("broken", f"Held-out accuracy fell from {before:.1%} to {after:.1%}: training made the model worse",
                   *worse, why="The 95 % intervals of the two, as logged, have no point in common.",
                   change=signs.calmer(log))
    return told if found.state == "unknown" else replace(
        told, sentence=f"{told.sentence}. {found.sentence}", evidence=(*told.evidence, *found.evidence))


def _thirds(log: Log) -> Finding:
    """A change of the mean reward counts where its interval excludes 0, and where it is FELL of the answers' std."""
    found, unit = trend(series_of(log, schema.REWARD_MEAN, THIRDS)), signs.reward_unit(log)
    change, clear = found.change.mean, signs.is_clear(found, unit)
    fell = clear and change < 0
    state: State = "fine" if not fell else "broken" if unit and -change >= COLLAPSED * unit else "watch"
    verb = "fell" if fell else "rose" if clear else "did not clearly change:"
    also = ", but see reward" if not fell and _says_bad(reward, log) else ""
    return finding(state, f"The reward {verb} from {found.first.mean:.3g} in the first third to "
                   f"{found.last.mean:.3g} in the last{also}", found.first, found.last, why=found.told(),
                   change=signs.calmer(log))


def entropy(log: Log) -> Finding:
    """H falls to 0: then the R answers to a prompt are equal, and A = 0."""
    if not log.fact("per_token"):
        return unknown(f"{log.trainer.metrics['entropy']} is summed over answers by {log.fact('loss')}: length and "
                       f"entropy cannot be told apart")
    both = ends(series_of(log, "entropy", TREND))
    before, after = (part.mean for part in both)
    if after == 0 and signs.nearly_all_masked(log):
        return unknown(f"{both[1].name} is 0 because every answer is masked", "truncation")
    low, fallen = after < ENTROPY_LOW, after <= ENTROPY_LEFT * before
    state: State = "broken" if low and fallen else "watch" if low or fallen else "fine"
    words = {"broken": "Entropy collapsed", "watch": "Entropy is low" if low else "Entropy falls",
             "fine": "Entropy holds"}[state]
    return finding(state, f"{words}: {before:.3g} nats a token, then {after:.3g}", *both,
                   why="An answer of L tokens has exp(L·H) likely forms; at 1 all answers to a prompt are one: A = 0.",
                   change=log.trainer.changes["entropy"])


def learning_rate(log: Log) -> Finding:
    """A learning rate of 0 trains nothing; a warm-up that outlasts the run trains little."""
    series, change = series_of(log, "lr", 1), log.trainer.changes["learning rate"]
    values = series.values
    zeros = sum(value == 0 for value in values)
    if zeros > len(values) / 2:
        return finding("broken", f"The learning rate is 0 in {zeros} of {len(values)} readings", series,
                       why="θ ← θ − η·update, and η = 0.", change=change)
    if len(values) >= FEW and values == sorted(set(values)):
        return finding("watch", f"The learning rate rises to the end of the log, up to {values[-1]:.2g}: all of it is "
                       f"warm-up", series, why="η_t = η·t/T while the warm-up lasts.", change=change)
    first = " (a warm-up begins at 0: the first step changes nothing)" if values[0] == 0 else ""
    return finding("fine", f"The learning rate goes from {values[0]:.2g} to {values[-1]:.2g}{first}", series)


def gradient(log: Log) -> Finding:
    """A NaN norm makes the weights NaN; a norm of 0 means that nothing is learnt."""
    for series in (log.series(schema.GRAD_NORM), log.series("loss")):
        bad = [k for k, value in enumerate(series.values) if not math.isfinite(value)] if series else []
        if series and bad:
            return finding("broken", f"{series.name} is not a number in {len(bad)} of {len(series)} readings; the "
                           f"first is shown", series.part(bad[0], bad[0] + 1), why="One NaN in ∇J makes every weight "
                           "NaN at the next step.", change=log.trainer.changes["gradient"])
    norm = series_of(log, schema.GRAD_NORM)
    zeros = sum(value == 0 for value in norm.values)
    if not zeros:
        return finding("fine", f"The gradient's norm is {last(norm).mean:.2g}", last(norm))
    cause = "truncation" if signs.nearly_all_masked(log) else "dead groups"
    return finding("broken" if zeros > len(norm) / 2 else "watch",
                   f"The gradient is exactly 0 in {zeros} of {len(norm)} readings: nothing is learnt there", norm,
                   why="∇J = Σ w ∇log π, and w = 0 where a group is dead or an answer is masked.",
                   change=log.trainer.changes[cause], follows=[cause])


def sampler(log: Log) -> Finding:
    """Samples from another engine than the one that is trained: ρ = π_train/π_sampler is not 1."""
    ratio, gap = level(log, schema.SAMPLER_RATIO), level(log, schema.SAMPLER_GAP)
    if ratio is None and gap is None:
        if not log.fact("sampler"):
            return finding("fine", "The trainer's own forward draws the samples: there is no second engine")
        names = (log.trainer.metrics[metric] for metric in (schema.SAMPLER_RATIO, schema.SAMPLER_GAP))
        return unknown(f"another engine draws the samples; needs at least {FEW} readings of {' or '.join(names)}")
    far = abs(ratio.mean - 1) if ratio else 0.0
    apart = gap.mean if gap else 0.0
    state: State = "broken" if far > RATIO_BROKEN else "watch" if far > RATIO_WATCH or apart > GAP else "fine"
    words = " and ".join(f"{series.name} is {series.mean:.3g}" for series in (ratio, gap) if series)
    return finding(state, f"Sampler and trainer {'agree' if state == 'fine' else 'do not agree'}: {words}", ratio, gap,
                   why="E[π_train/π_sampler] = 1 under the sampler; a mean below 1 is weight that a mask or a ceiling "
                   "took away.", change=log.trainer.changes["sampler"])


RULES: Mapping[str, Callable[[Log], Finding]] = {
    "truncation": truncation, "reward": reward, "dead groups": dead, "gradient": gradient,
    "learning rate": learning_rate, "cispo cap": cispo, "entropy": entropy, "sampler": sampler,
    "reward trend": reward_trend, "saturation": saturation, "dilution": dilution, "KL only": kl_only,
    "length constant": horizon, "length drift": drift, "clip": clip, "loss": loss}
"""Name -> rule, causes before their effects: the order in which equals are shown."""
