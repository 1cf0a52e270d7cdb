"""Faults of a run from its trainer's log and settings: `read` makes a Log, each of `rules` a Finding. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from creditscope.diagnosis.engine import Diagnosis

__all__ = ["doctor"]


def doctor(path: str | Path, config: str | Path | None = None, sets: Sequence[str] = ()) -> Diagnosis:
    """The findings of `creditscope doctor`: of a trainer's log, of TRL's output folder or of a run.

    `config` is a file of settings, `sets` are settings as "name=value".
    """
    from creditscope.diagnosis.engine import diagnose
    from creditscope.diagnosis.read import read

    return diagnose(read(path, None if config is None else Path(config), sets))
