"""The committed runs of benchmarks/clinic, judged: what its page claims must hold of the rules as they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from creditscope.diagnosis.confidence import counts

CLINIC = Path(__file__).parents[2] / "benchmarks" / "clinic"


@pytest.fixture(scope="module")
def judge() -> Any:
    sys.path.insert(0, str(CLINIC))
    try:
        import judge
    finally:
        sys.path.remove(str(CLINIC))
    return judge


@pytest.fixture(scope="module")
def judged(judge: Any) -> list[Any]:
    """Every committed run, without its prefixes and its remedies."""
    with judge.opened(judge.ARCHIVE) as folder:
        outcomes = {path.parent: json.loads(path.read_text()) for path in sorted(folder.glob("*/*/outcome.json"))}
        return [judge.judge(path, delays=False) for path, outcome in outcomes.items()
                if outcome["case"] in judge.BY_NAME and not outcome["remedy"]]


@pytest.mark.parametrize(("which", "least"), [("log", 0.8), ("callback", 0.95), ("record", 0.95)])
def test_the_first_cause_of_planted_faults_is_named(judged: list[Any], which: str, least: float) -> None:
    right = [found for run in judged if run.case.kind == "fault" and (found := run.right(which)) is not None]
    assert len(right) >= 25
    assert sum(right) >= least * len(right)


def test_no_healthy_run_is_broken_and_few_are_to_watch(judged: list[Any]) -> None:
    states = [said[1] for run in judged if run.case.kind == "healthy" for said in run.said.values()]
    assert len(states) >= 40
    assert "broken" not in states
    assert states.count("watch") <= 0.1 * len(states)


def test_the_counts_that_the_doctor_shows_are_those_of_the_committed_runs(judge: Any, judged: list[Any]) -> None:
    assert counts() == judge.confidence(judged), "python benchmarks/clinic/judge.py writes them again"
