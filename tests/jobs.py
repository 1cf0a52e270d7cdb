"""Runs that a verb would start as processes, done in this one: for tests of what it makes of them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence

from cli import run
from creditscope.cli.processes import Job


def run_here(jobs: Sequence[Job], at_once: int, stop: Callable[[], bool],
             watch: Callable[[Sequence[str], Mapping[str, str | None]], None]) -> dict[str, str | None]:
    """In the place of `run_jobs`, one job after another."""
    ended: dict[str, str | None] = {}
    for job in jobs:
        with contextlib.redirect_stdout(io.StringIO()):
            code = run(*job.args)
        ended[job.name] = f"exit code {code}" if code else None
        watch([], ended)
    return ended
