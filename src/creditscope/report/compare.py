"""Several runs on one page: runs that differ only in the seed are one setting, shown by its mean and its interval.

Read from folders of runs, from files of evidence, and from folders that hold either. A run that cannot be read is named
and left out. Fewer than three runs have no interval, so no band: the page says so.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from creditscope.claims.evidence import APART, ENOUGH, Evidence, from_json, mean_of, over_runs, places, read_evidence
from creditscope.claims.page import FIGURES, curves
from creditscope.claims.reading import credit_of, from_three, sweeps
from creditscope.errors import CreditscopeError
from creditscope.files.guards import resolved
from creditscope.report import claims, glossary, methods
from creditscope.report.answers import (
    LAST,
    LIVE_BROKEN,
    LIVE_GOOD,
    SHAPES,
    Answer,
    Clause,
    answers,
    is_solved,
    progress,
    worst,
)
from creditscope.report.chart import Spec
from creditscope.report.chart import curves as chart_of
from creditscope.report.markup import Html, join, shown, tag
from creditscope.report.run import Run, read_run
from creditscope.report.section import Section, missing, rounded
from creditscope.report.steps import within
from creditscope.runs.compare import at
from creditscope.runs.intervals import Interval, mean_interval, overlap

READINGS, BATCHES = 100, 20
"""Points of one line, of what is read on schedule and of what every batch shows: of a longer line a point is the mean
of some steps. A batch is a small sample, so that a point of one would be noise with a wide band."""
LONGEST = 60
"""Letters of a setting's name."""


@dataclass(frozen=True)
class Entry:
    """A run of the comparison. Of a file of evidence there is no record."""

    name: str
    path: Path
    evidence: Evidence
    run: Run | None

    @cached_property
    def answers(self) -> list[Answer]:
        """Those of the run's own first screen; a file of evidence has none."""
        return [] if self.run is None else answers(self.run)


@dataclass(frozen=True)
class Setting:
    """Runs that differ in the seed alone."""

    name: str
    entries: tuple[Entry, ...]

    @property
    def runs(self) -> list[Evidence]:
        return [entry.evidence for entry in self.entries]


@dataclass(frozen=True)
class Several:
    """What was found under the paths, in order of what differs."""

    settings: tuple[Setting, ...]
    differs: tuple[str, ...]
    """The settings of `train` in which the runs differ, besides the seed."""
    faults: tuple[str, ...]
    """What could not be read, a sentence each."""
    paths: tuple[str, ...]
    """As they were given, for commands."""

    @property
    def entries(self) -> list[Entry]:
        return [entry for setting in self.settings for entry in setting.entries]


# -- reading ---------------------------------------------------------------------------------------------------------


def read(paths: Sequence[Path], told: Callable[[int, int], None] = lambda done, total: None) -> Several:
    """The runs under some paths. One that is damaged is a fault; none at all is an error. `told`: how many are read."""
    inside = places(paths)
    above = Path(os.path.commonpath([resolved(place).parent for place in inside]))
    entries, faults = [], []
    whole = not any(place.is_file() for place in inside)
    for number, place in enumerate(inside):
        told(number, len(inside))
        try:
            name = str(resolved(place).relative_to(above)).removesuffix(".evidence.json")
            entries.append(_entry(place, name, whole))
            faults += entries[-1].run.faults if entries[-1].run else []
        except (CreditscopeError, *claims.ODD) as error:
            faults.append(f"{place} was left out: {error}")
    if not entries:
        raise CreditscopeError("; ".join(faults))
    by_evidence = {id(entry.evidence): entry for entry in entries}
    alike = sweeps([entry.evidence for entry in entries], lambda run: 1 + len(run.column("step")), over=())
    families = [[by_evidence[id(run)] for run in family] for family in alike]
    twins = len(entries) - sum(map(len, families))
    if twins:
        faults.append(f"{twins} of the runs were left out: another run has the same settings and the same seed")
    differs = differences([family[0].evidence.config for family in families])
    families.sort(key=lambda family: [_sortable(family[0].evidence[key]) for key in differs])
    names = labels([family[0].evidence for family in families], differs)
    return Several(tuple(Setting(name, tuple(family)) for name, family in zip(names, families, strict=True)), differs,
                   tuple(faults), tuple(str(path) for path in paths))


