"""Arguments of a callback or hook: counts, and a folder that can take its record."""

from __future__ import annotations

from pathlib import Path

from creditscope.diagnosis.alarm import STOPS
from creditscope.errors import CreditscopeError
from creditscope.runs.record import Record


def check_counts(every: object, groups: object) -> None:
    """Refuse what is no schedule."""
    if not _counts(every):
        raise CreditscopeError(f"every is the number of optimiser steps between readings, a whole number of at "
                               f"least 1, got {every!r}")
    if groups is not None and not _counts(groups):
        raise CreditscopeError(f"groups is how many of them a reading takes, a whole number of at least 1, or None "
                               f"for all; got {groups!r}")


def check_stop(alarm: bool, stop_on: str | None) -> None:
    """Refuse a stop that no alarm would call."""
    if stop_on not in STOPS or (stop_on and not alarm):
        raise CreditscopeError(f"stop_on={stop_on!r} with alarm={alarm}: give stop_on='broken' to end the training at "
                               f"the first broken finding, which needs alarm=True, or None")


def other_content(out: Path) -> str | None:
    """Why no record can be written there, where it holds anything but a run."""
    if out.exists() and not out.is_dir():
        return f"{out} is a file"
    if not out.is_dir() or (out / "run.json").exists():
        return None
    found = sorted(entry.name for entry in out.iterdir() if entry.name != "run.lock")
    return f"{out} is not empty (it holds {found[0]!r})" if found else None


def holds_run(out: Path) -> bool:
    """Whether steps are recorded there; a run that never took one may be written over."""
    return (out / "run.json").exists() and bool(Record.open(out).steps())


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
