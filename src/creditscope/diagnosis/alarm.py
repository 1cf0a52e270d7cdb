"""The diagnosis while a run goes on: each finding is told once, when it is broken for the first time. No torch.

    alarm = Alarm(config, every=10)
    for step, line in enumerate(lines):
        for text in alarm.see(step, line):
            print(text)

A diagnosis reads all n steps so far. It is made every max(every, n/SPREAD) steps, so that all of them together cost at
most about SPREAD times the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from creditscope.diagnosis.engine import SIGNS, Diagnosis
from creditscope.diagnosis.finding import Finding
from creditscope.diagnosis.log import LogRow
from creditscope.diagnosis.of_record import SOURCE, diagnose_log, log_of_rows, row_of_step
from creditscope.errors import CreditscopeError

SPREAD = 50
"""A diagnosis is at most n/SPREAD steps late: 2 % of the run so far."""
STOPS = (None, "broken")
"""Values of `stop_on`."""


class Alarm:
    """Reads the lines of a run as they are made."""

    def __init__(self, config: Mapping[str, Any], every: int = 1, stop_on: str | None = None,
                 source: str = SOURCE) -> None:
        if stop_on not in STOPS:
            raise CreditscopeError(f"stop_on={stop_on!r}: give 'broken' to end the run at the first broken finding, or "
                                   f"None")
        self._config, self._every, self._stop_on, self._source = config, max(1, every), stop_on, source
        self._rows: list[LogRow] = []
        self._told: set[str] = set()
        self._last = -1
        self.diagnosis: Diagnosis | None = None
        """The last one that was made."""
        self.stop = False
        """Whether a broken finding says that the run is to end."""

    def note(self, step: int, line: Mapping[str, Any]) -> None:
        """Add a step's metrics; those of a step that is known already are joined to it."""
        row = row_of_step(step + 1, {**line, "step": step})
        if row is None:
            return
        if self._rows and self._rows[-1].step == step:
            row = LogRow(step + 1, step, {**self._rows.pop().values, **row.values})
        self._rows.append(row)

    def due(self, step: int) -> bool:
        """Whether it is time for a diagnosis; a function of the steps alone, so that all ranks agree."""
        if step - self._last < max(self._every, step // SPREAD):
            return False
        self._last = step
        return True

    def see(self, step: int, line: Mapping[str, Any]) -> list[str]:
        """Add a step; where a diagnosis is due, one line for each finding that is broken for the first time."""
        self.note(step, line)
        return self.look(step) if self.due(step) else []

    def look(self, step: int) -> list[str]:
        """The findings of all steps so far that are broken for the first time."""
        found = self.diagnosis = diagnose_log(log_of_rows(self._config, self._rows, self._source))
        by_name = {each.rule: each for each in found.findings}
        new: dict[str, list[str]] = {}
        for each in found.findings:
            if each.state == "broken" and each.rule not in self._told:
                new.setdefault(each.follows[0] if each.follows else each.rule, []).append(each.rule)
        self.stop = self.stop or (bool(new) and self._stop_on == "broken")
        lines = []
        for cause, rules in new.items():
            if cause in self._told:  # an effect of what was told before
                lines += [_line(step, by_name[rule], by_name[cause].change, f" It follows from {cause}.")
                          for rule in rules]
            else:
                effects = [rule for rule in rules if rule != cause]
                follow = f" This explains: {', '.join(effects)}." if effects else ""
                lines.append(_line(step, by_name[cause], by_name[cause].change, follow))
            self._told |= {cause, *rules}
        return lines


def _line(step: int, found: Finding, change: str, more: str) -> str:
    """The headline of a finding, with the step at which it was seen."""
    return (f"{SIGNS['broken']} step {step}, {found.rule}: {found.sentence}.{more}"
            + (f" Change: {change}." if change else ""))