def _entry(place: Path, name: str, whole: bool) -> Entry:
    """A run. `whole`: by its own settings, in which two folders that are both called "model" are two models; evidence
    has cut them to that, so that beside a file of it all are."""
    if has_no_step(place):
        raise CreditscopeError("it has no step yet")
    run = None if place.is_file() else read_run(place)
    evidence = from_json(place) if run is None else read_evidence(run.record, run.steps)
    if run is not None and whole:
        evidence = replace(evidence, config=dict(run.config))
    for key in ("group", "seed"):
        if not isinstance(evidence[key], int | str | None):
            raise CreditscopeError(f"its {key} is {evidence[key]!r:.60}, not a number")
    return Entry(name, place, _finite(evidence), run)


def has_no_step(place: Path) -> bool:
    """Whether a run was begun there and nothing more."""
    try:
        return (place / "run.json").exists() and not (place / "steps.jsonl").exists()
    except OSError:  # whoever reads it will say why it cannot be read
        return False


def _finite(run: Evidence) -> Evidence:
    """The evidence without values that are not finite: a metric that does not exist is absent."""
    return replace(run, steps=run.columns.finite(),
                   groups={name: [value if value is not None and math.isfinite(value) else None for value in values]
                           for name, values in run.groups.items()})


def differences(configs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The settings that have more than one value, the telling ones first. One that a run does not know is none.

    >>> differences([{"group": 2, "lr": 1e-4, "seed": 0}, {"group": 4, "lr": 1e-4, "seed": 1, "adapt": "none"}])
    ('group',)
    """
    values: dict[str, set[str]] = {}
    for config in configs:
        for key, value in config.items():
            values.setdefault(key, set()).add(json.dumps(value, sort_keys=True, default=str))
    found = [key for key, some in values.items() if len(some) > 1 and key not in APART]
    return tuple(sorted(found, key=lambda key: (TELLING.index(key) if key in TELLING else len(TELLING), key)))


TELLING = ("model", "task", "method", "credit", "brake", "adapt", "group", "inner_steps", "optimizer", "lr", "beta1")
"""Settings by which people tell runs apart, in order."""
SYMBOLS = {"group": "R", "inner_steps": "μ", "prompts": "P", "lr": "lr", "beta": "β", "beta1": "β₁", "beta2": "β₂"}


def labels(runs: Sequence[Evidence], differs: Sequence[str]) -> list[str]:
    """A name for each setting: what differs, without what is not needed to tell them apart."""
    if not differs:
        return [shown(run.subject, LONGEST) for run in runs]
    keys = list(differs)
    for key in reversed(differs):
        fewer = [other for other in keys if other != key]
        if fewer and len(set(_names(runs, fewer))) == len(runs):
            keys = fewer
    names = _names(runs, keys)
    if len(set(names)) == len(runs):
        return names
    return [f"{number}: {name}" for number, name in enumerate(names, start=1)]


def _names(runs: Sequence[Evidence], keys: Sequence[str]) -> list[str]:
    """What sets each run apart: its values but none and the usual ones."""
    usual = {key: _usual([run[key] for run in runs]) for key in keys}
    parts = [[_part(run, key) for key in keys if run[key] not in (None, "none", usual[key])] for run in runs]
    return [shown(", ".join(own or [_part(run, keys[-1])]), LONGEST) for run, own in zip(runs, parts, strict=True)]


def _usual(values: Sequence[Any]) -> Any:
    """The value of more than half, which goes without saying; None where there is none."""
    return next((value for value in values if 2 * values.count(value) > len(values)), None)


def _part(run: Evidence, key: str) -> str:
    if key in SYMBOLS:
        return f"{SYMBOLS[key]} = {run[key]}"
    return value_of(run, key) if key in ("model", "task", "method", "credit") else f"{key} {value_of(run, key)}"


def value_of(run: Evidence, key: str) -> str:
    """A setting in words: a credit that was not named is the method's own, of a path the end."""
    if key == "credit":
        return str(run["credit"] or credit_of(run))
    if key == "model" and isinstance(run[key], str):
        return "/".join(run[key].rstrip("/").split("/")[-2:])
    return "–" if run[key] is None else str(run[key])


def _sortable(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return not number, float(value) if number else 0.0, str(value)


# -- numbers of a setting --------------------------------------------------------------------------------------------

Found = tuple[Interval, str] | None


def rank_by_step(run: Evidence) -> Mapping[int, float]:
    """step -> effective rank, mean over live groups: from the readings, or where they were not kept from the steps."""
    return run.by_step("all/effective_rank") or dict(run.series("gram/group/effective_rank"))


def live_by_step(run: Evidence) -> dict[int, float]:
    """step -> share of groups in which a token had credit, or as far as is known whose rewards differ: 1 − dead."""
    return {step: 1 - dead for step, dead in (run.series("signal/dead_groups") + run.series("credit/dead_groups"))}


def _accuracy(place: int) -> Callable[[Sequence[Evidence]], Found]:
    """At the first (0) or the last (−1) evaluation of the runs that have two."""
    return lambda runs: over_runs([[points[place][1]] for run in runs if len(points := run.points()) > 1])


def _spent(runs: Sequence[Evidence]) -> Found:
    """What the runs cost, a sum each: known, so that the mean has no interval."""
    found = over_runs([[math.fsum(value for _, value in spent)] for run in runs
                       if (spent := run.series("rollouts/spent"))])
    return None if found is None else (replace(found[0], low=None, high=None), found[1])


def _steps_of(metric: str) -> Callable[[Sequence[Evidence]], Found]:
    """The mean of a metric over the steps that have it, then over runs."""
    return lambda runs: over_runs([[value for _, value in run.series(metric)] for run in runs], "steps")


def _column(name: str) -> Callable[[Sequence[Evidence]], Found]:
    return lambda runs: mean_of(runs, name)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A number of a setting: how it is read, and how it is shown."""

    of: Callable[[Sequence[Evidence]], Found]
    metric: str
    """Of the glossary."""
    percent: bool = False
    digits: int = 2


COLUMNS: Mapping[str, Column] = {
    "rollouts": Column(of=_spent, metric="rollouts/spent", digits=0),
    "before, %": Column(of=_accuracy(0), metric="eval/accuracy", percent=True, digits=1),
    "after, %": Column(of=_accuracy(-1), metric="eval/accuracy", percent=True, digits=1),
    "live groups, %": Column(of=lambda runs: over_runs([list(live_by_step(run).values()) for run in runs], "steps"),
                             metric="signal/live_groups", percent=True, digits=0),
    "rank": Column(of=lambda runs: over_runs([list(rank_by_step(run).values()) for run in runs]),
                   metric="gram/group/effective_rank"),
    "null": Column(of=_column("w_null"), metric="gram/group/w_null"),
    "cut to 2": Column(of=_column("all/effective_rank_truncated_2"), metric="gram/group/effective_rank_truncated_2"),
    "top-1": Column(of=_column("all/top1"), metric="gram/group/top1"),
    "past bound, %": Column(of=_steps_of("overshoot/past"), metric="overshoot/past", percent=True, digits=1),
    "distance": Column(of=_steps_of("overshoot/distance"), metric="overshoot/distance"),
}


def span(value: Interval, column: Column) -> str:
    """A mean with its interval, as the table has it.

    >>> span(Interval(0.5, 0.25, 0.75, 3), COLUMNS["after, %"]), span(Interval(1.5, None, None, 1), COLUMNS["rank"])
    ('50.0 [25.0, 75.0]', '1.50')
    """
    value, scale = (within(value, 0.0, 1.0), 100) if column.percent else (value, 1)
    ends = [] if value.low is None or value.high is None else [value.low, value.high]
    mean, *rest = (f"{scale * x:,.{column.digits}f}" for x in (value.mean, *ends))
    return f"{mean} [{', '.join(rest)}]" if set(rest) - {mean} else mean


# -- the first screen ------------------------------------------------------------------------------------------------


FEW = 6
"""Settings that are named in a sentence."""


def first_screen(several: Several) -> Html:
    """What is compared, what is the same, and what stands out."""
    count, settings = len(several.entries), len(several.settings)
    config = several.entries[0].evidence
    same = [f"{SYMBOLS[key]} = {config[key]}" if key in SYMBOLS else f"{key} {value_of(config, key)}"
            for key in TELLING if key not in several.differs and config[key] is not None]
    few = [setting.name for setting in several.settings if len(setting.entries) < ENOUGH]
    words = [SYMBOLS.get(key, key.replace("_", " ")) for key in several.differs]
    seeds = ", and in the seed" if count > settings else ""
    state, said = signal(several)
    told = [tag("li", tag("div", tag("strong", "Signal"), tag("p", _shape(state), state, class_="state")),
                tag("p", said), class_=f"answer {state}", data_topic="signal", data_state=state),
            *(tag("li", tag("strong", topic), tag("p", sentence), class_="answer", data_topic=topic.lower())
              for topic, sentence in findings(several))]
    return join(
        tag("h1", f"{_many(count, 'run')} in {_many(settings, 'setting')}"),
        tag("p", *(tag("span", fact) for fact in same), class_="facts"),
        tag("p", f"They differ in {', '.join(words)}{seeds}." if words else
            "They differ in the seed alone." if count > 1 else "There is one run: creditscope report shows it in full.",
            id="differs"),
        tag("ul", *told, class_="answers"),
        tag("p", f"No interval and no band, because {ENOUGH} runs are needed: ",
            "every setting." if len(few) == settings else f"{'; '.join(few)}." if len(few) <= FEW else
            f"{len(few)} of {settings} settings.", class_="missing", id="few")
        if few else None,
        *(tag("p", fault, class_="missing fault") for fault in several.faults))


def _shape(state: str) -> Html:
    return tag("span", SHAPES[state], class_="shape", aria_hidden="true")


# -- what became of a setting ----------------------------------------------------------------------------------------


def standing(setting: Setting) -> Clause:
    """What was learnt, what there was to learn from, and which other answers of its runs are not good."""
    clauses = [clause for clause in (learnt(setting.runs), alive(setting.runs), *_others(setting)) if clause]
    if not clauses:
        return "unknown", "no evaluation and no group is recorded"
    return worst(*(state for state, _ in clauses)), "; ".join(words for _, words in clauses)


def learnt(runs: Sequence[Evidence]) -> Clause | None:
    """The last evaluation against the first: by the interval of the change over three runs and more, else by run."""
    points = [found for run in runs if len(found := run.points()) > 1]
    if not points:
        return None
    before, after = (math.fsum(found[place][1] for found in points) / len(points) for place in (0, -1))
    said = f"accuracy {100 * before:.1f} → {100 * after:.1f} %"
    change = mean_interval([found[-1][1] - found[0][1] for found in points])
    fell = [run for run in runs if (progress(run.steps, run.trained) or ("", ""))[0] == "broken"]
    if len(points) >= ENOUGH and change.excludes_zero:
        return ("broken", f"{said}: it fell below its start") if change.mean < 0 else ("good", f"{said}: it rose")
    if fell:
        state = "broken" if len(fell) == len(points) else "watch"
        return state, f"{said}: it fell in {len(fell)} of {_many(len(points), 'run')}"
    return "good", f"{said}: no clear change" if len(points) >= ENOUGH else said


def alive(runs: Sequence[Evidence]) -> Clause | None:
    """The share of live groups over all steps, by the thresholds of one run."""
    found = COLUMNS["live groups, %"].of(runs)
    if found is None:
        return None
    share, solved = found[0].mean, all(is_solved(run.trained[-LAST:]) for run in runs)
    state = "good" if share >= LIVE_GOOD else "watch" if share >= LIVE_BROKEN or solved else "broken"
    return state, f"{100 * share:.0f} % live groups"


def _others(setting: Setting) -> Iterator[Clause]:
    """The other topics, where a run's own answer is to watch or broken."""
    whole = [entry.answers for entry in setting.entries if entry.run is not None]
    for place, topic in enumerate(TOPICS[1:], start=1):
        wrong = [found[place].state for found in whole if found[place].state in ("watch", "broken")]
        if wrong:
            state = worst(*wrong)
            yield state, f"{topic} {state} in {len(wrong)} of {len(whole)} runs"


def signal(several: Several) -> Clause:
    """The settings that got worse or have little to learn from, by name."""
    found = {setting.name: [clause for clause in (learnt(setting.runs), alive(setting.runs)) if clause is not None]
             for setting in several.settings}
    wrong = {name: [(state, words) for state, words in some if state != "good"] for name, some in found.items()}
    said = [f"{name}: {'; '.join(words for _, words in some)}" for name, some in wrong.items() if some]
    if said:
        more = f"; and {len(said) - FEW} more" if len(said) > FEW else ""
        return worst(*(state for some in wrong.values() for state, _ in some)), f"{'. '.join(said[:FEW])}{more}."
    if not any(found.values()):
        return "unknown", "No evaluation and no group is recorded."
    unsaid = "" if any(learnt(setting.runs) for setting in several.settings) else " None was evaluated twice."
    return "good", f"No setting got worse, and none has less than {100 * LIVE_GOOD:.0f} % live groups.{unsaid}"


def findings(several: Several) -> Iterator[tuple[str, str]]:
    """(topic, the settings with most and least of a number, and whether their intervals keep apart), for each model and
    task: numbers of two tasks have no order."""
    families: dict[tuple[str, ...], list[Setting]] = {}
    apart = [key for key in ("model", "task") if key in several.differs]
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


def _ends(found: Sequence[tuple[Setting, Interval]], column: Column, words: tuple[str, str, str], beside: str) -> str:
    """Of the setting with most and the one with least: the number, and another one to read it by."""
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
"""Factor between the rollouts of two settings up to which they have cost the same."""


def _cost(one: Setting, other: Setting) -> str:
    """What has to be said where two settings did not spend the same."""
    spent = {setting.name: found[0].mean for setting in (one, other) if (found := _spent(setting.runs)) is not None}
    if len(spent) < 2 or not all(spent.values()):
        return ""
    dear, cheap = max(spent, key=lambda name: spent[name]), min(spent, key=lambda name: spent[name])
    if spent[dear] <= SAME_COST * spent[cheap]:
        return ""
    return f" Not at equal cost: {dear} spent {spent[dear] / spent[cheap]:.3g} times the rollouts of {cheap}."


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


# -- sections --------------------------------------------------------------------------------------------------------


def sections(several: Several) -> list[Section]:
    """The page from top to bottom, below the first screen."""
    evidence = [entry.evidence for entry in several.entries]
    return [_compared(several), _runs(several), claims.of(evidence, several.paths),
            methods.of([run.config for run in evidence]), glossary.section()]


MANY = 24
"""Settings that a chart can tell apart."""


def _compared(several: Several) -> Section:
    count = len(several.settings)
    charts = list(_charts(several)) if count <= MANY else []
    lead = ("A line a setting: mean over its runs, and the 95 % t-interval over seeds. A heading sorts the table; the "
            "pointer over a chart marks its step in all of them, and the table under a chart has its numbers.")
    none = None if charts else missing(
        "No step of these runs has been recorded yet." if count <= MANY else
        f"{count} settings are too many for one chart: compare {MANY} or fewer at a time.")
    return Section(id="compare", title="Settings", lead=lead, body=join(_table(several), none),
                   data={"charts": charts})


def _table(several: Several) -> Html:
    """A row a setting: what differs, how many runs, and its numbers; columns that nobody has are left out."""
    found = {name: [column.of(setting.runs) for setting in several.settings] for name, column in COLUMNS.items()}
    there = [name for name, values in found.items() if any(value is not None for value in values)]
    keys = several.differs if len(several.differs) > 1 else ()  # one alone is the setting's name
    head = [tag("th", "setting", scope="col"), tag("th", "state", scope="col"),
            *(tag("th", SYMBOLS.get(key, key.replace("_", " ")), scope="col") for key in keys),
            tag("th", "runs", scope="col", class_="number"),
            *(tag("th", name, scope="col", class_="number") for name in there)]
    rows = []
    for place, setting in enumerate(several.settings):
        run = setting.runs[0]
        cells = [tag("td", value_of(run, key), data_value=run[key] if isinstance(run[key], int | float) else None)
                 for key in keys]
        numbers = [_cell(found[name][place], COLUMNS[name]) for name in there]
        state, said = standing(setting)
        rows.append(tag("tr", tag("th", setting.name, scope="row", data_value=place),
                        tag("td", tag("span", f"{SHAPES[state]} {state}", class_="state"), title=said, class_=state,
                            data_value=list(SHAPES).index(state)), *cells,
                        tag("td", str(len(setting.entries)), class_="number", data_value=len(setting.entries)),
                        *numbers))
    links = [part for name in there for part in (" · ", glossary.link(COLUMNS[name].metric, name))]
    legend = tag("p", "[ ]: 95 % interval over runs, left out where it is within the last digit", *links, class_="soft")
    return join(tag("div", tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows), id="settings"),
                    class_="wide", tabindex="0", role="region", aria_label="Table of settings"), legend)


