"""A record as the report reads it. A damaged part is absent with a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from creditscope.diagnosis.engine import Diagnosis
from creditscope.diagnosis.of_record import diagnose_steps
from creditscope.errors import CreditscopeError
from creditscope.files.guards import resolved
from creditscope.runs.columns import Steps
from creditscope.runs.record import Record
from creditscope.runs.stopped import ended_by
from creditscope.runs.trained import trained

Arrays = Mapping[str, NDArray[Any]]
KINDS = "biufU"
"""Kinds of numpy arrays that a run writes: truth values, numbers, text."""


@dataclass(frozen=True)
class Run:
    name: str
    record: Record
    steps: Steps
    faults: list[str] = field(default_factory=list)
    """What could not be read, one sentence each; sections append to it."""

    @property
    def config(self) -> Mapping[str, Any]:
        return self.record.config

    @property
    def versions(self) -> Mapping[str, Any]:
        found = self.record.run.get("versions")
        return found if isinstance(found, dict) else {}

    @cached_property
    def trained(self) -> Steps:
        return trained(self.steps)

    @cached_property
    def ended_by(self) -> str:
        """The error that ended the run; empty where none did."""
        return ended_by(self.steps)

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The same findings as `creditscope doctor` has of this record."""
        return diagnose_steps(self.config, self.steps)

    def series(self, metric: str) -> list[tuple[int, float]]:
        at, values = self.steps.numbers(metric)
        return list(zip(self.steps.column("step").values[at].tolist(), values.tolist(), strict=True))

    def rollouts(self, step: int) -> Arrays | None:
        return self._read(self.record.group, step)

    def reading(self, step: int) -> Arrays | None:
        return self._read(self.record.reading, step)

    def probed(self, step: int) -> Arrays | None:
        return self._read(self.record.optimizer_reading, step)

    def _read(self, load: Callable[[int], dict[str, NDArray[Any]]], step: int) -> Arrays | None:
        found: dict[str, NDArray[Any]] | None
        try:
            found = load(step)
        except CreditscopeError as error:
            found, said = None, [str(error)]
        else:
            odd = [name for name, array in found.items() if array.dtype.kind not in KINDS]
            said = [f"{name} of step {step} is {found.pop(name).dtype}, which no run writes" for name in odd]
        self.faults.extend(fault for fault in said if fault not in self.faults)
        return found


def read_run(path: Path) -> Run:
    record = Record.open(path)
    whole = resolved(path)
    says_little = whole.name.startswith("seed-") or whole.name == "record"
    name = f"{whole.parent.name}/{whole.name}" if says_little else whole.name  # r8/seed-0
    steps = record.columns()
    return Run(name or str(path), record, steps, record.told_missing(steps))
