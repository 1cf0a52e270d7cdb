"""The rules: one a function, Log -> Finding, its thresholds beside it with their reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from creditscope.diagnosis.finding import (
    FEW,
    STATES,
    THIRDS,
    TREND,
    Finding,
    State,
    Trend,
    ends,
    finding,
    lacks,
    last,
    level,
    over,
    trend,
    unknown,
)
from creditscope.diagnosis.log import Log, Series
from creditscope.methods.words import law


def diagnose(log: Log) -> list[Finding]:
    """Every rule's finding, most severe first; of equals, what follows from no other comes first."""
    found: dict[str, Finding] = {}
    for name, rule in RULES.items():
        log.settings.assumed.clear()
        says = rule(log)
        assumes = dict(log.settings.assumed) if says.state != "unknown" else {}
        found[name] = replace(says, rule=name, assumes=assumes or None)
    rooted = [replace(each, follows=_root(each, found)) for each in found.values()]
    return sorted(rooted, key=lambda finding: (STATES.index(finding.state), bool(finding.follows)))


def root(findings: Sequence[Finding]) -> Finding | None:
    """What to mend first: the cause behind the most severe finding; None where nothing is broken or to watch."""
    worst = findings[0]
    return {each.rule: each for each in findings}[worst.follows or worst.rule] if worst.bad else None


def _root(effect: Finding, found: Mapping[str, Finding]) -> str:
    """The first cause: the chain of `follows`, as far as what it names is broken or to watch. What is fine has none."""
    cause = ""
    for _ in found:  # no chain is longer: were rules to name each other in a circle, this would end all the same
        if effect.state == "fine" or not effect.follows or not found[effect.follows].bad:
            break
        cause, effect = effect.follows, found[effect.follows]
    return cause


def _series(log: Log, metric: str) -> Series:
    """A metric that the log does not lack."""
    found = log.series(metric)
    assert found is not None
    return found.finite


def _says_bad(rule: Callable[[Log], Finding], log: Log) -> bool:
    """What another rule finds, without the settings that it assumes on the way."""
    assumed = dict(log.settings.assumed)
    bad = rule(log).bad
    log.settings.assumed.clear()
    log.settings.assumed.update(assumed)
    return bad


def _percent(share: float) -> str:
    """A share that is not 0 does not read 0."""
    return f"{share:.0%}" if share == 0 or share >= 0.01 else f"{share:.2%}"


# -- the loss, and what holds it ---------------------------------------------------------------------------------------


def loss(log: Log) -> Finding:
    """At ratio 1 the loss is fixed by the method's row, whatever is learnt: `words.law`."""
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
    if lacking := lacks(log, "clip"):
        return lacking
    series = _series(log, "clip")
    share, most = last(series).mean, max(series.values)
    if most == 0 and _flat(log):
        return unknown(f"{series.name} counts tokens with A ≠ 0, and there are none: all rewards are the same",
                       follows="reward")
    if most == 0:
        return finding("watch", f"ε has no effect: with {often} a batch no ratio ever left 1 ± ε", series,
                       why="min(ρA, clip(ρ)A) = ρA while |ρ − 1| ≤ ε.", change=changes["clip idle"])
    words = (f"{_percent(share)} of the tokens are clipped{over(last(series))} and train nothing" if share else
             f"No token is clipped now, up to {_percent(most)} were")
    return finding("watch" if share > CLIP_MUCH else "fine", f"{words}, with {often} a batch", last(series),
                   why="Past 1 ± ε the term is constant in π, so w = 0.", change=changes["clip much"])


CLIP_MUCH = 0.2
"""Share of clipped tokens above which a fifth of every pass is spent on nothing."""


def _past(log: Log, often: str) -> Finding:
    """creditscope reads where tokens stand when their batch is done: past the bound their own gradient is 0."""
    if lacking := lacks(log, "past"):
        return unknown(f"{lacking.sentence}; {log.trainer.changes['past']}")
    recent = last(_series(log, "past"))
    return finding("watch" if recent.mean >= PAST else "fine",
                   f"{recent.mean:.1%} of the tokens that have a bound end past it{over(recent)}, with {often} a batch",
                   recent,
                   why="Past 1 ± ε the term is constant in π, so w = 0; momentum and other tokens still move it.",
                   change=log.trainer.changes["clip much"])


