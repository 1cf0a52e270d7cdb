"""Readings of a log that several rules share: flat rewards, cut answers, no gradient, trend of the reward. No torch."""

from __future__ import annotations

import math

from creditscope.diagnosis.finding import FEW, THIRDS, Trend, has, level, series_of, trend
from creditscope.diagnosis.log import Log, Series
from creditscope.runs import schema

RIGHT = 0.9
"""Mean reward, where 1 is the maximum: of groups of 8 answers 0.9^8 = 43 % are then all right by chance, and
0.1^8 ≈ 0 all wrong."""
CUT_BROKEN = 0.9
"""Share of cut answers at which 9 of 10 are judged incomplete."""
CUT_WATCH = 0.2
"""The share at which `creditscope train` warns too."""
DEAD_GROWTH = 0.2
"""Growth of the share of dead groups: one group in five. A run that learns has some growth: from 5 % to 15 % or 20 %
where accuracy goes from 45 % to 65 %."""
FELL = 0.1
"""Fall of the mean reward over the answers' std. For rewards of 0 and 1 around a half: 5 answers in 100. In a long log
the interval excludes 0 for changes too small to matter."""


def percent(share: float) -> str:
    """A share in percent; one that is not 0 is not printed as 0."""
    return f"{share:.0%}" if share == 0 or share >= 0.01 else f"{share:.2%}"


def nearly_all_right(log: Log) -> Series | None:
    """The last rewards, where their mean is in [RIGHT, 1]: then groups are dead because their answers are right."""
    recent = level(log, schema.REWARD_MEAN)
    return recent if recent and RIGHT <= recent.mean <= 1 else None


def silent_end(log: Log) -> list[Series]:
    """The readings at the end of the log in which no two answers of a batch differ in reward, or none."""
    names = [name for metric in (schema.REWARD_MAX, schema.REWARD_MIN) if (name := log.trainer.metrics.get(metric))]
    if log.series(schema.REWARD_STD) or not names:
        names = [log.trainer.metrics[schema.REWARD_STD]]
    rows = [row for row in log.rows if all(math.isfinite(row.values.get(name, math.nan)) for name in names)]
    count = 0
    for row in reversed(rows):
        first, *others = (row.values[name] for name in names)
        if first != (others[0] if others else 0):
            break
        count += 1
    return [Series(name, rows[len(rows) - count:], log.source) for name in names] if count else []


def flat_rewards(log: Log) -> list[Series]:
    """The readings that show that no answers of the last batches differed in reward, or none."""
    silent, spread = silent_end(log), level(log, schema.REWARD_STD) or level(log, schema.REWARD_MAX)
    return [part.part(-len(spread)) for part in silent] if silent and spread and len(silent[0]) >= len(spread) else []


def nearly_all_cut(log: Log) -> bool:
    """Whether at least CUT_BROKEN of the answers are cut."""
    cut = level(log, "truncated")
    return cut is not None and cut.mean >= CUT_BROKEN


def nearly_all_masked(log: Log) -> bool:
    """Whether at least CUT_BROKEN of the answers are masked."""
    return bool(log.fact("masked")) and nearly_all_cut(log)


def no_gradient(log: Log) -> bool:
    """Whether the gradient is 0 and no mask explains it: then every group is dead, whatever the log counts."""
    norm = level(log, schema.GRAD_NORM)
    return norm is not None and max(norm.values) == 0 and not nearly_all_masked(log)


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
    """Whether the limit was wide enough at first: then the policy, not the limit, is the cause of later cuts."""
    return cut_at_first(log) < CUT_WATCH


def is_clear(found: Trend, unit: float) -> bool:
    return found.change.excludes_zero and abs(found.change.mean) >= FELL * unit


def learns_all_the_same(log: Log) -> str:
    """The sign, in words, that the run learns although answers are cut; "" where there is none."""
    found = trend(series_of(log, schema.REWARD_MEAN)) if has(log, schema.REWARD_MEAN, THIRDS) else None
    if found and found.change.mean > 0 and is_clear(found, reward_unit(log)):
        return "the reward rose"
    right = nearly_all_right(log)
    return f"the mean reward is {right.mean:.2g}" if right else ""


def calmer(log: Log) -> str:
    """The setting to change where training does harm: fewer updates per batch, where there are several."""
    return log.trainer.changes["reward trend" if log.fact("updates") == 1 else "clip much"]


def held_out_fell(log: Log) -> list[Series]:
    """The first and the last evaluation, where the logged interval of the last lies below that of the first."""
    if "eval" not in log.trainer.metrics:
        return []
    name, low, high = (log.trainer.metrics[metric] for metric in ("eval", schema.EVAL_LOW, schema.EVAL_HIGH))
    rows = [row for row in log.rows if all(math.isfinite(row.values.get(key, math.nan)) for key in (name, low, high))]
    worse = bool(rows) and rows[-1].values[high] < rows[0].values[low]
    return [Series(name, [row], log.source) for row in (rows[0], rows[-1])] if worse else []


def reward_unit(log: Log) -> float:
    """The answers' std of reward over the log; or half their range, which no std exceeds; 0 where neither is logged."""
    if has(log, schema.REWARD_STD):
        return series_of(log, schema.REWARD_STD).mean
    if not has(log, schema.REWARD_MAX) or not has(log, schema.REWARD_MIN):
        return 0.0
    return (series_of(log, schema.REWARD_MAX).mean - series_of(log, schema.REWARD_MIN).mean) / 2