def _cell(found: Found, column: Column) -> Html:
    if found is None:
        return tag("td", "–", class_="number")
    return tag("td", span(found[0], column), class_="number", data_value=rounded(found[0].mean),
               title=f"over {found[0].n} {found[1]}")


# -- charts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A number of a run over its steps, drawn by setting."""

    title: str
    of: Callable[[Evidence], Mapping[int, float]]
    percent: bool = False
    share: bool = False
    """Whether it lies between 0 and 1 by its nature; a reward does where all of them do."""
    along: str = "step"
    points: int = READINGS
    null: str | None = None
    """The column of `groups` that is its null."""
    reference: Mapping[str, float] | None = None
    note: str = ""


SPENT = "rollouts spent"


def _series(metric: str) -> Callable[[Evidence], Mapping[int, float]]:
    return lambda run: dict(run.series(metric))


CURVES: Mapping[str, Curve] = {
    "rank": Curve(title="Effective rank of a group's rollouts", of=rank_by_step, null="w_null",
                  reference={"P1: about 2": 2.0},
                  note="Figure 1 of P1. Dotted, in the same colour: the null, what the w alone allow."),
    "top1": Curve(title="Share of the first direction", of=FIGURES["top1"][1], share=True,
                  note="Figure 2 of P1."),
    "accuracy": Curve(title="Accuracy on unseen problems", of=FIGURES["accuracy"][1], percent=True,
                      note="Figure 3 of P1."),
    "accuracy-rollouts": Curve(title="Accuracy by rollouts spent", of=lambda run: dict(run.points()), percent=True,
                               along=SPENT, note="The same at equal cost."),
    "reward": Curve(title="Mean reward", of=_series("reward/mean"), points=BATCHES),
    "live": Curve(title="Live groups", of=live_by_step, percent=True, points=BATCHES),
    "distance": Curve(title="Distance past the bound, nats", of=_series("overshoot/distance"), points=BATCHES),
    "entropy": Curve(title="Entropy, nats a token", of=_series("entropy/mean"), points=BATCHES),
    "length": Curve(title="Length, tokens", of=_series("length/mean"), points=BATCHES),
}


