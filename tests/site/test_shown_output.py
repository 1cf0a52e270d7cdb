"""What a page shows below a command is what the command prints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import run

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ("docs/index.md", "docs/tutorial.md")
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
    for part in shown.split("\n…\n"):
        before, found, rest = rest.partition(plain(part))
        assert found, f"{page}: creditscope {command} does not print {plain(part)!r} there, but {before!r}"


def test_the_tutorial_shows_output() -> None:
    assert [page for page, _, _ in commands()].count("docs/tutorial.md") >= 3
