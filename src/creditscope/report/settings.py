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

from creditscope.claims.evidence import APART, Evidence, families, from_json, places, read_evidence
from creditscope.claims.reading import credit_of
from creditscope.diagnosis.engine import Diagnosis
from creditscope.diagnosis.of_record import diagnose_steps
from creditscope.errors import CreditscopeError
from creditscope.files.guards import resolved
from creditscope.files.markup import shown
from creditscope.report import claims, rewards
from creditscope.report.answers import Answer, answers
from creditscope.report.run import Run, read_run
from creditscope.runs import schema

LONGEST, LABEL = 60, 90
"""Characters of a run's name, and of a setting's."""


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
    """Settings of `lab train` in which the runs differ, besides the seed; of TRL's own, `trl.NAME`."""
    notice: rewards.Notice | None
    """Why the rewards of the runs cannot be compared."""
    left_out: tuple[str, ...]
    """What was not read, and why."""
    paths: tuple[str, ...]
    """As given, for commands."""

    @property
    def faults(self) -> tuple[str, ...]:
        return (*([str(self.notice)] if self.notice else []), *self.left_out)

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
    alike = [[by_evidence[id(run)] for run in family]
             for family in families([entry.evidence for entry in entries], over=())]
    apart = [one for family in alike for one in without_copies(family)]
    if copies := len(entries) - sum(map(len, apart)):
        faults.append(f"{copies} of the runs {'was' if copies == 1 else 'were'} left out: another run has the same "
                      f"settings, the same seed and the same rewards")
    differs = differences([some[0].evidence.config for some in apart])
    apart.sort(key=lambda some: [_sortable(given(some[0].evidence, key)) for key in differs])
    names = labels([some[0].evidence for some in apart], differs, [some[0].name for some in apart])
    found = {name: tuple(some) for name, some in zip(names, apart, strict=True)}
    notice = rewards.notice(found) or (rewards.Notice(rewards.SAME) if len(apart) > len(alike) else None)
    return Several(tuple(SettingRuns(name, some) for name, some in found.items()), differs, notice, tuple(faults),
                   tuple(map(str, paths)))


def without_copies(family: Sequence[Entry]) -> list[list[Entry]]:
    """Runs of one setting as settings: one per seed in each. A run with the rewards of another of its seed is a copy:
    the longer one is taken. One with other rewards had another reward or other data: it is a setting of its own."""
    found: list[list[Entry]] = []
    for entry in sorted(family, key=_length, reverse=True):
        twins = [one for some in found for one in some
                 if all(one.evidence[key] == entry.evidence[key] for key in ("group", "seed"))]
        if any(_same_rewards(entry, twin) for twin in twins):
            continue
        if len(twins) == len(found):
            found.append([])
        found[len(twins)].append(entry)
    order = {id(entry): place for place, entry in enumerate(family)}
    return [sorted(some, key=lambda entry: order[id(entry)]) for some in found]


def _length(entry: Entry) -> tuple[int, int]:
    return len(entry.evidence.column("step")), len(entry.evidence.steps)


def _same_rewards(one: Entry, other: Entry) -> bool:
    """Whether two runs have equal mean rewards at the steps that both have."""
    mine, theirs = (dict(entry.evidence.series(schema.REWARD_MEAN)) for entry in (one, other))
    return all(mine[step] == theirs[step] for step in mine.keys() & theirs.keys())


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
    values: dict[str, list[str | None]] = {}
    for place, config in enumerate(map(_flat, configs)):
        for key, value in config.items():
            values.setdefault(key, [None] * len(configs))[place] = json.dumps(value, sort_keys=True, default=str)
    found = {key: _split(some) for key, some in values.items()
             if key not in APART and len({value for value in some if value is not None}) > 1}
    own = [key for key in found if not key.startswith("trl.")]
    more = [key for key in found if key.startswith("trl.") and found[key] not in [found[name] for name in own]]
    return tuple(sorted([*own, *more], key=lambda key: (TELLING.index(key) if key in TELLING else len(TELLING), key)))


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by name; of TRL's own those that the record has under no other name."""
    theirs = config.get("trl")
    theirs = theirs if isinstance(theirs, Mapping) else {}
    return {key: value for key, value in config.items() if key != "trl"} | {
        f"trl.{name}": value for name, value in theirs.items() if name not in config}