TASKS = "Each task has rewards of its own: only lines of one task can be compared."


def _charts(several: Several) -> Iterator[dict[str, Any]]:
    for name, curve in CURVES.items():
        rows = list(_rows(several, curve))
        if len({row[curve.along] for row in rows}) < 2 or (curve.along == SPENT and _same_cost(several)):
            continue
        names = [setting.name for setting in several.settings]  # all, so that each has its colour in every chart
        spec = chart_of(rows, curve.title, names, x=curve.along, percent=curve.percent, reference=curve.reference,
                        description=f"{curve.title}, by setting: {', '.join(names)}.")
        note = TASKS if name == "reward" and "task" in several.differs else curve.note
        if any("null" in row for row in rows):
            spec["layer"].append(_null_layer(curve.along))
        yield {"name": name, "spec": spec, "rows": rows, "note": note, "steps": curve.along == "step"}


def _rows(several: Several, curve: Curve) -> Iterator[dict[str, Any]]:
    """A row a setting and step: mean, ends of the interval from three runs on, how many runs, and the null."""
    known = [curve.of(entry.evidence) for entry in several.entries]
    width = bucket(known, curve.points)
    share = curve.share or curve.percent or (
        curve is CURVES["reward"] and all(0 <= value <= 1 for line in known for value in line.values()))
    for setting in several.settings:
        lines = [thinned(curve.of(run), width) for run in setting.runs]
        null = dict(_mean(setting, [thinned(run.by_step(curve.null or ""), width) for run in setting.runs]))
        for place, value in _mean(setting, at_common_places(lines) if curve.along == SPENT else lines):
            found = within(from_three(value), 0.0, 1.0) if share else from_three(value)
            row = {curve.along: place, "name": setting.name, "value": rounded(found.mean), "low": rounded(found.low),
                   "high": rounded(found.high), "runs": found.n}
            row |= {"null": rounded(null[place].mean)} if place in null else {}
            yield {key: cell for key, cell in row.items() if cell is not None}