PAST = 0.05
"""Share of bounded tokens past their bound: one in twenty. `creditscope report` begins to watch there too."""


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
                           change=change, follows="reward")
        return _dead_uncounted(log)
    if lacking := lacks(log, "dead"):
        return lacking
    recent, norm = last(_series(log, "dead")), level(log, "grad/norm")
    if norm and _is_still(log) and recent.mean < DEAD_BROKEN:
        return finding("broken", f"No group trains anything: the gradient is 0, although {recent.name} says "
                       f"{recent.mean:.0%}, which cannot be trusted then", norm, recent, why=why,
                       change=log.trainer.changes["dead counted"])
    if recent.mean == 0:
        return finding("fine", "No group is dead: in each of them some answers got more reward than others", recent)
    state: State = "broken" if recent.mean >= DEAD_BROKEN else "watch" if recent.mean >= DEAD_WATCH else "fine"
    right = _right(log)
    cause = f". The mean reward is {right.mean:.2g}: if 1 is the most, their answers are all right" if right else ""
    return finding(state, f"{_percent(recent.mean)} of the groups are dead{over(recent)}: nothing that is rewarded "
                   f"differs between their answers, so they train nothing{cause}", recent, right, why=why,
                   change=log.trainer.changes["saturation"] if right else change, follows=_killer(log))


def _right(log: Log) -> Series | None:
    """The last rewards, where they are near 1: then groups are dead because their answers are right."""
    recent = level(log, "reward/mean")
    return recent if recent and RIGHT <= recent.mean <= 1 else None


RIGHT = 0.9
"""Mean reward, where 1 is the most: of groups of 8 answers then 0.9^8 = 43 % are right throughout by chance alone, and
0.1^8, next to none, are wrong throughout."""


def _killer(log: Log) -> str:
    """The rule whose finding, if it is bad, explains dead groups."""
    entropy = level(log, "entropy")
    if _says_bad(reward, log):
        return "reward"
    if _right(log):
        return ""
    if _is_cut(log) and not _well(log):
        return "truncation"
    if entropy and log.fact("per_token") and entropy.mean < ENTROPY_LOW:
        return "entropy"
    return "reward trend" if _grown(log) and _says_bad(reward_trend, log) else ""


DEAD_BROKEN = 0.9
"""Share of dead groups at which nine tenths of the sampling is wasted."""
DEAD_WATCH = 0.5
"""Share at which half of it is."""


def _silent(log: Log) -> list[Series]:
    """The readings at the end of the log in which no two answers of a batch differ in reward, or none."""
    names = [name for metric in ("reward/max", "reward/min") if (name := log.trainer.metrics.get(metric))]
    if log.series("reward/std") or not names:
        names = [log.trainer.metrics["reward/std"]]
    rows = [row for row in log.rows if all(math.isfinite(row.values.get(name, math.nan)) for name in names)]
    count = 0
    for row in reversed(rows):
        first, *others = (row.values[name] for name in names)
        if first != (others[0] if others else 0):
            break
        count += 1
    return [Series(name, rows[len(rows) - count:], log.source) for name in names] if count else []


def _flat(log: Log) -> list[Series]:
    """The readings that show that no answers of the last batches differed in reward, or none."""
    silent, spread = _silent(log), level(log, "reward/std") or level(log, "reward/max")
    return [part.part(-len(spread)) for part in silent] if silent and spread and len(silent[0]) >= len(spread) else []


def _is_cut(log: Log) -> bool:
    """Whether next to all answers are cut, if the truncation rule believes it."""
    cut = level(log, "truncated")
    return cut is not None and cut.mean >= CUT_BROKEN


def _masked(log: Log) -> bool:
    """Whether masks leave next to nothing of the batches."""
    return bool(log.fact("masked")) and _is_cut(log)


def _is_still(log: Log) -> bool:
    """Whether the gradient is 0 and no mask explains it: then every group is dead, whatever was counted."""
    norm = level(log, "grad/norm")
    return norm is not None and max(norm.values) == 0 and not _masked(log)


