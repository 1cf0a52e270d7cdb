"""The rules: one a function, Log -> Finding, its thresholds beside it with their reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from creditscope.describe import law
from creditscope.doctor.finding import FEW, STATES, TREND, Finding, State, ends, finding, lacks, last, level, unknown
from creditscope.doctor.log import Log, Series


def diagnose(log: Log) -> list[Finding]:
    """Every rule's finding, most severe first."""
    found = []
    for name, rule in RULES.items():
        log.settings.assumed.clear()
        says = rule(log)
        assumes = dict(log.settings.assumed) if says.state != "unknown" else {}
        found.append(replace(says, rule=name, assumes=assumes or None))
    return sorted(found, key=lambda finding: STATES.index(finding.state))


def _series(log: Log, metric: str) -> Series:
    """A metric that the log does not lack."""
    found = log.series(metric)
    assert found is not None
    return found.finite


# -- the loss, and what holds it ---------------------------------------------------------------------------------------


def loss(log: Log) -> Finding:
    """At ratio 1 the loss is fixed by the method's row, whatever is learnt: `describe.law`."""
    if lacking := lacks(log, "loss", few=1):
        return lacking
    series, row, named = _series(log, "loss"), log.fact("method"), log.fact("loss")
    if row is None:
        return unknown(f"no row of `creditscope methods` stands for {named}, so what its loss shows is not known")
    found = law(row)
    value = found.formula.removeprefix("J = ")
    if log.fact("beta") is None:
        value += " and the KL term, whose weight the log does not say,"
    start = f"is {series.values[0]:.2g} at first" if max(map(abs, series.values)) >= LOSS_ZERO else "is 0"
    meaning = found.sentence.replace("reward/mean", log.trainer.metrics["reward/mean"])
    return finding("fine", f"The loss {start}, and no measure of progress: with {named} it is {value} at ratio 1, up "
                   f"to its sign. {meaning}", series.part(0, 6),
                   why=f"{found.formula} until the first update on a batch.")


LOSS_ZERO = 1e-6
"""Below it a float32 loss is 0: rounding of centred advantages alone leaves about 1e-8."""


def clip(log: Log) -> Finding:
    """Nothing can be clipped while π = π_old: ratio 1 lies inside every 1 ± ε."""
    row, updates, changes, recent = log.fact("method"), log.fact("updates"), log.trainer.changes, level(log, "clip")
    if row is not None and row.bound not in ("clip", "clip_inside"):
        return finding("fine", f"{log.fact('loss')} has no clip that zeroes a token: there is no clip ratio to read")
    if updates == 1 and not (recent and max(recent.values) > 0):
        return finding("fine", "Nothing can be clipped: each batch gets one optimiser step, so every ratio is 1 and ε "
                       "has no effect. A clip ratio of 0 is no sign of health", recent,
                       why=f"ρ = π/π_old = 1 until the first step on a batch, and there is no second. A second needs "
                       f"{changes['clip']}.")
    if updates == 1:
        return finding("watch", "Tokens are clipped although the settings say one optimiser step a batch: they are of "
                       "another run, or the old log-probs come from another engine", recent,
                       why="With one step a batch ρ = 1, which is inside 1 ± ε.", change=changes["sampler"])
    if lacking := lacks(log, "clip"):
        return lacking
    series = _series(log, "clip")
    share, often = last(series).mean, "several optimiser steps" if updates is None else f"{updates} optimiser steps"
    if max(series.values) == 0 and _flat(log):
        return unknown(f"{series.name} counts tokens with A ≠ 0, and there are none: all rewards are the same")
    if max(series.values) == 0:
        return finding("watch", f"ε has no effect: with {often} a batch no ratio ever left 1 ± ε", series,
                       why="min(ρA, clip(ρ)A) = ρA while |ρ − 1| ≤ ε.", change=changes["clip idle"])
    return finding("watch" if share > CLIP_MUCH else "fine",
                   f"{share:.1%} of the tokens are clipped and train nothing, with {often} a batch", last(series),
                   why="Past 1 ± ε the term is constant in π, so w = 0.", change=changes["clip much"])


