"""A record as a trainer would leave it, from the lines and arrays that a test is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from creditscope import Record

Arrays = Mapping[str, NDArray[Any]]
Lines = Sequence[Mapping[str, Any]] | Mapping[int, Mapping[str, Any]]


def write_record(path: Path, lines: Lines, config: Mapping[str, Any] | None = None, *,
                 groups: Mapping[int, Arrays] | None = None, readings: Mapping[int, Arrays] | None = None,
                 probes: Mapping[int, Arrays] | None = None, versions: Mapping[str, str] | None = None) -> Path:
    """Lines by step, or one for each step from 0 on; `groups`, `readings` and `probes`: what was kept of some steps."""
    with Record.create(path, dict(config or {}), dict(versions or {})) as record:
        for kept, save in ((groups, record.save_group), (readings, record.save_reading),
                           (probes, record.save_optimizer)):
            for step, arrays in (kept or {}).items():
                save(step, arrays)
        for step, line in lines.items() if isinstance(lines, Mapping) else enumerate(lines):
            record.append(step, line)
    return path
