"""Does the policy move in the right direction? Reward over time, held-out against training, memorised prompts."""

from __future__ import annotations

from creditscope.diagnosis import signs
from creditscope.diagnosis.finding import (
    FEW,
    THIRDS,
    TREND,
    Finding,
    State,
    ends,
    finding,
    lacking,
    level,
    series_of,
    trend,
    unknown,
)
from creditscope.diagnosis.log import Log
from creditscope.diagnosis.onset import left_beginning
from creditscope.diagnosis.thresholds import (
    APART,
    COLLAPSED,
    DISPLACED,
    DISPLACED_ALL,
    FELL,
    GAINED,
    NO_GAIN,
    NO_GAIN_FEWEST,
    PASSES,
    PASSES_MANY,
    SAME,
)
from creditscope.runs import schema
from creditscope.runs.intervals import mean_interval

CAUSES = ("reward constant", "reward missing", "form", "reward noise", "reward hacked", "one rollout", "cold sampler",
          "hot sampler", "truncation", "learning rate", "epsilon", "rounding", "gradient clip", "frozen", "mask",
          "small steps", "KL pull", "clip", "cispo cap", "weight decay", "updates", "step size", "too hard", "too easy",
          "dead groups", "memorised", "reward length", "signal", "sampler", "KL level", "length drift", "entropy")
"""Rules whose findings explain a reward that does not rise, first causes first."""