CLIP_MUCH = 0.2
"""Share of clipped tokens above which a fifth of every pass is spent on nothing."""


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


# -- groups ------------------------------------------------------------------------------------------------------------


def dead(log: Log) -> Finding:
    """A group whose rewards are all equal has A = 0 and trains nothing."""
    why, change = "A_i = r_i − mean r = 0 in a group with one reward.", log.trainer.changes["dead groups"]
    if not log.fact("dead_counted"):
        if log.fact("dropped"):
            return finding("fine", "Dead groups are dropped before the loss, and others are drawn")
        if flat := _flat(log):
            return finding("broken", "Every group is dead: all answers of a batch get the same reward", *flat, why=why,
                           change=change)
        return _dead_uncounted(log)
    if lacking := lacks(log, "dead"):
        return lacking
    recent, norm = last(_series(log, "dead")), level(log, "grad/norm")
    if norm and max(norm.values) == 0 and recent.mean < DEAD_BROKEN and not _masked(log):
        return finding("broken", f"No group trains anything: the gradient is 0, although {recent.name} says "
                       f"{recent.mean:.0%}, which cannot be trusted then", norm, recent, why=why,
                       change=log.trainer.changes["dead counted"])
    state: State = "broken" if recent.mean >= DEAD_BROKEN else "watch" if recent.mean >= DEAD_WATCH else "fine"
    return finding(state, f"{recent.mean:.0%} of the groups are dead: nothing that is rewarded differs between their "
                   f"answers, so they train nothing", recent, why=why, change=change)


DEAD_BROKEN = 0.9
"""Share of dead groups at which nine tenths of the sampling is wasted."""
DEAD_WATCH = 0.5
"""Share at which half of it is."""


def _flat(log: Log) -> list[Series]:
    """The readings that show that no answers of the last batches differed in reward, or none."""
    spread, high, low = (level(log, metric) for metric in ("reward/std", "reward/max", "reward/min"))
    if spread:
        return [spread] if max(spread.values) == 0 else []
    return [high, low] if high and low and high.values == low.values else []


def _masked(log: Log) -> bool:
    """Whether masks leave next to nothing of the batches."""
    cut = level(log, "truncated")
    return log.fact("masked") and cut is not None and cut.mean >= CUT_BROKEN


def _dead_uncounted(log: Log) -> Finding:
    """Rewards of 0 and 1 with mean p leave at least p^R + (1−p)^R of the groups dead.

    q^R + (1−q)^R is convex in q, so prompts of unequal difficulty around p leave more (Jensen).
    """
    change, counted, norm = log.trainer.changes["dead counted"], level(log, "dead"), level(log, "grad/norm")
    doubt = (f"{counted.name} cannot be trusted: it is taken from the std of the whole batch and reads 0 beside dead "
             f"groups" if counted else f"{log.trainer.name} does not log how many groups are dead")
    if counted and norm and max(norm.values) == 0 and not _masked(log):
        return finding("broken", f"No group trains anything: the gradient is 0. {doubt}", norm, counted,
                       why="∇J = Σ w ∇log π, and w = 0 where A = 0.", change=change)
    if lacking := lacks(log, "reward/mean"):
        return lacking
    recent, size = last(_series(log, "reward/mean")), log.fact("group")
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
    if not log.fact("dead_counted"):
        return unknown("how many groups are dead is not known, see dead groups")
    if lacking := lacks(log, "dead"):
        return lacking
    series = _series(log, "dead")
    factors = [1 / (1 - share) for share in series.values if share < 1]
    recent = [share for share in last(series).values if share < 1]
    if not recent:
        return finding("fine", "Every group is dead: there is nothing to dilute", last(series))
    now, low, high = 1 / (1 - math.fsum(recent) / len(recent)), min(factors), max(factors)
    return finding("watch" if max(now, high / low) >= DILUTION else "fine",
                   f"Dead groups count in the denominator: live tokens only would scale the gradient by × {now:.2f} "
                   f"now, by × {low:.2f} to × {high:.2f} over the run", last(series),
                   why="∇J = 1/(live + dead)·Σ_live, for answers of about equal length. Adam divides a constant factor "
                   "out, not one that changes.", change=log.trainer.changes["dilution"])


