"""How far a run is: finished, still going, or stopped early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from creditscope.claims.evidence import Evidence
from creditscope.report.run import Run
from creditscope.runs import schema
from creditscope.runs.columns import Steps
from creditscope.runs.compare import is_finished

SILENCE = 10
"""Longest steps without a new one after which an unfinished run is said to have stopped."""
PATIENCE = 60.0
"""Seconds of silence that are ignored, however short the steps are."""


def how_far(run: Run, now: float) -> str:
    """"finished, 40 of 40 steps". An unfinished run has stopped where its last line says so, or when nothing was
    written for long:

        now − last write > max(SILENCE · longest step, PATIENCE)
    """
    of = counted(run.config, run.trained)
    if run.ended_by:  # after all steps too: the last evaluation may fail
        return f"stopped early, {of}"
    if is_over(run.config, run.trained) or is_finished(run.steps):
        return f"finished, {of}"
    try:
        silence = now - (run.record.path / "steps.jsonl").stat().st_mtime
    except OSError:
        return f"not finished, {of}"
    longest = max((time for _, time in run.series(schema.TIME_STEP)), default=0.0)
    return f"stopped early, {of}" if silence > max(SILENCE * longest, PATIENCE) else f"still going, {of}"


def how_far_of(evidence: Evidence) -> str:
    """The same of a file of evidence, which does not say when it was written."""
    over = evidence.finished or is_over(evidence.config, evidence.trained)
    return f"{'finished' if over else 'not finished'}, {counted(evidence.config, evidence.trained)}"


def is_over(config: Mapping[str, Any], trained: Steps) -> bool:
    """Whether all planned steps were made, or all rollouts of the budget were spent. TRL's runs end so, without the
    last evaluation that `is_finished` looks for."""
    planned, budget = config.get("steps"), config.get("rollouts")
    spent = trained.numbers(schema.ROLLOUTS_SPENT).values.sum()
    return (isinstance(planned, int) and 0 < planned <= len(trained)) or (
        isinstance(budget, int) and 0 < budget <= spent)


def counted(config: Mapping[str, Any], trained: Sequence[Any]) -> str:
    planned = config.get("steps")
    return f"{len(trained)} of {planned} steps" if isinstance(planned, int) else f"{len(trained)} steps"
