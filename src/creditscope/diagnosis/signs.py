"""Readings of a log that several rules share: what the reward did, flat rewards, cut answers, steps. No torch."""

from __future__ import annotations

import math
from typing import Literal

from creditscope.diagnosis import remedies
from creditscope.diagnosis.finding import FEW, THIRDS, Trend, has, last, level, series_of, trend
from creditscope.diagnosis.log import Log, Series, is_number
from creditscope.diagnosis.thresholds import (
    CUT_BROKEN,
    CUT_GROWN,
    CUT_WATCH,
    DEAD_GROWTH,
    EARLY,
    FELL,
    GAINED,
    NO_GAIN_FEWEST,
    RIGHT,
)
from creditscope.runs import schema

MOST_STEPS = 10**9
"""Steps planned beyond this are not believed: a trainer that counts epochs sets a number that is never reached."""
SETTINGS_FILE = "the settings, by --config FILE"
"""What settles a question about a setting that was not given."""
Outcome = Literal["rose", "fell", "flat", "unread"]


def percent(share: float) -> str:
    """A share in percent; one that is not 0 is not printed as 0."""
    return f"{share:.0%}" if share == 0 or share >= 0.01 else f"{share:.2%}"


def remedy(log: Log, key: str) -> str:
    """The change for a cause, as the run's trainer spells it."""
    return remedies.change(key, log.trainer, log.settings)


def callback(log: Log) -> str:
    """What would record the numbers of the batch."""
    return {"trl": "trainer.add_callback(ScopeCallback(trainer, out='runs/mine')) of creditscope.plugins.trl",
            "verl": "creditscope's verl plugin, or `creditscope inspect` on trainer.rollout_data_dir",
            "creditscope": "--scope light --probe light, with smaller --every and --probe-every",
            }.get(log.trainer.speech, "rollouts in a file, and `creditscope inspect`")


def at_step(series: Series) -> str:
    """The step of the first reading, for a sentence; nothing where the log does not number its steps."""
    return "" if series.rows[0].step is None else f" at step {series.rows[0].step}"


def exactly_zero(series: Series, value: float) -> bool:
    """Whether a reading is 0; one that was printed as 0.000 may be anything below 0.0005."""
    return value == 0 and not series.resolution


def assumes(log: Log, fact: str) -> bool:
    """Whether a fact depends on a setting that was not given, so that the trainer's default was taken."""
    before = dict(log.settings.assumed)
    log.settings.assumed.clear()
    log.fact(fact)
    found = bool(log.settings.assumed)
    log.settings.assumed.update(before)
    return found


# -- what the reward did ----------------------------------------------------------------------------------------------


def reward_trend(log: Log) -> Trend | None:
    """The first third of the mean reward against the last."""
    return trend(series_of(log, schema.REWARD_MEAN)) if has(log, schema.REWARD_MEAN, THIRDS) else None


def reward_unit(log: Log) -> float:
    """The answers' std of reward over the log; or half their range, which no std exceeds; 0 where neither is logged."""
    if has(log, schema.REWARD_STD):
        return series_of(log, schema.REWARD_STD).mean
    if not has(log, schema.REWARD_MAX) or not has(log, schema.REWARD_MIN):
        return 0.0
    return (series_of(log, schema.REWARD_MAX).mean - series_of(log, schema.REWARD_MIN).mean) / 2


def is_clear(found: Trend, unit: float) -> bool:
    """Whether the interval of a change excludes 0, and a rise is GAINED, a fall FELL of the answers' std or more."""
    return found.change.excludes_zero and not -FELL * unit < found.change.mean < GAINED * unit


def outcome(log: Log) -> Outcome:
    """What the training reward did between the first third and the last."""
    found = reward_trend(log)
    if found is None:
        return "unread"
    if not is_clear(found, reward_unit(log)):
        return "flat"
    return "rose" if found.change.mean > 0 else "fell"


def rises(log: Log) -> bool:
    """Whether the run learns: the reward rose, and no evaluation says otherwise."""
    return outcome(log) == "rose" and not held_out_fell(log)


def evaluations(log: Log) -> list[Series]:
    """Value, low and high of the first and of the last evaluation with a logged interval; none for fewer than two."""
    names = [series.name for metric in ("eval", schema.EVAL_LOW, schema.EVAL_HIGH) if (series := log.series(metric))]
    if len(names) < 3:
        return []
    rows = [row for row in log.rows if all(is_number(row.values.get(key, math.nan)) for key in names)]
    return [Series(name, [row], log.source) for row in (rows[0], rows[-1]) for name in names] if len(rows) > 1 else []


def held_out_fell(log: Log) -> list[Series]:
    """The first and the last evaluation, where the logged interval of the last lies below that of the first."""
    if not (found := evaluations(log)):
        return []
    first, low, _, after, _, high = found
    return [first, after] if high.mean < low.mean else []


def steps(log: Log) -> int:
    """Optimiser steps that the log covers; its rows where it does not number them."""
    numbered = [row.step for row in log.rows if row.step is not None]
    return max(numbered) - min(numbered) + 1 if numbered else len(log.rows)


def planned(log: Log) -> int:
    """Steps that were planned, at least those that were made. Without a known plan at least NO_GAIN_FEWEST: the log of
    a run that has just begun does not say when it ends."""
    plan = log.setting("steps") or 0
    return max(steps(log), int(min(plan, MOST_STEPS)) if plan > 0 else int(NO_GAIN_FEWEST))


