"""Where the output is no terminal it has 80 columns, and no table breaks a number."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cli import run
from creditscope.cli.main import complain
from creditscope.cli.output import Output, fitting
from each import each

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests" / "diagnosis" / "logs"
OLD = ROOT / "tests" / "runs" / "record_0.1"
DUMPS = ROOT / "tests" / "offline" / "dumps"


@pytest.fixture(autouse=True)
def _no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")


def lines_of(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    """What a command prints but for its Next line, which is a command to copy and not wrapped."""
    assert run(*words) == 0
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("Next: ")]


@each("words", [
    ("list", "methods"), ("list", "methods", "--dialects"), ("list", "methods", "dapo"), ("list", "credits"),
    ("list", "credits", "monte_carlo"), ("list", "brakes"), ("papers", "check"),
    ("papers", "check", ROOT / "results" / "p1-tiny"), ("papers", "check", ROOT / "results" / "p1-tiny", "--all"),
    ("doctor", LOGS / "ours-fell"), ("doctor", LOGS / "ours-fell", "--why"), ("doctor", LOGS),
    ("inspect", OLD, "--why"), ("inspect", OLD, OLD), ("inspect", OLD, "--prefix"),
    ("inspect", OLD, "--prefix", "--method", "grpo"), ("inspect", ROOT / "examples" / "completions", "--why"), ("env",),
])
def test_a_command_prints_at_most_80_columns(words: tuple[object, ...], capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, *words)
    assert len(lines) > 5
    assert [line for line in lines if len(line.rstrip()) > 80] == []


def test_a_report_and_a_comparison_print_at_most_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("creditscope.cli.compare.can_draw", lambda: False)
    shutil.copytree(OLD, "run")
    shutil.copytree(ROOT / "results" / "credit-tiny", "credit")
    for words in (("report", "run"), ("lab", "compare", "credit", "--no-run", "--out", "credit")):
        assert [line for line in lines_of(capsys, *words) if len(line.rstrip()) > 80] == []


def test_columns_that_do_not_fit_follow_below_beside_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    # Widths with three columns between cells: 7, then 33 each: 7 + 33 + 33 ≤ 80 < 7 + 99.
    headers = ["name", *(letter * 30 for letter in "abc")]
    Output().console().print_columns(headers, [["x", "1", "2", "3"], ["y", "[bold]", "5", "6"]])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]
    assert lines == [["name", "a" * 30, "b" * 30], ["x", "1", "2"], ["y", "[bold]", "5"],
                     ["name", "c" * 30], ["x", "3"], ["y", "6"]]
    assert fitting([7, 33, 33, 33], 106) == [[0, 1, 2, 3]]


def test_the_variable_columns_widens_the_output(capsys: pytest.CaptureFixture[str],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    for given, width in (("200", 200), ("0", 80), ("wide", 80), ("", 80)):
        monkeypatch.setenv("COLUMNS", given)
        assert Output().console().width == width
    monkeypatch.setenv("COLUMNS", "200")
    assert any(len(line.rstrip()) > 120 for line in lines_of(capsys, "list", "methods"))


def test_an_error_is_one_line_in_a_file_and_wrapped_between_words_on_a_terminal(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "no such thing; " * 10 + "see --a-flag-that-is-long " + "x" * 100
    complain(text)
    assert capsys.readouterr().err == f"creditscope: {text}\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    complain(text)
    said = capsys.readouterr().err
    assert said.split() == f"creditscope: {text}".split()
    assert [len(line) for line in said.splitlines() if len(line) > 80] == [100]
