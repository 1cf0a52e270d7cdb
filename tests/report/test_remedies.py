"""A record is told how to get what it lacks in the words of what wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from creditscope.diagnosis.trainers import is_script
from creditscope.report.build import page_of
from creditscope.report.remedies import CANNOT, COMMANDS, WORDS
from creditscope.report.run import read_run
from creditscope.report.section import lacking
from creditscope.runs.record import Record

SCRIPT: dict[str, Any] = {"engine": "trl", "trainer": "GRPOTrainer"}


@pytest.mark.parametrize("config", [{}, {"engine": "trl"}, {"trainer": "GRPOTrainer"}, SCRIPT | {"trainer": 3}])
def test_only_what_trls_callback_wrote_is_a_script(config: dict[str, Any]) -> None:
    assert is_script(SCRIPT)
    assert not is_script(config)


def test_a_script_has_no_flags_and_the_command_no_callback() -> None:
    every = [*COMMANDS.values(), *WORDS.values()]
    assert [one for one in every if "--" in one.script or "ScopeCallback" in one.train] == []


def test_what_the_callback_cannot_read_has_no_remedy_in_a_script() -> None:
    assert lacking("No sweep.", SCRIPT, "sweep") == f'<p class="missing">No sweep. {CANNOT}.</p>'
    assert "Get it with <code>creditscope lab train --probe full</code>." in lacking("No sweep.", {}, "sweep")
    assert "Get it with <code>ScopeCallback(trainer, every=10)</code>." in lacking("No token.", SCRIPT, "rollouts")


@pytest.mark.parametrize("config", [SCRIPT, {}])
def test_a_bare_record_of_a_script_is_shown_without_a_flag_of_the_command(tmp_path: Path,
                                                                          config: dict[str, Any]) -> None:
    with Record.create(tmp_path / "run", {"method": "trl_dapo"} | config, {}) as record:
        record.append(0, {"rollouts/spent": 8, "reward/mean": 0.5})
    page = page_of(read_run(tmp_path / "run"))
    flags = ("--keep-every", "--probe-every", "--probe light", "--eval-problems", "--scope")
    asked = [part for part in page.split('<p class="missing">')[1:] if any(flag in part.split("</p>")[0]
                                                                           for flag in flags)]
    assert bool(asked) == (config == {})
