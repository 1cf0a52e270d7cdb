"""A few kills of a hundred (`make faults` has the rest), and five planted faults that the harness must notice."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from faults import kills
from faults.kills import REVEALED, Kill

SEEDS = {None: 7, "late_lines": 19}
"""None: kills that hit unfinished work, with and without a power cut. Of a control, 3 where none is named: few kills
until it shows."""


@pytest.fixture(scope="module")
def attack(forks: ProcessPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(so many kills, how) -> what was seen of runs of a very small model."""
    place = tmp_path_factory.mktemp("kills")
    times = {"mini": forks.submit(kills.reference, "mini", place).result()}

    def attacked(number: int, control: str | None = None, **how: Any) -> list[Kill]:
        (place / (control or "kills")).mkdir()
        seed = SEEDS.get(control, 3)
        return kills.attack(forks, place, times, number, 1, seed, lambda _: None, control=control, **how)

    return attacked


@pytest.mark.slow
def test_three_kills_lose_no_completed_step_and_every_run_is_resumed_bit_identically(attack: Any) -> None:
    found = attack(3, moments=("line", "operation"), power=0.5)
    assert [kill.lost for kill in found if kill.lost] == []
    assert sum(kill.killed for kill in found) >= 3
    assert {kill.identical for kill in found} == {None, True} or all(kill.identical for kill in found)
    assert any(kill.on_disk > 0 for kill in found)
    assert {kill.power for kill in found} == {False, True}


@pytest.mark.slow
@pytest.mark.parametrize("control", sorted(REVEALED))
def test_a_planted_fault_turns_the_harness_red(control: str, attack: Any) -> None:
    assert any(kill.lost for kill in attack(20, control, **REVEALED[control]))


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the harness saw of the packaged model, as `make faults` runs it."""
    out = tmp_path_factory.mktemp("kills") / "kills.json"
    command = [sys.executable, str(Path(__file__).with_name("kills.py")), "--kills", "10", "--workers", "1",
               "--settings", "plain", "full", "--controls", *sorted(REVEALED), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
    assert out.exists(), done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.nightly
def test_ten_kills_lose_no_completed_step_and_every_run_is_resumed_bit_identically(attacked: dict[str, Any]) -> None:
    summary = attacked["summary"]
    assert [kill["lost"] for kill in attacked["kills"] if kill["lost"]] == []
    assert summary["kills"] >= 10
    assert summary["identical"] == summary["trials"] > 0


@pytest.mark.nightly
def test_the_kills_came_at_moments_of_several_kinds_and_hit_unfinished_work(attacked: dict[str, Any]) -> None:
    hit = [kill for kill in attacked["kills"] if kill["killed"]]
    assert len({kill["moment"] for kill in hit}) >= 4
    assert any(kill["scraps"] for kill in hit)
    assert any(kill["on_disk"] > 0 for kill in hit)


@pytest.mark.nightly
def test_every_planted_fault_turns_the_harness_red_with_the_packaged_model(attacked: dict[str, Any]) -> None:
    assert all(attacked["summary"]["controls"][control] for control in REVEALED)
