"""The runs of a comparison: those that differ only in the seed are one setting, named by what differs.

They are read from folders of runs, files of evidence, and folders of either; what cannot be read is named and left out.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from creditscope.claims.evidence import APART, Evidence, from_json, places, read_evidence
from creditscope.claims.reading import credit_of, sweeps
from creditscope.diagnosis.engine import Diagnosis
from creditscope.diagnosis.of_record import diagnose_steps
from creditscope.errors import CreditscopeError
from creditscope.files.guards import resolved
from creditscope.report import claims
from creditscope.report.answers import Answer, answers
from creditscope.report.markup import shown
from creditscope.report.run import Run, read_run

LONGEST = 60


@dataclass(frozen=True)
class Entry:
    """A run of the comparison; a file of evidence has no record."""

    name: str
    path: Path
    evidence: Evidence
    run: Run | None

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """Of the record; of a file of evidence, by the metrics that it has."""
        evidence = self.evidence
        return diagnose_steps(evidence.config, evidence.columns) if self.run is None else self.run.diagnosis

    @cached_property
    def answers(self) -> list[Answer]:
        return [] if self.run is None else answers(self.run)


@dataclass(frozen=True)
class SettingRuns:
    name: str
    entries: tuple[Entry, ...]

    @property
    def runs(self) -> list[Evidence]:
        return [entry.evidence for entry in self.entries]


@dataclass(frozen=True)
class Several:
    """What was found under the paths, sorted by what differs."""

    settings: tuple[SettingRuns, ...]
    differs: tuple[str, ...]
    """Settings of `lab train` in which the runs differ, besides the seed."""
    faults: tuple[str, ...]
    paths: tuple[str, ...]
    """As given, for commands."""

    @property
    def entries(self) -> list[Entry]:
        return [entry for setting in self.settings for entry in setting.entries]


def read(paths: Sequence[Path], told: Callable[[int, int], None] = lambda done, total: None) -> Several:
    """The runs under some paths. A damaged run is a fault; no run at all is an error. `told(done, total)`: progress."""
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
    found = tuple(SettingRuns(name, tuple(family)) for name, family in zip(names, families, strict=True))
    return Several(found, differs, tuple(faults), tuple(map(str, paths)))


def _entry(place: Path, name: str, whole: bool) -> Entry:
    """A run. `whole` keeps its full settings, in which two folders "model" differ by path; evidence has no paths,
    so beside a file of evidence none are kept.
    """
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
    """Whether a run was begun there and has no step yet."""
    try:
        return (place / "run.json").exists() and not (place / "steps.jsonl").exists()
    except OSError:  # whoever reads it will say why it cannot be read
        return False


def _finite(run: Evidence) -> Evidence:
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
"""Settings by which runs are usually told apart, in order."""
SYMBOLS = {"group": "R", "inner_steps": "μ", "prompts": "P", "lr": "lr", "beta": "β", "beta1": "β₁", "beta2": "β₂"}


def labels(runs: Sequence[Evidence], differs: Sequence[str]) -> list[str]:
    """One name per setting: what differs, as far as it is needed to tell them apart."""
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
    usual = {key: _usual([run[key] for run in runs]) for key in keys}
    parts = [[_part(run, key) for key in keys if run[key] not in (None, "none", usual[key])] for run in runs]
    return [shown(", ".join(own or [_part(run, keys[-1])]), LONGEST) for run, own in zip(runs, parts, strict=True)]


def _usual(values: Sequence[Any]) -> Any:
    return next((value for value in values if 2 * values.count(value) > len(values)), None)


def _part(run: Evidence, key: str) -> str:
    if key in SYMBOLS:
        return f"{SYMBOLS[key]} = {run[key]}"
    return value_of(run, key) if key in ("model", "task", "method", "credit") else f"{key} {value_of(run, key)}"


def value_of(run: Evidence, key: str) -> str:
    """A setting in words: the method's credit where none was named, the end of a path."""
    if key == "credit":
        return str(run["credit"] or credit_of(run))
    if key == "model" and isinstance(run[key], str):
        return "/".join(run[key].rstrip("/").split("/")[-2:])
    return "–" if run[key] is None else str(run[key])


def _sortable(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return not number, float(value) if number else 0.0, str(value)