DILUTION = 2.0
"""Factor at which the step is halved, or twice as large on one batch as on another."""


def kl_only(log: Log) -> Finding:
    """A dead group has no reward term: under a KL term it is pulled to the reference and nothing else."""
    beta = log.fact("beta")
    if beta == 0 or log.fact("dropped"):
        why = "There is no KL term in the loss" if beta == 0 else "Dead groups are dropped before the loss"
        return finding("fine", f"{why}: dead groups push nowhere")
    if not log.fact("dead_counted"):
        return unknown("how many groups are dead is not known, see dead groups")
    if lacking := lacks(log, "dead"):
        return lacking
    recent, weight = last(_series(log, "dead")), "" if beta is None else f", with weight {beta:g}"
    return finding("watch" if recent.mean >= KL_ONLY else "fine",
                   f"{recent.mean:.0%} of the groups are dead and pulled to the reference alone{weight}", recent,
                   level(log, "kl"), why="∇J = Σ w ∇log π − β ∇KL, and w = 0 in a dead group.",
                   change=log.trainer.changes["KL only"])


KL_ONLY = 0.25
"""Share of groups from which a quarter of the pull comes from answers that teach nothing."""


def saturation(log: Log) -> Finding:
    """The rewards' spread falls while dead groups grow: the prompts are used up."""
    if not log.fact("dead_counted"):
        return unknown("how many groups are dead is not known, see dead groups")
    if lacking := lacks(log, "reward/std", TREND) or lacks(log, "dead", TREND):
        return lacking
    spread, share = ends(_series(log, "reward/std")), ends(_series(log, "dead"))
    (wide, narrow), (few, many) = (part.mean for part in spread), (part.mean for part in share)
    words = f"the rewards' std went from {wide:.2g} to {narrow:.2g}, dead groups from {few:.0%} to {many:.0%}"
    if narrow > SPREAD_LEFT * wide or many - few < DEAD_GROWTH:
        return finding("fine", f"The signal does not run out: {words}", *spread, *share)
    return finding("watch", f"The signal runs out: {words}", *spread, *share,
                   why="Var r = Var within groups + Var between them, and A sees the first alone.",
                   change=log.trainer.changes["saturation"])


SPREAD_LEFT = 0.7
"""Last std over first: rewards of 0 and 1 with mean 0.5 have 0.5, with mean 0.85 or 0.15 have 0.36."""
DEAD_GROWTH = 0.2
"""Growth of the share of dead groups at which one group in five has fallen silent."""


# -- answers -----------------------------------------------------------------------------------------------------------


def truncation(log: Log) -> Finding:
    """A truncated answer is judged on half a text; masked, it trains nothing."""
    if lacking := lacks(log, "truncated"):
        return lacking
    recent, limit, longest = last(_series(log, "truncated")), log.fact("limit"), level(log, "length/max")
    if limit is not None and (longest is None or log.settings.assumed):
        return unknown(f"{recent.name} compares with the longest answer of the batch; needs {FEW} readings of "
                       f"{log.trainer.metrics['length/max']} and the limit itself, given by --config or --set")
    if limit is not None and longest and max(longest.values) < limit:
        return finding("fine", f"No answer reaches the limit of {limit:.0f} tokens; {recent.name} compares with the "
                       f"longest answer of the batch, so it is not 0", longest, recent)
    state: State = "broken" if recent.mean >= CUT_BROKEN else "watch" if recent.mean >= CUT_WATCH else "fine"
    out, why = (" and left out of the loss", "A masked answer has no token in Σ_t, so w = 0.") if log.fact("masked") \
        else ("", "The reward of half an answer says where it was cut, not whether it was right.")
    return finding(state, f"{recent.mean:.0%} of the answers are cut at the limit{out}", recent, why=why,
                   change=log.trainer.changes["truncation"])


