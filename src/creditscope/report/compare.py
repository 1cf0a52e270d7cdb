"""Several runs on one page: each setting by its mean and, from three runs on, its 95 % interval."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from creditscope.claims.evidence import ENOUGH, Evidence
from creditscope.claims.page import FIGURES, curves
from creditscope.claims.reading import from_three
from creditscope.diagnosis.engine import SIGNS
from creditscope.diagnosis.finding import STATES
from creditscope.files.markup import Html, join, shown, tag
from creditscope.report import claims, glossary, methods
from creditscope.report.chart import Spec
from creditscope.report.chart import curves as chart_of
from creditscope.report.diagnosed import sign
from creditscope.report.lifetime import how_far, how_far_of
from creditscope.report.rewards import Notice
from creditscope.report.section import Section, missing, rounded
from creditscope.report.settings import (
    LONGEST,
    SYMBOLS,
    TELLING,
    Entry,
    SettingRuns,
    Several,
    given,
    name_of,
    value_of,
)
from creditscope.report.standing import (
    COLUMNS,
    FEW,
    TOPICS,
    Statistic,
    diagnosed,
    faults,
    findings,
    live_by_step,
    many,
    rank_by_step,
    span,
    standing,
)
from creditscope.report.steps import within
from creditscope.runs import schema
from creditscope.runs.compare import at
from creditscope.runs.intervals import Interval
from creditscope.runs.numbers import mean

READINGS, BATCHES = 100, 20
"""Points per line, of scheduled readings and of every batch: of a longer line a point is the mean of some steps."""


def first_screen(several: Several) -> Html:
    count, settings = len(several.entries), len(several.settings)
    config = several.entries[0].evidence
    same = [f"{SYMBOLS[key]} = {value_of(config, key)}" if key in SYMBOLS else f"{key} {value_of(config, key)}"
            for key in TELLING if key not in several.differs and config[key] not in (None, "none")]
    few = [setting.name for setting in several.settings if len(setting.entries) < ENOUGH]
    words = list(map(name_of, several.differs))
    seeds = ", and in the seed" if count > settings else ""
    told = [_diagnosis(several),
            *(tag("li", tag("strong", topic), tag("p", sentence), class_="answer", data_topic=topic.lower())
              for topic, sentence in findings(several))]
    return join(
        tag("h1", f"{many(count, 'run')} in {many(settings, 'setting')}"),
        _notice(several.notice) if several.notice else None,
        tag("p", tag("span", f"They differ in {', '.join(words)}{seeds}." if words else
                     "There is one run: creditscope report shows it in full." if count == 1 else
                     "They differ in the seed alone." if settings == 1 else "Their recorded settings are the same.",
                     id="differs"), " ", tag("span", ended(several), id="ended")),
        tag("ul", *told, class_="answers"),
        tag("p", *(tag("span", fact) for fact in same), class_="facts"),
        tag("p", f"No interval and no band, because {ENOUGH} runs are needed: ",
            "every setting." if len(few) == settings else f"{'; '.join(few)}." if len(few) <= FEW else
            f"{len(few)} of {settings} settings.", class_="missing", id="few")
        if few else None,
        _left_out(several.left_out))


def _left_out(told: Sequence[str]) -> Html | None:
    """What was not read; folded up where it would fill a screen."""
    if len(told) <= UNFOLDED:
        return join(*(tag("p", fault, class_="missing fault") for fault in told))
    return tag("details", tag("summary", f"{len(told)} notes on what was not read"),
               tag("ul", *(tag("li", fault, class_="fault") for fault in told)), class_="missing")


UNFOLDED = 2


def _notice(found: Notice) -> Html:
    """One line above everything else; which runs it is about is folded up."""
    line = join(tag("strong", *sign("watch"), class_="state"), f" {found.line}")
    said = tag("details", tag("summary", line), tag("p", found.details)) if found.details else tag("p", line)
    return tag("div", said, class_="notice watch", id="notice", role="note")


def _diagnosis(several: Several) -> Html:
    """The settings that are broken or to watch, each with why and with its remedy."""
    found = faults(several)
    state, said = (found[0].state, "") if found else diagnosed(several)
    each = [tag("li", tag("p", tag("span", *sign(one.state), class_="state"), " ", tag("strong", one.name),
                          f": {one.said}."), tag("p", tag("strong", "Change"), f": {one.change}.", class_="change")
                if one.change else None, class_=one.state, data_setting=one.name) for one in found[:FEW]]
    more = tag("p", f"{len(found) - FEW} more settings are broken or to watch: see the table of settings.") if len(
        found) > FEW else None
    return tag("li", tag("div", tag("strong", "Diagnosis"), tag("p", *sign(state), class_="state")),
               tag("div", tag("p", said) if said else tag("ul", *each, class_="faulty"), more),
               class_=f"answer {state}", data_topic="diagnosis", data_state=state)


def sections(several: Several, papers: bool = False) -> list[Section]:
    evidence = [entry.evidence for entry in several.entries]
    return [_compared(several), _runs(several), *([claims.of(evidence, several.paths)] if papers else []),
            methods.of([run.config for run in evidence], papers), glossary.section(papers=papers)]


def far(entry: Entry) -> str:
    """How far a run is: "finished, 40 of 40 steps"."""
    return how_far_of(entry.evidence) if entry.run is None else how_far(entry.run, time.time())


def ended(several: Several) -> str:
    """How many runs are finished, and of the others how far they are."""
    told = {entry.name: far(entry) for entry in several.entries}
    rest = [f"{shown(name, LONGEST)}: {said}" for name, said in told.items() if not said.startswith("finished")]
    if not rest:
        return "The run is finished." if len(told) == 1 else f"All {len(told)} runs are finished."
    more = f"; and {len(rest) - FEW} more" if len(rest) > FEW else ""
    return f"{len(told) - len(rest)} of {many(len(told), 'run')} finished; {'; '.join(rest[:FEW])}{more}."


MANY = 24
"""Settings that a chart can distinguish."""


def _compared(several: Several) -> Section:
    count = len(several.settings)
    charts = list(_charts(several)) if count <= MANY else []
    lead = ("A line per setting: mean over its runs, and the 95 % t-interval over seeds. A heading sorts the table; "
            "the pointer over a chart marks its step in all of them, and the table under a chart has its numbers.")
    none = None if charts else missing(
        "No step of these runs has been recorded yet." if count <= MANY else
        f"{count} settings are too many for one chart: compare {MANY} or fewer at a time.")
    return Section(id="compare", title="Settings", lead=lead, body=join(_table(several), none),
                   data={"charts": charts})


def _table(several: Several) -> Html:
    """One row per setting: what differs, how many runs, and its numbers; empty columns are left out."""
    found = {name: [column.of(setting.runs) for setting in several.settings] for name, column in COLUMNS.items()}
    there = [name for name, values in found.items() if any(value is not None for value in values)]
    keys = several.differs if len(several.differs) > 1 else ()  # one alone is the setting's name
    head = [tag("th", "setting", scope="col"), tag("th", "state", scope="col"),
            *(tag("th", name_of(key), scope="col") for key in keys),
            tag("th", "runs", scope="col", class_="number"),
            *(tag("th", name, scope="col", class_="number") for name in there)]
    rows = []
    for place, setting in enumerate(several.settings):
        run = setting.runs[0]
        cells = [tag("td", value_of(run, key), data_value=value if isinstance(value := given(run, key), int | float)
                     else None) for key in keys]
        numbers = [_cell(found[name][place], COLUMNS[name]) for name in there]
        state, said = standing(setting)
        rows.append(tag("tr", tag("th", setting.name, scope="row", data_value=place),
                        tag("td", tag("span", f"{SIGNS[state]} {state}", class_="state"), title=said, class_=state,
                            data_value=STATES.index(state)), *cells,
                        tag("td", str(len(setting.entries)), class_="number", data_value=len(setting.entries)),
                        *numbers))
    links = [part for name in there for part in (" · ", glossary.link(COLUMNS[name].metric, name))]
    legend = tag("p", "[ ]: 95 % interval over runs, left out where it is within the last digit", *links, class_="soft")
    return join(tag("div", tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows), id="settings"),
                    class_="wide", tabindex="0", role="region", aria_label="Table of settings"), legend)


def _cell(found: tuple[Interval, str] | None, column: Statistic) -> Html:
    if found is None:
        return tag("td", "–", class_="number")
    return tag("td", span(found[0], column), class_="number", data_value=rounded(found[0].mean),
               title=f"over {found[0].n} {found[1]}")


@dataclass(frozen=True, kw_only=True)
class Curve:
    title: str
    of: Callable[[Evidence], Mapping[int, float]]
    percent: bool = False
    share: bool = False
    """Whether it lies in [0, 1] by definition; a reward does where all rewards do."""
    along: str = "step"
    points: int = READINGS
    null: str | None = None
    """The column of `groups` that is its null."""
    note: str = ""


SPENT = "rollouts spent"


def _series(metric: str) -> Callable[[Evidence], Mapping[int, float]]:
    return lambda run: dict(run.series(metric))


CURVES: Mapping[str, Curve] = {
    "rank": Curve(title="Effective rank of a group's rollouts", of=rank_by_step, null="w_null",
                  note="Dotted, in the same colour: the null, what the w alone allow."),
    "top1": Curve(title="Share of the first direction", of=FIGURES["top1"][1], share=True),
    "accuracy": Curve(title="Accuracy on unseen problems", of=FIGURES["accuracy"][1], percent=True),
    "accuracy-rollouts": Curve(title="Accuracy by rollouts spent", of=lambda run: dict(run.points()), percent=True,
                               along=SPENT, note="The same at equal cost."),
    "reward": Curve(title="Mean reward", of=_series(schema.REWARD_MEAN), points=BATCHES),
    "live": Curve(title="Live groups", of=live_by_step, percent=True, points=BATCHES),
    "distance": Curve(title="Distance past the bound, nats", of=_series(schema.OVERSHOOT_DISTANCE), points=BATCHES),
    "entropy": Curve(title="Entropy, nats per token", of=_series(schema.ENTROPY_MEAN), points=BATCHES),
    "length": Curve(title="Length, tokens", of=_series(schema.LENGTH_MEAN), points=BATCHES),
}


TASKS = "Each task has rewards of its own: only lines of one task can be compared."


def _charts(several: Several) -> Iterator[dict[str, Any]]:
    for name, curve in CURVES.items():
        rows = list(_rows(several, curve))
        if len({row[curve.along] for row in rows}) < 2 or (curve.along == SPENT and _same_cost(several)):
            continue
        names = [setting.name for setting in several.settings]  # all, so that each has its colour in every chart
        spec = chart_of(rows, curve.title, names, x=curve.along, percent=curve.percent,
                        description=f"{curve.title}, by setting: {', '.join(names)}.")
        note = TASKS if name == "reward" and "task" in several.differs else curve.note
        if any("null" in row for row in rows):
            spec["layer"].append(_null_layer(curve.along))
        yield {"name": name, "spec": spec, "rows": rows, "note": note, "steps": curve.along == "step"}


def _rows(several: Several, curve: Curve) -> Iterator[dict[str, Any]]:
    """One row per setting and step: mean, interval from three runs on, number of runs, null."""
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
    """Whether equal steps cost equal rollouts in every run: then the chart by rollouts is the chart by steps."""
    spent: dict[int, int] = {}
    return all(spent.setdefault(step, cost) == cost for entry in several.entries
               for (cost, _), (step, _) in zip(entry.evidence.points(), entry.evidence.points(by="step"), strict=True))


def at_common_places(lines: Sequence[Mapping[int, float]]) -> list[dict[int, float]]:
    """Lines known at different places, interpolated at the places of the first.

    >>> at_common_places([{0: 0.0, 10: 1.0, 20: 2.0}, {0: 0.0, 15: 3.0}])
    [{0: 0.0, 10: 1.0}, {0: 0.0, 10: 2.0}]
    """
    known = [line for line in lines if line]
    places = [place for place in (known[0] if known else ()) if all(min(x) <= place <= max(x) for x in known)]
    return [dict(zip(places, at(sorted(line.items()), places), strict=True)) if line and places else {}
            for line in lines]


def _mean(setting: SettingRuns, lines: Sequence[Mapping[int, float]]) -> list[tuple[int, Interval]]:
    by_run = dict(zip(map(id, setting.runs), lines, strict=True))
    return next(iter(curves(setting.runs, lambda run: by_run[id(run)]).values()), [])


def bucket(lines: Sequence[Mapping[int, float]], most: int) -> int:
    """Places per point, so that no line has more than `most` points.

    >>> bucket([dict.fromkeys(range(30), 0.0)], 20), bucket([{0: 0.0, 500: 0.0}], 20)
    (2, 1)
    """
    return max((max(line) // most + 1 for line in lines if len(line) > most), default=1)


def thinned(line: Mapping[int, float], width: int) -> dict[int, float]:
    """Means over `width` places each, at the first of them.

    >>> thinned({0: 1.0, 1: 3.0, 2: 5.0}, 2)
    {0: 2.0, 2: 5.0}
    """
    found: dict[int, list[float]] = {}
    for place, value in line.items():
        found.setdefault(place // width * width, []).append(value)
    return {place: mean(values) for place, values in found.items()}


def _null_layer(x: str) -> Spec:
    return {"transform": [{"filter": "isValid(datum.null)"}],
            "mark": {"type": "line", "strokeWidth": 1.5, "strokeDash": [2, 3], "aria": False},
            "encoding": {"x": {"field": x, "type": "quantitative"},
                         "y": {"field": "null", "type": "quantitative", "title": None},
                         "color": {"field": "name", "type": "nominal"}}}


def _runs(several: Several) -> Section:
    rows = [_row(setting.name, entry) for setting in several.settings for entry in setting.entries]
    head = tag("tr", *(tag("th", word, scope="col")
                       for word in ("run", *TOPICS, "setting", "seed", "how far", "open it in full")))
    table = tag("div", tag("table", tag("thead", head), tag("tbody", *rows), id="states"), class_="wide", tabindex="0",
                role="region", aria_label="Table of runs")
    return Section(id="runs", title="Runs", lead="The four topics of each run's own report, with their states. A file "
                                                 "of evidence has none: they need the record.",
                   body=tag("details", tag("summary", many(len(rows), "run")), table, open=len(rows) <= FOLDED))


FOLDED = 30
"""Runs from which on their table is folded up."""


def _row(setting: str, entry: Entry) -> Html:
    run, evidence = entry.run, entry.evidence
    states = [tag("td", "–") for _ in TOPICS] if run is None else [
        tag("td", tag("span", f"{SIGNS[answer.state]} {answer.state}", class_="state"), title=answer.sentence,
            class_=answer.state, data_topic=answer.topic.lower()) for answer in entry.answers]
    how = "needs the record" if run is None else tag("code", f"creditscope report {shlex.quote(str(entry.path))}")
    return tag("tr", tag("th", shown(entry.name, LONGEST), scope="row"), *states, tag("td", setting),
               tag("td", value_of(evidence, "seed")), tag("td", far(entry)), tag("td", how), data_run=entry.name)
