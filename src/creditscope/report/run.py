"""A record as the report reads it. A part that is damaged is absent with a reason; the rest of the page stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from creditscope.errors import CreditscopeError
from creditscope.files.guards import resolved
from creditscope.runs import schema
from creditscope.runs.columns import Steps
from creditscope.runs.record import Record

Arrays = Mapping[str, NDArray[Any]]
KINDS = "biufU"
"""Kinds of arrays that a run writes, as numpy calls them: truth, numbers, text."""


@dataclass(frozen=True)
class Run:
    """What is on disk of one run."""

    name: str
    record: Record
    steps: Steps
    faults: list[str] = field(default_factory=list)
    """What could not be read, one sentence each: filled while sections are made."""

    @property
    def config(self) -> Mapping[str, Any]:
        return self.record.config

    @property
    def versions(self) -> Mapping[str, Any]:
        found = self.record.run.get("versions")
        return found if isinstance(found, dict) else {}

    @cached_property
    def trained(self) -> Steps:
        """The steps that sampled, without a last line that is an evaluation alone."""
        return self.steps.having(schema.ROLLOUTS_SPENT)

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) where the metric was recorded as a number."""
        at, values = self.steps.numbers(metric)
        return list(zip(self.steps.column("step").values[at].tolist(), values.tolist(), strict=True))

    def kept(self) -> list[int]:
        """Steps whose rollouts were kept."""
        return self.record.groups()

    def rollouts(self, step: int) -> Arrays | None:
        """The rollouts kept of a step, or None where they cannot be read."""
        return self._read(self.record.group, step)

    def readings(self) -> list[int]:
        """Steps that the microscope read."""
        return self.record.readings()

    def reading(self, step: int) -> Arrays | None:
        return self._read(self.record.reading, step)

    def probes(self) -> list[int]:
        """Steps at which a full probe read the optimiser."""
        return self.record.optimizer_readings()

    def probed(self, step: int) -> Arrays | None:
        return self._read(self.record.optimizer_reading, step)

    def _read(self, load: Callable[[int], Arrays], step: int) -> Arrays | None:
        try:
            found = load(step)
        except CreditscopeError as error:
            self._fault(str(error))
            return None
        for name, array in found.items():
            if array.dtype.kind not in KINDS:
                self._fault(f"{name} of step {step} is {array.dtype}, which no run writes")
        return {name: array for name, array in found.items() if array.dtype.kind in KINDS}

    def _fault(self, said: str) -> None:
        if said not in self.faults:
            self.faults.append(said)


def read_run(path: Path) -> Run:
    """A run by its folder."""
    record = Record.open(path)
    whole = resolved(path)
    # A seed alone says little: r8/seed-0.
    name = f"{whole.parent.name}/{whole.name}" if whole.name.startswith("seed-") else whole.name
    steps = record.columns()
    return Run(name or str(path), record, steps, record.told_missing(steps))