CUT_BROKEN = 0.9
"""Share of cut answers at which hardly one is judged whole."""
CUT_WATCH = 0.2
"""The share at which `creditscope train` warns too."""


def horizon(log: Log) -> Finding:
    """Dividing by a constant L_max scales the gradient by mean L / L_max against the token mean."""
    constant = log.fact("horizon")
    if constant is None:
        return finding("fine", f"Not in play: {log.fact('loss')} does not divide by a constant that is known")
    if lacking := lacks(log, "length/mean"):
        return lacking
    recent = last(_series(log, "length/mean"))
    share = recent.mean / max(constant, 1.0)
    return finding("watch" if share < HORIZON else "fine", f"Token sums are divided by {constant:.0f}, while answers "
                   f"have {recent.mean:.0f} tokens: the gradient is × {share:.2g} of the token mean's", recent,
                   why="1/(B·L_max) Σ_it = (mean L / L_max) · 1/ΣL Σ_it.",
                   change=log.trainer.changes["length constant"])


HORIZON = 0.1
"""Mean length over the constant: below a tenth, a learning rate taken from another loss is ten times too small."""


def drift(log: Log) -> Finding:
    """The mean length, first tenth against last."""
    if lacking := lacks(log, "length/mean", TREND):
        return lacking
    both, row = ends(_series(log, "length/mean")), log.fact("method")
    before, after = (part.mean for part in both)
    factor = after / max(before, 1.0)
    own = ". With 1/L_i, a long wrong answer is punished less for each token than a short one" \
        if row is not None and row.aggregate == "sequence_mean" and factor >= DRIFT else ""
    return finding("fine" if 1 / DRIFT < factor < DRIFT else "watch",
                   f"Answers went from {before:.0f} to {after:.0f} tokens (× {factor:.2g}){own}", *both,
                   why="w_it ∝ A_i/L_i under a mean over each answer, ∝ A_i under a mean over all tokens.",
                   change=log.trainer.changes["length drift"])


DRIFT = 1.5
"""Factor on the mean length beyond which the cost of a step has changed by half."""


def reward(log: Log) -> Finding:
    """The same reward for every answer, batch after batch."""
    if lacking := lacks(log, "reward/mean"):
        return lacking
    recent, flat = last(_series(log, "reward/mean")), _flat(log)
    if not flat and not level(log, "reward/std") and not level(log, "reward/max"):
        return unknown(f"needs the spread of the rewards beside {recent.name}")
    if not flat or min(recent.values) != max(recent.values):
        return finding("fine", f"Rewards differ; their mean is {recent.mean:.3g}", recent)
    return finding("broken", f"Every answer gets the reward {recent.values[-1]:g}: it is flat, at a bound or by a "
                   f"fault of the reward function", recent, *flat, why="Var r = 0, so A = 0.",
                   change=log.trainer.changes["reward"])


def entropy(log: Log) -> Finding:
    """H falls to nothing: then the R answers to a prompt are one answer, and there is nothing to compare."""
    if not log.fact("per_token"):
        return unknown(f"{log.trainer.metrics['entropy']} is summed over answers by {log.fact('loss')}: length and "
                       f"entropy cannot be told apart")
    if lacking := lacks(log, "entropy", TREND):
        return lacking
    both = ends(_series(log, "entropy"))
    before, after = (part.mean for part in both)
    if after == 0 and _masked(log):
        return unknown(f"{both[1].name} is 0 because every answer is masked, see truncation")
    low, fallen = after < ENTROPY_LOW, after <= ENTROPY_LEFT * before
    state: State = "broken" if low and fallen else "watch" if low or fallen else "fine"
    words = {"broken": "Entropy collapsed", "watch": "Entropy is low" if low else "Entropy falls",
             "fine": "Entropy holds"}[state]
    return finding(state, f"{words}: {before:.3g} nats a token, then {after:.3g}", *both,
                   why="An answer of L tokens has exp(L·H) likely forms; at 1 all answers to a prompt are one: A = 0.",
                   change=log.trainer.changes["entropy"])


