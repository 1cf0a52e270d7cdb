"""Ten kills of a hundred (`make faults` has the rest), and five planted faults that the harness must notice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faults.kills import REVEALED

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the harness saw, in a process of its own: it forks, and a process that has trained should not."""
    out = tmp_path_factory.mktemp("kills") / "kills.json"
    command = [sys.executable, str(Path(__file__).with_name("kills.py")), "--kills", "10", "--workers", "1",
               "--settings", "plain", "full", "--controls", *sorted(REVEALED), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
    assert out.exists(), done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_ten_kills_lose_no_completed_step_and_every_run_is_resumed_bit_identically(attacked: dict[str, Any]) -> None:
    summary = attacked["summary"]
    assert [kill["lost"] for kill in attacked["kills"] if kill["lost"]] == []
    assert summary["kills"] >= 10
    assert summary["identical"] == summary["trials"] > 0


def test_the_kills_came_at_moments_of_several_kinds_and_hit_unfinished_work(attacked: dict[str, Any]) -> None:
    kills = [kill for kill in attacked["kills"] if kill["killed"]]
    assert len({kill["moment"] for kill in kills}) >= 4
    assert any(kill["scraps"] for kill in kills)
    assert any(kill["on_disk"] > 0 for kill in kills)


@pytest.mark.parametrize("control", sorted(REVEALED))
def test_a_planted_fault_turns_the_harness_red(control: str, attacked: dict[str, Any]) -> None:
    assert attacked["summary"]["controls"][control]