def _all_dead(log: Log) -> bool:
    return bool(_flat(log)) or _is_still(log)


def _dead_uncounted(log: Log) -> Finding:
    """Rewards of 0 and 1 with mean p leave at least p^R + (1−p)^R of the groups dead.

    q^R + (1−q)^R is convex in q, so prompts of unequal difficulty around p leave more (Jensen).
    """
    change, counted, norm = log.trainer.changes["dead counted"], level(log, "dead"), level(log, "grad/norm")
    doubt = (f"{counted.name} cannot be trusted: it is taken from the std of the whole batch and reads 0 beside dead "
             f"groups" if counted else f"{log.trainer.name} does not log how many groups are dead")
    if counted and norm and _is_still(log):
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
    nothing = "Every group is dead: there is nothing to dilute"
    if not log.fact("dead_counted"):
        return finding("fine", nothing) if _all_dead(log) else unknown(NOT_COUNTED)
    if lacking := lacks(log, "dead"):
        return lacking
    series = _series(log, "dead")
    factors = sorted(1 / (1 - share) for share in series.values if share < 1)
    recent = [share for share in last(series).values if share < 1]
    if not recent:
        return finding("fine", nothing, last(series))
    odd = len(factors) // 10
    now, low, high = 1 / (1 - math.fsum(recent) / len(recent)), factors[odd], factors[-1 - odd]
    if factors[-1] == 1:
        return finding("fine", "No batch that trains has a dead group in its denominator", last(series))
    return finding("watch" if max(now, high / low) >= DILUTION else "fine",
                   f"Dead groups count in the denominator: live tokens only would scale the gradient by × {now:.2f} "
                   f"now, by × {low:.2f} to × {high:.2f} in the middle 80% of the batches", last(series),
                   why="∇J = 1/(live + dead)·Σ_live, for answers of about equal length. Adam divides a constant factor "
                   "out, not one that changes.", change=log.trainer.changes["dilution"], follows=_grade(last(series)))


DILUTION = 2.0
"""Factor at which the step is halved, or twice as large on one batch as on another. The tenths at both ends are left
out of the second: in a long log there is always a batch that is far off."""
NOT_COUNTED = "the log does not say how many groups are dead, see dead groups"


def _grade(recent: Series) -> str:
    """The rule that speaks of dead groups: of how many there are, or else of their growth."""
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
        if not _all_dead(log):
            return unknown(NOT_COUNTED)
        return finding("watch", f"Every group is dead and pulled to the reference alone{weight}", level(log, "kl"),
                       why=why, change=change, follows="dead groups")
    if lacking := lacks(log, "dead"):
        return lacking
    recent = last(_series(log, "dead"))
    if recent.mean == 0:
        return finding("fine", "No group is dead, so none is pulled to the reference alone", recent)
    return finding("watch" if recent.mean >= KL_ONLY else "fine", f"{_percent(recent.mean)} of the groups are dead"
                   f"{over(recent)} and pulled to the reference alone{weight}", recent, level(log, "kl"), why=why,
                   change=change, follows=_grade(recent))


KL_ONLY = 0.25
"""Share of groups from which a quarter of the pull comes from answers that teach nothing."""


def saturation(log: Log) -> Finding:
    """Dead groups grow, first third against last: the prompts are used up, solved or given up."""
    nothing = "Not in play: every group is dead, so there is no signal to run out"
    if not log.fact("dead_counted"):
        return finding("fine", nothing) if _all_dead(log) else unknown(NOT_COUNTED)
    if lacking := lacks(log, "dead", THIRDS):
        return lacking
    share = trend(_series(log, "dead"))
    if share.last.mean == 1 and not _grown(log):
        return finding("fine", nothing, share.first, share.last)
    words = f"dead groups went from {_percent(share.first.mean)} to {_percent(share.last.mean)}"
    spread = () if lacks(log, "reward/std", THIRDS) else (trend(_series(log, "reward/std")),)
    words += "".join(f", the rewards' std from {part.first.mean:.2g} to {part.last.mean:.2g}" for part in spread)
    parts = [part for both in (share, *spread) for part in (both.first, both.last)]
    if not _grown(log):
        return finding("fine", f"The signal does not run out: {words}", *parts)
    return finding("watch", f"The signal runs out: {words}", *parts, why=f"A dead group has A = 0. {share.told()}",
                   change=log.trainer.changes["saturation"],
                   follows="reward trend" if _says_bad(reward_trend, log) else "")