def _same_cost(several: Several) -> bool:
    """Whether so many steps cost the same in every run, so that a chart by rollouts is the chart by steps."""
    spent: dict[int, int] = {}
    return all(spent.setdefault(step, cost) == cost for entry in several.entries
               for (cost, _), (step, _) in zip(entry.evidence.points(), entry.evidence.points(by="step"), strict=True))


def at_common_places(lines: Sequence[Mapping[int, float]]) -> list[dict[int, float]]:
    """Lines that are known at different places, all at the first one's, as straight lines between their own.

    >>> at_common_places([{0: 0.0, 10: 1.0, 20: 2.0}, {0: 0.0, 15: 3.0}])
    [{0: 0.0, 10: 1.0}, {0: 0.0, 10: 2.0}]
    """
    known = [line for line in lines if line]
    places = [place for place in (known[0] if known else ()) if all(min(x) <= place <= max(x) for x in known)]
    return [dict(zip(places, at(sorted(line.items()), places), strict=True)) if line and places else {}
            for line in lines]


def _mean(setting: Setting, lines: Sequence[Mapping[int, float]]) -> list[tuple[int, Interval]]:
    """The mean over a setting's runs, a line each, with its interval."""
    by_run = dict(zip(map(id, setting.runs), lines, strict=True))
    return next(iter(curves(setting.runs, lambda run: by_run[id(run)]).values()), [])