def _split(values: Sequence[object]) -> list[int]:
    """Which of the values are equal, whatever they are: the place of the first of each.

    >>> _split(["a", "b", "a"]), _split([1, 2, 1])
    ([0, 1, 0], [0, 1, 0])
    """
    return [values.index(value) for value in values]


TELLING = ("model", "task", "reward", "method", "credit", "brake", "adapt", "group", "inner_steps", "optimizer", "lr",
           "beta", "beta1", "beta2")
"""Settings by which runs are usually told apart, in order."""
SYMBOLS = {"group": "R", "inner_steps": "μ", "prompts": "P", "lr": "lr", "beta": "β", "beta1": "β₁", "beta2": "β₂"}


def labels(runs: Sequence[Evidence], differs: Sequence[str], folders: Sequence[str]) -> list[str]:
    """One name per setting: every telling setting that differs, and of the others those that are needed to tell the
    settings apart. Equal names have the folder beside them, a long one has it in its place."""
    if not differs:
        return [shown(run.subject, LONGEST) for run in runs] if len(runs) == 1 else _unique(folders)
    keys = [key for key in differs if key in TELLING or key in SYMBOLS]
    for key in differs:
        if key not in keys and not _determined(runs, key, keys):
            keys.append(key)
    names = [", ".join(_part(run, key) for key in keys) for run in runs]
    told = [name if names.count(name) == 1 else f"{name} ({folder})"
            for name, folder in zip(names, folders, strict=True)]
    return _unique([name if len(name) <= LABEL else folder for name, folder in zip(told, folders, strict=True)])


def _determined(runs: Sequence[Evidence], key: str, keys: Sequence[str]) -> bool:
    """Whether runs that are equal in all of `keys` are equal in `key` too."""
    seen: dict[tuple[str, ...], str] = {}
    return all(seen.setdefault(tuple(_part(run, other) for other in keys), _part(run, key)) == _part(run, key)
               for run in runs)


def _unique(names: Sequence[str]) -> list[str]:
    short = [shown(name, LABEL) for name in names]
    return short if len(set(short)) == len(short) else [f"{number}: {name}" for number, name in
                                                        enumerate(short, start=1)]


def _part(run: Evidence, key: str) -> str:
    if key in SYMBOLS:
        return f"{SYMBOLS[key]} = {value_of(run, key)}"
    return value_of(run, key) if key in ("model", "task", "method", "credit") else (
        f"{name_of(key)} {value_of(run, key)}")


def name_of(key: str) -> str:
    """A setting's symbol, or its name in words; TRL's settings as TRL spells them.

    >>> name_of("inner_steps"), name_of("max_tokens"), name_of("trl.loss_type")
    ('μ', 'max tokens', 'loss_type')
    """
    return key.removeprefix("trl.") if key.startswith("trl.") else SYMBOLS.get(key, key.replace("_", " "))


def given(run: Evidence, key: str) -> Any:
    """A setting of a run, or None; of TRL's own, `trl.NAME`."""
    theirs = run["trl"] if key.startswith("trl.") else None
    return theirs.get(key.removeprefix("trl.")) if isinstance(theirs, Mapping) else run[key]


def value_of(run: Evidence, key: str) -> str:
    """A setting in words: the method's credit where none was named, the end of a path."""
    value = given(run, key)
    if key == "credit":
        return str(value or credit_of(run))
    if key == "model" and isinstance(value, str):
        return "/".join(value.rstrip("/").split("/")[-2:])
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _sortable(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return not number, float(value) if number else 0.0, str(value)