ENTROPY_LOW = 0.02
"""Nats per token: an answer of 50 tokens then has about e = 2.7 likely forms, fewer than any group has rollouts."""
ENTROPY_LEFT = 0.3
"""Last over first: less than a third is left."""


# -- the step ----------------------------------------------------------------------------------------------------------


def learning_rate(log: Log) -> Finding:
    """A learning rate of 0 trains nothing; a warm-up that outlasts the run trains little."""
    if lacking := lacks(log, "lr", few=1):
        return lacking
    series, change = _series(log, "lr"), log.trainer.changes["learning rate"]
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
    """A norm that is no number ruins the weights; a norm of 0 says that nothing is learnt."""
    for series in (log.series("grad/norm"), log.series("loss")):
        bad = [k for k, value in enumerate(series.values) if not math.isfinite(value)] if series else []
        if series and bad:
            return finding("broken", f"{series.name} is not a number in {len(bad)} of {len(series)} readings; the "
                           f"first is shown", series.part(bad[0], bad[0] + 1), why="One NaN in ∇J makes every weight "
                           "NaN at the next step.", change=log.trainer.changes["gradient"])
    if lacking := lacks(log, "grad/norm"):
        return lacking
    norm = _series(log, "grad/norm")
    zeros = sum(value == 0 for value in norm.values)
    if not zeros:
        return finding("fine", f"The gradient's norm is {last(norm).mean:.2g}", last(norm))
    return finding("broken" if zeros > len(norm) / 2 else "watch",
                   f"The gradient is exactly 0 in {zeros} of {len(norm)} readings: nothing is learnt there", norm,
                   why="∇J = Σ w ∇log π, and w = 0 where a group is dead or an answer is masked.",
                   change=log.trainer.changes["truncation" if _masked(log) else "dead groups"])


def sampler(log: Log) -> Finding:
    """Samples from another engine than the one that is trained: ρ = π_train/π_sampler is not 1."""
    ratio, gap = level(log, "sampler/ratio"), level(log, "sampler/gap")
    if ratio is None and gap is None:
        if not log.fact("sampler"):
            return finding("fine", "The trainer's own forward draws the samples: there is no second engine")
        names = (log.trainer.metrics[metric] for metric in ("sampler/ratio", "sampler/gap"))
        return unknown(f"another engine draws the samples; needs at least {FEW} readings of {' or '.join(names)}")
    far = abs(ratio.mean - 1) if ratio else 0.0
    apart = gap.mean if gap else 0.0
    state: State = "broken" if far > RATIO_BROKEN else "watch" if far > RATIO_WATCH or apart > GAP else "fine"
    words = " and ".join(f"{series.name} is {series.mean:.3g}" for series in (ratio, gap) if series)
    return finding(state, f"Sampler and trainer {'agree' if state == 'fine' else 'do not agree'}: {words}", ratio, gap,
                   why="E[π_train/π_sampler] = 1 under the sampler; a mean below 1 is weight that a mask or a ceiling "
                   "took away.", change=log.trainer.changes["sampler"])


RATIO_WATCH = 0.1
"""Distance of the mean ratio from 1: a tenth of the weight was taken away."""
RATIO_BROKEN = 0.5
"""Half of it was."""
GAP = 0.05
"""Mean gap on a sampled token: in log-prob (TRL, creditscope) a ratio off by 5 %, in probability (verl) by more."""


RULES: Mapping[str, Callable[[Log], Finding]] = {
    "gradient": gradient, "learning rate": learning_rate, "reward": reward, "dead groups": dead,
    "truncation": truncation, "cispo cap": cispo, "entropy": entropy, "sampler": sampler, "saturation": saturation,
    "dilution": dilution, "KL only": kl_only, "length constant": horizon, "length drift": drift, "clip": clip,
    "loss": loss}
"""Name -> rule, in the order in which equals are shown."""
