"""Whether the rewards of several runs can be compared: one task, one reward function, one range.

    [min_t min_i r_i, max_t max_i r_i]      the range of a run, over its steps t and rollouts i

Runs of different rewards have curves that cannot be compared, and one cannot see it in the curves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from creditscope.diagnosis.thresholds import RANGE_APART
from creditscope.report.run import Run
from creditscope.runs import schema

if TYPE_CHECKING:
    from creditscope.report.settings import Entry

T = TypeVar("T")
Range = tuple[float, float]
SETTINGS = {"task": "tasks", "reward": "reward functions"}
"""Settings that say which reward a run has."""
NAMED = 3
"""Runs that are named for each reward."""
SAME = "Some runs have equal settings and an equal seed but other rewards: a reward function, data or code differs."


class Notice(NamedTuple):
    """Why rewards cannot be compared, in one line; and which runs have which."""

    line: str
    details: str = ""

    def __str__(self) -> str:
        return f"{self.line} {self.details}".strip()


def notice(names: Mapping[str, Sequence[Entry]]) -> Notice | None:
    """Where rewards differ, by the settings or else by the rewards that were seen. `names` are the settings' names."""
    for key, noun in SETTINGS.items():
        by_value = _by({(name, entry.name): str(entry.evidence[key]) for name, some in names.items() for entry in some
                        if entry.evidence[key] is not None})
        if len(by_value) > 1:
            return Notice(f"These runs have different {noun}: their reward curves cannot be compared.", "; ".join(
                f"{value:.60} in {_named(places, names)}" for value, places in by_value.items()) + ".")
    ranges = {(name, entry.name): found for name, some in names.items() for entry in some
              if entry.run is not None and (found := range_of(entry.run))}
    apart = _by(like_first(ranges))
    if len(apart) < 2:
        return None
    return Notice("The rewards lie in different ranges: unless the reward function is the same, the reward curves "
                  "cannot be compared.", "; ".join(f"from {low:.3g} to {high:.3g} in {_named(places, names)}"
                                            for (low, high), places in apart.items()) + ".")


def range_of(run: Run) -> Range | None:
    """The least and the largest reward of a run; None where it was not recorded, or where all rewards are equal, which
    says nothing of the range."""
    low, high = (run.trained.numbers(metric).values for metric in (schema.REWARD_MIN, schema.REWARD_MAX))
    return (float(low.min()), float(high.max())) if len(low) and len(high) and low.min() < high.max() else None


def like_first(ranges: Mapping[tuple[str, str], Range]) -> dict[tuple[str, str], Range]:
    """Each range in place of those that are alike: the first of them.

    >>> like_first({("a", "0"): (0.0, 1.0), ("b", "0"): (0.01, 0.99), ("c", "0"): (-1.0, 1.0)})
    {('a', '0'): (0.0, 1.0), ('b', '0'): (0.0, 1.0), ('c', '0'): (-1.0, 1.0)}
    """
    firsts: list[Range] = []
    found = {}
    for place, own in ranges.items():
        first = next((other for other in firsts if alike(own, other)), own)
        found[place] = first
        firsts += [first] if first not in firsts else []
    return found


def alike(one: Range, other: Range) -> bool:
    """max(|Δlow|, |Δhigh|) ≤ RANGE_APART · the wider of the two ranges."""
    wider = max(high - low for low, high in (one, other))
    return max(abs(one[0] - other[0]), abs(one[1] - other[1])) <= RANGE_APART * wider


def _by(values: Mapping[tuple[str, str], T]) -> dict[T, list[tuple[str, str]]]:
    """Value -> the places that have it, in order."""
    found: dict[T, list[tuple[str, str]]] = {}
    for place, value in values.items():
        found.setdefault(value, []).append(place)
    return found


def _named(places: Sequence[tuple[str, str]], names: Mapping[str, Sequence[Entry]]) -> str:
    """The settings that these runs are, where all runs of a setting are among them; else the runs."""
    here = {entry for _, entry in places}
    said = list(dict.fromkeys(setting if all(entry.name in here for entry in names[setting]) else entry
                              for setting, entry in places))
    more = f" and {len(said) - NAMED} more" if len(said) > NAMED else ""
    return ", ".join(f"({name})" if "," in name else name for name in said[:NAMED]) + more