def held_out(log: Log) -> Finding:
    """Held-out accuracy or reward against that of training."""
    unmeant = "what the pairs prefer" if log.trainer.pairs else "what is paid"
    unmeant += " is not what was meant"
    if worse := signs.held_out_fell(log):
        before, after = (part.values[0] for part in worse)
        rose = signs.outcome(log) == "rose"
        return finding("broken", f"Held-out accuracy fell from {before:.1%} to {after:.1%}"
                       + (f" while the training {log.trainer.gain} rose: {unmeant}" if rose else
                          ": training made the model worse"), *worse,
                       why="The 95 % intervals of the two, as logged, have no point in common.",
                       remedy="held out" if rose else "step size",
                       onset=worse[1].rows[0].step, follows=["reward hacked", "displacement", "reward length"]
                       + ([] if rose else ["reward noise", "reward missing", "updates", "weight decay", "step size",
                                           "hot sampler", "cold sampler"]))
    if accuracy := signs.evaluations(log):
        begin, end = accuracy[0], accuracy[3]
        return finding("fine", f"Held-out accuracy went from {begin.mean:.1%} to {end.mean:.1%}", begin, end)
    values = log.finite(schema.EVAL_REWARD)
    if not values or len(values) < FEW or log.trainer.pairs:  # a reward is no margin
        with_ends = log.finite(schema.EVAL_LOW) and log.finite(schema.EVAL_HIGH)
        return lacking(log, "nothing was evaluated on held-out problems",
                       {**({"eval": 2} if with_ends else {}), schema.EVAL_REWARD: FEW},
                       "an evaluation before and after", more="more evaluations")
    size = max(2, len(values) // 3)
    begin, end = values.part(0, size), values.part(-size)
    fell = begin.mean - end.mean >= FELL * signs.reward_unit(log) and max(end.values) < min(begin.values)
    if fell and signs.outcome(log) == "rose":
        return finding("broken", f"The held-out reward fell from {begin.mean:.3g} to {end.mean:.3g} while the training "
                       f"reward rose: what is paid is not what was meant", begin, end,
                       why="Both are of the same policy: the two rewards differ.",
                       onset=left_beginning(values, rising=False),
                       follows=["reward length"])
    low, high = signs.reward_range(log)
    train = level(log, schema.REWARD_MEAN)
    if train and signs.outcome(log) == "rose" and train.mean - end.mean >= APART * (high - low):
        return finding("broken", f"The held-out reward is {end.mean:.3g} where the training reward is "
                       f"{train.mean:.3g}: what is paid is not what was meant, or prompts were memorised", end, train,
                       why="Both are of the same policy.", onset=begin.rows[0].step,
                       follows=["reward length", "memorised"])
    return finding("fine", f"The held-out reward went from {begin.mean:.3g} to {end.mean:.3g}", begin, end)


def memorised(log: Log) -> Finding:
    """Passes over each prompt; few prompts seen often are learnt by heart."""
    passes, epoch = log.finite(schema.PROMPTS_PASSES), log.finite("epoch")
    series = passes or epoch
    if not series:
        return unknown("passes over each prompt are not in the log", settles="the number of prompts")
    most = max(series.values)
    if most < PASSES:
        return finding("fine", f"Each prompt was seen {most:.2g} times at most", series.part(-1))
    level_now = level(log, schema.REWARD_MEAN)
    high = level_now is not None and signs.nearly_all_right(log) is not None
    improved = _improved(log)
    state: State = "fine" if improved else "broken" if high or most >= PASSES_MANY else "watch"
    lead = "Held-out values rose although each prompt" if improved else "Prompts are memorised: each" if high else \
        "The same prompts return: each"
    return finding(state, f"{lead} was seen {most:.0f} times"
                   + (f", and the reward on them is {level_now.mean:.3g}" if level_now else "")
                   + (f" (of {seen.values[-1]:.0f} prompts)" if (seen := log.finite(schema.PROMPTS_SEEN)) else ""),
                   series.part(-1), why="passes = groups sampled / distinct prompts. A prompt that was seen often "
                   "pays for its own answer, not for the skill.",
                   onset=next((row.step for row in series.rows if row.values[series.name] >= PASSES), None))


def _improved(log: Log) -> bool:
    """Whether held-out values rose: the last evaluation above the first one's interval, or the last ones above all."""
    low, high, value = (log.finite(metric) for metric in (schema.EVAL_LOW, schema.EVAL_HIGH, "eval"))
    if low and high and value and len(value) > 1:
        return low.values[-1] > high.values[0]
    held = log.finite(schema.EVAL_REWARD)
    return bool(held and len(held) >= FEW and min(held.values[-2:]) > max(held.values[:2]))


def reward(log: Log) -> Finding:
    """The reward, first third against last. A change counts where its interval excludes 0 and where it is not small
    beside the answers' std."""
    found, unit = trend(series_of(log, schema.REWARD_MEAN, THIRDS)), signs.reward_unit(log)
    told = signs.outcome(log)
    fell = told == "fell"
    state: State = "fine" if not fell else "broken" if unit and -found.change.mean >= COLLAPSED * unit else "watch"
    little = "changed little:" if found.change.excludes_zero else "did not clearly change:"
    verb = {"fell": "fell", "rose": "rose"}.get(told, little)
    if fell and signs.never_moved(log):
        return finding("fine", f"The {log.trainer.gain}, {found.first.mean:.3g} in the first third, "
                       f"{found.last.mean:.3g} in the last, differs by the prompts alone: every gradient is 0",
                       found.first, found.last, log.finite(schema.GRAD_NORM))
    return finding(state, f"The {log.trainer.gain} {verb} from {found.first.mean:.3g} in the first third to "
                   f"{found.last.mean:.3g} in the last", found.first, found.last, why=found.told(),
                   onset=left_beginning(series_of(log, schema.REWARD_MEAN), rising=False) if fell else None,
                   follows=["reward missing", "weight decay", "updates", "step size", "hot sampler", "cold sampler",
                            "reward length", "truncation", "length drift", "entropy", "KL level", "gradient", "sampler",
                            "reward noise", "signal"])


def signal(log: Log) -> Finding:
    """mean_{a≠b}⟨G_a, G_b⟩/mean‖G_a‖²: 0 in expectation where the groups' gradients are noise."""
    series, scale = log.finite(schema.GRAM_BETWEEN), log.finite(schema.GRAM_NOISE_SCALE_GROUPS)
    if not series or len(series) < FEW:
        return lacking(log, "the agreement of the groups' gradients was not read", {schema.GRAM_BETWEEN: FEW},
                       signs.callback(log))
    found = mean_interval(series.values)
    low, high = found.ends or (found.mean, found.mean)
    told = f"{found.mean:.2g} (95 % from {low:.2g} to {high:.2g})"
    if low > SAME or not is_stalled(log):
        return finding("fine", f"Groups push in a common direction: agreement {told}" if low > SAME else
                       f"The groups' agreement is {told}", series)
    return finding("watch", f"No batch has shown a direction: the groups' gradients agree by {told}, not above 0",
                   series, scale, why="mean ⟨G_a, G_b⟩ over pairs of groups = ‖G‖² in expectation; noise has 0.",
                   onset=series.rows[0].step,
                   follows=["reward constant", "reward noise", "reward missing", "one rollout", "cold sampler",
                            "hot sampler", "too hard", "too easy", "dead groups", "truncation"])


def is_stalled(log: Log) -> bool:
    """Whether the reward is flat over NO_GAIN steps, or over fewer in which a rise of GAINED would have been seen."""
    found = signs.reward_trend(log)
    if found is None or signs.outcome(log) != "flat":
        return False
    half = (found.change.high or 0.0) - found.change.mean
    seen = signs.steps(log) >= NO_GAIN_FEWEST and half < GAINED * signs.reward_unit(log)
    return seen or signs.steps(log) >= NO_GAIN


def displacement(log: Log) -> Finding:
    """Fall of the chosen answers' reward β·h since the start, of preference methods: where it falls while the margin
    grows, probability goes from both answers of a pair to others."""
    if log.series(schema.PAIRS_CHOSEN_REWARD) is None:
        return finding("fine", "Not in play: the log has no pairs")
    chosen, margin = (series_of(log, name, TREND) for name in (schema.PAIRS_CHOSEN_REWARD, schema.PAIRS_MARGIN))
    (begin, end), (before, after) = ends(chosen), ends(margin)
    fall, gain = begin.mean - end.mean, after.mean - before.mean
    state: State = "fine" if fall < DISPLACED else "broken" if fall >= DISPLACED_ALL * gain else "watch"
    said = f"The reward of the chosen answers went from {begin.mean:.3g} to {end.mean:.3g} while the margin went " \
           f"from {before.mean:.3g} to {after.mean:.3g}"
    if state == "fine":
        return finding("fine", said, end, after)
    return finding(state, f"{said}: both answers of a pair lose probability to answers that nobody has compared",
                   begin, end, after,
                   why="The margin is a difference: it grows as well where both log-probs fall and the rejected one "
                   "falls faster. The reward is β·log(π/π_ref), or β·log π without a reference.",
                   onset=left_beginning(chosen, rising=False), follows=["step size", "learning rate"])


def no_gain(log: Log) -> Finding:
    """A flat reward, with the smallest gain that these steps could have shown."""
    found = signs.reward_trend(log)
    if found is None:
        return lacking(log, f"needs at least {THIRDS} readings of the {log.trainer.gain}",
                       {schema.REWARD_MEAN: THIRDS})
    series, done = series_of(log, schema.REWARD_MEAN), signs.steps(log)
    if signs.outcome(log) != "flat":
        return finding("fine", f"Not in play: the {log.trainer.gain} changed")
    if signs.nearly_all_right(log) and not signs.silent_end(log):
        return finding("fine", f"Little is left to gain: the mean reward is {found.last.mean:.3g}", found.last)
    half = (found.change.high or 0.0) - found.change.mean
    said = f"No gain in {done} steps: the {log.trainer.gain} is {found.last.mean:.3g}" + (
        f"; a gain below {half:.2g} would be invisible in this noise" if half > 0 else "")
    state: State = "watch" if is_stalled(log) else "unknown"
    return finding(state, said, found.first, found.last, why=found.told(),
                   settles="more steps" if state == "unknown" else "what the callback reads: movement, noise, contrast",
                   follows=CAUSES, onset=series.rows[0].step)