def is_early(log: Log) -> bool:
    """Whether the log covers less than EARLY of the planned steps: its schedule may still be in the warm-up."""
    return steps(log) < EARLY * planned(log)


def by_sgd(log: Log) -> bool:
    """Whether the settings name SGD, whose step is η·g: about η per weight only under Adam."""
    return "sgd" in log.word("optimizer").lower()


def nearly_all_right(log: Log) -> Series | None:
    """The last rewards, where their mean is in [RIGHT, 1] and none is above 1. A margin of pairs has no such end."""
    recent = None if log.trainer.pairs else level(log, schema.REWARD_MEAN)
    return recent if recent and recent.mean >= RIGHT and max(recent.values) <= 1 else None


def at_the_top(log: Log) -> Series | None:
    """The last rewards, where at least half of them are exactly the largest of the log, as at the end of a scale."""
    recent, series = level(log, schema.REWARD_MEAN), log.finite(schema.REWARD_MEAN)
    if not recent or not series or len(series) < THIRDS or series.resolution:
        return None
    top = max(series.values)
    return recent if top > min(series.values) and sum(x == top for x in recent.values) * 2 >= len(recent) else None


def is_small(log: Log, recent: Series, share: float) -> bool:
    """Whether a mean reward lies in the lowest `share` of the rewards' range, which is taken as 0 to 1 where the log
    does not say."""
    low, high = reward_range(log)
    return recent.mean <= low + share * (high - low)


def reward_range(log: Log) -> tuple[float, float]:
    """Smallest and largest reward of an answer, where logged; else 0 and 1, or what the means reach beyond."""
    least, most = log.series(schema.REWARD_MIN), log.series(schema.REWARD_MAX)
    if least and most:
        return min(least.finite.values, default=0.0), max(most.finite.values, default=1.0)
    means = series_of(log, schema.REWARD_MEAN).values
    return min(0.0, *means), max(1.0, *means)


# -- flat rewards, cut answers, no gradient ---------------------------------------------------------------------------


def silent_end(log: Log) -> list[Series]:
    """The readings at the end of the log in which no two answers of a batch differ in reward, or none."""
    spread = log.series(schema.REWARD_STD)
    shown = [spread] if spread else [found for metric in (schema.REWARD_MAX, schema.REWARD_MIN)
                                     if (found := log.series(metric))]
    if not shown or (not spread and len(shown) < 2):
        return []
    names = [series.name for series in shown]
    rows = [row for row in log.rows if all(is_number(row.values.get(name, math.nan)) for name in names)]
    count = 0
    for row in reversed(rows):
        first, *others = (row.values[name] for name in names)
        if first != (others[0] if others else 0) or (spread and spread.resolution):
            break
        count += 1
    return [Series(name, rows[len(rows) - count:], log.source) for name in names] if count else []


def flat_rewards(log: Log) -> list[Series]:
    """The readings that show that no answers of the last batches differed in reward, or none."""
    silent, spread = silent_end(log), level(log, schema.REWARD_STD) or level(log, schema.REWARD_MAX)
    return [part.part(-len(spread)) for part in silent] if silent and spread and len(silent[0]) >= len(spread) else []


def nearly_all_cut(log: Log) -> bool:
    cut = level(log, "truncated")
    return cut is not None and cut.mean >= CUT_BROKEN


def nearly_all_masked(log: Log) -> bool:
    return bool(log.fact("masked")) and nearly_all_cut(log)


def no_gradient(log: Log) -> bool:
    """Whether the gradient is 0 and no mask explains it: then every group is dead, whatever the log counts."""
    norm = level(log, schema.GRAD_NORM)
    return norm is not None and all(exactly_zero(norm, x) for x in norm.values) and not nearly_all_masked(log)


def never_moved(log: Log) -> bool:
    """Whether every gradient of the log is exactly 0, so that the policy is the one it began with."""
    norm = log.finite(schema.GRAD_NORM)
    return norm is not None and len(norm) >= FEW and all(exactly_zero(norm, x) for x in norm.values)


def all_dead(log: Log) -> bool:
    return bool(flat_rewards(log)) or no_gradient(log)


def dead_groups_grew(log: Log) -> bool:
    """Whether dead groups grew by DEAD_GROWTH, with an interval that excludes 0."""
    if not log.fact("dead_counted") or not has(log, "dead", THIRDS):
        return False
    share = trend(series_of(log, "dead"))
    return share.change.excludes_zero and share.change.mean >= DEAD_GROWTH


def cut_at_first(log: Log) -> float:
    """The smallest share of cut answers in the first readings."""
    return min(series_of(log, "truncated").part(0, FEW).values)


def cuts_came_later(log: Log) -> bool:
    """Whether the policy, not the limit, is the cause of later cuts: few answers were cut at first, or far fewer."""
    grown = last(series_of(log, "truncated")).mean - cut_at_first(log)
    return cut_at_first(log) < CUT_WATCH or grown >= CUT_GROWN


def learns_all_the_same(log: Log) -> str:
    """The sign, in words, that the run learns although answers are cut; "" where there is none."""
    if outcome(log) == "rose":
        return "the reward rose"
    right = nearly_all_right(log)
    return f"the mean reward is {right.mean:.2g}" if right else ""