def _grown(log: Log) -> bool:
    """Whether dead groups grew by DEAD_GROWTH, and clearly."""
    if not log.fact("dead_counted") or lacks(log, "dead", THIRDS):
        return False
    share = trend(_series(log, "dead"))
    return share.change.excludes_zero and share.change.mean >= DEAD_GROWTH


DEAD_GROWTH = 0.2
"""Growth of the share of dead groups at which one group in five has fallen silent. A run that learns has some growth:
from 5 % to 15 % or 20 % where accuracy goes from 45 % to 65 %."""


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
    if recent.mean == 0:
        return finding("fine", "No answer is cut at the limit", recent)
    state: State = "broken" if recent.mean >= CUT_BROKEN else "watch" if recent.mean >= CUT_WATCH else "fine"
    well = state == "broken" and not log.fact("masked") and _well(log)
    state = "watch" if well else state
    out, why = (" and left out of the loss", "A masked answer has no token in Σ_t, so w = 0.") if log.fact("masked") \
        else ("", "The reward of half an answer says where it was cut, not whether it was right.")
    came = state != "fine" and _cuts_came(log)
    then = (f", {_percent(_at_first(log))} at first" if came else "") + (f", though {well}" if well else "")
    return finding(state, f"{_percent(recent.mean)} of the answers are cut at the limit{over(recent)}{out}{then}",
                   recent, why=why,
                   change=log.trainer.changes["truncation"],
                   follows="" if not came else "reward" if _says_bad(reward, log) else "reward trend")


def _at_first(log: Log) -> float:
    """The smallest share of cut answers in the first readings."""
    return min(_series(log, "truncated").part(0, FEW).values)


def _cuts_came(log: Log) -> bool:
    """Whether the limit was wide enough at first: if answers run on to it later, the policy is at fault."""
    return _at_first(log) < CUT_WATCH


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
    series, silent, flat, changes = _series(log, "reward/mean"), _silent(log), _flat(log), log.trainer.changes
    if not silent and not level(log, "reward/std") and not level(log, "reward/max"):
        return unknown(f"needs the spread of the rewards beside {series.name}")
    since = silent[0].rows[0].place if silent else math.inf
    count = sum(row.place >= since for row in series.rows)
    same = last(series).part(-count) if count else None
    if same is None or count < SILENT or min(same.values) != max(same.values):
        return finding("fine", f"Rewards differ; their mean is {last(series).mean:.3g}", last(series))
    value, earlier = same.values[-1], series.part(0, -count) if count < len(series) else None
    before = earlier.mean if earlier else value
    words, change = f"down from {before:.3g} before", _calmer(log)
    if before == value:
        words, change = "at a bound or by a fault of the reward function", changes["reward"]
    elif before < value:
        words, change = f"up from {before:.3g} before: nothing is left to learn here", changes["saturation"]
    who = "Every answer gets" if flat else f"In the last {count} readings every answer gets"
    follows = "truncation" if _is_cut(log) and not _cuts_came(log) else "reward trend" if before > value else ""
    return finding("broken" if flat and before >= value else "watch", f"{who} the reward {value:g}, {words}", earlier,
                   same, *(part.part(-len(same)) for part in silent), why="Var r = 0, so A = 0.", change=change,
                   follows=follows if before >= value else "")


SILENT = 3
"""Batches in a row. Where nine answers of ten agree, all 16 of a batch do so by chance in 0.9^16 = 19 %, and three
batches in a row in 0.6 %."""


def reward_trend(log: Log) -> Finding:
    """The reward, first third against last; and the first held-out accuracy against the last, where it was read."""
    found = _thirds(log)
    if not (worse := _worse(log)):
        return found
    before, after = (part.values[0] for part in worse)
    told = finding("broken", f"Held-out accuracy fell from {before:.1%} to {after:.1%}: training made the model worse",
                   *worse, why="The 95 % intervals of the two, as logged, have no point in common.",
                   change=_calmer(log))
    return told if found.state == "unknown" else replace(
        told, sentence=f"{told.sentence}. {found.sentence}", evidence=f"{told.evidence}; {found.evidence}")


