"""The numbers of a setting over its runs, and the sentences made of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from creditscope.claims.evidence import ENOUGH, Evidence, mean_of, over_runs
from creditscope.diagnosis.finding import STATES, State
from creditscope.report.answers import TOPICS as BY_TOPIC
from creditscope.report.answers import worst
from creditscope.report.settings import SettingRuns, Several, value_of
from creditscope.report.steps import within
from creditscope.runs import schema
from creditscope.runs.intervals import Interval, mean_interval, overlap
from creditscope.runs.numbers import mean

TOPICS = tuple(BY_TOPIC)
FEW = 6
"""Settings that are named in a sentence."""
Clause = tuple[State, str]
"""A state and what it is of."""
Estimate = tuple[Interval, str] | None
"""A mean with its interval, and what it is a mean of."""


def rank_by_step(run: Evidence) -> Mapping[int, float]:
    """step -> effective rank, mean over live groups: from the readings, or where these were not kept from the steps."""
    return run.by_step("all/effective_rank") or dict(run.series(schema.GRAM_GROUP_EFFECTIVE_RANK))


def live_by_step(run: Evidence) -> dict[int, float]:
    """step -> 1 − dead groups, by credit where it was recorded, else by reward."""
    return {step: 1 - dead for step,
            dead in (run.series(schema.SIGNAL_DEAD_GROUPS) + run.series(schema.CREDIT_DEAD_GROUPS))}


def _accuracy(place: int) -> Callable[[Sequence[Evidence]], Estimate]:
    """At the first (0) or the last (−1) evaluation of the runs that have two."""
    return lambda runs: over_runs([[points[place][1]] for run in runs if len(points := run.points()) > 1])


def _spent(runs: Sequence[Evidence]) -> Estimate:
    """Rollouts per run; an exact number, so the mean has no interval."""
    found = over_runs([[math.fsum(value for _, value in spent)] for run in runs
                       if (spent := run.series(schema.ROLLOUTS_SPENT))])
    return None if found is None else (replace(found[0], low=None, high=None), found[1])


def _steps_of(metric: str) -> Callable[[Sequence[Evidence]], Estimate]:
    return lambda runs: over_runs([[value for _, value in run.series(metric)] for run in runs], "steps")


def _column(name: str) -> Callable[[Sequence[Evidence]], Estimate]:
    return lambda runs: mean_of(runs, name)


@dataclass(frozen=True, kw_only=True)
class Statistic:
    of: Callable[[Sequence[Evidence]], Estimate]
    metric: str
    """For the link to the glossary."""
    percent: bool = False
    digits: int = 2


COLUMNS: Mapping[str, Statistic] = {
    "rollouts": Statistic(of=_spent, metric=schema.ROLLOUTS_SPENT, digits=0),
    "before, %": Statistic(of=_accuracy(0), metric=schema.EVAL_ACCURACY, percent=True, digits=1),
    "after, %": Statistic(of=_accuracy(-1), metric=schema.EVAL_ACCURACY, percent=True, digits=1),
    "live groups, %": Statistic(of=lambda runs: over_runs([list(live_by_step(run).values()) for run in runs], "steps"),
                             metric=schema.SIGNAL_LIVE_GROUPS, percent=True, digits=0),
    "rank": Statistic(of=lambda runs: over_runs([list(rank_by_step(run).values()) for run in runs]),
                   metric=schema.GRAM_GROUP_EFFECTIVE_RANK),
    "null": Statistic(of=_column("w_null"), metric=schema.GRAM_GROUP_W_NULL),
    "cut to 2": Statistic(of=_column("all/effective_rank_truncated_2"),
                          metric=schema.GRAM_GROUP_EFFECTIVE_RANK_TRUNCATED_2),
    "top-1": Statistic(of=_column("all/top1"), metric=schema.GRAM_GROUP_TOP1),
    "past bound, %": Statistic(of=_steps_of(schema.OVERSHOOT_PAST), metric=schema.OVERSHOOT_PAST, percent=True,
                               digits=1),
    "distance": Statistic(of=_steps_of(schema.OVERSHOOT_DISTANCE), metric=schema.OVERSHOOT_DISTANCE),
}


def span(value: Interval, column: Statistic) -> str:
    """A mean with its interval, as the table has it.

    >>> span(Interval(0.5, 0.25, 0.75, 3), COLUMNS["after, %"]), span(Interval(1.5, None, None, 1), COLUMNS["rank"])
    ('50.0 [25.0, 75.0]', '1.50')
    """
    value, scale = (within(value, 0.0, 1.0), 100) if column.percent else (value, 1)
    middle, *ends = (f"{scale * x:,.{column.digits}f}" for x in (value.mean, *(value.ends or ())))
    return f"{middle} [{', '.join(ends)}]" if set(ends) - {middle} else middle


def standing(setting: SettingRuns) -> Clause:
    """The most severe state of its runs' diagnoses, or of what was learnt over seeds; then its numbers."""
    clauses = [clause for clause in (learnt(setting.runs), *causes(setting)) if clause]
    states = [entry.diagnosis.state for entry in setting.entries]
    said = [words for _, words in clauses] + ([live] if (live := alive(setting.runs)) else [])
    known = [state for state in (*states, *(state for state, _ in clauses)) if state != "unknown"]
    return worst(*known) if known else "unknown", "; ".join(said) or "no evaluation and no group is recorded"


