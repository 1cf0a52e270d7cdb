"""What a page shows below a command is what the command prints."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from cli import run

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ("README.md", "docs/index.md", "docs/tutorial.md")
BLOCK = re.compile(r"^```\n\$ creditscope ([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def commands() -> Iterator[tuple[str, str, str]]:
    """Page, command, and what is shown of its output; a line of … stands for lines that were left out."""
    for page in PAGES:
        for command, shown in BLOCK.findall((ROOT / page).read_text()):
            yield page, command, shown


def plain(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(("page", "command", "shown"), commands())
def test_a_page_shows_what_the_command_prints(page: str, command: str, shown: str, capsys: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert run(*shlex.split(command)) == 0
    rest = plain(capsys.readouterr().out)
    for part in filter(plain, re.split(r"^…\n", shown, flags=re.MULTILINE)):
        before, found, rest = rest.partition(plain(part))
        assert found, f"{page}: creditscope {command} does not print {plain(part)!r} there, but {before!r}"


METRICS = ("reward", "kl", "grad_norm", "frac_reward_zero_std", "entropy", "clip_ratio/region_mean")
ROW = re.compile(r"^\| (\d+) to (\d+) \| (.*) \|$", re.MULTILINE)


def mean(log: str, metric: str, first: int, last: int) -> float:
    """Over the steps first to last of a shipped log."""
    history = json.loads((ROOT / "examples" / "logs" / log / "trainer_state.json").read_text())["log_history"]
    return fmean(row[metric] for row in history if "reward" in row and first <= row["step"] <= last)


def test_the_tutorial_s_tables_are_means_of_the_logs() -> None:
    before, after = (ROOT / "docs" / "tutorial.md").read_text().split("## 6.")
    tables = {before: [("flat-trl", metric) for metric in METRICS],
              after: [("flat-trl", "reward"), ("repaired-trl", "reward")]}
    for text, columns in tables.items():
        rows = ROW.findall(text)
        assert len(rows) == 4
        for first, last, cells in rows:
            for cell, (log, metric) in zip(cells.split(" | "), columns, strict=True):
                found = mean(log, metric, int(first), int(last))
                assert float(cell) == pytest.approx(found, rel=5e-3, abs=1e-9)  # three digits


def test_the_tutorial_shows_output() -> None:
    assert [page for page, _, _ in commands()].count("docs/tutorial.md") >= 3