def _thirds(log: Log) -> Finding:
    """A change of the mean reward counts where its interval excludes 0, and where it is FELL of the answers' std."""
    if lacking := lacks(log, "reward/mean", THIRDS):
        return lacking
    found, unit = trend(_series(log, "reward/mean")), _unit(log)
    change, clear = found.change.mean, _is_clear(found, unit)
    fell = clear and change < 0
    state: State = "fine" if not fell else "broken" if unit and -change >= COLLAPSED * unit else "watch"
    verb = "fell" if fell else "rose" if clear else "did not clearly change:"
    also = ", but see reward" if not fell and _says_bad(reward, log) else ""
    return finding(state, f"The reward {verb} from {found.first.mean:.3g} in the first third to "
                   f"{found.last.mean:.3g} in the last{also}", found.first, found.last, why=found.told(),
                   change=_calmer(log))


def _is_clear(found: Trend, unit: float) -> bool:
    return found.change.excludes_zero and abs(found.change.mean) >= FELL * unit


def _rose(log: Log) -> bool:
    """Whether the reward clearly rose."""
    if lacks(log, "reward/mean", THIRDS):
        return False
    found = trend(_series(log, "reward/mean"))
    return found.change.mean > 0 and _is_clear(found, _unit(log))


def _well(log: Log) -> str:
    """What says that cut answers do not keep the run from learning, in words; nothing where nothing does."""
    right = _right(log)
    return "the reward rose" if _rose(log) else f"the mean reward is {right.mean:.2g}" if right else ""


def _calmer(log: Log) -> str:
    """What to change where training does harm: fewer updates on a batch, where there are several."""
    return log.trainer.changes["reward trend" if log.fact("updates") == 1 else "clip much"]


def _worse(log: Log) -> list[Series]:
    """The first and the last evaluation, where the logged interval of the last lies below that of the first."""
    if "eval" not in log.trainer.metrics:
        return []
    name, low, high = (log.trainer.metrics[metric] for metric in ("eval", "eval/low", "eval/high"))
    rows = [row for row in log.rows if all(math.isfinite(row.values.get(key, math.nan)) for key in (name, low, high))]
    worse = bool(rows) and rows[-1].values[high] < rows[0].values[low]
    return [Series(name, [row], log.source) for row in (rows[0], rows[-1])] if worse else []


def _unit(log: Log) -> float:
    """The answers' std of reward over the log; or half their range, which no std exceeds; 0 where neither is logged."""
    if not lacks(log, "reward/std"):
        return _series(log, "reward/std").mean
    if lacks(log, "reward/max") or lacks(log, "reward/min"):
        return 0.0
    return (_series(log, "reward/max").mean - _series(log, "reward/min").mean) / 2


FELL = 0.1
"""Fall of the mean reward over the answers' std. For rewards of 0 and 1 around a half: five answers in a hundred. In a
long log the interval excludes 0 for less than that, which matters to nobody."""
COLLAPSED = 0.5
"""For rewards of 0 and 1 around a half: 25 answers in a hundred, half of those that were right."""


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
        return unknown(f"{both[1].name} is 0 because every answer is masked", follows="truncation")
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
    cause = "truncation" if _masked(log) else "dead groups"
    return finding("broken" if zeros > len(norm) / 2 else "watch",
                   f"The gradient is exactly 0 in {zeros} of {len(norm)} readings: nothing is learnt there", norm,
                   why="∇J = Σ w ∇log π, and w = 0 where a group is dead or an answer is masked.",
                   change=log.trainer.changes[cause], follows=cause)


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
    "truncation": truncation, "reward": reward, "dead groups": dead, "gradient": gradient,
    "learning rate": learning_rate, "cispo cap": cispo, "entropy": entropy, "sampler": sampler,
    "reward trend": reward_trend, "saturation": saturation, "dilution": dilution, "KL only": kl_only,
    "length constant": horizon, "length drift": drift, "clip": clip, "loss": loss}
"""Name -> rule, causes before their effects: the order in which equals are shown."""