def bucket(lines: Sequence[Mapping[int, float]], most: int) -> int:
    """How many places make a point, so that no line has more than `most`; 1 where none has anyway.

    >>> bucket([dict.fromkeys(range(30), 0.0)], 20), bucket([{0: 0.0, 500: 0.0}], 20)
    (2, 1)
    """
    return max((max(line) // most + 1 for line in lines if len(line) > most), default=1)


def thinned(line: Mapping[int, float], width: int) -> dict[int, float]:
    """The means over `width` places each, at the first of them.

    >>> thinned({0: 1.0, 1: 3.0, 2: 5.0}, 2)
    {0: 2.0, 2: 5.0}
    """
    found: dict[int, list[float]] = {}
    for place, value in line.items():
        found.setdefault(place // width * width, []).append(value)
    return {place: math.fsum(values) / len(values) for place, values in found.items()}


def _null_layer(x: str) -> Spec:
    """The null of each line, dotted in its colour."""
    return {"transform": [{"filter": "isValid(datum.null)"}],
            "mark": {"type": "line", "strokeWidth": 1.5, "strokeDash": [2, 3], "aria": False},
            "encoding": {"x": {"field": x, "type": "quantitative"},
                         "y": {"field": "null", "type": "quantitative", "title": None},
                         "color": {"field": "name", "type": "nominal"}}}


# -- every run -------------------------------------------------------------------------------------------------------


def _runs(several: Several) -> Section:
    """A row a run: the states of its own first screen, and the command that opens it."""
    rows = [_row(setting.name, entry) for setting in several.settings for entry in setting.entries]
    head = tag("tr", *(tag("th", word, scope="col")
                       for word in ("run", *TOPICS, "setting", "seed", "steps", "open it in full")))
    table = tag("div", tag("table", tag("thead", head), tag("tbody", *rows), id="states"), class_="wide", tabindex="0",
                role="region", aria_label="Table of runs")
    return Section(id="runs", title="Runs", lead="The four answers of each run's own report, by the same rules. A file "
                                                 "of evidence has none: they need the record.",
                   body=tag("details", tag("summary", _many(len(rows), "run")), table, open=len(rows) <= FOLDED))


TOPICS = ("Signal", "Credit", "Directions", "Optimiser")
FOLDED = 30
"""Runs from which on their table is folded up."""


def _row(setting: str, entry: Entry) -> Html:
    run, evidence = entry.run, entry.evidence
    states = [tag("td", "–") for _ in TOPICS] if run is None else [
        tag("td", tag("span", f"{SHAPES[answer.state]} {answer.state}", class_="state"), title=answer.sentence,
            class_=answer.state, data_topic=answer.topic.lower()) for answer in entry.answers]
    steps = f"{len(evidence.trained)}{'' if evidence.finished else ', not finished'}"
    how = "needs the record" if run is None else tag("code", f"creditscope report {shlex.quote(str(entry.path))}")
    return tag("tr", tag("th", shown(entry.name, LONGEST), scope="row"), *states, tag("td", setting),
               tag("td", value_of(evidence, "seed")), tag("td", steps), tag("td", how), data_run=entry.name)