def learnt(runs: Sequence[Evidence]) -> Clause | None:
    """The last evaluation against the first. Over three runs or more the interval of the change decides: it is the one
    finding that a single run does not have."""
    points = [found for run in runs if len(found := run.points()) > 1]
    if not points:
        return None
    before, after = (mean([found[place][1] for found in points]) for place in (0, -1))
    said = f"accuracy {100 * before:.1f} → {100 * after:.1f} %"
    change = mean_interval([found[-1][1] - found[0][1] for found in points])
    if len(points) < ENOUGH:
        return "unknown", said
    if not change.excludes_zero:
        return "fine", f"{said}: no clear change"
    return ("broken", f"{said}: it fell below its start") if change.mean < 0 else ("fine", f"{said}: it rose")


def alive(runs: Sequence[Evidence]) -> str:
    found = COLUMNS["live groups, %"].of(runs)
    return "" if found is None else f"{100 * found[0].mean:.0f} % live groups"


def causes(setting: SettingRuns) -> Iterator[Clause]:
    """The first causes of its runs' diagnoses, the most frequent first."""
    firsts = [first for entry in setting.entries if (first := entry.diagnosis.first) is not None]
    for rule, count in Counter(first.rule for first in firsts).most_common():
        state = worst(*(first.state for first in firsts if first.rule == rule))
        yield state, f"{rule} {state} in {count} of {many(len(setting.entries), 'run')}"


class Fault(NamedTuple):
    """A setting that is broken or to watch."""

    name: str
    state: State
    said: str
    change: str
    """The remedy of the first cause that most of its runs have; empty where there is none."""


def faults(several: Several) -> list[Fault]:
    """Most severe first."""
    found = [Fault(setting.name, *standing(setting), change=change(setting)) for setting in several.settings]
    return sorted((each for each in found if each.state in ("broken", "watch")),
                  key=lambda each: STATES.index(each.state))


def change(setting: SettingRuns) -> str:
    firsts = [first for entry in setting.entries if (first := entry.diagnosis.first) is not None]
    most = Counter(first.rule for first in firsts).most_common(1)
    return next((first.change for first in firsts if most and first.rule == most[0][0]), "")


def diagnosed(several: Several) -> Clause:
    """What is said where no setting is broken or to watch."""
    if all(standing(setting)[0] == "unknown" for setting in several.settings):
        return "unknown", "No setting can be judged: too little is recorded."
    return "fine", "No setting is broken or to watch."


def findings(several: Several) -> Iterator[tuple[str, str]]:
    """(topic, settings with most and least of a number, whether their intervals meet), per model, task and reward."""
    families: dict[tuple[str, ...], list[SettingRuns]] = {}
    apart = [key for key in ("model", "task", "reward") if key in several.differs]
    for setting in several.settings:
        families.setdefault(tuple(value_of(setting.runs[0], key) for key in apart), []).append(setting)
    for topic, name, words, beside in (
            ("Learning", "after, %", ("Highest accuracy at the end", "lowest", " %"), "rollouts"),
            ("Directions", "rank", ("Highest effective rank", "lowest", ""), "null"),
            ("Optimiser", "distance", ("Farthest past the bound", "nearest", " nats"), "past bound, %")):
        for family, settings in families.items():
            found = [(setting, value[0]) for setting in settings
                     if (value := COLUMNS[name].of(setting.runs)) is not None]
            if len(found) > 1:
                yield topic, "".join(f"{word}: " for word in [", ".join(family)] if word) + _ends(
                    found, COLUMNS[name], words, beside)


def _ends(found: Sequence[tuple[SettingRuns, Interval]], column: Statistic, words: tuple[str, str, str],
          beside: str) -> str:
    most, least, unit = words
    order = sorted(found, key=lambda pair: pair[1].mean)
    parts = []
    for word, (setting, value) in ((most, order[-1]), (least, order[0])):
        other = COLUMNS[beside].of(setting.runs)
        more = f" ({beside}: {span(other[0], COLUMNS[beside])})" if other is not None else ""
        parts.append(f"{word}: {setting.name} with {span(value, column)}{unit}{more}")
    apart = {True: "Their intervals overlap.", False: "Their intervals do not overlap.",
             None: f"Fewer than {ENOUGH} runs: no interval."}[overlap(order[0][1], order[-1][1])]
    cost = _cost(order[-1][0], order[0][0]) if beside == "rollouts" else ""
    return f"{'; '.join(parts)}. {apart}{cost}"


SAME_COST = 1.05
"""Ratio of rollouts up to which two settings count as equally expensive."""


def _cost(one: SettingRuns, other: SettingRuns) -> str:
    spent = {setting.name: found[0].mean for setting in (one, other) if (found := _spent(setting.runs)) is not None}
    if len(spent) < 2 or not all(spent.values()):
        return ""
    dear, cheap = max(spent, key=lambda name: spent[name]), min(spent, key=lambda name: spent[name])
    if spent[dear] <= SAME_COST * spent[cheap]:
        return ""
    return f" Not at equal cost: {dear} spent {spent[dear] / spent[cheap]:.3g} times the rollouts of {cheap}."


def many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
